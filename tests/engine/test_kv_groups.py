"""A cache of two KV groups: attention, with a row per token, and a state, with one row per request.

The two have other layers, other heads, other rows and other block tables, and their layers take turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from chaos.model import CANARY, Group, Memory, Model, Tables, hello_of, make_rank_pages

from p2pkv.config import Options
from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.engine.thread import Rank
from p2pkv.links.base import LinkFactory
from p2pkv.pairing import Address
from support.engine.engines import DEFAULTS, READY, Engine, TestRank, break_link, plain_links
from support.engine.transfers import ends, expect, failure, rest, value
from support.links.faulty import Faults, FaultyLinks
from support.waiting import wait_for

TOKENS, STOP = 80, 79
"""Of the prompt, whose last one P leaves to D."""

ATTENTION = Group((0, 2, 3), heads=4, content=8)
STATE = Group((1, 4), heads=2, content=22, table=1, once=True)
MODEL = Model((ATTENTION, STATE), blocks=24)
ALL = range(MODEL.layers)

P_TABLES = ([3, 4, 5, 6, 7], [17])
D_TABLES = ([20, 11, 12, 9, 1], [8])


@dataclass
class Hybrid(Engine):
    """An engine, and the memory of all its ranks."""

    memory: Memory

    def untouched(self, group: int) -> bool:
        """Whether nothing has been written to any block of this KV group."""
        pages = [page for rank in self.ranks for page in rank.pages[group]]
        return all(bool((page.view(torch.int32) == CANARY).all()) for page in pages)


@contextlib.contextmanager
def pair(
    tps: tuple[int, int], links: Callable[[str, int], LinkFactory], **options: Any
) -> Iterator[tuple[Hybrid, Hybrid]]:
    """A P and a D of so many ranks each."""

    def make(role: Any, tp: int) -> Hybrid:
        port, ranks = free_ports(tp), []
        opts = Options(role=role, host="127.0.0.1", kv_port=port, **DEFAULTS | options)
        pages = [make_rank_pages(MODEL, number, tp) for number in range(tp)]
        for mine in pages:
            link = links(role, mine.rank)
            hello = hello_of(opts, MODEL, mine, link.kind)
            rank = Rank(hello, opts, mine.cache, link)
            ranks.append(TestRank(None, rank, mine.groups, hello, link))  # type: ignore[arg-type]
        address = Address("127.0.0.1", port)
        made = Hybrid(address, None, ranks, Memory(MODEL, pages))  # type: ignore[arg-type]
        stack.callback(made.stop)
        return made

    with contextlib.ExitStack() as stack:
        yield make("P", tps[0]), make("D", tps[1])


def step(p: Hybrid, tables: Tables, start: int, stop: int, layers: Sequence[int] = ALL) -> None:
    """A forward over these tokens, or some layers of it."""
    p.do(do.PromptBlocks("k", tables))
    for layer in layers:
        p.memory.compute(0, layer, tables, start, stop)
        p.do(do.Computed((("k", stop),), layer, layer + 1, READY))
    p.do(do.Flush(("k",)))


def begin(p: Hybrid, d: Hybrid) -> None:
    expect(p, d, tokens=TOKENS)
    p.do(do.OfferPrompt("k", d.address, TOKENS, b"digest"))
    d.wait(do.Begun("k"))


def load(d: Hybrid, cached: int = 0) -> None:
    d.do(do.Load("k", cached, STOP, D_TABLES))


def arrives(d: Hybrid, cached: int) -> None:
    """Every rank of D holds what P computed, and nothing of the tokens that it has or computes by itself."""
    d.wait(do.Loaded("k"))
    heads = sum(len(ATTENTION.on_rank(each.hello.rank, len(d.ranks))) for each in d.ranks)
    own = cached * heads * ATTENTION.content
    assert d.memory.wrong(0, D_TABLES, STOP) == len(ATTENTION.layers) * own
    for rank in d.ranks:
        for page in rank.pages[0]:
            assert bool((page.view(torch.int32)[D_TABLES[0][0], :, :cached] == CANARY).all())


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("cached", [0, 16])
def test_both_groups_arrive_whole_and_the_state_is_the_last_one(tps, cached):
    """The first half's state is overwritten by the second half's, and must never travel."""
    with pair(tps, plain_links("memory")) as (p, d):
        begin(p, d)
        load(d, cached)
        step(p, P_TABLES, 0, 40)
        step(p, P_TABLES, 40, STOP)
        arrives(d, cached)
        ends(p, d)
        rest(p, d)
        heads = {group: max(group.heads, tps[1]) for group in MODEL.groups}
        rows = 3 * (STOP - cached) * heads[ATTENTION] * 8 + 2 * heads[STATE] * 22
        assert value(p, "bytes_sent") == rows * 4, "each byte that a rank of D needs travels once"


def all_but_the_state(p: Hybrid, d: Hybrid) -> None:
    """D has written all that it waits for but the state, which P has not computed yet."""
    begin(p, d)
    load(d)
    step(p, P_TABLES, 0, STOP, ATTENTION.layers)
    wait_for(lambda: value(d, "bytes_scattered") == 3 * STOP * 4 * 8 * 4)


def failure_without_a_state(d: Hybrid) -> str:
    """The load has failed, and nothing has been written to the state's block."""
    reason = failure(d)
    assert not d.ranks[0].heard(do.Loaded("k")) and d.untouched(1)
    return reason


def test_a_load_of_which_only_the_state_is_missing_fails_with_its_link(links):
    with pair((1, 1), links) as (p, d):
        all_but_the_state(p, d)
        break_link(d)
        step(p, P_TABLES, 0, STOP, STATE.layers)
        assert failure_without_a_state(d)
        ends(p, d)
        rest(p, d)


def test_a_flipped_bit_of_the_state_alone_fails_the_load():
    plain = plain_links("memory")
    links = {side: FaultyLinks(plain(side, 0), Faults()) for side in "PD"}
    with pair((1, 1), lambda side, rank: links[side], verify=True) as (p, d):
        all_but_the_state(p, d)
        links["D"].change(flip_at=0)
        step(p, P_TABLES, 0, STOP, STATE.layers)
        assert "checksum" in failure_without_a_state(d)
