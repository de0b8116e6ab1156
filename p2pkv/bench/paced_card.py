"""A card that is not there: in place of the device a clock, in real time.

All down to the call of the driver or of NCCL is p2pkv's own: engines, links, kernels' arguments, fences.
Behind the call time passes as it did on the card (`Card` has the figures and their sources); no bytes move. A
call takes its time of the calling thread, with the interpreter's lock held or released as the real one; the
work that it queues ends later on the clock. The two ends of an NCCL operation, in two processes, meet in a
small file that both map.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from p2pkv.config import Options
from p2pkv.kv import PagedCache
from p2pkv.kv.copiers import BLOCKS_PER_PROCESSOR, DriverLauncher, KernelCopier, kernel_names
from p2pkv.kv.layouts import pages_of
from p2pkv.links.gpu import Allocate
from p2pkv.links.ipc import IpcLinks
from p2pkv.links.nccl import INIT_SECONDS, NcclLinks
from p2pkv.links.nccl_bindings import Comm, Nccl

US = 1e-6

PROCESSORS = 132
"""Of an H100 SXM5."""


@dataclass(frozen=True)
class Card:
    """What calls and work cost: seconds, and bytes per second. SOURCES has where each figure is from.

    Attributes:
        launch, record, query: calls of the driver for a kernel, and an event.
        call: NCCL's send or receive, until it returns; or the end of a group of them.
        queue: NCCL's send or receive within a group.
        kernel: from a launch until its kernel runs.
        memory: bytes that a gather or a scatter moves.
        operation: what an NCCL operation takes besides its bytes.
        wire: bytes that NCCL moves, and P's gather where it writes to D's memory.
    """

    launch: float = 4 * US
    record: float = 1 * US
    query: float = 1 * US
    call: float = 88 * US
    queue: float = 5 * US
    kernel: float = 4 * US
    memory: float = 1.4e12
    operation: float = 6 * US
    wire: float = 76e9


SOURCES = {
    "launch": "cuLaunchKernel: 2 to 5 us are usual; not measured on the card",
    "record": "cuEventRecord: assumed",
    "query": "cuEventQuery: assumed",
    "call": "65 to 110 us on the H100 (2026-11-26), nccl4py 0.6, non-blocking",
    "queue": "assumed",
    "kernel": "3 to 5 us are usual; not measured on the card",
    "memory": "a plain copy of 16 and 64 MiB on the H100: 1,640 and 1,405 GB/s",
    "operation": "NCCL alone on the H100: 53 GB/s at 1 MiB, 76 at 64 MiB",
    "wire": "the same, at 64 MiB",
}

_BURNT = bytes(1 << 20)


def _burn_rate() -> float:
    """Bytes per second that `zlib.crc32` reads: the best of some tries."""
    best = 0.0
    for _ in range(20):
        begin = time.perf_counter()
        zlib.crc32(_BURNT)
        best = max(best, len(_BURNT) / (time.perf_counter() - begin))
    return best


class Clock:
    """Spends the calling thread's time. `spent`: seconds, by what they were spent on."""

    LEAST_RELEASED = 8 << 10
    """Bytes from which on zlib surely lets the interpreter's lock go."""

    def __init__(self) -> None:
        self._rate = _burn_rate()
        self.spent: dict[str, float] = dict.fromkeys(("kernels", "events", "NCCL"), 0.0)

    def spend(self, seconds: float, what: str, released: bool) -> None:
        """Keep a core busy for so long; `released`: without the interpreter's lock."""
        begin = time.perf_counter()
        end = begin + seconds
        if released and (count := int(seconds * self._rate)) > self.LEAST_RELEASED:
            zlib.crc32(memoryview(_BURNT)[: min(count, len(_BURNT))])
        while time.perf_counter() < end:
            pass
        self.spent[what] += time.perf_counter() - begin


class Work:
    """Something on a stream, behind what the stream held before."""

    __slots__ = ("_before", "_end", "_launched", "_seconds")

    def __init__(self, before: Work | None, launched: float, seconds: float) -> None:
        self._before = before
        self._launched = launched
        self._seconds = seconds
        self._end: float | None = None

    def end(self) -> float | None:
        """When it is done, on the monotonic clock; None while that depends on the peer."""
        if self._end is None:
            before = self._before.end() if self._before is not None else self._launched
            if before is not None:
                self._end = self.ends(max(before, self._launched))
                if self._end is not None:
                    self._before = None
        return self._end

    def ends(self, begin: float) -> float | None:
        """When it is done if it could begin then."""
        return begin + self._seconds


class Both(Work):
    """Done when two others are."""

    __slots__ = ("_other",)

    def __init__(self, before: Work | None, other: Work) -> None:
        super().__init__(before, 0.0, 0.0)
        self._other = other

    def ends(self, begin: float) -> float | None:
        other = self._other.end()
        return None if other is None else max(begin, other)


class PacedEvent:
    """Passed when all that its stream held is done."""

    __slots__ = ("_device", "work")

    def __init__(self, device: PacedDevice, stream: PacedStream) -> None:
        device.clock.spend(device.card.record, "events", released=False)
        self._device = device
        self.work = stream.last

    def ready(self) -> bool:
        self._device.clock.spend(self._device.card.query, "events", released=True)
        return self._passed()

    def wait(self) -> None:
        while not self._passed():
            time.sleep(10 * US)

    def _passed(self) -> bool:
        end = None if self.work is None else self.work.end()
        return self.work is None or (end is not None and time.monotonic() >= end)


class PacedStream:
    """A stream; `number` is what NCCL takes for it."""

    _numbers = itertools.count(1)
    by_number: ClassVar[weakref.WeakValueDictionary[int, PacedStream]] = weakref.WeakValueDictionary()

    def __init__(self, device: PacedDevice) -> None:
        self._device = device
        self.number = next(self._numbers)
        self.by_number[self.number] = self
        self.last: Work | None = None

    def launch(self, seconds: float) -> None:
        """Queue work of so many seconds."""
        self.last = Work(self.last, time.monotonic() + self._device.card.kernel, seconds)
        self.last.end()  # while what is before it is remembered one by one

    def record(self) -> PacedEvent:
        return PacedEvent(self._device, self)

    def follow(self, event: PacedEvent) -> None:
        """What is queued from now on begins behind this event's work, too."""
        self._device.clock.spend(self._device.card.record, "events", released=False)
        if event.work is not None:
            self.last = Both(self.last, event.work)

    def close(self) -> None:
        self.last = None


class PacedDevice:
    """What links see of the device. Each thread has a current stream of its own."""

    name = "paced:0"
    processors = PROCESSORS

    def __init__(self, card: Card) -> None:
        self.card = card
        self.clock = Clock()
        self._thread = threading.local()

    @property
    def current(self) -> PacedStream:
        stream: PacedStream | None = getattr(self._thread, "stream", None)
        if stream is None:
            stream = self._thread.stream = PacedStream(self)
        return stream

    def enter(self) -> None:
        """Nothing is needed."""

    def memory(self, nbytes: int, allocate: Allocate | None = None) -> torch.Tensor:
        """Memory that nothing ever touches."""
        return (allocate or (lambda some: torch.empty(some, dtype=torch.uint8)))(nbytes)

    def free_bytes(self) -> int:
        return 0

    def stream(self) -> PacedStream:
        return PacedStream(self)

    def record_event(self) -> PacedEvent:
        return PacedEvent(self, self.current)


class PacedLauncher(DriverLauncher):
    """The call's time is spent, and the stream is busy for as long as the bytes take."""

    def __init__(self, device: PacedDevice, gathers_to_peer: bool) -> None:
        """`gathers_to_peer`: P's gather writes to D's memory, at the wire's rate."""
        functions = dict.fromkeys(kernel_names(), 0)
        super().__init__(functions, BLOCKS_PER_PROCESSOR * PROCESSORS, self._called)
        self._device = device
        self._gather = device.card.wire if gathers_to_peer else device.card.memory

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        """Kernels of `kernels.cu`: rows is the fourth argument, accesses of a run the last."""
        super().launch(name, blocks, threads, args)
        nbytes = args[3] * args[-1] * int(name.rsplit("_", 1)[1]) if len(args) > 3 else 0
        rate = self._gather if name.startswith("p2pkv_gather") else self._device.card.memory
        self._device.current.launch(nbytes / rate)

    def compute(self, seconds: float) -> None:
        """Keep the current stream busy for so long."""
        self._device.current.launch(seconds)

    def stream(self) -> int:
        return self._device.current.number

    def _called(self, *_: object) -> int:
        self._device.clock.spend(self._device.card.launch, "kernels", released=False)
        return 0


class PacedCache(PagedCache):
    """A cache whose copies take their time and move nothing."""

    now: Callable[[], PacedEvent]

    def fence(self) -> PacedEvent:
        return self.now()

    @classmethod
    def of(
        cls, tensors: Sequence[torch.Tensor], block_size: int, copies: PacedLauncher, now: Any
    ) -> PacedCache:
        """Dense, [B, H, N, C] for each layer, as `from_tensors`. `now`: records an event."""
        plain = PagedCache.from_tensors(tensors, block_size=block_size)
        pages = [pages_of(tensor, 0, block_size, False) for tensor in tensors]
        paced = cls(
            pages,
            KernelCopier(pages, tensors, copies),
            heads=plain.heads,
            block_size=block_size,
            unit_tokens=plain.unit_tokens,
            row_bytes=plain.row_bytes,
            element_bytes=plain.element_bytes,
            codec=plain.codec,
            device=plain.device,
        )
        paced.now = now
        return paced


# NCCL: the two ends of an operation meet in a file.

RING = 4096
"""Operations of a communicator that the file remembers."""


class Meeting:
    """When each side of each operation of a communicator could begin. Times are of the monotonic clock, which
    processes of a host share."""

    def __init__(self, name: bytes, rank: int) -> None:
        self.path = Path(tempfile.gettempdir()) / f"p2pkv-paced-{name[:16].hex()}"
        fd = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(fd, 2 * 2 * RING * 8)
            self._map = mmap.mmap(fd, 2 * 2 * RING * 8)
        finally:
            os.close(fd)
        times = np.frombuffer(self._map, np.float64).reshape(2, 2, RING)
        self._mine, self._theirs = times[rank], times[1 - rank]
        self.count = 0

    def come(self, number: int, at: float) -> None:
        """This side could begin then."""
        self._mine[1, number % RING] = at
        self._mine[0, number % RING] = number + 1

    def other(self, number: int) -> float | None:
        """When the other side could; None while that is not known."""
        if self._theirs[0, number % RING] != number + 1:
            return None
        return float(self._theirs[1, number % RING])


class PacedOperation(Work):
    """A send or a receive: it begins when both sides have."""

    __slots__ = ("_meeting", "_met", "_number")

    def __init__(self, before: Work | None, launched: float, seconds: float, meeting: Meeting) -> None:
        super().__init__(before, launched, seconds)
        self._meeting = meeting
        self._number = meeting.count
        self._met = False
        meeting.count += 1
        self.end()  # so that the peer knows as soon as possible

    def ends(self, begin: float) -> float | None:
        if not self._met:
            self._met = True
            self._meeting.come(self._number, begin)
        other = self._meeting.other(self._number)
        return None if other is None else max(begin, other) + self._seconds


class PacedNccl(Nccl):
    """Two ranks' operations on the clock."""

    def __init__(self, device: PacedDevice) -> None:
        self._device = device
        self.binding = "no binding"
        self._grouped: list[tuple[int, Comm, int]] | None = None
        self.channels = 8

    def version(self) -> int:
        return 23007

    def unique_id(self) -> bytes:
        return os.urandom(128)

    def init(self, ranks: int, unique_id: bytes, rank: int) -> Comm:
        return Meeting(unique_id, rank)

    def send(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        self._launch(nbytes, comm, stream)

    recv = send

    def async_error(self, comm: Comm) -> int:
        return 0

    def abort(self, comm: Comm) -> None:
        comm.path.unlink(missing_ok=True)

    @contextmanager
    def group(self) -> Iterator[None]:
        self._grouped = []
        yield
        group, self._grouped = self._grouped, None
        self._launch(sum(nbytes for nbytes, _, _ in group), *group[0][1:])

    def _launch(self, nbytes: int, comm: Comm, number: int) -> None:
        card = self._device.card
        if self._grouped is not None:
            self._device.clock.spend(card.queue, "NCCL", released=False)
            self._grouped.append((nbytes, comm, number))
            return
        self._device.clock.spend(card.call, "NCCL", released=True)
        stream = PacedStream.by_number[number]
        launched = time.monotonic() + card.kernel
        stream.last = PacedOperation(stream.last, launched, card.operation + nbytes / card.wire, comm)


# CUDA IPC: memory that two processes map, and neither touches.


class PacedMemory:
    """In place of links.cuda_memory.CudaMemory."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._addresses = itertools.count(1 << 20, 1 << 20)

    def uuid(self) -> bytes:
        return b"p2pkv paced card"

    def exportable(self) -> bool:
        return True

    def reaches(self, uuid: bytes) -> bool:
        return uuid == self.uuid()

    def granularity(self) -> int:
        return 2 << 20

    def create(self, nbytes: int) -> int:
        handle = os.memfd_create("p2pkv-paced")
        os.ftruncate(handle, nbytes)
        return handle

    export_fd = import_fd = staticmethod(os.dup)
    drop = staticmethod(os.close)

    def reserve(self, nbytes: int) -> int:
        return next(self._addresses)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._maps[address] = mmap.mmap(handle, nbytes)

    def allow(self, address: int, nbytes: int) -> None:
        """Nothing is needed."""

    def unmap(self, address: int, nbytes: int) -> None:
        del self._maps[address]

    def free(self, address: int, nbytes: int) -> None:
        """Nothing is needed."""

    def tensor(self, address: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
        tensor = torch.frombuffer(self._maps[address], dtype=torch.uint8)
        weakref.finalize(tensor, gone).atexit = False
        return tensor


@dataclass
class PacedRank:
    """What a rank of the benchmark is made from. `over`: nccl or ipc."""

    over: str
    card: Card
    device: PacedDevice = field(init=False)

    def __post_init__(self) -> None:
        self.device = PacedDevice(self.card)

    def cache(self, layers: Sequence[torch.Tensor], block_size: int) -> PacedCache:
        launcher = PacedLauncher(self.device, gathers_to_peer=self.over == "ipc")
        return PacedCache.of(layers, block_size, launcher, self.device.record_event)

    def links(self, settings: Options) -> NcclLinks | IpcLinks:
        device: Any = self.device
        staging_bytes, receives = settings.staging_bytes, settings.decodes
        if self.over == "nccl":
            flow = settings.nccl_in_flight, settings.nccl_group_bytes
            return NcclLinks(PacedNccl(device), device, staging_bytes, INIT_SECONDS, *flow)
        memory: Any = PacedMemory()
        return IpcLinks(device, memory, staging_bytes, receives)
