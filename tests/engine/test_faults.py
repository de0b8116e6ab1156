"""What one engine sees when the other is absent, unfit, gone, or talks nonsense."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import pytest
from engine_support import (
    Engine,
    Geometry,
    at_baseline,
    engine_maker,
    engines,
    make_engine,
    on_engine_thread,
    other_group,
    prefill,
    says,
    step,
    vanish,
    wrong_cells,
)
from memory_links import MemoryNetwork

from p2pkv.control.endpoint import PortTaken
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from support.waiting import wait_for

ONE = Geometry()
BLOCKS = list(range(6))
NOWHERE = Address("127.0.0.1", 9)


@pytest.fixture
def links():
    network = MemoryNetwork()
    return lambda side, rank: network.rank()


@pytest.fixture
def lone(links):
    """Engines that the test makes by itself; stopped at the end."""
    with engine_maker(links) as make:
        yield make


GRACE = 5.0
"""Seconds after its lease in which whatever was given up has ended: the promise of docs/design.md."""


def failure(engine: Engine, key: str, lease: float = 5.0) -> str:
    """Wait until the load of `key` has failed, as promised; why."""

    def failed():
        return [event for event in engine.ranks[0].events(do.LoadFailed) if event.key == key]

    wait_for(failed, lease + GRACE, f"the failure of {key}")
    assert len(failed()) == 1
    return failed()[0].reason


def begin(p: Engine, d: Engine, key: str, salt: int = 0) -> None:
    """32 tokens are computed, and D expects them."""
    d.do(do.Expect(key, p.address, 32, b"digest"))
    prefill(p, key, d.address, 32, BLOCKS, chunk=32, salt=salt)


def load(d: Engine, key: str, blocks: list[int] = BLOCKS) -> None:
    """What has begun is loaded."""
    d.wait(do.Begun(key))
    d.do(do.Load(key, 0, 31, (blocks,)))
    d.wait(do.Loaded(key))


def halfway(p: Engine, d: Engine) -> None:
    """48 of 96 tokens are computed, and D has asked for all."""
    d.do(do.Expect("k", p.address, 96, b"digest"))
    p.do(do.OfferPrompt("k", d.address, 96, b"digest"))
    d.wait(do.Begun("k"))
    d.do(do.Load("k", 0, 95, (BLOCKS,)))
    step(p, "k", BLOCKS, 0, 48)


def test_d_gives_up_a_p_that_never_appears(lone):
    d = lone("D", lease_seconds=0.5)
    d.do(do.Expect("k", NOWHERE, 20, b"digest"))
    assert "0.5 s" in failure(d, "k", 0.5)
    d.do(do.Forget("k"))
    wait_for(lambda: at_baseline(d))


def test_p_lets_pages_go_when_no_d_appears(lone):
    p = lone("P", lease_seconds=0.5)
    prefill(p, "k", NOWHERE, 40, BLOCKS, chunk=40)
    p.wait(do.BlocksFree("k"), 0.5 + GRACE)
    p.do(do.Forget("k"))
    wait_for(lambda: at_baseline(p))


def test_a_sent_out_of_turn_ends_the_link_and_not_the_engine(links):
    with engines(ONE, ONE, links) as (p, d):
        halfway(p, d)
        wait_for(lambda: d.ranks[0].rank.counters.values["bytes_scattered"])
        rank = p.ranks[0].rank
        (peer,) = rank.core.roles[0].peers
        word = m.encode(m.Sent("k", 1, 99, peer.link.number, False))
        on_engine_thread(rank, lambda: peer.connection.send(word))
        assert "out of step" in failure(d, "k")
        d.do(do.Forget("k"))
        p.wait(do.BlocksFree("k"))
        p.do(do.Forget("k"))
        begin(p, d, "again")
        load(d, "again")


def test_a_request_outlives_any_number_of_lost_connections_within_a_lease(lone):
    p, d = lone("P"), lone("D", lease_seconds=30.0)
    peers = d.ranks[0].rank.core.decode.peers
    d.do(do.Expect("k", p.address, 32, b"digest"))
    for _ in range(6):
        wait_for(lambda: [peer for peer in peers if peer.dialing.open], what="a connection")
        (peer,) = peers
        on_engine_thread(
            d.ranks[0].rank, lambda peer=peer: peers.lose(peer, "cut by a test", time.monotonic())
        )
    # A prompt that P has begun would end with the connection on which D has claimed it.
    wait_for(lambda: [peer for peer in peers if peer.dialing.open], what="the last connection")
    prefill(p, "k", d.address, 32, BLOCKS, chunk=32)
    load(d, "k")
    assert wrong_cells(d.ranks[0], BLOCKS, 0, 31) == []


def test_a_request_that_p_never_vouches_for_ends_a_lease_after_its_connection_was_lost_first(lone):
    p, d = lone("P"), lone("D", lease_seconds=1.0)
    d.do(do.Expect("k", p.address, 32, b"digest"))
    peers, end = d.ranks[0].rank.core.roles[0].peers, time.monotonic() + 10.0

    def cut() -> None:
        for peer in peers:
            if peer.dialing.open:
                peers.lose(peer, "cut by a test", time.monotonic())

    while not d.ranks[0].events(do.LoadFailed):
        assert time.monotonic() < end, "it is asked for anew without end"
        on_engine_thread(d.ranks[0].rank, cut)


def test_a_restarted_p_is_accepted_at_once(links, lone):
    p, d = lone("P", lease_seconds=2.0), lone("D", lease_seconds=2.0)
    begin(p, d, "a")
    load(d, "a")
    d.do(do.Forget("a"))
    vanish(p)
    again = make_engine("P", ONE, lambda rank: links("P", rank), lease_seconds=2.0, kv_port=p.address.port)
    try:
        for attempt in ("b", "c"):
            begin(again, d, attempt, salt=1)
        load(d, "c", [20, 21])
        assert wrong_cells(d.ranks[0], [20, 21], 0, 31, salt=1) == []
    finally:
        again.stop()


def test_p_aborts_before_and_during_the_prefill(links):
    with engines(ONE, ONE, links) as (p, d):
        for key, begun in (("early", False), ("late", True)):
            d.do(do.Expect(key, p.address, 64, b"digest"))
            p.do(do.Hold(key, d.address))
            if begun:
                p.do(do.OfferPrompt(key, d.address, 64, b"digest"))
                d.wait(do.Begun(key))
                d.do(do.Load(key, 0, 63, (BLOCKS,)))
                step(p, key, BLOCKS, 0, 32)
            p.do(do.Abort(key, "the client has left"))
            p.wait(do.BlocksFree(key))
            p.do(do.Forget(key))
            assert "the client has left" in failure(d, key)
            d.do(do.Forget(key))
        wait_for(lambda: at_baseline(p) and at_baseline(d))


def test_d_cancels_while_it_loads(links):
    with engines(ONE, ONE, links) as (p, d):
        halfway(p, d)
        d.do(do.Drop("k", "the client has left"))
        failure(d, "k")
        d.do(do.Forget("k"))
        for page in d.ranks[0].pages:
            page[:] = 5.0
        step(p, "k", BLOCKS, 48, 96)
        p.wait(do.BlocksFree("k"))
        p.do(do.Forget("k"))
        wait_for(lambda: at_baseline(p) and at_baseline(d))
        assert all((page == 5.0).all() for page in d.ranks[0].pages), "late data was written"


@pytest.mark.parametrize(
    ("geometry", "change", "words"),
    [
        (ONE, {"weights": "other"}, ("weights", "made-up", "other")),
        (ONE, {"version": 999}, ("versions", "999")),
        (ONE, {"link": "nccl"}, ("links", "nccl", "memory")),
        (dataclasses.replace(ONE, kv_heads=3), {}, ("2", "3")),
    ],
    ids=["weights", "version", "link", "cache"],
)
def test_ranks_that_do_not_fit_refuse_each_other(lone, geometry, change, words):
    p, d = lone("P"), lone("D", geometry)
    says(d, msgspec.structs.replace(d.ranks[0].hello, **change))
    d.do(do.Expect("k", p.address, 32, b"digest"))
    reason = failure(d, "k")
    assert all(word in reason for word in words), reason
    assert reason.startswith(f"{d.address} and {p.address} do not fit: "), reason


PIPELINED = {"layers": (2, 2), "tp": 1}


def test_ranks_of_p_that_describe_their_engine_differently_are_not_believed(lone):
    """Each of them fits D by itself; together they would send other rectangles than D has planned."""
    p, d = lone("P", Geometry(tp=2), lease_seconds=60.0), lone("D", lease_seconds=60.0)
    mine = p.ranks[1].hello
    says(p, msgspec.structs.replace(mine, cache=other_group(mine.cache, **PIPELINED)), 1)
    d.do(do.Expect("k", p.address, 32, b"digest"))
    verdict = f"{p.address.shifted(1)} and {p.address} do not fit: their Hellos describe"
    assert verdict in failure(d, "k")


def test_a_rank_of_p_that_speaks_of_an_engine_of_before_is_asked_anew(lone):
    p, d = lone("P", Geometry(tp=2), lease_seconds=60.0), lone("D", lease_seconds=60.0)
    true = p.ranks[1].hello
    says(p, msgspec.structs.replace(true, cache=other_group(true.cache, **PIPELINED)), 1)
    peers = d.ranks[0].rank.core.decode.peers
    lose = peers.lose

    def mend(peer, reason, now):
        says(p, true, 1)
        table = p.ranks[1].rank.core.roles[0].peers
        on_engine_thread(p.ranks[1].rank, lambda: [table.remove(each) for each in table])
        lose(peer, reason, now)

    peers.lose = mend
    begin(p, d, "k")
    load(d, "k")
    assert wrong_cells(d.ranks[0], BLOCKS, 0, 31) == []


def test_a_second_instance_on_the_same_port(lone, links):
    p = lone("P")
    with pytest.raises(PortTaken, match=r"ports \d+ to \d+ \(kv_port.*kv_port of its own"):
        make_engine("P", ONE, lambda rank: links("P", rank), kv_port=p.address.port)


def test_a_request_paired_with_another_d(lone):
    p, d = lone("P"), lone("D")
    p.do(do.Hold("k", NOWHERE))
    wait_for(lambda: p.ranks[0].rank.counters.snapshot()["prompts"])
    d.do(do.Expect("k", p.address, 32, b"digest"))
    assert str(NOWHERE) in failure(d, "k")
