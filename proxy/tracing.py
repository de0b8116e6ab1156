"""The log, as text or as JSON, and the spans of requests, by OpenTelemetry where it is installed and wanted.

Without OpenTelemetry the client's own `traceparent` reaches the instances, as any other header does. With it
they get the proxy's, so that their spans lie below the span of the call that caused them.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from .http import Headers
from .membership.instance import ROLE_NAMES, Instance, Role
from .metrics import CURRENT, EndOfCall, RequestRecord, RequestSpan

# For one batch of spans, retries included: the proxy's stop may wait so long for a collector that is gone.
_EXPORT_SECONDS = 2.0


class NoTracing(Exception):
    """Spans are wanted, and OpenTelemetry is not installed."""


class Spans:
    """Sends spans to the collector at `endpoint`, which takes OTLP over HTTP, such as
    http://127.0.0.1:4318/v1/traces. Raises NoTracing if OpenTelemetry is not installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise NoTracing(
                f"--otlp-traces-endpoint needs OpenTelemetry, and it is not installed ({error}): "
                "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
            ) from None
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "p2pkv-proxy")})
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("p2pkv_proxy")
        self.propagator = TraceContextTextMapPropagator()
        self.trace: Any = trace

    def request(self, endpoint: str, headers: Mapping[str, str]) -> RequestSpan:
        name = f"{'GET' if endpoint == '/v1/models' else 'POST'} {endpoint}"
        parent, kind = self.propagator.extract(headers), self.trace.SpanKind.SERVER
        return _Request(self, self.tracer.start_span(name, context=parent, kind=kind))

    def close(self) -> None:
        self._provider.shutdown()


@dataclass(frozen=True)
class _Request(RequestSpan):
    _spans: Spans
    _span: Any

    def call(self, instance: Instance, role: Role, headers: Headers) -> EndOfCall:
        trace = self._spans.trace
        span = self._spans.tracer.start_span(
            ROLE_NAMES[role],
            context=trace.set_span_in_context(self._span),
            kind=trace.SpanKind.CLIENT,
            attributes={"server.address": instance.ping.http_address},
        )
        self._spans.propagator.inject(headers, context=trace.set_span_in_context(span))

        def end(failed: str) -> None:
            if span.is_recording():
                if failed:
                    span.set_status(trace.StatusCode.ERROR, failed)
                span.end()

        return end

    def end(self, record: RequestRecord) -> None:
        self._span.set_attributes({f"p2pkv.{name}": value for name, value in record.known().items()})
        if record.outcome in ("failed", "broken", "shed"):
            self._span.set_status(self._spans.trace.StatusCode.ERROR, record.outcome)
        self._span.end()


# The log of the process.


def set_up_logging(level: str, form: str) -> None:
    """Sets up the log of the whole process; `form`: text or json."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])


class JsonLines(logging.Formatter):
    """One JSON object per line, with the ids of the request that the line is about, if there is one."""

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
