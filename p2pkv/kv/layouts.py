"""How KV lies in memory: where a rectangle's rows are. `page_packings` has how a row's elements lie.

A rectangle on the wire is [layer, unit, head, row_bytes]. Its memory is described as rows of one size,
`atom`, on a regular grid. So a gather is one "take these rows" and a scatter one "put these rows", whatever
the layout. The atom is as large as the layout, the heads and the token range allow: a whole block where
heads lie inside tokens and all are wanted, one (token, head) where not. Addresses are in bytes unless it
is named units or blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Index = NDArray[np.int64]
Bounds = tuple[int, int]
"""Start and stop, half-open."""

Tokens = Bounds | Index
"""An interval of a prompt's tokens; or some of them, in their order."""

MAX_PLACES = 1 << 31
"""The kernels' block tables are int32."""


@dataclass(frozen=True)
class LayerPages:
    """Where the rows of one layer lie in its storage: that of (kernel block k, unit u in it, head h) starts
    at `offset + k * block_stride + u * unit_stride + h * head_stride`.

    Attributes:
        storage: address of the storage; layers of one storage can be copied together.
        table: number of the block table that is this layer's.
        blocks: logical blocks in the layer.
        ratio: kernel blocks in a logical block; block b is kernel blocks [b * apart, b * apart + ratio).
            Where a logical block's units are evenly spaced, it is described as one kernel block.
        units: units in a kernel block.
        apart: kernel blocks from a logical block's first to the next one's: `ratio`, or more where vLLM packs
            other layers between them.
    """

    storage: int
    table: int
    blocks: int
    ratio: int
    units: int
    block_stride: int
    unit_stride: int
    head_stride: int
    offset: int
    apart: int = 1

    @cached_property
    def block_units(self) -> int:
        """Units in a logical block."""
        return self.ratio * self.units


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive layers [first, stop) that differ in nothing but their offset. `pages`: the first one's.

    Attributes:
        steps: int64 [stop - first], each layer's offset from the first one's.
        grain: the greatest common divisor of `steps`, 0 for a single layer.
        apart: bytes from each layer to the next, 0 for a single layer; None: they are not equally far.
    """

    first: int
    stop: int
    pages: LayerPages
    steps: Index
    grain: int
    apart: int | None


class Cut(NamedTuple):
    """The part of a rectangle that lies in one span. `layers` are counted as the cache counts them.

    `table`: logical block ids, int64; entry 0 is the block of the first unit.
    """

    layers: Bounds
    units: Bounds
    heads: Bounds
    row_bytes: int
    table: Index


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a flat storage, in the wire's order: number i is the `atom` bytes from base + i * atom on."""

    atom: int
    base: int
    index: Index


@dataclass(frozen=True)
class Columns:
    """Columns of a matrix in memory, `count` side by side, of so many `elements`, which have `element` bytes
    and are `step` bytes apart. `offset`: of the first element of the first column."""

    offset: int
    count: int
    elements: int
    element: int
    step: int


def check_layer(number: int, tensor: torch.Tensor, first: torch.Tensor, block_rows: int, paged: bool) -> None:
    """Raises ValueError unless layer `number` can be addressed and is like the first one."""
    layer, strides = f"KV layer {number}", list(tensor.stride())
    if tensor.dim() not in (4, 5):
        raise ValueError(f"{layer} has shape {list(tensor.shape)}; expected [blocks, heads, rows, content]")
    blocks, (heads, rows, content) = prod(tensor.shape[:-3]), tensor.shape[-3:]
    if min(tensor.shape) < 1 or block_rows % rows or blocks % (block_rows // rows):
        raise ValueError(
            f"{layer} has {blocks} kernel blocks of {rows} rows, which do not make up "
            f"whole blocks of {block_rows} rows"
        )
    if (heads, content, tensor.dtype) != (first.shape[-3], first.shape[-1], first.dtype):
        raise ValueError(
            f"{layer} has {heads} heads of {content} x {tensor.dtype}, layer 0 has {first.shape[-3]} of "
            f"{first.shape[-1]} x {first.dtype}; expected layers of one form in a KV group"
        )
    if tensor.device != first.device:
        raise ValueError(f"{layer} is on {tensor.device}, layer 0 on {first.device}; expected one device")
    if content > 1 and strides[-1] != 1:
        raise ValueError(f"{layer} has strides {strides}; its content must lie together")
    if paged and rows > 1 and strides[-2] != content:
        raise ValueError(
            f"{layer} has strides {strides}; with a page codec the tokens of a (block, head) must lie "
            f"together (a head-major layout)"
        )
    if paged and rows != first.shape[-2]:
        raise ValueError(
            f"{layer} packs {rows} tokens in a page, layer 0 packs {first.shape[-2]}; expected layers of one "
            "form in a KV group"
        )


def plane_of(tensor: torch.Tensor, before: int, width: int, kernel: int = 0) -> torch.Tensor:
    """One plane of a layer, as a layer of its own: the elements [before, before + width) of each row.

    A kernel block of N rows holds that plane of all of them together, behind N x `before` elements of other
    planes, and `tensor`, [B, 1, N, C], shows only where a block begins and how much it holds. `kernel`: rows
    of a kernel block where vLLM shows whole blocks of several, [B, kernel blocks, 1, rows, width] then.

    Raises ValueError unless the block's N x C elements lie together, and the plane among them.
    """
    blocks, heads, rows, content = tensor.shape
    together = heads == 1 and tensor.stride(3) == 1 and (rows == 1 or tensor.stride(2) == content)
    if not together or width < 1 or not 0 <= before <= content - width:
        raise ValueError(
            f"a KV layer has shape {list(tensor.shape)} and strides {list(tensor.stride())}; expected one "
            f"head whose rows lie together, and the elements [{before}, {before + width}) in a row"
        )
    kernel = kernel or rows
    size, strides = [blocks, 1, kernel, width], [tensor.stride(0), kernel * width, width, 1]
    if kernel != rows:
        if rows % kernel or tensor.stride(0) % (kernel * content):
            raise ValueError(
                f"a KV layer has blocks of {rows} rows of {content}, {tensor.stride(0)} apart; expected a "
                f"multiple of a kernel block's {kernel} rows"
            )
        size.insert(1, rows // kernel)
        strides.insert(1, kernel * content)
    return tensor.as_strided(size, strides, int(tensor.storage_offset()) + kernel * before)


def pages_of(tensor: torch.Tensor, table: int, block_rows: int, paged: bool) -> LayerPages:
    """Where the rows of a layer lie that `check_layer` has accepted."""
    size = tensor.element_size()
    rows = tensor.shape[-2]
    *outer, head_stride, row_stride, _ = (stride * size for stride in tensor.stride())
    block_stride = outer[-1]
    units, ratio = 1 if paged else rows, block_rows // rows
    apart = ratio if len(outer) == 1 else outer[0] // block_stride
    # With one unit in a kernel block, the next unit is the next kernel block.
    unit_stride = block_stride if units == 1 else row_stride
    if block_stride == units * unit_stride and apart == ratio:
        units, block_stride, ratio, apart = units * ratio, block_stride * ratio, 1, 1
    return LayerPages(
        storage=tensor.untyped_storage().data_ptr(),
        table=table,
        blocks=prod(tensor.shape[:-3]) * rows // block_rows,
        ratio=ratio,
        units=units,
        block_stride=block_stride,
        unit_stride=unit_stride,
        head_stride=head_stride,
        offset=int(tensor.storage_offset()) * size,
        apart=apart,
    )


class Runs:
    """Some units of a prompt (`positions`, in their order, not empty) as runs of one length, each of which is
    a block of its own, so that what copies blocks copies them."""

    def __init__(self, positions: Index) -> None:
        self._positions = positions
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        self._longest = int(np.gcd.reduce([len(positions), positions[0], *breaks, *positions[breaks]]))
        self._tables: dict[LayerPages, Index] = {}

    def of(self, span: Span, cut: Cut) -> tuple[Span, Cut]:
        """The span whose blocks are the places where a run may lie, and the cut by such blocks; that of `cut`
        begins with the prompt's first block.

        Raises ValueError for more than `MAX_PLACES` places.
        """
        pages = span.pages
        run = gcd(pages.units, self._longest)  # no run lies in two kernel blocks
        step = gcd(pages.block_stride, run * pages.unit_stride)
        kind = replace(pages, storage=0, offset=0)
        if kind not in self._tables:
            self._tables[kind] = self._places(pages, cut.table, run, step)
        runs = replace(span, pages=replace(pages, ratio=1, apart=1, units=run, block_stride=step))
        return runs, cut._replace(units=(0, len(self._positions)), table=self._tables[kind])

    def _places(self, pages: LayerPages, table: Index, run: int, step: int) -> Index:
        if pages.blocks * pages.apart * (pages.block_stride // step) >= MAX_PLACES:
            raise ValueError(
                f"{pages.blocks} blocks of {pages.block_stride * pages.apart} bytes have too many places "
                f"where {run} tokens of {pages.unit_stride} bytes may lie: set a larger "
                "--cp-kv-cache-interleave-size, or give vLLM a smaller KV cache"
            )
        block, inside = np.divmod(self._positions[::run], pages.block_units)
        kernel, unit = np.divmod(inside, pages.units)
        places: Index = (table[block] * pages.apart + kernel) * (pages.block_stride // step)
        places += unit * pages.unit_stride // step
        return places


def split_at_pages(units: Bounds, page: int) -> list[Bounds]:
    """An interval as the end of a page, whole pages, and the beginning of a page; empty ones left out."""
    start, stop = units
    if not (start % page or stop % page):
        return [units]
    first, last = -(-start // page) * page, stop // page * page
    cuts = [start, first, last, stop] if first <= last else [start, stop]
    return [(one, two) for one, two in pairwise(cuts) if one < two]


def spans_of(layers: Sequence[LayerPages]) -> list[Span]:
    """Cut layers into the longest spans, in order."""
    spans: list[Span] = []
    first = 0
    for _, alike in groupby(layers, lambda layer: replace(layer, offset=0)):
        pages = list(alike)
        steps = np.array([layer.offset - pages[0].offset for layer in pages], np.int64)
        apart = set(np.diff(steps).tolist()) or {0}
        even = apart.pop() if len(apart) == 1 else None
        spans.append(Span(first, first + len(pages), pages[0], steps, int(np.gcd.reduce(steps)), even))
        first += len(pages)
    return spans


class Grid(NamedTuple):
    """How the rows of a cut lie on a regular grid, whose places are `atom` bytes apart, as each row has.

    `run`: bytes that lie together in memory and on the wire, a multiple of `atom`; they hold `stride` units.
    `runs_per_unit`: runs of a unit.
    """

    atom: int
    run: int
    stride: int
    runs_per_unit: int


def runs_of(span: Span, cut: Cut) -> tuple[int, int]:
    """Runs of one unit, and the bytes of a run: the heads of a unit are one run if they touch."""
    heads = cut.heads[1] - cut.heads[0]
    if heads == 1 or span.pages.head_stride == cut.row_bytes:
        return 1, heads * cut.row_bytes
    return heads, cut.row_bytes


def grid_of(span: Span, cut: Cut) -> Grid:
    """The coarsest grid for a cut that is not empty."""
    pages, (runs_per_unit, run), stride = span.pages, runs_of(span, cut), 1
    if runs_per_unit == 1 and run == pages.unit_stride:
        stride = gcd(cut.units[0], cut.units[1], pages.units)
        run *= stride
    atom = gcd(run, pages.block_stride, stride * pages.unit_stride, span.grain)
    return Grid(atom if runs_per_unit == 1 else gcd(atom, pages.head_stride), run, stride, runs_per_unit)


def locate(span: Span, cut: Cut) -> Rows:
    """The rows of a cut that is not empty."""
    layers, units, heads, table = cut.layers, cut.units, cut.heads, cut.table
    pages = span.pages
    atom, run, stride, runs_per_unit = grid_of(span, cut)
    first = pages.offset + int(span.steps[layers[0] - span.first]) + heads[0] * pages.head_stride
    lift = span.steps[layers[0] - span.first : layers[1] - span.first] - span.steps[layers[0] - span.first]
    index = (lift // atom + first // atom)[:, None] + _unit_rows(pages, units, stride, atom, table)
    if runs_per_unit > 1:
        index = index[..., None] + np.arange(runs_per_unit) * (pages.head_stride // atom)
    if run > atom:
        index = index[..., None] + np.arange(run // atom)
    return Rows(atom, first % atom, index.reshape(-1))


def _unit_rows(pages: LayerPages, units: Bounds, stride: int, atom: int, table: Index) -> Index:
    """Row numbers of every `stride`-th unit from the layer's start, int64 [ceil(units / stride)]."""
    whole = pages.block_units
    if stride == whole:
        return table * (pages.block_stride // atom)
    unit = np.arange(units[0] % whole, units[1] - units[0] + units[0] % whole, stride)
    block, inside = np.divmod(unit, whole)
    kernel, rest = np.divmod(inside, pages.units)
    kernel += table[block] * pages.apart
    result: Index = kernel * (pages.block_stride // atom) + rest * pages.unit_stride // atom
    return result
