"""Copies on a CPU, by numpy; and torch's index kernels, which a CPU also has, mean the same."""

from __future__ import annotations

import pytest
import torch

from p2pkv.kv import PagedCache, host
from p2pkv.kv.copiers import StorageCopier, columns_on_device
from p2pkv.kv.host import HostCopier, columns_on_host
from p2pkv.kv.layouts import Columns, pages_of
from support.gil import lets_others_run

ROWS, ROW, LAYERS, BLOCKS = 8, 96, 3, 9
TABLE = [3, 6, 7, 8, 5, 2]  # three of them follow each other


def layers_at(flat: torch.Tensor, offsets: list[int]) -> list[torch.Tensor]:
    """Layers of padded pages side by side in a block, which begin at these offsets."""
    return [
        flat.as_strided((BLOCKS, 1, ROWS, ROW), (4 * 900, ROW, ROW, 1), 900 * layer + offset)
        for layer, offset in enumerate(offsets)
    ]


@pytest.mark.parametrize("offsets", [[0, 0, 0], [0, 5, 0]], ids=["evenly-spaced", "not"])
@pytest.mark.parametrize("tokens", [(0, 48), (8, 45), (3, 7), (3, 8), (13, 17), (5, 41)])
@pytest.mark.parametrize(
    ("worth", "large", "many"),
    [(1, 1 << 30, 99), (1 << 30, 1 << 30, 99), (1 << 30, 1 << 30, 1), (1, 1, 99)],
    ids=["each-run", "together", "by-layer", "listed"],
)
def test_numpy_and_torch_copy_the_same_rows_and_no_others(
    offsets: list[int],
    tokens: tuple[int, int],
    worth: int,
    large: int,
    many: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows listed; or blocks one by one, or several at once, of all layers or, in a scatter, one by one.
    Layers lie evenly, or do not."""
    monkeypatch.setattr(host, "WORTH_BYTES", worth)
    monkeypatch.setattr(host, "WORTH_PUTTING", worth)
    monkeypatch.setattr(host, "LONG_BYTES", 1)
    monkeypatch.setattr(host, "MANY_BLOCKS", many)
    monkeypatch.setattr(host, "LARGE_BYTES", large)
    monkeypatch.setattr(host, "BATCH_BYTES", 2 * ROWS * ROW * LAYERS)
    flat = torch.randint(0, 256, (BLOCKS * 4 * 900,), dtype=torch.uint8)
    cache = PagedCache.from_tensors(layers_at(flat, offsets), block_size=ROWS)
    assert isinstance(cache.copier, HostCopier)
    out = torch.zeros(cache.nbytes(LAYERS, *tokens, 1), dtype=torch.uint8)
    cache.gather(out, (0, LAYERS), tokens, (0, 1), (TABLE,))
    wanted = [view[TABLE, 0].reshape(-1, ROW)[slice(*tokens)] for view in layers_at(flat, offsets)]
    assert torch.equal(out.view(LAYERS, -1, ROW), torch.stack(wanted))

    by_torch = flat.clone()
    other = layers_at(by_torch, offsets)
    reference = PagedCache.from_tensors(other, block_size=ROWS)
    pages = [pages_of(view, 0, ROWS, paged=False) for view in other]
    reference.copier = StorageCopier(pages, other)
    again = torch.zeros_like(out)
    reference.gather(again, (0, LAYERS), tokens, (0, 1), (TABLE,))
    assert torch.equal(again, out)
    cache.scatter(~out, (0, LAYERS), tokens, (0, 1), (TABLE,))
    reference.scatter(~out, (0, LAYERS), tokens, (0, 1), (TABLE,))
    assert torch.equal(flat, by_torch)
    cache.gather(again, (0, LAYERS), tokens, (0, 1), (TABLE,))
    assert torch.equal(again, ~out)


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
    columns = Columns(shift + element, count, elements, element, step)
    memory = torch.randint(0, 256, (shift + (elements + 1) * step,), dtype=torch.uint8)
    source = torch.randint(0, 256, (shift + count * elements * element,), dtype=torch.uint8)[shift:]
    matrix = memory[shift : shift + elements * step].view(elements, room, element)[:, 1 : 1 + count]
    for views in (columns_on_host, columns_on_device):
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
