"""Logging at a bounded rate, so that neither strangers nor a fault that lasts can fill the log."""

import logging
import time
from collections.abc import Callable, Hashable


class RateLimit:
    """Admits `burst` events of a kind in a window of `seconds`.

    The first event opens the window; the first one after its end opens the next. Several threads may use it,
    and may then be admitted an event more or less. `clock`: in seconds; where a call has no `now`.
    """

    def __init__(
        self, burst: int = 1, *, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[Hashable, tuple[float, int]] = {}
        """By kind: when its window was opened, and the events since."""

    def admits(self, kind: Hashable = None, now: float | None = None) -> bool:
        """Count one event of this kind; whether it is one of the `burst` that are admitted."""
        return self.count(kind, now)[0]

    def count(self, kind: Hashable = None, now: float | None = None) -> tuple[bool, int]:
        """As `admits`; and how many the window before did not admit, if this event opens one, else 0."""
        now = self._clock() if now is None else now
        since, count = self._windows.get(kind, (now, 0))
        left_out = 0
        if now - since >= self._seconds:
            left_out, since, count = max(0, count - self._burst), now, 0
        if len(self._windows) >= 1 << 13:  # of addresses, perhaps, of which there are others every day
            self._windows.clear()
        self._windows[kind] = since, count + 1
        return count < self._burst, left_out


class Throttle(logging.Filter):
    """Lets 20 lines of each line of code through in 10 seconds; the next one counts those left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = RateLimit(20, seconds=10.0, clock=clock)

    def filter(self, record: logging.LogRecord) -> bool:
        admitted, left_out = self._limit.count((record.pathname, record.lineno))
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more lines of this kind were left out)"
            record.args = ()
        return admitted
