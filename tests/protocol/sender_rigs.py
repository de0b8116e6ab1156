"""A Sender with a clock that stands still, and ways to bring it into each of its states."""

from collections.abc import Callable, Sequence

from msgspec import UNSET

from p2pkv.plan import make_plan
from p2pkv.protocol.handshake import Assignment, RowFormat
from p2pkv.protocol.messages import Cancel, Chunk, Done, Grant, Offer, Piece, Sent, Want
from p2pkv.protocol.sender import PromptPhase, Sender, SendPhase
from p2pkv.protocol.state_machine import Decision, SendTo, Terms
from p2pkv.sharding import Shape

KEY, TOKENS, DIGEST, LEASE = "k", 10, b"prompt", 30.0
TERMS = Terms(chunk_bytes=1 << 20, lease=LEASE)
WIRE = RowFormat("dense", 1, 3)

PLAN = make_plan((Shape((2, 2), 2, 1),), (Shape((4,), 2, 2),))
EDGES = {edge.target: edge for edge in PLAN.from_source(1)}
"""This P rank is the second stage of two: global layers 2 and 3, of which D's two ranks want a head each."""
ROW = 3


class Rig:
    def __init__(
        self, terms: Terms = TERMS, expects: Sequence[int] = (0,), wires: Sequence[RowFormat] = (WIRE, WIRE)
    ) -> None:
        self.sender = Sender(KEY, [range(2)], terms)
        self.sender.serves(frozenset(expects))
        self.now = 0.0
        self.wires = wires

    @property
    def states(self) -> tuple[PromptPhase, list[SendPhase]]:
        return self.sender.prompt.state, [send.machine.state for send in self.sender.sends.values()]

    def claim(self, rank: int = 0, attempt: int = 1, limit: int = 1 << 20) -> list[Decision]:
        owed = Assignment.of([EDGES[rank]], [self.wires[rank]])
        return self.sender.claim(rank, owed, attempt, limit, self.now)

    def offer(self) -> list[Decision]:
        return self.sender.offer(TOKENS, DIGEST)

    def compute(self, stop: int = TOKENS, layers: tuple[int, int] = (0, 2)) -> list[Decision]:
        return self.sender.computed(*layers, stop, self.now)

    def want(
        self, start: int = 0, stop: int = 9, rank: int = 0, attempt: int = 1, prefetch: bool = False
    ) -> list[Decision]:
        return self.sender.want(rank, Want(KEY, attempt, start, stop, prefetch), self.now)

    def grant(self, number: int, nbytes: int, rank: int = 0, attempt: int = 1) -> list[Decision]:
        return self.sender.grant(rank, grant(number, nbytes, attempt), self.now)

    def carry(self, said: list[Decision], filler: bool = False) -> list[Decision]:
        """Grant and send every chunk that is announced in `said`."""
        out: list[Decision] = []
        for effect in said:
            if isinstance(effect, SendTo) and isinstance(effect.message, Chunk):
                message = effect.message
                order = self.grant(message.chunk, message.nbytes, effect.rank, message.attempt)[0]
                out += self.sender.sent(order, filler)
        return out

    def done(self, rank: int = 0, attempt: int = 1) -> list[Decision]:
        return self.sender.done(rank, Done(KEY, attempt), self.now)

    def cancel(self, rank: int = 0, attempt: int = 1) -> list[Decision]:
        return self.sender.cancel(rank, Cancel(KEY, attempt, "enough"))


def grant(number: int, nbytes: int, attempt: int = 1) -> Grant:
    return Grant(KEY, attempt, number, nbytes, 1, 0)


def chunk(number: int, *pieces: Piece, attempt: int = 1) -> Chunk:
    rows = sum((piece.layer_stop - piece.layer) * (piece.stop - piece.start) for piece in pieces)
    return Chunk(KEY, attempt, number, ROW * rows, pieces)


def offer(attempt: int = 1, ready: bool = False) -> Offer:
    """`ready`: it is computed, and D may cut it."""
    return Offer(KEY, attempt, TOKENS, DIGEST, "", TERMS.chunk_bytes if ready else UNSET)


def sent(number: int, filler: bool = False, attempt: int = 1) -> Sent:
    return Sent(KEY, attempt, number, 1, filler)


WHOLE = chunk(0, Piece(0, 2, 4, 0, 9))


def brought(rig: Rig, *steps: Callable[[Rig], object]) -> Rig:
    for step in steps:
        step(rig)
    return rig


def held() -> Rig:
    return Rig()


def offered() -> Rig:
    return brought(Rig(), Rig.offer)


def computed() -> Rig:
    return brought(offered(), Rig.compute)


def released() -> Rig:
    return brought(computed(), Rig.claim, lambda rig: rig.want(0, 0))


def ended() -> Rig:
    return brought(offered(), lambda rig: rig.sender.abort("aborted"))


def claimed() -> Rig:
    """With a second target that never comes, so that the send's state is all that moves."""
    return brought(Rig(expects=(0, 1)), Rig.offer, Rig.claim)


def prefetch() -> Rig:
    return brought(claimed(), lambda rig: rig.want(prefetch=True))


def sending() -> Rig:
    return brought(claimed(), Rig.want)


def drained() -> Rig:
    return brought(sending(), lambda rig: rig.carry(rig.compute()))


def done() -> Rig:
    return brought(drained(), Rig.done)


def cancelled() -> Rig:
    return brought(claimed(), Rig.cancel)
