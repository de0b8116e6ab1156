"""Cutting on P and counting on D: together an exact cover of the extent, whatever the order of things."""

from collections import Counter
from collections.abc import Iterable
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.kv.copiers import WIDTHS
from p2pkv.protocol.extents import WIDEST, Coverage, Cutter, Extent, Extents
from p2pkv.protocol.messages import MAX_PIECES, Piece
from p2pkv.protocol.state_machine import RemoteProtocolError
from support.kv.shapes import cut

Row = tuple[int, int, int]
"""A (group, layer, first token) of the wire."""


@st.composite
def extents(draw: st.DrawFn, group: int = 0, once: bool | None = False) -> Extent:
    """Up to 6 layers x 20 units; `stop` may lie inside a unit. `once`: one row per request; None: or not."""
    layer = draw(st.integers(0, 9))
    layers, row = (layer, layer + draw(st.integers(1, 6))), draw(st.integers(1, 7))
    if draw(st.booleans()) if once is None else once:
        return Extent(group, *layers, 0, 1, 1, row, ready=draw(st.integers(1, 40)))
    unit = draw(st.sampled_from([1, 2, 5]))
    start = draw(st.integers(0, 9)) * unit
    return Extent(group, *layers, start, start + draw(st.integers(1, 20 * unit)), unit, row)


@st.composite
def several_extents(draw: st.DrawFn) -> Extents:
    """Of one to three KV groups, not always the first ones."""
    groups = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
    return Extents({group: draw(extents(group, once=None)) for group in groups})


def rows_of(extent: Extent, piece: Piece) -> list[Row]:
    tokens = range(piece.start, piece.stop, extent.unit)
    return [(piece.group, layer, token) for layer in range(piece.layer, piece.layer_stop) for token in tokens]


def all_rows(extent: Extent) -> set[Row]:
    whole = Piece(extent.group, extent.layer, extent.layer_stop, extent.start, extent.ceiling)
    return set(rows_of(extent, whole))


class Pair:
    """A Cutter, a Coverage, and beside them the plain truth: how often each row is announced now."""

    def __init__(self, extents: Extents) -> None:
        self.extents = extents
        self.cutter, self.coverage = Cutter(extents), Coverage(extents)
        self.computed = self.all_at(0)
        self.announced: Counter[Row] = Counter()
        self.under_way: list[tuple[Piece, ...]] = []

    def all_at(self, tokens: int) -> dict[int, list[int]]:
        each = self.extents.by_group.items()
        return {group: [tokens] * (extent.layer_stop - extent.layer) for group, extent in each}

    def ready(self) -> set[Row]:
        """By hand: a unit when its wanted tokens are computed, a row per request when all before it are."""
        found = set()
        for group, extent in self.extents.by_group.items():
            for row in all_rows(extent):
                _, layer, token = row
                needed = extent.ready or min(token + extent.unit, extent.stop)
                if self.computed[group][layer - extent.layer] >= needed:
                    found.add(row)
        return found

    def nbytes(self, rows: Iterable[Row]) -> int:
        return sum(self.extents.by_group[group].row for group, _, _ in rows)

    def rows(self, pieces: Iterable[Piece]) -> list[Row]:
        return [row for piece in pieces for row in rows_of(self.extents.by_group[piece.group], piece)]

    def cut(self, limit: int) -> tuple[Piece, ...]:
        free = {row for row in self.ready() if not self.announced[row]}
        pending = sum(map(self.cutter.extents.size, self.cutter._pending(self.computed)))
        assert pending == self.nbytes(free)
        pieces = cut(self.cutter, self.computed, limit)
        rows = self.rows(pieces)
        assert set(rows) <= free and len(set(rows)) == len(rows)
        assert bool(rows) == bool(free)
        nbytes = self.nbytes(rows)
        assert nbytes == sum(map(self.extents.size, pieces)) and (nbytes <= limit or len(rows) == 1)
        if pieces:
            assert self.coverage.reserve(pieces) == nbytes
            self.announced.update(rows)
            self.under_way.append(pieces)
        assert self.cutter.left == self.extents.nbytes - self.nbytes(+self.announced)
        return pieces

    def every(self) -> set[Row]:
        return set().union(*map(all_rows, self.extents.by_group.values()))

    def arrive(self, which: int, filler: bool) -> None:
        pieces = self.under_way.pop(which % len(self.under_way))
        if not filler:
            self.coverage.filled(sum(map(self.extents.size, pieces)))
            return
        self.cutter.put_back(pieces)
        self.coverage.give_back(pieces)
        self.announced.subtract(self.rows(pieces))

    def finish(self, limit: int) -> None:
        self.computed = self.all_at(1000)
        while self.cut(limit):
            pass
        while self.under_way:
            self.arrive(0, filler=False)


@given(several_extents(), st.data())
@settings(deadline=None, max_examples=200)
def test_every_row_is_announced_once_and_voided_ones_again(extents: Extents, data: st.DataObject) -> None:
    pair = Pair(extents)
    for _ in range(data.draw(st.integers(0, 12), label="steps")):
        step = data.draw(st.sampled_from(["compute", "cut", "arrive", "filler", "revoke"]))
        if step == "compute":
            group = data.draw(st.sampled_from(sorted(pair.computed)))
            computed = pair.computed[group]
            layer = data.draw(st.integers(0, len(computed) - 1))
            more = data.draw(st.integers(0, max(extents.by_group[group].ceiling, 40) + 3))
            computed[layer] = max(computed[layer], more)
        elif step == "cut":
            pair.cut(data.draw(st.integers(1, 60), label="limit"))
        elif step == "revoke":
            pair.computed = pair.all_at(0)
            while pair.under_way:
                pair.arrive(0, filler=True)
        elif pair.under_way:
            pair.arrive(data.draw(st.integers(0, 99)), filler=step == "filler")
    pair.finish(data.draw(st.integers(1, 60), label="last limit"))
    assert set(pair.announced.values()) == {1} and set(pair.announced) == pair.every()
    assert pair.cutter.left == pair.coverage.left == 0


@given(extents(), st.data())
@settings(deadline=None, max_examples=100)
def test_a_piece_outside_the_window_is_refused(extent: Extent, data: st.DataObject) -> None:
    low, high = max(0, extent.start - extent.unit), extent.ceiling + extent.unit
    layer = data.draw(st.integers(max(0, extent.layer - 1), extent.layer_stop))
    start = data.draw(st.integers(low, high))
    layer_stop, stop = (
        data.draw(st.integers(layer, extent.layer_stop + 1)),
        data.draw(st.integers(start, high)),
    )
    piece = Piece(0, layer, layer_stop, start, stop)
    rows = {
        (0, layer, token)
        for layer in range(piece.layer, piece.layer_stop)
        for token in range(piece.start, piece.stop)
    }
    cells = {
        (0, layer, token)
        for layer in range(extent.layer, extent.layer_stop)
        for token in range(extent.start, extent.ceiling)
    }
    whole = piece.start % extent.unit == 0 and piece.stop % extent.unit == 0
    coverage = Coverage(Extents({0: extent}))
    if rows and rows <= cells and whole:
        assert coverage.reserve((piece,)) == len(rows) // extent.unit * extent.row
    else:
        with pytest.raises(RemoteProtocolError, match="does not lie in what was asked for"):
            coverage.reserve((piece,))
    assert coverage.left == extent.nbytes


@given(extents(), st.data())
@settings(deadline=None, max_examples=100)
def test_overlapping_pieces_are_refused_and_leave_nothing_behind(extent: Extent, data: st.DataObject) -> None:
    def piece() -> Piece:
        layer = data.draw(st.integers(extent.layer, extent.layer_stop - 1))
        unit = data.draw(st.integers(0, (extent.ceiling - extent.start) // extent.unit - 1))
        start = extent.start + unit * extent.unit
        stop = data.draw(st.integers(unit + 1, (extent.ceiling - extent.start) // extent.unit))
        layer_stop = data.draw(st.integers(layer + 1, extent.layer_stop))
        return Piece(0, layer, layer_stop, start, extent.start + stop * extent.unit)

    first, other = piece(), piece()
    coverage = Coverage(Extents({0: extent}))
    if set(rows_of(extent, first)) & set(rows_of(extent, other)):
        with pytest.raises(RemoteProtocolError, match="announced twice"):
            coverage.reserve((first, other))
        coverage.reserve((first,))
        with pytest.raises(RemoteProtocolError, match="announced twice"):
            coverage.reserve((other,))
        coverage.give_back((first,))
    coverage.reserve((other,))


def test_a_piece_of_another_group_is_refused() -> None:
    coverage = Coverage(Extents({1: Extent(1, 0, 2, 0, 8, 1, 1)}))
    with pytest.raises(RemoteProtocolError, match="does not lie in what was asked for"):
        coverage.reserve((Piece(0, 0, 2, 0, 8),))
    assert coverage.reserve((Piece(1, 0, 2, 0, 8),)) == 16


def test_whole_layers_share_a_chunk_and_a_limit_below_a_row_still_moves() -> None:
    cutter = Cutter(Extents({0: Extent(0, 2, 6, 0, 4, 1, 10)}))
    ready = {0: [4, 4, 4, 2]}
    assert cut(cutter, ready, 100) == (Piece(0, 2, 4, 0, 4),)
    assert cut(cutter, ready, 25) == (Piece(0, 4, 5, 0, 2),)
    assert cut(cutter, ready, 1) == (Piece(0, 4, 5, 2, 3),)
    assert cut(cutter, ready, 30) == (Piece(0, 4, 5, 3, 4), Piece(0, 5, 6, 0, 2))
    assert cut(cutter, ready, 1000) == ()
    assert cut(cutter, {0: [4, 4, 4, 4]}, 1000) == (Piece(0, 5, 6, 2, 4),)
    assert cutter.left == 0


def test_one_look_at_what_is_computed_fills_all_chunks_as_one_for_each_would() -> None:
    extents = Extents({0: Extent(0, 0, 5, 0, 9, 1, 3), 1: Extent(1, 0, 2, 0, 8, 4, 5)})
    ready, other = {0: [9, 9, 4, 4, 0], 1: [7, 8]}, Cutter(extents)
    chunks = [pieces for _, pieces in Cutter(extents).chunks(ready, 20, True, 99)]
    assert chunks == [cut(other, ready, 20) for _ in chunks] and not cut(other, ready, 20)


def test_a_chunk_never_has_more_pieces_than_a_message_takes() -> None:
    layers = 2 * MAX_PIECES + 1
    cutter = Cutter(Extents({0: Extent(0, 0, layers, 0, 2, 1, 1)}))
    ready = {0: [1 + layer % 2 for layer in range(layers)]}
    first = cut(cutter, ready, 1 << 20)
    assert len(first) == MAX_PIECES and len(cut(cutter, ready, 1 << 20)) == MAX_PIECES
    assert cut(cutter, ready, 1 << 20) == (Piece(0, layers - 1, layers, 0, 1),)


def test_pieces_begin_where_their_rows_can_be_moved_by_the_widest_accesses() -> None:
    """Of scales of 4 and 8 bytes and an odd number of rows, in front of what has wider ones."""
    assert WIDTHS[0] == WIDEST
    rows = {0: 4, 1: 576, 2: 8, 3: 128, 4: 2, 5: 1, 6: 24}
    owed = Extents({group: Extent(group, 0, 3, 0, 511, 1, row) for group, row in rows.items()})
    (pieces,) = (pieces for _, pieces in Cutter(owed).chunks({g: [511] * 3 for g in rows}, 1 << 24, True, 9))
    assert [piece.group for piece in pieces] == [1, 3, 2, 6, 0, 4, 5]
    for piece, start, _ in owed.parts(pieces):
        assert start % gcd(rows[piece.group], WIDEST) == 0
