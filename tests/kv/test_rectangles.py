"""Gather and scatter: of random rectangles, against rows found one by one; how large a copy's rows are, which
makes it fast; on a CPU, that other threads run meanwhile, and columns."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.kv import PagedCache, copiers, host, layouts
from support.gil import lets_others_run
from support.kv.pages import Memory, check_exchange

BOUNDS = ("WORTH_BYTES", "WORTH_PUTTING", "LONG_BYTES", "MANY_BLOCKS", "LARGE_BYTES", "BATCH_BYTES")
"""Which decide in which of its ways numpy copies."""


@pytest.mark.parametrize("by", ["numpy", "torch"])
@given(draw=st.randoms())
@settings(deadline=None, max_examples=200)
def test_a_rectangle_travels_between_any_two_layouts(by: str, draw: random.Random) -> None:
    """Rows listed; or blocks one by one, or several at once, of all layers or one by one. torch's index
    kernels, which a CPU also has, mean the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name in BOUNDS:
            patch.setattr(host, name, draw.choice([1, 64, getattr(host, name)]))
        if by == "torch":
            patch.setattr("p2pkv.kv.cache.copier_of", copiers.StorageCopier)
        check_exchange(draw, "cpu")


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


BLOCK, HEADS, CONTENT = 16, 8, 256
ROW = CONTENT * 2


class Counting(copiers.StorageCopier):
    asked: list[layouts.Rows] = []  # noqa: RUF012

    def take_rows(self, flat: torch.Tensor, rows: layouts.Rows, out: torch.Tensor) -> None:
        self.asked.append(rows)


@pytest.mark.parametrize(
    ("layout", "codec", "ratio", "tokens", "heads", "atom"),
    [
        ("LBNHC", "dense", 1, (0, 64), (0, 8), 16 * 8 * ROW),  # whole blocks
        ("BLNHC", "dense", 1, (0, 64), (0, 8), 16 * 8 * ROW),
        ("LBNHC", "dense", 2, (0, 64), (0, 8), 16 * 8 * ROW),  # kernel blocks that touch
        ("BLNHC", "dense", 2, (0, 64), (0, 8), 8 * 8 * ROW),  # kernel blocks that do not
        ("LBNHC", "dense", 1, (4, 62), (0, 8), 2 * 8 * ROW),  # parts of blocks
        ("LBNHC", "dense", 1, (0, 33), (0, 8), 8 * ROW),
        ("LBNHC", "dense", 1, (0, 64), (4, 8), 4 * ROW),  # some heads of each token
        ("LBNHC", "dense", 1, (0, 64), (1, 4), ROW),
        ("LBHNC", "dense", 1, (0, 64), (0, 8), ROW),  # the wire has heads inside tokens
        ("LBHNC", "dense", 1, (0, 64), (2, 3), 16 * ROW),
        ("LBHNC", "page:vec", 1, (0, 64), (0, 8), 8 * 16 * ROW),  # whole pages
        ("LBHNC", "page:vec", 2, (0, 64), (0, 8), 2 * 8 * 8 * ROW),
        ("LBHNC", "page:vec", 1, (16, 35), (4, 8), 4 * 16 * ROW),
        ("LBHNC", "page:vec", 1, (0, 64), (1, 4), 16 * ROW),
        ("LHBNC", "page:vec", 1, (0, 64), (0, 8), 16 * ROW),
    ],
)
def test_one_copy_of_rows_as_large_as_layout_and_rectangle_allow(
    layout: str,
    codec: str,
    ratio: int,
    tokens: tuple[int, int],
    heads: tuple[int, int],
    atom: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counting, "asked", [])
    monkeypatch.setattr("p2pkv.kv.cache.copier_of", Counting)
    kind = torch.bfloat16
    memory = Memory(layout, 3, 8, BLOCK, ratio, HEADS, CONTENT, kind, codec, 0, 0, (0, 0, 0), 1)
    cache: PagedCache = memory.cache(memory.flat)
    nbytes = cache.nbytes(3, *tokens, heads[1] - heads[0])
    cache.gather(torch.empty(nbytes, dtype=torch.uint8), (0, 3), tokens, heads, memory.tables(64, seed=1))
    assert [rows.atom for rows in Counting.asked] == [atom]
    assert Counting.asked[0].index.size * atom == nbytes
