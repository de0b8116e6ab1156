"""SIGTERM under load: of the proxy, as a real process with real clients, and of an instance behind it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from proxy_behaviours import Seen, answer_json, event, event_stream
from proxy_fakes import DEADLINE, Deployment, FakeInstance, deployed, quiet, serve_and_ping
from proxy_process import Command, running

from p2pkv.demo.processes import free_ports
from support.waiting import eventually

DONE = b"data: [DONE]\n\n"


@dataclass
class Started:
    """A proxy in a process of its own, with a P and a D in this one, and a client."""

    command: Command
    url: str
    p: FakeInstance
    d: FakeInstance
    client: aiohttp.ClientSession
    discovery: str

    async def post(self, **fields: Any) -> aiohttp.ClientResponse:
        body = {"model": "tiny", "prompt": "hi"} | fields
        return await self.client.post(f"{self.url}/v1/completions", json=body)

    async def gauges(self) -> dict[str, int]:
        async with self.client.get(f"{self.url}/health") as response:
            found: dict[str, int] = (await response.json())["gauges"]
            return found

    async def waits(self, **wanted: int) -> None:
        """Until the gauges are as wanted."""
        async with asyncio.timeout(DEADLINE):
            while not wanted.items() <= (await self.gauges()).items():
                await asyncio.sleep(0.01)

    def signal(self) -> None:
        self.command.process.send_signal(signal.SIGTERM)

    async def says(self, pattern: str) -> None:
        await asyncio.to_thread(self.command.says, pattern)

    async def ended(self) -> None:
        """It ends with 0, and leaves nothing behind."""
        assert await asyncio.to_thread(self.command.end) == 0
        assert self.command.clean(), self.command.log


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[Started]:
    async with AsyncExitStack() as cleanup:
        discovery = f"127.0.0.1:{free_ports()}"
        command = cleanup.enter_context(running("--port", "0", "--discovery", discovery, *arguments))
        url = (await asyncio.to_thread(command.says, r"serving on (http://127\.0\.0\.1:\d+)"))[1]
        instances = FakeInstance("P"), FakeInstance("D")
        for instance in instances:
            await serve_and_ping(cleanup, discovery, instance)
            await asyncio.to_thread(command.says, f"{instance.http_address} is ready")
        client = await cleanup.enter_async_context(aiohttp.ClientSession())
        yield Started(command, url, *instances, client, discovery)


class Stream:
    """A D's behaviour: a first event, and the rest once `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            response = await event_stream(request)
            await response.write(event(seen, "first"))
            await self.release.wait()
            await response.write(event(seen, "second") + DONE)
            return response
        await self.release.wait()
        return await answer_json(request, seen)


async def test_what_is_under_way_ends_and_nothing_new_begins() -> None:
    async with started("--max-requests", "2", "--drain-seconds", "1000") as proxy:
        proxy.d.behaviour = stream = Stream()
        streaming = await proxy.post(stream=True)
        assert b"first" in await streaming.content.readuntil(b"\n\n")
        whole = asyncio.create_task(proxy.post())
        await eventually(lambda: len(proxy.d.requests) == 2)
        waiting = asyncio.create_task(proxy.post(prompt="waiting"))
        await proxy.waits(under_way=2, waiting=1)
        host, _, port = proxy.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        proxy.signal()

        turned_away = await waiting
        assert turned_away.status == 503
        assert int(turned_away.headers["Retry-After"]) >= 3
        assert "stopping" in (await turned_away.json())["error"]["message"]
        with pytest.raises(OSError):
            await asyncio.open_connection(host, int(port))
        await reader.readuntil(b"}}")
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert b" 503 " in await reader.readline()
        assert b"Connection: close" in await reader.read()
        writer.close()

        assert proxy.command.process.poll() is None
        stream.release.set()
        assert (await streaming.content.read()).endswith(DONE)
        assert (await whole).status == 200
        await proxy.ended()
        assert [seen.body["prompt"] for seen in proxy.d.requests] == ["hi", "hi"]


async def test_at_the_deadline_the_rest_ends_with_errors() -> None:
    async with started("--drain-seconds", "0.2") as proxy:
        proxy.d.behaviour = Stream()
        streaming = await proxy.post(stream=True)
        assert b"first" in await streaming.content.readuntil(b"\n\n")
        whole = asyncio.create_task(proxy.post())
        await eventually(lambda: len(proxy.d.requests) == 2)
        proxy.signal()
        error = json.loads((await streaming.content.read()).removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == (503, "service_unavailable_error")
        assert "had to stop" in error["message"]
        assert (await whole).status == 503
        assert "had to stop" in (await (await whole).json())["error"]["message"]
        await proxy.ended()
        await eventually(lambda: all(seen.aborted for seen in proxy.d.requests))
        assert "2 requests were cut off" in proxy.command.log


async def test_a_second_signal_ends_it_at_once() -> None:
    async with started("--drain-seconds", "1000") as proxy:
        proxy.d.behaviour = Stream()
        streaming = await proxy.post(stream=True)
        assert b"first" in await streaming.content.readuntil(b"\n\n")
        proxy.signal()
        await proxy.says("stopping: 1 requests")
        assert proxy.command.process.poll() is None
        proxy.signal()
        assert b'"code":503' in await streaming.content.read()
        await proxy.ended()


async def test_a_client_that_does_not_read_does_not_hold_it_up() -> None:
    async def flood(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        while True:
            await response.write(event(seen, "x" * 100_000))

    async with started("--drain-seconds", "0.2") as proxy:
        proxy.d.behaviour = flood
        host, _, port = proxy.url.removeprefix("http://").rpartition(":")
        body = b'{"prompt": "x", "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((host, int(port))) as deaf:
            deaf.sendall(head + body)
            await eventually(lambda: len(proxy.d.requests) == 1)
            proxy.signal()
            await proxy.ended()


async def test_half_a_body_does_not_hold_it_up() -> None:
    async with started("--drain-seconds", "0.2") as proxy:
        host, _, port = proxy.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await proxy.waits(held_bytes=1)
        proxy.signal()
        assert b" 503 " in await reader.readline()
        await proxy.ended()
        writer.close()


async def test_a_proxy_that_is_killed_and_started_again_serves_after_a_ping() -> None:
    port, again = str(free_ports()), []
    async with started("--port", port) as proxy:
        assert (await proxy.post()).status == 200
        proxy.command.process.kill()
        await asyncio.to_thread(proxy.command.process.wait)
        with running("--port", port, "--discovery", proxy.discovery):
            async with asyncio.timeout(DEADLINE * 2):
                while 200 not in again:
                    try:
                        response = await proxy.post()
                    except aiohttp.ClientError:  # it is not up yet
                        continue
                    again.append(response.status)
                    assert response.status == 200 or response.headers["Retry-After"]
            assert set(again) <= {200, 503}
            assert (await proxy.post()).status == 200


@pytest.mark.parametrize("role", ["P", "D"])
async def test_a_goodbye_under_load_lets_requests_end(
    role: str,
) -> None:
    async with deployed("concurrent", prefill=2, decode=2) as deployment:
        instances = deployment.prefills if role == "P" else deployment.decodes
        stream = Stream()
        for instance in deployment.decodes:
            instance.behaviour = stream
        answers = [await deployment.post({"prompt": "x", "stream": True}) for _ in range(4)]
        for answer in answers:
            assert b"first" in await answer.content.readuntil(b"\n\n")
        leaver, stayer = instances
        assert len(leaver.requests) == len(stayer.requests) == 2
        await asyncio.to_thread(deployment.pingers[leaver.http_address].stop)
        await eventually(lambda: deployment.routable(role) == [stayer.http_address])
        answers += [await deployment.post({"prompt": "x", "stream": True}) for _ in range(4)]
        assert (len(leaver.requests), len(stayer.requests)) == (2, 6)
        stream.release.set()
        for answer in answers:
            assert (await answer.content.read()).endswith(DONE)
        await gone_quiet(deployment)


async def gone_quiet(deployment: Deployment) -> None:
    await quiet(deployment)
    assert not any(seen.aborted for each in deployment.decodes for seen in each.requests)
