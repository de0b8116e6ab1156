"""The log of the process: text, or JSON with the ids of the request that a line is about."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from p2pkv.log import RateLimit

from .metrics import CURRENT

# Between two log lines about what is no HTTP request.
_GARBAGE_SECONDS = 10.0


def set_up_logging(level: str, form: str) -> None:
    """For the whole process; `form` is text or json."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("aiohttp.server").addFilter(BadRequestFilter())


class JsonLines(logging.Formatter):
    """One JSON object a line, with the ids of the request that it is about, if it is about one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        current = CURRENT.get()
        if current is not None:
            line |= current.ids()
        line |= getattr(record, "request", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class BadRequestFilter(logging.Filter):
    """For aiohttp's server: what is no HTTP makes one line in ten seconds, and not a traceback each time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._limit = RateLimit(seconds=_GARBAGE_SECONDS, clock=clock)
        self._seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; it may be another one by then."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._seen += 1
        if not self._limit.admits():
            return False
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.exc_info = record.exc_text = None
        why = " ".join(error.message.split())[:200]
        record.msg, record.args = "something that is no HTTP request came (%d so far): %s", (self._seen, why)
        return True
