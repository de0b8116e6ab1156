"""Fences, points in the order of a device's work, and the stream that the engine's copies go to.

The forward thread records a fence per layer hook, and the engine's thread polls it before it gathers.
The engine's thread records one behind each of its own copies, since on CUDA these are only queued.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol

import torch


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


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """While this is entered, the calling thread's work on `device` goes to a new stream of its own.

    On CUDA a thread starts on the default stream, which the forward uses too: copies would wait behind
    it, and it behind them. Nothing on a CPU.
    """
    if device.type != "cuda":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(device))
    stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))  # type: ignore[no-untyped-call]
    return stack
