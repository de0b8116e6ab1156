"""A rank's staging: the budget that all its links share, the slots of a pool, and host links' pool. The pool
of links between GPUs (`gpu`) has the same slots."""

import mmap
import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf

import torch

ALIGNMENT = 64
IDLE_SECONDS = 60.0
_STEP = 8 << 20  # about 1 ms of freeing; more in one go would hold up the owner's other links


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole slots' alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class StagingBudget:
    """How many bytes of staging one rank has, and how many of them slots of its links hold (`Slots` counts
    them). `most`: bytes that the slots of one direction, sends or receives, may hold."""

    def __init__(self, limit: int) -> None:
        """`limit` is rounded up to 64 bytes. Raises ValueError if it is not positive."""
        if limit < 1:
            raise ValueError(f"staging_bytes is {limit}; it must be positive")
        self.limit = self.most = aligned(limit)
        self.sends = self.receives = 0

    @property
    def used(self) -> int:
        return self.sends + self.receives

    def carry_both_ways(self) -> None:
        """This rank sends and receives: leave a quarter for each direction. Else two ranks that are full of
        receives, each of which waits for the other's send, could not send."""
        self.most = self.limit - aligned(self.limit // 4)


@dataclass(eq=False, slots=True)
class StagingShare:
    """What one link holds of its rank's staging: `held` bytes, at most `window`. `sends`: it is P's end."""

    budget: StagingBudget
    sends: bool = False
    window: float = inf
    held: int = field(default=0, init=False)

    def grants(self, nbytes: int, reserve: int = 0) -> bool:
        """Whether this link may have `nbytes` more and leave `reserve` bytes of the rank's staging free. If
        it holds something, it must leave as much free as it would then hold: so each silent peer takes at
        most half of what is left. Raises ValueError if it could never have so many."""
        need, budget = aligned(nbytes), self.budget
        if need > budget.most:
            raise ValueError(f"a message of {nbytes} bytes can never fit {budget.most} bytes of staging")
        if (budget.sends if self.sends else budget.receives) + need > budget.most:
            return False
        left = budget.limit - budget.used - need - reserve
        return left >= 0 and (not self.held or self.held + need <= left)

    def count(self, nbytes: int) -> None:
        """A slot of so many bytes was taken; negative: given back."""
        self.held += nbytes
        if self.sends:
            self.budget.sends += nbytes
        else:
            self.budget.receives += nbytes


class Slots:
    """Which parts of a space of `capacity` bytes are taken, and for whom; all in multiples of 64. The owner
    thread takes slots; a thread that has seen a device finish with them may give them back."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a space of {capacity} bytes has room for nothing; give at least 1 byte")
        self.capacity = aligned(capacity)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.capacity)]  # [start, stop), ordered, never touching
        self._taken: dict[int, tuple[int, StagingShare | None]] = {}

    @property
    def used(self) -> int:
        return sum(size for size, _ in tuple(self._taken.values()))

    def take(self, nbytes: int, share: StagingShare | None = None) -> int | None:
        """The lowest offset with room for `nbytes`, or None while there is none. The slot counts as a part of
        `share`; None: it is no part of a rank's staging. Raises as `check` does."""
        self.check(nbytes, share)
        need = aligned(nbytes)
        if share is not None and share.held + need > share.window:
            return None
        most = self.capacity if share is None else min(self.capacity, share.budget.most)
        low = self.capacity - most if share is not None and share.sends else 0
        with self._lock:
            for index, (start, stop) in enumerate(self._free):
                begin = max(start, low)
                if min(stop, low + most) - begin >= need:
                    rest = (start, begin), (begin + need, stop)
                    self._free[index : index + 1] = [each for each in rest if each[0] < each[1]]
                    self._taken[begin] = need, share
                    if share is not None:
                        share.count(need)
                    return begin
        return None

    def check(self, nbytes: int, share: StagingShare | None = None) -> None:
        """Raises ValueError if `nbytes` is not positive or could never fit."""
        if nbytes < 1:
            raise ValueError(f"a message of {nbytes} bytes cannot be sent; it needs at least 1 byte")
        room = self.capacity if share is None else min(self.capacity, share.window)
        if nbytes > room:
            raise ValueError(f"a message of {nbytes} bytes can never fit a window of {room} bytes")

    def leave(self, offset: int) -> None:
        """The slot at `offset` stays taken until `give`, and is no part of a rank's staging any more."""
        with self._lock:
            size, share = self._taken[offset]
            if share is not None:
                share.count(-size)
            self._taken[offset] = size, None

    def give(self, offset: int) -> None:
        """Return the slot that `take` gave at `offset`."""
        with self._lock:
            size, share = self._taken.pop(offset)
            if share is not None:
                share.count(-size)
            start, stop = offset, offset + size
            index = bisect_left(self._free, (start, stop))
            if index < len(self._free) and self._free[index][0] == stop:
                stop = self._free.pop(index)[1]
            if index > 0 and self._free[index - 1][1] == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, stop))

    def give_all(self) -> None:
        for offset in list(self._taken):
            self.give(offset)


class MappedPool(Slots):
    """Slots of one mapping: allocation, views, and the return of pages that have not been used for a while.
    Tensors and views keep the mapping alive, and nothing else ends it."""

    def __init__(self, memory: mmap.mmap, start: int, capacity: int, advice: int) -> None:
        """`start`: where slots begin, a multiple of a page. `advice`: madvise's advice that frees pages."""
        assert start % mmap.PAGESIZE == 0
        super().__init__(capacity)
        self.idle_seconds = IDLE_SECONDS
        self._memory = memory
        self._start = start
        self._advice = advice
        self._view = memoryview(memory)[start : start + self.capacity]
        self._bytes = torch.frombuffer(self._view, dtype=torch.uint8)
        self._touched = 0
        self._idle_since: float | None = None

    def take(self, nbytes: int, share: StagingShare | None = None) -> int | None:
        offset = super().take(nbytes, share)
        if offset is not None:
            self._touched = max(self._touched, offset + aligned(nbytes))
            self._idle_since = None
        return offset

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over the slot."""
        return self._bytes[offset : offset + nbytes]

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[offset : offset + nbytes]

    def tidy(self) -> None:
        """Give pages back, a step per call, once the pool has been empty for `idle_seconds`."""
        if self._taken or not self._touched:
            return
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= self.idle_seconds:
            stop = -(-self._touched // mmap.PAGESIZE) * mmap.PAGESIZE
            start = max(0, stop - _STEP)
            self._memory.madvise(self._advice, self._start + start, stop - start)
            self._touched = start
