"""Rectangles of KV: cutting what is ready into chunks on P, counting what has come on D.

Tokens are counted in units: one token where the wire is dense, a whole block where packed pages travel
as they lie. A unit can travel once all the tokens in it that D wants have been computed. A KV group with one
row per request has the one unit [0, 1), which can travel once all tokens that D wants have been computed.
Where context parallelism divides the tokens, those that both ranks keep are counted (see `interleave.py`).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import gcd

from msgspec import Struct

from p2pkv.interleave import Common
from p2pkv.protocol.messages import MAX_PIECES, Piece
from p2pkv.protocol.state_machine import RemoteProtocolError

WIDEST = 16
"""Bytes that a thread of a GPU reads or writes at once, at the most."""

Cut = tuple[int, tuple[Piece, ...]]
"""Bytes and pieces of a chunk."""

Computed = Mapping[int, Sequence[int]]
"""By KV group: for each layer of an extent, how many of the prompt's first tokens have been computed."""


class Extent(Struct, frozen=True, dict=True):
    """The part of a prompt's KV that one P rank owes one D rank of one KV group.

    Attributes:
        layer, layer_stop: global layers of the KV group.
        start, stop: the tokens that D wants; [0, 1) where there is one row per request.
        unit: tokens in a row of the wire.
        row: bytes of one (layer, unit) over all heads of the edge.
        ready: where there is one row per request: it can travel once so many tokens are computed. None: there
            is one row per unit.
        tokens: which tokens are counted; None: all.
    """

    group: int
    layer: int
    layer_stop: int
    start: int
    stop: int
    unit: int
    row: int
    ready: int | None = None
    tokens: Common | None = None

    def __post_init__(self) -> None:
        assert self.layer < self.layer_stop and self.unit > 0 and self.row > 0
        if self.start % self.unit:
            raise RemoteProtocolError(
                f"tokens from {self.start} on are wanted, "
                f"but rows of this cache begin at multiples of {self.unit}"
            )

    @property
    def layers(self) -> int:
        return self.layer_stop - self.layer

    @cached_property
    def ceiling(self) -> int:
        """`stop`, rounded up to a whole unit."""
        return -(-self.stop // self.unit) * self.unit

    @property
    def nbytes(self) -> int:
        if self.stop <= self.start:
            return 0
        return self.layers * ((self.ceiling - self.start) // self.unit) * self.row

    def sendable(self, computed: int) -> int:
        """How far whole units reach when tokens [0, computed) are computed."""
        if self.tokens is not None:
            computed = self.tokens.count(computed)
        if computed >= (self.stop if self.ready is None else self.ready):
            return self.ceiling
        if self.ready is not None:
            return self.start
        return max(self.start, computed // self.unit * self.unit)

    def size(self, piece: Piece) -> int:
        return (piece.layer_stop - piece.layer) * ((piece.stop - piece.start) // self.unit) * self.row

    def within(self, piece: Piece) -> Iterator[tuple[int, Piece]]:
        """What of `piece` lies in this extent, in parts whose bytes lie together, and where they begin."""
        start, stop = max(piece.start, self.start), min(piece.stop, self.ceiling)
        if (start, stop) == (piece.start, piece.stop):
            yield 0, piece
        elif start < stop:
            skipped = (start - piece.start) // self.unit * self.row
            for layer in range(piece.layer, piece.layer_stop):
                whole = self.size(Piece(self.group, piece.layer, layer, piece.start, piece.stop))
                yield whole + skipped, Piece(self.group, layer, layer + 1, start, stop)

    def contains(self, piece: Piece) -> bool:
        """Whether a piece of this group lies in the extent, in whole units."""
        return (
            self.layer <= piece.layer < piece.layer_stop <= self.layer_stop
            and self.start <= piece.start < piece.stop <= self.ceiling
            and not (piece.start % self.unit or piece.stop % self.unit)
        )


@dataclass(frozen=True)
class Extents:
    """What one P rank owes one D rank of a prompt: an extent of each KV group of which it owes something."""

    by_group: Mapping[int, Extent]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.by_group.values())

    def size(self, piece: Piece) -> int:
        return self.by_group[piece.group].size(piece)

    def places(self, piece: Piece) -> slice:
        """The piece's layers among those of its extent."""
        first = self.by_group[piece.group].layer
        return slice(piece.layer - first, piece.layer_stop - first)

    def parts(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, int, int]]:
        """What of these pieces of one chunk lies in the extents: the parts, and their bytes [start, stop)."""
        offset = 0
        for piece in pieces:
            extent = self.by_group[piece.group]
            for begin, part in extent.within(piece):
                yield part, offset + begin, offset + begin + extent.size(part)
            offset += extent.size(piece)

    def check(self, pieces: Iterable[Piece]) -> int:
        """Bytes of `pieces`. Raises RemoteProtocolError for one that does not lie in these extents."""
        total = 0
        for piece in pieces:
            extent = self.by_group.get(piece.group)
            if extent is None or not extent.contains(piece):
                raise RemoteProtocolError(f"{piece} does not lie in what was asked for, {self}")
            total += extent.size(piece)
        return total

    def readable(self, computed: Computed, pieces: Iterable[Piece]) -> bool:
        """Whether all of these pieces, which lie in the extents, have been computed."""
        for piece in pieces:
            layers = computed[piece.group][self.places(piece)]
            if self.by_group[piece.group].sendable(min(layers)) < piece.stop:
                return False
        return True

    def __str__(self) -> str:
        return " and ".join(map(str, self.by_group.values()))


class Cutter:
    """P's side: which rows of its extents have been announced, and the next chunk to announce."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        self.left = extents.nbytes
        self._announced = {group: [each.start] * each.layers for group, each in extents.by_group.items()}
        self._again: list[Piece] = []

    def chunks(self, computed: Computed, limit: int, flush: bool, most: int) -> Iterator[Cut]:
        """The bytes and pieces of at most so many chunks of `limit` bytes, and with `flush` of the rest."""
        if not self.left:
            return
        ready = deque(self._pending(computed))
        left = sum(map(self.extents.size, ready))
        while left and most and (flush or left >= limit):
            nbytes, pieces = self._cut(ready, limit)
            yield nbytes, pieces
            left, most = left - nbytes, most - 1

    def whole(self, tokens: int, limit: int, most: int) -> Iterator[Cut]:
        """`chunks` of a prompt of which all tokens, so many, are computed."""
        computed = {group: (tokens,) * each.layers for group, each in self.extents.by_group.items()}
        return self.chunks(computed, limit, flush=True, most=most)

    def take(self, pieces: tuple[Piece, ...], limit: int) -> int:
        """D has cut these from the front of what was never announced, at most `limit` bytes (one row at the
        least); bytes of them. Raises RemoteProtocolError for others."""
        total = self.extents.check(pieces)
        if total > max(limit, self.extents.by_group[pieces[0].group].row):
            raise RemoteProtocolError(f"a chunk of {total} bytes was cut where {limit} are allowed")
        for piece in pieces:
            announced, layers = self._announced[piece.group], self.extents.places(piece)
            if announced[layers].count(piece.start) < piece.layer_stop - piece.layer:
                raise RemoteProtocolError(f"{piece} does not follow what was announced before")
            announced[layers] = [piece.stop] * (piece.layer_stop - piece.layer)
        self.left -= total
        return total

    def _cut(self, ready: deque[Piece], limit: int) -> Cut:
        """A chunk of up to `limit` bytes (one row at the least) from the front of these pieces. Those whose
        rows are aligned best come first, so that a GPU may read and write each as widely as it can."""
        taken: list[Piece] = []
        room = limit
        while ready and len(taken) < MAX_PIECES:
            piece = ready[0]
            part = self._fit(piece, room, first=not taken)
            if part is None:
                break
            ready.popleft()
            self._take(piece, part)
            taken.append(part)
            room -= self.extents.size(part)
            if part != piece:
                ready.extendleft(reversed([*_rest(piece, part)]))
                break
        self.left -= limit - room
        return limit - room, tuple(sorted(taken, key=self._alignment, reverse=True))

    def _alignment(self, piece: Piece) -> int:
        """The largest power of two that divides a row, up to a GPU's widest access."""
        return gcd(self.extents.by_group[piece.group].row, WIDEST)

    def put_back(self, pieces: tuple[Piece, ...]) -> None:
        """Filler went out in place of these pieces: announce them again when they are ready again."""
        self._again.extend(pieces)
        self.left += sum(map(self.extents.size, pieces))

    def _pending(self, computed: Computed) -> Iterator[Piece]:
        for piece in self._again:
            if self.extents.readable(computed, (piece,)):
                yield piece
        for group, extent in self.extents.by_group.items():
            yield from self._runs(extent, computed[group])

    def _runs(self, extent: Extent, computed: Sequence[int]) -> Iterator[Piece]:
        """What of an extent is ready and was never announced; equal neighbours are one piece."""
        stops = {tokens: extent.sendable(tokens) for tokens in set(computed)}
        layer, announced = extent.layer, self._announced[extent.group]
        if len(stops) == 1 and announced.count(announced[0]) == len(announced):
            if (stop := stops[computed[0]]) > announced[0]:
                yield Piece(extent.group, layer, extent.layer_stop, announced[0], stop)
            return
        spans = zip(announced, map(stops.__getitem__, computed), strict=True)
        for (start, stop), alike in groupby(spans):
            first, layer = layer, layer + len(list(alike))
            if stop > start:
                yield Piece(extent.group, first, layer, start, stop)

    def _fit(self, piece: Piece, room: int, first: bool) -> Piece | None:
        """The largest part of `piece` that fits: whole layers, or else some units of one layer."""
        group, extent = piece.group, self.extents.by_group[piece.group]
        units = (piece.stop - piece.start) // extent.unit
        layers = min(piece.layer_stop - piece.layer, max(0, room) // (units * extent.row))
        if layers:
            return Piece(group, piece.layer, piece.layer + layers, piece.start, piece.stop)
        if not first:
            return None
        some = max(1, room // extent.row)
        return Piece(group, piece.layer, piece.layer + 1, piece.start, piece.start + some * extent.unit)

    def _take(self, piece: Piece, part: Piece) -> None:
        if piece in self._again:
            self._again.remove(piece)
            self._again.extend(_rest(piece, part))
            return
        layers = part.layer_stop - part.layer
        self._announced[part.group][self.extents.places(part)] = [part.stop] * layers


def _rest(piece: Piece, part: Piece) -> Iterator[Piece]:
    """What is left of `piece` without `part`, which starts at its corner."""
    if part.stop < piece.stop:
        yield Piece(part.group, part.layer, part.layer_stop, part.stop, piece.stop)
    if part.layer_stop < piece.layer_stop:
        yield Piece(part.group, part.layer_stop, piece.layer_stop, piece.start, piece.stop)


class Coverage:
    """D's side: which rows of its extents have been announced, and how many bytes are still to come."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        self.left = extents.nbytes
        self._taken = {group: [0] * each.layers for group, each in extents.by_group.items()}
        """By group, for each layer, a bit for each unit: so a peer cannot make it grow."""

    def reserve(self, pieces: tuple[Piece, ...]) -> int:
        """Note announced pieces; bytes of them. Raises RemoteProtocolError for foreign or repeated rows."""
        total = self.extents.check(pieces)
        for done, piece in enumerate(pieces):
            taken, rows, layers = self._taken[piece.group], self._rows(piece), self.extents.places(piece)
            if any(map(rows.__and__, taken[layers])):
                self.give_back(pieces[:done])
                raise RemoteProtocolError(f"{piece} was announced twice")
            taken[layers] = map(rows.__or__, taken[layers])
        return total

    def give_back(self, pieces: tuple[Piece, ...]) -> None:
        """Filler came in place of these pieces: they may be announced again."""
        for piece in pieces:
            taken, rows, layers = self._taken[piece.group], self._rows(piece), self.extents.places(piece)
            assert all(each & rows == rows for each in taken[layers])
            taken[layers] = map(rows.__xor__, taken[layers])

    def filled(self, nbytes: int) -> None:
        self.left -= nbytes
        assert self.left >= 0

    def _rows(self, piece: Piece) -> int:
        extent = self.extents.by_group[piece.group]
        first = (piece.start - extent.start) // extent.unit
        count = (piece.stop - piece.start) // extent.unit
        return ((1 << count) - 1) << first
