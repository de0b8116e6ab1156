"""One call to one instance, ended at the worst of moments or answered with anything; and its first token."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict
from proxy_behaviours import DONE, Behaviour, Seen, answer_json, chosen, dies, forever, never, stream_of
from proxy_fakes import Deployment, RawInstance, asked, deployed, error_of, join, outcomes, ping, take_turns

from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.bodies import Content
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Instance, Role
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.upstream import Call, CallFailed, Client, first_content, is_servers_error
from support.waiting import eventually

NOTHING = Content((b"",))


class Answer:
    """Knows whether it has been closed; no more than its head comes."""

    closed = False
    status, content_type = 200, "application/json"
    content = SimpleNamespace(readany=asyncio.Event().wait)

    def close(self) -> None:
        self.closed = True


def call_of(post: Callable[[], Awaitable[Answer]]) -> tuple[Instance, Call]:
    instance, session = join(Registry(), ping("D")), SimpleNamespace(post=lambda *_: post())
    return instance, Call(session, instance, "/v1/completions", CIMultiDict())  # type: ignore[arg-type]


async def test_an_answer_that_comes_as_its_call_is_cancelled_is_closed() -> None:
    answer = Answer()

    async def post() -> Answer:
        # Runs before the caller is told of the answer.
        asyncio.get_running_loop().call_soon(asking.cancel)
        return answer

    instance, call = call_of(post)

    async def ask() -> None:
        try:
            await call.begin(NOTHING)
        finally:
            call.close()

    asking = asyncio.create_task(ask())
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert answer.closed
    assert instance.in_flight == 0


async def test_who_cannot_be_connected_to_in_time_waits_for_its_health() -> None:
    async def post() -> Answer:
        raise aiohttp.ConnectionTimeoutError

    instance, call = call_of(post)
    with pytest.raises(CallFailed):
        await call.begin(NOTHING)
    call.close()
    assert not instance.healthy


@pytest.mark.parametrize("dead_first", [True, False])
async def test_who_leaves_as_the_instance_dies_has_left(dead_first: bool) -> None:
    """Else its request would be tried at another instance, for nobody."""

    asked = asyncio.Event()

    async def post() -> Answer:
        asked.set()
        await asyncio.Event().wait()
        return Answer()

    instance, call = call_of(post)
    asking = asyncio.create_task(call.begin(NOTHING))
    await asked.wait()
    ends: list[Callable[[], object]] = [lambda: instance.lost("gone"), asking.cancel]
    for end in ends if dead_first else reversed(ends):
        end()
    with pytest.raises(asyncio.CancelledError):
        await asking
    call.close()
    assert instance.in_flight == 0


async def test_a_connection_is_not_used_again_when_vllm_may_be_closing_it() -> None:
    """Its server does so after five idle seconds."""
    async with aclosing(Client()) as client:
        assert 1.0 <= client.pooled.connector._keepalive_timeout <= 4.0


async def test_a_host_that_vanishes_is_noticed_although_nothing_is_sent(concurrent: Deployment) -> None:
    """After a goodbye no ping is missed; the kernel asks whether its host is still there."""

    concurrent.d.behaviour = stream_of("first", forever)
    response = await concurrent.begin()
    (p,) = concurrent.registry.known("P")
    await eventually(lambda: p.load == 0)
    (transport,) = {each.transport for each in concurrent.proxy.session.pooled.connector._acquired}
    sock = transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle, interval, probes = (sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    assert 5 <= idle + interval * probes <= 30
    response.close()


class Forgetful(RawInstance):
    """Keeps an idle connection for 5 s of the test's own clock, and closes it in the moment of its next use:
    by turns before the request is read, which resets it, and after. `now`: the clock; `closed`: how many
    requests met a connection that was just closed; `half`: what comes before the end then."""

    now: float = 0.0
    closed: int = 0
    half: bytes = b""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        used: float | None = None
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            posted = head.startswith(b"POST")
            idle = posted and used is not None and self.now - used > 5.0
            self.closed += idle
            if idle and self.closed % 2 == 0:
                writer.transport.abort()
                return
            if posted:
                await self.body(head, reader)
            if idle:
                writer.write(self.half)
                await writer.drain()
                return
            body = b'{"id": "x", "choices": [{"text": "hello"}]}' if posted else b'{"data": []}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            used = self.now


@asynccontextmanager
async def forgetful(dispatch: Dispatch) -> AsyncIterator[tuple[Deployment, list[Forgetful]]]:
    """A P and a D of that kind, and no try at others: there are none."""
    async with deployed(dispatch, retries=0, alone_share=0) as deployment:
        instances = [Forgetful("P"), Forgetful("D")]
        for each in instances:
            await deployment.enlist(each)
        await deployment.ready(1, 1)
        yield deployment, instances


async def test_a_connection_that_was_idle_for_too_long_fails_no_request(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 calls, with up to 5.02 s of the instances' clock between two uses of a connection."""
    monkeypatch.setattr("p2pkv_proxy.upstream._KEEPALIVE_SECONDS", 1000.0)
    draw = random.Random(1)
    async with forgetful(dispatch) as (deployment, instances):
        for _ in range(50):
            responses = await asyncio.gather(*(deployment.post() for _ in range(10)))
            assert {response.status for response in responses} == {200}
            for each in instances:
                each.now += draw.uniform(4.6, 5.02)
        closed = sum(each.closed for each in instances)
        assert 25 < closed < 75, "about a twentieth of 1,000"
        assert deployment.proxy.session.reconnected == closed
        assert all(all(outcomes(each)) for each in deployment.everyone())
        assert deployment.proxy.counters.retried == deployment.proxy.counters.retries_refused == 0


async def test_what_had_begun_to_answer_is_not_asked_again() -> None:
    async with forgetful("sequential") as (deployment, (p, d)):
        assert (await deployment.post()).status == 200
        d.half, d.now = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", 6.0
        response = await deployment.post()
        assert response.status == 502
        assert (p.closed, d.closed, deployment.proxy.session.reconnected) == (0, 1, 0)


async def test_a_connection_that_is_new_is_not_made_again() -> None:
    """Nor a second time the one that was made anew."""
    async with deployed("sequential", 1, 1, retries=0, alone_share=0) as deployment:
        (p,) = deployment.registry.known("P")
        deployment.p.behaviour = dies
        await deployment.proxy.session.pooled.connector.close()
        deployment.proxy.session.pooled._connector = aiohttp.TCPConnector(limit=0)
        assert (await deployment.post()).status == 502
        assert len(deployment.p.requests) == 1
        deployment.p.behaviour = answer_json
        assert (await deployment.post()).status == 200
        deployment.p.behaviour = dies
        assert (await deployment.post()).status == 502
        assert len(deployment.p.requests) == 4, "over the kept connection, and over a new one"
        assert deployment.p.requests[2].request_id == deployment.p.requests[3].request_id
        assert outcomes(p) == [False, True, False]
        assert deployment.proxy.session.reconnected == 1


@pytest.mark.parametrize(("after", "again"), [(0.0, True), (0.9, True), (1.1, False)])
async def test_only_a_connection_that_ends_at_once_was_closed_for_being_idle(
    after: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends later had the request: it may have been worked on, and its D knows of it."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("p2pkv_proxy.upstream.time", clock)
    async with deployed("sequential", 1, 1, retries=0, alone_share=0) as deployment:
        assert (await deployment.post()).status == 200

        def closes_later(_: Seen) -> Behaviour:
            clock.now += after
            return dies

        deployment.p.behaviour = chosen(closes_later)
        assert (await deployment.post()).status == 502
        assert len(deployment.p.requests) == 2 + again
        assert deployment.proxy.session.reconnected == again


async def test_what_is_sent_once_more_is_within_the_budget_of_retries() -> None:
    """Ten, or a fifth of the requests."""
    async with deployed("sequential", 1, 1, retries=0, alone_share=0) as deployment:

        def first_copy_dies(seen: Seen) -> Behaviour:
            copies = [each for each in deployment.p.requests if each.request_id == seen.request_id]
            return dies if len(copies) == 1 else answer_json

        statuses = []
        for _ in range(30):
            # So that there is an idle connection again.
            deployment.p.behaviour = answer_json
            assert (await deployment.post()).status == 200
            deployment.p.behaviour = chosen(first_copy_dies)
            statuses.append((await deployment.post()).status)
        allowed = statuses.count(200)
        assert statuses[:10] == [200] * 10 and 10 <= allowed <= 12 == 60 // 5
        assert deployment.proxy.session.reconnected == allowed
        assert deployment.proxy.counters.retries_refused == 30 - allowed


# A stream that says who speaks, and then fails, has not begun: the request is tried elsewhere.


CHAT = "/v1/chat/completions"
STREAM = {"messages": [], "prompt": "x", "stream": True}


def data(message: Any) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def chunk(**choice: Any) -> bytes:
    return data({"id": "chatcmpl-x", "choices": [{"index": 0, "finish_reason": None, **choice}]})


ROLE = chunk(delta={"role": "assistant", "content": ""})
TOKEN = chunk(delta={"content": "hi"})
ABORT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'


def error(code: int, message: str = "Internal server error") -> bytes:
    return data({"error": {"message": message, "type": "X", "param": None, "code": code}})


def streams(*events: bytes) -> Behaviour:
    return stream_of(*(step for each in events for step in (each, lambda *_: asyncio.sleep(0.01))))


@pytest.mark.parametrize(
    "events",
    [(error(500), DONE), (ROLE, error(500), DONE), (ROLE, ABORT, DONE), (ROLE,), (ROLE[:20], ROLE[20:])],
)
async def test_another_d_is_asked(events: tuple[bytes, ...]) -> None:
    async with deployed("concurrent", prefill=1, decode=2) as deployment:
        take_turns(deployment.decodes, streams(*events), streams(ROLE, TOKEN, DONE))
        response = await deployment.post(STREAM, CHAT)
        assert (response.status, await response.read()) == (200, ROLE + TOKEN + DONE)
        assert asked(deployment.decodes) == [1, 1]


async def test_with_nobody_else_it_is_a_502(either: Deployment) -> None:
    either.d.behaviour = streams(ROLE, error(500), DONE)
    message = await either.refusal(502, STREAM, CHAT)
    assert message.startswith("The decode instance failed with an internal error; see its log.")
    either.d.behaviour = streams(ROLE, error(500, "no room for 10 blocks"), DONE)
    message = (await (await either.post(STREAM, CHAT)).json())["error"]["message"]
    assert message == (
        "The decode instance answered with an error before its first token: no room for 10 blocks"
    )


MISTAKE = b"event: error\n" + data(
    {"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}
)
"""At /v1/messages of vLLM 0.33."""


@pytest.mark.parametrize(
    "events", [(error(400), DONE), (ROLE, TOKEN, error(500), DONE), (MISTAKE,), (ROLE, MISTAKE)]
)
async def test_anything_else_reaches_the_client_as_is(either: Deployment, events: tuple[bytes, ...]) -> None:
    either.d.behaviour = streams(*events)
    response = await either.post(STREAM, CHAT)
    assert (response.status, await response.read()) == (200, b"".join(events))
    either.d.behaviour = answer_json
    assert (await either.post()).status == 200


@pytest.mark.parametrize(
    "events",
    [
        TOKEN,
        ROLE + TOKEN,
        DONE,
        b"data: \xff\n",
        b"data: 7\r\n\r\n",
        b"data: null\n\n",
        data({"choices": []}),
        data({"choices": 7}),
        data({"choices": [7]}),
        data({"choices": [{"delta": {"role": "assistant"}}, {"delta": {"content": "hi"}}]}),
        chunk(delta=None),
        chunk(delta={"content": ""}),
        chunk(delta={"role": "assistant", "content": "x"}),
        chunk(delta={"role": "assistant", "tool_calls": [{}]}),
        chunk(delta={"role": "assistant"}, finish_reason="stop"),
        chunk(text=""),
        data({"error": "no"}),
    ],
)
def test_what_begins_an_answer(events: bytes) -> None:
    event = first_content(events)
    assert event is not None and not is_servers_error(event)


def test_what_does_not_yet_and_what_fails_instead() -> None:
    for events in (b"", b": waiting\n\n", ROLE, ROLE * 3, ROLE + TOKEN[:-2], TOKEN[:-2]):
        assert first_content(events) is None, events
    for events in (error(500), error(503), ROLE + error(500), b": x\n\n" + error(500)):
        assert is_servers_error(first_content(events)), events


# Instances that answer anything but what they should: the client gets one answer, and nothing is left.


OK = b"HTTP/1.1 200 OK\r\n"
JSON = b"Content-Type: application/json\r\n"
SSE = b"Content-Type: text/event-stream\r\n"


class RudeInstance(RawInstance):
    """Answers /health and /v1/models as it should, and every POST with `said`, then closes; or, if there is
    `more` to say, when the proxy does."""

    said: bytes = b""
    more: bytes = b""
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
        if head.startswith(b"POST") and self.more:
            await asyncio.sleep(0.05)
            writer.write(self.more)
            await reader.read()


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


async def test_a_chunk_that_cannot_be_read_ends_a_stream() -> None:
    async with rude("D") as (deployment, instance):
        instance.said = OK + SSE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(TOKEN), TOKEN)
        instance.more = b"zz\r\n"
        async with await deployment.post(stream=True) as response, asyncio.timeout(5):
            first, last, nothing = (await response.read()).split(b"\n\n")
        assert first + b"\n\n" == TOKEN and nothing == b""
        assert b"The decode instance died in the middle of its answer." in last


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
