"""Rows moved by one CUDA kernel for a whole rectangle, straight from the geometry of the pages.

Nothing is listed row by row on the host: the kernel gets strides, the layers' addresses and the block
table. Layers of separate storages are one launch too, since a kernel needs addresses and no arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from math import gcd
from typing import Protocol

import numpy as np
import torch

from p2pkv.pages.digest import FOLD, Digest, Queued
from p2pkv.pages.rows import Cut, LayerPages, Span, spans_of

THREADS = 256
WIDTHS = (16, 8, 4, 2, 1)
"""Bytes of one access; a copy takes the widest that everything in it is aligned to."""

MOST_LANES = 32
LOADS = 4
"""Accesses of one thread that are under way together, if a run is long enough."""

FULL_LINE = 8
"""Lanes that must stand side by side before a thread takes a second access: 128 bytes of 16 each."""

MOST_ROWS = 1 << 31


def source() -> str:
    """The kernels' text, CUDA C."""
    return files("p2pkv.pages").joinpath("kernels.cu").read_text(encoding="utf-8")


def names() -> list[str]:
    """The kernels' names."""
    return [*(f"p2pkv_{what}_{width}" for what in ("gather", "scatter") for width in WIDTHS), "p2pkv_digest"]


class Launcher(Protocol):
    """What runs a kernel of `source`.

    Attributes:
        most_blocks: of a grid; the kernels' loops do the rest.
    """

    most_blocks: int

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        """Queue one kernel on torch's current stream of the device."""
        ...


class KernelCopier:
    """Copies rectangles of the given layers with kernels; `keep`: what owns the layers' memory.

    The copies are queued on the current stream when the calls return, in the order of the calls.
    """

    digest_name = FOLD

    def __init__(self, pages: Sequence[LayerPages], keep: Sequence[torch.Tensor], launcher: Launcher) -> None:
        # An address is an offset into an arena that begins at 0 and that all layers share.
        self.spans: Sequence[Span] = spans_of(
            [replace(page, arena=0, offset=page.arena + page.offset) for page in pages]
        )
        self._keep = [tensor.untyped_storage() for tensor in keep]
        self._launcher = launcher
        self._device = keep[0].device
        self._layers = {
            span.first: torch.from_numpy(span.steps + span.pages.offset).to(self._device)
            for span in self.spans
        }

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        """Copy the cut, which is not empty, to `out`: uint8, contiguous, same device, exactly as large."""
        self._copy("gather", span, cut, out)

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        """Copy `src` (as `out` in take) to the cut."""
        self._copy("scatter", span, cut, src)

    def digest(self, buffer: torch.Tensor) -> Digest:
        """The fold of uint8 [n] on the layers' device, in one launch."""
        total = torch.zeros(1, dtype=torch.int64, device=self._device)
        words = -(-buffer.numel() // 8)
        blocks = max(1, min(-(-words // (THREADS * LOADS)), self._launcher.most_blocks))
        self._launch_digest(blocks, buffer.data_ptr(), buffer.numel(), total)
        return Queued(total)

    def warm_up(self) -> None:
        """Compile and load every kernel, so that the first transfer need not."""
        for way in ("gather", "scatter"):
            for width in WIDTHS:
                # No rows: nothing is read or written.
                self._launcher.launch(f"p2pkv_{way}_{width}", 1, (1, 1), [0, 0, 0, 0] + [1] * 11)
        self._launch_digest(1, 0, 0, torch.zeros(1, dtype=torch.int64, device=self._device))

    def _launch_digest(self, blocks: int, address: int, nbytes: int, total: torch.Tensor) -> None:
        # Whole warps, also for nothing: one of them adds up what its threads have found.
        self._launcher.launch("p2pkv_digest", blocks, (THREADS, 1), (address, nbytes, total.data_ptr()))

    def _copy(self, way: str, span: Span, cut: Cut, dense: torch.Tensor) -> None:
        pages, table = span.pages, self._upload(cut.table)
        beside, run = shape_of(span, cut)
        units = cut.units[1] - cut.units[0]
        rows = (cut.layers[1] - cut.layers[0]) * units * beside
        assert rows < MOST_ROWS, "no staging holds so many rows"
        width = width_of(span, cut, dense.data_ptr())
        lanes = lanes_for(run // width)
        high = THREADS // lanes
        layers = self._layers[span.first]
        args = (
            dense.data_ptr(),
            layers.data_ptr() + (cut.layers[0] - span.first) * layers.element_size(),
            table.data_ptr(),
            rows,
            units,
            beside,
            cut.units[0] % pages.block_units,
            pages.block_units,
            pages.units,
            pages.ratio,
            pages.block_stride,
            pages.unit_stride,
            pages.head_stride,
            cut.heads[0] * pages.head_stride,
            run // width,
        )
        blocks = min(-(-rows // high), self._launcher.most_blocks)
        self._launcher.launch(f"p2pkv_{way}_{width}", blocks, (lanes, high), args)

    def _upload(self, table: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        """On the device before any kernel queued later: the copy is queued on the same stream."""
        return torch.from_numpy(table.astype(np.int32)).to(self._device, non_blocking=True)


def shape_of(span: Span, cut: Cut) -> tuple[int, int]:
    """Runs of one unit, and the bytes of a run: the heads of a unit are one run if they touch."""
    heads = cut.heads[1] - cut.heads[0]
    if heads == 1 or span.pages.head_stride == cut.row_bytes:
        return 1, heads * cut.row_bytes
    return heads, cut.row_bytes


def width_of(span: Span, cut: Cut, dense: int) -> int:
    """The widest access, in bytes, that every run of the cut and of `dense` (an address) is aligned to."""
    pages, (beside, run) = span.pages, shape_of(span, cut)
    first = pages.offset + int(span.steps[0]) + cut.heads[0] * pages.head_stride
    common = gcd(dense, run, first, span.grain, pages.block_stride, pages.unit_stride)
    if beside > 1:
        common = gcd(common, pages.head_stride)
    return gcd(common, WIDTHS[0])


def lanes_for(elements: int) -> int:
    """Threads, a power of two, that share a run of so many accesses."""
    lanes = 1
    while lanes < MOST_LANES and lanes < elements and (lanes < FULL_LINE or lanes * LOADS < elements):
        lanes *= 2
    return lanes
