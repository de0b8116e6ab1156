"""Copies between layers in CPU memory and a dense buffer, as arrays with strides.

Large rows on a regular grid are listed, and one call of numpy's copies them. All else is not listed: blocks
that follow each other are one copy, of all layers, and numpy moves what lies together on both sides at nearly
the speed of a plain copy, however the rest is spaced or padded.

Why numpy: this runs in a thread beside vLLM's forward. numpy copies in the calling thread and lets go of the
GIL meanwhile, whereas torch would start a second OpenMP team on cores that the forward owns, and the number
of its threads cannot be set for one thread alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from p2pkv.kv.checksum import XXH3, Checksum, digest_on_host
from p2pkv.kv.layouts import (
    Bounds,
    Columns,
    Cut,
    Index,
    LayerPages,
    Rows,
    Span,
    grid_of,
    locate,
    spans_of,
    split_at_pages,
)
from p2pkv.kv.uploads import Recent

LARGE_BYTES = 8192
"""Bytes of a row on a grid from which on listing them is faster."""

WORTH_BYTES = 4096
"""Bytes that a copy of its own should have, on average; smaller ones are made together, through a buffer."""

BATCH_BYTES = 256 << 10
"""What is copied together through a buffer, so that it stays in a core's cache."""

Selection = slice | Index

Part = tuple[NDArray[np.uint8], Selection, NDArray[np.uint8]]
"""The layers, [layer, kernel block, ..., byte], which blocks of them, and their part of the buffer. Between
are units, and heads, where they do not lie together."""

BlockRun = tuple[int, int, int]
"""Entries [start, stop) of a block table whose blocks follow each other, and the first of these blocks."""


@dataclass(frozen=True, eq=False)
class KernelBlocks:
    """The kernel blocks of a block table, the runs among them, and the largest."""

    ids: Index
    runs: Sequence[BlockRun]
    last: int

    @classmethod
    def of(cls, table: Index, ratio: int) -> Self:
        if ratio > 1:
            table = (table[:, None] * ratio + np.arange(ratio)).reshape(-1)
        starts = [0, *((table[1:] - table[:-1] != 1).nonzero()[0] + 1).tolist()]
        runs = list(zip(starts, [*starts[1:], len(table)], table[starts].tolist(), strict=True))
        return cls(table, runs, max(first + stop - start for start, stop, first in runs) - 1)

    def selected(self, some: Bounds, nbytes: int) -> list[tuple[slice, Selection]]:
        """Blocks [start, stop) of the table that are copied together: their places among these, and which
        they are. `nbytes`: of one."""
        start, stop = some
        runs = self.runs
        if stop - start < len(self.ids):
            clipped = ((max(a, start), min(b, stop), first + max(a, start) - a) for a, b, first in runs)
            runs = [run for run in clipped if run[0] < run[1]]
        if nbytes * (stop - start) >= WORTH_BYTES * len(runs):
            return [(slice(a - start, b - start), slice(first, first + b - a)) for a, b, first in runs]
        step = max(1, BATCH_BYTES // nbytes)
        cuts = [(a, min(a + step, stop)) for a in range(start, stop, step)]
        return [(slice(a - start, b - start), self.ids[a:b]) for a, b in cuts]


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
        self.spans: Sequence[Span] = spans_of(pages)
        self._recent = Recent[Rows]()

    def rows(self, span: Span, cut: Cut) -> Rows:
        """`locate`."""
        if len(self.spans) == 1:
            return locate(span, cut)
        steps = span.steps[cut.layers[0] - span.first : cut.layers[1] - span.first]
        lies = replace(span.pages, storage=0), span.grain, steps.tobytes()
        kind = *lies, cut.units, cut.heads, cut.row_bytes
        return self._recent.of(cut.table, partial(locate, span, cut), kind)


class HostCopier(RowLists):
    """Moves rows of layers in CPU memory. The copies have ended when the calls return."""

    digest_name = XXH3

    def __init__(self, pages: Sequence[LayerPages], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(pages)
        each = zip(pages, tensors, strict=True)
        self._flat: dict[int, NDArray[Any]] = {page.storage: flat_bytes(one).numpy() for page, one in each}
        self._blocks = Recent[KernelBlocks]()

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        """Copy the cut, which is not empty, to `out`: uint8, contiguous, same device, exactly as large."""
        dense = out.numpy()
        if _listed(span, cut):
            rows = self.rows(span, cut)
            # "raise" would copy through a buffer; the index comes from checked block ids.
            memory = grid(self._flat[span.pages.storage], rows)
            np.take(memory, rows.index, 0, dense.reshape(-1, rows.atom), mode="clip")
            return
        for layers, chosen, part in self._parts(span, cut, dense):
            part[...] = layers[:, chosen]

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        """Copy `src` (as `out` in take) to the cut."""
        dense = src.numpy()
        if _listed(span, cut):
            rows = self.rows(span, cut)
            grid(self._flat[span.pages.storage], rows)[rows.index] = dense.reshape(-1, rows.atom)
            return
        for layers, chosen, part in self._parts(span, cut, dense):
            layers[:, chosen] = part

    def digest(self, buffer: torch.Tensor) -> Checksum:
        """The checksum, `digest_name`, of what `out` holds behind a take, or `src` before a put."""
        return digest_on_host(buffer)

    def warm_up(self) -> None:
        """Prepare now what the first copy would otherwise wait for. Nothing: numpy is ready."""

    def _parts(self, span: Span, cut: Cut, dense: NDArray[np.uint8]) -> list[Part]:
        pages, row, heads = span.pages, cut.row_bytes, cut.heads[1] - cut.heads[0]
        blocks = self._blocks.of(cut.table, partial(KernelBlocks.of, cut.table, pages.ratio), pages.ratio)
        units, unit_bytes = cut.units[1] - cut.units[0], heads * row
        first, stop = cut.layers[0] - span.first, cut.layers[1] - span.first
        # Layers that are not equally far from each other are copied each alone.
        many, apart = (1, 0) if span.apart is None else (stop - first, span.apart)
        begin, within = cut.units[0] % pages.block_units, pages.units
        parts: list[Part] = []
        for unit, last in split_at_pages((begin, begin + units), within):
            index, inside = divmod(unit, within)
            count = -(-last // within) - index
            each = (last - unit) // count
            inner, here, there = _inner(pages, each, heads, row)
            selected = blocks.selected((index, index + count), many * each * unit_bytes)
            lies = pages.offset + inside * pages.unit_stride + cut.heads[0] * pages.head_stride
            for layer in range(first, stop, many):
                offset = lies + int(span.steps[layer])
                shape, strides = (many, blocks.last + 1, *inner), (apart, pages.block_stride, *here)
                layers = np.ndarray(shape, np.uint8, self._flat[pages.storage], offset, strides)
                offset = ((layer - first) * units + unit - begin) * unit_bytes
                shape, strides = (many, count, *inner), (units * unit_bytes, each * unit_bytes, *there)
                wire = np.ndarray(shape, np.uint8, dense, offset, strides)
                parts += [(layers, chosen, wire[:, places]) for places, chosen in selected]
        return parts


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
    return coarsest >= LARGE_BYTES and grid_of(span, cut).atom >= LARGE_BYTES


def columns_on_host(
    flat: torch.Tensor, columns: Columns, dense: torch.Tensor
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The elements in a storage and in `dense`, [column, element], as bits; numpy does not mind where they
    begin."""
    bits, shape, strides = (
        f"u{columns.element}",
        (columns.count, columns.elements),
        (columns.element, columns.step),
    )
    memory = np.ndarray(shape, bits, flat.numpy(), columns.offset, strides)
    return memory, dense.numpy().view(bits).reshape(shape)
