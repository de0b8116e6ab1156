"""What strangers can write into the log: little."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from aiohttp.http_exceptions import HttpProcessingError

_SILENCE_SECONDS = 10.0


class Garbage(logging.Filter):
    """For aiohttp's server: what is no HTTP makes one line in ten seconds, and not a traceback each time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next = float("-inf")
        self._seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; it may be another one by then."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._seen += 1
        if self._clock() < self._next:
            return False
        self._next = self._clock() + _SILENCE_SECONDS
        record.levelno, record.levelname, record.exc_info, record.exc_text = (
            logging.WARNING,
            "WARNING",
            None,
            None,
        )
        why = " ".join(error.message.split())[:200]
        record.msg, record.args = "something that is no HTTP request came (%d so far): %s", (self._seen, why)
        return True
