"""Engines over NCCL links: what they do beyond pushing, which `test_push` shows for every kind of link. When
a link is closed and built again is in tests/engine/test_link_ends.py."""

import threading
import time

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from p2pkv.engine import commands as do
from support.engine.engines import Forward, Make, on_engine_thread, prefill
from support.engine.transfers import BLOCKS, arrives, begin, failure, load, push, rest, value
from support.links.pairs import nccl_of
from support.waiting import wait_for

TOKENS = 32


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


@pytest.mark.parametrize("role", ["P", "D"])
def test_an_error_within_a_group_costs_that_link_only(make_nccl: Make, role: str) -> None:
    p, d = make_nccl("P"), make_nccl("D")
    push(p, d, "first", salt=1)
    refusing = nccl_of(p if role == "P" else d)
    refusing.refuses = 1
    begin(p, d)
    load(d)
    assert f"NCCL's {'send' if role == 'P' else 'recv'} failed with result 3" in failure(d)
    assert refusing.refuses == 0
    d.do(do.Forget("k"))
    push(p, d, "again", salt=2, tokens=96)
    rest(p, d)
    assert max(refusing.groups) > 1


@pytest.mark.parametrize(
    ("moving", "fenced", "pause"), [(True, False, 2e-5), (False, True, 1e-3), (True, True, 2e-5)]
)
def test_how_often_a_rank_looks(make_nccl: Make, moving: bool, fenced: bool, pause: float) -> None:
    """Often while NCCL has something under way: nobody wakes it when a message has arrived. At a fence alone
    once in a millisecond: each look is a call to the driver, and a prefill may take seconds."""
    rank, forward = make_nccl("P").ranks[0].rank, Forward()
    seen: list[float] = []

    def look() -> None:
        rank.core.roles[0].after = lambda now: moving
        if fenced:
            rank.core.commands.append(do.Computed((), 0, 1, forward))
        rank.core.turn(time.monotonic())
        seen.append(rank.core.pause(time.monotonic()))

    on_engine_thread(rank, look)
    forward.done.set()
    assert seen == [pause]


def test_a_turn_that_hangs_for_a_lease_has_its_links_broken(
    make_nccl: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_nccl("P", lease_seconds=1.0)
    rescued = threading.Event()
    monkeypatch.setattr(engine.ranks[0].links, "rescue", lambda reason, wherever: rescued.set())
    on_engine_thread(engine.ranks[0].rank, lambda: rescued.wait(10.0))
    assert rescued.is_set()


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
