"""D's side: event in, then the state and what is to be done."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pkv.plan import Edge, make_plan
from p2pkv.protocol import receiver as module
from p2pkv.protocol.effects import Effect, Finished, Offered, Post, Tell
from p2pkv.protocol.machine import LocalProtocolError, RemoteProtocolError
from p2pkv.protocol.messages import Cancel, Chunk, Done, Failed, Grant, Offer, Piece, Sent, Want
from p2pkv.protocol.receiver import LOAD, Load, On, Receiver
from p2pkv.protocol.wire import Debt, Wire
from p2pkv.sharding import Shape

KEY, ATTEMPT, TOKENS, DIGEST, ROW, LEASE = "k", 7, 10, b"prompt", 3, 30.0

EDGES: dict[int, Edge] = {
    edge.source: edge for edge in make_plan(Shape((1, 1), 2, 1), Shape((2,), 2, 1)).to_target(0)
}
"""P has two stages of one layer, D has one of two; each source owes a layer with two heads."""


def owed(edges: dict[int, Edge] = EDGES, unit: int = 1) -> dict[int, Debt]:
    return {rank: Debt(edge, Wire("dense", unit, ROW)) for rank, edge in edges.items()}


def make(
    debts: dict[int, Debt] | None = None, unit: int = 1, attach: bool = True, ahead: bool = False
) -> Receiver:
    made = Receiver(KEY, ATTEMPT, TOKENS, DIGEST, LEASE, now=0.0, ahead=ahead)
    if attach:
        made.attach(owed(unit=unit) if debts is None else debts, now=0.0)
    return made


def one_source() -> Receiver:
    """As `make`, but all that D needs is on P's rank 0."""
    return make(owed({0: make_plan(Shape((2,), 2, 1), Shape((2,), 2, 1)).to_target(0)[0]}))


def offer(tokens: int = TOKENS, digest: bytes = DIGEST, attempt: int = ATTEMPT) -> Offer:
    return Offer(KEY, attempt, tokens, digest)


def chunk(number: int, *pieces: Piece, nbytes: int | None = None, attempt: int = ATTEMPT) -> Chunk:
    """By default of the size that its pieces have, with two heads."""
    rows = sum((piece.layer_stop - piece.layer) * (piece.stop - piece.start) for piece in pieces)
    return Chunk(KEY, attempt, number, 2 * ROW * rows if nbytes is None else nbytes, pieces)


def offered(made: Receiver) -> Receiver:
    for rank in made.sources:
        made.offer(rank, offer(), now=1.0)
    assert made.load.state is Load.OFFERED
    return made


def ahead(made: Receiver) -> Receiver:
    for rank in made.sources:
        made.offer(rank, offer(), now=1.0)
    assert made.load.state is Load.AHEAD
    return made


def loading(made: Receiver, start: int = 0, stop: int = 9) -> Receiver:
    offered(made).want(start, stop, now=2.0)
    assert made.load.state is Load.LOADING
    return made


def take(made: Receiver, rank: int, message: Chunk, now: float = 3.0) -> list[Effect]:
    """All that happens to one chunk, from its announcement to the pages."""
    assert made.chunk(rank, message, now) == [Post(rank, message)]
    grant = Grant(KEY, ATTEMPT, message.chunk, message.nbytes, 5, 64)
    assert made.posted(rank, message, link=5, landing=64) == [Tell(rank, grant)]
    made.sent(rank, Sent(KEY, ATTEMPT, message.chunk, 0, False), now)
    assert made.pieces(rank, ATTEMPT, message.chunk) == message.pieces
    return made.scattered(rank, message.chunk, now)


def whole(rank: int, number: int = 0) -> Chunk:
    """All that a source of `make` owes of tokens [0, 9)."""
    return chunk(number, Piece(rank, rank + 1, 0, 9))


# One load, from end to end.


def test_a_load_from_two_sources() -> None:
    made = make()
    assert made.load.state is Load.WAITING
    assert made.offer(0, offer(), 1.0) == [] and made.load.state is Load.WAITING
    assert made.offer(1, offer(), 1.0) == [Offered()]
    assert made.want(0, 9, 2.0) == [Tell(rank, Want(KEY, ATTEMPT, 0, 9)) for rank in (0, 1)]
    assert take(made, 1, whole(1)) == [Tell(1, Done(KEY, ATTEMPT))]
    assert take(made, 0, chunk(0, Piece(0, 1, 0, 4))) == []
    assert made.load.state is Load.LOADING
    assert take(made, 0, chunk(1, Piece(0, 1, 4, 9))) == [Tell(0, Done(KEY, ATTEMPT)), Finished(True)]
    assert made.load.state is Load.DONE and made.deadline is None


def test_an_empty_want_releases_p_at_any_time_before_the_load() -> None:
    for made in (make(), offered(make())):
        tells = [Tell(rank, Want(KEY, ATTEMPT, 0, 0)) for rank in (0, 1)]
        assert made.want(9, 9, 1.0) == [*tells, Finished(True)]
        assert made.load.state is Load.DONE and made.deadline is None


def test_an_empty_want_waits_until_p_can_be_told_or_the_lease_ends() -> None:
    made = make(attach=False)
    assert made.want(3, 2, 1.0) == [] and made.load.state is Load.WAITING
    assert made.attach(owed(), 2.0) == [
        Tell(0, Want(KEY, ATTEMPT, 0, 0)),
        Tell(1, Want(KEY, ATTEMPT, 0, 0)),
        Finished(True),
    ]
    made = make(attach=False)
    made.want(3, 2, 1.0)
    assert isinstance(made.tick(LEASE)[-1], Finished) and made.attach(owed(), LEASE) == []


def test_a_rank_that_nobody_owes_anything_waits_for_nobody() -> None:
    made = make(attach=False)
    assert made.attach({}, 0.0) == [Offered()]
    assert made.deadline is None and made.tick(1000.0) == []
    assert made.attach({}, 1.0) == [] and made.want(0, 9, 1000.0) == [Finished(True)]
    made = make(attach=False)
    made.want(0, 0, 0.0)
    assert made.attach({}, 0.0) == [Finished(True)]


# Every row of the table.


PATHS: dict[Load, Callable[[], Receiver]] = {
    Load.WAITING: make,
    Load.OFFERED: lambda: offered(make()),
    Load.AHEAD: lambda: ahead(make(ahead=True)),
    Load.LOADING: lambda: loading(one_source()),
    Load.DONE: lambda: (made := make(), made.want(0, 0, 0.0))[0],
    Load.ENDED: lambda: (made := make(), made.cancel("no"))[0],
}


def do(made: Receiver, event: On) -> list[Effect]:
    match event:
        case On.OFFERED:
            return [effect for rank in made.sources for effect in made.offer(rank, offer(), 1.0)]
        case On.AHEAD:
            made.ahead = True
            return made._go_ahead(1.0)
        case On.WANT:
            return made.want(0, 9, 1.0)
        case On.NOTHING:
            return made.want(0, 0, 1.0)
        case On.COMPLETE:
            return take(made, 0, chunk(0, Piece(0, 2, 0, 9)))
        case On.END:
            return made.cancel("enough")


@pytest.mark.parametrize(("state", "event"), [(state, on) for state, row in LOAD.items() for on in row])
def test_every_row_of_the_table(state: Load, event: On) -> None:
    made = PATHS[state]()
    assert made.load.state is state
    effects = do(made, event)
    assert made.load.state is LOAD[state][event]
    finished = [effect for effect in effects if isinstance(effect, Finished)]
    assert len(finished) == (1 if made.load.ended else 0)


@pytest.mark.parametrize("state", [Load.DONE, Load.ENDED])
def test_after_the_end_nothing_has_an_effect(state: Load) -> None:
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
    assert made.load.state is Load.OFFERED
    assert made.want(0, 9, 1.0) != []


# What P may not say.


def test_another_prompt_of_the_same_name_is_refused_with_both_sizes() -> None:
    for wrong in (offer(tokens=12), offer(digest=b"other")):
        made = make()
        effects = made.offer(0, wrong, 1.0)
        reason = effects[-1].reason if isinstance(effects[-1], Finished) else ""
        assert f"({wrong.tokens} tokens)" in reason and f"({TOKENS} tokens)" in reason
        assert effects[:-1] == [Tell(rank, Cancel(KEY, ATTEMPT, reason)) for rank in (0, 1)]
        assert made.load.state is Load.ENDED


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (chunk(0, Piece(1, 2, 0, 9)), "does not lie in what was asked for"),
        (chunk(0, Piece(0, 1, 0, 10)), "does not lie in what was asked for"),
        (chunk(0, Piece(0, 1, 4, 4)), "does not lie in what was asked for"),
        (chunk(0, Piece(0, 1, 0, 5), Piece(0, 1, 4, 9)), "announced twice"),
        (chunk(0, Piece(0, 1, 0, 9), nbytes=1), "chunk of 1 bytes whose pieces make 54"),
        (chunk(1, Piece(0, 1, 0, 9)), "chunk 1 is announced where 0 is due"),
    ],
)
def test_a_wrong_chunk_is_an_error_of_the_peer_and_leaves_nothing(message: Chunk, words: str) -> None:
    made = loading(make())
    with pytest.raises(RemoteProtocolError, match=words):
        made.chunk(0, message, 3.0)
    assert made.pieces(0, ATTEMPT, message.chunk) == ()
    assert take(made, 0, whole(0)) == [Tell(0, Done(KEY, ATTEMPT))]


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
        made.chunk(0, chunk(number, Piece(0, 1, number, number + 1)), 3.0)
    with pytest.raises(RemoteProtocolError, match="one more than 3"):
        made.chunk(0, chunk(3, Piece(0, 1, 3, 4)), 3.0)


# Stale, repeated and void.


def test_another_attempt_is_ignored() -> None:
    made = loading(make())
    for attempt in (ATTEMPT - 1, ATTEMPT + 1):
        assert made.offer(0, offer(99, attempt=attempt), 9.0) == []
        assert made.chunk(0, chunk(0, Piece(0, 1, 0, 9), attempt=attempt), 9.0) == []
        assert made.failed(0, Failed(KEY, attempt, "x")) == []
        made.sent(0, Sent(KEY, attempt, 0, 0, True), 9.0)
        assert made.pieces(0, attempt, 0) == ()
    assert made.deadline == 2.0 + LEASE and made.load.state is Load.LOADING


def test_repeated_words_have_no_second_effect() -> None:
    made = loading(make())
    assert made.offer(0, offer(99), 3.0) == []
    assert made.attach({}, 3.0) == [] and len(made.sources) == 2
    first, second = chunk(0, Piece(0, 1, 0, 4)), chunk(1, Piece(0, 1, 4, 9))
    assert take(made, 0, first) == []
    assert made.chunk(0, first, 3.0) == []
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, True), 3.0)
    made.chunk(0, second, 3.0)
    assert made.chunk(0, second, 3.0) == []
    made.posted(0, second, 1, 0)
    for _ in range(2):
        made.sent(0, Sent(KEY, ATTEMPT, 1, 0, False), 3.0)
    made.sent(0, Sent(KEY, ATTEMPT, 1, 0, True), 3.0)
    assert made.scattered(0, 1, 3.0) == [Tell(0, Done(KEY, ATTEMPT))]


def test_a_void_chunk_is_dropped_and_announced_again() -> None:
    made = loading(make())
    made.chunk(0, whole(0), 3.0)
    made.posted(0, whole(0), 1, 0)
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, True), 3.0)
    assert made.pieces(0, ATTEMPT, 0) == ()
    assert made.chunk(0, whole(0), 3.0) == []
    assert take(made, 0, whole(0, number=1)) == [Tell(0, Done(KEY, ATTEMPT))]


def test_a_receive_posted_after_the_end_is_granted_and_its_bytes_are_not_wanted() -> None:
    made = loading(make())
    made.chunk(0, whole(0), 3.0)
    made.cancel("enough")
    assert made.pieces(0, ATTEMPT, 0) == ()
    assert made.posted(0, whole(0), 5, 64) == [Tell(0, Grant(KEY, ATTEMPT, 0, 54, 5, 64))]
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, True), 3.0)


def test_an_end_while_bytes_are_being_scattered() -> None:
    made = loading(one_source())
    message = chunk(0, Piece(0, 2, 0, 9))
    made.chunk(0, message, 3.0)
    made.posted(0, message, 1, 0)
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, False), 3.0)
    made.cancel("enough")
    assert made.scattered(0, 0, 3.0) == [] and made.load.state is Load.ENDED


# The ends.


def test_a_cancel_is_said_to_every_source_once() -> None:
    made = loading(make())
    assert made.cancel("client left") == [
        Tell(0, Cancel(KEY, ATTEMPT, "client left")),
        Tell(1, Cancel(KEY, ATTEMPT, "client left")),
        Finished(False, "client left"),
    ]
    assert made.cancel("client left") == []


def test_a_failure_of_one_source_ends_the_load_and_is_said_to_the_others() -> None:
    made = loading(make())
    assert made.failed(0, Failed(KEY, ATTEMPT, "preempted for ever")) == [
        Tell(1, Cancel(KEY, ATTEMPT, "another rank of P failed")),
        Finished(False, "preempted for ever"),
    ]


def test_a_source_whose_part_is_here_may_fail_or_go() -> None:
    made = loading(make())
    take(made, 0, whole(0))
    assert made.failed(0, Failed(KEY, ATTEMPT, "aborted")) == [] == made.lost("gone", rank=0)
    assert take(made, 1, whole(1)) == [Tell(1, Done(KEY, ATTEMPT)), Finished(True)]
    made = loading(make())
    take(made, 0, whole(0))
    assert made.lost("gone", rank=1)[-1] == Finished(False, "gone")
    made = loading(make())
    take(made, 0, whole(0))
    assert made.lost("P is gone")[-1] == Finished(False, "P is gone")


# Time.


def test_the_lease_runs_from_the_start_until_p_is_known() -> None:
    made = make(attach=False)
    assert made.deadline == LEASE
    assert made.tick(LEASE - 0.01) == []
    reason = f"P has not confirmed this request for {LEASE:g} s; it is dead, or never got it"
    assert made.tick(LEASE) == [Finished(False, reason)] and made.deadline is None


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
    made.posted(0, whole(0), 1, 0)
    made.sent(0, Sent(KEY, ATTEMPT, 0, 0, False), 13.0)
    assert made.deadline == 13.0 + LEASE


def test_a_source_whose_part_is_here_has_no_lease() -> None:
    made = loading(make())
    take(made, 0, whole(0), now=3.0)
    made.held(1, 50.0)
    assert made.deadline == 50.0 + LEASE and made.tick(50.0 + LEASE - 0.01) == []
    effects = made.tick(50.0 + LEASE)
    assert isinstance(effects[-1], Finished) and not effects[-1].ok and made.load.state is Load.ENDED


def test_a_load_that_stalls_ends_although_p_vouches_for_it() -> None:
    """Its time runs from the want and from each chunk that comes; a P that says things renews nothing."""
    made = Receiver(KEY, ATTEMPT, TOKENS, DIGEST, LEASE, now=0.0, stall=50.0)
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


def test_the_repr_says_where_it_stands() -> None:
    assert repr(make()) == f"<load k:WAITING attempt {ATTEMPT} sources [0, 1]>"
