"""A Receiver of two sources, and ways to bring it into each of its states."""

from p2pkv.plan import Edge, make_plan
from p2pkv.protocol.handshake import Assignment, RowFormat
from p2pkv.protocol.messages import Chunk, Offer, Piece, Sent
from p2pkv.protocol.receiver import LoadPhase, Receiver
from p2pkv.protocol.state_machine import Decision, Post, Terms
from p2pkv.sharding import Shape

KEY, ATTEMPT, TOKENS, DIGEST, ROW, LEASE = "k", 7, 10, b"prompt", 3, 30.0

EDGES: dict[int, Edge] = {
    edge.source: edge for edge in make_plan((Shape((1, 1), 2, 1),), (Shape((2,), 2, 1),)).to_target(0)
}
"""P has two stages of one layer, D has one of two; each source owes a layer with two heads."""


def owed(edges: dict[int, Edge] = EDGES, unit: int = 1) -> dict[int, Assignment]:
    return {rank: Assignment.of([edge], [RowFormat("dense", unit, ROW)]) for rank, edge in edges.items()}


def make(
    assignments: dict[int, Assignment] | None = None,
    unit: int = 1,
    attach: bool = True,
    prefetch: bool = False,
) -> Receiver:
    made = Receiver(KEY, ATTEMPT, TOKENS, DIGEST, Terms(LEASE), now=0.0, prefetch=prefetch)
    if attach:
        made.attach(owed(unit=unit) if assignments is None else assignments, now=0.0)
    return made


def one_source() -> Receiver:
    """As `make`, but all that D needs is on P's rank 0."""
    return make(owed({0: make_plan((Shape((2,), 2, 1),), (Shape((2,), 2, 1),)).to_target(0)[0]}))


def offer(
    tokens: int = TOKENS, digest: bytes = DIGEST, attempt: int = ATTEMPT, generation: str = ""
) -> Offer:
    return Offer(KEY, attempt, tokens, digest, generation)


def chunk(number: int, *pieces: Piece, nbytes: int | None = None, attempt: int = ATTEMPT) -> Chunk:
    """By default of the size that its pieces have, with two heads."""
    rows = sum((piece.layer_stop - piece.layer) * (piece.stop - piece.start) for piece in pieces)
    return Chunk(KEY, attempt, number, 2 * ROW * rows if nbytes is None else nbytes, pieces)


def offered(made: Receiver) -> Receiver:
    for rank in made.sources:
        made.offer(rank, offer(), now=1.0)
    assert made.load.state is LoadPhase.OFFERED
    return made


def prefetch(made: Receiver) -> Receiver:
    for rank in made.sources:
        made.offer(rank, offer(), now=1.0)
    assert made.load.state is LoadPhase.PREFETCHING
    return made


def loading(made: Receiver, start: int = 0, stop: int = 9) -> Receiver:
    offered(made).want(start, stop, now=2.0)
    assert made.load.state is LoadPhase.LOADING
    return made


def arrive(made: Receiver, rank: int, message: Chunk, now: float = 3.0) -> None:
    """One chunk comes, from its announcement to D's staging."""
    assert made.chunk(rank, message, now) == [Post(rank, message)]
    made.posted(rank, message)
    made.sent(rank, Sent(KEY, ATTEMPT, message.chunk, 0, False), now)


def take(made: Receiver, rank: int, message: Chunk, now: float = 3.0) -> list[Decision]:
    """All that happens to one chunk, from its announcement to the pages."""
    arrive(made, rank, message, now)
    assert made.pieces(rank, ATTEMPT, message.chunk) == message.pieces
    return made.scattered(rank, message.chunk, now)


def whole(rank: int, number: int = 0) -> Chunk:
    """All that a source of `make` owes of tokens [0, 9)."""
    return chunk(number, Piece(0, rank, rank + 1, 0, 9))
