"""First-fit slots in a fixed space: low addresses first, so that warm pages are used again."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64


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
