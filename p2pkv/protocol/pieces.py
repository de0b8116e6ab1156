"""Rectangles of KV: cutting what is ready into chunks on P, counting what has come on D.

Tokens are counted in units: one token where the wire is dense, a whole block where packed pages travel
as they lie. A unit can travel once all the tokens in it that D wants have been computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.messages import MAX_PIECES, Piece


@dataclass(frozen=True)
class Window:
    """The part of a prompt's KV that one P rank owes one D rank.

    Attributes:
        layer, layer_stop: global layers.
        start, stop: the tokens that D wants.
        unit: tokens in a row of the wire.
        row: bytes of one (layer, unit) over all heads of the edge.
    """

    layer: int
    layer_stop: int
    start: int
    stop: int
    unit: int
    row: int

    def __post_init__(self) -> None:
        assert self.layer < self.layer_stop and self.unit > 0 and self.row > 0
        if self.start % self.unit:
            raise RemoteProtocolError(
                f"tokens from {self.start} on are wanted, "
                f"but rows of this cache begin at multiples of {self.unit}"
            )

    @cached_property
    def ceiling(self) -> int:
        """`stop`, rounded up to a whole unit."""
        return -(-self.stop // self.unit) * self.unit

    @property
    def nbytes(self) -> int:
        if self.stop <= self.start:
            return 0
        return (self.layer_stop - self.layer) * ((self.ceiling - self.start) // self.unit) * self.row

    def sendable(self, computed: int) -> int:
        """How far whole units reach when tokens [0, computed) are computed."""
        if computed >= self.stop:
            return self.ceiling
        return max(self.start, computed // self.unit * self.unit)

    def size(self, piece: Piece) -> int:
        return (piece.layer_stop - piece.layer) * ((piece.stop - piece.start) // self.unit) * self.row

    def within(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        """What of `piece` lies in this window, cut so that each part's bytes lie together in the piece's.

        With each part goes where its bytes begin.
        """
        start, stop = max(piece.start, self.start), min(piece.stop, self.ceiling)
        if (start, stop) == (piece.start, piece.stop):
            yield 0, piece
        elif start < stop:
            skipped = (start - piece.start) // self.unit * self.row
            for layer in range(piece.layer, piece.layer_stop):
                whole = self.size(Piece(piece.layer, layer, piece.start, piece.stop))
                yield whole + skipped, Piece(layer, layer + 1, start, stop)

    def check(self, pieces: Iterable[Piece]) -> int:
        """Bytes of `pieces`. Raises RemoteProtocolError for one that does not lie in this window."""
        total = 0
        for piece in pieces:
            inside = (
                self.layer <= piece.layer < piece.layer_stop <= self.layer_stop
                and self.start <= piece.start < piece.stop <= self.ceiling
            )
            if not inside or piece.start % self.unit or piece.stop % self.unit:
                raise RemoteProtocolError(f"{piece} does not lie in what was asked for, {self}")
            total += self.size(piece)
        return total


class Cutter:
    """P's side: which rows of a window have been announced, and the next chunk to announce."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.left = window.nbytes
        self._announced = [window.start] * (window.layer_stop - window.layer)
        self._again: list[Piece] = []

    def pending(self, computed: Sequence[int]) -> int:
        """Bytes that are ready and not announced; `computed` is the token count of each layer."""
        return sum(map(self.window.size, self._pending(computed)))

    def cut(self, computed: Sequence[int], limit: int) -> tuple[Piece, ...]:
        """The next chunk: ready pieces of up to `limit` bytes (one row at the least); () if none is ready."""
        taken: list[Piece] = []
        room = limit
        for piece in list(self._pending(computed)):
            part = self._fit(piece, room, first=not taken)
            if part is None or len(taken) == MAX_PIECES:
                break
            self._take(piece, part)
            taken.append(part)
            room -= self.window.size(part)
            if part != piece:
                break
        self.left -= limit - room
        return tuple(taken)

    def put_back(self, pieces: tuple[Piece, ...]) -> None:
        """These were announced but went out void: announce them again when they are ready again."""
        self._again.extend(pieces)
        self.left += sum(map(self.window.size, pieces))

    def _pending(self, computed: Sequence[int]) -> Iterator[Piece]:
        first = self.window.layer
        for piece in self._again:
            ready = computed[piece.layer - first : piece.layer_stop - first]
            if self.window.sendable(min(ready)) >= piece.stop:
                yield piece
        run: Piece | None = None
        for index, start in enumerate(self._announced):
            stop = self.window.sendable(computed[index])
            layer = first + index
            if run is not None and (run.start, run.stop) == (start, stop):
                run = Piece(run.layer, layer + 1, start, stop)
                continue
            if run is not None:
                yield run
            run = Piece(layer, layer + 1, start, stop) if stop > start else None
        if run is not None:
            yield run

    def _fit(self, piece: Piece, room: int, first: bool) -> Piece | None:
        """The largest part of `piece` that fits: whole layers, or else some units of one layer."""
        units = (piece.stop - piece.start) // self.window.unit
        layers = min(piece.layer_stop - piece.layer, max(0, room) // (units * self.window.row))
        if layers:
            return Piece(piece.layer, piece.layer + layers, piece.start, piece.stop)
        if not first:
            return None
        some = max(1, room // self.window.row)
        return Piece(piece.layer, piece.layer + 1, piece.start, piece.start + some * self.window.unit)

    def _take(self, piece: Piece, part: Piece) -> None:
        if piece in self._again:
            self._again.remove(piece)
            self._again.extend(_rest(piece, part))
            return
        for layer in range(part.layer, part.layer_stop):
            self._announced[layer - self.window.layer] = part.stop


def _rest(piece: Piece, part: Piece) -> Iterator[Piece]:
    """What is left of `piece` without `part`, which starts at its corner."""
    if part.stop < piece.stop:
        yield Piece(part.layer, part.layer_stop, part.stop, piece.stop)
    if part.layer_stop < piece.layer_stop:
        yield Piece(part.layer_stop, piece.layer_stop, piece.start, piece.stop)


class Coverage:
    """D's side: which rows of a window have been announced, and how many bytes are still to come."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.left = window.nbytes
        self._taken = [0] * (window.layer_stop - window.layer)
        """For each layer, a bit for each unit: so a peer cannot make it grow."""

    def reserve(self, pieces: tuple[Piece, ...]) -> int:
        """Note announced pieces; bytes of them. Raises RemoteProtocolError for foreign or repeated rows."""
        total = self.window.check(pieces)
        for done, piece in enumerate(pieces):
            rows, layers = self._rows(piece), self._layers(piece)
            if any(self._taken[layer] & rows for layer in layers):
                self.give_back(pieces[:done])
                raise RemoteProtocolError(f"{piece} was announced twice")
            for layer in layers:
                self._taken[layer] |= rows
        return total

    def give_back(self, pieces: tuple[Piece, ...]) -> None:
        """These pieces came void: they may be announced again."""
        for piece in pieces:
            rows = self._rows(piece)
            for layer in self._layers(piece):
                assert self._taken[layer] & rows == rows
                self._taken[layer] ^= rows

    def filled(self, nbytes: int) -> None:
        """So many bytes have been scattered."""
        self.left -= nbytes
        assert self.left >= 0

    def _layers(self, piece: Piece) -> range:
        return range(piece.layer - self.window.layer, piece.layer_stop - self.window.layer)

    def _rows(self, piece: Piece) -> int:
        first = (piece.start - self.window.start) // self.window.unit
        count = (piece.stop - piece.start) // self.window.unit
        return ((1 << count) - 1) << first
