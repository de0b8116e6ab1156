"""Fences: how the forward thread says "this layer's KV is written up to here" without waiting.

The forward thread records one per layer hook; the engine's thread polls it before it gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Fence(Protocol):
    """A point in the order of a device's work."""

    def ready(self) -> bool:
        """Whether everything queued before this point has been done. Never waits."""
        ...


class _Passed:
    """The fence of a device that works in the calling thread: passed when it is made."""

    def ready(self) -> bool:
        return True


class _EventFence:
    """A CUDA event on the stream that was current when it was recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


_PASSED = _Passed()


def _record_passed() -> Fence:
    return _PASSED


def make_recorder(device: torch.device) -> Callable[[], Fence]:
    """A function that records a fence at this point of the calling thread's current stream.

    Raises ValueError for a device that is neither a CPU nor CUDA.
    """
    if device.type == "cpu":
        return _record_passed
    if device.type == "cuda":
        return lambda: _EventFence(torch.cuda.current_stream(device))
    raise ValueError(f"KV cache on device {str(device)!r}: only cpu and cuda are supported")
