"""The two storages mean the same: numpy's, and torch's index kernels, which a CPU also has."""

from __future__ import annotations

import pytest
import torch
from gil_support import lets_others_run

from p2pkv.kv import PagedCache
from p2pkv.kv.copiers import BATCH_ITEMS, SMALL_PUT, Columns, DeviceStorage, HostStorage, Uploads
from p2pkv.kv.layouts import ITEM_BYTES, Rows, locate


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


def test_rows_on_a_grid_that_is_finer_than_they_are_wide() -> None:
    """More of them than numpy is given at once."""
    count = BATCH_ITEMS + 5
    rows = Rows(9, 2, 4 * torch.randperm(count).numpy(), 3)
    memory = torch.randint(0, 256, (2 + 12 * count - 3,), dtype=torch.uint8)
    expected = torch.stack([memory[2 + 3 * each :][:9] for each in rows.index.tolist()])
    flat, out = memory.clone(), torch.zeros(9 * count, dtype=torch.uint8)
    HostStorage(flat).take(rows, out)
    assert torch.equal(out.view(count, 9), expected)
    HostStorage(flat).put(rows, 255 - out)
    between = torch.ones(2 + 12 * count - 3, dtype=torch.bool)
    for each in rows.index.tolist():
        between[2 + 3 * each :][:9] = False
    assert torch.equal(flat[between], memory[between])
    assert torch.equal(flat[~between], 255 - memory[~between])


@pytest.mark.parametrize("tokens", [(0, 8 * 6), (8, 8 * 6 - 3)])
def test_large_rows_in_padded_pages_are_put_as_large_items(tokens: tuple[int, int]) -> None:
    """States of DeepSeek V4's compressors: rows of 4,096 bytes in pages of a multiple of 576."""
    rows, row, page, layers, blocks = 8, 4096, 57 * 576, 2, 7
    flat = torch.randint(0, 256, (blocks * layers * page,), dtype=torch.uint8)
    views = [
        flat.as_strided((blocks, 1, rows, row), (layers * page, row, row, 1), layer * page)
        for layer in range(layers)
    ]
    cache, tables = PagedCache.from_tensors(views, block_size=rows), ([3, 6, 1, 5, 2, 4],)
    out = torch.zeros(cache.nbytes(layers, *tokens, 1), dtype=torch.uint8)
    cache.gather(out, (0, layers), tokens, (0, 1), tables)
    ((span, cut, _),) = cache.parts(out, (0, layers), tokens, (0, 1), tables)
    assert len(locate(span, cut, SMALL_PUT).index) == len(out) // ITEM_BYTES
    expected = torch.stack([view[tables[0], 0].reshape(-1, row)[slice(*tokens)] for view in views])
    assert torch.equal(out.view(layers, -1, row), expected)
    before = flat.clone()
    cache.scatter(~out, (0, layers), tokens, (0, 1), tables)
    after = torch.stack([view[tables[0], 0].reshape(-1, row)[slice(*tokens)] for view in views])
    assert torch.equal(after, ~expected)
    cache.scatter(out, (0, layers), tokens, (0, 1), tables)
    assert torch.equal(flat, before)


@pytest.mark.parametrize("what", ["take", "put"])
def test_the_gil_is_free_during_a_copy(what: str) -> None:
    storage = HostStorage(torch.zeros(32 << 20, dtype=torch.uint8))
    rows = Rows(1 << 18, 0, torch.randperm(128).numpy())
    buffer = torch.zeros(32 << 20, dtype=torch.uint8)
    assert lets_others_run(lambda: getattr(storage, what)(rows, buffer)), "the copies held the GIL"


@pytest.mark.parametrize("element", [1, 2, 4, 8])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_numpy_and_torch_take_and_put_the_same_columns(element: int, shift: int) -> None:
    """[elements, columns] in memory, from an address that is no multiple of an element's size."""
    count, elements, room = 3, 7, 5
    step = room * element
    columns = Columns(shift + element, count, elements, element, step)
    memory = torch.randint(0, 256, (shift + (elements + 1) * step,), dtype=torch.uint8)
    source = torch.randint(0, 256, (shift + count * elements * element,), dtype=torch.uint8)[shift:]
    matrix = memory[shift : shift + elements * step].view(elements, room, element)[:, 1 : 1 + count]
    uploads = Uploads(torch.device("cpu"), torch.int64)
    for kind in (HostStorage, lambda flat: DeviceStorage(flat, uploads)):
        flat, out = memory.clone(), torch.zeros(shift + source.numel(), dtype=torch.uint8)[shift:]
        storage = kind(flat)
        storage.take_columns(columns, out)
        assert torch.equal(out.view(count, elements, element), matrix.swapaxes(0, 1))
        storage.put_columns(columns, source)
        expected = memory.clone()
        put = expected[shift : shift + elements * step].view(elements, room, element)[:, 1 : 1 + count]
        put[...] = source.view(count, elements, element).swapaxes(0, 1)
        assert torch.equal(flat, expected)
