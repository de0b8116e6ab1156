"""A prompt's KV from any engine to any other: plan, chunks, gather and scatter are the real ones.

P's and D's parallelism, block sizes, layouts and packings are drawn by themselves. What every rank of D
holds in the end is compared with a slice of one global tensor.
"""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pkv import kv, page_packings, sharding
from p2pkv.kv import cache as module
from p2pkv.kv.cache import seen_as
from p2pkv.plan import Edge, Plan, make_plan
from p2pkv.protocol.extents import Coverage, Cutter, Extents
from p2pkv.protocol.handshake import GroupAssignment, row_format
from p2pkv.protocol.messages import Piece
from support.kv.pages import LAYOUTS, TOKENS_TOGETHER
from support.kv.shapes import BITS, Elements, Held, Side, cut, rectangle

CODECS = [kv.DENSE, *page_packings.PACKINGS]


@dataclass(frozen=True)
class Case:
    """D wants [start, stop) of a prompt of `tokens`; P computes it in `steps`: (tokens, layers that far).
    `batch`: bytes of packed pages that are undone together. `shift`: of a message's place in memory."""

    prefill: Side
    decode: Side
    tokens: int
    start: int
    stop: int
    steps: tuple[tuple[int, int], ...]
    chunk: int
    batch: int
    shift: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, layers = draw(st.sampled_from([1, 2, 3, 4, 6, 8])), draw(st.integers(1, 5))
    codecs = draw(st.tuples(st.sampled_from(CODECS), st.sampled_from(CODECS)))
    amx = "page:amx" in codecs
    content = 64 if amx else draw(st.sampled_from([2, 4, 6]))
    kinds = [torch.bfloat16, torch.float16, torch.float32]
    if codecs == ("dense", "dense"):
        kinds.append(torch.float8_e4m3fn)
    dtype = torch.bfloat16 if amx else draw(st.sampled_from(kinds))
    # Tokens are divided over ranks only where rows are tokens.
    most = 4 if codecs == ("dense", "dense") else 1
    prefill, decode = (draw(sides(kv_heads, layers, codec, content, dtype, most)) for codec in codecs)
    tokens = draw(st.integers(1, 2 * max(side.block * side.shape.dcp for side in (prefill, decode)) + 3))
    start = draw(st.integers(0, (tokens - 1) // decode.block)) * decode.block
    stop = max(start + 1, tokens - draw(st.sampled_from([0, 1, 1, 2])))
    ends = sorted(draw(st.lists(st.integers(1, tokens), max_size=2)))
    steps = tuple((end, draw(st.integers(1, layers))) for end in ends)
    row = content * dtype.itemsize
    chunk = draw(st.sampled_from([40 * row, 200 * row, 1 << 20]))
    steps = (*steps, (tokens, layers))
    batch, shift = draw(st.sampled_from([1, module.BATCH_BYTES])), draw(st.integers(0, 1))
    return Case(prefill, decode, tokens, start, stop, steps, chunk, batch, shift, draw(st.integers(0, 99)))


@st.composite
def sides(
    draw: st.DrawFn, kv_heads: int, layers: int, codec: str, content: int, dtype: torch.dtype, most: int
) -> Side:
    """`most`: of the ranks over which tokens are divided."""
    fits = [tp for tp in range(1, 9) if kv_heads % tp == 0 or tp % kv_heads == 0]
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=2))) if layers > 1 else []
    stages = tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, layers], strict=True))
    ratio = draw(st.sampled_from([1, 1, 2, 3]))
    kernel = draw(st.sampled_from([32, 32, 64]) if codec == "page:amx" else st.integers(1, 9))
    layout = draw(st.sampled_from(sorted(LAYOUTS) if codec == kv.DENSE else TOKENS_TOGETHER))
    tp, pcp = draw(st.sampled_from(fits)), draw(st.sampled_from([1, 1, 2]))
    copies = max(1, tp // kv_heads)
    dcps = [size for size in range(1, copies + 1) if copies % size == 0]
    dcps = [1, pcp, *([tp * pcp] if copies == tp else [])] if pcp > 1 else dcps
    dcp = draw(st.sampled_from([size for size in dcps if size <= most]))
    run = draw(st.sampled_from([size for size in range(1, kernel + 1) if kernel % size == 0]))
    shape = sharding.Shape(stages, kv_heads, tp, pcp, dcp, run if dcp > 1 else 1)
    return Side(shape, kernel * ratio, ratio, layout, codec, content, dtype)


@dataclass(frozen=True)
class Sent:
    debt: GroupAssignment
    piece: Piece
    data: torch.Tensor


def push(case: Case, plan: Plan, ranks: list[Held], truth: Elements) -> tuple[list[Sent], dict[Edge, int]]:
    """P computes step by step, and cuts and gathers what is ready; also the bytes of each edge."""
    wire = row_format(case.prefill.group, case.decode.group)
    debts = [GroupAssignment(edge, wire) for edge in plan.edges]
    extents = [Extents({0: debt.extent(case.start, case.stop)}) for debt in debts]
    cutters, coverages = [Cutter(owed) for owed in extents], [Coverage(owed) for owed in extents]
    done = [0] * sum(case.prefill.shape.layers)
    out: list[Sent] = []
    for stop, layers in case.steps:
        for held in ranks:
            forward(held, done, stop, layers, truth)
        done[:layers] = [stop] * layers
        for debt, cutter, coverage in zip(debts, cutters, coverages, strict=True):
            ready = done[debt.edge.layers.start : debt.edge.layers.stop]
            while pieces := cut(cutter, {0: ready}, case.chunk):
                coverage.filled(coverage.reserve(pieces))
                for piece in pieces:
                    buffer = torch.empty(cutter.extents.size(piece) + case.shift, dtype=torch.uint8)
                    out.append(Sent(debt, piece, gather(ranks, debt, piece, buffer[case.shift :])))
    assert not any(cutter.left for cutter in cutters) and not any(coverage.left for coverage in coverages)
    return out, {debt.edge: owed.nbytes for debt, owed in zip(debts, extents, strict=True)}


def forward(held: Held, done: list[int], stop: int, layers: int, truth: Elements) -> None:
    mine, heads = held.side.layers_of(held.rank), held.side.heads_of(held.rank)
    for layer in range(mine.start, min(mine.stop, layers)):
        if done[layer] < stop:
            cells = truth[layer : layer + 1, done[layer] : stop, heads]
            held.compute(slice(layer - mine.start, layer - mine.start + 1), done[layer], stop, cells)


def gather(ranks: list[Held], debt: GroupAssignment, piece: Piece, data: torch.Tensor) -> torch.Tensor:
    edge, held = debt.edge, ranks[debt.edge.source]
    seen_as(held.paged, debt.wire.codec).gather(data, *rectangle(edge, piece, True), [held.table])
    return data


def scatter(held: Held, sent: Sent) -> None:
    pages = seen_as(held.paged, sent.debt.wire.codec)
    pages.scatter(sent.data, *rectangle(sent.debt.edge, sent.piece, False), [held.table])


@pytest.mark.slow
@given(case=cases())
@settings(deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow])
def test_every_rank_of_d_holds_its_slice_of_what_p_computed(case: Case) -> None:
    chance = np.random.default_rng(case.seed)
    p, d = case.prefill, case.decode
    sizes = (sum(p.shape.layers), case.tokens, p.shape.heads, p.content)
    truth = chance.integers(0, 1 << 16, sizes).astype(BITS[p.dtype])
    plan = make_plan((p.shape,), (d.shape,))
    sources = [Held(p, rank, case.tokens, rank) for rank in range(p.shape.world)]
    targets = [Held(d, rank, case.tokens, 100 + rank) for rank in range(d.shape.world)]
    before = [held.dense() for held in targets]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BATCH_BYTES", case.batch)
        sent, nbytes = push(case, plan, sources, truth)
        random.Random(case.seed).shuffle(sent)
        for one in sent:
            scatter(targets[one.debt.edge.target], one)

    whole = sent[0].debt.wire.unit if sent else 1
    for held, expected in zip(targets, before, strict=True):
        found, mine = held.dense(), truth[d.layers_of(held.rank), :, d.heads_of(held.rank)]
        held.put(expected, slice(None), case.start, case.stop, mine[:, case.start : case.stop])
        if end := -case.stop % whole:
            # Whole pages travel with what P has beyond the tokens that were asked for.
            beside = np.zeros((*mine.shape[:1], end, *mine.shape[2:]), mine.dtype)
            for memory in (found, expected):
                held.put(memory, slice(None), case.stop, case.stop + end, beside)
        assert np.array_equal(found, expected), f"rank {held.rank} of D"
    each_byte_once(case, whole, sent, nbytes)


def each_byte_once(case: Case, unit: int, sent: list[Sent], nbytes: dict[Edge, int]) -> None:
    d = case.decode
    stop, cells = -(-case.stop // unit) * unit, 0
    for rank in range(d.shape.world):
        layers, heads = d.layers_of(rank), d.heads_of(rank)
        tokens = len(d.slots_of(rank, case.start, stop)[0])
        cells += (layers.stop - layers.start) * (heads.stop - heads.start) * tokens
    assert sum(one.data.numel() for one in sent) == sum(nbytes.values())
    assert sum(nbytes.values()) == cells * d.content * d.dtype.itemsize
