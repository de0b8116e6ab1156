"""The engine core is a process of its own: one that is stopped, hung or paused is vouched for no longer than
one whose step hangs. And each state of a transfer ends by itself, however lively both sides are."""

import pytest
from virtual.pair import BLOCKS, GRACE, HALF, LEASE, LONG, STALL, TOKENS, VirtualEngine, VirtualPair, value

from p2pkv.engine import commands as do
from support.engine.engines import step
from support.engine.transfers import arrives, ask

WAIT = 60.0
"""`wait_seconds`: longer than a stall and a lease."""

TROUBLES = ("stopped", "hung", "paused", "in one step")
each_trouble = pytest.mark.parametrize("trouble", TROUBLES)


@pytest.fixture
def pair() -> VirtualPair:
    made = VirtualPair(lease_seconds=LEASE, stall_seconds=STALL, wait_seconds=WAIT)
    for engine in (made.p, made.d):
        engine.core()
        made.until(lambda engine=engine: engine.rank.steps.scheduled, what="a beat")
    return made


def strike(engine: VirtualEngine, trouble: str) -> None:
    """From now on the engine core makes no step. Its worker is well, and in no step but for the last one."""
    if trouble == "stopped":
        engine.core_stops()
    elif trouble == "in one step":
        engine.hang()
    elif trouble == "hung":
        engine.core(work=True)
    else:
        engine.core(paused=True)


def heal(engine: VirtualEngine) -> None:
    engine.wake()
    engine.core(steps=2)


# An engine core that makes no step.


@each_trouble
@pytest.mark.parametrize("when", ["queued", "begun"])
def test_what_waits_for_a_p_whose_core_makes_no_step_ends(pair: VirtualPair, trouble: str, when: str) -> None:
    pair.expect()
    if when == "begun":
        ask(pair.p, pair.d)
    else:
        pair.p.do(do.HoldPrompt("k", pair.d.address))
    pair.until(lambda: value(pair.p, "prompts"), what="P's word of it")
    pair.lasts(pair.kept, 2.0)
    strike(pair.p, trouble)
    pair.lasts(pair.kept, STALL - GRACE)
    pair.until(lambda: pair.d.failures, GRACE + LEASE + GRACE, "the end of the request")
    if when == "begun":
        pair.p.wait(do.BlocksFree("k"))


@each_trouble
@pytest.mark.parametrize("when", ["before it loads", "in mid-transfer"])
def test_a_d_whose_core_makes_no_step_does_not_keep_ps_blocks(
    pair: VirtualPair, trouble: str, when: str
) -> None:
    if when == "in mid-transfer":
        pair.half_a_push()
    else:
        pair.offered()
    strike(pair.d, trouble)
    pair.lasts(pair.kept, STALL - 1.0)
    pair.p.wait(do.BlocksFree("k"), LEASE + GRACE)
    pair.until(lambda: pair.d.failures, LEASE + GRACE)
    heal(pair.d)
    pair.rest("k")


@each_trouble
@pytest.mark.parametrize("who", ["P", "D"])
def test_a_core_that_gets_on_again_in_time_has_lost_nothing(
    pair: VirtualPair, trouble: str, who: str
) -> None:
    struck = pair.p if who == "P" else pair.d
    pair.queued()
    pair.lasts(pair.kept, 2.0)
    strike(struck, trouble)
    pair.lasts(pair.kept, STALL + LEASE / 2)
    heal(struck)
    pair.lasts(pair.kept, LONG)
    pair.served()


def test_a_core_that_makes_steps_or_has_no_work_lives(pair: VirtualPair) -> None:
    """A queued request may wait for longer than a stall."""
    pair.queued()
    numbers = iter(range(10, 1 << 30))

    def steps() -> bool:
        pair.d.core(steps=next(numbers), work=True)
        return pair.kept()

    pair.lasts(steps, LONG)
    pair.served()


def test_a_rank_that_was_held_up_does_not_blame_its_core(
    pair: VirtualPair, caplog: pytest.LogCaptureFixture
) -> None:
    """It could take no beat meanwhile."""
    for held_up in (True, False):
        (pair.p.rank.stand_still if held_up else lambda _: pair.p.core_stops())(2 * STALL)
        pair.lasts(lambda: True, 3 * STALL)
        blamed = [record for record in caplog.records if "renews no lease" in record.getMessage()]
        assert bool(blamed) is not held_up


# Pauses.


def test_a_paused_p_gives_a_d_that_takes_nothing_one_lease(pair: VirtualPair) -> None:
    """vLLM's /pause waits until P's blocks are free."""
    pair.offered()
    pair.lasts(pair.kept, LONG)
    strike(pair.p, "paused")
    pair.lasts(pair.kept, LEASE - 1.0)
    pair.p.wait(do.BlocksFree("k"), GRACE)
    pair.fails("P is paused")
    pair.rest("k")


def test_what_d_takes_of_a_paused_p_comes(pair: VirtualPair) -> None:
    pair.expect()
    pair.computed()
    strike(pair.p, "paused")
    pair.lasts(pair.kept, LEASE / 2)
    pair.load()
    pair.ends_well()


# A process that nobody needs any more.


@pytest.mark.parametrize("who", ["P", "D"])
def test_an_engine_whose_server_is_gone_gives_up_what_it_holds(
    pair: VirtualPair, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    orphan = pair.p if who == "P" else pair.d
    pair.expect()
    if who == "P":
        pair.p.do(do.OfferPrompt("k", pair.d.address, TOKENS, b"digest"))
    else:
        pair.computed()
    pair.d.wait(do.Begun("k"))
    orphan.core(orphaned=True)
    pair.until(lambda: pair.d.failures, GRACE)
    pair.p.wait(do.BlocksFree("k"), GRACE)
    assert [r for r in caplog.records if r.levelname == "ERROR" and "gives up" in r.getMessage()]
    pair.rest("k")


# Each state has a bound of its own.


def test_a_request_that_p_never_begins_ends_although_p_vouches_for_it(pair: VirtualPair) -> None:
    pair.queued()
    pair.lasts(pair.kept, WAIT - 1.0)
    pair.fails("has not begun this prompt")


def test_a_request_that_d_never_admits_ends_and_p_has_its_blocks_back(pair: VirtualPair) -> None:
    pair.p = pair.engine("P", 7020, wait_seconds=2 * WAIT)
    pair.expect()
    pair.lasts(pair.kept, LEASE / 2)
    pair.computed()
    pair.d.wait(do.Begun("k"))
    pair.lasts(pair.kept, WAIT - 1.0)
    pair.fails("D has had no room")
    pair.rest("k")


def test_p_does_not_rely_on_d_for_the_end_of_its_patience() -> None:
    """A D of other options claims the prompt for ever."""
    pair = VirtualPair(lease_seconds=LEASE, stall_seconds=STALL, wait_seconds=WAIT)
    pair.d = pair.engine("D", 7020, wait_seconds=100 * WAIT)
    pair.offered()
    pair.lasts(pair.kept, WAIT - 2.0)
    pair.fails("D has taken nothing of this prompt")
    pair.rest("k")


def test_the_wait_for_p_and_the_wait_for_room_on_d_are_two(pair: VirtualPair) -> None:
    pair.queued()
    pair.lasts(pair.kept, 0.9 * WAIT)
    pair.computed()
    pair.d.wait(do.Begun("k"))
    pair.lasts(pair.kept, 0.9 * WAIT)
    pair.load()
    pair.ends_well()


def test_a_p_that_restarts_again_and_again_does_not_begin_the_wait_anew(pair: VirtualPair) -> None:
    pair.queued()
    began = pair.clock.now
    while not pair.d.failures and pair.clock.now - began < 2 * WAIT:
        pair.lasts(lambda: True, LEASE)
        pair.p.rank.vanish()
        pair.p = pair.engine("P", 7000)
        pair.p.do(do.HoldPrompt("k", pair.d.address))
    assert WAIT - GRACE < pair.clock.now - began < WAIT + LEASE + GRACE


def test_a_load_that_moves_may_last_longer_than_any_wait(pair: VirtualPair) -> None:
    pair.half_a_push()
    for token in range(HALF, TOKENS - 1):
        pair.lasts(pair.kept, 2 * WAIT / HALF)
        step(pair.p, "k", BLOCKS, token, token + 1)
    arrives(pair.d)
