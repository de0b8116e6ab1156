"""Clients that leave at any moment, or send anything: nothing of them is left, and others are served."""

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from proxy_behaviours import DONE, Behaviour, after, answer_json, answers, flood, never, stream_of, streams
from proxy_fakes import Deployment, all_do, connect, deployed, quiet

from p2pkv_proxy.app import BoundedRunner
from p2pkv_proxy.attempt import Dispatch
from support.waiting import eventually

BODY = b'{"model": "tiny", "prompt": "hi", "stream": true}'


def post(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: x", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


WHOLE = post(BODY, b"Content-Length: %d" % len(BODY))

READY = b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n"


class Client:
    """A bare connection to the proxy; with `tls` over that."""

    def __init__(self, deployment: Deployment, tls: ssl.SSLContext | None = None) -> None:
        self._deployment = deployment
        self._tls = tls

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await connect(self._deployment.url)
        if self._tls is not None:
            await self.writer.start_tls(self._tls, server_hostname="127.0.0.1")
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.transport.abort()

    async def status(self) -> int:
        return int((await self.reader.readuntil(b"\r\n")).split()[1])


@pytest.fixture
async def short() -> AsyncIterator[Deployment]:
    """A proxy that waits half a second for the rest of a body, and a D that takes one request."""
    async with deployed("concurrent", 1, 1, max_body=1 << 20, body_seconds=0.5, max_requests=1) as deployment:
        yield deployment


def sized(body: bytes, *headers: bytes) -> bytes:
    return post(body, b"Content-Length: %d" % len(body), *headers)


GZIP = b"Content-Encoding: gzip"


async def test_connections_on_which_no_request_comes_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.app.IDLE_SECONDS", 0.3)
    async with (
        deployed("concurrent", 1, 1) as deployment,
        asyncio.timeout(10),
        contextlib.AsyncExitStack() as all_,
    ):
        clients = [await all_.enter_async_context(Client(deployment)) for _ in range(40)]
        for client in clients[:20]:
            client.writer.write(WHOLE[:30])
        for client in clients:
            assert await client.reader.read() == b""
        assert (await deployment.post()).status == 200


RUDE = {
    "no gzip": (sized(b"abcd", GZIP), {400}),
    "half a gzip": (sized(gzip.compress(BODY)[:20], GZIP), {400, 408}),
    "an unknown encoding": (sized(BODY, b"Content-Encoding: zz"), {200, 400, 415}),
    "a bomb": (sized(gzip.compress(b" " * (8 << 20)), GZIP), {400, 413}),
    "no size of a chunk": (post(b"zz\r\n{}\r\n0\r\n\r\n", b"Transfer-Encoding: chunked"), {400}),
    "half a chunk": (post(b"64\r\n{}", b"Transfer-Encoding: chunked"), {408}),
    "chunks without end": (post(b"1\r\n{\r\n", b"Transfer-Encoding: chunked"), {408}),
    "two lengths": (post(BODY, b"Content-Length: 4", b"Content-Length: 5"), {400}),
    "length and chunks": (post(BODY, b"Content-Length: 4", b"Transfer-Encoding: chunked"), {400}),
    "a negative length": (post(BODY, b"Content-Length: -1"), {400}),
    "a huge header": (post(b"", b"X: " + b"x" * (5 << 20)), {431}),
    "a huge header without an end": (post(b"", b"X: " + b"x" * (5 << 20))[:-4], {431}),
    "huge headers": (post(b"", *([b"X: " + b"x" * (1 << 20)] * 5)), {431}),
    "a huge address": (WHOLE.replace(b" HTTP", b"x" * (5 << 20) + b" HTTP"), {431}),
    "a header without a name": (post(b"", b": Bearer sk-secret"), {400}),
    "a bare line feed in a header": (post(b"", b"X: a\nb"), {400}),
    "nothing of HTTP": (b"\x16\x03\x01" + bytes(200) + b"\r\n\r\n", {400}),
    "HTTP 9": (b"POST /v1/completions HTTP/9.9\r\n\r\n", {400, 505}),
    "an upgrade": (sized(BODY, b"Connection: Upgrade", b"Upgrade: websocket"), {200, 400}),
    "an expectation": (sized(BODY, b"Expect: 200-ok"), {417}),
    "no text in a header": (sized(BODY, b"X-Odd: \xff\xfe"), {200, 400}),
    "no text in its id": (sized(BODY, b"X-Request-Id: \xff\xfe"), {200, 400}),
    "a control in its id": (sized(BODY, b"X-Request-Id: \x01x"), {200, 400}),
}


@pytest.mark.parametrize("kind", RUDE)
async def test_what_is_no_request_gets_an_answer_and_leaves_nothing(
    short: Deployment, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, statuses = RUDE[kind]
    async with Client(short) as client, asyncio.timeout(10):
        client.writer.write(sent)
        status, head = await client.status(), await client.reader.readuntil(b"\r\n\r\n")
        assert status in statuses
        assert status == 200 or b"application/json" in head
    await quiet(short)
    assert (await short.post()).status == 200
    unforeseen = [line for line in caplog.records if line.levelno >= logging.ERROR]
    assert unforeseen == []


async def test_a_client_that_leaves_before_it_may_send_its_body(
    short: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = short.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(sized(BODY, b"Expect: 100-continue"))
    assert (await short.post()).status == 200
    assert [line for line in caplog.records if line.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("kept", [(), (b"Connection: keep-alive",)])
async def test_a_stream_for_http_1_0_ends_its_connection(short: Deployment, kept: tuple[bytes, ...]) -> None:
    """Nothing else shows its end there."""
    short.d.behaviour = stream_of("first", "second", DONE)
    async with Client(short) as client, asyncio.timeout(10):
        client.writer.write(sized(BODY, *kept).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await client.reader.read()
        assert b"second" in answer and answer.endswith(DONE)


TOKEN = b"sk-" + b"secret" * 1400


async def test_a_large_token_reaches_the_instances(dispatch: Dispatch) -> None:
    """Some companies' tokens are longer than 8 KiB, and vLLM takes them."""
    async with deployed(dispatch, 1, 1) as deployment:
        bearer = {"Authorization": f"Bearer {TOKEN.decode() * 100}"}
        await deployment.serves(1, headers=bearer)
        for each in (deployment.p, deployment.d):
            assert each.requests[0].headers["Authorization"] == bearer["Authorization"]


@pytest.mark.parametrize(
    "headers",
    [[b"Authorization: Bearer " + TOKEN * 800], [b"Authorization: Bearer " + TOKEN, b": x"]],
    ids=["too long", "not HTTP"],
)
async def test_nothing_of_a_header_comes_into_the_log(
    short: Deployment, headers: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Client(short) as client, asyncio.timeout(10):
        client.writer.write(sized(BODY, *headers))
        head = (await client.reader.readuntil(b"\r\n\r\n")).decode()
        body = await client.reader.readexactly(int(head.split("Content-Length: ")[1].split("\r\n")[0]))
        assert "application/json" in head
        assert json.loads(body)["error"]["code"] == int(head.split()[1]) in (400, 431)
    assert "sk-" not in caplog.text + body.decode()


async def test_large_heads_count_among_the_bytes_that_are_held() -> None:
    async with deployed("concurrent", 1, 1, max_held=1 << 20, max_body=1 << 20) as deployment:
        large = {"X": "x" * (1 << 20)}
        assert "leave no memory for this one" in await deployment.refusal(503, headers=large)
        await deployment.serves(1, headers={"X": "x" * (1 << 19)})


async def test_of_endless_heads_the_large_ones_go(short: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.app._MAX_HEADS", 1 << 20)
    async with contextlib.AsyncExitStack() as cleanup, asyncio.timeout(20):
        for _ in range(3):
            client = await cleanup.enter_async_context(Client(short))
            client.writer.write(post(b"", b"X: " + b"x" * 500_000)[:-4])
        said = await client.reader.readuntil(b"}}")
        assert said.startswith(b"HTTP/1.1 503 ") and b"for the rest of too many large request headers" in said
        await short.serves(1, headers={"X": "x" * 1000})


async def test_garbage_makes_one_line_in_ten_seconds(
    short: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        async with Client(short) as client, asyncio.timeout(10):
            client.writer.write(b"no HTTP\r\n\r\n")
            assert await client.status() == 400
    (line,) = [line.getMessage() for line in caplog.records if "no HTTP" in line.getMessage()]
    assert line.startswith("a client sent what is no HTTP request (1 so far): Bad")
    assert "Traceback" not in caplog.text


async def test_a_hundred_requests_in_one_breath_are_served_one_by_one(short: Deployment) -> None:
    """And no more of them when their client leaves."""
    async with Client(short) as client, asyncio.timeout(30):
        client.writer.write(WHOLE * 100)
        for _ in range(100):
            assert await client.status() == 200
            head = await client.reader.readuntil(b"\r\n\r\n")
            await client.reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))
    async with Client(short) as client:
        client.writer.write(WHOLE * 100)
        await client.reader.read(100)
    await quiet(short)
    assert len(short.d.requests) < 200


def cut_off(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end has reset the connection: who does not read finds that out by writing."""
    writer.write(b" ")
    return writer.transport.is_closing()


WITHOUT_END = flood(100_000)
LARGE = answers(lambda _: web.Response(status=400, body=b"x" * (16 << 20)))
"""D's own error, of which more than the kernel buffers is left when the request has ended."""


@pytest.mark.parametrize(
    ("module", "behaviour"), [("relay", WITHOUT_END), ("app", LARGE)], ids=["a stream", "an error"]
)
async def test_a_client_that_stays_and_does_not_read_is_disconnected(
    short: Deployment, monkeypatch: pytest.MonkeyPatch, module: str, behaviour: Behaviour
) -> None:
    monkeypatch.setattr(f"p2pkv_proxy.{module}.STALL_SECONDS", 0.3)
    short.d.behaviour = behaviour
    async with Client(short) as deaf:
        deaf.writer.transport.pause_reading()
        deaf.writer.write(WHOLE)
        await eventually(lambda: short.proxy.counters.admitted == 1)
        await quiet(short)
        await eventually(lambda: short.d.requests[0].aborted is (behaviour is WITHOUT_END))
        await eventually(lambda: cut_off(deaf.writer))


async def test_what_a_client_does_not_read_of_its_last_answer_keeps_no_connection(
    short: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.app.STALL_SECONDS", 0.3)
    release = asyncio.Event()
    short.d.behaviour = after(release, LARGE)
    async with Client(short) as deaf:
        deaf.writer.transport.pause_reading()
        deaf.writer.write(sized(BODY, b"Connection: close"))
        await eventually(lambda: len(short.d.requests) == 1)
        (active,) = short.proxy.active
        active.request.transport.set_write_buffer_limits(1 << 30)  # no write waits, as of a smaller answer
        release.set()
        await quiet(short)
        await eventually(lambda: cut_off(deaf.writer))


async def test_a_body_that_comes_byte_by_byte_has_one_deadline_and_takes_no_place(short: Deployment) -> None:
    async with Client(short) as client, asyncio.timeout(10):
        client.writer.write(post(b"", b"Content-Length: 100000"))
        trickle = asyncio.create_task(drip(client.writer))
        await eventually(lambda: short.proxy.intake.held > 0)
        assert (await short.post()).status == 200
        assert await client.status() == 408
        trickle.cancel()


async def drip(writer: asyncio.StreamWriter) -> None:
    while not writer.transport.is_closing():
        writer.write(b" ")
        await asyncio.sleep(0.02)


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def trusted(
    request: pytest.FixtureRequest, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> ssl.SSLContext | None:
    """What a client needs, if `deployed` is to serve over TLS."""
    if not request.param:
        return None
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    monkeypatch.setattr("proxy_fakes.BoundedRunner", partial(BoundedRunner, tls=tls))
    return ssl.create_default_context(cafile=certificate[0])


@pytest.fixture
async def crowded(trusted: ssl.SSLContext | None) -> AsyncIterator[Deployment]:
    async with deployed("concurrent", 1, 1, max_connections=3) as deployment:
        yield deployment


over_tls = pytest.mark.parametrize("trusted", [True], ids=["TLS"], indirect=True)


async def closed(client: Client) -> bool:
    """Whether the proxy has closed it; it may have sent something before."""
    with contextlib.suppress(ConnectionResetError):
        await client.reader.read()
    return True


async def served(client: Client) -> None:
    client.writer.write(WHOLE)
    assert await client.status() == 200
    await client.reader.readuntil(b"\r\n\r\n")


async def test_idle_connections_make_room_for_others_the_oldest_first(
    crowded: Deployment, trusted: ssl.SSLContext | None
) -> None:
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as all_:
        idle = [await all_.enter_async_context(Client(crowded, trusted)) for _ in range(10)]
        for client in idle[:7]:
            assert await closed(client)
        for client in idle[-3:]:
            await served(client)
        # In the place of one that is kept for a next request.
        await served(await all_.enter_async_context(Client(crowded, trusted)))


@pytest.mark.parametrize("trusted", [False], ids=["plain"], indirect=True)
async def test_a_connection_whose_next_request_has_come_makes_no_room(crowded: Deployment) -> None:
    """That is: in the same moment as the connection that has no room."""
    host, port = crowded.url.removeprefix("http://").split(":")
    crowded.d.behaviour = never
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as all_:
        kept, *others = [await all_.enter_async_context(Client(crowded)) for _ in range(3)]
        kept.writer.write(READY)
        assert await kept.status() == 200
        await kept.reader.readuntil(b"}")
        for each in others:
            each.writer.write(WHOLE)
        await eventually(lambda: len(crowded.d.requests) == 2)
        kept.writer.write(READY)
        all_.enter_context(socket.create_connection((host, int(port))))
        assert b"HTTP/1.1 200" in await kept.reader.read(100)


async def test_a_client_that_still_reads_its_answer_gets_all_of_it(
    crowded: Deployment, trusted: ssl.SSLContext | None
) -> None:
    """Although its connection makes room for another one."""

    async def long(request: web.Request, seen: object) -> web.Response:
        return web.Response(text="a long answer " * 300_000, content_type="application/json")

    crowded.d.behaviour = long
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as all_:
        slow = await all_.enter_async_context(Client(crowded, trusted))
        slow.writer.write(WHOLE)
        assert await slow.status() == 200
        await eventually(lambda: not crowded.proxy.active)
        for _ in range(3):
            await all_.enter_async_context(Client(crowded, trusted))
        assert (await slow.reader.read()).endswith(b"\r\n0\r\n\r\n")


async def test_connections_on_which_nothing_comes_make_room_too(
    crowded: Deployment, trusted: ssl.SSLContext | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS they do not even begin their handshake."""
    monkeypatch.setattr("p2pkv_proxy.app._HANDSHAKES_BESIDE", 0)
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as all_:
        silent = [await all_.enter_async_context(Client(crowded)) for _ in range(10)]
        for client in silent[:7]:
            assert await closed(client)
        await served(await all_.enter_async_context(Client(crowded, trusted)))
        assert await closed(silent[7]) and not any(each.reader.at_eof() for each in silent[8:])


@over_tls
async def test_a_tls_handshake_has_little_time(crowded: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.app._HANDSHAKE_SECONDS", 0.2)
    async with asyncio.timeout(10), Client(crowded) as silent:
        assert await closed(silent)


@over_tls
async def test_a_request_behind_a_tls_handshake_is_served(
    crowded: Deployment, trusted: ssl.SSLContext
) -> None:
    """It comes in one piece with the handshake's end."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = trusted.wrap_bio(received, sent, server_hostname="127.0.0.1")
    async with asyncio.timeout(10), Client(crowded) as client:

        async def step(of: Callable[[], Any]) -> Any:
            while True:
                with contextlib.suppress(ssl.SSLWantReadError):
                    return of()
                client.writer.write(sent.read())
                received.write(await client.reader.read(1 << 16))

        await step(tls.do_handshake)
        tls.write(WHOLE)
        assert (await step(tls.read)).startswith(b"HTTP/1.1 200 ")


async def test_when_all_have_requests_under_way_another_one_is_turned_away(
    crowded: Deployment, trusted: ssl.SSLContext | None, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()
    crowded.d.behaviour = after(release, answer_json)
    async with asyncio.timeout(20), contextlib.AsyncExitStack() as all_:
        busy = [await all_.enter_async_context(Client(crowded, trusted)) for _ in range(3)]
        for number, client in enumerate(busy):
            client.writer.write(WHOLE)
            await eventually(lambda number=number: len(crowded.d.requests) == number + 1)
        come = [Client(crowded, trusted) for _ in range(10)]
        for client in await asyncio.gather(*map(all_.enter_async_context, come)):
            assert await client.status() == 503
            said = await client.reader.read()
            assert b"Retry-After: " in said and b"as many connections as it accepts" in said
        release.set()
        for client in busy:
            assert await client.status() == 200
    lines = [line for line in caplog.records if "takes no more" in line.getMessage()]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("way", "working"),
    [("concurrent", "PD"), ("sequential", "P"), ("sequential", "D")],
    ids=["both", "P", "D"],
)
async def test_a_client_that_leaves_while_they_work(way: Dispatch, working: str) -> None:
    async with deployed(way, 1, 1) as deployment:
        works = [each for each in deployment.instances if each.role in working]
        all_do(works, never)
        asking = await deployment.under_way(*works)
        asking.cancel()
        await eventually(lambda: all(each.requests[0].aborted for each in works))
        await eventually(lambda: all(instance.in_flight == 0 for instance in deployment.everyone()))
        assert len(deployment.d.requests) == ("D" in working)


async def test_a_client_that_leaves_in_the_stream(concurrent: Deployment) -> None:
    concurrent.p.behaviour = never
    concurrent.d.behaviour = streams(asyncio.Event())
    response = await concurrent.begin()
    response.close()
    await eventually(lambda: concurrent.p.requests[0].aborted and concurrent.d.requests[0].aborted)
