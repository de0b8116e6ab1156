"""A device whose copies are made only when a test says so, and a link that is ordered behind them.

As on CUDA: a call queues work and returns, a stream's work is done later in the order of the calls (CUDA
Programming Guide 13, "Asynchronous Execution"), and a fence is a place in that order (CUDA Driver API,
cuEventRecord and cuEventQuery). All threads share one order here, where CUDA has one for each stream.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from p2pkv.kv import PagedCache
from p2pkv.kv.checksum import FOLD, digest_by_torch
from support.cuda.ipc import SimulatedGpu

WAIT_SECONDS = 20.0


class Device:
    """Work is queued by any thread and done by whoever calls `run`; `free` lets all of it be done at once."""

    def __init__(self) -> None:
        self.waiting = 0
        """Threads that wait for a fence now."""
        self._changed = threading.Condition()
        self._work: deque[Callable[[], object]] = deque()
        self._queued = self._done = 0
        self._free = False

    def queue(self, work: Callable[[], object]) -> None:
        with self._changed:
            self._queued += 1
            self._work.append(work)
            if self._free:
                self._advance(len(self._work))

    def run(self, count: int = 1) -> int:
        """Do the next pieces of work, at most `count`; how many were left to do."""
        with self._changed:
            return self._advance(count)

    def free(self) -> None:
        """From now on work is done when it is queued."""
        with self._changed:
            self._free = True
            self._advance(len(self._work))

    def fence(self) -> "FakeFence":
        with self._changed:
            return FakeFence(self, self._queued)

    def passed(self, place: int) -> bool:
        with self._changed:
            return self._done >= place

    def wait(self, place: int) -> None:
        with self._changed:
            self.waiting += 1
            assert self._changed.wait_for(lambda: self._done >= place, WAIT_SECONDS), "nobody ran the device"
            self.waiting -= 1

    def _advance(self, count: int) -> int:
        there = min(count, len(self._work))
        for _ in range(there):
            self._work.popleft()()
            self._done += 1
        self._changed.notify_all()
        return there


@dataclass(frozen=True)
class FakeFence:
    device: Device
    place: int

    def ready(self) -> bool:
        return self.device.passed(self.place)

    def wait(self) -> None:
        self.device.wait(self.place)


@dataclass
class Later:
    """A checksum that nobody may read before the device has come to it."""

    said: bytes | None = None
    known = False

    def value(self) -> bytes:
        assert self.said is not None, "the checksum is read before the device has computed it"
        return self.said


class DeviceCache(PagedCache):
    """A cache whose copies are queued on a Device. Wrong arguments are refused in the call, as on CUDA."""

    device_queue: Device

    @classmethod
    def on(cls, device: Device) -> Callable[[PagedCache], PagedCache]:
        """For engines' `device`."""

        def wrap(cache: PagedCache) -> PagedCache:
            wrapped = cls.__new__(cls)
            wrapped.__dict__.update(cache.__dict__, device_queue=device, digest_name=FOLD)
            return wrapped

        return wrap

    def gather(self, out: torch.Tensor, *cut: Any) -> None:
        parts = self.parts(out, *cut)
        self.device_queue.queue(lambda: [self.copier.take(*part) for part in parts])

    def scatter(self, src: torch.Tensor, *cut: Any) -> None:
        parts = self.parts(src, *cut)
        self.device_queue.queue(lambda: [self.copier.put(*part) for part in parts])

    def digest(self, buffer: torch.Tensor) -> Later:
        later = Later()
        self.device_queue.queue(lambda: setattr(later, "said", digest_by_torch(buffer).value()))
        return later

    def fence(self) -> FakeFence:  # type: ignore[override]
        return self.device_queue.fence()


class QueuedGpu(SimulatedGpu):
    """The device as CUDA IPC links see it, which give slots up and tell of messages behind the copies."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def record_event(self) -> FakeFence:  # type: ignore[override]
        return self._device.fence()
