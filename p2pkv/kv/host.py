"""Copies between layers in CPU memory and a dense buffer, as arrays with strides.

Large rows on a regular grid are listed, and one call of numpy's copies them. All else is not listed: blocks
that follow each other are one copy, of all layers, and numpy moves what lies together on both sides at nearly
the speed of a plain copy, however the rest is spaced or padded.

Why numpy: this runs in a thread beside vLLM's forward. numpy copies in the calling thread and lets go of the
GIL meanwhile, whereas torch would start a second OpenMP team on cores that the forward owns, and the number
of its threads cannot be set for one thread alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from p2pkv.kv import layouts
from p2pkv.kv.checksum import XXH3, digest_on_host
from p2pkv.kv.layouts import Bounds, Columns, Cut, Index, LayerPages, Rows, Span
from p2pkv.kv.small_copies import Recent

LARGE_BYTES = 8192
"""Bytes of a row on a grid from which on listing them is faster."""

WORTH_BYTES = 4096
"""Bytes of a gather of its own, on average; smaller ones are made together, through a buffer."""

WORTH_PUTTING = 64 << 10
"""As WORTH_BYTES, of a scatter, which needs no buffer to be made together."""

LONG_BYTES, MANY_BLOCKS = 4096, 16
"""Bytes of a block's rows, and blocks, from which on a scatter reads straight on, layer by layer."""

BATCH_BYTES = 256 << 10
"""What is copied together through a buffer, so that it stays in a core's cache."""

Selection = int | slice | Index

Part = tuple[NDArray[np.uint8], NDArray[np.uint8], Sequence[tuple[Selection, Selection]]]
"""The layers, [kernel block, layer, ..., byte], a part of the buffer in the same order, and which blocks are
copied together: their places in the buffer, and where they lie. Between are units and heads, if apart."""


@dataclass(frozen=True, eq=False)
class KernelBlocks:
    """The kernel blocks of a block table, the largest, and what `runs` has found among them."""

    ids: Index
    last: int
    known: dict[Bounds, list[tuple[Selection, Selection]]]

    @classmethod
    def of(cls, table: Index, ratio: int, apart: int) -> Self:
        if ratio > 1:
            table = (table[:, None] * apart + np.arange(ratio)).reshape(-1)
        return cls(table, int(table.max()), {})

    def runs(self, some: Bounds) -> list[tuple[Selection, Selection]]:
        """Blocks [start, stop) of the table, those together that follow each other: their places among these,
        and which they are. One alone is a number, as numpy is quicker with that than with a slice."""
        if (found := self.known.get(some)) is None:
            ids = self.ids[slice(*some)]
            starts = [0, *((ids[1:] - ids[:-1] != 1).nonzero()[0] + 1).tolist()]
            runs = zip(starts, [*starts[1:], len(ids)], ids[starts].tolist(), strict=True)
            found = [(a, at) if b - a == 1 else (slice(a, b), slice(at, at + b - a)) for a, b, at in runs]
            self.known[some] = found
        return found

    def selected(self, some: Bounds, nbytes: int, worth: int) -> list[tuple[Selection, Selection]]:
        """The same, or more of them together where a run has less than `worth`. `nbytes`: of one block."""
        count, runs = some[1] - some[0], self.runs(some)
        if nbytes * count >= worth * (len(runs) - 1):
            return runs
        ids, step = self.ids[slice(*some)], max(1, BATCH_BYTES // nbytes)
        return [(slice(a, a + step), ids[a : a + step]) for a in range(0, count, step)]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that `tensor` is a view of, uint8. Keeps it alive."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def grid(flat: Any, rows: Rows) -> Any:
    """A storage, of numpy or torch, as [row, byte]; rows lie side by side."""
    count = (len(flat) - rows.base) // rows.atom
    return flat[rows.base : rows.base + count * rows.atom].reshape(count, rows.atom)


class RowLists:
    """Lists the rows of a cut, once for parts that lie alike, as layers in separate storages mostly do."""

    def __init__(self, pages: Sequence[LayerPages]) -> None:
        self.spans: Sequence[Span] = layouts.spans_of(pages)
        self._recent = Recent[Rows]()

    def rows(self, span: Span, cut: Cut) -> Rows:
        if len(self.spans) == 1:
            return layouts.locate(span, cut)
        steps = span.steps[cut.layers[0] - span.first : cut.layers[1] - span.first]
        lies = replace(span.pages, storage=0), span.grain, steps.tobytes()
        kind = *lies, cut.units, cut.heads, cut.row_bytes
        return self._recent.of(cut.table, partial(layouts.locate, span, cut), kind)

    def prepare(self, span: Span, cut: Cut) -> None:
        """Do now what a copy of this cut would otherwise have to do: here nothing can be done before."""


class HostCopier(RowLists):
    """Moves rows of layers in CPU memory. The copies have ended when the calls return."""

    digest_name = XXH3
    digest = staticmethod(digest_on_host)
    """The checksum, `digest_name`, of what `out` holds behind a take, or `src` before a put."""
    _blocks = Recent[KernelBlocks]()
    """Of all copiers, since KV groups share block tables; bounded, and safe in threads."""

    def __init__(self, pages: Sequence[LayerPages], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(pages)
        each = zip(pages, tensors, strict=True)
        self._flat: dict[int, NDArray[Any]] = {page.storage: flat_bytes(one).numpy() for page, one in each}

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        """Copy the cut, which is not empty, to `out`: uint8, contiguous, same device, exactly as large."""
        dense = out.numpy()
        if _listed(span, cut):
            rows = self.rows(span, cut)
            # "raise" would copy through a buffer; the index comes from checked block ids.
            memory = grid(self._flat[span.pages.storage], rows)
            np.take(memory, rows.index, 0, dense.reshape(-1, rows.atom), mode="clip")
            return
        for layers, wire, selected in self._parts(span, cut, dense):
            for places, chosen in selected:
                wire[places] = layers[chosen]

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        """Copy `src` (as `out` in take) to the cut."""
        dense = src.numpy()
        if _listed(span, cut):
            rows = self.rows(span, cut)
            grid(self._flat[span.pages.storage], rows)[rows.index] = dense.reshape(-1, rows.atom)
            return
        for layers, wire, selected in self._parts(span, cut, dense, scatters=True):
            for places, chosen in selected:
                layers[chosen] = wire[places]

    def warm_up(self) -> None:
        """Prepare now what the first copy would otherwise wait for. Nothing: numpy is ready."""

    def _parts(
        self, span: Span, cut: Cut, dense: NDArray[np.uint8], scatters: bool = False
    ) -> Iterator[Part]:
        pages, row, heads = span.pages, cut.row_bytes, cut.heads[1] - cut.heads[0]
        form = pages.ratio, pages.apart
        blocks = self._blocks.of(cut.table, partial(KernelBlocks.of, cut.table, *form), form)
        units, unit_bytes = cut.units[1] - cut.units[0], heads * row
        first, stop = cut.layers[0] - span.first, cut.layers[1] - span.first
        begin, within = cut.units[0] % pages.block_units, pages.units
        for unit, last in layouts.split_at_pages((begin, begin + units), within):
            index, inside = divmod(unit, within)
            count = -(-last // within) - index
            each = (last - unit) // count
            inner, here, there = _inner(pages, each, heads, row)
            # Layers that are not equally far from each other are copied each alone.
            long = scatters and count >= MANY_BLOCKS and each * unit_bytes >= LONG_BYTES
            alone = long or span.apart is None
            many, worth = 1 if alone else stop - first, WORTH_PUTTING if scatters else WORTH_BYTES
            selected = blocks.selected((index, index + count), many * each * unit_bytes, worth)
            lies = pages.offset + inside * pages.unit_stride + cut.heads[0] * pages.head_stride
            for layer in range(first, stop, many):
                offset = lies + int(span.steps[layer])
                shape, strides = (blocks.last + 1, many, *inner), (pages.block_stride, span.apart or 0, *here)
                layers = np.ndarray(shape, np.uint8, self._flat[pages.storage], offset, strides)
                offset = ((layer - first) * units + unit - begin) * unit_bytes
                shape, strides = (count, many, *inner), (each * unit_bytes, units * unit_bytes, *there)
                yield layers, np.ndarray(shape, np.uint8, dense, offset, strides), selected


def _inner(
    pages: LayerPages, units: int, heads: int, row: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Some units of a kernel block: [..., byte], as few dimensions as lie apart; strides there and dense."""
    if heads > 1 and pages.head_stride != row:
        return (units, heads, row), (pages.unit_stride, pages.head_stride, 1), (heads * row, row, 1)
    if units > 1 and pages.unit_stride != heads * row:
        return (units, heads * row), (pages.unit_stride, 1), (heads * row, 1)
    return (units * heads * row,), (1,), (1,)


def _listed(span: Span, cut: Cut) -> bool:
    coarsest = gcd(span.pages.block_stride, span.grain)
    return coarsest >= LARGE_BYTES and layouts.grid_of(span, cut).atom >= LARGE_BYTES


def columns_on_host(
    flat: torch.Tensor, columns: Columns, dense: torch.Tensor
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The elements in a storage and in `dense`, [column, element], as bits, which numpy takes anywhere."""
    bits, shape = f"u{columns.element}", (columns.count, columns.elements)
    strides = columns.element, columns.step
    memory = np.ndarray(shape, bits, flat.numpy(), columns.offset, strides)
    return memory, dense.numpy().view(bits).reshape(shape)
