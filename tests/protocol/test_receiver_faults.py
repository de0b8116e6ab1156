"""D's side: wrong, stale and repeated words of P; how loads end."""

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
    take,
    whole,
)

from p2pkv.protocol import receiver as module
from p2pkv.protocol.messages import Cancel, Chunk, Done, Failed, Piece, Sent
from p2pkv.protocol.receiver import LoadPhase
from p2pkv.protocol.state_machine import Finished, RemoteProtocolError, SendTo

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
    with pytest.raises(RemoteProtocolError, match="rank 2 of P owes this rank nothing"):
        made.failed(2, Failed(KEY, ATTEMPT, "x"))


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
