"""Gather and scatter of random rectangles between random geometries, against rows found one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.pages import PagedCache

Interval = tuple[int, int]


def an_interval(data: st.DataObject, size: int, length: int | None = None) -> Interval:
    """A non-empty interval of [0, size), of a given length if there is one."""
    if length is None:
        length = data.draw(st.integers(1, size))
    start = data.draw(st.integers(0, size - length))
    return start, start + length


def a_token_interval(data: st.DataObject, unit: int, most: int) -> Interval:
    """Tokens that start at a unit and end anywhere in one."""
    start, stop = an_interval(data, most // unit)
    return start * unit, stop * unit - data.draw(st.integers(0, unit - 1))


def check_exchange(data: st.DataObject, memories: Any, device: str) -> None:
    """One rectangle goes from P's random memory to D's, to another place in another layout."""
    p = data.draw(memories())
    d = data.draw(memories(like=p))
    tokens = a_token_interval(data, p.unit_tokens, 8 * min(p.block_size, d.block_size))
    layers = data.draw(st.integers(1, min(p.layers, d.layers)))
    heads = data.draw(st.integers(1, min(p.heads, d.heads)))
    p_cut = an_interval(data, p.layers, layers), tokens, an_interval(data, p.heads, heads)
    d_cut = an_interval(data, d.layers, layers), tokens, an_interval(data, d.heads, heads)
    p_tables, d_tables = p.tables(tokens[1], seed=1), d.tables(tokens[1], seed=2)

    sent = torch.cat([row.reshape(-1) for row in p.rows(p.flat, *p_cut, p_tables)])
    expected = d.flat.clone()
    targets = list(d.rows(expected, *d_cut, d_tables))
    for row, target in zip(sent.split(targets[0].numel()), targets, strict=True):
        target.copy_(row.view_as(target))

    p_flat, d_flat = p.flat.clone().to(device), d.flat.clone().to(device)
    p_cache, d_cache = p.cache(p_flat), d.cache(d_flat)
    wire = torch.zeros(p_cache.nbytes(layers, *tokens, heads), dtype=torch.uint8, device=device)
    assert wire.numel() == sent.numel() == d_cache.nbytes(layers, *tokens, heads)
    p_cache.gather(wire, *p_cut, p_tables)
    d_cache.scatter(wire, *d_cut, d_tables)
    assert torch.equal(wire.cpu(), sent)
    assert torch.equal(d_flat.cpu(), expected), "bytes are wrong, or bytes outside of the rectangle changed"
    assert torch.equal(p_flat.cpu(), p.flat), "gather changed the source"


@given(data=st.data())
@settings(deadline=None, max_examples=400)
def test_a_rectangle_travels_between_any_two_layouts(data: st.DataObject, memories: Any) -> None:
    check_exchange(data, memories, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_rectangle_travels_between_any_two_layouts_on_a_gpu(data: st.DataObject, memories: Any) -> None:
    check_exchange(data, memories, "cuda")


def test_consecutive_pieces_fill_a_chunk(memory_type: Any) -> None:
    """As the engine does: one buffer, cut into the rectangles of several layers and token ranges."""
    memory = memory_type("LBNHC", 3, 6, 4, 1, 2, 8, torch.bfloat16, "dense", 0, 0, (0, 0, 0), seed=5)
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
