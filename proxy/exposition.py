"""GET /metrics, for Prometheus: what metrics.py measures, and what other parts of the proxy count or hold."""

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain, product
from types import SimpleNamespace

from aiohttp import web
from prometheus_client import core
from prometheus_client.exposition import choose_encoder

from p2pkv import __version__

from .first_token import REASONS
from .limits import RequestCounters
from .membership.instance import STATES, Instance
from .service import Proxy


async def metrics_page(proxy: Proxy, request: web.Request) -> web.Response:
    """GET /metrics. A thread writes one page at a time: with 1,000 instances it takes most of a second."""
    proxy.guard.look(request)
    proxy.metrics.forget()
    try:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
    except (TypeError, ValueError):  # of a version that is no number
        encode, kind = choose_encoder("")
    async with proxy.metrics.writing:
        read = tuple(Exposition(proxy).collect())  # in the loop, where all of it changes
        both = chain(proxy.metrics.registry.collect(), read)
        body = await asyncio.to_thread(encode, SimpleNamespace(collect=lambda: both))
    return web.Response(body=body, headers={"Content-Type": kind})


@dataclass(eq=False)
class Exposition:
    """A collector, for Prometheus's library, of what other parts of a proxy count and hold."""

    _proxy: Proxy

    def collect(self) -> Iterator[core.Metric]:
        if self._proxy.tenants is not None:
            yield from self._proxy.tenants.collect()
        yield core.InfoMetricFamily("p2pkv_proxy_build", "The proxy's version.", {"version": __version__})
        counted, gauges = self._proxy.counted(), self._proxy.gauges()
        for name, key, reasons, what in _BY_REASON:
            several = core.CounterMetricFamily(f"p2pkv_proxy_{name}", what, labels=["reason"])
            for reason in reasons:
                several.add_metric([reason], counted[f"{key}_{reason}"])
            yield several
        for name, key, what in _COUNTERS:
            yield core.CounterMetricFamily(f"p2pkv_proxy_{name}", what, value=counted[key])
        for name, key, what in _GAUGES:
            yield core.GaugeMetricFamily(f"p2pkv_proxy_{name}", what, value=gauges[key])
        instances = self._proxy.instances()
        found = Tally[tuple[str, str]]((each.role, self._proxy.state_of(each)) for each in instances)
        what = "Registered instances, by role and state."
        states = core.GaugeMetricFamily("p2pkv_proxy_instances", what, labels=["role", "state"])
        for labels in product(("P", "D", "both"), STATES):
            states.add_metric(labels, found[labels])
        yield states
        for name, what, value_of in _OF_INSTANCES:
            family = core.GaugeMetricFamily(f"p2pkv_proxy_{name}", what, labels=["address", "role", "rank"])
            for each in instances:
                if (value := value_of(self._proxy, each)) is not None:
                    family.add_metric([each.ping.http_address, each.role, str(each.ping.dp_rank)], value)
            yield family
        what = "From one piece of a streamed answer to the next, as its instance sends them: mostly a token."
        between = core.HistogramMetricFamily("p2pkv_proxy_inter_token_seconds", what, labels=["address"])
        what = "Events of streamed answers: mostly one for each token."
        events = core.CounterMetricFamily("p2pkv_proxy_stream_events", what, labels=["address"])
        for name, gaps in self._proxy.metrics.gaps.items():
            between.add_metric([name], gaps.buckets(), gaps.total)
            events.add_metric([name], gaps.events)
        yield from (between, events)


# The name for Prometheus, the name in the proxy's own counters (with reasons: its prefix), and what it is.
_BY_REASON: tuple[tuple[str, str, Iterable[str], str], ...] = (
    ("shed", "refused", ("full", "late", "alone"),
     "Requests turned away with 503: too many waited or held memory (full), no instance had room in "
     "time (late), or decode instances may compute no more prompts alone (alone)."),
    ("first_tokens_from_decode", "first_token", REASONS,
     "Answers of a prefill instance (P) and a decode instance (D) whose first token came from D, by why: "
     f"{'; '.join(map(': '.join, REASONS.items()))}."),
)  # fmt: skip
_COUNTERS = (
    *((each.metadata["name"] or each.name, each.name, each.metadata["what"])
      for each in fields(RequestCounters) if each.metadata),
    ("reconnected", "reconnected", "Requests sent again because an instance closed an idle connection."),
    ("claims_refused", "claims_refused", "Pings refused: another live instance has their address."),
)  # fmt: skip
_GAUGES = (
    ("requests_running", "under_way", "Requests that have a place at an instance."),
    ("requests_waiting", "waiting", "Requests that wait for a place."),
    ("decode_alone_running", "decode_alone",
     "Requests running whose prompts a decode instance computes alone."),
    ("body_bytes", "held_bytes", "Bytes of the bodies of all requests together."),
    ("resume_bytes", "resume_bytes", "Bytes held of streamed answers, so that others could go on with them."),
    ("resume_bytes_largest", "resume_bytes_largest", "The largest part of resume_bytes that one answer has."),
    ("calls", "calls", "Calls to instances that are open."),
)  # fmt: skip


def _reported(name: str, field: str, what: str) -> tuple[str, str, Callable[[Proxy, Instance], float | None]]:
    """A field of the Workload that an instance reports."""
    return (
        f"instance_reported_{name}",
        f"{what}, by an instance's own report.",
        lambda _, each: None if each.report is None else getattr(each.report.work, field),
    )


# The name of a gauge of each instance, what it is, and its value; None where there is none.
_OF_INSTANCES: tuple[tuple[str, str, Callable[[Proxy, Instance], float | None]], ...] = (
    ("instance_load", "Requests at an instance or on their way to it.", lambda _, each: each.load),
    ("breaker_open", "1 while an instance has a pause because its requests failed, else 0.",
     lambda _, each: not each.breaker.closed),
    ("instance_queued_prefill_seconds",
     "With --placement auto: seconds until an instance has computed its prompts, as predicted; of an "
     "instance that does not report its queue, the prompts that this proxy gave it.",
     lambda proxy, each: proxy.prefill_work(each)[0]),
    ("instance_prefill_share",
     "With --placement auto: the share of an instance's time that prompts take, now and lately.",
     lambda proxy, each: proxy.prefill_work(each)[1]),
    _reported("running", "running", "Requests that run"),
    _reported("waiting", "waiting", "Requests that wait"),
    _reported("queued_tokens", "tokens",
              "Prompt tokens that are not computed yet, of requests that run or wait"),
    _reported("answers", "answers", "Requests whose answers are decoded there, begun or not"),
)  # fmt: skip
