"""One call to one instance, ended at the worst of moments; and what of an answer is its first token."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict
from proxy_behaviours import DONE, Behaviour, Seen, answer_json, chosen, dies, forever, stream_of
from proxy_fakes import Deployment, RawInstance, asked, deployed, join, outcomes, ping, take_turns

from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.bodies import Content
from p2pkv_proxy.membership.instance import Instance
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.upstream import Call, CallFailed, Client, first_content, is_servers_error
from support.waiting import eventually

NOTHING = Content((b"",))


class Answer:
    """Knows whether it has been closed; no more than its head comes."""

    closed = False
    status, content_type = 200, "application/json"

    @property
    def content(self) -> Any:
        return SimpleNamespace(readany=asyncio.Event().wait)

    def close(self) -> None:
        self.closed = True


class Session:
    def __init__(self, post: Callable[[], Awaitable[Answer]]) -> None:
        self._post = post

    async def post(self, *arguments: Any, **options: Any) -> Answer:
        return await self._post()


def call_of(post: Callable[[], Awaitable[Answer]]) -> tuple[Instance, Call]:
    instance = join(Registry(), ping("D"))
    return instance, Call(Session(post), instance, "/v1/completions", CIMultiDict())  # type: ignore[arg-type]


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
    async with Client() as client:
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
    by turns before the request is read, which resets it, and after.

    Attributes:
        now: the clock.
        closed: how many requests met a connection that was just closed.
        half: what comes before the end then.
    """

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


@pytest.mark.parametrize("events", [(error(400), DONE), (ROLE, TOKEN, error(500), DONE)])
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
