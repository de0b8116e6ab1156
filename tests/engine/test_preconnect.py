"""Links that D builds to the P's that the proxy names, before any request."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from p2pkv.engine import commands as do
from p2pkv.engine import preconnect
from p2pkv.engine.liveness import Beat
from p2pkv.protocol.messages import Partners, encode
from support.engine.engines import Engine, Geometry, Make, engine_maker, other_group, plain_links, says
from support.engine.transfers import push, value
from support.hostile import dealer
from support.links.pairs import nccl_of
from support.waiting import wait_for

ONE = Geometry()
one_kind = pytest.mark.parametrize("make_nccl", ["nccl-polled"], indirect=True)


@pytest.fixture
def silent() -> Iterator[Callable[[], str]]:
    """Addresses at which connections are taken, and nothing is ever said."""
    sockets: list[socket.socket] = []

    def one() -> str:
        sockets.append(socket.create_server(("127.0.0.1", 0)))
        return f"127.0.0.1:{sockets[-1].getsockname()[1]}"

    yield one
    for each in sockets:
        each.close()


def begun(engine: Engine) -> int:
    """How many communicators this rank has started, ever."""
    return nccl_of(engine).live + nccl_of(engine).aborted


def ahead(d: Engine, rank: int = 0) -> int:
    return d.ranks[rank].rank.counters.values["links_preconnected"]


def links(engine: Engine) -> int:
    return value(engine, "links")


def name(d: Engine, *ps: Engine | str) -> None:
    """What the proxy says to rank 0 of D."""
    d.ranks[0].rank.do(do.NamePartners(tuple(str(p.address) if isinstance(p, Engine) else p for p in ps)))


def looks(d: Engine, count: int = 4) -> None:
    """Let D look so often at what it may do."""
    partners = d.ranks[0].rank.core.decode.preconnect
    with patch.object(partners, "look", wraps=partners.look) as look:
        wait_for(lambda: look.call_count >= count, what="D's looks")


def test_the_first_request_starts_no_communicator(make_nccl: Make) -> None:
    p, d = make_nccl("P"), make_nccl("D")
    assert begun(p) == begun(d) == 0
    name(d, p)
    wait_for(lambda: ahead(d) == 1, what="the link")
    assert begun(p) == begun(d) == 1
    push(p, d, "first", salt=1)
    assert begun(p) == begun(d) == 1, "the request has built a link of its own"
    assert value(p, "links_aborted") == 0


@one_kind
def test_without_the_option_d_waits_for_the_first_request(make_nccl: Make) -> None:
    p, d = make_nccl("P"), make_nccl("D", preconnect=False)
    name(d, p)
    looks(d)
    assert begun(d) == 0 and value(d, "peers") == 0
    push(p, d, "first", salt=1)
    assert begun(d) == 1 and ahead(d) == 0


@one_kind
def test_nothing_is_built_ahead_while_d_captures_its_graphs(make_nccl: Make) -> None:
    p, d = make_nccl("P"), make_nccl("D")
    steps = d.ranks[0].rank.steps
    steps.serving = False
    name(d, p)
    looks(d)
    assert value(d, "peers") == 0
    beats = [Beat(steps=0, work=False)]
    steps.read_beats = lambda: [beats.pop()] if beats else []
    wait_for(lambda: ahead(d) == 1, what="the link")


@one_kind
def test_no_more_than_max_links_come_up_ahead_and_a_request_takes_ones_place(make_nccl: Make) -> None:
    d = make_nccl("D", max_links=2)
    ps = [make_nccl("P") for _ in range(10)]
    name(d, *ps)
    wait_for(lambda: ahead(d) == 2, what="two links")
    looks(d)
    assert begun(d) == links(d) == 2
    assert [begun(p) for p in ps] == [1, 1, *[0] * 8], "not those that were named first"
    push(ps[5], d, "third", salt=1)
    wait_for(lambda: links(d) == 2, what="one idle link closed")
    assert nccl_of(ps[5]).live == 1, "the link that a request has used went first"
    looks(d)
    assert begun(d) == 3, "a link was built ahead although there are max_links"
    push(ps[0], d, "one that was named first", salt=2)
    push(ps[5], d, "again", salt=3)
    assert nccl_of(ps[5]).live == 1


@one_kind
def test_who_never_answers_holds_up_nobody(make_nccl: Make, silent: Callable[[], str]) -> None:
    p, q, d = make_nccl("P"), make_nccl("P"), make_nccl("D")
    deaf = [silent() for _ in range(preconnect.AT_ONCE + 1)]
    name(d, deaf[0], p, *deaf[1:], q)
    wait_for(lambda: begun(p) == 1, seconds=preconnect.FRESH_SECONDS, what="the link to P")
    push(q, d, "another request", salt=1)
    wait_for(lambda: ahead(d) >= 1, what="the link to P")
    push(p, d, "first", salt=2)
    assert begun(p) == 1


@one_kind
def test_who_never_answers_gives_its_place_to_the_next(
    make_nccl: Make,
    silent: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(preconnect, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(preconnect, "FIRST_PAUSE", 0.1)
    p, d = make_nccl("P"), make_nccl("D", max_links=1)
    deaf = silent()
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        name(d, deaf, p)
        wait_for(lambda: ahead(d) == 1, what="the link to P")
    said = [(record.levelno, record.getMessage()) for record in caplog.records if deaf in record.getMessage()]
    assert [level for level, _ in said] == [logging.INFO], "said once, and nobody is blamed"
    assert "a request for it builds its own" in said[0][1] and "did not answer in time" in said[0][1]
    assert value(d, "transfers_failed") == 0


@one_kind
def test_requests_are_not_failed_for_a_p_that_has_refused_a_link_ahead(
    make_nccl: Make, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = make_nccl("P"), make_nccl("D")
    mine = p.ranks[0].hello
    says(p, replace(mine, cache=other_group(mine.cache, dtype="float16")))
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        name(d, p)
        wait_for(lambda: "no link to P at" in caplog.text, what="the line in D's log")
    assert "cache element types differ" in caplog.text and ahead(d) == 0
    says(p, mine)
    push(p, d, "a request at once", salt=1)


@one_kind
def test_a_link_ahead_takes_no_place_on_p_of_one_in_use(
    make_nccl: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconnect, "PATIENCE_SECONDS", 0.5)
    p = make_nccl("P", max_links=1)
    first, second = make_nccl("D"), make_nccl("D")
    push(p, first, "k", salt=1)
    name(second, p)
    wait_for(lambda: value(second, "peers"), what="the second D's try")
    wait_for(lambda: not value(second, "peers"), what="its end")
    assert (begun(p), nccl_of(first).live, begun(second)) == (1, 1, 0)
    push(p, second, "a request needs it", salt=2)
    wait_for(lambda: nccl_of(p).live == 1, what="P with one communicator")
    assert nccl_of(second).live == 1


@one_kind
def test_on_p_a_link_that_no_request_has_used_goes_first(make_nccl: Make) -> None:
    p = make_nccl("P", max_links=2)
    used, new, third = make_nccl("D"), make_nccl("D"), make_nccl("D")
    push(p, used, "k", salt=1)
    name(new, p)
    wait_for(lambda: ahead(new) == 1, what="the link ahead")
    push(p, third, "k3", salt=2)
    wait_for(lambda: nccl_of(p).live == 2, what="P with two communicators")
    wait_for(lambda: nccl_of(new).live == 0, what="the end of the one that was built ahead")
    assert nccl_of(used).live == nccl_of(third).live == 1


@one_kind
def test_links_without_requests_last(make_nccl: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv.engine.from_prefill.IDLE_SECONDS", 0.1)
    monkeypatch.setattr("p2pkv.engine.to_decode.FORGOTTEN_SECONDS", 0.1)
    monkeypatch.setattr(preconnect, "BEAT_SECONDS", 0.2)
    p, d = make_nccl("P", lease_seconds=0.8), make_nccl("D", lease_seconds=0.8)
    name(d, p)
    wait_for(lambda: ahead(d) == 1, what="the link")
    begin = time.monotonic()
    wait_for(lambda: time.monotonic() - begin > 2.0, what="more than P waits for a word, and D for a request")
    push(p, d, "first", salt=1)
    assert begun(p) == begun(d) == 1
    begin = time.monotonic()
    wait_for(lambda: time.monotonic() - begin > 2.0, what="the same after a request")
    assert nccl_of(p).live == nccl_of(d).live == 1


@one_kind
def test_a_p_that_restarts_gets_its_link_again(make_nccl: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconnect, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(preconnect, "BEAT_SECONDS", 0.2)
    p, d = make_nccl("P"), make_nccl("D")
    name(d, p)
    wait_for(lambda: ahead(d) == 1, what="the link")
    p.stop()
    again = make_nccl("P", kv_port=p.address.port)
    wait_for(lambda: ahead(d) == 2, what="the link to its successor")
    push(again, d, "first", salt=1)
    assert begun(again) == 1


def test_all_ranks_of_d_hear_of_it_and_link_to_their_ranks_of_p(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconnect, "LEFT_SECONDS", 0.0)
    with engine_maker(plain_links("memory"), Geometry(kv_heads=4, tp=2)) as make:
        p, d = make("P"), make("D")
        name(d, p)
        for rank in range(2):
            wait_for(lambda rank=rank: ahead(d, rank) == 1, what=f"the link of rank {rank}")
        push(p, d, "first", salt=1)
        assert all(rank.rank.counters.values["links_aborted"] == 0 for rank in (*p.ranks, *d.ranks))
        name(d)
        for each in d.ranks:
            gauges = each.rank.counters
            wait_for(lambda gauges=gauges: not gauges.snapshot()["partners"], what="all ranks hearing of it")


@one_kind
def test_partners_of_another_engine_are_refused(make_nccl: Make) -> None:
    p, d = make_nccl("P"), make_nccl("D")
    with dealer(d.address) as line:
        line.send(encode(Partners(str(p.address), (str(p.address),))))
        refused = d.ranks[0].rank.counters.values
        wait_for(lambda: refused["messages_refused"] == 1, what="the refusal")
        line.send(encode(Partners(str(d.address), ("no address", str(p.address)))))
        wait_for(lambda: ahead(d) == 1, what="the link")
