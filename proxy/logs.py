"""The log of the process: text, or JSON with the ids of the request that a line is about."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from .metrics import CURRENT


def set_up_logging(level: str, form: str, process: str = "") -> None:
    """For the whole process, which has a name if it is one of several; `form` is text or json."""
    handler = logging.StreamHandler()
    who = f"{process}: " if process else ""
    text = logging.Formatter(f"%(asctime)s %(levelname)s {who}%(name)s: %(message)s")
    handler.setFormatter(JsonLines(process) if form == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])


class JsonLines(logging.Formatter):
    """One JSON object a line, with the ids of the request that it is about, if it is about one."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._process,
            "message": record.getMessage(),
        }
        current = CURRENT.get()
        if current is not None:
            line |= current.ids()
        line |= getattr(record, "request", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
