"""D's side: event in, then the state and what is to be done; leases by a virtual clock."""

from collections.abc import Callable

import pytest
from protocol.receiver_rigs import (
    ATTEMPT,
    KEY,
    LEASE,
    TOKENS,
    arrive,
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

from p2pkv.protocol import receiver as module
from p2pkv.protocol.messages import Cancel, Chunk, Done, Failed, Piece, Sent, Want
from p2pkv.protocol.receiver import LOAD, LoadEvent, LoadPhase, Receiver
from p2pkv.protocol.state_machine import (
    Decision,
    Finished,
    LocalProtocolError,
    Offered,
    RemoteProtocolError,
    SendTo,
)

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


# What P may not say.


def test_another_prompt_of_the_same_name_is_refused_with_both_sizes() -> None:
    for wrong in (offer(tokens=12), offer(digest=b"other")):
        made = make()
        effects = made.offer(0, wrong, 1.0)
        reason = effects[-1].reason if isinstance(effects[-1], Finished) else ""
        assert f"({wrong.tokens} tokens)" in reason and f"({TOKENS} tokens)" in reason
        assert effects[:-1] == [SendTo(rank, Cancel(KEY, ATTEMPT, reason)) for rank in (0, 1)]
        assert made.load.state is LoadPhase.ENDED


def test_ranks_of_p_that_name_different_weights_end_the_load() -> None:
    made = make()
    assert made.offer(0, offer(generation="version 1"), 1.0) == []
    *cancels, end = made.offer(1, offer(generation="version 2"), 1.0)
    assert isinstance(end, Finished) and "computed this prompt with different weights" in end.reason
    assert [each.rank for each in cancels if isinstance(each, SendTo)] == [0, 1]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (chunk(0, Piece(0, 1, 2, 0, 9)), "does not lie in what was asked for"),
        (chunk(0, Piece(0, 0, 1, 0, 10)), "does not lie in what was asked for"),
        (chunk(0, Piece(0, 0, 1, 4, 4)), "does not lie in what was asked for"),
        (chunk(0, Piece(0, 0, 1, 0, 5), Piece(0, 0, 1, 4, 9)), "announced twice"),
        (chunk(0, Piece(0, 0, 1, 0, 9), nbytes=1), "chunk of 1 bytes whose pieces make 54"),
        (chunk(1, Piece(0, 0, 1, 0, 9)), "chunk 1 is announced where 0 is due"),
    ],
)
def test_a_wrong_chunk_is_an_error_of_the_peer_and_leaves_nothing(message: Chunk, words: str) -> None:
    made = loading(make())
    with pytest.raises(RemoteProtocolError, match=words):
        made.chunk(0, message, 3.0)
    assert made.pieces(0, ATTEMPT, message.chunk) == ()
    assert take(made, 0, whole(0)) == [SendTo(0, Done(KEY, ATTEMPT))]


def test_a_chunk_before_the_want_and_words_of_a_foreign_rank_are_errors_of_the_peer() -> None:
    with pytest.raises(RemoteProtocolError, match="before anything was asked for"):
        offered(make()).chunk(0, whole(0), 1.0)
    made = loading(make())
    with pytest.raises(RemoteProtocolError, match="rank 2 of P owes this rank nothing"):
        made.chunk(2, whole(0), 1.0)
    with pytest.raises(RemoteProtocolError, match="rank 2 of P owes this rank nothing"):
        made.offer(2, offer(), 1.0)
    # A rank without KV layers knows of the request, and may give it up before the others do.
    assert made.failed(2, Failed(KEY, ATTEMPT, "x")) == []


def test_sent_needs_a_grant() -> None:
    made = loading(make())
    made.chunk(0, whole(0), 3.0)
    for number in (0, 1):
        with pytest.raises(RemoteProtocolError, match=f"chunk {number} was sent without a grant"):
            made.sent(0, Sent(KEY, ATTEMPT, number, 0, False), 3.0)


def test_announced_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNKS", 3)
    made = loading(make())
    for number in range(3):
        made.chunk(0, chunk(number, Piece(0, 0, 1, number, number + 1)), 3.0)
    with pytest.raises(RemoteProtocolError, match="one more than 3"):
        made.chunk(0, chunk(3, Piece(0, 0, 1, 3, 4)), 3.0)


def test_a_slow_d_does_not_blame_p_for_chunks_that_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNKS", 1)
    made = loading(make())
    for number in range(3):
        arrive(made, 0, chunk(number, Piece(0, 0, 1, number, number + 1)))
    assert len(made.sources[0].chunks) == 3


# Stale, repeated and filler.


def test_another_attempt_is_ignored() -> None:
    made = loading(make())
    for attempt in (ATTEMPT - 1, ATTEMPT + 1):
        assert made.offer(0, offer(99, attempt=attempt), 9.0) == []
        assert made.chunk(0, chunk(0, Piece(0, 0, 1, 0, 9), attempt=attempt), 9.0) == []
        assert made.failed(0, Failed(KEY, attempt, "x")) == []
        made.sent(0, Sent(KEY, attempt, 0, 0, True), 9.0)
        assert made.pieces(0, attempt, 0) == ()
    assert made.deadline == 2.0 + LEASE and made.load.state is LoadPhase.LOADING


def test_repeated_words_have_no_second_effect() -> None:
    made = loading(make())
    assert made.offer(0, offer(99), 3.0) == []
    assert made.attach({}, 3.0) == [] and len(made.sources) == 2
    first, second = chunk(0, Piece(0, 0, 1, 0, 4)), chunk(1, Piece(0, 0, 1, 4, 9))
    assert take(made, 0, first) == []
    assert made.chunk(0, first, 3.0) == []
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, True), 3.0)
    made.chunk(0, second, 3.0)
    assert made.chunk(0, second, 3.0) == []
    made.posted(0, second)
    for _ in range(2):
        made.sent(0, Sent(KEY, ATTEMPT, 1, 0, False), 3.0)
    made.sent(0, Sent(KEY, ATTEMPT, 1, 0, True), 3.0)
    assert made.scattered(0, 1, 3.0) == [SendTo(0, Done(KEY, ATTEMPT))]


def test_a_void_chunk_is_dropped_and_announced_again() -> None:
    made = loading(make())
    made.chunk(0, whole(0), 3.0)
    made.posted(0, whole(0))
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, True), 3.0)
    assert made.pieces(0, ATTEMPT, 0) == ()
    assert made.chunk(0, whole(0), 3.0) == []
    assert take(made, 0, whole(0, number=1)) == [SendTo(0, Done(KEY, ATTEMPT))]


def test_the_bytes_of_a_receive_posted_after_the_end_are_not_wanted() -> None:
    made = loading(make())
    made.chunk(0, whole(0), 3.0)
    made.cancel("enough")
    assert made.pieces(0, ATTEMPT, 0) == ()
    made.posted(0, whole(0))
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, True), 3.0)


def test_an_end_while_bytes_are_being_scattered() -> None:
    made = loading(one_source())
    message = chunk(0, Piece(0, 0, 2, 0, 9))
    arrive(made, 0, message)
    made.cancel("enough")
    assert made.scattered(0, 0, 3.0) == [] and made.load.state is LoadPhase.ENDED


# The ends.


def test_a_cancel_is_said_to_every_source_once() -> None:
    made = loading(make())
    assert made.cancel("client left") == [
        SendTo(0, Cancel(KEY, ATTEMPT, "client left")),
        SendTo(1, Cancel(KEY, ATTEMPT, "client left")),
        Finished(False, "client left"),
    ]
    assert made.cancel("client left") == []


def test_a_failure_of_one_source_ends_the_load_and_is_said_to_the_others() -> None:
    made = loading(make())
    assert made.failed(0, Failed(KEY, ATTEMPT, "preempted for ever")) == [
        SendTo(1, Cancel(KEY, ATTEMPT, "another rank of P failed")),
        Finished(False, "preempted for ever"),
    ]


def test_a_source_whose_part_is_here_may_fail_or_go() -> None:
    made = loading(make())
    take(made, 0, whole(0))
    assert made.failed(0, Failed(KEY, ATTEMPT, "aborted")) == [] == made.lost("gone", rank=0)
    assert take(made, 1, whole(1)) == [SendTo(1, Done(KEY, ATTEMPT)), Finished(True)]
    made = loading(make())
    take(made, 0, whole(0))
    assert made.lost("gone", rank=1)[-1] == Finished(False, "gone")
    made = loading(make())
    take(made, 0, whole(0))
    assert made.lost("P is gone")[-1] == Finished(False, "P is gone")
