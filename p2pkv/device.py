"""The device under KV: fences, which are points in the order of its work, streams, captures, and memory.

The forward thread records a fence per layer hook, and the engine's thread polls it before it gathers.
The engine's thread records one behind each of its own copies, since on CUDA these are only queued.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no order with the default stream
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

SCANT_BYTES = 512 << 20
"""Memory of a device that should be left for CUDA graphs and NCCL, which take theirs later."""

log = logging.getLogger("p2pkv.device")


class Fence(Protocol):
    """A point in the order of a device's work."""

    def ready(self) -> bool:
        """Whether everything queued before this point has been done. Never waits."""
        ...

    def wait(self) -> None:
        """Wait until `ready`, with the GIL released."""
        ...


class _Passed:
    """The fence of a device that works in the calling thread: passed when it is made."""

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _EventFence:
    """A CUDA event on the stream that was current when it was recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


PASSED: Fence = _Passed()


def _record_passed() -> Fence:
    return PASSED


def make_recorder(device: torch.device) -> Callable[[], Fence]:
    """A function that records a fence at this point of the calling thread's current stream.

    Raises ValueError for a device that is neither a CPU nor CUDA.
    """
    if device.type == "cpu":
        return _record_passed
    if device.type == "cuda":
        return lambda: _EventFence(torch.cuda.current_stream(device))
    raise ValueError(f"KV cache on device {str(device)!r}: only cpu and cuda are supported")


def driver() -> Any:
    """CUDA's driver library, which is wherever a CUDA device is."""
    return ctypes.CDLL("libcuda.so.1")


def make_stream() -> int:
    """The handle of a new stream of the calling thread's current device, made by the driver itself.

    torch hands out 32 streams in turn, to vLLM too. On one of those, work that waits for a peer could stand
    before a model's work. Raises RuntimeError with a sentence.
    """
    handle = ctypes.c_void_p()
    result = driver().cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if result != 0 or handle.value is None:
        raise RuntimeError(f"CUDA cannot make a stream for p2pkv: cuStreamCreate returned {result}")
    return handle.value


def end_stream(handle: int) -> None:
    """Nothing is on this stream of `make_stream` any more, and nothing will be."""
    driver().cuStreamDestroy_v2(ctypes.c_void_p(handle))


def ignore_captures() -> None:
    """Let the calling thread allocate, and query events, while another thread captures a CUDA graph.

    A thread begins in the mode "global": vLLM's capture (in that mode, too) makes such calls of it errors,
    and they end the capture. A driver that refuses is a warning: it matters only if a peer connects while
    graphs are captured.
    """
    mode = ctypes.c_int(_THREAD_LOCAL)
    result = driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if result != 0:
        log.warning(
            "CUDA refused a thread of p2pkv the thread-local capture mode (result %d): a peer that connects "
            "while vLLM captures CUDA graphs may end that capture, and with it vLLM's start",
            result,
        )


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """While this is entered, the calling thread's work on `device` goes to a new stream of its own.

    On CUDA a thread starts on the default stream, which the forward uses too: copies would wait behind
    it, and it behind them. The thread ignores graph captures of others from then on. Nothing on a CPU.
    """
    if device.type != "cuda":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(device))
    torch.cuda.mem_get_info(device)  # a thread has no context until its first call to the runtime
    ignore_captures()
    handle = make_stream()
    stack.callback(end_stream, handle)
    stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(handle, device)))  # type: ignore[no-untyped-call]
    return stack


def take_memory(nbytes: int, device: torch.device, option: str) -> torch.Tensor:
    """uint8 [nbytes] for what `option` sizes. On CUDA the log has how much it is and what is left.

    vLLM has filled its share of the device before (--gpu-memory-utilization), so this comes out of the rest.
    Raises MemoryError with a sentence.
    """
    if device.type != "cuda" or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise MemoryError(
            f"{option} is {_mib(nbytes)}, and of the {_mib(total)} of {device} only {_mib(free)} are free: "
            "set staging_bytes, prefetch_bytes or vLLM's --gpu-memory-utilization lower"
        ) from None
    left = torch.cuda.mem_get_info(device)[0]
    log.info("%s takes %s of %s; %s are left", option, _mib(nbytes), device, _mib(left))
    if left < SCANT_BYTES:
        log.warning(
            "%s has only %s left, and CUDA graphs and NCCL's communicators take memory later: should they "
            "fail, set staging_bytes, prefetch_bytes or vLLM's --gpu-memory-utilization lower",
            device,
            _mib(left),
        )
    return block


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
