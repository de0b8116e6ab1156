"""Small arrays on their way to the device, and checksums on their way back, through memory taken beforehand.

CUDA may wait for the whole device when it is asked for memory, pinned or its own, and so for a peer that an
operation of a link waits for: CUDA C++ Programming Guide of CUDA 12, "Implicit Synchronization". So `warm_up`
takes all of it, and a copy takes none.
"""

import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from p2pkv.device import PASSED, Fence, make_recorder
from p2pkv.kv.checksum import Queued

Made = TypeVar("Made")

MAX_RECENT = 8
"""Arrays of which something is kept: the block tables of a model's KV groups, or rows in as many layouts."""

RING_BYTES = 4 << 20
"""Pinned memory, and as much of the device's, for what is under way. 128,000 tokens' table takes 32 KiB."""

SEGMENTS = 8
"""Parts of a ring, each with a fence behind what was copied out of it last."""

DIGESTS = 1024
"""Checksums that may be under way."""


class Recent(Generic[Made]):
    """What was made of the latest few arrays, found again by the array itself and by `kind`.

    The parts of one rectangle follow each other, and most of them share their block table. Safe in threads.
    """

    def __init__(self) -> None:
        self._latest: tuple[tuple[NDArray[Any], object, Made], ...] = ()

    def find(self, array: NDArray[Any], kind: object = None) -> Made | None:
        for known, other, made in self._latest:
            if known is array and other == kind:
                return made
        return None

    def of(self, array: NDArray[Any], make: Callable[[], Made], kind: object = None) -> Made:
        known = self.find(array, kind)
        return known if known is not None else self.add(array, make(), kind)

    def add(self, array: NDArray[Any], made: Made, kind: object = None) -> Made:
        self._latest = (array, kind, made), *self._latest[: MAX_RECENT - 1]
        return made


class Ring:
    """Pinned memory and memory of the device, `entries` each, that are used round and round.

    A copy, and the kernels that read it, are queued on one stream: so the device's half may be written again
    at any time, and the pinned half once the copy out of it has been made.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, nbytes: int = RING_BYTES) -> None:
        self.segment = nbytes // dtype.itemsize // SEGMENTS
        self._pinned = torch.empty(SEGMENTS * self.segment, dtype=dtype, pin_memory=True)
        self._on_device = torch.empty(SEGMENTS * self.segment, dtype=dtype, device=device)
        self._record = make_recorder(device)
        self._fences: list[Fence] = [PASSED] * SEGMENTS
        self._head = 0
        """Entries ever taken. Entry n lies at n modulo the ring's size."""

    def copy(self, array: NDArray[Any]) -> tuple[int, torch.Tensor]:
        """Queue a copy of the array, of at most `segment` entries: its number, and where it will be."""
        begin = self._head
        if begin % self.segment + len(array) > self.segment:
            begin += self.segment - begin % self.segment
        if begin % self.segment == 0:
            self._enter(begin // self.segment)
        self._head = begin + len(array)
        at = begin % (SEGMENTS * self.segment)
        pinned, on_device = (half[at : at + len(array)] for half in (self._pinned, self._on_device))
        pinned.numpy()[...] = array
        on_device.copy_(pinned, non_blocking=True)
        return begin, on_device

    def holds(self, number: int) -> bool:
        """Whether what `copy` gave this number has not been overwritten, and is not about to be."""
        return self._head - number <= (SEGMENTS - 1) * self.segment

    def _enter(self, segment: int) -> None:
        """The segment before is full: a fence behind its copies. This one's copies have been made, long ago.

        If they have not, this waits for the copies of p2pkv's own stream, never for a peer.
        """
        if segment:
            self._fences[(segment - 1) % SEGMENTS] = self._record()
        self._fences[segment % SEGMENTS].wait()


class Uploads:
    """Small arrays that go to the device, each in the order of the current stream's work.

    A copy from ordinary memory would wait for that work, so on CUDA an array passes through pinned memory.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._recent = Recent[tuple[int, torch.Tensor]]()

    def __call__(self, array: NDArray[Any]) -> torch.Tensor:
        """On the device before any kernel that the calling thread queues later, for that kernel alone.

        Nobody may write to the array later, or hand it in on another stream: it may not be copied again.
        """
        if self._device.type == "cpu":
            return self._recent.of(array, lambda: (0, torch.from_numpy(array).to(self._dtype)))[1]
        known = self._recent.find(array)
        if known is not None and self._ring.holds(known[0]):
            return known[1]
        if len(array) <= self._ring.segment:
            return self._recent.add(array, self._ring.copy(array))[1]
        # Memory of its own for an array that is too large for the ring: millions of tokens.
        pinned = torch.empty(array.shape, dtype=self._dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self._device, non_blocking=True)

    def warm_up(self) -> None:
        """Take all memory now, and make a first copy."""
        if self._device.type != "cpu":
            self._ring.copy(np.zeros(1, np.int64))

    @cached_property
    def _ring(self) -> Ring:
        return Ring(self._device, self._dtype)


class Digests:
    """Places for checksums that a device computes, int64 each on the device and in pinned memory."""

    def __init__(self, device: torch.device, count: int = DIGESTS) -> None:
        self._device = device
        self._sums = torch.zeros(count, dtype=torch.int64, device=device)
        self._hosts = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._free = deque(range(count))

    def compute(self, launch: Callable[[torch.Tensor], None]) -> Queued:
        """What `launch` adds to an int64 [1] of zero on the device, in the order of the stream's work. So the
        place is free again when nothing refers to the result."""
        if not self._free:  # so many have never been under way
            total = torch.zeros(1, dtype=torch.int64, device=self._device)
            launch(total)
            return Queued(total)
        place = self._free.popleft()
        total = self._sums[place : place + 1]
        total.zero_()
        launch(total)
        made = Queued(total, self._hosts[place : place + 1])
        weakref.finalize(made, self._free.append, place).atexit = False
        return made
