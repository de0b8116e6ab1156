"""D's side: for how long a load waits for a P, by a virtual clock."""

from __future__ import annotations

from protocol.receiver_rigs import (
    ATTEMPT,
    DIGEST,
    KEY,
    LEASE,
    TOKENS,
    loading,
    make,
    offer,
    offered,
    owed,
    take,
    whole,
)

from p2pkv.protocol.machine import Finished
from p2pkv.protocol.messages import Sent
from p2pkv.protocol.receiver import Bounds, LoadPhase, Receiver


def test_the_lease_runs_from_the_start_until_p_is_known() -> None:
    made = make(attach=False)
    assert made.deadline == LEASE
    assert made.tick(LEASE - 0.01) == []
    (end,) = made.tick(LEASE)
    assert isinstance(end, Finished) and not end.ok and made.deadline is None
    assert f"P could not be reached: there was no connection to it for {LEASE:g} s" in end.reason


def test_a_p_that_was_reached_and_is_silent_did_not_answer() -> None:
    made = make(attach=False)
    reason = (
        f"P did not answer in time: it has not confirmed this request for {LEASE:g} s; it is dead, hung or "
        "paused, or never got it"
    )
    assert made.tick(LEASE, reached=True) == [Finished(False, reason)]


def test_every_word_of_a_source_renews_its_lease_and_the_oldest_counts() -> None:
    made = make(attach=False)
    made.attach(owed(), 5.0)
    assert made.deadline == 5.0 + LEASE
    made.held(0, 6.0)
    made.held(9, 6.0)
    assert made.deadline == 5.0 + LEASE
    made.held(1, 7.0)
    assert made.deadline == 6.0 + LEASE
    made.offer(0, offer(), 8.0)
    made.offer(1, offer(), 9.0)
    assert made.deadline == 8.0 + LEASE
    made.want(0, 9, 10.0)
    made.chunk(0, whole(0), 12.0)
    made.held(1, 20.0)
    assert made.deadline == 12.0 + LEASE
    made.posted(0, whole(0))
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, False), 13.0)
    assert made.deadline == 13.0 + LEASE


def test_a_source_whose_part_is_here_has_no_lease() -> None:
    made = loading(make())
    take(made, 0, whole(0), now=3.0)
    made.held(1, 50.0)
    assert made.deadline == 50.0 + LEASE and made.tick(50.0 + LEASE - 0.01) == []
    effects = made.tick(50.0 + LEASE)
    assert isinstance(effects[-1], Finished) and not effects[-1].ok and made.load.state is LoadPhase.ENDED


def test_a_load_that_stalls_ends_although_p_vouches_for_it() -> None:
    """Its time runs from the want and from each chunk that comes; a P that says things renews nothing."""
    made = Receiver(KEY, ATTEMPT, TOKENS, DIGEST, Bounds(LEASE, stall=50.0), now=0.0)
    made.attach(owed(), now=0.0)
    for now in (20.0, 40.0, 60.0):
        for rank in made.sources:
            made.held(rank, now)
        assert made.deadline == now + LEASE and made.tick(now) == []
    offered(made).want(0, 9, now=70.0)
    take(made, 0, whole(0), now=90.0)
    for now in (110.0, 130.0):
        made.held(1, now)
        assert made.tick(now) == []
    made.chunk(1, whole(1), 139.0)
    assert made.deadline == 140.0 and made.tick(139.9) == []
    finished = made.tick(140.0)[-1]
    assert isinstance(finished, Finished) and "has pushed nothing of this prompt for 50 s" in finished.reason
