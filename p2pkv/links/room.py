"""Slots in mapped memory, whose pages go back to the system when they have been idle."""

from __future__ import annotations

import mmap
import time

import torch

from p2pkv.links.slots import Slots, aligned

IDLE_SECONDS = 60.0
_STEP = 8 << 20  # about 1 ms of freeing; more in one go would hold up the owner's other links


class Room:
    """Slots of one mapping: allocation, views, and the return of pages that nobody has used for a while.

    Tensors and views keep the mapping alive: dropping this object and them unmaps it. The mapping is
    never closed by hand, because a tensor does not hold it against that.
    """

    def __init__(self, memory: mmap.mmap, start: int, capacity: int, advice: int) -> None:
        """`start`: where slots begin, a whole page. `advice`: what frees pages of this kind of mapping."""
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
        """Bytes of the whole room."""
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
        """Give pages back, a step per call, once the room has been empty for `idle_seconds`."""
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
