"""D's side of one transfer: a prompt whose KV this rank wants from the ranks of one P.

    transfer:  WAITING -> OFFERED -> LOADING -> DONE         (any) -> ENDED
                          OFFERED -> AHEAD -> LOADING or DONE

The Receiver follows the request, one Source for each P rank what that rank owes. The sources are
known once P's shape is; until then the lease runs on the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from p2pkv.protocol.effects import Effect, Finished, Offered, Post, Tell
from p2pkv.protocol.machine import Machine, RemoteProtocolError, Table
from p2pkv.protocol.messages import Cancel, Chunk, Done, Failed, Grant, Offer, Piece, Sent, Want
from p2pkv.protocol.pieces import Coverage
from p2pkv.protocol.wire import Debt

MAX_CHUNKS = 256
"""Chunks of one source that may be announced and not yet have come; more is a broken peer."""


class Load(Enum):
    WAITING = auto()  # P has not begun
    OFFERED = auto()  # every source has begun
    AHEAD = auto()  # P pushes it, although no request for it has come to D
    LOADING = auto()  # D has said what it wants
    DONE = auto()  # all of it is in D's pages
    ENDED = auto()  # failed or cancelled


class On(Enum):
    OFFERED = auto()
    AHEAD = auto()
    WANT = auto()
    NOTHING = auto()
    COMPLETE = auto()
    END = auto()


LOAD: Table[Load, On] = {
    Load.WAITING: {On.OFFERED: Load.OFFERED, On.NOTHING: Load.DONE, On.END: Load.ENDED},
    Load.OFFERED: {
        On.AHEAD: Load.AHEAD,
        On.WANT: Load.LOADING,
        On.NOTHING: Load.DONE,
        On.END: Load.ENDED,
    },
    Load.AHEAD: {On.WANT: Load.LOADING, On.NOTHING: Load.DONE, On.END: Load.ENDED},
    Load.LOADING: {On.COMPLETE: Load.DONE, On.END: Load.ENDED},
    Load.DONE: {},
    Load.ENDED: {},
}


@dataclass
class _Announced:
    """A chunk that P has announced and that has not come yet."""

    chunk: Chunk
    posted: bool = False
    sent: bool = False
    kept: bool = False


@dataclass
class _Source:
    """What one P rank owes."""

    debt: Debt
    heard: float
    offered: bool = False
    coverage: Coverage | None = None
    next: int = 0
    """The number of the next chunk: P counts them up, so a smaller one has been seen before."""
    chunks: dict[int, _Announced] = field(default_factory=dict)
    kept: int = 0
    """Chunks that are here, and wait for pages."""
    kept_bytes: int = 0

    @property
    def satisfied(self) -> bool:
        """Whether this rank of P has sent all that it owes."""
        return self.coverage is not None and self.coverage.left == self.kept_bytes

    @property
    def complete(self) -> bool:
        """Whether all of that is in D's pages."""
        return self.coverage is not None and not self.coverage.left


class Receiver:
    """One prompt on one D rank."""

    def __init__(
        self,
        key: str,
        attempt: int,
        tokens: int,
        digest: bytes,
        lease: float,
        now: float,
        *,
        stall: float = inf,
        ahead: bool = False,
    ) -> None:
        """`stall`: seconds without a byte after which a load ends, although P says that it is alive.
        `ahead`: P has begun it, and no request for it has come to D yet; see `adopt`."""
        self.key = key
        self.attempt = attempt
        self.tokens = tokens
        self.digest = digest
        self.lease = lease
        self.load = Machine(f"load {key}", LOAD, Load.WAITING)
        self.sources: dict[int, _Source] = {}
        self.stall = stall
        self._began = now
        self._moved = now
        self.nothing = False
        """D has said that it wants none of it."""
        self.ahead = ahead

    # What D's own engine does.

    def attach(self, debts: Mapping[int, Debt], now: float) -> list[Effect]:
        """P's shape is known: these of its ranks hold what this rank needs. Without any, all is there."""
        if self.sources or self.load.state is not Load.WAITING:
            return []
        self.sources = {rank: _Source(debt, now) for rank, debt in debts.items()}
        if self.nothing:
            return self._let_go()
        if self.sources:
            return []
        self.load.local(On.OFFERED)
        return [Offered()]

    def adopt(self) -> list[Effect]:
        """The request for what P has begun ahead has come to D."""
        self.ahead = False
        return [Offered()] if self.load.state is Load.AHEAD else []

    def want(self, start: int, stop: int, now: float) -> list[Effect]:
        """The request has its pages: load tokens [start, stop); nothing if empty, which releases P.

        Raises ValueError for tokens that the prompt does not have, or a start inside a row of the wire.
        """
        if self.load.ended:
            return []
        if stop <= start:
            self.nothing = True
            return self._let_go() if self.sources or self._idle else []
        unit = max((source.debt.wire.unit for source in self.sources.values()), default=1)
        if start < 0 or stop > self.tokens or start % unit:
            raise ValueError(
                f"{self.key}: tokens [{start}, {stop}) of {self.tokens} cannot be loaded: "
                f"expected a start at a multiple of {unit} and a stop within the prompt"
            )
        if self._idle:
            return self._let_go()
        self._moved = now
        ahead = self.load.state is Load.AHEAD
        self.load.local(On.WANT)
        if ahead:
            return [Tell(rank, self._rest(source)) for rank, source in self.sources.items()]
        return self._ask(start, stop, now)

    def _rest(self, source: _Source) -> Want:
        """Of what was begun ahead. Who has sent all of it is released, and need not have kept anything."""
        return Want(self.key, self.attempt, 0, 0 if source.satisfied else self.tokens)

    def _ask(self, start: int, stop: int, now: float) -> list[Effect]:
        out: list[Effect] = []
        for rank, source in self.sources.items():
            source.coverage = Coverage(source.debt.window(start, stop))
            source.heard = now
            out.append(Tell(rank, Want(self.key, self.attempt, start, stop, self.ahead)))
        return out

    def cancel(self, reason: str) -> list[Effect]:
        """D does not want it any more. What is on its way will be received and dropped."""
        return self._end(reason, Cancel(self.key, self.attempt, reason))

    # What a P rank says.

    def offer(self, rank: int, message: Offer, now: float) -> list[Effect]:
        source = self._source(rank, message.attempt)
        if source is None or source.offered:
            return []
        if message.tokens != self.tokens or message.digest != self.digest:
            return self.cancel(
                f"P's prompt ({message.tokens} tokens) is not D's ({self.tokens} tokens): "
                "both must get the same prompt, model, adapter and cache salt"
            )
        source.offered, source.heard = True, now
        if self.load.state is Load.WAITING and all(each.offered for each in self.sources.values()):
            self.load.remote(On.OFFERED)
            return self._go_ahead(now) if self.ahead else [Offered()]
        return []

    def _go_ahead(self, now: float) -> list[Effect]:
        self.load.local(On.AHEAD)
        return self._ask(0, self.tokens, now)

    def held(self, rank: int, now: float) -> None:
        """P's rank vouches that it knows this transfer."""
        if rank in self.sources:
            self.sources[rank].heard = now

    def chunk(self, rank: int, message: Chunk, now: float) -> list[Effect]:
        source = self._source(rank, message.attempt)
        if source is None:
            return []
        if message.chunk < source.next:
            return []
        if source.coverage is None:
            raise RemoteProtocolError(f"{self.key}: a chunk before anything was asked for")
        if message.chunk > source.next or len(source.chunks) - source.kept >= MAX_CHUNKS:
            raise RemoteProtocolError(
                f"{self.key}: chunk {message.chunk} is announced where {source.next} is due, "
                f"or is one more than {MAX_CHUNKS}"
            )
        nbytes = source.coverage.window.check(message.pieces)
        if nbytes != message.nbytes:
            raise RemoteProtocolError(
                f"{self.key}: chunk of {message.nbytes} bytes whose pieces make {nbytes}"
            )
        source.coverage.reserve(message.pieces)
        source.heard = now
        source.next += 1
        source.chunks[message.chunk] = _Announced(message)
        return [Post(rank, message)]

    def sent(self, rank: int, message: Sent, now: float) -> None:
        """P has sent this chunk. A void one may be announced again under another number."""
        source = self._source(rank, message.attempt)
        if source is None:
            return
        announced = source.chunks.get(message.chunk)
        if message.chunk < source.next and (announced is None or announced.sent):
            return
        if announced is None or not announced.posted:
            raise RemoteProtocolError(f"{self.key}: chunk {message.chunk} was sent without a grant")
        source.heard = now
        announced.sent = True
        if message.void:
            assert source.coverage is not None
            source.coverage.give_back(announced.chunk.pieces)
            del source.chunks[message.chunk]

    def failed(self, rank: int, message: Failed) -> list[Effect]:
        source = self._source(rank, message.attempt)
        if source is None or source.satisfied:
            return []
        return self._end(message.reason, Cancel(self.key, self.attempt, "another rank of P failed"), but=rank)

    def lost(self, reason: str, rank: int | None = None) -> list[Effect]:
        """P is gone, has refused us, or broke the protocol; with `rank`, only this one of its ranks.

        A rank whose part is all here may go.
        """
        source = self.sources.get(rank) if rank is not None else None
        return [] if source is not None and source.satisfied else self.cancel(reason)

    # What the engine reports back.

    def posted(self, rank: int, message: Chunk, link: int, landing: int) -> list[Effect]:
        """A receive is posted for this chunk; the grant goes out, whatever has happened meanwhile."""
        source = self._source(rank, message.attempt)
        if source is not None:
            source.chunks[message.chunk].posted = True
        return [Tell(rank, Grant(self.key, message.attempt, message.chunk, message.nbytes, link, landing))]

    def pieces(self, rank: int, attempt: int, chunk: int) -> tuple[Piece, ...]:
        """Where the bytes of this chunk belong; () if nobody wants them now (late or void).

        Bytes may be written only after P's Sent for them: until then they may turn out to be void.
        """
        source = self._source(rank, attempt)
        return source.chunks[chunk].chunk.pieces if source is not None and chunk in source.chunks else ()

    def kept(self, rank: int, chunk: int, now: float) -> None:
        """The bytes of this chunk are on D, and wait there for pages. What P owes is paid with that."""
        source = self.sources[rank]
        announced = source.chunks[chunk]
        assert self.load.state is Load.AHEAD and announced.sent and not announced.kept
        announced.kept = True
        source.kept += 1
        source.kept_bytes += announced.chunk.nbytes
        source.heard = now

    def scattered(self, rank: int, chunk: int, now: float) -> list[Effect]:
        """The bytes of this chunk are in D's pages. Without effect if the load has ended meanwhile."""
        if self.load.ended:
            return []
        source = self.sources[rank]
        announced = source.chunks.pop(chunk)
        assert source.coverage is not None and announced.sent
        source.coverage.filled(announced.chunk.nbytes)
        if announced.kept:
            source.kept -= 1
            source.kept_bytes -= announced.chunk.nbytes
        source.heard = self._moved = now
        if source.coverage.left:
            return []
        out: list[Effect] = [Tell(rank, Done(self.key, self.attempt))]
        if all(each.complete for each in self.sources.values()):
            self.load.local(On.COMPLETE)
            out.append(Finished(True))
        return out

    # Time.

    @property
    def deadline(self) -> float | None:
        """The end of the earliest lease, or of a load that stalls; None when there is nothing to wait for."""
        if self.load.ended or self._idle:
            return None
        if not self.sources:
            return self._began + self.lease
        heard = [source.heard for source in self.sources.values() if not source.satisfied]
        ends = [min(heard) + self.lease] if heard else []
        if self.load.state is Load.LOADING:
            ends.append(self._stalls)
        return min(ends, default=None)

    @property
    def _stalls(self) -> float:
        return self._moved + self.stall

    def tick(self, now: float) -> list[Effect]:
        deadline = self.deadline
        if deadline is None or now < deadline:
            return []
        if deadline == self._stalls:
            return self.cancel(
                f"P answers, and has pushed nothing of this prompt for {self.stall:g} s: its engine hangs, "
                "or it has preempted the prompt, perhaps for want of pages that it keeps for what this D "
                "has no room for"
            )
        return self.cancel(
            f"P has not confirmed this request for {self.lease:g} s; it is dead, or never got it"
        )

    # Inside.

    @property
    def _idle(self) -> bool:
        """Whether no rank of P owes this rank anything (a stage without KV layers)."""
        return self.load.state is Load.OFFERED and not self.sources

    def _let_go(self) -> list[Effect]:
        """Nothing is wanted: say so, which releases P."""
        self.load.local(On.NOTHING)
        tells = [Tell(rank, Want(self.key, self.attempt, 0, 0)) for rank in self.sources]
        return [*tells, Finished(True)]

    def _source(self, rank: int, attempt: int) -> _Source | None:
        """The source that a message comes from; None if the message is stale."""
        if self.load.ended or attempt != self.attempt:
            return None
        source = self.sources.get(rank)
        if source is None:
            raise RemoteProtocolError(f"{self.key}: rank {rank} of P owes this rank nothing")
        return source

    def _end(self, reason: str, farewell: Cancel, but: int | None = None) -> list[Effect]:
        if self.load.ended:
            return []
        # P keeps what was begun ahead for a request that may still come.
        last = Want(self.key, self.attempt, 0, 0, ahead=True) if self.ahead else farewell
        self.load.local(On.END)
        tells = [Tell(rank, last) for rank in self.sources if rank != but]
        return [*tells, Finished(False, reason)]

    def __repr__(self) -> str:
        return f"<{self.load} attempt {self.attempt} sources {sorted(self.sources)}>"
