"""D's side of one transfer: a prompt whose KV this rank wants from the ranks of one P.

The Receiver follows the request, one Source for each rank of P what that rank has been assigned. The sources
are known once P's shape is; until then one lease runs for all of them.

WAITING -> OFFERED -> LOADING -> DONE         (any) -> ENDED
           OFFERED -> AHEAD -> LOADING or DONE
"""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from math import lcm
from typing import Literal

from msgspec import UNSET

from p2pkv.protocol import messages as m
from p2pkv.protocol import state_machine
from p2pkv.protocol.extents import Coverage, Cut, Cutter, Extents
from p2pkv.protocol.handshake import Assignment
from p2pkv.protocol.state_machine import Decision, RemoteProtocolError, SendTo


class LoadPhase(Enum):
    WAITING = auto()  # P has not begun
    OFFERED = auto()  # every source has begun
    PREFETCHING = auto()  # P pushes it, although no request for it has come to D
    LOADING = auto()  # D has said what it wants
    DONE = auto()  # all of it is in D's blocks
    ENDED = auto()  # failed or cancelled


LoadEvent = Literal["OFFERED", "PREFETCHING", "WANT", "NOTHING", "COMPLETE", "END"]

_S = LoadPhase
LOAD: state_machine.Table[LoadPhase, LoadEvent] = {
    _S.WAITING: {"OFFERED": _S.OFFERED, "NOTHING": _S.DONE, "END": _S.ENDED},
    _S.OFFERED: {"PREFETCHING": _S.PREFETCHING, "WANT": _S.LOADING, "NOTHING": _S.DONE, "END": _S.ENDED},
    _S.PREFETCHING: {"WANT": _S.LOADING, "NOTHING": _S.DONE, "END": _S.ENDED},
    _S.LOADING: {"COMPLETE": _S.DONE, "END": _S.ENDED},
    _S.DONE: {},
    _S.ENDED: {},
}

MAX_CHUNKS = 256
"""Chunks that one rank of P may announce before it sends them; a peer that announces more is broken."""


@dataclass
class _Announced:
    """A chunk that P has announced and that is not in D's blocks yet."""

    chunk: m.Chunk
    posted: bool = False
    sent: bool = False
    stored: bool = False


@dataclass
class Source:
    """What one rank of P has been asked for and has sent. `last_heard`: when its last message came. `ready`:
    P has computed all of it, and this rank may cut chunks of so many bytes; 0: P announces the chunks."""

    assignment: Assignment
    last_heard: float
    offered: bool = False
    ready: int = 0
    _coverage: Coverage | None = None
    _next: int = 0
    """The number of the next chunk. P counts up, so a smaller number has been seen before."""
    chunks: dict[int, _Announced] = field(default_factory=dict)
    _unsent: int = 0
    """Of `chunks`, those that P has not sent."""
    _stored_bytes: int = 0
    """Bytes of the chunks that have arrived and wait for blocks."""
    _foreseen: tuple[Extents, int, list[Cut]] | None = None
    """What is likely to be wanted, bytes of a chunk, and the chunks of that size."""

    @property
    def satisfied(self) -> bool:
        """Whether this rank of P has sent all that it owes."""
        return self._coverage is not None and self._coverage.left == self._stored_bytes

    @property
    def complete(self) -> bool:
        """Whether all of it is in D's blocks."""
        return self._coverage is not None and not self._coverage.left

    def want(self, start: int, stop: int, now: float) -> None:
        """This rank of P is asked for its part of tokens [start, stop)."""
        self._coverage = Coverage(self.assignment.extents(start, stop))
        self.last_heard = now

    def foresee(self, tokens: int) -> None:
        """Cut what is likely to be wanted of a prompt of so many tokens: all but the last one."""
        if self.ready and self._coverage is None:
            extents = self.assignment.extents(0, tokens - 1)
            self._foreseen = extents, self.ready, list(Cutter(extents).whole(tokens, self.ready, m.MAX_CUT))

    def cut(self, key: str, attempt: int, tokens: int, now: float) -> list[m.Chunk]:
        """The first chunks of what is asked for now, cut as P would; [] if P has to announce them."""
        if not self.ready or self._coverage is None:
            return []
        extents, cuts, chunks, count = self._coverage.extents, None, list[m.Chunk](), 0
        if self._foreseen is not None and self._foreseen[:2] == (extents, self.ready):
            cuts = self._foreseen[2]
        for nbytes, pieces in cuts or Cutter(extents).whole(tokens, self.ready, m.MAX_CUT):
            count += len(pieces)
            if count > m.MAX_PIECES:
                break
            chunks.append(m.Chunk(key, attempt, len(chunks), nbytes, pieces))
            self.announced(chunks[-1], now)
        return chunks

    def announced(self, message: m.Chunk, now: float) -> bool:
        """Take note of a chunk; False if it was announced before. Raises RemoteProtocolError."""
        if message.chunk < self._next:
            return False
        if self._coverage is None:
            raise RemoteProtocolError(f"{message.key}: a chunk before anything was asked for")
        if message.chunk > self._next or self._unsent >= MAX_CHUNKS:
            raise RemoteProtocolError(
                f"{message.key}: chunk {message.chunk} is announced where {self._next} is due, "
                f"or is one more than {MAX_CHUNKS}"
            )
        nbytes = self._coverage.reserve(message.pieces)
        if nbytes != message.nbytes:
            self._coverage.give_back(message.pieces)
            raise RemoteProtocolError(
                f"{message.key}: chunk of {message.nbytes} bytes whose pieces make {nbytes}"
            )
        self.last_heard = now
        self._next += 1
        self._unsent += 1
        self.chunks[message.chunk] = _Announced(message)
        return True

    def sent(self, message: m.Sent, now: float) -> None:
        """P has sent this chunk; if it was filler, its pieces will come again. Raises RemoteProtocolError."""
        announced = self.chunks.get(message.chunk)
        if message.chunk < self._next and (announced is None or announced.sent):
            return
        if announced is None or not announced.posted:
            raise RemoteProtocolError(f"{message.key}: chunk {message.chunk} was sent without a grant")
        self.last_heard = now
        self._unsent -= 1
        announced.sent = True
        if message.filler:
            assert self._coverage is not None
            self._coverage.give_back(announced.chunk.pieces)
            del self.chunks[message.chunk]

    def keep(self, chunk: int, now: float) -> None:
        """This chunk's bytes are on D, and wait there for blocks."""
        announced = self.chunks[chunk]
        assert announced.sent and not announced.stored
        announced.stored = True
        self._stored_bytes += announced.chunk.nbytes
        self.last_heard = now

    def fill(self, chunk: int, now: float) -> None:
        announced = self.chunks.pop(chunk)
        assert self._coverage is not None and announced.sent
        self._coverage.filled(announced.chunk.nbytes)
        if announced.stored:
            self._stored_bytes -= announced.chunk.nbytes
        self.last_heard = now


@dataclass(eq=False)
class Receiver:
    """One prompt on one D rank. `prefetch`: P has begun it, and no request for it has come to D yet; the
    caller bounds how long."""

    key: str
    attempt: int
    tokens: int
    digest: bytes
    terms: state_machine.Terms
    now: InitVar[float]
    prefetch: bool = False

    def __post_init__(self, now: float) -> None:
        self.load = state_machine.Machine(f"load {self.key}", LOAD, LoadPhase.WAITING)
        self.sources: dict[int, Source] = {}
        self._began = now
        self._moved = now
        self.waits_since = now
        """When it began to wait for P, or for blocks on D."""
        self.generation: str | None = None
        """Of the weights with which P computes the prompt; None before its first offer."""
        self.wants_nothing = False
        """D has said that it wants none of it."""

    # What D's own engine does.

    def attach(self, assignments: Mapping[int, Assignment], now: float) -> list[Decision]:
        """P's shape is known: the ranks of P that hold what this rank needs, and what each owes it."""
        if self.sources or self.load.state is not LoadPhase.WAITING:
            return []
        self.sources = {rank: Source(assignment, now) for rank, assignment in assignments.items()}
        if self.wants_nothing:
            return self._let_go()
        if self.sources:
            return []
        self.load.local("OFFERED")
        self.waits_since = now
        return [state_machine.Offered(None)]

    def adopt(self, now: float) -> list[Decision]:
        """The request for what P has begun ahead has come to D."""
        self.prefetch = False
        self.waits_since = now
        return [state_machine.Offered(self.generation)] if self.load.state is LoadPhase.PREFETCHING else []

    def want(self, start: int, stop: int, now: float) -> list[Decision]:
        """The request has its blocks: load tokens [start, stop); nothing if empty, which releases P. Raises
        ValueError for tokens that the prompt does not have, or a start inside a row of the wire."""
        if self.load.ended:
            return []
        if stop <= start:
            self.wants_nothing = True
            return self._let_go() if self.sources or self._idle else []
        unit = lcm(*(source.assignment.unit for source in self.sources.values()))
        if start < 0 or stop > self.tokens or start % unit:
            raise ValueError(
                f"{self.key}: tokens [{start}, {stop}) of {self.tokens} cannot be loaded: "
                f"expected a start at a multiple of {unit} and a stop within the prompt"
            )
        if self._idle:
            return self._let_go()
        self._moved = now
        prefetch = self.load.state is LoadPhase.PREFETCHING
        self.load.local("WANT")
        if prefetch:
            # A rank of P that has sent all that was taken ahead is released.
            stops = {rank: 0 if each.satisfied else self.tokens for rank, each in self.sources.items()}
            rest = [SendTo(rank, m.Want(self.key, self.attempt, 0, stop)) for rank, stop in stops.items()]
            return rest + self._completed()
        return self._ask(start, stop, now) + self._completed()

    def _ask(self, start: int, stop: int, now: float) -> list[Decision]:
        out: list[Decision] = []
        for rank, source in self.sources.items():
            source.want(start, stop, now)
            # Of rows for several tokens a short prompt has none.
            none = source.complete and not self.prefetch
            wanted = (0, 0) if none else (start, stop)
            chunks = [] if none else source.cut(self.key, self.attempt, self.tokens, now)
            cut = tuple(chunk.pieces for chunk in chunks) or UNSET
            out.append(SendTo(rank, m.Want(self.key, self.attempt, *wanted, self.prefetch, cut)))
            out += [state_machine.Post(rank, chunk) for chunk in chunks]
        return out

    def _completed(self) -> list[Decision]:
        """The end of the load, if all that was wanted is in D's blocks."""
        if not all(each.complete for each in self.sources.values()):
            return []
        self.load.local("COMPLETE")
        return [state_machine.Finished(True)]

    def cancel(self, reason: str) -> list[Decision]:
        """D does not want the prompt any more. Chunks on their way will be received and dropped."""
        return self._end(reason, m.Cancel(self.key, self.attempt, reason))

    def again(self, attempt: int, lease_from: float) -> "Receiver":
        """A receiver that asks another incarnation of P for the same request: a new lease, the old bound."""
        known = self.tokens, self.digest, self.terms
        other = Receiver(self.key, attempt, *known, lease_from, self.prefetch)
        other.waits_since = self.waits_since
        return other

    def waits_for(self, rank: int) -> bool:
        """Whether this rank of P still owes something, as far as is known. One that was sent Done does not:
        it may have forgotten the transfer, and would take it for a new one."""
        source = self.sources.get(rank)
        return not self.load.ended and (source is None or not source.complete)

    # What a P rank says.

    def offer(self, rank: int, message: m.Offer, now: float) -> list[Decision]:
        source = self._source(rank, message.attempt)
        if source is None:
            return []
        source.ready = message.ready or 0
        if source.offered:
            return []
        if message.tokens != self.tokens or message.digest != self.digest:
            return self.cancel(
                f"P's prompt ({message.tokens} tokens) is not D's ({self.tokens} tokens): "
                "both must get the same prompt, multimodal inputs, model, adapter and cache salt"
            )
        if self.generation not in (None, message.generation):
            return self.cancel(
                "P's ranks have computed this prompt with different weights: its engine has changed them"
            )
        self.generation = message.generation
        source.offered, source.last_heard = True, now
        if self.load.state is LoadPhase.WAITING and all(each.offered for each in self.sources.values()):
            self.load.remote("OFFERED")
            self.waits_since = now
            if not self.prefetch:
                return [state_machine.Offered(self.generation)]
            self.load.local("PREFETCHING")
            return self._ask(0, self.tokens, now)
        return []

    def foresee(self, rank: int) -> None:
        """This rank of P is ready, and D may have a moment before the request has blocks."""
        if not self.load.ended and rank in self.sources:
            self.sources[rank].foresee(self.tokens)

    def held(self, rank: int, now: float) -> None:
        """P's rank vouches that it knows this transfer."""
        if rank in self.sources:
            self.sources[rank].last_heard = now

    def chunk(self, rank: int, message: m.Chunk, now: float) -> list[Decision]:
        source = self._source(rank, message.attempt)
        if source is None or not source.announced(message, now):
            return []
        return [state_machine.Post(rank, message)]

    def sent(self, rank: int, message: m.Sent, now: float) -> list[Decision]:
        """P has sent this chunk. If it was filler, it may be announced again under another number."""
        source = self._source(rank, message.attempt)
        if source is not None:
            source.sent(message, now)
        return []

    def failed(self, rank: int, message: m.Failed) -> list[Decision]:
        # What becomes of it at a rank that owes nothing is no matter: the others say how it ends.
        source = self._source(rank, message.attempt) if rank in self.sources else None
        if source is None or source.satisfied:
            return []
        farewell = m.Cancel(self.key, self.attempt, "another rank of P failed")
        return self._end(message.reason, farewell, but=rank)

    def lost(self, reason: str, rank: int | None = None) -> list[Decision]:
        """P is gone, has refused us, or broke the protocol; with `rank`, only this one of its ranks, which
        may go if its part has arrived completely."""
        source = self.sources.get(rank) if rank is not None else None
        return [] if source is not None and source.satisfied else self.cancel(reason)

    # What the engine reports back.

    def posted(self, rank: int, message: m.Chunk) -> None:
        """A receive is posted for this chunk. The grant goes out, whatever has happened meanwhile."""
        source = self._source(rank, message.attempt)
        if source is not None:
            source.chunks[message.chunk].posted = True

    def awaits(self, rank: int, message: m.Chunk) -> bool:
        """Whether P has announced this chunk, and has not sent it yet."""
        source = self.sources.get(rank)
        announced = source.chunks.get(message.chunk) if source is not None else None
        return announced is not None and message.attempt == self.attempt and not announced.sent

    def pieces(self, rank: int, attempt: int, chunk: int) -> tuple[m.Piece, ...]:
        """Where the bytes of this chunk belong, after P's Sent for them; () if they are late, or filler."""
        source = self._source(rank, attempt)
        announced = source.chunks.get(chunk) if source is not None else None
        return announced.chunk.pieces if announced is not None else ()

    def stored(self, rank: int, chunk: int, now: float) -> None:
        """The bytes of this chunk are on D, and wait there for blocks. This rank of P has delivered them."""
        assert self.load.state is LoadPhase.PREFETCHING
        self.sources[rank].keep(chunk, now)

    def scattered(self, rank: int, chunk: int, now: float) -> list[Decision]:
        """The bytes of this chunk are in D's blocks. Without effect if the load has ended meanwhile."""
        if self.load.ended:
            return []
        source = self.sources[rank]
        source.fill(chunk, now)
        self._moved = now
        if not source.complete:
            return []
        return [SendTo(rank, m.Done(self.key, self.attempt)), *self._completed()]

    # Time.

    @property
    def deadline(self) -> float | None:
        """When to call `tick`: the end of the earliest lease, or of this state's own bound."""
        if self.load.ended:
            return None
        ends = [self._answered_by, self._bound]
        return min((end for end in ends if end is not None), default=None)

    @property
    def _answered_by(self) -> float | None:
        """The end of the earliest lease; None when no rank of P owes an answer."""
        if self._idle:
            return None
        if not self.sources:
            return self._began + self.terms.lease
        times = [source.last_heard for source in self.sources.values() if not source.satisfied]
        return min(times) + self.terms.lease if times else None

    @property
    def _bound(self) -> float | None:
        """The end of what this state may last although P answers; None if another bounds it."""
        if self.load.state is LoadPhase.LOADING:
            return self._moved + self.terms.stall
        return None if self.prefetch or self._idle else self.waits_since + self.terms.wait

    def tick(self, now: float, reached: bool = False) -> list[Decision]:
        """End what has outlived its lease or its bound. `reached`: P's rank 0 accepts our connection."""
        answered_by, bound = self._answered_by, self._bound
        if self.load.ended:
            return []
        if bound is not None and now >= bound:
            return self.cancel(self._too_long())
        if answered_by is None or now < answered_by:
            return []
        if not self.sources and not reached:
            return self.cancel(
                f"P could not be reached: there was no connection to it for {self.terms.lease:g} s; is it "
                "up, and is its address right?"
            )
        return self.cancel(
            f"P did not answer in time: it has not confirmed this request for {self.terms.lease:g} s; P is "
            "dead, hung or paused, or never got the request"
        )

    def _too_long(self) -> str:
        match self.load.state:
            case LoadPhase.LOADING:
                return (
                    f"P answers, and has pushed nothing of this prompt for {self.terms.stall:g} s "
                    "(stall_seconds): its engine hangs, or it has preempted the prompt, perhaps because its "
                    "blocks hold prompts that this D has no room for"
                )
            case LoadPhase.WAITING:
                return (
                    f"P answers, and has not begun this prompt for {self.terms.wait:g} s (wait_seconds): "
                    "its queue is too long, or it waits until this D takes prompts that P holds for it "
                    "(held_share)"
                )
        return (
            f"D has had no room for this prompt for {self.terms.wait:g} s (wait_seconds) since P began it, "
            "and P keeps a prompt's blocks no longer"
        )

    @property
    def _idle(self) -> bool:
        """Whether no rank of P owes this rank anything (a stage without KV layers)."""
        return self.load.state is LoadPhase.OFFERED and not self.sources

    def _let_go(self) -> list[Decision]:
        """Nothing is wanted: say so, which releases P."""
        self.load.local("NOTHING")
        wants = [SendTo(rank, m.Want(self.key, self.attempt, 0, 0)) for rank in self.sources]
        return [*wants, state_machine.Finished(True)]

    def _source(self, rank: int, attempt: int) -> Source | None:
        """The source that a message comes from; None if the message is stale."""
        if self.load.ended or attempt != self.attempt:
            return None
        source = self.sources.get(rank)
        if source is None:
            raise RemoteProtocolError(f"{self.key}: rank {rank} of P owes this rank nothing")
        return source

    def _end(self, reason: str, farewell: m.Cancel, but: int | None = None) -> list[Decision]:
        if self.load.ended:
            return []
        # P keeps what was begun ahead for a request that may still come.
        last = m.Want(self.key, self.attempt, 0, 0, prefetch=True) if self.prefetch else farewell
        self.load.local("END")
        ends = [SendTo(rank, last) for rank in self.sources if rank != but]
        return [*ends, state_machine.Finished(False, reason)]
