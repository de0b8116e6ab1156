"""Moving the rows of a rectangle between paged memory and a dense buffer.

On a CPU numpy does it (`host.py`), on CUDA a kernel that CuPy compiles, and without CuPy torch's index
kernels, which are the kernels' reference too.
"""

import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch

from p2pkv.device import current_stream, launch_call
from p2pkv.kv.checksum import FOLD, Checksum, digest_by_torch
from p2pkv.kv.host import HostCopier, RowLists, columns_on_host, flat_bytes, grid
from p2pkv.kv.layouts import Bounds, Columns, Cut, LayerPages, Rows, Span, runs_of, spans_of
from p2pkv.kv.small_copies import Digests, Uploads

log = logging.getLogger("p2pkv")

THREADS = 256
WIDTHS = (16, 8, 4, 2, 1)
"""Bytes of one access; a copy takes the widest that everything in it is aligned to."""

MAX_LANES = 32
LOADS = 4
"""Accesses of one thread that are under way together, if a run is long enough."""

FULL_LINE = 8
"""Lanes that must stand side by side before a thread takes a second access: 128 bytes of 16 each."""

MAX_ROWS = 1 << 31
ADDRESS_BYTES = 8

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCKS_PER_PROCESSOR = 8
"""Enough to fill a multiprocessor with blocks of 256 threads; a larger grid gains nothing."""


def copier_of(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> "Copier":
    """Numpy's on a CPU; on CUDA the kernels', if CuPy is there to launch them, else torch's."""
    if not tensors or (device := tensors[0].device).type == "cpu":
        return HostCopier(pages, tensors)
    if device.type == "cuda" and (launcher := cupy_launcher(device)) is not None:
        return KernelCopier(pages, tensors, launcher)
    return StorageCopier(pages, tensors)


class StorageCopier(RowLists):
    """Lists the rows of a cut on the host, and lets torch copy them, queued on the current stream."""

    digest_name = FOLD
    digest = staticmethod(digest_by_torch)

    def __init__(self, pages: Sequence[LayerPages], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(pages)
        self._flat = {page.storage: flat_bytes(one) for page, one in zip(pages, tensors, strict=True)}
        self._device = tensors[0].device
        self.uploads = Uploads(self._device, torch.int64)

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        self.take_rows(self._flat[span.pages.storage], self.rows(span, cut), out)

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        self.put_rows(self._flat[span.pages.storage], self.rows(span, cut), src)

    def take_rows(self, flat: torch.Tensor, rows: Rows, out: torch.Tensor) -> None:
        torch.index_select(grid(flat, rows), 0, self.uploads(rows.index), out=out.view(-1, rows.atom))

    def put_rows(self, flat: torch.Tensor, rows: Rows, src: torch.Tensor) -> None:
        grid(flat, rows).index_copy_(0, self.uploads(rows.index), src.view(-1, rows.atom))

    def warm_up(self) -> None:
        """Take the memory that a copy needs, and run each of torch's kernels once: a first use loads it."""
        side = 4
        self.uploads.warm_up()
        scratch = torch.zeros(256, dtype=torch.uint8, device=self._device)
        for word in _WORDS:
            dense = torch.zeros(side * side * word, dtype=torch.uint8, device=self._device)
            rows = Rows(word, 0, np.arange(side))
            self.take_rows(scratch, rows, dense[: side * word])
            self.put_rows(scratch, rows, dense[: side * word])
            memory, matrix = columns_on_device(scratch, Columns(0, side, side, word, side * word), dense)
            memory.copy_(matrix)
        self.digest(scratch)


def columns_on_device(
    flat: torch.Tensor, columns: Columns, dense: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements in a storage and in `dense`, [column, element, word]; all is aligned to a word."""
    size, step = columns.element, columns.step
    word = gcd(size, step, columns.offset, flat.numel(), dense.data_ptr(), flat.data_ptr())
    bits = _WORDS[gcd(word, max(_WORDS))]
    word = bits.itemsize
    shape = columns.count, columns.elements, size // word
    memory = flat.view(bits).as_strided(shape, (size // word, step // word, 1), columns.offset // word)
    return memory, dense.view(bits).view(shape)


class ColumnCopier:
    """Copies rows whose elements lie `step` bytes apart; heads follow each other at the same step.

    So the heads of a unit are one long column, whatever rows it is cut into. Layers that begin an element
    after each other are columns of one matrix, and copied together: a strided copy for each such matrix.
    It does not copy more than one unit.
    """

    def __init__(
        self, pages: Sequence[LayerPages], tensors: Sequence[torch.Tensor], element: int, step: int
    ) -> None:
        """`element`: bytes of an element."""
        on_host = tensors[0].device.type == "cpu"
        rows = HostCopier(pages, tensors) if on_host else StorageCopier(pages, tensors)
        self._views: Callable[..., tuple[Any, Any]] = columns_on_host if on_host else columns_on_device
        self._copy: Callable[[Any, Any], object] = np.copyto if on_host else torch.Tensor.copy_
        self.spans, self.digest_name = rows.spans, rows.digest_name
        self.digest, self.warm_up, self.prepare = rows.digest, rows.warm_up, rows.prepare
        self._flat = {page.storage: flat_bytes(one) for page, one in zip(pages, tensors, strict=True)}
        self._element, self._step = element, step

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        for memory, dense in self._matrices(span, cut, out):
            self._copy(dense, memory)

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        for memory, dense in self._matrices(span, cut, src):
            self._copy(memory, dense)

    def _matrices(self, span: Span, cut: Cut, buffer: torch.Tensor) -> Iterator[tuple[Any, Any]]:
        """Layers that begin an element after each other: their elements in memory and in `buffer`."""
        assert len(cut.table) == 1 and cut.units == (0, 1), "columns are rows of one unit"
        length = (cut.heads[1] - cut.heads[0]) * cut.row_bytes
        steps = span.steps[cut.layers[0] - span.first : cut.layers[1] - span.first]
        first = span.pages.offset + int(cut.table[0]) * span.pages.block_stride
        first += cut.heads[0] * span.pages.head_stride
        ends = [*(np.flatnonzero(np.diff(steps) != self._element) + 1).tolist(), len(steps)]
        for start, stop in pairwise([0, *ends]):
            offset, elements = first + int(steps[start]), length // self._element
            columns = Columns(offset, stop - start, elements, self._element, self._step)
            yield self._views(self._flat[span.pages.storage], columns, buffer[start * length : stop * length])


# One CUDA kernel for a whole rectangle. Nothing is listed row by row on the host: the kernel gets strides,
# the layers' addresses and the block table. A kernel needs addresses and no storage, so layers of separate
# storages are one launch too.


def kernel_source() -> str:
    return files("p2pkv.kv").joinpath("kernels.cu").read_text(encoding="utf-8")


def kernel_names() -> list[str]:
    return [*(f"p2pkv_{what}_{width}" for what in ("gather", "scatter") for width in WIDTHS), "p2pkv_digest"]


class KernelForm(NamedTuple):
    """What the launches of some cuts have in common: the kernel's name, lanes and rows of a block of threads,
    runs of a unit, the address of the layers' addresses, and the kernel's last arguments."""

    kernel: str
    threads: tuple[int, int]
    runs_per_unit: int
    layers: int
    strides: tuple[int, ...]


class KernelCopier:
    """Copies rectangles of the given layers with kernels; `keep`: what owns the layers' memory.

    The copies are queued on the current stream when the calls return, in the order of the calls.
    """

    digest_name = FOLD

    def __init__(
        self, pages: Sequence[LayerPages], keep: Sequence[torch.Tensor], launcher: "DriverLauncher"
    ) -> None:
        # An address is an offset into a storage that begins at 0 and that all layers share.
        addressed = [replace(page, storage=0, offset=page.storage + page.offset) for page in pages]
        self.spans: Sequence[Span] = spans_of(addressed)
        self._keep = [tensor.untyped_storage() for tensor in keep]
        self._launcher = launcher
        self._device = keep[0].device
        self.upload = Uploads(self._device, torch.int32)
        self._digests = Digests(self._device)
        self._layers = {
            span.first: torch.from_numpy(span.steps + span.pages.offset).to(self._device)
            for span in self.spans
        }
        self._forms: dict[tuple[str, int, LayerPages, Bounds, int, int], KernelForm] = {}

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        self._copy("gather", span, cut, out)

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        self._copy("scatter", span, cut, src)

    def prepare(self, span: Span, cut: Cut) -> None:
        """A copy of this cut will come: have its block table on the device."""
        self.upload(cut.table)

    def digest(self, buffer: torch.Tensor) -> Checksum:
        """The fold of uint8 [n] on the layers' device, in one launch."""
        words = -(-buffer.numel() // 8)
        blocks = max(1, min(-(-words // (THREADS * LOADS)), self._launcher.most_blocks))
        return self._digests.compute(partial(self._add_up, blocks, buffer.data_ptr(), buffer.numel()))

    def warm_up(self) -> None:
        """Compile and load every kernel, so that the first transfer does not wait for it."""
        self.upload.warm_up()
        for way in ("gather", "scatter"):
            for width in WIDTHS:
                # No rows: nothing is read or written.
                self._launcher.launch(f"p2pkv_{way}_{width}", 1, (1, 1), [0, 0, 0, 0] + [1] * 11)
        self._digests.compute(partial(self._add_up, 1, 0, 0))

    def _add_up(self, blocks: int, address: int, nbytes: int, total: torch.Tensor) -> None:
        # Whole warps, also for nothing: one of them adds up what its threads have found.
        self._launcher.launch("p2pkv_digest", blocks, (THREADS, 1), (address, nbytes, total.data_ptr()))

    def _copy(self, way: str, span: Span, cut: Cut, dense: torch.Tensor) -> None:
        address, pages = dense.data_ptr(), span.pages
        kind = way, span.first, pages, cut.heads, cut.row_bytes, address % WIDTHS[0]
        if (form := self._forms.get(kind)) is None:
            form = self._forms[kind] = self._form(way, span, cut, address)
        units = cut.units[1] - cut.units[0]
        rows = (cut.layers[1] - cut.layers[0]) * units * form.runs_per_unit
        assert rows < MAX_ROWS, "no staging holds so many rows"
        layers = form.layers + (cut.layers[0] - span.first) * ADDRESS_BYTES
        table, first = self.upload(cut.table).data_ptr(), cut.units[0] % pages.block_units
        args = address, layers, table, rows, units, form.runs_per_unit, first, *form.strides
        blocks = min(-(-rows // form.threads[1]), self._launcher.most_blocks)
        self._launcher.launch(form.kernel, blocks, form.threads, args)

    def _form(self, way: str, span: Span, cut: Cut, address: int) -> KernelForm:
        pages, (beside, run) = span.pages, runs_of(span, cut)
        width = width_of(span, cut, address)
        lanes = lanes_for(run // width)
        units = pages.block_units, pages.units, pages.apart
        steps = pages.block_stride, pages.unit_stride, pages.head_stride
        strides = *units, *steps, cut.heads[0] * pages.head_stride, run // width
        layers = self._layers[span.first].data_ptr()
        return KernelForm(f"p2pkv_{way}_{width}", (lanes, THREADS // lanes), beside, layers, strides)


def width_of(span: Span, cut: Cut, dense: int) -> int:
    """The widest access, in bytes, that every run of the cut and of `dense` (an address) is aligned to."""
    pages, (beside, run) = span.pages, runs_of(span, cut)
    first = pages.offset + int(span.steps[0]) + cut.heads[0] * pages.head_stride
    common = gcd(dense, run, first, span.grain, pages.block_stride, pages.unit_stride)
    if beside > 1:
        common = gcd(common, pages.head_stride)
    return gcd(common, WIDTHS[0])


def lanes_for(elements: int) -> int:
    """Threads, a power of two, that share a run of so many accesses."""
    lanes = 1
    while lanes < MAX_LANES and lanes < elements and (lanes < FULL_LINE or lanes * LOADS < elements):
        lanes *= 2
    return lanes


Copier = HostCopier | StorageCopier | ColumnCopier | KernelCopier
"""Moves rows of its `spans` of layers, which it makes itself, as `HostCopier` describes."""


# CuPy compiles the kernels, and the driver launches them. CuPy is imported only where a CUDA cache is made.

_BUFFER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
MAX_ARGUMENTS = 16


class PackedArguments(threading.local):
    """A thread's buffer for the arguments of a launch, int64 each, and how cuLaunchKernel is given it. The
    driver has copied it when the call returns, so one is enough."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(8 * MAX_ARGUMENTS)
        self.size = ctypes.c_size_t()
        self.extra = (ctypes.c_void_p * 5)(
            _BUFFER, ctypes.addressof(self.buffer), _BUFFER_SIZE, ctypes.addressof(self.size), None
        )


class DriverLauncher:
    """Launches kernels whose parameters are int64: one call of the driver, with the arguments in one buffer.
    CuPy's own launch takes 40 us of Python more. Safe in threads.

    Attributes:
        most_blocks: of a grid; the kernels' loops do the rest.
    """

    def __init__(self, functions: dict[str, int], most_blocks: int, submit: Callable[..., int]) -> None:
        """`functions`: handles by name. `submit`: cuLaunchKernel."""
        self.most_blocks = most_blocks
        self._functions = functions
        self._submit = submit
        self._packed = PackedArguments()
        self._pack = {count: struct.Struct(f"={count}q").pack_into for count in range(1, MAX_ARGUMENTS + 1)}

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        """On the calling thread's current stream. Raises RuntimeError."""
        packed, (lanes, high) = self._packed, threads
        self._pack[len(args)](packed.buffer, 0, *args)
        packed.size.value = 8 * len(args)
        result = self._submit(
            self._functions[name], blocks, 1, 1, lanes, high, 1, 0, self.stream(), None, packed.extra
        )
        if result != 0:
            raise RuntimeError(f"CUDA's cuLaunchKernel failed with result {result} for {name}")

    def stream(self) -> int:
        """The handle of the calling thread's current stream."""
        raise NotImplementedError


class CupyLauncher(DriverLauncher):
    """Launches on torch's current stream of one CUDA device, which must be the calling thread's current one;
    all kernels are compiled, by CuPy, when it is made.

    Raises ImportError without CuPy, and what CuPy raises where it cannot compile.
    """

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._module = cupy.RawModule(code=kernel_source())  # the functions live as long as it does
        with cupy.cuda.Device(self._index):
            functions = {name: self._module.get_function(name).kernel.ptr for name in kernel_names()}
        count = torch.cuda.get_device_properties(self._index).multi_processor_count
        super().__init__(functions, BLOCKS_PER_PROCESSOR * count, launch_call())

    def stream(self) -> int:
        return current_stream(self._index)


def cupy_launcher(device: torch.device) -> CupyLauncher | None:
    """The launcher for this CUDA device, or None, with a line in the log, where CuPy cannot be used."""
    try:
        return CupyLauncher(device)
    except Exception as error:
        log.warning("%s", without_cupy(error))
    return None


def without_cupy(error: Exception) -> str:
    """What follows from this error of `CupyLauncher`, and what to do."""
    if isinstance(error, ImportError):
        reason, advice = f"CuPy cannot be imported ({error})", "install cupy-cuda12x or cupy-cuda13x"
    else:  # its compiler or CUDA's headers are missing, its cache cannot be written, ...
        reason = f"CuPy cannot compile p2pkv's kernels ({type(error).__name__}: {error})"
        advice = (
            "install NVRTC and the CUDA runtime's headers beside CuPy, or set CUPY_CACHE_DIR to a folder "
            "that can be written"
        )
    slower = "KV is gathered and scattered by torch's index kernels, which are slower"
    return f"{reason}: {slower}; {advice}"
