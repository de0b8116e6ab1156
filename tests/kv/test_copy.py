"""The two storages mean the same: numpy's, and torch's index kernels, which a CPU also has."""

from __future__ import annotations

import pytest
import torch
from gil_support import lets_others_run

from p2pkv.kv.copiers import DeviceStorage, HostStorage, Uploads
from p2pkv.kv.layouts import Rows


@pytest.mark.parametrize(("atom", "base"), [(1, 0), (6, 5), (8, 8), (64, 0)])
def test_numpy_and_torch_take_and_put_the_same_rows(atom: int, base: int) -> None:
    memory = torch.randint(0, 256, (base + 20 * atom + atom // 2,), dtype=torch.uint8)
    rows = Rows(atom, base, torch.randperm(20)[:13].numpy())
    source = torch.randint(0, 256, (13 * atom,), dtype=torch.uint8)
    taken, left = [], []
    uploads = Uploads(torch.device("cpu"), torch.int64)
    for kind in (HostStorage, lambda flat: DeviceStorage(flat, uploads)):
        flat = memory.clone()
        out = torch.zeros(13 * atom, dtype=torch.uint8)
        kind(flat).take(rows, out)
        kind(flat).put(rows, source)
        taken.append(out)
        left.append(flat)
    expected = memory[base : base + 20 * atom].view(20, atom)
    assert torch.equal(taken[0].view(13, atom), expected[torch.from_numpy(rows.index)])
    assert torch.equal(taken[0], taken[1])
    assert torch.equal(left[0], left[1])
    assert not torch.equal(left[0], memory)


@pytest.mark.parametrize("what", ["take", "put"])
def test_the_gil_is_free_during_a_copy(what: str) -> None:
    storage = HostStorage(torch.zeros(32 << 20, dtype=torch.uint8))
    rows = Rows(1 << 18, 0, torch.randperm(128).numpy())
    buffer = torch.zeros(32 << 20, dtype=torch.uint8)
    assert lets_others_run(lambda: getattr(storage, what)(rows, buffer)), "the copies held the GIL"
