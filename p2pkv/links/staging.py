"""The staging pool of host links: slots in mapped memory, and the budget that TCP links share.

The pool of NCCL links lies in device memory (`nccl_device`) and has the same slots.
"""

from __future__ import annotations

import mmap
import time
from bisect import bisect_left

import torch

ALIGNMENT = 64
IDLE_SECONDS = 60.0
_STEP = 8 << 20  # about 1 ms of freeing; more in one go would hold up the owner's other links


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole slots' alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Slots:
    """Which parts of a space of `capacity` bytes (rounded up to 64) are taken.

    Offsets are multiples of 64. A slot takes its size rounded up to 64 bytes.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a space of {capacity} bytes has room for nothing; give at least 1 byte")
        self.capacity = aligned(capacity)
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, self.capacity)]  # [start, stop), ordered, never touching
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The lowest offset with room for `nbytes`, or None while there is none.

        Raises ValueError if `nbytes` is not positive or could never fit.
        """
        self.check(nbytes)
        need = aligned(nbytes)
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= need:
                self._free[index : index + 1] = [(start + need, stop)] if stop - start > need else []
                self._taken[start] = need
                self.used += need
                return start
        return None

    def check(self, nbytes: int) -> None:
        """Raises ValueError if `nbytes` is not positive or could never fit."""
        if nbytes < 1:
            raise ValueError(f"a message of {nbytes} bytes cannot be sent; it needs at least 1 byte")
        if nbytes > self.capacity:
            raise ValueError(f"a message of {nbytes} bytes can never fit a window of {self.capacity} bytes")

    def give(self, offset: int) -> None:
        """Return the slot that `take` gave at `offset`."""
        size = self._taken.pop(offset)
        self.used -= size
        start, stop = offset, offset + size
        index = bisect_left(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))


class MappedPool:
    """Slots of one mapping: allocation, views, and the return of pages that nobody has used for a while.

    Tensors and views keep the mapping alive: dropping this object and them unmaps it. Nobody closes the
    mapping by hand: a tensor would not prevent that, and would then read freed memory.
    """

    def __init__(self, memory: mmap.mmap, start: int, capacity: int, advice: int) -> None:
        """`start`: where slots begin, a multiple of a page. `advice`: what madvise is told to free pages."""
        assert start % mmap.PAGESIZE == 0
        self.idle_seconds = IDLE_SECONDS
        self._slots = Slots(capacity)
        self._memory = memory
        self._start = start
        self._advice = advice
        self._view = memoryview(memory)[start : start + self._slots.capacity]
        self._bytes = torch.frombuffer(self._view, dtype=torch.uint8)
        self._touched = 0
        self._idle_since: float | None = None

    @property
    def capacity(self) -> int:
        """Bytes of the whole pool."""
        return self._slots.capacity

    @property
    def used(self) -> int:
        """Bytes that slots hold now."""
        return self._slots.used

    def check(self, nbytes: int) -> None:
        """Raises ValueError if `nbytes` is not positive or could never fit."""
        self._slots.check(nbytes)

    def take(self, nbytes: int) -> int | None:
        """The offset of a new slot, or None while there is no room; ValueError if it could never fit."""
        offset = self._slots.take(nbytes)
        if offset is not None:
            self._touched = max(self._touched, offset + aligned(nbytes))
            self._idle_since = None
        return offset

    def give(self, offset: int) -> None:
        """Return the slot at `offset`."""
        self._slots.give(offset)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over the slot."""
        return self._bytes[offset : offset + nbytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The same bytes, for a socket."""
        return self._view[offset : offset + nbytes]

    def tidy(self) -> None:
        """Give pages back, a step per call, once the pool has been empty for `idle_seconds`."""
        if self._slots.used or not self._touched:
            return
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= self.idle_seconds:
            self._free_a_step()

    def _free_a_step(self) -> None:
        stop = -(-self._touched // mmap.PAGESIZE) * mmap.PAGESIZE
        start = max(0, stop - _STEP)
        self._memory.madvise(self._advice, self._start + start, stop - start)
        self._touched = start


class StagingBudget:
    """Bytes of staging that all TCP links of one rank share."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"staging_bytes is {limit}; it must be positive")
        self.limit = limit
        self.used = 0

    def grants(self, held: int, nbytes: int) -> bool:
        """Whether a link that holds `held` may have `nbytes` more.

        A link that holds something must leave as much to the others, so a silent peer never takes all.
        """
        left = self.limit - self.used - nbytes
        return left >= 0 and (held == 0 or held + nbytes <= left)
