"""One CUDA device, on a CPU: the driver's streams and events, memory, and what torch keeps of all of them.

What has been queued is done only when somebody asks for it or waits: so whoever frees something without
having looked frees it with work under way. What the driver refuses, and what crashes a process or spoils
bytes, is a refusal, which `SimulatedCuda.let_go` reports. The rules, and where each comes from:

- A stream or an event that was destroyed is not used again: cuda.h of CUDA 12.9, cuStreamDestroy and
  cuEventDestroy. On an H100 (2026-11-26) it was a segmentation fault, or "context is destroyed".
- A stream that is destroyed still does what it holds: cuda.h, cuStreamDestroy. Its events stay.
- Memory is not touched by what is queued before it is mapped, or after it was unmapped or freed.
- Memory is not unmapped or freed while something that was queued may touch it: cuda.h does not say whether
  cuMemUnmap waits.
- torch's pinned buffers: a copy that does not block notes its stream on the buffer, and when the buffer is
  freed torch records an event on each of these streams (ATen/core/CachingHostAllocator.h, `free`). It uses
  the memory again when those events are passed, so copies may be under way then, and nothing else.
- torch's device memory belongs to the stream that was current when it was taken. When it is freed, torch
  hands it out again on that stream at once (c10/cuda/CUDACachingAllocator.cpp), so no other stream may have
  something under way on it.
"""

import contextlib
import ctypes
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2pkv import device
from p2pkv.kv import cache as cache_module
from p2pkv.kv.copiers import KernelCopier
from p2pkv.kv.layouts import LayerPages
from p2pkv.links.cuda_memory import tensor_at
from support.cuda.ipc import CPU, SimulatedGpu, SimulatedMemory
from support.cuda.kernels import CpuLauncher
from support.nccl.simulated import Comm, Op, SimulatedNccl

CUDA = torch.device("cuda", 0)
LOOKS = 2
"""Times that an event is asked for before the next thing that its stream holds is done."""

WAIT_SECONDS = 20.0
NOT_READY, INVALID_HANDLE = 600, 400
ADDRESSES = 1 << 32
"""A kernel's argument that is larger is an address."""

SUCCESS = 0
MOST_URGENT = -5
"""The priority of streams whose kernels come first."""


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Memory:
    """What queued work may touch. `stream`: for which torch took it; `uses`: of pinned memory, by torch."""

    what: str
    start: int
    stop: int
    stream: int | None = None
    uses: set[int] = field(default_factory=set)

    def free_for(self, stream: int) -> bool:
        """Whether it may be freed with work of this stream under way."""
        return stream == self.stream or stream in self.uses


@dataclass(eq=False)
class Work:
    """`over`: whether it has ended, of a kernel that ends by itself."""

    what: str
    stream: int
    memory: list[Memory]
    act: Callable[[], object]
    over: Callable[[], bool] | None
    asked: int = 0
    done: bool = False


class SimulatedDriver:
    """libcuda's calls that p2pkv.device makes, with the driver's own parameters. Safe in threads."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.created: list[tuple[int, int]] = []
        """Streams, ever: the flags and the priority of each."""
        self.done = 0
        """What has been queued and done."""
        self.at_once = False
        """Whether what is queued is done when the call returns."""
        self.memory: list[Memory] = []
        self._lock = threading.RLock()
        self._numbers = itertools.count(0x1000)
        self._streams: dict[int, deque[Work]] = {0: deque()}
        self._queues = dict(self._streams)  # of streams that were destroyed, too
        self._events: dict[int, Work | None] = {}
        self._last: dict[int, Work] = {}

    # Streams.

    @property
    def made(self) -> int:
        return len(self.created)

    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:
        ctypes.cast(greatest, ctypes.POINTER(ctypes.c_int))[0] = MOST_URGENT
        return SUCCESS

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return SUCCESS

    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: Any) -> int:
        with self._lock:
            self.created.append((flags, getattr(priority, "value", priority)))
            self._streams[number := next(self._numbers)] = self._queues[number] = deque()
        return _out(stream, number)

    def cuStreamDestroy_v2(self, stream: ctypes.c_void_p) -> int:
        with self._lock:
            if self._streams.pop(stream.value or 0, None) is None:
                return self._refuse("a stream that has ended was destroyed")
        return SUCCESS

    # Events.

    def cuEventCreate(self, event: Any, flags: int) -> int:
        with self._lock:
            self._events[number := next(self._numbers)] = None
        return _out(event, number)

    def cuEventDestroy_v2(self, event: ctypes.c_void_p) -> int:
        with self._lock:
            if self._events.pop(event.value or 0, self) is self:
                return self._refuse("an event that has ended was destroyed")
        return SUCCESS

    def cuEventRecord(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        with self._lock:
            number = stream.value or 0
            if number not in self._streams:
                return self._refuse("an event was recorded on a stream that has ended")
            if (event.value or 0) not in self._events:
                return self._refuse("an event that has ended was recorded")
            self._events[event.value or 0] = self._last.get(number)
        return SUCCESS

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:
        with self._lock:
            if (work := self._work_of(event)) is self:
                return self._refuse("an event that has ended was asked for")
            if work is None or work.done:
                return SUCCESS
            work.asked += 1
            if work.asked >= LOOKS:
                work.asked = 0
                self._advance(work.stream)
            return SUCCESS if work.done else NOT_READY

    def cuEventSynchronize(self, event: ctypes.c_void_p) -> int:
        end = time.monotonic() + WAIT_SECONDS
        while True:
            with self._lock:
                if (work := self._work_of(event)) is self:
                    return self._refuse("an event that has ended was waited for")
                while work is not None and not work.done and self._advance(work.stream):
                    pass
                if work is None or work.done:
                    return SUCCESS
            if time.monotonic() > end:
                return self._refuse(f"{work.what} was waited for, and does not end")
            time.sleep(0.0005)

    def _work_of(self, event: ctypes.c_void_p) -> Any:
        return self._events.get(event.value or 0, self)

    # What is queued, and the memory that it touches.

    def queue(
        self,
        stream: int,
        what: str,
        memory: Sequence[Memory | None],
        act: Callable[[], object] = _nothing,
        over: Callable[[], bool] | None = None,
    ) -> None:
        """Queue this, unless it is refused. `memory`: all that it touches; None: what is not there."""
        with self._lock:
            touched = [each for each in memory if each is not None and each in self.memory]
            if len(touched) != len(memory):
                self._refuse(f"{what} touches memory that is not there")
            elif stream not in self._streams:
                self._refuse(f"{what} was queued on a stream that has ended")
            else:
                work = self._last[stream] = Work(what, stream, touched, act, over)
                self._streams[stream].append(work)
                if self.at_once:
                    self.synchronize(stream)

    def synchronize(self, stream: int) -> None:
        with self._lock:
            while self._advance(stream):
                pass

    def take(self, memory: Memory) -> None:
        with self._lock:
            self.memory.append(memory)

    def find(self, address: int) -> Memory | None:
        with self._lock:
            return next((each for each in self.memory if each.start <= address < each.stop), None)

    def drop(self, memory: Memory, how: str = "freed") -> None:
        with self._lock:
            for queued in self._queues.values():
                for work in queued:
                    over = work.over is not None and work.over()
                    if memory in work.memory and not over and not memory.free_for(work.stream):
                        self._refuse(f"{memory.what} was {how} with {work.what} under way on it")
            self.memory.remove(memory)

    @property
    def streams(self) -> int:
        """Those that have been made and not been destroyed."""
        return len(self._streams) - 1

    @property
    def busy(self) -> list[str]:
        with self._lock:
            return [work.what for queued in self._queues.values() for work in queued]

    def _advance(self, stream: int) -> bool:
        """Do the next thing that the stream holds, if it can be done."""
        queued = self._queues[stream]
        if not queued or (queued[0].over is not None and not queued[0].over()):
            return False
        work = queued.popleft()
        work.act()
        self.done += 1
        work.done, work.act, work.over = True, _nothing, None  # events still refer to it
        return True

    def _refuse(self, why: str) -> int:
        self.refusals.append(why)
        return INVALID_HANDLE


def _out(place: Any, number: int) -> int:
    """What a call of the driver does with its result, and its own."""
    ctypes.cast(place, ctypes.POINTER(ctypes.c_void_p))[0] = number
    return SUCCESS


class SimulatedCuda:
    """Device CUDA of this process, under p2pkv.device, under torch, and under p2pkv's kernels. Tensors on it
    are on a CPU, for torch.

    Attributes:
        calls: those that CUDA may answer only when all that was queued before is done. Each that takes
            memory: CUDA C++ Programming Guide of CUDA 12, 3.2.8.5.4, "Implicit Synchronization" (the edition
            of CUDA 13 has only the NULL stream there), and NCCL's User Guide before 2.26, "Using multiple
            NCCL communicators concurrently" ("any CUDA operation"). Each first launch of a kernel, which
            loads it: CUDA 12's 25.5.1, "Concurrent Execution", and CUDA 13's 4.7.5.1. And a copy from or to
            memory that is not pinned: CUDA Runtime API, "API synchronization behavior".
        copied: how many copies to the device there were.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.driver = SimulatedDriver()
        self.calls: list[str] = []
        self.copied = 0
        self._loaded: set[object] = set()
        self._here = threading.local()
        self._kept: list[torch.Tensor] = []  # an address must not be taken for another's
        for name in ("driver", "locked_driver"):
            patch.setattr(device, name, lambda: self.driver)
        patch.setattr(device.CudaEvent, "_free", {})
        patch.setattr(device, "_idle_streams", {}, raising=False)
        self._patch_torch(patch)
        check = cache_module.check_buffer
        patch.setattr(
            cache_module, "check_buffer", lambda buffer, nbytes, _: check(buffer, nbytes, buffer.device)
        )

    def let_go(self) -> None:
        """AssertionError if something was refused."""
        refused, self.driver.refusals = self.driver.refusals, []
        assert not refused, "; ".join(dict.fromkeys(refused))

    def leftovers(self) -> list[str]:
        """Memory that was taken, work that was queued, and streams that nobody has given back."""
        idle = [stream for pool in device._idle_streams.values() for stream in pool]
        assert len(idle) == len(set(idle)), "a stream was given back twice"
        taken = ["a stream"] * (self.driver.streams - len(idle))
        return [each.what for each in self.driver.memory] + self.driver.busy + taken

    @property
    def stream(self) -> int:
        return getattr(self._here, "stream", 0)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """torch.cuda.stream."""
        before, self._here.stream = self.stream, stream.cuda_stream
        try:
            yield
        finally:
            self._here.stream = before

    def load(self, kernel: object) -> None:
        """This kernel, p2pkv's or torch's, is launched."""
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            self.calls.append(f"load {kernel}")

    # Torch.

    def _patch_torch(self, patch: pytest.MonkeyPatch) -> None:
        cuda = {
            "device": lambda _: contextlib.nullcontext(),
            "stream": self.on,
            "ExternalStream": lambda stream, _: SimpleNamespace(cuda_stream=stream),
            "current_stream": lambda _: SimpleNamespace(cuda_stream=self.stream),
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "mem_get_info": lambda _: (1 << 40, 1 << 40),
            "get_device_properties": lambda _: SimpleNamespace(multi_processor_count=132),
        }
        for name, call in cuda.items():
            patch.setattr(torch.cuda, name, call)
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, self._maker(name == "zeros", getattr(torch, name)))
        self._copy, to, zero = torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.zero_

        def simulated_to(tensor: torch.Tensor, *args: Any, **kind: Any) -> torch.Tensor:
            if args != (CUDA,):
                return to(tensor, *args, **kind)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA).copy_(tensor, **kind)

        def simulated_zero(tensor: torch.Tensor) -> torch.Tensor:
            if (memory := self.driver.find(tensor.data_ptr())) is None or memory.what == "pinned memory":
                return zero(tensor)
            self._fill(tensor, memory)
            return tensor

        def simulated_copy(target: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
            return self._copied(target, *args, **how)

        patch.setattr(torch.Tensor, "to", simulated_to)
        patch.setattr(torch.Tensor, "zero_", simulated_zero)
        patch.setattr(torch.Tensor, "copy_", simulated_copy)

    def _maker(self, zeros: bool, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def simulated(*args: Any, pin_memory: bool = False, device: Any = None, **kind: Any) -> torch.Tensor:
            if not pin_memory and device != CUDA:
                return make(*args, device=device, **kind)
            made = make(*args, **kind)
            return self._lent(made, pin_memory, zeros) if made.numel() else made

        return simulated

    def _lent(self, made: torch.Tensor, pinned: bool, zeros: bool) -> torch.Tensor:
        """As torch's allocators lend it: freed with its last view."""
        self._kept.append(made)
        nbytes = made.numel() * made.element_size()
        start, stop = made.data_ptr(), made.data_ptr() + nbytes
        if pinned:
            memory = Memory("pinned memory", start, stop)
        else:
            memory = Memory("torch's device memory", start, stop, self.stream)
        self.calls.append(f"take {'pinned' if pinned else 'device'} memory")
        self.driver.take(memory)
        lent = tensor_at(start, nbytes, CPU, 0, lambda: self._freed(memory))
        if zeros and not pinned:
            self._fill(lent, memory)
        return lent.view(made.dtype).view(made.shape)

    def _freed(self, memory: Memory) -> None:
        for stream in memory.uses:
            event = ctypes.c_void_p()
            self.driver.cuEventCreate(ctypes.byref(event), 0)
            self.driver.cuEventRecord(event, ctypes.c_void_p(stream))
        self.driver.drop(memory)

    def _fill(self, tensor: torch.Tensor, memory: Memory) -> None:
        start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self.driver.queue(self.stream, "a memset", [memory], lambda: ctypes.memset(start, 0, nbytes))

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        ends = [self.driver.find(each.data_ptr()) for each in (target, source)]
        there = [each for each in ends if each is not None]
        if not there:
            return self._copy(target, source, non_blocking)
        assert target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
        to, from_, nbytes = target.data_ptr(), source.data_ptr(), target.numel() * target.element_size()
        self.driver.queue(self.stream, "a copy", there, lambda: ctypes.memmove(to, from_, nbytes))
        self.copied += ends[0] is not None and ends[0].what != "pinned memory"
        if not non_blocking or len(there) < len(ends):
            self.calls.append("wait for the device")
            self.driver.synchronize(self.stream)
        else:
            for memory in there:
                if memory.what == "pinned memory":
                    memory.uses.add(self.stream)
        return target

    # p2pkv's kernels.

    @contextlib.contextmanager
    def moving(self, launcher: CpuLauncher) -> Iterator[None]:
        """Caches that are made meanwhile are on the device, and copied by p2pkv's kernels."""

        def copier(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> KernelCopier:
            there = [
                SimpleNamespace(device=CUDA, untyped_storage=each.untyped_storage, data_ptr=each.data_ptr)
                for each in tensors
            ]
            return KernelCopier(pages, there, _Launcher(self, launcher))  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_module, "copier_of", copier)
            yield


@dataclass
class _Launcher:
    """Launches on the calling thread's current stream."""

    cuda: SimulatedCuda
    inner: CpuLauncher

    def __post_init__(self) -> None:
        self.most_blocks = self.inner.most_blocks

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        given = [int(each) for each in args]
        self.cuda.load(name)
        launch_on(
            self.cuda,
            name,
            *(each for each in given if each > ADDRESSES),
            act=lambda: self.inner.launch(name, blocks, threads, given),
        )


def launch_on(cuda: SimulatedCuda, name: str, *addresses: int, act: Callable[[], object] = _nothing) -> None:
    """Queue a kernel that touches what lies at these addresses on the calling thread's stream."""
    cuda.driver.queue(cuda.stream, name, [cuda.driver.find(each) for each in addresses], act)


class CardMemory(SimulatedMemory):
    """Memory that can be shared, on the device."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__(SimulatedGpu())
        self._driver = cuda.driver
        self._there: dict[int, Memory] = {}

    def allow(self, address: int, nbytes: int) -> None:
        super().allow(address, nbytes)
        self._there[address] = Memory("mapped memory", address, address + nbytes)
        self._driver.take(self._there[address])

    def unmap(self, address: int, nbytes: int) -> None:
        self._driver.drop(self._there.pop(address), "unmapped")
        super().unmap(address, nbytes)


class CardNccl(SimulatedNccl):
    """NCCL whose kernels are on the device's streams until their peer has done its part, or an abort."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._driver = cuda.driver

    def _launch(self, comm: Comm, ops: list[Op]) -> None:
        self._driver.queue(
            ops[-1].stream,
            "a kernel of NCCL's",
            [self._driver.find(op.ptr) for op in ops],
            over=lambda: ops[-1].done or comm.gone.is_set(),
        )
        super()._launch(comm, ops)
