"""Copies on a CPU: other threads run meanwhile; columns. test_rectangles.py has which bytes are copied."""

import pytest
import torch

from p2pkv.kv import PagedCache, copiers, host, layouts
from support.gil import lets_others_run


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("tokens", [8192, 8191], ids=["listed-rows", "blocks"])
def test_the_gil_is_free_during_a_copy(way: str, tokens: int) -> None:
    cache = PagedCache.from_tensors([torch.zeros(128, 1, 64, 4096, dtype=torch.uint8)], block_size=64)
    buffer = torch.zeros(tokens * 4096, dtype=torch.uint8)
    tables = (torch.randperm(128).tolist(),)
    copy = getattr(cache, way)
    assert lets_others_run(lambda: copy(buffer, (0, 1), (0, tokens), (0, 1), tables)), "the GIL was held"


@pytest.mark.parametrize("element", [1, 2, 4, 8])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_numpy_and_torch_take_and_put_the_same_columns(element: int, shift: int) -> None:
    """[elements, columns] in memory, from an address that is no multiple of an element's size."""
    count, elements, room = 3, 7, 5
    step = room * element
    columns = layouts.Columns(shift + element, count, elements, element, step)
    memory = torch.randint(0, 256, (shift + (elements + 1) * step,), dtype=torch.uint8)
    source = torch.randint(0, 256, (shift + count * elements * element,), dtype=torch.uint8)[shift:]
    matrix = memory[shift : shift + elements * step].view(elements, room, element)[:, 1 : 1 + count]
    for views in (host.columns_on_host, copiers.columns_on_device):
        flat, out = memory.clone(), torch.zeros(shift + source.numel(), dtype=torch.uint8)[shift:]
        memory_view, dense = views(flat, columns, out)
        dense[...] = memory_view
        assert torch.equal(out.view(count, elements, element), matrix.swapaxes(0, 1))
        memory_view, dense = views(flat, columns, source)
        memory_view[...] = dense
        expected = memory.clone()
        put = expected[shift : shift + elements * step].view(elements, room, element)[:, 1 : 1 + count]
        put[...] = source.view(count, elements, element).swapaxes(0, 1)
        assert torch.equal(flat, expected)
