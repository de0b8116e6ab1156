"""The metrics as Prometheus reads them: of this process, or of several workers as if they were one."""

from __future__ import annotations

import operator
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from p2pkv import __version__

from .limits import RequestCounters
from .membership.instance import STATES, WORST_FIRST, Instance
from .metrics import Held, Metrics

Family = tuple[str, str, str, Sequence[tuple[str, dict[str, str], float]]]
"""A metric's name, what it is, its type, and its samples: name, labels, value."""


class Exposition:
    """The /metrics page: what is measured, and what others count or hold, read when it is asked for. To the
    library it is one of its collectors."""

    def __init__(self, metrics: Metrics, held: Held) -> None:
        self._metrics = metrics
        self._held = held
        metrics.show(held)
        metrics.registry.register(self)

    def families(self) -> list[Family]:
        """What the page has, as other processes can read it."""
        self._metrics.forget()
        return [
            (each.name, each.documentation, each.type, [(s.name, s.labels, s.value) for s in each.samples])
            for each in self._metrics.registry.collect()
        ]

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("p2pkv_proxy_build", "The proxy itself.", {"version": __version__})
        counted, gauges = self._held.counted(), self._held.gauges()
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
        for name, key, what in _GAUGES:
            yield GaugeMetricFamily(f"p2pkv_proxy_{name}", what, value=gauges[key])
        instances = self._held.instances()
        for name, what, value_of in _OF_INSTANCES:
            family = GaugeMetricFamily(f"p2pkv_proxy_{name}", what, labels=["address", "role", "rank"])
            for each in instances:
                if (value := value_of(self._held, each)) is not None:
                    family.add_metric([each.ping.http_address, each.role, str(each.ping.dp_rank)], value)
            yield family
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
        for name, gaps in self._metrics.gaps.items():
            between.add_metric([name], gaps.buckets(), gaps.total)
            events.add_metric([name], gaps.events)
        yield from (between, events)


def growing(families: Iterable[Family]) -> list[Family]:
    """Those that only grow, for as long as their process runs."""
    return [each for each in families if each[2] in ("counter", "histogram")]


def page(accept: str, parts: Sequence[Sequence[Family]]) -> tuple[bytes, str]:
    """The page of all workers that these families are from, and its content type: in the format that
    `accept`, a header, asks for."""
    encode, kind = choose_encoder(accept)
    return encode(_Merged(parts)), kind


_STATE = "p2pkv_proxy_instance_state"
"""Internal gauge: the index of an instance's state in WORST_FIRST, merged over workers by minimum. /metrics
shows the number of instances in each state instead."""
# Merged over workers by maximum, not summed: every worker reports the same thing.
_LARGEST = (
    "p2pkv_proxy_breaker_open",
    "p2pkv_proxy_claims_refused_total",
    "p2pkv_proxy_instance_queued_prefill_seconds",
    "p2pkv_proxy_instance_reported_running",
    "p2pkv_proxy_instance_reported_waiting",
    "p2pkv_proxy_instance_reported_queued_tokens",
    "p2pkv_proxy_instance_reported_answers",
    "p2pkv_proxy_resume_bytes_largest",
    "p2pkv_proxy_build_info",
    "process_max_fds",
)
_SMALLEST = (_STATE, "_created", "process_start_time_seconds")


@dataclass(frozen=True)
class _Merged(Collector):
    """For Prometheus: what several workers have, as if they were one."""

    parts: Sequence[Sequence[Family]]

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for name, what, kind, samples in (family for part in self.parts for family in part):
            metrics.setdefault(name, Metric(name, what, kind))
            mine = values.setdefault(name, {})
            for sample, labelled, value in samples:
                key = sample, tuple(labelled.items())
                add = max if sample in _LARGEST else min if sample.endswith(_SMALLEST) else operator.add
                mine[key] = add(mine[key], value) if key in mine else value
        for name, metric in metrics.items():
            for (sample, labels), value in values[name].items():
                metric.add_sample(sample, dict(labels), value)
            yield _by_state(metric) if name == _STATE else metric


def _by_state(instances: Metric) -> Metric:
    found = Tally((each.labels["role"], WORST_FIRST[int(each.value)]) for each in instances.samples)
    what = "Registered instances, by role and state."
    states = GaugeMetricFamily("p2pkv_proxy_instances", what, labels=["role", "state"])
    for labels in product(("P", "D", "both"), STATES):
        states.add_metric(labels, found[labels])
    return states


# The name for Prometheus, the holder's own name, and what it is.
_COUNTERS = (
    *((each.metadata["name"], each.name, each.metadata["what"])
      for each in fields(RequestCounters) if each.metadata),
    ("reconnected", "reconnected", "Requests sent once more because an idle connection had been closed."),
    ("claims_refused", "claims_refused", "Pings under an address that another live instance has."),
)  # fmt: skip
_GAUGES = (
    ("requests_running", "under_way", "Requests that have a place at an instance."),
    ("requests_waiting", "waiting", "Requests that wait for a place."),
    ("decode_alone_running", "alone", "Of those running, prompts that a decode instance computes alone."),
    ("body_bytes", "held_bytes", "Bytes of the bodies of all requests together."),
    ("resume_bytes", "resume_bytes", "Bytes held of streamed answers, so that others could go on with them."),
    ("resume_bytes_largest", "resume_bytes_largest", "Bytes so held of one answer, at most."),
    ("calls", "calls", "Calls to instances that are open."),
)  # fmt: skip


def _prefill_work(held: Held, instance: Instance, at: int) -> float | None:
    work = held.prefill_work(instance)
    return None if work is None else work[at]


def _reported(name: str, field: str, what: str) -> tuple[str, str, Callable[[Held, Instance], float | None]]:
    """A field of the Workload that an instance reports."""
    return (
        f"instance_reported_{name}",
        f"{what}, by an instance's own report.",
        lambda _, each: None if each.report is None else getattr(each.report.work, field),
    )


# The name of a gauge of each instance, what it is, and its value; None where there is none.
_OF_INSTANCES: tuple[tuple[str, str, Callable[[Held, Instance], float | None]], ...] = (
    ("instance_state", "", lambda held, each: WORST_FIRST.index(held.state_of(each))),
    ("instance_load", "Requests at an instance or on their way to it.", lambda _, each: each.load),
    ("breaker_open", "1 while an instance has a pause because its requests failed, else 0.",
     lambda _, each: not each.breaker.closed),
    ("instance_queued_prefill_seconds",
     "Of --placement auto: seconds until the prompts given to an instance are computed, as predicted; "
     "with --workers, and an instance that does not report its queue, those that one worker gave it.",
     lambda held, each: _prefill_work(held, each, 0)),
    ("instance_prefill_share",
     "Of --placement auto: the share of an instance's time that prompts take, now and lately.",
     lambda held, each: _prefill_work(held, each, 1)),
    _reported("running", "running", "Requests that run"),
    _reported("waiting", "waiting", "Requests that wait"),
    _reported("queued_tokens", "tokens",
              "Prompt tokens that are not computed yet, of requests that run or wait"),
    _reported("answers", "answers", "Requests whose answers are decoded there, begun or not"),
)  # fmt: skip
