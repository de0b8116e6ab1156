"""What the proxy measures of requests and instances, for Prometheus and the dashboard.

Nothing is counted twice: what happens to single requests is measured here, and what others count or hold
anyway (`RequestCounters`, places, instances) is read from them when a page is asked for.

Labels are bounded: endpoints are the proxy's own, models only those that instances have registered, and an
instance's series end some time after it left. Its label is `address`: Prometheus's `instance` is the proxy.
"""

import asyncio
import re
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

import prometheus_client as prometheus
from aiohttp import web

from .http import Headers
from .membership.instance import Instance, Role
from .placement import Prediction
from .routing import Choice

RequestEnd = Literal["answered", "refused", "shed", "failed", "broken", "left"]
"""How a request ended: answered; refused for the client's own mistake (4xx); turned away by the proxy, which
took on no more (503); failed before its first byte; broken off after it; or its client left."""
OUTCOMES: tuple[RequestEnd, ...] = get_args(RequestEnd)
FAILURES: tuple[RequestEnd, ...] = ("failed", "broken")

# The most models with series of their own; the others share one.
_MAX_MODELS = 200
_OTHER_MODEL, _NO_MODEL = "other", "unnamed"
# How long an instance's series outlive it, so that its last numbers are scraped.
_FORGET_SECONDS = 600.0

_FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_ERROR_BUCKETS = (0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# The dashboard's quantiles are those of so many first tokens, the latest.
_RECENT = 4096
_RECENT_SECONDS = 60.0
# The dashboard's history: five minutes.
SAMPLE_SECONDS = 2.0
_SAMPLES = 150
# The most pairs that are counted.
_MAX_PAIRS = 4096


class TokenGaps:
    """Seconds between the pieces of one instance's streamed answers, and their number of events. Each piece
    counts: the library's own histogram, which locks, would be a tenth of all the work."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_GAP_BUCKETS) + 1)
        self.total = 0.0
        self.events = 0

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each bucket counts all smaller gaps, too."""
        return list(zip((*map(str, _GAP_BUCKETS), "+Inf"), accumulate(self.counts), strict=True))


class StreamTimer:
    """Measures one streamed answer, which begins with `head`, while it is relayed; `events`: so far."""

    def __init__(self, gaps: TokenGaps, clock: Callable[[], float], head: bytes) -> None:
        self._gaps = gaps
        self._clock = clock
        self._last = clock()
        self.events = head.count(b"data:")
        gaps.events += self.events

    def chunk_arrived(self, chunk: bytes) -> None:
        """These bytes have come from the instance."""
        now, gaps, events = self._clock(), self._gaps, chunk.count(b"data:")
        seconds = now - self._last
        gaps.counts[bisect_left(_GAP_BUCKETS, seconds)] += 1
        gaps.total += seconds
        gaps.events += events
        self.events += events
        self._last = now


class Sample(NamedTuple):
    """Totals at one moment."""

    at: float
    ended: int
    failed: int
    events: int
    running: int
    waiting: int
    first_token: float | None


class Metrics:
    """All that is measured of one proxy. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._instances: Callable[[], Iterable[Instance]] = tuple
        self.began = clock()
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        self.writing = asyncio.Lock()
        """Held while a thread writes a page of /metrics."""
        counter = partial(prometheus.Counter, namespace="p2pkv_proxy", registry=self.registry)
        histogram = partial(prometheus.Histogram, namespace="p2pkv_proxy", registry=self.registry)
        # fmt: off
        self._requests = counter("requests", "Requests that have ended, by how they ended.",
            ["endpoint", "model", "outcome"])
        self._first_token = histogram("time_to_first_token_seconds",
            "From a streamed request's arrival to the first token of its answer; `way` is pair, prefill (the "
            "same, and the token came from the prefill instance, whose address this is), alone (no prefill "
            "instance could help) or unpaired (none was wanted).",
            ["address", "way"], buckets=_FIRST_TOKEN_BUCKETS)
        self._duration = histogram("request_seconds",
            "From a request's arrival to its end, by the last decode instance that had it.",
            ["address", "outcome"], buckets=_DURATION_BUCKETS)
        self._prefill = histogram("prefill_seconds",
            "How long a prefill instance took for its part of a request, if it succeeded.",
            ["address"], buckets=_FIRST_TOKEN_BUCKETS)
        self._parts = counter("instance_requests",
            "What became of requests at single instances, retries included. A decode instance's `ok` is its "
            "first token; an answer that breaks off later counts as `failed`, too.",
            ["address", "role", "outcome"])
        self._errors = histogram("first_token_prediction_error",
            "With --placement auto: by how much the predicted time to the first token missed the time that "
            "passed, as a share of that; `way` is whole (one instance did all) or pair.",
            ["way"], buckets=_ERROR_BUCKETS)
        self._tenants = counter("tenant_requests_ended", "Requests that have ended, by tenant and by how.",
            ["tenant", "outcome"])
        self._tenant_first_token = histogram("tenant_time_to_first_token_seconds",
            "From a streamed request's arrival to the first token, by tenant.",
            ["tenant"], buckets=_FIRST_TOKEN_BUCKETS)
        # fmt: on
        self._by_address = (self._first_token, self._duration, self._prefill, self._parts)
        self._series: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self.gaps: defaultdict[str, TokenGaps] = defaultdict(TokenGaps)
        """By address of the instance."""
        self._models: set[str] = set()
        self._gone: dict[str, float] = {}
        """When an instance with series, or a model, was first seen to be registered no longer."""
        self.totals: Tally[str] = Tally()
        """Ended requests by outcome, for the dashboard."""
        self.pairs: Tally[tuple[str, str]] = Tally()
        """How many requests each pair of P and D has been given."""
        self._latest: deque[tuple[float, float, bool]] = deque(maxlen=_RECENT)
        self.history: deque[Sample] = deque(maxlen=_SAMPLES)
        self._forgot = self.began

    def follow(self, instances: Callable[[], Iterable[Instance]]) -> None:
        """Sets where the registered instances are read: only they, and their models, keep series."""
        self._instances = instances

    # One request.

    def _one(self, metric: Any, *labels: str) -> Any:
        """One series of a metric; finding it in the library would take longer than counting."""
        try:
            return self._series[metric, labels]
        except KeyError:
            return self._series.setdefault((metric, labels), metric.labels(*labels))

    def ended(self, record: "RequestRecord", outcome: RequestEnd) -> None:
        self._one(self._requests, record.endpoint, self.model_label(record.model), outcome).inc()
        self.totals[outcome] += 1
        if record.tenant:
            self._one(self._tenants, record.tenant, outcome).inc()
        if record.decode:
            self._one(self._duration, record.decode, outcome).observe(record.seconds)

    def model_label(self, model: str | None) -> str:
        """Its name if an instance has registered it, now or before: clients cannot create series."""
        if not model:
            return _NO_MODEL
        if model not in self._models:
            known = any(model in each.names for each in self._instances())
            if len(self._models) >= _MAX_MODELS or not known:
                return _OTHER_MODEL
            self._models.add(model)
        return model

    def first_token(self, instance: str, way: str, seconds: float, tenant: str = "") -> None:
        self._one(self._first_token, instance, way).observe(seconds)
        if tenant:
            self._one(self._tenant_first_token, tenant).observe(seconds)
        self._latest.append((self.clock(), seconds, way == "prefill"))

    def prefilled(self, instance: Instance, seconds: float) -> None:
        """P has done its part of a request."""
        self._one(self._prefill, instance.ping.http_address).observe(seconds)

    def predicted(self, prediction: Prediction, seen: float) -> None:
        """A first token has come after `seen` seconds, for which this was predicted."""
        self._one(self._errors, prediction.way).observe(prediction.error(seen))

    def record_outcome(self, instance: Instance, success: bool) -> None:
        """What became of one instance's part of a request."""
        outcome = "ok" if success else "failed"
        self._one(self._parts, instance.ping.http_address, instance.role, outcome).inc()

    def paired(self, choice: Choice) -> None:
        """Counts a request for its pair, if P and D serve it."""
        if choice.prefill is None:
            return
        pair = choice.prefill.ping.http_address, choice.decode.ping.http_address
        if pair in self.pairs or len(self.pairs) < _MAX_PAIRS:
            self.pairs[pair] += 1

    # What the dashboard shows.

    @property
    def events(self) -> int:
        """Events of streamed answers so far: mostly one for each token."""
        return sum(gaps.events for gaps in self.gaps.values())

    def recent(self, *, by_prefill: bool | None = None) -> list[float]:
        """Seconds to the first token in the last minute; `by_prefill`: P's tokens only, or (False) D's."""
        now, wanted = self.clock(), (True, False) if by_prefill is None else (by_prefill,)
        return [seconds for at, seconds, by in self._latest if now - at <= _RECENT_SECONDS and by in wanted]

    def sample(self, running: int, waiting: int) -> None:
        """Adds a point to the history, every SAMPLE_SECONDS; `running`: requests that have a place."""
        if self.clock() - self._forgot >= _FORGET_SECONDS / 10:
            self.forget()  # for proxies whose /metrics nobody reads
        self.history.append(
            Sample(
                at=self.clock(),
                ended=self.totals.total(),
                failed=sum(self.totals[outcome] for outcome in FAILURES),
                events=self.events,
                running=running,
                waiting=waiting,
                first_token=quantiles(self.recent(), 0.5)[0],
            )
        )

    # Instances and models that have left.

    def forget(self) -> None:
        """Ends the series of instances, and of models, that have been gone for long."""
        now = self._forgot = self.clock()
        here = {name for each in self._instances() for name in (each.ping.http_address, *each.names)}
        self._gone = {name: self._gone.get(name, now) for name in (self._addresses() | self._models) - here}
        over = {name for name, since in self._gone.items() if now - since >= _FORGET_SECONDS}
        # Not `remove_by_labels`, which searches all series each time: with 1,000 instances for seconds.
        at = dict.fromkeys(self._by_address, 0) | {self._requests: 1}
        ended = [key for key in self._series if key[0] in at and key[1][at[key[0]]] in over]
        self._models -= over
        for metric, labels in ended:
            del self._series[metric, labels]
            metric.remove(*labels)
        for name in over:
            del self._gone[name]
            self.gaps.pop(name, None)
        for pair in [pair for pair in self.pairs if over.intersection(pair)]:
            del self.pairs[pair]

    def _addresses(self) -> set[str]:
        """The addresses of the instances that have series."""
        named = {labels[0] for metric, labels in self._series if metric in self._by_address}
        return named.union(self.gaps, *self.pairs)


def quantiles(values: Iterable[float], *shares: float) -> list[float | None]:
    """For each share the value below which so many of all values lie; None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return [None for _ in shares]
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]


# One request.

TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id_of(headers: Mapping[str, str]) -> str:
    """The id of the trace that a client's request belongs to; "" if it names none."""
    match = _TRACEPARENT.fullmatch(headers.get(TRACEPARENT, ""))
    return match[1] if match else ""


EndOfCall = Callable[[str], None]
"""To be called when a call to an instance ends, with why it failed, or "". Only the first time counts."""


class RequestSpan:
    """The span of one client's request. This class records nothing."""

    def call(self, instance: Instance, role: Role, headers: Headers) -> EndOfCall:
        """A call begins; adds to its `headers` what names its parent span."""
        return lambda failed: None

    def end(self, record: "RequestRecord") -> None:
        """The request has ended."""


@dataclass
class RequestRecord:
    """What is known of one client's request, from its arrival to its end; "" stands for what is not known.

    Attributes:
        unique: the id of its latest attempt, which log lines have.
        way: pair, alone or unpaired.
        status: of the answer; 0 while there is none.
        first_token_after: seconds; None if no stream has begun.
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
    outcome: RequestEnd | None = None
    trace_id: str = ""
    tenant: str = ""
    span: RequestSpan = field(default_factory=RequestSpan)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.metrics.clock()

    @property
    def seconds(self) -> float:
        return self.metrics.clock() - self.began

    def begins(self, choice: Choice, unique: str) -> None:
        self.tries += 1
        self.unique = unique
        self.prefill = choice.prefill.ping.http_address if choice.prefill else ""
        self.decode = choice.decode.ping.http_address
        self.way = "pair" if choice.prefill else "alone" if choice.prefill_unavailable else "unpaired"
        self.metrics.paired(choice)

    def streams(self, head: bytes, *, again: bool = False, by_prefill: bool = False) -> StreamTimer:
        """Its answer is a stream; `head`: its start, or (`again`) its next part's; `by_prefill`: P's."""
        instance, way = (self.prefill, "prefill") if by_prefill else (self.decode, self.way)
        if not again:
            self.first_token_after = self.seconds
            self.metrics.first_token(instance, way, self.first_token_after, self.tenant)
        return StreamTimer(self.metrics.gaps[instance], self.metrics.clock, head)

    def end(self, outcome: RequestEnd) -> None:
        """How the request ended; only the first call counts."""
        if self.outcome is None:
            self.outcome = outcome

    def ended_with(self, status: int) -> None:
        """The request ended with an answer of this status, unless `end` was called before."""
        self.status = self.status or status
        self.end("answered" if status < 400 else "refused" if status < 500 else "failed")

    def ids(self) -> dict[str, str]:
        """Those of its ids that are known."""
        ids = {"request_id": self.unique, "client_request_id": self.client_id, "trace_id": self.trace_id}
        return {name: value for name, value in ids.items() if value}

    def known(self) -> dict[str, Any]:
        """All that is known of the request, for the log and for spans."""
        fields = self.ids() | self.as_fields()
        return {name: value for name, value in fields.items() if value not in (None, "")}

    def __str__(self) -> str:
        return " ".join(f"{name}={_quoted(value)}" for name, value in self.known().items())

    def as_fields(self) -> dict[str, Any]:
        """For a JSON line of the log."""
        return {
            "endpoint": self.endpoint,
            "model": self.metrics.model_label(self.model),
            **({"tenant": self.tenant} if self.tenant else {}),
            "outcome": self.outcome,
            "status": self.status,
            "seconds": round(self.seconds, 4),
            "first_token": None if self.first_token_after is None else round(self.first_token_after, 4),
            "prefill": self.prefill,
            "decode": self.decode,
            "way": self.way,
            "tries": self.tries,
        }


def _quoted(value: Any) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


RECORD = web.RequestKey("record", RequestRecord)
CURRENT: ContextVar[RequestRecord | None] = ContextVar("record", default=None)
"""The request that this task serves, for the lines of the log."""
