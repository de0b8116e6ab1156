"""A cache of two KV groups: attention, with a row per token, and a state, with one row per request.

The two have other layers, other heads, other rows and other block tables, and their layers take turns.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_support import DEFAULTS, READY, Engine, at_baseline, break_link, plain_links, truth
from faulty_links import Faults, FaultyLinks
from links_support import nccl_links
from memory_links import MemoryNetwork
from msgspec.structs import replace

from p2pkv.config import Options
from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.engine.thread import Rank
from p2pkv.kv.cache import PagedCache, RankCache
from p2pkv.links.base import LinkFactory
from p2pkv.pairing import Address
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello, KvGroup
from support.waiting import wait_for

TOKENS, BLOCK = 80, 16
BLOCKS = 24


@dataclass(frozen=True)
class Kind:
    """One KV group of the whole model; `numbers` of its layers among all layers, `table`: which is its."""

    numbers: tuple[int, ...]
    heads: int
    content: int
    table: int
    once: bool

    def of_rank(self, rank: int, tp: int) -> range:
        """The group's heads on one of `tp` ranks, split or replicated as vLLM does."""
        if tp >= self.heads:
            head = rank * self.heads // tp
            return range(head, head + 1)
        each = self.heads // tp
        return range(rank * each, (rank + 1) * each)


ATTENTION = Kind((0, 2, 3), heads=4, content=8, table=0, once=False)
STATE = Kind((1, 4), heads=2, content=22, table=1, once=True)
KINDS = (ATTENTION, STATE)


class HybridRank:
    """One rank, and each group's pages: [layer][block, head, token, content]; a state's block is a token."""

    def __init__(
        self,
        role: Any,
        number: int,
        tp: int,
        port: int,
        links: LinkFactory,
        fill: float,
        options: dict[str, Any],
    ) -> None:
        opts = Options(role=role, host="127.0.0.1", kv_port=port, **DEFAULTS | options)
        self.number, self.tp = number, tp
        self.pages: list[list[torch.Tensor]] = []
        for kind in KINDS:
            tokens = 1 if kind.once else BLOCK
            shape = (BLOCKS, len(kind.of_rank(number, tp)), tokens, kind.content)
            self.pages.append([torch.full(shape, fill) for _ in kind.numbers])
        groups = [
            PagedCache.from_tensors(
                pages, block_size=1 if kind.once else BLOCK, tables=[kind.table] * len(pages)
            )
            for kind, pages in zip(KINDS, self.pages, strict=True)
        ]
        said = tuple(
            KvGroup(
                (len(kind.numbers),), kind.heads, group.row_bytes, 1, "float32", "dense", "x", once=kind.once
            )
            for kind, group in zip(KINDS, groups, strict=True)
        )
        places = tuple(str(opts.address.shifted(each)) for each in range(tp))
        hello = Hello(
            version=PROTOCOL_VERSION,
            incarnation=uuid.uuid4().hex,
            role=role,
            rank=number,
            to="none",
            address=places[number],
            addresses=places,
            model="made-up",
            weights="made-up",
            cache=Cache(tp, said),
            link=links.kind,
            digest=groups[0].digest_name,
            verify=opts.verify,
            ahead=role == "D" and opts.prefetch_bytes > 0,
        )
        self.rank = Rank(hello, opts, RankCache(groups, [kind.numbers for kind in KINDS]), links)
        self._seen: list[do.Event] = []

    def heard(self, event: do.Event) -> bool:
        return event in self.events()

    def events(self) -> list[do.Event]:
        self._seen += self.rank.events()
        return self._seen

    def compute(self, tables: do.Blocks, number: int, start: int, stop: int) -> None:
        """A forward of the layer with this number: rows for its tokens, or the state after them."""
        for kind, pages in zip(KINDS, self.pages, strict=True):
            if number not in kind.numbers:
                continue
            page = pages[kind.numbers.index(number)]
            for token in [stop] if kind.once else range(start, stop):
                page_rows, at = self._row(kind, page, tables, token)
                for local, head in enumerate(kind.of_rank(self.number, self.tp)):
                    page_rows[local, at] = truth(number, token, head, kind.content)

    def _row(self, kind: Kind, page: torch.Tensor, tables: do.Blocks, token: int) -> tuple[torch.Tensor, int]:
        table = tables[kind.table]
        return (page[table[0]], 0) if kind.once else (page[table[token // BLOCK]], token % BLOCK)

    def wrong(self, tables: do.Blocks, start: int, stop: int, state_after: int) -> list[tuple[int, ...]]:
        """(layer, token, head) whose pages do not hold the truth."""
        wrong = []
        for kind, pages in zip(KINDS, self.pages, strict=True):
            for number, page in zip(kind.numbers, pages, strict=True):
                for token in [state_after] if kind.once else range(start, stop):
                    rows, at = self._row(kind, page, tables, token)
                    for local, head in enumerate(kind.of_rank(self.number, self.tp)):
                        if not torch.equal(rows[local, at], truth(number, token, head, kind.content)):
                            wrong.append((number, token, head))
        return wrong


@contextlib.contextmanager
def pair(
    tps: tuple[int, int], links: Callable[[str, int], LinkFactory], **options: Any
) -> Iterator[tuple[Engine, Engine]]:
    """A P and a D of so many ranks each."""
    made: list[Engine] = []
    try:
        for role, tp in zip("PD", tps, strict=True):
            port, fill = free_ports(tp), 0.0 if role == "P" else -1.0
            ranks = [HybridRank(role, each, tp, port, links(role, each), fill, options) for each in range(tp)]
            made.append(Engine(Address("127.0.0.1", port), None, ranks))  # type: ignore[arg-type]
        yield made[0], made[1]
    finally:
        for engine in reversed(made):
            engine.stop()


def step(p: Engine, tables: do.Blocks, start: int, stop: int, key: str = "k") -> None:
    p.do(do.PromptBlocks(key, tables))
    for each in p.ranks:
        for number in range(5):
            each.compute(tables, number, start, stop)
            each.rank.do(do.Computed(((key, stop),), number, number + 1, READY))
        each.rank.do(do.Flush((key,)))


def begin(p: Engine, d: Engine, key: str = "k") -> None:
    d.do(do.Expect(key, p.address, TOKENS, b"digest"))
    p.do(do.OfferPrompt(key, d.address, TOKENS, b"digest"))
    d.wait(do.Begun(key))


def failures(d: Engine) -> list[do.LoadFailed]:
    return [event for event in d.ranks[0].events() if isinstance(event, do.LoadFailed)]


def expect_all(d: Engine, tables: do.Blocks, start: int) -> None:
    """Every rank of D holds what P computed, and nothing before `start`."""
    for each in d.ranks:
        assert each.wrong(tables, start, TOKENS - 1, state_after=TOKENS) == []
        untouched = each.pages[0][0][tables[0][0]][:, :start]
        assert torch.equal(untouched, torch.full_like(untouched, -1.0))


P_TABLES = ([3, 4, 5, 6, 7], [17])
OTHER_P_TABLES = ([13, 14, 15, 16, 18], [2])
D_TABLES = ([20, 11, 12, 9, 1], [8])


@pytest.fixture(params=["memory", "host", "nccl"])
def links(request):
    if request.param == "nccl":
        return lambda side, rank: nccl_links(blocking=False, staging=1 << 20)
    return plain_links(request.param)


@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 2), (4, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("cached", [0, 16])
def test_both_groups_arrive_whole_and_the_state_is_the_last_one(links, tps, cached):
    """The first half's state is overwritten by the second half's, and must never travel."""
    with pair(tps, links) as (p, d):
        begin(p, d)
        d.do(do.Load("k", cached, TOKENS - 1, D_TABLES))
        step(p, P_TABLES, 0, 40)
        step(p, P_TABLES, 40, TOKENS)
        d.wait(do.Loaded("k"))
        expect_all(d, D_TABLES, cached)
        p.wait(do.BlocksFree("k"))
        for engine in (p, d):
            engine.do(do.Forget("k"))
        wait_for(lambda: at_baseline(p) and at_baseline(d))
        sent = sum(each.rank.counters.values["bytes_sent"] for each in p.ranks)
        heads = {kind: max(kind.heads, tps[1]) for kind in KINDS}
        rows = 3 * (TOKENS - 1 - cached) * heads[ATTENTION] * 8 + 2 * heads[STATE] * 22
        assert sent == rows * 4, "each byte that a rank of D needs travels once"


def test_attention_travels_while_the_prompt_is_computed_and_the_state_at_its_end(links):
    with pair((1, 1), links) as (p, d):
        begin(p, d)
        d.do(do.Load("k", 0, TOKENS - 1, D_TABLES))
        step(p, P_TABLES, 0, 40)
        scattered = d.ranks[0].rank.counters.values
        wait_for(lambda: scattered["bytes_scattered"] == 3 * 40 * 4 * 8 * 4)
        step(p, P_TABLES, 40, TOKENS)
        d.wait(do.Loaded("k"))
        expect_all(d, D_TABLES, 0)


def test_a_preempted_prompt_comes_again_with_both_groups(links):
    with pair((2, 1), links) as (p, d):
        begin(p, d)
        step(p, P_TABLES, 0, 40)
        for each in p.ranks:
            each.rank.revoke(["k"])
            for table, pages in zip(P_TABLES, each.pages, strict=True):
                for page in pages:
                    page[table] = 7.0
        d.do(do.Load("k", 0, TOKENS - 1, D_TABLES))
        step(p, OTHER_P_TABLES, 0, 40)
        step(p, OTHER_P_TABLES, 40, TOKENS)
        d.wait(do.Loaded("k"))
        expect_all(d, D_TABLES, 0)


def compute_attention(p: Engine, d: Engine) -> None:
    """All that D waits for but the state, which P has not computed yet; until D has written it."""
    p.do(do.PromptBlocks("k", P_TABLES))
    for each in p.ranks:
        for number in ATTENTION.numbers:
            each.compute(P_TABLES, number, 0, TOKENS)
            each.rank.do(do.Computed((("k", TOKENS),), number, number + 1, READY))
        each.rank.do(do.Flush(("k",)))
    scattered = d.ranks[0].rank.counters.values
    wait_for(lambda: scattered["bytes_scattered"] == 3 * (TOKENS - 1) * 4 * 8 * 4)


def compute_state(p: Engine) -> None:
    for each in p.ranks:
        for number in STATE.numbers:
            each.compute(P_TABLES, number, 0, TOKENS)
            each.rank.do(do.Computed((("k", TOKENS),), number, number + 1, READY))
        each.rank.do(do.Flush(("k",)))


def expect_failed_without_a_state(d: Engine) -> do.LoadFailed:
    """The load has failed, and nothing has been written to the state's block."""
    wait_for(lambda: failures(d))
    assert not d.ranks[0].heard(do.Loaded("k"))
    for page in d.ranks[0].pages[1]:
        assert torch.equal(page, torch.full_like(page, -1.0))
    return failures(d)[0]


def test_a_load_of_which_only_the_state_is_missing_fails_with_its_link(links):
    with pair((1, 1), links) as (p, d):
        begin(p, d)
        d.do(do.Load("k", 0, TOKENS - 1, D_TABLES))
        compute_attention(p, d)
        break_link(d)
        compute_state(p)
        expect_failed_without_a_state(d)
        p.wait(do.BlocksFree("k"))
        for engine in (p, d):
            engine.do(do.Forget("k"))
        wait_for(lambda: at_baseline(p) and at_baseline(d))


def test_a_flipped_bit_of_the_state_alone_fails_the_load():
    network, made = MemoryNetwork(), {}

    def links(side: str, rank: int) -> LinkFactory:
        made[side] = FaultyLinks(network.rank(), Faults())
        return made[side]

    with pair((1, 1), links, verify=True) as (p, d):
        begin(p, d)
        d.do(do.Load("k", 0, TOKENS - 1, D_TABLES))
        compute_attention(p, d)
        made["D"].change(flip_at=0)
        compute_state(p)
        assert "checksum" in expect_failed_without_a_state(d).reason


def test_what_comes_before_its_request_waits_with_its_state():
    """The whole prompt is pushed to an early buffer; then the request takes a part of it."""
    with pair((2, 1), plain_links("memory"), prefetch_bytes=1 << 20) as (p, d):
        d.do(do.Expect("warm", p.address, 2, b"digest"))  # connects the two
        wait_for(lambda: sum(each.rank.counters.snapshot()["links"] for each in d.ranks) == 2)
        d.do(do.Drop("warm", "connected"))
        d.do(do.Forget("warm"))
        p.do(do.OfferPrompt("k", d.address, TOKENS, b"digest"))
        step(p, P_TABLES, 0, TOKENS)
        whole = (3 * TOKENS * 4 * 8 + 2 * 2 * 22) * 4
        wait_for(lambda: d.ranks[0].rank.counters.values["bytes_ahead"] == whole)
        d.do(do.Expect("k", p.address, TOKENS, b"digest"))
        d.wait(do.Begun("k"))
        d.do(do.Load("k", 16, TOKENS - 1, D_TABLES))
        d.wait(do.Loaded("k"))
        expect_all(d, D_TABLES, 16)


def test_a_peer_without_the_state_is_refused_with_a_sentence(monkeypatch):
    links = plain_links("memory")
    with pair((1, 1), links) as (p, d):
        hello = d.ranks[0].rank.context.hello
        attention = Cache(1, hello.cache.groups[:1])
        monkeypatch.setattr(d.ranks[0].rank.context, "hello", replace(hello, cache=attention))
        d.do(do.Expect("k", p.address, TOKENS, b"digest"))
        wait_for(lambda: failures(d))
        assert "numbers of KV groups differ: 2 at" in failures(d)[0].reason
        assert "serve the same model" in failures(d)[0].reason
