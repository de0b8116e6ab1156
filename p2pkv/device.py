"""The device under KV: fences, which are points in the order of its work, streams, captures, and memory.

The forward thread records a fence per layer hook, and the engine's thread polls it before it gathers.
The engine's thread records one behind each of its own copies, since on CUDA these are only queued.
"""

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no order with the default stream
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY

EVENTS = 256
"""Events that are made at the start. More are made if so many are waited for at once."""

SCANT_BYTES = 512 << 20
"""Bytes of a device's memory that should be left for CUDA graphs and NCCL, which take theirs later."""

log = logging.getLogger("p2pkv.device")


class Fence(Protocol):
    """A point in the order of a device's work."""

    def ready(self) -> bool:
        """Whether everything queued before this point has been done. Never waits."""

    def wait(self) -> None:
        """Wait until `ready`, with the GIL released."""


class _Passed:
    """The fence of a device that works in the calling thread: passed when it is made."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CudaEvent:
    """A CUDA event, recorded when made: passed when all that its stream then held is done. The driver is
    asked without torch, whose `query` keeps the interpreter's lock. Events are kept for the next use, as CUDA
    may wait for the device when it makes one."""

    __slots__ = ("_device", "_handle")

    _free: ClassVar[dict[int, deque[int]]] = {}

    def __init__(self, device: int, stream: int) -> None:
        """On device number `device`, behind what `stream` (a raw handle) holds now. Raises RuntimeError."""
        self._device, self._handle = device, 0
        try:
            self._handle = self._free[device].popleft()
        except (KeyError, IndexError):
            self._handle = _make_event()
        event = ctypes.c_void_p(self._handle)
        _check("cuEventRecord", locked_driver().cuEventRecord(event, ctypes.c_void_p(stream)))

    def ready(self) -> bool:
        result = driver().cuEventQuery(ctypes.c_void_p(self._handle))
        if result != _NOT_READY:
            _check("cuEventQuery", result)
        return bool(result == 0)

    def wait(self) -> None:
        _check("cuEventSynchronize", driver().cuEventSynchronize(ctypes.c_void_p(self._handle)))

    def hold_up(self, stream: int) -> None:
        """What is queued on `stream` (a raw handle) from now on begins when this is passed."""
        event = ctypes.c_void_p(self._handle)
        _check("cuStreamWaitEvent", locked_driver().cuStreamWaitEvent(ctypes.c_void_p(stream), event, 0))

    def __del__(self) -> None:
        if self._handle:
            self._free.setdefault(self._device, deque()).append(self._handle)

    @classmethod
    def prepare(cls, device: int, count: int = EVENTS) -> None:
        """Make events now, on the calling thread's current device."""
        free = cls._free.setdefault(device, deque())
        while len(free) < count:
            free.append(_make_event())


def _make_event() -> int:
    event = ctypes.c_void_p()
    _check("cuEventCreate", driver().cuEventCreate(ctypes.byref(event), _DISABLE_TIMING))
    return int(event.value or 0)


def _check(call: str, result: int) -> None:
    if result != 0:
        raise RuntimeError(f"CUDA's {call} failed with result {result}")


PASSED: Fence = _Passed()


def cuda_index(device: torch.device | None) -> int:
    """The number of this CUDA device; of the calling thread's current one, if that is not given."""
    return torch.cuda.current_device() if device is None or device.index is None else device.index


def make_recorder(device: torch.device) -> Callable[[], Fence]:
    """A function that records a fence in the calling thread's stream. Raises ValueError for other devices."""
    if device.type == "cpu":
        return lambda: PASSED
    if device.type == "cuda":
        index = cuda_index(device)
        with torch.cuda.device(index):
            CudaEvent.prepare(index)
        return lambda: CudaEvent(index, current_stream(index))
    raise ValueError(f"KV cache on device {str(device)!r}: only cpu and cuda are supported")


@cache
def driver() -> Any:
    """CUDA's driver library, which is wherever a CUDA device is. Its calls release the interpreter's lock."""
    return ctypes.CDLL("libcuda.so.1")


@cache
def locked_driver() -> Any:
    """The same for calls that only queue something: the forward's thread keeps the interpreter's lock, which
    another thread might not give back for milliseconds."""
    return ctypes.PyDLL("libcuda.so.1")


@cache
def launch_call() -> Any:
    """cuLaunchKernel, with its arguments' types. It only queues, so it keeps the interpreter's lock."""
    call = locked_driver().cuLaunchKernel
    call.argtypes = (ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
    return call


_idle_streams: dict[tuple[int, bool], deque[int]] = {}
"""By device and priority: streams that nobody uses now."""


def take_stream(device: int, first: bool = False) -> int:
    """The handle of a stream that nobody else uses; `give_stream` gives it back. The calling thread's current
    device is `device`. It is the driver's own: torch hands out 32 streams in turn, to vLLM too, and on one of
    those, work that waits for a peer could stand before a model's work. `first`: with the greatest priority,
    so that the few blocks of its kernels, for which a peer's kernels wait, do not queue for a place behind
    the model's. Raises RuntimeError."""
    with suppress(KeyError, IndexError):
        return _idle_streams[device, first].popleft()
    handle, priority = ctypes.c_void_p(), ctypes.c_int(0)
    if first:
        least = ctypes.c_int(0)
        # If the driver refuses, the priority is the usual one.
        driver().cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(priority))
    result = driver().cuStreamCreateWithPriority(ctypes.byref(handle), _NON_BLOCKING, priority)
    if result != 0 or handle.value is None:
        raise RuntimeError(f"CUDA makes no stream for p2pkv: cuStreamCreateWithPriority returned {result}")
    return handle.value


def give_stream(device: int, stream: int, first: bool = False) -> None:
    """Nothing is on this stream of `take_stream` any more. It is kept for the next rank or link, and never
    destroyed: when a pinned buffer is freed, maybe long after, torch records an event on its streams."""
    _idle_streams.setdefault((device, first), deque()).append(stream)


class _Stream(threading.local):
    """The stream that `own_stream` has given the calling thread: its device, -1 for none, and its handle."""

    device, handle = -1, 0


_own = _Stream()


def current_stream(device: int) -> int:
    """The calling thread's current stream. Inside `own_stream` torch, which makes an object, is not asked."""
    return _own.handle if _own.device == device else int(torch.cuda.current_stream(device).cuda_stream)


def ignore_captures() -> None:
    """Let the calling thread allocate, and query events, while another thread captures a CUDA graph. A thread
    begins in the mode "global": vLLM's capture (in that mode, too) makes such calls errors, which end it."""
    mode = ctypes.c_int(_THREAD_LOCAL)
    result = driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if result != 0:
        log.warning(
            f"CUDA refused a thread of p2pkv the thread-local capture mode (result {result}): a peer that "
            "connects while vLLM captures CUDA graphs may end that capture, and with it vLLM's start"
        )


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """While this is entered, the calling thread's work on a CUDA `device` goes to a stream of its own, not to
    the default one, which the forward uses too: copies would wait behind it, and it behind them. The thread
    ignores graph captures of others from then on. At the end this waits for that work, so that the memory it
    touches may be freed. Raises RuntimeError if CUDA makes no stream."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # a thread has no context until its first call to the runtime
        ignore_captures()
        index = cuda_index(device)
        stream = take_stream(index)
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):  # type: ignore[no-untyped-call]
                _own.device, _own.handle = index, stream
                yield
        finally:
            _own.device = -1
            try:
                CudaEvent(index, stream).wait()
            except RuntimeError as error:
                log.warning("the device has failed, so a stream of p2pkv is not used again: %s", error)
            else:
                give_stream(index, stream)


def take_memory(
    nbytes: int, device: torch.device, option: str, allocate: Callable[[int], torch.Tensor] | None = None
) -> torch.Tensor:
    """uint8 [nbytes] for what `option` sizes, out of what vLLM's --gpu-memory-utilization leaves. On CUDA
    `allocate` makes it (None: torch), and the log has what is left. Raises MemoryError with a sentence."""
    plain = partial(torch.empty, dtype=torch.uint8, device=device)
    if device.type != "cuda" or not nbytes:
        return plain(nbytes)
    try:
        # In another thread: vLLM 0.33 gives this one memory of its sleep mode's pool, which it never frees.
        with ThreadPoolExecutor(1) as thread:
            block = allocate(nbytes) if allocate is not None else thread.submit(plain, nbytes).result()
    except (torch.OutOfMemoryError, MemoryError):
        free, total = torch.cuda.mem_get_info(device)
        raise MemoryError(
            f"{option} is {_mib(nbytes)}, and of the {_mib(total)} of {device} only {_mib(free)} are free: "
            "set staging_bytes, prefetch_bytes or vLLM's --gpu-memory-utilization lower"
        ) from None
    left = torch.cuda.mem_get_info(device)[0]
    log.info("%s takes %s of %s; %s are left", option, _mib(nbytes), device, _mib(left))
    if left < SCANT_BYTES:
        log.warning(
            f"{device} has only {_mib(left)} left, and CUDA graphs and NCCL's communicators take memory "
            "later: should they fail, set staging_bytes, prefetch_bytes or vLLM's --gpu-memory-utilization "
            "lower"
        )
    return block


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
