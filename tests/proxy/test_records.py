"""What the log and the traces say of one request, and what of its ids and its trace reaches the instances."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from proxy_behaviours import answer_error, dies, never, streams_at_once, with_a_p
from proxy_fakes import DEADLINE, Deployment, deployed, quiet
from proxy_process import served

from p2pkv.demo.processes import free_ports
from p2pkv_proxy.metrics import trace_id_of
from p2pkv_proxy.tracing import JsonLines, NoTracing, Spans
from support.waiting import eventually

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
