"""The kernels' index arithmetic, run on a CPU, against rows found one by one."""

import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.kv import PagedCache
from p2pkv.kv.copiers import LOADS, MAX_LANES, WIDTHS, lanes_for
from p2pkv.kv.layouts import plane_of
from support.cuda.kernels import CpuLauncher
from support.kv.pages import Memory, check_exchange

BLOCK, HEADS, CONTENT = 16, 8, 256
ROW = CONTENT * 2


@given(draw=st.randoms())
@settings(deadline=None, max_examples=150)
def test_a_rectangle_travels_between_any_two_layouts(draw: random.Random, launcher: CpuLauncher) -> None:
    with launcher.moving():
        check_exchange(draw, "cpu")
    assert launcher.unaligned == 0


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC"])
def test_all_layers_are_one_launch(layout: str, apart: bool, launcher: CpuLauncher) -> None:
    """Also layers of storages of their own, as vLLM makes them on a GPU; each byte is moved once."""
    memory = Memory(layout, 4, 8, BLOCK, 1, HEADS, CONTENT, torch.bfloat16, "dense", 0, 0, (0,) * 4, 1)
    layers = [layer.clone() if apart else layer for layer in memory.view(memory.flat).unbind(0)]
    if layout != "LBHNC" and apart:
        layers = [layer.transpose(1, 2).contiguous().transpose(1, 2) for layer in layers]
    with launcher.moving():
        cache = PagedCache.from_tensors(layers, block_size=BLOCK)
    cut = (0, 4), (3, 61), (2, 7)
    out = torch.zeros(cache.nbytes(4, *cut[1], 5), dtype=torch.uint8)
    tables = memory.tables(64, seed=1)
    launcher.launched.clear()
    before = launcher.accesses
    cache.gather(out, *cut, tables)
    assert launcher.launched == ["p2pkv_gather_16"]
    assert launcher.accesses - before == 2 * out.numel() // 16
    assert torch.equal(out, torch.cat(list(memory.rows(memory.flat, *cut, tables))))


@pytest.mark.parametrize(("shift", "width"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_the_widest_access_that_the_buffer_is_aligned_to(
    shift: int, width: int, launcher: CpuLauncher
) -> None:
    memory = Memory("LBNHC", 2, 8, BLOCK, 1, 2, 32, torch.int8, "dense", 0, 0, (0, 0), seed=1)
    with launcher.moving():
        cache = memory.cache(memory.flat)
    tables, nbytes = memory.tables(64, seed=1), cache.nbytes(2, 0, 64, 2)
    buffer = torch.zeros(nbytes + 64, dtype=torch.uint8)
    shift += -buffer.data_ptr() % 16
    launcher.launched.clear()
    cache.gather(buffer[shift : shift + nbytes], (0, 2), (0, 64), (0, 2), tables)
    cache.scatter(buffer[shift : shift + nbytes], (0, 2), (0, 64), (0, 2), tables)
    assert launcher.launched == [f"p2pkv_gather_{width}", f"p2pkv_scatter_{width}"]


def test_a_warm_up_loads_every_kernel_and_moves_nothing(launcher: CpuLauncher) -> None:
    memory = Memory("LBNHC", 2, 8, BLOCK, 1, 2, 32, torch.int8, "dense", 0, 0, (0, 0), seed=1)
    with launcher.moving():
        cache = memory.cache(memory.flat.clone())
    launcher.launched.clear()
    before = launcher.accesses
    cache.copier.warm_up()
    names = {f"p2pkv_{way}_{width}" for way in ("gather", "scatter") for width in WIDTHS}
    assert set(launcher.launched) == {*names, "p2pkv_digest"}
    assert launcher.accesses == before


@pytest.mark.parametrize(
    ("elements", "lanes"), [(1, 1), (2, 2), (5, 8), (8, 8), (32, 8), (64, 16), (72, 32), (256, 32)]
)
def test_lanes_fill_whole_lines_and_then_load_several_times(elements: int, lanes: int) -> None:
    assert lanes_for(elements) == lanes
    assert lanes == MAX_LANES or lanes <= 8 or lanes * LOADS >= elements


@pytest.mark.parametrize(("tokens", "kernel"), [(255 * 4, 64), (256 * 4, 64), (205 * 4, 32), (256 * 4, 32)])
def test_planes_are_moved_by_accesses_as_wide_as_their_rows(
    tokens: int, kernel: int, launcher: CpuLauncher
) -> None:
    """As vLLM packs DeepSeek V4's layers into a block's bytes: latents (values, scales) behind the indexer's
    keys of two layers. `tokens`: rows end inside a block, or with one. `kernel`: rows of a kernel block."""
    page, keys, latents = 32 * 132 * 584, 64 * 132, 64 * 584
    memory = torch.randint(0, 256, (12, page), dtype=torch.uint8)
    tables = [torch.randperm(12)[:4].tolist()]

    def planes(row: int, first: int, apart: int, widths: tuple[int, ...]) -> list[PagedCache]:
        views = [
            memory.as_strided((12, 1, 64, row), (page, row, row, 1), at) for at in (first, first + apart)
        ]
        starts = accumulate([0, *widths[:-1]])
        return [
            PagedCache.from_tensors(
                [plane_of(view, *plane, kernel) for view in views], block_size=256, tokens_per_row=4
            )
            for plane in zip(starts, widths, strict=True)
        ]

    def caches() -> list[PagedCache]:
        return [*planes(132, 0, keys, (128, 4)), *planes(584, 2 * keys, latents, (576, 8))]

    with launcher.moving():
        moved = caches()
    for cache, host, width in zip(moved, caches(), (16, 4, 16, 8), strict=True):
        cut, nbytes = ((0, 2), (0, tokens), (0, 1)), cache.nbytes(2, 0, tokens, 1)
        buffer = torch.zeros(nbytes + 16, dtype=torch.uint8)
        buffer = buffer[-buffer.data_ptr() % 16 :][:nbytes]
        launcher.launched.clear()
        before, accesses = memory.clone(), launcher.accesses
        cache.gather(buffer, *cut, tables)
        cache.scatter(buffer, *cut, tables)
        assert launcher.launched == [f"p2pkv_gather_{width}", f"p2pkv_scatter_{width}"]
        assert launcher.accesses - accesses == 4 * nbytes // width
        assert torch.equal(memory, before)
        found = torch.empty_like(buffer)
        host.gather(found, *cut, tables)
        assert torch.equal(found, buffer)
