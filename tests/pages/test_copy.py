"""The two arenas mean the same: numpy's, and torch's index kernels, which a CPU also has."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from p2pkv.pages.copy import DeviceArena, HostArena
from p2pkv.pages.rows import Rows


@pytest.mark.parametrize(("atom", "base"), [(1, 0), (6, 5), (8, 8), (64, 0)])
def test_numpy_and_torch_take_and_put_the_same_rows(atom: int, base: int) -> None:
    memory = torch.randint(0, 256, (base + 20 * atom + atom // 2,), dtype=torch.uint8)
    rows = Rows(atom, base, torch.randperm(20)[:13].numpy())
    source = torch.randint(0, 256, (13 * atom,), dtype=torch.uint8)
    taken, left = [], []
    for kind in (HostArena, DeviceArena):
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
    """With a switch interval of an hour, this thread runs only while the other has let go of the GIL."""
    arena = HostArena(torch.zeros(32 << 20, dtype=torch.uint8))
    rows = Rows(1 << 18, 0, torch.randperm(128).numpy())
    buffer = torch.zeros(32 << 20, dtype=torch.uint8)
    copies: list[tuple[float, float]] = []
    turns: list[float] = []

    def copy() -> None:
        for _ in range(20):
            start = time.perf_counter()
            getattr(arena, what)(rows, buffer)
            copies.append((start, time.perf_counter()))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        thread = threading.Thread(target=copy)
        thread.start()
        while thread.is_alive():
            turns.append(time.perf_counter())
            time.sleep(0.0002)
    finally:
        sys.setswitchinterval(interval)
    assert len(copies) == 20
    middles = [(start + (stop - start) / 4, stop - (stop - start) / 4) for start, stop in copies]
    assert any(start < turn < stop for start, stop in middles for turn in turns), "the copies held the GIL"
