"""The conversation of one P rank with one D rank about a prompt: what was announced, granted and sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from p2pkv.protocol.machine import Machine, RemoteProtocolError
from p2pkv.protocol.messages import Chunk, Grant, Piece, Want
from p2pkv.protocol.pieces import Cutter
from p2pkv.protocol.sender_states import Leg, On
from p2pkv.protocol.wire import Debt

MAX_ANNOUNCED = 64
"""Chunks of one leg that may be announced and not yet sent; bounds what D has to remember."""


@dataclass
class DecodeLeg:
    """What this rank owes a rank of D, under one attempt.

    `computed`, an argument of its methods: for each layer of this rank, how many of the prompt's first tokens
    have their KV in the pages.

    Attributes:
        limit: the most bytes of one chunk; 0 while it is not known, and nothing is announced.
        heard: when D's rank said something last.
        gone: that rank has restarted or broken the protocol; who comes next is somebody else.
        cutter: what of the tokens that it wants has not been announced yet; None before it has said which.
        announced: bytes and pieces of each chunk that has not been sent.
    """

    debt: Debt
    attempt: int
    limit: int
    heard: float
    machine: Machine[Leg, On]
    gone: bool = False
    cutter: Cutter | None = None
    _chunks: int = 0
    announced: dict[int, tuple[int, tuple[Piece, ...]]] = field(default_factory=dict)
    _granted: set[int] = field(default_factory=set)

    def want(self, message: Want) -> None:
        """D's rank says which tokens. Raises RemoteProtocolError if it said something else before."""
        window = self.debt.window(message.start, message.stop)
        if self.cutter is not None and self.cutter.window != window:
            raise RemoteProtocolError(f"{message} is not what was wanted ahead, {self.cutter.window}")
        self.machine.remote(On.AHEAD if message.ahead else On.WANT)
        self.cutter = self.cutter or Cutter(window)

    def announce(self, key: str, computed: Sequence[int], limit: int, flush: bool) -> Iterator[Chunk]:
        """Chunks that are worth a message now: full ones, and with `flush` the rest."""
        limit = min(limit, self.limit)
        if self.cutter is None or self.machine.ended or not limit:
            return
        computed = self._owed(computed)
        ready = self.cutter.pending(computed)
        while ready and (flush or ready >= limit) and len(self.announced) < MAX_ANNOUNCED:
            pieces = self.cutter.cut(computed, limit)
            nbytes = sum(map(self.cutter.window.size, pieces))
            yield Chunk(key, self.attempt, self._chunks, nbytes, pieces)
            self.announced[self._chunks] = (nbytes, pieces)
            self._chunks += 1
            ready -= nbytes

    def grant(self, message: Grant) -> tuple[Piece, ...]:
        """A receive is posted for this chunk; what is in it. Raises RemoteProtocolError."""
        announced = self.announced.get(message.chunk)
        if announced is None or announced[0] != message.nbytes or message.chunk in self._granted:
            raise RemoteProtocolError(f"{message} grants what was not announced, or grants it twice")
        self._granted.add(message.chunk)
        return announced[1]

    def readable(self, computed: Sequence[int], pieces: Sequence[Piece]) -> bool:
        """Whether the pages still hold all of these pieces."""
        if self.cutter is None:
            return False
        window, computed = self.cutter.window, self._owed(computed)
        first = self.debt.edge.layers.start
        return all(
            window.sendable(min(computed[piece.layer - first : piece.layer_stop - first])) >= piece.stop
            for piece in pieces
        )

    def sent(self, chunk: int, void: bool) -> None:
        """It has been handed to the link; a void one will be announced again."""
        assert self.cutter is not None
        _, pieces = self.announced.pop(chunk)
        self._granted.remove(chunk)
        if void:
            self.cutter.put_back(pieces)

    @property
    def drained(self) -> bool:
        """Whether all that is wanted has been read from the pages."""
        return self.cutter is not None and not self.cutter.left and not self.announced

    def _owed(self, computed: Sequence[int]) -> Sequence[int]:
        """Of the layers that it owes."""
        first = self.debt.edge.source_layer
        return computed[first : first + len(self.debt.edge.layers)]
