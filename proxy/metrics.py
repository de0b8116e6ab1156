"""What the proxy measures of requests and instances, and how Prometheus and the dashboard read it.

Each thing has one holder. What happens to single requests is measured here. What others count or hold anyway
(`RequestCounters`, places, instances) is read from them when somebody asks, and not counted again.

Labels are bounded: endpoints are ours, models are those that instances have registered, and an instance's
series end some time after it has left. Instances are told apart by `address`: `instance` is Prometheus's own
label, and means the proxy.
"""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import prometheus_client as prometheus
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder

from p2pkv import __version__

from .instances import WORST_FIRST
from .registry import Instance
from .routing import Choice

Ended = Literal["answered", "refused", "shed", "failed", "broken", "left"]
"""How a request ended: answered; refused for the client's own mistake (4xx); turned away by the proxy, which
took on no more (503); failed before its first byte; broken off after it; or its client left."""
OUTCOMES: tuple[Ended, ...] = ("answered", "refused", "shed", "failed", "broken", "left")
FAILURES: tuple[Ended, ...] = ("failed", "broken")

STATES = ("ready", "starting", "silent", "paused", "engine_paused", "draining", "drained")
"""Of an instance, see `state_of`."""

# How many models have series of their own; the others share one.
_MAX_MODELS = 200
_OTHER_MODEL, _NO_MODEL = "other", "unnamed"
# For so long an instance's series outlive it, so that its last numbers are scraped.
_FORGET_SECONDS = 600.0

_FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# Of these many first tokens, the latest, the dashboard's quantiles are made.
_RECENT = 4096
_RECENT_SECONDS = 60.0
# The dashboard's history: five minutes.
SAMPLE_SECONDS = 2.0
_SAMPLES = 150
# The lists of pairs that have worked together.
_MAX_PAIRS = 4096


Family = tuple[str, str, str, Sequence[tuple[str, dict[str, str], float]]]
"""A metric's name, what it is, its type, and its samples: name, labels, value."""


class Held(Protocol):
    """What others count or hold, for the pages that show it."""

    def counted(self) -> dict[str, int]:
        """What has been counted since the start."""

    def gauges(self) -> dict[str, int]:
        """What is held now."""

    def instances(self) -> list[Instance]:
        """The living instances."""

    def state_of(self, instance: Instance) -> str:
        """One of STATES."""


class Gaps:
    """The time between the pieces of one instance's streamed answers. Its hot path runs once for each piece
    of every answer, where the library's own histogram, which locks, would be a tenth of all the work."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_GAP_BUCKETS) + 1)
        self.total = 0.0
        self.events = 0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_GAP_BUCKETS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: each holds all that is smaller, too."""
        seen, rows = 0, []
        for bound, count in zip((*_GAP_BUCKETS, float("inf")), self.counts, strict=True):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
        return rows


class Pace:
    """Measures one streamed answer while it is relayed."""

    def __init__(self, gaps: Gaps, clock: Callable[[], float], head: bytes) -> None:
        self._gaps = gaps
        self._clock = clock
        self._last = clock()
        gaps.events += head.count(b"data:")

    def beat(self, chunk: bytes) -> None:
        """These bytes have come from the instance."""
        now = self._clock()
        gaps = self._gaps
        gaps.add(now - self._last)
        gaps.events += chunk.count(b"data:")
        self._last = now


@dataclass
class Sample:
    """Totals at one moment."""

    at: float
    ended: int
    failed: int
    events: int
    running: int
    waiting: int
    first_token: float | None


class Metrics:
    """All that is measured of one proxy; `exposition` is its /metrics page.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began = clock()
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        self._requests = prometheus.Counter(
            "p2pkv_proxy_requests",
            "Requests that have ended, by how they ended.",
            ["endpoint", "model", "outcome"],
            registry=self.registry,
        )
        self._first_token = prometheus.Histogram(
            "p2pkv_proxy_time_to_first_token_seconds",
            "From a streamed request's arrival to the first token of the decode instance's answer; `way` is "
            "pair, alone (no prefill instance could help) or unpaired (none was wanted).",
            ["address", "way"],
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._duration = prometheus.Histogram(
            "p2pkv_proxy_request_seconds",
            "From a request's arrival to its end, by the decode instance that had it last.",
            ["address", "outcome"],
            buckets=_DURATION_BUCKETS,
            registry=self.registry,
        )
        self._prefill = prometheus.Histogram(
            "p2pkv_proxy_prefill_seconds",
            "How long a prefill instance took for its part of a request, if it succeeded.",
            ["address"],
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._parts = prometheus.Counter(
            "p2pkv_proxy_instance_requests",
            "What became of requests at single instances, retries included. A decode instance's `ok` is its "
            "first token; an answer that breaks off later counts as `failed`, too.",
            ["address", "role", "outcome"],
            registry=self.registry,
        )
        self._series: dict[tuple[Any, tuple[str, ...]], Any] = {}
        self._gaps: dict[str, Gaps] = {}
        self._models: set[str] = set()
        self._gone: dict[str, float] = {}
        """Instances that have series and are not registered: when that was seen first."""
        self.totals: Tally[str] = Tally()
        """By outcome; the dashboard's view of `requests`."""
        self.pairs: Tally[tuple[str, str]] = Tally()
        """How often each P and D have been given a request together."""
        self._latest: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self.history: deque[Sample] = deque(maxlen=_SAMPLES)
        self._held: Held | None = None
        self._forgot = self.began

    def show(self, held: Held) -> None:
        """From now on `exposition` has what `held` knows, too."""
        self._held = held
        self.registry.register(_Collected(self, held))

    def families(self) -> list[Family]:
        """What the page has, as other processes can read it."""
        self.forget()
        return [
            (each.name, each.documentation, each.type, [(s.name, s.labels, s.value) for s in each.samples])
            for each in self.registry.collect()
        ]

    def exposition(self, accept: str, parts: Sequence[Sequence[Family]] = ()) -> tuple[bytes, str]:
        """The page and its content type, in the format that `accept`, a header, asks for; with `parts`, of
        the workers that these are from."""
        encode, kind = choose_encoder(accept)
        return encode(_Merged(parts or [self.families()])), kind

    # One request.

    def _one(self, metric: Any, *labels: str) -> Any:
        """One series of a metric. The library takes longer to find it than to count."""
        key = (metric, labels)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = metric.labels(*labels)
        return series

    def ended(self, endpoint: str, model: str | None, outcome: Ended) -> None:
        self._one(self._requests, endpoint, self.model_label(model), outcome).inc()
        self.totals[outcome] += 1

    def model_label(self, model: str | None) -> str:
        """Its name if an instance has registered it, now or before; so that clients cannot make series."""
        if not model:
            return _NO_MODEL
        if model not in self._models:
            known = self._held is not None and any(model in each.names for each in self._held.instances())
            if not known or len(self._models) >= _MAX_MODELS:
                return _OTHER_MODEL
            self._models.add(model)
        return model

    def first_token(self, instance: str, way: str, seconds: float) -> None:
        self._one(self._first_token, instance, way).observe(seconds)
        self._latest.append((self.clock(), seconds))

    def lasted(self, instance: str, outcome: Ended, seconds: float) -> None:
        self._one(self._duration, instance, outcome).observe(seconds)

    def prefilled(self, instance: str, seconds: float) -> None:
        self._one(self._prefill, instance).observe(seconds)

    def judged(self, instance: Instance, success: bool) -> None:
        outcome = "ok" if success else "failed"
        self._one(self._parts, instance.ping.http_address, instance.role, outcome).inc()

    def paired(self, choice: Choice) -> None:
        """A request has been given to both."""
        if choice.prefill is None:
            return
        pair = choice.prefill.ping.http_address, choice.decode.ping.http_address
        if pair in self.pairs or len(self.pairs) < _MAX_PAIRS:
            self.pairs[pair] += 1

    def pace(self, instance: str, head: bytes) -> Pace:
        """For one streamed answer of this instance, which has begun with `head`."""
        return Pace(self.gaps(instance), self.clock, head)

    def gaps(self, instance: str) -> Gaps:
        return self._gaps.setdefault(instance, Gaps())

    def all_gaps(self) -> Mapping[str, Gaps]:
        return self._gaps

    # What the dashboard shows.

    @property
    def events(self) -> int:
        """Events of streamed answers so far: a token each, or nearly so."""
        return sum(gaps.events for gaps in self._gaps.values())

    def recent(self) -> list[float]:
        """The latest times to the first token, within a minute."""
        now = self.clock()
        return [seconds for at, seconds in self._latest if now - at <= _RECENT_SECONDS]

    def quantiles(self, *shares: float) -> list[float | None]:
        """Of these; None where there were none."""
        return quantiles(self.recent(), *shares)

    def sample(self) -> None:
        """One point of the history; to be called every SAMPLE_SECONDS."""
        if self.clock() - self._forgot >= _FORGET_SECONDS / 10:
            self.forget()  # where nobody scrapes
        gauges = self._held.gauges() if self._held is not None else {}
        self.history.append(
            Sample(
                at=self.clock(),
                ended=self.totals.total(),
                failed=sum(self.totals[outcome] for outcome in FAILURES),
                events=self.events,
                running=gauges.get("under_way", 0),
                waiting=gauges.get("waiting", 0),
                first_token=self.quantiles(0.5)[0],
            )
        )

    # Instances that have left.

    def forget(self) -> None:
        """Ends the series of instances that have been gone for long."""
        now = self._forgot = self.clock()
        if self._held is None:
            return
        here = {instance.ping.http_address for instance in self._held.instances()}
        known = self._addresses()
        self._gone = {name: self._gone.get(name, now) for name in known - here}
        over = {name for name, since in self._gone.items() if now - since >= _FORGET_SECONDS}
        if over:
            self._series.clear()
        for name in over:
            del self._gone[name]
            self._gaps.pop(name, None)
            for metric in (self._first_token, self._duration, self._prefill, self._parts):
                metric.remove_by_labels({"address": name})
        for pair in [pair for pair in self.pairs if over.intersection(pair)]:
            del self.pairs[pair]

    def _addresses(self) -> set[str]:
        """Of the instances that have series."""
        labelled = (self._first_token, self._duration, self._prefill, self._parts)
        samples = (sample for metric in labelled for part in metric.collect() for sample in part.samples)
        named = {sample.labels["address"] for sample in samples} | set(self._gaps)
        return named | {name for pair in self.pairs for name in pair}


def growing(families: Iterable[Family]) -> list[Family]:
    """Those that only grow, for as long as their process runs."""
    return [each for each in families if each[2] in ("counter", "histogram")]


def quantiles(values: Iterable[float], *shares: float) -> list[float | None]:
    """Of some values; None where there are none."""
    ordered = sorted(values)
    if not ordered:
        return [None for _ in shares]
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]


class _Collected:
    """For Prometheus: what others hold, read when it asks."""

    def __init__(self, metrics: Metrics, held: Held) -> None:
        self._metrics = metrics
        self._held = held

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("p2pkv_proxy_build", "The proxy itself.", {"version": __version__})
        yield from self._counters()
        yield from self._gauges()
        yield from self._instances()
        yield from self._streams()

    def _counters(self) -> Iterator[Metric]:
        counted = self._held.counted()
        shed = CounterMetricFamily(
            "p2pkv_proxy_shed",
            "Requests turned away with 503: too many waited or held memory (full), none had room in time "
            "(late), or decode instances may compute no more prompts alone (alone).",
            labels=["reason"],
        )
        for reason in ("full", "late", "alone"):
            shed.add_metric([reason], counted[f"refused_{reason}"])
        yield shed
        for name, key, what in _COUNTERS:
            yield CounterMetricFamily(f"p2pkv_proxy_{name}", what, value=counted[key])

    def _gauges(self) -> Iterator[Metric]:
        gauges = self._held.gauges()
        for name, key, what in _GAUGES:
            yield GaugeMetricFamily(f"p2pkv_proxy_{name}", what, value=gauges[key])

    def _instances(self) -> Iterator[Metric]:
        instances = self._held.instances()
        state = GaugeMetricFamily(_STATE, "", labels=["address", "role", "rank"])
        load = GaugeMetricFamily(
            "p2pkv_proxy_instance_load",
            "Requests at an instance or on their way to it.",
            labels=["address", "role", "rank"],
        )
        paused = GaugeMetricFamily(
            "p2pkv_proxy_breaker_open",
            "1 while an instance has a pause because its requests failed, else 0.",
            labels=["address", "role", "rank"],
        )
        for each in instances:
            labels = [each.ping.http_address, each.role, str(each.ping.dp_rank)]
            state.add_metric(labels, WORST_FIRST.index(self._held.state_of(each)))
            load.add_metric(labels, each.load)
            paused.add_metric(labels, not each.breaker.closed)
        yield state
        yield load
        yield paused

    def _streams(self) -> Iterator[Metric]:
        between = HistogramMetricFamily(
            "p2pkv_proxy_inter_token_seconds",
            "Between two pieces of a streamed answer as they come from the decode instance: mostly a token.",
            labels=["address"],
        )
        events = CounterMetricFamily(
            "p2pkv_proxy_stream_events",
            "Events of streamed answers: a token each, or nearly so.",
            labels=["address"],
        )
        for name, gaps in self._metrics.all_gaps().items():
            between.add_metric([name], gaps.buckets(), gaps.total)
            events.add_metric([name], gaps.events)
        yield between
        yield events


_STATE = "p2pkv_proxy_instance_state"
"""Internal gauge: the index of an instance's state in WORST_FIRST, merged over workers by minimum. /metrics
shows the number of instances in each state instead."""
# Merged over workers by maximum, not summed: every worker reports the same thing.
_LARGEST = (
    "p2pkv_proxy_breaker_open",
    "p2pkv_proxy_claims_refused_total",
    "p2pkv_proxy_build_info",
    "process_max_fds",
)
_SMALLEST = (_STATE, "_created", "process_start_time_seconds")


class _Merged(prometheus.CollectorRegistry):
    """For Prometheus: what several workers have, as if they were one."""

    def __init__(self, parts: Sequence[Sequence[Family]]) -> None:
        super().__init__()
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for name, what, kind, samples in (family for part in self._parts for family in part):
            metrics.setdefault(name, Metric(name, what, kind))
            mine = values.setdefault(name, {})
            for sample, labelled, value in samples:
                key = sample, tuple(labelled.items())
                mine[key] = _together(sample)(mine[key], value) if key in mine else value
        for name, metric in metrics.items():
            for (sample, labels), value in values[name].items():
                metric.add_sample(sample, dict(labels), value)
            yield _by_state(metric) if name == _STATE else metric


def _by_state(instances: Metric) -> Metric:
    """How many there are, from the state of each."""
    found = Tally((each.labels["role"], WORST_FIRST[int(each.value)]) for each in instances.samples)
    states = GaugeMetricFamily(
        "p2pkv_proxy_instances", "Registered instances, by role and state.", labels=["role", "state"]
    )
    for role in ("P", "D"):
        for state in STATES:
            states.add_metric([role, state], found[role, state])
    return states


def _together(sample: str) -> Callable[[float, float], float]:
    """How the values of two workers make one."""
    if sample in _LARGEST:
        return max
    return min if sample.endswith(_SMALLEST) else operator.add


# The name for Prometheus, the holder's own name, and what it is.
_COUNTERS = (
    ("admitted", "admitted", "Requests that got a place at an instance."),
    ("decode_alone", "alone", "Requests given to a decode instance because no prefill instance could help."),
    ("prefill_skipped", "spared", "Requests given to a decode instance alone: their prompts are short."),
    ("retries", "retried", "Second tries at another instance."),
    ("retries_refused", "retries_refused", "Failures not tried again: the budget of retries was spent."),
    ("reconnected", "reconnected", "Requests sent once more because an idle connection had been closed."),
    ("breaker_opened", "breakers_opened", "Pauses given to instances whose requests failed."),
    ("claims_refused", "claims_refused", "Pings under an address that another live instance has."),
    ("left_waiting", "left_waiting", "Requests whose client left while they waited for a place."),
    ("cut_off", "cut_off", "Requests that the proxy's own end ended."),
)  # fmt: skip
_GAUGES = (
    ("requests_running", "under_way", "Requests that have a place at an instance."),
    ("requests_waiting", "waiting", "Requests that wait for a place."),
    ("decode_alone_running", "alone", "Of those running, prompts that a decode instance computes alone."),
    ("body_bytes", "held_bytes", "Bytes of the bodies of all requests together."),
    ("calls", "calls", "Calls to instances that are open."),
)  # fmt: skip
