"""A log that strangers cannot fill."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

BURST, SECONDS = 20, 10.0
"""So many lines from one place in the code, in so many seconds."""


class Throttle(logging.Filter):
    """Lets `burst` lines of each place through in `seconds`; the next one says how many were left out."""

    def __init__(
        self, burst: int = BURST, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst = burst
        self._seconds = seconds
        self._clock = clock
        self._counted: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now, place = self._clock(), (record.pathname, record.lineno)
        since, count = self._counted.get(place, (now, 0))
        left_out = 0
        if now - since >= self._seconds:
            left_out, since, count = max(0, count - self._burst), now, 0
        self._counted[place] = since, count + 1
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more lines of this kind were left out)"
            record.args = ()
        return count < self._burst

    def forget(self) -> None:
        """Begin anew."""
        self._counted.clear()
