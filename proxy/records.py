"""One client's request from its arrival to its end: what the metrics count of it, what the log says of it.

Every request of the API has a record. The middleware makes it and closes it; who serves the request writes
into it what it learns.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from .errors import ProxyError
from .http import REQUEST_ID
from .metrics import Ended, Metrics, Pace
from .registry import Instance
from .routing import Choice
from .tracing import RequestSpan, Tracing, trace_id_of

logger = logging.getLogger(__name__)


_MAX_ID = 200
"""The most characters of the client's X-Request-Id that a log line repeats."""


@dataclass
class RequestRecord:
    """What is known of one client's request, from its arrival to its end.

    Attributes:
        endpoint: the path, as the metrics name it.
        client_id: the client's own X-Request-Id; "" if it sent none.
        unique: the id under which the proxy's log has it; "" before it has got that far.
        way: pair, alone or unpaired; "" before a place was found.
        status: of the answer; 0 while there is none.
        tries: how often instances were asked.
        first_token_after: seconds; None if no stream has begun.
        trace_id: of the trace that the client says it belongs to; "" if it says nothing.
        span: what is told of it to those who gather traces.
    """

    metrics: Metrics
    endpoint: str
    client_id: str = ""
    model: str | None = None
    unique: str = ""
    prefill: str = ""
    decode: str = ""
    way: str = ""
    status: int = 0
    tries: int = 0
    first_token_after: float | None = None
    outcome: Ended | None = None
    trace_id: str = ""
    span: RequestSpan = field(default_factory=RequestSpan)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.metrics.clock()

    @property
    def seconds(self) -> float:
        return self.metrics.clock() - self.began

    def begins(self, choice: Choice, unique: str) -> None:
        """These instances are asked now."""
        self.tries += 1
        self.unique = unique
        self.prefill = choice.prefill.ping.http_address if choice.prefill else ""
        self.decode = choice.decode.ping.http_address
        self.way = "pair" if choice.prefill else "alone" if choice.missed else "unpaired"
        self.metrics.paired(choice)

    def streams(self, head: bytes) -> Pace:
        """Its answer is a stream, and this is the start of it."""
        self.first_token_after = self.seconds
        self.metrics.first_token(self.decode, self.way, self.first_token_after)
        return self.metrics.pace(self.decode, head)

    def prefilled(self, instance: Instance, seconds: float) -> None:
        """P has done its part."""
        self.metrics.prefilled(instance.ping.http_address, seconds)

    def judged(self, instance: Instance, success: bool) -> None:
        """What became of one instance's part."""
        self.metrics.judged(instance, success)

    def end(self, outcome: Ended) -> None:
        """What became of it; the first that is said counts."""
        if self.outcome is None:
            self.outcome = outcome

    def ended_with(self, status: int) -> None:
        """An answer with this status, unless something else was said before."""
        self.status = self.status or status
        self.end("answered" if status < 400 else "refused" if status < 500 else "failed")

    def count(self) -> None:
        """To be called once, at its end."""
        outcome = self.outcome or "left"
        self.metrics.ended(self.endpoint, self.model, outcome)
        if self.decode:
            self.metrics.lasted(self.decode, outcome, self.seconds)

    def ids(self) -> dict[str, str]:
        """Those that are known."""
        return {
            name: value
            for name, value in (
                ("request_id", self.unique),
                ("client_request_id", self.client_id),
                ("trace_id", self.trace_id),
            )
            if value
        }

    def __str__(self) -> str:
        fields = {**self.ids(), **self.as_fields()}
        return " ".join(f"{name}={_word(value)}" for name, value in fields.items() if value not in (None, ""))

    def as_fields(self) -> dict[str, Any]:
        """For a structured line of the log."""
        return {
            "endpoint": self.endpoint,
            "model": self.metrics.model_label(self.model),
            "outcome": self.outcome,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "first_token": None if self.first_token_after is None else round(self.first_token_after, 4),
            "prefill": self.prefill,
            "decode": self.decode,
            "way": self.way,
            "tries": self.tries,
        }


def _word(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


RECORD = web.RequestKey("record", RequestRecord)
_current: ContextVar[RequestRecord | None] = ContextVar("record", default=None)


def recording(
    metrics: Metrics, endpoints: frozenset[str], tracing: Tracing, *, log_requests: bool
) -> Middleware:
    """The middleware that keeps a record of each request to one of `endpoints`, or to none that there is.

    Args:
        log_requests: write a line for each.
    """

    @web.middleware
    async def recorded(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        if resource is not None and path not in endpoints:
            return await handler(request)
        client_id = request.headers.get(REQUEST_ID, "")[:_MAX_ID]
        record = request[RECORD] = RequestRecord(
            metrics,
            path,
            client_id,
            trace_id=trace_id_of(request.headers),
            span=tracing.request(path, request.headers),
        )
        before = _current.set(record)
        try:
            response = await handler(request)
            record.ended_with(response.status)
            return response
        except ProxyError as failure:
            record.status = failure.status
            if failure.status == 503 and not record.tries:
                record.end("shed")
            record.ended_with(failure.status)
            raise
        except web.HTTPException as error:
            record.ended_with(error.status)
            raise
        except (asyncio.CancelledError, ConnectionError):
            record.end("left")
            raise
        except Exception:
            record.ended_with(500)
            raise
        finally:
            record.count()
            record.span.end(record)
            if log_requests:
                logger.info("request ended: %s", record, extra={"request": record.as_fields()})
            _current.reset(before)

    return recorded


# The log.


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
        current = _current.get()
        if current is not None:
            line |= current.ids()
        line |= getattr(record, "request", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
