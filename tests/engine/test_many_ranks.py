"""Engines of many ranks, of unlike shapes, push prompts of a thousand tokens; every byte is compared."""

import random
import sys
from dataclasses import dataclass

import pytest
import torch

from p2pkv.engine import commands as do
from p2pkv.plan import Edge, Plan, make_plan
from support.engine.engines import Engine, Geometry, engines, plain_links, step
from support.engine.transfers import arrives, ends, expect, load, rest

TOKENS = 1003
OPTIONS = {"lease_seconds": 20.0, "chunk_bytes": 32 << 10}


def shape(layers: tuple[int, ...], kv_heads: int, tp: int, block: int = 16, **context: int) -> Geometry:
    """With room for two prompts; 16 bytes of KV for a token and head. `context`: pcp, dcp, interleave."""
    return Geometry(layers, kv_heads, tp, block, content=4, blocks=2 * -(-TOKENS // block) + 5, **context)


SHAPES = {
    "TP 8 to TP 2": (shape((8,), 8, 8), shape((8,), 8, 2, 32)),
    "TP 3 to TP 2": (shape((4,), 6, 3), shape((4,), 6, 2)),
    "PP 2 x TP 4 to PP 4 x TP 2": (shape((5, 3), 8, 4), shape((1, 3, 3, 1), 8, 2)),
    "2 KV heads, TP 8 to TP 4": (shape((8,), 2, 8), shape((8,), 2, 4)),
    "MLA, TP 2 to TP 4": (shape((8,), 1, 2), shape((8,), 1, 4)),
}

CONTEXT = {
    "DCP 2 to 1": (shape((4,), 1, 2, dcp=2), shape((4,), 1, 1)),
    "DCP 1 to 2, blocks of 32": (shape((4,), 1, 1), shape((4,), 1, 2, 32, dcp=2, interleave=16)),
    "DCP 4 to 2, other interleave sizes": (
        shape((4,), 1, 4, dcp=4, interleave=16),
        shape((4,), 1, 2, dcp=2, interleave=4),
    ),
    "DCP 2 to 4, other interleave sizes": (
        shape((4,), 1, 2, dcp=2, interleave=8),
        shape((4,), 1, 4, 32, dcp=4),
    ),
    "DCP 2 to 3": (shape((4,), 1, 2, dcp=2), shape((4,), 1, 3, dcp=3, interleave=2)),
    "PCP 2, not divided, to TP 2": (shape((4,), 2, 2, pcp=2), shape((4,), 2, 2)),
    "PP 2 x PCP 2 x TP 2 x DCP 4 to DCP 2": (
        shape((3, 1), 1, 2, pcp=2, dcp=4, interleave=8),
        shape((4,), 1, 2, dcp=2),
    ),
}


@dataclass(frozen=True)
class Prompt:
    """A prompt that P computes in chunks, and of which D has the first `cached` tokens by itself."""

    key: str = "k"
    number: int = 0
    chunk: int = 333
    cached: int = 0

    def blocks(self, engine: Engine) -> list[int]:
        """Its block table on one side: in no order, and no block of another prompt's."""
        geometry = engine.geometry
        order = list(range(geometry.blocks))
        random.Random(engine.ranks[0].hello.role).shuffle(order)
        count = -(-TOKENS // (geometry.block * geometry.dcp))
        return order[self.number * count :][:count]


def plan_of(p: Geometry, d: Geometry) -> Plan:
    return make_plan((p.shape,), (d.shape,))


@pytest.fixture(params=["memory", "shared-memory"])
def links(request):
    # Many engine threads hand on the interpreter's lock sooner, as the connector sees to in vLLM.
    before = sys.getswitchinterval()
    sys.setswitchinterval(200e-6)
    yield plain_links(request.param)
    sys.setswitchinterval(before)


one_kind = pytest.mark.parametrize("links", ["memory"], indirect=True)


def all_arrive(links, shapes: tuple[Geometry, Geometry], *prompts: Prompt) -> None:
    """P prefills all of them, a chunk of each in turn; D asks when the first chunks are computed. In the end
    every byte is where it belongs and was sent once, and every rank has said its word once."""
    with engines(*shapes, links, **OPTIONS) as (p, d):
        for each in prompts:
            expect(p, d, each.key, tokens=TOKENS)
            p.do(do.HoldPrompt(each.key, d.address))
            p.do(do.OfferPrompt(each.key, d.address, TOKENS, b"digest"))
            step(p, each.key, each.blocks(p), 0, each.chunk, each.number)
        for each in prompts:
            load(d, each.key, TOKENS, each.blocks(d), each.cached)
        for each in prompts:
            for start in range(each.chunk, TOKENS, each.chunk):
                step(p, each.key, each.blocks(p), start, min(start + each.chunk, TOKENS), each.number)
        for each in prompts:
            arrives(d, each.key, TOKENS, each.blocks(d), each.cached, each.number)
            ends(p, d, each.key)
        rest(p, d)
        was_sent_once(p, d, prompts)


def was_sent_once(p: Engine, d: Engine, prompts: tuple[Prompt, ...]) -> None:
    def kept(engine: Engine, rank: int) -> torch.Tensor:
        """Which of the tokens that D has loaded this rank keeps, of all prompts."""
        tokens = torch.cat([torch.arange(each.cached, TOKENS - 1) for each in prompts])
        return engine.geometry.slots(rank, tokens)[0]

    def nbytes(edge: Edge) -> int:
        count = int((kept(p, edge.source) & kept(d, edge.target)).sum())
        return count * len(edge.layers) * len(edge.heads) * p.geometry.content * 4

    plan = plan_of(p.geometry, d.geometry)
    for number, rank in enumerate(p.ranks):
        edges, counted = plan.from_source(number), rank.rank.counters.snapshot()
        assert sorted(rank.events(object), key=str) == [do.BlocksFree(each.key) for each in prompts]
        assert (counted["bytes_sent"], counted["chunks_filler"]) == (sum(map(nbytes, edges)), 0)
        assert counted["links"] == len(edges)
    for number, rank in enumerate(d.ranks):
        edges, counted = plan.to_target(number), rank.rank.counters.snapshot()
        said = [kind(each.key) for kind in (do.Begun, do.Loaded) for each in prompts]
        assert sorted(rank.events(object), key=str) == said
        assert (counted["bytes_scattered"], counted["links"]) == (sum(map(nbytes, edges)), len(edges))
        written = sum(int((page != -1.0).any(-1).sum()) for page in rank.pages)
        heads = len(d.geometry.heads(number))
        assert written == int(kept(d, number).sum()) * heads * len(rank.pages), "and nothing else"


@one_kind
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_many_ranks(links, shapes):
    """kv/test_any_shape.py has all others, without engines."""
    all_arrive(links, shapes, Prompt("a"), Prompt("b", 1, chunk=500, cached=96))


@one_kind
@pytest.mark.parametrize("shapes", CONTEXT.values(), ids=CONTEXT)
def test_context_parallel_ranks(links, shapes):
    """On P, D or both; chunks and prefixes end anywhere, and a prompt may have no token on some rank."""
    all_arrive(links, shapes, Prompt("a", cached=37), Prompt("b", 1, chunk=TOKENS, cached=1000))


def test_64_links(links):
    """All to all: every stage of P holds a layer of every rank of D. Two prompts at once."""
    shapes = shape((1,) * 8, 8, 1), shape((8,), 8, 8, 32)
    assert len(plan_of(*shapes).edges) == 64
    all_arrive(links, shapes, Prompt("a"), Prompt("b", 1, chunk=500, cached=64))


@one_kind
def test_ranks_that_have_nothing_to_send_report_too(links):
    """One layer of MLA on 4 ranks of P, 2 of which are enough to serve D's 2."""
    shapes = shape((1,), 1, 4), shape((1,), 1, 2)
    plan = plan_of(*shapes)
    assert [len(plan.from_source(rank)) for rank in range(4)].count(0) == 2
    all_arrive(links, shapes, Prompt())
