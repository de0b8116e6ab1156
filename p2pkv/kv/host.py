"""Copies between layers in CPU memory and a dense buffer, as arrays with strides.

Large rows on a regular grid, and small copies, are listed, and one call of numpy's copies them. All else is
not listed: blocks that follow each other are one copy, of all layers, and numpy moves what lies together on
both sides at nearly the speed of a plain copy, however the rest is spaced or padded.

Why numpy: this runs in a thread beside vLLM's forward. numpy copies in the calling thread and lets go of the
GIL meanwhile, whereas torch would start a second OpenMP team on cores that the forward owns, and the number
of its threads cannot be set for one thread alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

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

SMALL_BYTES = 16 << 10
"""A copy up to this size is listed whatever its rows are: strides take tens of microseconds to begin."""

WORTH_BYTES = 4096
"""Bytes that a copy of its own should have, on average; smaller ones are made together, through a buffer."""

BATCH_BYTES = 256 << 10
"""What is copied together through a buffer, so that it stays in a core's cache."""

Selection = slice | Index

Part = tuple[NDArray[np.uint8], Selection, NDArray[np.uint8]]
"""The layers, [layer, kernel block, unit, head, byte], which blocks of them, and their part of the buffer."""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of the storage that `tensor` is a view of, uint8. Keeps it alive."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


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
    """Moves rows of layers in CPU memory. The copies have ended when the calls return.

    Attributes:
        flat: the bytes of each storage that layers lie in, by address.
    """

    digest_name = XXH3

    def __init__(self, pages: Sequence[LayerPages], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(pages)
        each = zip(pages, tensors, strict=True)
        self.flat: dict[int, NDArray[Any]] = {page.storage: flat_bytes(one).numpy() for page, one in each}

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        """Copy the cut, which is not empty, to `out`: uint8, contiguous, exactly as large."""
        if self._listed(span, cut, out):
            rows = self.rows(span, cut)
            # "raise" would copy through a buffer; the index comes from checked block ids.
            np.take(self._grid(span, rows), rows.index, 0, out.numpy().reshape(-1, rows.atom), mode="clip")
            return
        for layers, blocks, dense in self._parts(span, cut, out):
            dense[...] = layers[:, blocks]

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        """Copy `src` (as `out` in take) to the cut."""
        if self._listed(span, cut, src):
            rows = self.rows(span, cut)
            self._grid(span, rows)[rows.index] = src.numpy().reshape(-1, rows.atom)
            return
        for layers, blocks, dense in self._parts(span, cut, src):
            layers[:, blocks] = dense

    def _listed(self, span: Span, cut: Cut, buffer: torch.Tensor) -> bool:
        return buffer.numel() <= SMALL_BYTES or grid_of(span, cut).atom >= LARGE_BYTES

    def digest(self, buffer: torch.Tensor) -> Checksum:
        """The checksum of what `out` holds behind a take, or `src` before a put."""
        return digest_on_host(buffer)

    def warm_up(self) -> None:
        """Nothing: numpy is ready."""

    def _grid(self, span: Span, rows: Rows) -> NDArray[Any]:
        """[row, byte]; rows lie side by side."""
        flat = self.flat[span.pages.storage]
        count = (flat.size - rows.base) // rows.atom
        return flat[rows.base : rows.base + count * rows.atom].reshape(count, rows.atom)

    def _parts(self, span: Span, cut: Cut, buffer: torch.Tensor) -> Iterator[Part]:
        units, heads = cut.units[1] - cut.units[0], cut.heads[1] - cut.heads[0]
        wire = buffer.numpy().reshape(-1, units, heads, cut.row_bytes)
        blocks = cut.table
        if (ratio := span.pages.ratio) > 1:
            blocks = (blocks[:, None] * ratio + np.arange(ratio)).reshape(-1)
        begin = cut.units[0] % span.pages.block_units
        runs = split_at_pages((begin, begin + units), span.pages.units)
        first, stop = (layer - span.first for layer in cut.layers)
        for some in _evenly_spaced(span.steps[first:stop]):
            layers = self._layers(span, cut, slice(first + some.start, first + some.stop), int(blocks.max()))
            for run in runs:
                dense = wire[some, run[0] - begin : run[1] - begin]
                yield from _by_blocks(layers, blocks, run, dense)

    def _layers(self, span: Span, cut: Cut, which: slice, last: int) -> NDArray[np.uint8]:
        """Some layers of a span, equally far from each other: [layer, kernel block, unit, head, byte]."""
        pages, steps = span.pages, span.steps[which]
        shape = (len(steps), last + 1, pages.units, cut.heads[1] - cut.heads[0], cut.row_bytes)
        apart = int(steps[1] - steps[0]) if len(steps) > 1 else 0
        strides = (apart, pages.block_stride, pages.unit_stride, pages.head_stride, 1)
        offset = pages.offset + int(steps[0]) + cut.heads[0] * pages.head_stride
        return np.ndarray(shape, np.uint8, self.flat[pages.storage], offset, strides)


def _by_blocks(
    layers: NDArray[np.uint8], blocks: Index, run: Bounds, dense: NDArray[np.uint8]
) -> Iterator[Part]:
    """Units [start, stop), whole kernel blocks or within one; unit 0 is the first of `blocks[0]`."""
    units = layers.shape[2]
    blocks = blocks[run[0] // units : -(-run[1] // units)]
    inside, some = run[0] % units, (run[1] - run[0]) // len(blocks)
    dense = dense.reshape(len(dense), len(blocks), some, *dense.shape[2:])
    for part, chosen in _selections(blocks, dense[:, 0].nbytes):
        yield layers[:, :, inside : inside + some], chosen, dense[:, part]


def _evenly_spaced(steps: Index) -> list[slice]:
    """All layers together if they are equally far from each other, else each alone."""
    apart = np.diff(steps)
    if not len(apart) or (apart == apart[0]).all():
        return [slice(0, len(steps))]
    return [slice(layer, layer + 1) for layer in range(len(steps))]


def _selections(blocks: Index, nbytes: int) -> Iterator[tuple[slice, Selection]]:
    """Blocks that are copied together: their places in `blocks`, and which they are. `nbytes`: of one."""
    breaks = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
    if nbytes * len(blocks) >= WORTH_BYTES * (len(breaks) - 1):
        for start, stop in pairwise(breaks):
            first = int(blocks[start])
            yield slice(start, stop), slice(first, first + stop - start)
        return
    step = max(1, BATCH_BYTES // nbytes)
    for start in range(0, len(blocks), step):
        yield slice(start, start + step), blocks[start : start + step]


class HostColumns:
    """Copies columns of a storage in CPU memory, whose bytes are `flat`; see `copiers.ColumnStorage`."""

    def __init__(self, flat: NDArray[Any]) -> None:
        self._flat = flat

    def take_columns(self, columns: Columns, out: torch.Tensor) -> None:
        """Copy one column after the other to `out`."""
        matrix = self._matrix(columns)
        out.numpy().view(matrix.dtype).reshape(matrix.shape)[...] = matrix

    def put_columns(self, columns: Columns, src: torch.Tensor) -> None:
        """Copy `src` to one column after the other."""
        matrix = self._matrix(columns)
        matrix[...] = src.numpy().view(matrix.dtype).reshape(matrix.shape)

    def _matrix(self, columns: Columns) -> NDArray[Any]:
        """The elements, [column, element], as bits; numpy does not mind where they begin."""
        shape, strides = (columns.count, columns.elements), (columns.element, columns.step)
        return np.ndarray(shape, f"u{columns.element}", self._flat, columns.offset, strides)
