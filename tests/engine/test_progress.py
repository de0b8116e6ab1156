"""Who is busy is waited for, who is idle is waited for, and who hangs is not: `stall_seconds`."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from engine_support import Engine, Geometry, at_baseline, engines, prefill, step, wait_for, wrong_cells
from memory_links import MemoryNetwork

from p2pkv.engine import commands as do
from p2pkv.pairing import Address

ONE = Geometry()
BLOCKS = list(range(6))
LEASE, STALL = 1.0, 1.6
LONG = 3.0
"""Seconds: several leases, and longer than a stall."""


@pytest.fixture
def links():
    network = MemoryNetwork()
    return lambda side, rank: network.rank()


def hang(engine: Engine) -> None:
    """The forward thread enters a step that has work, and stays there."""
    for each in engine.ranks:
        each.rank.steps.begin(time.monotonic())


def wake(engine: Engine) -> None:
    for each in engine.ranks:
        each.rank.steps.end()


def lasts(condition: Callable[[], object], seconds: float) -> None:
    """It holds now and for so long."""
    with pytest.raises(AssertionError, match="did not come true"):
        wait_for(lambda: not condition(), seconds)


def failures(engine: Engine) -> list[do.Event]:
    return engine.ranks[0].events(do.LoadFailed)


def half_a_push(p: Engine, d: Engine) -> None:
    """96 tokens, of which 48 are computed and pushed."""
    d.do(do.Expect("k", p.address, 96, b"digest"))
    p.do(do.OfferPrompt("k", d.address, 96, b"digest"))
    d.wait(do.Begun("k"))
    d.do(do.Load("k", 0, 95, (BLOCKS,)))
    step(p, "k", BLOCKS, 0, 48)
    wait_for(lambda: d.ranks[0].rank.counters.values["bytes_scattered"] == 48 * 4 * 2 * 8 * 4)


def end(p: Engine, d: Engine) -> None:
    p.wait(do.BlocksFree("k"))
    for engine in (p, d):
        engine.do(do.Forget("k"))
    wait_for(lambda: at_baseline(p) and at_baseline(d))


def test_a_p_that_hangs_in_a_step_ends_ds_requests_and_holds_nothing_when_it_wakes(links):
    with engines(ONE, ONE, links, lease_seconds=LEASE, stall_seconds=STALL) as (p, d):
        half_a_push(p, d)
        d.do(do.Expect("queued", p.address, 32, b"digest"))
        p.do(do.Hold("queued", d.address))
        hang(p)
        lasts(lambda: not failures(d), STALL - 0.3)
        wait_for(lambda: len(failures(d)) == 2, LEASE + 5.0)
        why = {event.key: event.reason for event in failures(d)}
        assert "its engine hangs" in why["k"] and "has not confirmed this request" in why["queued"]
        for page in d.ranks[0].pages:
            page[:] = 5.0
        d.do(do.Forget("queued"))
        wake(p)
        step(p, "k", BLOCKS, 48, 96)
        p.do(do.OfferPrompt("queued", d.address, 32, b"digest"))
        p.wait(do.BlocksFree("queued"))
        p.do(do.Forget("queued"))
        end(p, d)
        assert all((page == 5.0).all() for page in d.ranks[0].pages), "late data was written"


def test_a_d_that_hangs_in_a_step_does_not_keep_ps_pages(links):
    """Its engine thread is well, and says that the request waits until the step has lasted too long."""
    with engines(ONE, ONE, links, lease_seconds=LEASE, stall_seconds=STALL) as (p, d):
        d.do(do.Expect("k", p.address, 96, b"digest"))
        prefill(p, "k", d.address, 96, BLOCKS, chunk=96)
        d.wait(do.Begun("k"))
        hang(d)
        lasts(lambda: not p.all_heard(do.BlocksFree("k")), STALL - 0.1)
        p.wait(do.BlocksFree("k"), LEASE + 5.0)
        wait_for(lambda: len(failures(d)) == 1)
        wake(d)
        end(p, d)


def test_a_d_that_hangs_in_mid_transfer_costs_p_nothing(links):
    with engines(ONE, ONE, links, lease_seconds=LEASE, stall_seconds=STALL) as (p, d):
        half_a_push(p, d)
        hang(d)
        p.wait(do.BlocksFree("k"), STALL + LEASE + 5.0)
        wait_for(lambda: len(failures(d)) == 1)
        wake(d)
        end(p, d)


@pytest.mark.parametrize("who", ["P", "D"])
def test_who_is_idle_is_not_dead_however_long(links, who):
    """The request waits in P's queue, or in D's, and no step runs."""
    with engines(ONE, ONE, links, lease_seconds=LEASE, stall_seconds=STALL) as (p, d):
        idle = p if who == "P" else d
        hang(idle)
        wake(idle)
        d.do(do.Expect("k", p.address, 96, b"digest"))
        p.do(do.Hold("k", d.address))
        if who == "D":
            prefill(p, "k", d.address, 96, BLOCKS, chunk=96)
        lasts(lambda: not failures(d) and not p.all_heard(do.BlocksFree("k")), LONG)
        if who == "P":
            prefill(p, "k", d.address, 96, BLOCKS, chunk=96)
        d.wait(do.Begun("k"))
        d.do(do.Load("k", 0, 95, (BLOCKS,)))
        d.wait(do.Loaded("k"))
        assert wrong_cells(d.ranks[0], BLOCKS, 0, 95) == []
        end(p, d)


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_step_longer_than_the_lease_and_shorter_than_a_stall_is_waited_for(links, who):
    with engines(ONE, ONE, links, lease_seconds=LEASE, stall_seconds=60.0) as (p, d):
        busy = p if who == "P" else d
        half_a_push(p, d)
        hang(busy)
        lasts(lambda: not failures(d) and not p.all_heard(do.BlocksFree("k")), LONG)
        step(p, "k", BLOCKS, 48, 96)
        wake(busy)
        d.wait(do.Loaded("k"))
        assert wrong_cells(d.ranks[0], BLOCKS, 0, 95) == []
        end(p, d)


def test_many_short_steps_are_no_stall(links):
    """It is one step that must not last too long, not a series of them."""
    with engines(ONE, ONE, links, lease_seconds=LEASE, stall_seconds=STALL) as (p, d):
        d.do(do.Expect("k", p.address, 96, b"digest"))
        p.do(do.Hold("k", d.address))

        def steps() -> bool:
            hang(p)
            return not failures(d)

        lasts(steps, LONG)
        wake(p)
        d.do(do.Drop("k", "the client has left"))
        p.do(do.Abort("k", "the client has left"))
        end(p, d)


def test_a_load_that_gets_nothing_for_long_ends_although_p_is_alive(links):
    """P has preempted it, say, and never comes to it again; until D has pages, it may wait for ever."""
    with engines(ONE, ONE, links, lease_seconds=LEASE, stall_seconds=STALL) as (p, d):
        half_a_push(p, d)
        p.ranks[0].rank.revoke(["k"])
        lasts(lambda: not failures(d), STALL - 0.3)
        wait_for(lambda: failures(d))
        assert "answers, and has pushed nothing" in failures(d)[0].reason
        p.do(do.OfferPrompt("k", d.address, 96, b"digest"))
        end(p, d)


def test_an_event_ends_the_forward_threads_wait(links):
    """What happens in the wait, and what has happened before it; else it would outlast the test."""
    with engines(ONE, ONE, links) as (_, d):
        rank = d.ranks[0].rank
        for meanwhile in (True, False):
            d.do(do.Expect("k", Address("127.0.0.1", 1), 96, b"digest"))
            d.do(do.Drop("k", "over"))
            if not meanwhile:
                wait_for(lambda: rank._events)
            rank.wait_for_event(300.0)
            assert [type(event) for event in rank.events()] == [do.LoadFailed]
            d.do(do.Forget("k"))


def test_an_event_is_called_out_once_until_it_has_been_heard(links):
    with engines(ONE, ONE, links) as (_, d):
        rank, calls = d.ranks[0].rank, []
        rank.call_on_event(lambda: calls.append(len(rank._events)))
        for heard in (1, 2):
            for key in "ab":
                d.do(do.Expect(key, Address("127.0.0.1", 1), 96, b"digest"))
                d.do(do.Drop(key, "over"))
            wait_for(lambda: len(rank._events) == 2)
            assert len(calls) == heard
            assert len(rank.events()) == 2
            for key in "ab":
                d.do(do.Forget(key))
