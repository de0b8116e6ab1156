"""What the proxy tells: /metrics, which nobody makes grow, the board of Grafana, the log and the traces."""

import asyncio
import importlib.util
import json
import logging
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from proxy_behaviours import answer_error, die, dies, never, stream_of, streams, streams_at_once, with_a_p
from proxy_fakes import DEADLINE, Deployment, deployed, ping, quiet
from proxy_process import served

from p2pkv.control.discovery import Workload
from p2pkv.demo.processes import free_ports
from p2pkv.engine.context import Counters
from p2pkv_proxy import exposition
from p2pkv_proxy import metrics as metrics_module
from p2pkv_proxy.exposition import Exposition
from p2pkv_proxy.first_token import REASONS
from p2pkv_proxy.limits import RequestCounters
from p2pkv_proxy.membership.instance import STATES, Instance
from p2pkv_proxy.metrics import OUTCOMES, Metrics, RequestRecord, StreamTimer, quantiles, trace_id_of
from p2pkv_proxy.routing import Choice
from p2pkv_proxy.tracing import JsonLines, NoTracing, Spans
from support.waiting import eventually


class Page:
    """A page of /metrics, parsed by the library's own parser, which also checks its form."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        name = f"p2pkv_proxy_{name}"
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no {name}{labels}"
        return sum(found)


async def page(deployment: Deployment) -> Page:
    async with deployment.client.get(f"{deployment.url}/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        return Page(await response.text())


dies_after_a_token = stream_of("first", die)


async def test_a_stream_is_counted_and_timed_by_its_instances(concurrent: Deployment) -> None:
    release = asyncio.Event()
    concurrent.d.behaviour = streams(release)
    stream = await concurrent.begin()
    now = await page(concurrent)
    assert now.value("requests_running") == 1
    assert now.value("instance_load", address=concurrent.d.http_address, role="D") == 1
    release.set()
    await stream.content.read()
    await quiet(concurrent)

    after = await page(concurrent)
    p, d = concurrent.p.http_address, concurrent.d.http_address
    assert after.value("requests_total", endpoint="/v1/completions", model="tiny", outcome="answered") == 1
    assert after.value("time_to_first_token_seconds_count", address=d, way="pair") == 1
    assert after.value("inter_token_seconds_count", address=d) >= 1
    assert after.value("stream_events_total", address=d) == 2
    assert after.value("request_seconds_count", address=d, outcome="answered") == 1
    assert after.value("prefill_seconds_count", address=p) == 1
    assert after.value("instance_requests_total", address=p, role="P", outcome="ok") == 1
    assert after.value("instance_requests_total", address=d, role="D", outcome="ok") == 1
    assert after.value("requests_running") == after.value("requests_waiting") == 0
    assert after.value("instances", role="P", state="ready") == 1
    assert after.value("instances") == 2


async def test_each_way_to_end_is_an_outcome_of_its_own() -> None:
    async with deployed("concurrent", prefill=1, decode=1, retries=0, alone_share=0.0) as deployment:
        assert (await deployment.post()).status == 200
        assert (await deployment.post(path="/v1/nothing")).status == 404
        deployment.d.behaviour = answer_error(422)
        assert (await deployment.post()).status == 422
        deployment.d.behaviour = dies
        assert (await deployment.post()).status == 502
        deployment.d.behaviour = dies_after_a_token
        broken = await deployment.post({"prompt": "x", "stream": True})
        assert b'"code":502' in await broken.content.read()
        deployment.d.behaviour = never
        before = len(deployment.d.requests)
        leaving = asyncio.create_task(deployment.post())
        await eventually(lambda: len(deployment.d.requests) > before)
        leaving.cancel()
        await quiet(deployment)
        await deployment.goodbye(deployment.d)
        assert (await deployment.post()).status == 503

        now = await page(deployment)
        assert now.value("requests_total", endpoint="/v1/completions") == 6
        for outcome in OUTCOMES:
            assert now.value("requests_total", endpoint="/v1/completions", outcome=outcome) == 1, outcome
        assert now.value("requests_total", endpoint="other", outcome="refused") == 1
        assert now.value("requests_total", model="unnamed", outcome="broken") == 1


async def test_clients_cannot_make_series(concurrent: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.models._LOOK_SECONDS", 0.02)  # for each name the lists are looked at
    for number in range(20):
        await concurrent.post({"model": f"made-up-{number}", "prompt": "x"})
        await concurrent.post(path=f"/v1/made-up-{number}")
        await concurrent.client.request(f"MADE{number}", f"{concurrent.url}/v1/completions")
    await concurrent.post()
    now = await page(concurrent)
    requests = now.families["p2pkv_proxy_requests"].samples
    assert {sample.labels["model"] for sample in requests} == {"tiny", "other", "unnamed"}
    assert {sample.labels["endpoint"] for sample in requests} == {"/v1/completions", "other"}
    assert now.value("requests_total", model="other") == 20


async def test_what_health_counts_is_shown_and_not_counted_again(sequential: Deployment) -> None:
    """By the proxy that has counted it, and by no other one; in OpenMetrics to those who ask for that."""
    async with deployed("concurrent", prefill=1, decode=1, max_requests=1, max_waiting=0) as deployment:
        release = asyncio.Event()
        deployment.d.behaviour = streams(release)
        stream = await deployment.post(stream=True)
        assert (await deployment.post()).status == 503
        release.set()
        await stream.content.read()
        await quiet(deployment)
        deployment.d.behaviour = with_a_p(never)
        deployment.p.behaviour = dies
        assert (await deployment.post()).status == 200

        counted, now = deployment.proxy.counted(), await page(deployment)
        assert now.value("shed_total", reason="full") == counted["refused_full"] == 1
        assert now.value("decode_alone_total") == counted["decode_alone"] == 1
        assert now.value("admitted_total") == counted["admitted"] == 2
        assert now.value("instance_requests_total", role="P", outcome="failed") == 1
        assert (await page(sequential)).value("admitted_total") == 0
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with deployment.client.get(f"{deployment.url}/metrics", headers=accept) as response:
            assert response.content_type == "application/openmetrics-text"
            assert (await response.text()).endswith("# EOF\n")
        accept["Accept"] = "text/plain; version=latest"
        async with deployment.client.get(f"{deployment.url}/metrics", headers=accept) as response:
            assert response.status == 200 and "text/plain; version=0.0.4" in response.headers["Content-Type"]


def test_every_counter_of_the_proxy_is_shown() -> None:
    shown = {key for _, key, _ in exposition._COUNTERS}
    reasons = {f"refused_{reason}" for reason in ("full", "late", "alone")}
    counted = {each.name for each in fields(RequestCounters)} | {"reconnected", "claims_refused"}
    assert shown | reasons == counted


async def test_a_pause_is_shown() -> None:
    async with deployed("concurrent", prefill=1, decode=1, alone_share=0.0, retries=0) as deployment:
        deployment.p.behaviour, deployment.d.behaviour = dies, never
        for _ in range(5):
            assert (await deployment.post()).status == 502
        now = await page(deployment)
        assert now.value("breaker_open", address=deployment.p.http_address, role="P") == 1
        assert now.value("breaker_open", role="D") == 0
        assert now.value("breaker_opened_total") == 1
        assert now.value("instances", role="P", state="paused") == 1
        assert {s.labels["state"] for s in now.families["p2pkv_proxy_instances"].samples} == set(STATES)


async def test_other_requests_go_on_while_a_page_is_written(
    concurrent: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, released = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def encode(registry: Any) -> bytes:
        loop.call_soon_threadsafe(begun.set)
        return b"# in time" if released.wait(10) else b"# too late"

    monkeypatch.setattr(exposition, "choose_encoder", lambda accept: (encode, "text/plain"))
    writing = asyncio.create_task(concurrent.client.get(f"{concurrent.url}/metrics"))
    async with asyncio.timeout(10):
        await begun.wait()
        assert (await concurrent.post()).status == 200
    released.set()
    async with await writing as response:
        assert await response.text() == "# in time"


def exposed(metrics: Metrics, here: list[Instance]) -> Callable[[], str]:
    """The page of instances that come and go as a test wants, each time that it is called."""
    reasons = [
        *(f"refused_{each}" for each in ("full", "late", "alone")),
        *(f"first_token_{each}" for each in REASONS),
    ]
    counters = [*(key for _, key, _ in exposition._COUNTERS), *reasons]
    metrics.follow(lambda: here)
    proxy: Any = SimpleNamespace(
        metrics=metrics,
        counted=lambda: dict.fromkeys(counters, 0),
        gauges=lambda: dict.fromkeys([key for _, key, _ in exposition._GAUGES], 0),
        instances=lambda: here,
        state_of=lambda _: "ready",
        prefill_work=lambda _: (None, None),
        tenants=None,
    )
    metrics.registry.register(Exposition(proxy))

    def text() -> str:
        metrics.forget()
        return generate_latest(metrics.registry).decode()

    return text


def test_an_instances_series_end_when_it_has_been_gone_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, which 0.23 has not, and which looks at all series for each instance."""
    monkeypatch.delattr("prometheus_client.metrics.MetricWrapperBase.remove_by_labels", raising=False)
    now = 0.0
    metrics = Metrics(lambda: now)
    p, d = Instance(ping("P", 1), 0.0), Instance(ping("D", 2), 0.0)
    here = [p, d]
    page = exposed(metrics, here)

    def shown() -> set[str]:
        return {sample.labels["address"] for sample in Page(page()).samples if "address" in sample.labels}

    metrics.paired(Choice(p, d))
    for instance in (p, d):
        metrics.record_outcome(instance, True)
    metrics.first_token(d.ping.http_address, "pair", 0.1)
    timer = StreamTimer(metrics.gaps[d.ping.http_address], metrics.clock, b"data: x\n\n")
    timer.chunk_arrived(b"data: y\n\n")
    both = {p.ping.http_address, d.ping.http_address}
    assert shown() == both
    here.remove(d)
    assert shown() == both, "its last numbers have yet to be scraped"
    now = 599.0
    assert shown() == both
    now = 601.0
    assert shown() == {p.ping.http_address}
    assert not metrics.pairs
    metrics.record_outcome(d, False)
    assert shown() == both, "what comes later is counted anew"
    metrics.forget()
    now = 1300.0
    here.append(d)
    assert shown() == both, "it is back, and has no past"
    assert metrics.events == 0


def test_an_instance_that_comes_back_in_time_keeps_its_series() -> None:
    now, here = 0.0, list[Instance]()
    metrics = Metrics(lambda: now)
    page = exposed(metrics, here)
    d = Instance(ping("D", 2), 0.0)
    metrics.record_outcome(d, True)
    metrics.forget()
    now = 500.0
    here.append(d)
    metrics.forget()
    now = 1000.0
    here.remove(d)
    metrics.forget()
    now = 1500.0
    assert d.ping.http_address in page()


def test_models_that_are_gone_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters come and go."""
    monkeypatch.setattr(metrics_module, "_MAX_MODELS", 2)
    now, here = 0.0, [Instance(ping("D", 2), 0.0)]
    metrics = Metrics(lambda: now)
    page = exposed(metrics, here)
    for name, label in (("a", "a"), ("b", "b"), ("c", "other"), ("c", "c")):
        here[0].learn(frozenset({name, "a"}))
        page()
        metrics.ended(RequestRecord(metrics, "/v1/completions", model=name), "answered")
        assert metrics.model_label(name) == label
        now += 700.0
    found = {sample.labels["model"] for sample in Page(page()).samples if "model" in sample.labels}
    assert found == {"a", "c", "other"}


def test_what_nobody_scrapes_does_not_grow_either() -> None:
    now = 0.0
    metrics = Metrics(lambda: now)
    for number in range(2000):
        metrics.record_outcome(Instance(ping("D", 1 + number % 60000), 0.0), True)
        now += metrics_module.SAMPLE_SECONDS
        metrics.sample(running=0, waiting=0)
    assert len(metrics._addresses()) < 700
    assert len(metrics.history) == 150


def test_gaps_fall_into_the_right_buckets() -> None:
    now = 0.0
    metrics = Metrics(lambda: now)
    pace = StreamTimer(metrics.gaps["d"], metrics.clock, b"")
    for gap in (0.001, 0.004, 0.004, 99.0):
        now += gap
        pace.chunk_arrived(b"data: x\n\ndata: y\n\n")
    buckets = dict(metrics.gaps["d"].buckets())
    assert buckets["0.0025"] - buckets["0.001"] == 0 and buckets["0.005"] == 3
    assert (buckets["10.0"], buckets["+Inf"]) == (3, 4)
    assert metrics.gaps["d"].total == pytest.approx(99.009)
    assert metrics.events == 8


def test_quantiles_are_of_the_last_minute() -> None:
    now = 0.0
    metrics = Metrics(lambda: now)
    assert quantiles(metrics.recent(), 0.5, 0.95) == [None, None]
    metrics.first_token("d", "pair", 50.0)
    now = 30.0
    for number in range(100):
        metrics.first_token("d", "pair", number / 100)
    assert quantiles(metrics.recent(), 0.5, 0.95) == [pytest.approx(0.5), pytest.approx(0.95)]
    now = 80.0
    assert quantiles(metrics.recent(), 1.0) == [0.99]
    now = 91.0
    assert quantiles(metrics.recent(), 0.5) == [None]


OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def documented(head: str) -> dict[str, set[str]]:
    table = OPERATIONS.split(head)[1].split("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    named = [(re.findall(r"`(\w+)`", names), set(re.findall(r"`(\w+)`", labels))) for names, labels in rows]
    return {name: labels for names, labels in named for name in names}


def shown_on(page: Page) -> dict[str, set[str]]:
    there: dict[str, set[str]] = {}
    for family in page.families.values():
        for sample in family.samples:
            name = sample.name.removeprefix("p2pkv_proxy_")
            if name != sample.name and not name.endswith("_created"):
                base = re.sub("_(bucket|count|sum)$", "", name) if family.type == "histogram" else name
                there[base] = set(sample.labels) - {"le"}
    return there


async def test_the_page_on_operations_names_each_metric_with_its_labels(concurrent: Deployment) -> None:
    """And examples/grafana.json asks for nothing else of the proxy."""
    concurrent.d.behaviour = streams_at_once
    await (await concurrent.post(stream=True)).read()
    await quiet(concurrent)
    for each in concurrent.everyone():
        each.pinged(msgspec.structs.replace(each.ping, workload=Workload()), each.last_seen)
    found = await page(concurrent)
    there = shown_on(found)
    assert documented("| metric | labels | meaning |") == there
    states = OPERATIONS.split("| state | meaning |")[1].split("\n\n")[0]
    assert re.findall(r"`(\w+)`", re.sub(r"`/health`", "", states)) == list(STATES)

    families = found.families.values()
    names = {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
    assert len(asked("p2pkv_proxy_")) > 10
    assert asked("p2pkv_proxy_") <= names
    ours = [query for query in QUERIES if "p2pkv_proxy_" in query]
    used = {
        label
        for query in ours
        for group in re.findall(r"by \(([^)]*)\)", query)
        for label in group.split(", ")
    }
    assert used <= set().union(*there.values()) | {"le", "instance"}
    for query in ours:  # of several proxies each counts its own requests, and all instances
        assert "instances{" not in query or query.startswith("min(sum by (instance)"), query
        assert "instance_load{" not in query or query.startswith("sum"), query


# examples/grafana.json: whatever it asks for exists, here, in the connector or in vLLM's own source.


BOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
QUERIES = [
    *(target["expr"] for panel in PANELS for target in panel.get("targets", ())),
    *(each["query"]["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"),
]
NAME = re.compile(r"(?<![\w:])(?:p2pkv_|vllm:)\w+")
SUFFIXES = {
    "counter": ["_total"],
    "histogram": ["_bucket", "_count", "_sum"],
    "gauge": [""],
    "info": ["_info"],
}


def asked(prefix: str) -> set[str]:
    return {name for query in QUERIES for name in NAME.findall(query) if name.startswith(prefix)}


def test_the_board_is_in_order() -> None:
    """Series are ours or vLLM's, targets ask the source that the user chooses, panels lie side by side."""
    for query in QUERIES:
        selected = re.findall(r"([A-Za-z_:][\w:]*)(?=[{\[])", query)
        assert selected or query.startswith("label_values("), query
        assert all(NAME.fullmatch(name) for name in selected), query
    source = {"type": "prometheus", "uid": "${datasource}"}
    chosen = {each["name"] for each in BOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel.get("targets", ()):
            assert panel["datasource"] == target["datasource"] == source
            assert set(re.findall(r"\$(?!__)(\w+)", target["expr"])) <= chosen
            assert set(re.findall(r"\$(__\w+)", target["expr"])) <= {"__rate_interval"}
    for name in ("id", "title"):
        assert len({panel[name] for panel in PANELS}) == len(PANELS)
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
        down = one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]
        assert not (across and down)


@pytest.mark.vllm
def test_the_connector_has_what_is_asked_of_it() -> None:
    found = {name for name in asked("p2pkv_") if not name.startswith("p2pkv_proxy_")}

    assert found and found <= {f"p2pkv_{name}_total" for name in Counters.NAMES}


@pytest.mark.vllm
def test_vllm_has_what_is_asked_of_it() -> None:
    spec = importlib.util.find_spec("vllm")
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    made = re.findall(r"self\._(gauge|counter|histogram)_cls\(\s*name=\"(vllm:\w+)\"", source)
    names = {name + suffix for kind, name in made for suffix in SUFFIXES[kind]}
    assert len(asked("vllm:")) > 8
    assert asked("vllm:") <= names


# The log and the traces: what they say of one request, and its ids at the instances.


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}


async def test_the_clients_id_reaches_the_instances_beside_the_proxys_own(either: Deployment) -> None:
    mine = "___prefill_addr_6.6.6.6:1___decode_addr_6.6.6.6:2_" + "0" * 32
    answer = await either.post(headers={"X-Request-Id": mine})
    assert answer.headers.getall("X-Request-Id") == [mine]
    for instance in (either.p, either.d):
        (seen,) = instance.requests
        assert seen.headers.getall("X-Client-Request-Id") == [mine]
        (own,) = seen.headers.getall("X-Request-Id")
        assert "_addr_" in own and "6.6.6.6" not in own
    await either.post(headers={"X-Request-Id": "mine", "X-Client-Request-Id": "older"})
    assert either.d.requests[1].headers.getall("X-Client-Request-Id") == ["older"], "it is left as it is"


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (TRACEPARENT["traceparent"], TRACE),
        (f"01-{TRACE}-{PARENT}-01-more", TRACE),
        (f"00-{TRACE}-{PARENT}", ""),
        (f"00-{TRACE.upper()}-{PARENT}-01", ""),
        ("nonsense", ""),
    ],
)
def test_the_id_of_a_trace(header: str, found: str) -> None:
    assert trace_id_of({"traceparent": header}) == found


class Collector:
    """Takes OTLP over HTTP, as Jaeger or Tempo does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.service = ""
        self.endpoint = ""

    async def take(self, request: web.Request) -> web.Response:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            raise web.HTTPUnsupportedMediaType
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.service = named["service.name"]
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response()

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    made, app = Collector(), web.Application()
    app.add_routes([web.post("/v1/traces", made.take)])
    async with TestServer(app) as server:
        made.endpoint = str(server.make_url("/v1/traces"))
        yield made


async def test_spans_of_a_request_lie_below_the_clients_and_above_the_instances(collector: Collector) -> None:
    async with deployed("concurrent", 1, 1, tracing=Spans(collector.endpoint)) as deployment:
        assert (await deployment.post(headers={**TRACEPARENT, "X-Request-Id": "mine"})).status == 200
        p, d = (each.requests[0].headers["traceparent"] for each in (deployment.p, deployment.d))
        await quiet(deployment)
    await eventually(lambda: len(collector.spans) == 3)
    request = collector.named("POST /v1/completions")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    for name, header in (("prefill", p), ("decode", d)):
        span = collector.named(name)
        assert span.parent_span_id == request.span_id
        assert header == f"00-{TRACE}-{span.span_id.hex()}-01"
        assert span.status.code != 2
    said = {each.key: each.value for each in request.attributes}
    assert said["p2pkv.outcome"].string_value == "answered"
    assert said["p2pkv.client_request_id"].string_value == "mine"
    assert said["p2pkv.way"].string_value == "pair"
    assert collector.service == "p2pkv-proxy"


async def test_each_try_has_spans_and_failures_are_marked(collector: Collector) -> None:
    async with deployed("concurrent", 1, 1, tracing=Spans(collector.endpoint)) as deployment:
        deployment.p.behaviour = answer_error(500)
        deployment.d.behaviour = answer_error(500)
        assert (await deployment.post()).status == 500
        await quiet(deployment)
    await eventually(lambda: any(span.name.startswith("POST") for span in collector.spans))
    request = collector.named("POST /v1/completions")
    assert request.status.code == 2 and not request.parent_span_id
    calls = [span for span in collector.spans if span.name in ("prefill", "decode")]
    assert len(calls) >= 2
    assert {span.parent_span_id for span in calls} == {request.span_id}
    assert all(span.status.code == 2 for span in calls)


async def test_a_collector_that_is_gone_holds_up_nobody() -> None:
    spans = Spans(f"http://127.0.0.1:{free_ports()}/v1/traces")
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    async with asyncio.timeout(DEADLINE):
        async with deployed("concurrent", 1, 1, tracing=spans) as deployment:
            await deployment.serves(3)


def test_without_opentelemetry_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(NoTracing, match="pip install opentelemetry-sdk"):
        Spans("http://127.0.0.1:4318/v1/traces")


async def test_a_line_of_json_for_each_thing_with_the_ids_of_its_request() -> None:
    async with served("--log-format", "json", "--log-requests") as proxy:
        proxy.prefills[0].behaviour = dies
        proxy.d.behaviour = with_a_p(never, streams_at_once)
        headers = {"X-Request-Id": "the client's own", **TRACEPARENT}
        await proxy.serves(1, headers=headers, stream=True)
        await proxy.says('"outcome": ')
        lines = [json.loads(line) for line in proxy.command.log.splitlines()]
        address = proxy.d.http_address

    (ended,) = [line for line in lines if line["message"].startswith("request ended")]
    assert ended["client_request_id"] == "the client's own"
    assert ended["trace_id"] == TRACE
    assert (ended["endpoint"], ended["model"], ended["status"]) == ("/v1/completions", "tiny", 200)
    assert (ended["way"], ended["tries"]) == ("alone", 2)
    assert (ended["outcome"], ended["decode"]) == ("answered", address)
    assert ended["seconds"] >= ended["first_token"] > 0
    (blamed,) = [line for line in lines if "closed the connection before it answered" in line["message"]]
    assert blamed["level"] == "WARNING" and blamed["client_request_id"] == "the client's own"
    assert not any("request_id" in line for line in lines if "is ready" in line["message"])


def test_a_traceback_stays_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "no\n%s", ("x",), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line
    assert "ValueError" in json.loads(line)["exception"] and json.loads(line)["message"] == "no\nx"


async def test_in_text_a_strange_id_cannot_pass_for_other_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with deployed("concurrent", 1, 1, log_requests=True) as deployment:
        await deployment.post(headers={"X-Request-Id": "x outcome=failed"})
        await quiet(deployment)
    (line,) = [message for message in caplog.messages if message.startswith("request ended")]
    assert "client_request_id='x outcome=failed' " in line
    assert " outcome=answered " in line
