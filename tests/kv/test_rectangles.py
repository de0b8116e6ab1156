"""Gather and scatter of random rectangles between random geometries, against rows found one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_draws import FromHypothesis
from kv_support import Memory, check_exchange

from p2pkv.kv import PagedCache


@given(data=st.data())
@settings(deadline=None, max_examples=400)
def test_a_rectangle_travels_between_any_two_layouts(data: st.DataObject) -> None:
    check_exchange(FromHypothesis(data), "cpu")


def test_consecutive_pieces_fill_a_chunk() -> None:
    """As the engine does: one buffer, cut into the rectangles of several layers and token ranges."""
    memory = Memory("LBNHC", 3, 6, 4, 1, 2, 8, torch.bfloat16, "dense", 0, 0, (0, 0, 0), seed=5)
    cache, tables = memory.cache(memory.flat), memory.tables(20, seed=6)
    pieces = [((0, 2), (0, 13)), ((2, 3), (5, 8)), ((0, 3), (13, 20))]
    sizes = [cache.nbytes(layers[1] - layers[0], *tokens, 2) for layers, tokens in pieces]
    chunk = torch.zeros(sum(sizes), dtype=torch.uint8)
    for part, (layers, tokens) in zip(chunk.split(sizes), pieces, strict=True):
        cache.gather(part, layers, tokens, (0, 2), tables)
    rows = [
        row for layers, tokens in pieces for row in memory.rows(memory.flat, layers, tokens, (0, 2), tables)
    ]
    assert torch.equal(chunk, torch.cat(rows))


def test_layers_of_separate_storages() -> None:
    layers = [torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5) + 1000 * i for i in range(3)]
    cache = PagedCache.from_tensors(layers, block_size=4)
    out = torch.empty(cache.nbytes(3, 1, 7, 3), dtype=torch.uint8)
    cache.gather(out, (0, 3), (1, 7), (0, 3), [[1, 0]])
    by_token = torch.stack(layers)[:, [1, 0]].transpose(2, 3).flatten(1, 2)
    assert torch.equal(out.view(torch.int64), by_token[:, 1:7].reshape(-1))


def test_an_empty_rectangle_moves_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    cache = PagedCache.from_tensors([layer], block_size=4)
    assert cache.nbytes(1, 3, 3, 1) == 0
    cache.scatter(torch.empty(0, dtype=torch.uint8), (0, 1), (3, 3), (0, 1), [[]])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))
