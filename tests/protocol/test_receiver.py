"""D's side: event in, then the state and what is to be done; leases by a virtual clock."""

from collections.abc import Callable

import pytest
from protocol.receiver_rigs import (
    ATTEMPT,
    KEY,
    LEASE,
    chunk,
    loading,
    make,
    offer,
    offered,
    one_source,
    owed,
    prefetch,
    take,
    whole,
)

from p2pkv.protocol.messages import Done, Failed, Piece, Sent, Want
from p2pkv.protocol.receiver import LOAD, LoadEvent, LoadPhase, Receiver
from p2pkv.protocol.state_machine import Decision, Finished, LocalProtocolError, Offered, SendTo

# One load, from end to end.


def test_a_load_from_two_sources() -> None:
    made = make()
    assert made.load.state is LoadPhase.WAITING
    assert made.offer(0, offer(), 1.0) == [] and made.load.state is LoadPhase.WAITING
    assert made.offer(1, offer(), 1.0) == [Offered("")]
    assert made.want(0, 9, 2.0) == [SendTo(rank, Want(KEY, ATTEMPT, 0, 9)) for rank in (0, 1)]
    assert take(made, 1, whole(1)) == [SendTo(1, Done(KEY, ATTEMPT))]
    assert take(made, 0, chunk(0, Piece(0, 0, 1, 0, 4))) == []
    assert made.load.state is LoadPhase.LOADING
    assert take(made, 0, chunk(1, Piece(0, 0, 1, 4, 9))) == [SendTo(0, Done(KEY, ATTEMPT)), Finished(True)]
    assert made.load.state is LoadPhase.DONE and made.deadline is None


def test_a_source_that_was_told_done_is_not_told_that_d_still_waits() -> None:
    """P's rank may have forgotten the transfer by then, and would keep the claim of a new one for a lease."""
    made = loading(make())
    assert made.waits_for(0) and made.waits_for(1)
    take(made, 1, whole(1))
    assert made.waits_for(0) and not made.waits_for(1)
    take(made, 0, whole(0))
    assert not made.waits_for(0)


def test_an_empty_want_releases_p_at_any_time_before_the_load() -> None:
    for made in (make(), offered(make())):
        tells = [SendTo(rank, Want(KEY, ATTEMPT, 0, 0)) for rank in (0, 1)]
        assert made.want(9, 9, 1.0) == [*tells, Finished(True)]
        assert made.load.state is LoadPhase.DONE and made.deadline is None


def test_an_empty_want_waits_until_p_can_be_told_or_the_lease_ends() -> None:
    made = make(attach=False)
    assert made.want(3, 2, 1.0) == [] and made.load.state is LoadPhase.WAITING
    assert made.attach(owed(), 2.0) == [
        SendTo(0, Want(KEY, ATTEMPT, 0, 0)),
        SendTo(1, Want(KEY, ATTEMPT, 0, 0)),
        Finished(True),
    ]
    made = make(attach=False)
    made.want(3, 2, 1.0)
    assert isinstance(made.tick(LEASE)[-1], Finished) and made.attach(owed(), LEASE) == []


def test_a_rank_that_nobody_owes_anything_waits_for_nobody() -> None:
    made = make(attach=False)
    assert made.attach({}, 0.0) == [Offered(None)]
    assert made.deadline is None and made.tick(1000.0) == []
    assert made.attach({}, 1.0) == [] and made.want(0, 9, 1000.0) == [Finished(True)]
    made = make(attach=False)
    made.want(0, 0, 0.0)
    assert made.attach({}, 0.0) == [Finished(True)]


# Every row of the table.


PATHS: dict[LoadPhase, Callable[[], Receiver]] = {
    LoadPhase.WAITING: make,
    LoadPhase.OFFERED: lambda: offered(make()),
    LoadPhase.PREFETCHING: lambda: prefetch(make(prefetch=True)),
    LoadPhase.LOADING: lambda: loading(one_source()),
    LoadPhase.DONE: lambda: (made := make(), made.want(0, 0, 0.0))[0],
    LoadPhase.ENDED: lambda: (made := make(), made.cancel("no"))[0],
}


def do(made: Receiver, event: LoadEvent) -> list[Decision]:
    match event:
        case "OFFERED":
            return [effect for rank in made.sources for effect in made.offer(rank, offer(), 1.0)]
        case "PREFETCHING":
            made.load.local("PREFETCHING")  # `offer` goes this way without a stop; see PATHS
            return []
        case "WANT":
            return made.want(0, 9, 1.0)
        case "NOTHING":
            return made.want(0, 0, 1.0)
        case "COMPLETE":
            return take(made, 0, chunk(0, Piece(0, 0, 2, 0, 9)))
        case "END":
            return made.cancel("enough")


@pytest.mark.parametrize(("state", "event"), [(state, on) for state, row in LOAD.items() for on in row])
def test_every_row_of_the_table(state: LoadPhase, event: LoadEvent) -> None:
    made = PATHS[state]()
    assert made.load.state is state
    effects = do(made, event)
    assert made.load.state is LOAD[state][event]
    finished = [effect for effect in effects if isinstance(effect, Finished)]
    assert len(finished) == (1 if made.load.ended else 0)


@pytest.mark.parametrize("state", [LoadPhase.DONE, LoadPhase.ENDED])
def test_after_the_end_nothing_has_an_effect(state: LoadPhase) -> None:
    made = PATHS[state]()
    assert made.want(0, 9, 1.0) == made.cancel("again") == made.lost("gone") == made.tick(1e9) == []
    assert made.offer(0, offer(), 1.0) == made.chunk(0, whole(0), 1.0) == []
    assert made.failed(0, Failed(KEY, ATTEMPT, "no")) == made.scattered(0, 0, 1.0) == []
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, False), 1.0)
    made.held(0, 1.0)
    assert made.attach(owed(), 1.0) == [] and made.pieces(0, ATTEMPT, 0) == () and made.deadline is None
    assert made.load.state is state


def test_wanting_before_the_offer_or_twice_is_an_error_of_ours() -> None:
    for made in (make(), loading(make())):
        with pytest.raises(LocalProtocolError, match="WANT in state"):
            made.want(0, 9, 1.0)


@pytest.mark.parametrize(("start", "stop", "unit"), [(0, 11, 1), (-1, 9, 1), (2, 9, 4)])
def test_tokens_that_cannot_be_loaded_are_an_error_of_ours(start: int, stop: int, unit: int) -> None:
    made = offered(make(unit=unit))
    with pytest.raises(ValueError, match=rf"tokens \[{start}, {stop}\) of 10.*multiple of {unit}"):
        made.want(start, stop, 1.0)
    assert made.load.state is LoadPhase.OFFERED
    assert made.want(0, 9, 1.0) != []


# For how long a load waits for a P.


def test_the_lease_runs_from_the_start_until_p_is_known() -> None:
    made = make(attach=False)
    assert made.deadline == LEASE
    assert made.tick(LEASE - 0.01) == []
    (end,) = made.tick(LEASE)
    assert isinstance(end, Finished) and not end.ok and made.deadline is None
    assert f"P could not be reached: there was no connection to it for {LEASE:g} s" in end.reason


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
