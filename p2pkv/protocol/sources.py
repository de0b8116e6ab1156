"""What one P rank owes to a load on this D rank, from its first chunk to the last byte in D's pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.messages import Chunk, Piece, Sent
from p2pkv.protocol.pieces import Coverage
from p2pkv.protocol.wire import Debt

MAX_CHUNKS = 256
"""Chunks of one source that may be announced and not yet have come; more is a broken peer."""


@dataclass
class _Announced:
    """A chunk that P has announced and that is not in D's pages yet."""

    chunk: Chunk
    posted: bool = False
    sent: bool = False
    kept: bool = False


@dataclass
class Source:
    """One rank of P, which was `heard` last at that time. Tokens are asked for once, with `want`."""

    debt: Debt
    heard: float
    offered: bool = False
    _coverage: Coverage | None = None
    _next: int = 0
    """The number of the next chunk: P counts them up, so a smaller one has been seen before."""
    chunks: dict[int, _Announced] = field(default_factory=dict)
    _kept: int = 0
    """Chunks that are here, and wait for pages."""
    _kept_bytes: int = 0

    @property
    def satisfied(self) -> bool:
        """Whether this rank of P has sent all that it owes."""
        return self._coverage is not None and self._coverage.left == self._kept_bytes

    @property
    def complete(self) -> bool:
        """Whether all of that is in D's pages."""
        return self._coverage is not None and not self._coverage.left

    def want(self, start: int, stop: int, now: float) -> None:
        """It owes its part of tokens [start, stop) from now on."""
        self._coverage = Coverage(self.debt.window(start, stop))
        self.heard = now

    def announced(self, message: Chunk, now: float) -> bool:
        """Take note of a chunk; False if it was announced before. Raises RemoteProtocolError."""
        if message.chunk < self._next:
            return False
        if self._coverage is None:
            raise RemoteProtocolError(f"{message.key}: a chunk before anything was asked for")
        if message.chunk > self._next or len(self.chunks) - self._kept >= MAX_CHUNKS:
            raise RemoteProtocolError(
                f"{message.key}: chunk {message.chunk} is announced where {self._next} is due, "
                f"or is one more than {MAX_CHUNKS}"
            )
        nbytes = self._coverage.window.check(message.pieces)
        if nbytes != message.nbytes:
            raise RemoteProtocolError(
                f"{message.key}: chunk of {message.nbytes} bytes whose pieces make {nbytes}"
            )
        self._coverage.reserve(message.pieces)
        self.heard = now
        self._next += 1
        self.chunks[message.chunk] = _Announced(message)
        return True

    def posted(self, chunk: int) -> None:
        """A receive is posted for it."""
        self.chunks[chunk].posted = True

    def sent(self, message: Sent, now: float) -> None:
        """P has sent it; a void one is owed again. Raises RemoteProtocolError."""
        announced = self.chunks.get(message.chunk)
        if message.chunk < self._next and (announced is None or announced.sent):
            return
        if announced is None or not announced.posted:
            raise RemoteProtocolError(f"{message.key}: chunk {message.chunk} was sent without a grant")
        self.heard = now
        announced.sent = True
        if message.void:
            assert self._coverage is not None
            self._coverage.give_back(announced.chunk.pieces)
            del self.chunks[message.chunk]

    def pieces(self, chunk: int) -> tuple[Piece, ...]:
        """Where its bytes belong; () if it was void."""
        announced = self.chunks.get(chunk)
        return announced.chunk.pieces if announced is not None else ()

    def keep(self, chunk: int, now: float) -> None:
        """Its bytes are on D, and wait there for pages."""
        announced = self.chunks[chunk]
        assert announced.sent and not announced.kept
        announced.kept = True
        self._kept += 1
        self._kept_bytes += announced.chunk.nbytes
        self.heard = now

    def fill(self, chunk: int, now: float) -> None:
        """Its bytes are in D's pages."""
        announced = self.chunks.pop(chunk)
        assert self._coverage is not None and announced.sent
        self._coverage.filled(announced.chunk.nbytes)
        if announced.kept:
            self._kept -= 1
            self._kept_bytes -= announced.chunk.nbytes
        self.heard = now
