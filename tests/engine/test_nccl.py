"""Engines over NCCL links: what they do beyond pushing, which `test_push` shows for every kind of link."""

from __future__ import annotations

import threading
import time

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from p2pkv.engine import commands as do
from support.engine.engines import Forward, Make, break_link, on_engine_thread, prefill, step
from support.engine.transfers import BLOCKS, arrives, ask, begin, failure, load, push, value
from support.links.pairs import nccl_of
from support.waiting import wait_for

TOKENS = 32
one_kind = pytest.mark.parametrize("make_nccl", ["nccl-polled"], indirect=True)


def test_other_sizes_of_nccls_buffers_are_refused_at_the_handshake(
    make_nccl: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL does not compare them, and P would write past D's buffers."""
    monkeypatch.delenv("NCCL_BUFFSIZE", raising=False)
    p = make_nccl("P")
    monkeypatch.setenv("NCCL_BUFFSIZE", "1048576")
    d = make_nccl("D")
    d.do(do.Expect("k", p.address, TOKENS, b"digest"))
    assert "NCCL_BUFFSIZE=1048576" in (reason := failure(d, "k")) and "NCCL_*BUFFSIZE" in reason
    assert nccl_of(p).live == nccl_of(d).live == 0


def test_a_link_that_failed_to_come_up_is_built_anew(make_nccl: Make) -> None:
    p, d = make_nccl("P"), make_nccl("D")
    nccl_of(d).fails_with = 2
    d.do(do.Expect("k", p.address, TOKENS, b"digest"))
    wait_for(lambda: value(d, "links_aborted"))
    nccl_of(d).fails_with = None
    counted = p.ranks[0].rank.counters
    wait_for(lambda: counted.values["links_aborted"] and counted.snapshot()["links"])
    prefill(p, "k", d.address, TOKENS, BLOCKS, chunk=TOKENS)
    load(d, tokens=TOKENS)
    arrives(d, tokens=TOKENS)


@pytest.mark.parametrize("knows", [True, False])
def test_messages_that_are_ready_together_are_one_launch_if_d_does_the_same(
    make_nccl: Make, knows: bool
) -> None:
    """A D of an older version does not know of it. That both group alike the simulation of NCCL checks."""
    p, d = make_nccl("P"), make_nccl("D")
    if not knows:
        context = d.ranks[0].rank.context
        context.hello = replace(context.hello, together=UNSET)
    begin(p, d)
    load(d)
    arrives(d)
    sizes = [nccl_of(engine).groups for engine in (p, d)]
    assert sizes[0] == sizes[1] and (max(sizes[0]) > 1) == knows


def test_a_rank_looks_often_while_nccl_has_something_under_way(make_nccl: Make) -> None:
    """Nobody wakes it when a message has arrived, and each look may launch one only."""
    engine = make_nccl("P")
    rank = engine.ranks[0].rank
    seen: list[float] = []

    def look() -> None:
        rank.core.roles[0].after = lambda now: True
        rank.core.turn(time.monotonic())
        seen.append(rank.core.pause(time.monotonic()))

    on_engine_thread(rank, look)
    assert seen == [engine.ranks[0].links.poll_seconds] == [2e-5]


def test_a_fence_alone_is_looked_at_once_in_a_millisecond(make_nccl: Make) -> None:
    """Each look is a call to the driver, and a prefill may take seconds."""
    engine = make_nccl("P")
    rank, forward = engine.ranks[0].rank, Forward()
    seen: list[float] = []

    def look(moving: bool) -> None:
        rank.core.roles[0].after = lambda now: moving
        rank.core.commands.append(do.Computed((), 0, 1, forward))
        rank.core.turn(time.monotonic())
        seen.append(rank.core.pause(time.monotonic()))

    on_engine_thread(rank, lambda: look(moving=False))
    forward.done.set()
    on_engine_thread(rank, lambda: forward.done.clear() or look(moving=True))
    forward.done.set()
    assert seen == [1e-3, 2e-5]


def test_a_turn_that_hangs_for_a_lease_has_its_links_broken(
    make_nccl: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_nccl("P", lease_seconds=1.0)
    rescued = threading.Event()
    monkeypatch.setattr(engine.ranks[0].links, "rescue", lambda reason, wherever: rescued.set())
    on_engine_thread(engine.ranks[0].rank, lambda: rescued.wait(10.0))
    assert rescued.is_set()


@one_kind
def test_a_link_may_take_longer_to_come_up_than_a_lease(make_nccl: Make) -> None:
    p, d = make_nccl("P", lease_seconds=1.0), make_nccl("D", lease_seconds=1.0)
    assert p.ranks[0].links.build_seconds > 5
    nccl_of(d).joins.clear()
    d.do(do.Expect("early", p.address, TOKENS, b"digest"))
    wait_for(lambda: p.ranks[0].rank.core.roles[0].peers, what="the connection")
    (peer,) = p.ranks[0].rank.core.roles[0].peers
    wait_for(lambda: peer.link.accepted, what="D's end of the link")
    first, begin = peer.link.number, time.monotonic()
    wait_for(lambda: time.monotonic() - begin > 2.5, what="more than two leases")
    assert peer.link.number == first and not peer.link.linked
    nccl_of(d).joins.set()
    wait_for(lambda: peer.link.linked, what="the link")
    assert peer.link.number == first
    d.do(do.Drop("early", "the client has left"))
    push(p, d, "k", salt=1)


@one_kind
def test_a_frozen_d_is_not_invited_for_ever(make_nccl: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make_nccl("P", lease_seconds=0.7), make_nccl("D", lease_seconds=0.7)
    push(p, d, "before", salt=1)
    (peer,) = p.ranks[0].rank.core.roles[0].peers
    d.do(do.Expect("k", p.address, 96, b"digest"))
    p.do(do.OfferPrompt("k", d.address, 96, b"digest"))
    d.wait(do.Begun("k"))
    with monkeypatch.context() as frozen:
        frozen.setattr(d.ranks[0].rank.core, "turn", lambda now: None)
        p.wait(do.BlocksFree("k"))
        break_link(p)
        wait_for(lambda: peer.link.parked, what="P inviting the frozen D no more")
    p.do(do.Forget("k"))
    d.do(do.Drop("k", "too late"))
    d.do(do.Forget("k"))
    # What P answered meanwhile was lost. D notices, and gives the connection up: not under the next request.
    (thawed,) = d.ranks[0].rank.core.roles[0].peers
    wait_for(lambda: thawed.unanswered_since is None or not thawed.dialing.open, what="D's notice")
    push(p, d, "after", salt=2)


@one_kind
@pytest.mark.parametrize(("side", "most"), [("P", 2), ("D", 1)])
def test_idle_links_beyond_max_links_are_closed_and_built_again(
    make_nccl: Make, side: str, most: int
) -> None:
    one = make_nccl(side, max_links=most)
    others = [make_nccl("D" if side == "P" else "P") for _ in range(most + 2)]
    for turn in range(2):
        for number, other in enumerate(others):
            p, d = (one, other) if side == "P" else (other, one)
            push(p, d, f"{turn}-{number}", salt=4 * turn + number)
        wait_for(lambda: nccl_of(one).live <= most, what="so many communicators")
        wait_for(lambda: value(one, "links") <= most, what="the count of them")
        wait_for(lambda: sum(nccl_of(each).live for each in others) <= most, what="as many on all others")
        assert not any(nccl_of(each).live for each in others[:-most]), "not the longest unused were closed"
    wait_for(lambda: nccl_of(one).aborted >= 4, what="four closed links")
    assert one.ranks[0].links.staging.used == 0 and one.ranks[0].links.stuck == 0


@one_kind
def test_p_closes_a_link_when_d_has_long_hung_up(make_nccl: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make_nccl("P", lease_seconds=1.0), make_nccl("D", lease_seconds=1.0)
    push(p, d, "k", salt=1)
    assert nccl_of(p).live == nccl_of(d).live == 1
    monkeypatch.setattr("p2pkv.engine.from_prefill.IDLE_SECONDS", 0.1)
    wait_for(lambda: nccl_of(d).live == 0, what="D hanging up")
    assert nccl_of(p).live == 1, "nobody tells P"
    monkeypatch.setattr("p2pkv.engine.to_decode.FORGOTTEN_SECONDS", 0.1)
    wait_for(lambda: nccl_of(p).live == 0, what="P closing its end")
    push(p, d, "again", salt=2)


@one_kind
def test_a_link_with_a_transfer_is_never_closed_as_idle(make_nccl: Make) -> None:
    p, busy, other = make_nccl("P", max_links=1), make_nccl("D"), make_nccl("D")
    far = [20 + block for block in BLOCKS]
    ask(p, busy, blocks=far)
    step(p, "k", far, 0, 48)
    push(p, other, "other", salt=9)
    wait_for(lambda: nccl_of(other).live == 0, what="the idle link closed")
    assert nccl_of(busy).live == 1
    step(p, "k", far, 48, 96)
    arrives(busy, blocks=far)
    assert value(busy, "links_aborted") == 0
