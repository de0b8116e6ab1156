"""Rows in any planes, for any number of tokens, from any engine to any other: every byte against a model.

P and D differ in tensor and pipeline parallelism, block sizes, kernel blocks and in what lies beside a layer
in a block. The model is `address`: where a byte of a row lies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from p2pkv.kv import PagedCache
from p2pkv.kv.layouts import plane_of
from p2pkv.plan import make_plan
from p2pkv.protocol.handshake import Assignment, row_format
from p2pkv.protocol.messages import KvGroup
from p2pkv.protocol.pieces import Coverage, Cutter
from p2pkv.sharding import Shape
from support.kv.shapes import cut, rectangle


@dataclass(frozen=True)
class Side:
    """One engine. `rows`: of a kernel block; `ratio`: kernel blocks in a block; `beside`: bytes of a kernel
    block that belong to no layer."""

    shape: Shape
    rows: int
    ratio: int
    beside: int


@dataclass(frozen=True)
class Case:
    """Rows of `tokens` tokens in planes of these widths. D has the first `start` rows of a prompt of `length`
    tokens and wants all but the last token; P computes it up to each of `steps`."""

    prefill: Side
    decode: Side
    tokens: int
    widths: tuple[int, ...]
    length: int
    start: int
    steps: tuple[int, ...]
    chunk: int
    seed: int

    @property
    def groups(self) -> range:
        return range(len(self.widths))

    @property
    def row(self) -> int:
        return sum(self.widths)

    def described(self, side: Side) -> list[KvGroup]:
        return [
            KvGroup(side.shape.layers, 1, width, self.tokens, "uint8", "dense", f"plane {number}")
            for number, width in enumerate(self.widths)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers, tokens = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 4, 7, 128]))
    prefill, decode = draw(sides(layers)), draw(sides(layers))
    widths = tuple(draw(st.lists(st.sampled_from([1, 4, 8, 16, 576]), min_size=1, max_size=3)))
    largest = tokens * max(side.rows * side.ratio for side in (prefill, decode))
    length = draw(st.integers(1, 2 * largest + 3))
    whole = decode.rows * decode.ratio
    start = draw(st.integers(0, max(0, length - 1) // (tokens * whole))) * whole
    steps = (*sorted(draw(st.lists(st.integers(1, length), max_size=2))), length)
    chunk = draw(st.sampled_from([1, 100, 1 << 20]))
    return Case(prefill, decode, tokens, widths, length, start, steps, chunk, draw(st.integers(0, 99)))


@st.composite
def sides(draw: st.DrawFn, layers: int) -> Side:
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=1))) if layers > 1 else []
    stages = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True))
    shape = Shape(stages, 1, draw(st.integers(1, 3)))
    rows, ratio = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2]))
    return Side(shape, rows, ratio, draw(st.sampled_from([0, 3, 64])))


class Held:
    """One rank's memory, full of noise. A kernel block has all layers, one after the other, as in BLHNC."""

    def __init__(self, case: Case, side: Side, rank: int, seed: int) -> None:
        self.case, self.side = case, side
        first = sum(side.shape.layers[: rank // side.shape.tp])
        self.layers = range(first, first + side.shape.layers[rank // side.shape.tp])
        chance = random.Random(seed)
        count = case.length // (case.tokens * side.rows * side.ratio) + 2
        self.table = chance.sample(range(count), count - 1)
        self.page = side.rows * case.row
        self.stride = len(self.layers) * self.page + side.beside
        noise = chance.randbytes(count * side.ratio * self.stride)
        self.memory: NDArray[np.uint8] = np.frombuffer(noise, np.uint8).copy()
        flat, kernels = torch.from_numpy(self.memory), count * side.ratio
        views = [
            flat.as_strided((kernels, 1, side.rows, case.row), (self.stride, 1, case.row, 1), at * self.page)
            for at in range(len(self.layers))
        ]
        before = [0, *accumulate(case.widths[:-1])]
        size = case.tokens * side.rows * side.ratio
        self.planes = [
            PagedCache.from_tensors(
                [plane_of(view, *plane) for view in views], block_size=size, tokens_per_row=case.tokens
            )
            for plane in zip(before, case.widths, strict=True)
        ]

    def address(self, layer: int, row: int, byte: int) -> int:
        """Where a byte of a row lies: the model."""
        kernel, inside = divmod(row, self.side.rows)
        block, part = divmod(kernel, self.side.ratio)
        at = (self.table[block] * self.side.ratio + part) * self.stride
        at += (layer - self.layers.start) * self.page
        for width in self.case.widths:
            if byte < width:
                return at + inside * width + byte
            at, byte = at + self.side.rows * width, byte - width
        raise AssertionError

    def put(self, memory: NDArray[np.uint8], truth: NDArray[np.uint8], rows: range) -> None:
        for layer in self.layers:
            for row in rows:
                for byte in range(self.case.row):
                    memory[self.address(layer, row, byte)] = truth[layer, row, byte]


@pytest.mark.slow
@given(case=cases())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_d_holds_each_whole_row_and_nothing_else_has_changed(case: Case) -> None:
    p, d = case.prefill, case.decode
    whole = (case.length - 1) // case.tokens
    chance = np.random.default_rng(case.seed)
    truth = chance.integers(0, 256, (sum(p.shape.layers), whole + 1, case.row), dtype=np.uint8)
    wires = [row_format(one, other) for one, other in zip(case.described(p), case.described(d), strict=True)]
    plan = make_plan(tuple(p.shape for _ in case.groups), tuple(d.shape for _ in case.groups))
    sources = [Held(case, p, rank, rank) for rank in range(p.shape.world)]
    targets = [Held(case, d, rank, 100 + rank) for rank in range(d.shape.world)]
    expected = [held.memory.copy() for held in targets]
    for held, memory in zip(targets, expected, strict=True):
        held.put(memory, truth, range(case.start, whole))

    sent = []
    for source, held in enumerate(sources):
        for target in range(d.shape.world):
            edges = [edge for edge in plan.from_source(source) if edge.target == target]
            if edges:
                owed = Assignment.of(edges, wires).extents(case.start * case.tokens, case.length - 1)
                sent.append((held, targets[target], edges, Cutter(owed), Coverage(owed)))
    for step, stop in enumerate(case.steps):
        past = case.steps[step - 1] // case.tokens if step else 0
        for held in sources:
            held.put(held.memory, truth, range(past, min(stop // case.tokens, whole)))
        for held, target, edges, cutter, coverage in sent:
            computed = {edge.group: [stop] * len(edge.layers) for edge in edges}
            while pieces := cut(cutter, computed, case.chunk):
                coverage.filled(coverage.reserve(pieces))
                for piece in pieces:
                    (edge,) = (edge for edge in edges if edge.group == piece.group)
                    buffer = torch.empty(cutter.extents.size(piece), dtype=torch.uint8)
                    for side, move in ((held, "gather"), (target, "scatter")):
                        cells = rectangle(edge, piece, move == "gather")
                        getattr(side.planes[piece.group], move)(buffer, *cells, [side.table])
    assert not any(cutter.left or coverage.left for *_, cutter, coverage in sent)
    for rank, (held, memory) in enumerate(zip(targets, expected, strict=True)):
        assert np.array_equal(held.memory, memory), f"rank {rank} of D"


def test_a_plane_is_of_rows_that_lie_together() -> None:
    pages = torch.zeros(3, 1, 4, 584, dtype=torch.uint8)
    values, scales = plane_of(pages, 0, 576), plane_of(pages, 576, 8)
    assert values.shape == (3, 1, 4, 576) and scales.storage_offset() == 4 * 576
    for wrong in (torch.zeros(3, 2, 4, 584), torch.zeros(3, 1, 4, 600)[..., :584]):
        with pytest.raises(ValueError, match="expected one head whose rows lie together"):
            plane_of(wrong, 0, 576)
    with pytest.raises(ValueError, match=r"elements \[577, 585\)"):
        plane_of(pages, 577, 8)
