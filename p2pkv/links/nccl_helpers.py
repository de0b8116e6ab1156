"""Threads for the calls that may never return, so that the owner thread never makes them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_STUCK = 16


class Helpers:
    """Runs work on threads of its own. One that outlives its time is left behind, counted, never joined.

    Threads are daemons: a process ends with stuck ones in it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, float] = {}

    def run(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Begin `work`; it counts as stuck once it has taken longer than `seconds`."""

        def main() -> None:
            try:
                work()
            except Exception:
                logger.exception("an error in the helper thread %s", name)
            finally:
                with self._lock:
                    late = time.monotonic() > self._running.pop(thread)
                if late:
                    logger.info("%s, which had been given up, has returned", name)

        thread = threading.Thread(target=main, name=name, daemon=True)
        with self._lock:
            self._running[thread] = time.monotonic() + seconds
        thread.start()

    @property
    def busy(self) -> int:
        """Threads that have not returned."""
        with self._lock:
            return len(self._running)

    @property
    def stuck(self) -> int:
        """Threads among them whose time is over."""
        now = time.monotonic()
        with self._lock:
            return sum(1 for end in self._running.values() if now > end)

    def join(self, seconds: float) -> None:
        """Wait for all threads, `seconds` at most."""
        end = time.monotonic() + seconds
        with self._lock:
            threads = list(self._running)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
