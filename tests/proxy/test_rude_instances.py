"""Instances that answer anything but what they should. The client gets one answer, and nothing is left."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from proxy_behaviours import never
from proxy_fakes import Deployment, RawInstance, deployed, error_of

from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Instance, Role
from support.waiting import eventually

OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: text/event-stream\r\n"


class RudeInstance(RawInstance):
    """Answers /health and /v1/models as it should, and every POST with `said`, then closes."""

    said: bytes = b""
    health_answer: bytes = OK + b"Content-Length: 0\r\n\r\n"
    models_answer: bytes = OK + b"Content-Length: 0\r\n\r\n"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            await self.body(head, reader)
            writer.write(self.said)
        else:
            writer.write(self.health_answer if b"/health" in head else self.models_answer)
        await writer.drain()


@asynccontextmanager
async def rude(
    role: Role, dispatch: Dispatch = "concurrent", limits: Limits | None = None
) -> AsyncIterator[tuple[Deployment, RudeInstance]]:
    """A proxy with one rude instance, and a good one of the other kind."""
    other: Role = "D" if role == "P" else "P"
    async with deployed(dispatch, limits=limits) as deployment:
        await deployment.add(other)
        instance = RudeInstance(role)
        await deployment.enlist(instance)
        await deployment.ready(prefill=1, decode=1)
        yield deployment, instance


BAD = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 O",
    "no end of the head": OK + JSON,
    "garbage": bytes(range(256)) * 20,
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "a huge header": OK + b"X: " + b"x" * 1_000_000 + b"\r\n\r\n{}",
    "many headers": OK + b"".join(b"X-%d: x\r\n" % n for n in range(20_000)) + b"\r\n{}",
    "a chunk without a size": OK + JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a negative chunk": OK + JSON + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
    "two lengths": OK + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a negative length": OK + JSON + b"Content-Length: -2\r\n\r\n{}",
    "no body": OK + JSON + b"Content-Length: 0\r\n\r\n",
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n{}",
    "hints without end": b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50,
    "status 000": b"HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\n{}",
    "status 999": b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}",
    "status in words": b"HTTP/1.1 OK OK\r\nContent-Length: 2\r\n\r\n{}",
    "HTTP 9": b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "no gzip": OK + JSON + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "a redirect to itself": b"HTTP/1.1 307 X\r\nLocation: /v1/completions\r\nContent-Length: 0\r\n\r\n",
    "comments without end": OK + SSE + b"Connection: close\r\n\r\n" + b": waiting\n\n" * 3,
    "a stream of nothing": OK + SSE + b"Content-Length: 0\r\n\r\n",
}


# Of P, since nobody reads what it says.
SUCCESSES = ("no body", "204", "comments without end", "a stream of nothing")


WAYS: list[tuple[Role, Dispatch]] = [("D", "concurrent"), ("P", "concurrent"), ("P", "sequential")]


@pytest.mark.parametrize(
    ("role", "dispatch", "kind"),
    [(*way, kind) for way in WAYS for kind in BAD if way[0] == "D" or kind not in SUCCESSES],
)
async def test_a_wrong_answer_is_an_error_that_says_so(
    role: Role, kind: str, dispatch: Dispatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = {"Authorization": "Bearer sk-secret"}
    async with rude(role, dispatch, Limits(alone_share=0)) as (deployment, instance):
        instance.said = BAD[kind]
        if (role, dispatch) == ("P", "concurrent"):
            deployment.d.behaviour = never
        response = await deployment.post(headers=key)
        assert response.status == 502 and "Location" not in response.headers
        message = (await error_of(response))["message"]
        assert message.startswith("The decode instance" if role == "D" else "The prefill instance failed")
        assert instance.http_address not in message
        instance.models_answer = BAD[kind]
        assert role == "P" or (await deployment.get("/v1/models", headers=key))[0] == 502
        assert "sk-secret" not in caplog.text


@pytest.mark.parametrize(
    "before", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"]
)
async def test_interim_answers_are_passed_over(before: bytes) -> None:
    async with rude("D") as (deployment, d):
        d.said = before + OK + JSON + b"Content-Length: 2\r\n\r\n{}"
        response = await deployment.post()
        assert (response.status, await response.read()) == (200, b"{}")
        assert "Link" not in response.headers


ODD = {
    "bytes that are no text": b"X-Odd: \xff\xfe\r\n",
    "a comma": b"Content-Type: ;;;,\r\n",
    "no content type": b"",
    "an empty header": b"X-Odd:\r\n",
    "a cookie": b"Set-Cookie: \x01=;;\r\n",
    "hop by hop": b"Connection: close, x-odd\r\nX-Odd: 1\r\nKeep-Alive: 1\r\nUpgrade: h2c\r\n",
    "an id of its own": b"X-Request-Id: x\r\nx-request-id: y\r\n",
}


@pytest.mark.parametrize("kind", ODD)
async def test_odd_headers_and_reasons_break_nothing(kind: str) -> None:
    async with rude("D") as (deployment, d):
        for status in (b"200 OK", b"200 \xff\xfe", b"200", b"418 X"):
            d.said = b"HTTP/1.1 " + status + b"\r\n" + ODD[kind] + b"Content-Length: 2\r\n\r\n{}"
            response = await deployment.post()
            body = await response.read()
            assert response.status in (int(status[:3]), 502), status
            if response.status == 502:
                assert json.loads(body)["error"]["message"].startswith("The decode instance")
            else:
                assert body == b"{}"
                assert response.headers.get("Keep-Alive") is response.headers.get("Upgrade") is None
            assert len(response.headers.getall("X-Request-Id")) == 1


CUT = {
    "a length that is not kept": OK + JSON + b"Content-Length: 100\r\n\r\n{}",
    "a chunk that is not kept": OK + JSON + b"Transfer-Encoding: chunked\r\n\r\n64\r\n{}",
    "no last chunk": OK + JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
    "nonsense after a chunk": OK + JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n",
}


@pytest.mark.parametrize("kind", CUT)
async def test_an_answer_that_breaks_off_never_looks_whole(kind: str) -> None:
    async with rude("D") as (deployment, d):
        d.said = CUT[kind]
        message = await deployment.refusal(502)
        how = " died before its answer was complete." if kind == "a length that is not kept" else ""
        assert message.startswith(f"The decode instance{how}")
        d.said = (
            CUT[kind].replace(JSON, SSE).replace(b"{}", b"data: {}\n\n").replace(b"\r\n2\r\n", b"\r\na\r\n")
        )
        text = await (await deployment.post(stream=True)).text()
        assert '"code":502' in text


@pytest.mark.parametrize("kind", ["garbage", "a huge header", "nothing", "101", "a redirect to itself"])
async def test_a_rude_health_check_makes_nobody_ready(concurrent: Deployment, kind: str) -> None:
    instance = RudeInstance("D")
    instance.health_answer = BAD[kind]
    await concurrent.enlist(instance)
    await eventually(lambda: len(concurrent.registry.known("D")) == 2)
    await concurrent.newcomer("D")
    assert instance.http_address not in concurrent.routable("D")


async def test_a_doubt_that_fails_unforeseen_stops_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployed("concurrent", 1, 1, life=1.0) as deployment:
        (instance,) = deployment.registry.known("D")
        doubted = asyncio.Event()

        async def health(asked: Instance) -> bool:
            if asked is instance:
                doubted.set()
                raise ValueError("nobody has thought of this")
            return True

        monkeypatch.setattr(deployment.proxy.membership.prober, "_health", health)
        with instance.busy(lambda loss: None):
            deployment.no_more_pings(deployment.d)
            async with asyncio.timeout(10):
                await doubted.wait()
            await deployment.newcomer("D")


LISTS = [
    b"[" * 50_000,
    b'{"data": 7}',
    b'{"data": [{"id": 7}]}',
    b'{"data": [{}]}',
    b'{"data": null}',
    b"\xff",
    b'{"data": [{"id": "\\ud800"}]}',
]


@pytest.mark.parametrize("body", LISTS, ids=range(len(LISTS)))
async def test_a_rude_list_of_models_spoils_nothing(body: bytes) -> None:
    async with rude("D") as (deployment, d):
        (instance,) = deployment.registry.known("D")
        d.models_answer = OK + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body
        instance.healthy = False
        await eventually(lambda: instance.healthy)
        assert (await deployment.get("/v1/models"))[0] in (200, 502)
