"""Who is busy, idle or silent for less than its time is waited for; who hangs or is gone is not."""

from contextlib import suppress

import pytest
from virtual.pair import BLOCKS, GRACE, HALF, LEASE, LONG, STALL, TOKENS, VirtualPair, value

from p2pkv.control.endpoint import ConnectionFailure
from p2pkv.engine import commands as do
from p2pkv.protocol.sender import Sender
from p2pkv.protocol.state_machine import Decision
from support.engine.engines import step, wrong_cells
from support.engine.transfers import arrives, ask


@pytest.fixture
def pair() -> VirtualPair:
    return VirtualPair(lease_seconds=LEASE, stall_seconds=STALL)


# A forward thread that hangs, and one that only takes long.


def test_a_p_that_hangs_in_a_step_ends_ds_requests_and_holds_nothing_when_it_wakes(pair: VirtualPair) -> None:
    pair.half_a_push()
    pair.expect("queued", 32)
    pair.p.do(do.HoldPrompt("queued", pair.d.address))
    pair.p.hang()
    pair.lasts(lambda: not pair.d.failures, STALL - 0.3)
    pair.until(lambda: len(pair.d.failures) == 2, LEASE + GRACE)
    why = {event.key: event.reason for event in pair.d.failures}  # type: ignore[attr-defined]
    assert "its engine hangs" in why["k"] and "has not confirmed this request" in why["queued"]
    for page in pair.d.ranks[0].pages:
        page[:] = 5.0
    pair.d.do(do.Forget("queued"))
    pair.p.wake()
    step(pair.p, "k", BLOCKS, HALF, TOKENS)
    pair.p.do(do.OfferPrompt("queued", pair.d.address, 32, b"digest"))
    pair.rest("queued", "k")
    assert all((page == 5.0).all() for page in pair.d.ranks[0].pages), "late data was written"


@pytest.mark.parametrize("who", ["P", "D"])
def test_who_is_idle_is_not_dead_however_long(pair: VirtualPair, who: str) -> None:
    """The request waits in P's queue, or in D's, and no step runs."""
    idle = pair.p if who == "P" else pair.d
    idle.hang()
    idle.wake()
    pair.queued()
    if who == "D":
        pair.computed()
    pair.lasts(pair.kept, LONG)
    if who == "P":
        pair.served()


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_step_longer_than_the_lease_and_shorter_than_a_stall_is_waited_for(who: str) -> None:
    pair = VirtualPair(lease_seconds=LEASE, stall_seconds=60.0)
    busy = pair.p if who == "P" else pair.d
    pair.half_a_push()
    busy.hang()
    pair.lasts(pair.kept, LONG)
    step(pair.p, "k", BLOCKS, HALF, TOKENS)
    busy.wake()
    arrives(pair.d)
    pair.ends_well()


def test_many_short_steps_are_no_stall(pair: VirtualPair) -> None:
    """It is one step that must not last too long, not a series of them."""
    pair.queued()

    def steps() -> bool:
        pair.p.hang()
        return not pair.d.failures

    pair.lasts(steps, LONG)
    pair.p.wake()
    pair.d.do(do.Drop("k", "the client has left"))
    pair.p.do(do.Abort("k", "the client has left"))
    pair.rest("k")


def test_a_load_that_gets_nothing_for_long_ends_although_p_is_alive(pair: VirtualPair) -> None:
    """P has preempted it, say, and never comes to it again; until D has pages, it may wait for ever."""
    pair.half_a_push()
    pair.p.rank.revoke(["k"])
    pair.lasts(lambda: not pair.d.failures, STALL - 0.3)
    pair.fails("answers, and has pushed nothing")
    pair.p.do(do.OfferPrompt("k", pair.d.address, TOKENS, b"digest"))
    pair.rest("k")


# A P that does not know the request.


def test_p_in_a_long_step_is_waited_for(pair: VirtualPair) -> None:
    """It may hear of the request when the step ends."""
    pair.p.hang()
    pair.expect()
    pair.until(lambda: value(pair.p, "early_claims"), what="a claim")
    pair.lasts(lambda: not pair.d.failures, STALL - 2.0)
    pair.p.wake()
    pair.computed()
    pair.d.wait(do.Begun("k"))
    assert not pair.d.failures


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in one step after the other"])
def test_p_that_never_hears_of_the_request(pair: VirtualPair, busy: bool) -> None:
    pair.expect()

    def failed() -> bool:
        if busy:
            pair.p.hang()
        return bool(pair.d.failures)

    pair.until(failed, LEASE + GRACE, "the end of the request")
    (failure,) = pair.d.failures
    assert "never got the request" in failure.reason  # type: ignore[attr-defined]


# Silence: of a process that holds its interpreter's lock, of a machine that stands still, of a dead link.

PAUSE = 0.7 * LEASE
"""Seconds: longer than any pause of a conversation but the lease."""


@pytest.mark.parametrize("who", ["P", "D", "PD"])
@pytest.mark.parametrize(
    "when",
    [
        "before D asks",
        "when D has asked",
        "with a chunk under way",
        "in the middle of a prompt",
        "when P has it all",
    ],
)
def test_a_silence_shorter_than_the_lease_costs_nothing(pair: VirtualPair, who: str, when: str) -> None:
    def silence() -> None:
        for engine in (pair.p, pair.d):
            if engine.rank.hello.role in who:
                engine.rank.stand_still(PAUSE)

    if when == "before D asks":
        silence()
    if when == "with a chunk under way":
        ask(pair.p, pair.d)
        step(pair.p, "k", BLOCKS, 0, TOKENS)
        pair.until(lambda: value(pair.d, "receives_posted"), what="a receive")
        silence()
        pair.d.wait(do.Loaded("k"), PAUSE + GRACE)
    elif when == "in the middle of a prompt":
        pair.half_a_push()
        silence()
        step(pair.p, "k", BLOCKS, HALF, TOKENS)
        pair.d.wait(do.Loaded("k"), PAUSE + GRACE)
    else:
        if when == "when P has it all":
            pair.computed()
            pair.until(lambda: value(pair.p, "prompts_held"), what="the pages of the prompt")
            silence()
            pair.expect()
        else:
            pair.expect()
            if when == "when D has asked":
                pair.until(lambda: value(pair.p, "early_claims"), what="a claim")
                silence()
            pair.computed()
        pair.load()
    assert wrong_cells(pair.d.ranks[0], BLOCKS, 0, TOKENS - 1) == []
    pair.ends_well()


def test_a_silence_counts_only_while_it_could_have_been_heard(pair: VirtualPair) -> None:
    """Both stand still, as on a machine that does; P comes to itself first, and hears nothing yet."""
    pair.offered()
    pair.d.rank.stand_still(2.0 * LEASE)
    pair.p.rank.stand_still(2.0 * LEASE - 2.0)
    pair.d.do(do.Load("k", 0, TOKENS - 1, (BLOCKS,)))
    arrives(pair.d, seconds=3 * LEASE)
    pair.ends_well()


def test_a_connection_that_went_silent_is_dialed_anew(pair: VirtualPair) -> None:
    """Neither end was told that it is dead, as behind a firewall that has forgotten it."""
    pair.expect("before")
    pair.computed("before")
    pair.load("before")
    for way in pair.network.ways:
        way.deaf = True
    pair.expect("lost")
    pair.computed("lost")
    pair.fails("has not confirmed", LEASE + GRACE)
    pair.expect("after")
    pair.computed("after")
    pair.d.wait(do.Begun("after"), LEASE + GRACE)
    pair.load("after")


def test_a_p_that_is_reached_late_is_asked_at_once(pair: VirtualPair) -> None:
    """Not after a pause that has grown meanwhile."""
    pair.p.rank.endpoint.answers = False
    pair.expect()
    pair.computed()
    pair.lasts(lambda: True, 0.8)
    pair.p.rank.endpoint.answers = True
    (peer,) = pair.d.rank.core.decode.peers
    pair.until(lambda: peer.connection.reached, what="a connection")
    pair.d.wait(do.Begun("k"), 0.1)


def test_a_p_whose_handshake_failed_once_while_nobody_asked_is_met_again(pair: VirtualPair) -> None:
    """It is the same incarnation: its connection ended, and something broke the next one."""
    pair.expect("before")
    pair.served("before")
    (peer,) = pair.d.rank.core.decode.peers
    pair.d.rank.endpoint.hang_up(peer.connection)
    pair.d.rank.endpoint._failures.append(ConnectionFailure(peer.connection, "it is broken"))
    pair.lasts(lambda: True, LEASE)
    pair.expect("after")
    pair.computed("after")
    pair.load("after")


def test_an_error_of_ours_in_a_look_at_leases_does_not_end_the_looks(
    pair: VirtualPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, errors = pair.p.rank.core, [RuntimeError("ours")]
    turn, tick = core.turn, Sender.tick

    def guarded(now: float) -> None:
        with suppress(RuntimeError):
            turn(now)

    def fail_once(self: Sender, *its: float | None) -> list[Decision]:
        if errors:
            raise errors.pop()
        return tick(self, *its)  # type: ignore[arg-type]

    monkeypatch.setattr(core, "turn", guarded)
    monkeypatch.setattr(Sender, "tick", fail_once)
    pair.computed()
    pair.p.wait(do.BlocksFree("k"), 2 * LEASE + GRACE)
