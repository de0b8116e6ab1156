"""Engines of many ranks, of unlike shapes, push prompts of 4,096 tokens; every byte is compared."""

from __future__ import annotations

import os
import sys
from contextlib import closing

import pytest

from support.engine.engines import Geometry, plain_links
from support.engine.many_ranks import Crew, Processes, Prompt, plan_of, push, shape

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
    "DCP 2 to 2, all alike": (shape((4,), 1, 2, dcp=2), shape((4,), 1, 2, dcp=2)),
    "2 KV heads, TP 4 x DCP 2 to TP 2": (shape((4,), 2, 4, dcp=2, interleave=16), shape((4,), 2, 2)),
    "2 KV heads, PP 2 to TP 4 x DCP 2": (shape((2, 2), 2, 1), shape((4,), 2, 4, dcp=2)),
    "MLA, TP 4 x DCP 2, of which two each hold the same, to TP 1": (
        shape((4,), 1, 4, dcp=2),
        shape((4,), 1, 1),
    ),
    "PCP 2, not divided, to TP 2": (shape((4,), 2, 2, pcp=2), shape((4,), 2, 2)),
    "PCP 2 x DCP 2 to TP 2": (shape((4,), 2, 2, pcp=2, dcp=2), shape((4,), 2, 2)),
    "PP 2 x PCP 2 x TP 2 x DCP 4 to DCP 2": (
        shape((3, 1), 1, 2, pcp=2, dcp=4, interleave=8),
        shape((4,), 1, 2, dcp=2),
    ),
}


@pytest.fixture(params=["memory", "shared-memory"])
def links(request):
    plain = plain_links(request.param)
    # Many engine threads hand on the interpreter's lock sooner, as the connector sees to in vLLM.
    before = sys.getswitchinterval()
    sys.setswitchinterval(200e-6)
    yield lambda: plain("", 0)
    sys.setswitchinterval(before)


one_kind = pytest.mark.parametrize("links", ["memory"], indirect=True)


def arrives(links, shapes: tuple[Geometry, Geometry], *prompts: Prompt) -> None:
    with closing(Crew("P", shapes[0], links)) as p, closing(Crew("D", shapes[1], links)) as d:
        push(p, d, prompts)


@one_kind
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_many_ranks(links, shapes):
    """kv/test_any_shape.py has all others, without engines."""
    arrives(links, shapes, Prompt("a"), Prompt("b", 1, chunk=1500, cached=96))


@one_kind
@pytest.mark.parametrize("shapes", CONTEXT.values(), ids=CONTEXT)
def test_context_parallel_ranks(links, shapes):
    """Tokens divided over the ranks of P, of D or of both: chunks and prefixes end anywhere, and a prompt may
    have no token on some rank."""
    first = Prompt("a", tokens=1003, chunk=333, cached=37)
    arrives(links, shapes, first, Prompt("b", 1, tokens=1003, chunk=1003, cached=1000))


def test_64_links(links):
    """All to all: every stage of P holds a layer of every rank of D. Two prompts at once."""
    shapes = shape((1,) * 8, 8, 1), shape((8,), 8, 8, 32)
    assert len(plan_of(*shapes).edges) == 64
    arrives(links, shapes, Prompt("a"), Prompt("b", 1, chunk=1500, cached=64))


@one_kind
def test_ranks_that_have_nothing_to_send_report_too(links):
    """One layer of MLA on 4 ranks of P, 2 of which are enough to serve D's 2."""
    shapes = shape((1,), 1, 4), shape((1,), 1, 2)
    plan = plan_of(*shapes)
    assert [len(plan.from_source(rank)) for rank in range(4)].count(0) == 2
    arrives(links, shapes, Prompt())


PROCESSES = {
    "PP 2 x TP 2 to TP 4": (shape((4, 4), 4, 2), shape((8,), 4, 4, 32)),
    "PP 4 to PP 2": (shape((2, 2, 2, 2), 4, 1), shape((3, 5), 4, 1)),
    "TP 2 to PP 2": (shape((8,), 4, 2), shape((4, 4), 4, 1)),
}


@pytest.mark.parametrize("shapes", PROCESSES.values(), ids=PROCESSES)
def test_one_process_for_each_rank(shapes):
    with closing(Processes("P", shapes[0])) as p, closing(Processes("D", shapes[1])) as d:
        pids = {os.getpid(), *p.each("pid"), *d.each("pid")}
        assert len(pids) == 1 + shapes[0].world + shapes[1].world
        push(p, d, [Prompt("a"), Prompt("b", 1, chunk=1500, cached=96)])


@one_kind
def test_what_is_wrong_is_noticed(links):
    """A row of another value where KV belongs, and one where nothing does, are found by their places."""
    prompt, small = Prompt(tokens=100, cached=16), shape((2,), 2, 2, tokens=100)
    with closing(Crew("P", small, links)) as p, closing(Crew("D", small, links)) as d:
        push(p, d, [prompt])
        table = prompt.blocks("D", d.geometry)
        nobodys = next(block for block in range(d.geometry.blocks) if block not in table)
        places = [[0, table[1], 0, 0], [0, table[0], 0, 15], [0, table[6], 0, 3], [1, nobodys, 0, 7]]
        for place in places:
            d.each("spoil", *place)
        assert d.each("wrong", [prompt]) == [sorted(places)] * 2
