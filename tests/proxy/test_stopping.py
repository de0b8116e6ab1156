"""SIGTERM under load: of the proxy, as a real process with real clients, and of an instance behind it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from proxy_behaviours import DONE, Behaviour, after, answer_json, by_kind, chosen, flood, stream_of
from proxy_fakes import DEADLINE, connect
from proxy_process import Served, running, served

from p2pkv.demo.processes import free_ports
from support.waiting import eventually


def stream(release: asyncio.Event) -> Behaviour:
    """Of a D: a first event, and the rest once it may."""
    return by_kind(stream_of("first", release, "second", DONE), after(release, answer_json))


async def waits(proxy: Served, **wanted: int) -> None:
    """Until the gauges are as wanted."""

    async def there() -> bool:
        found: dict[str, int] = (await proxy.get("/health"))[1]["gauges"]
        return wanted.items() <= found.items()

    await eventually(there, f"{wanted}")


async def test_what_is_under_way_ends_and_nothing_new_begins() -> None:
    async with served("--max-requests", "2", "--drain-seconds", "1000") as proxy:
        release = asyncio.Event()
        proxy.d.behaviour = stream(release)
        streaming = await proxy.begin()
        whole = asyncio.create_task(proxy.post())
        await eventually(lambda: len(proxy.d.requests) == 2)
        waiting = asyncio.create_task(proxy.post(prompt="waiting"))
        await waits(proxy, under_way=2, waiting=1)
        reader, writer = await connect(proxy.url)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await reader.readline()
        proxy.terminate()

        turned_away = await waiting
        assert turned_away.status == 503
        assert int(turned_away.headers["Retry-After"]) >= 3
        assert "stopping" in (await turned_away.json())["error"]["message"]
        with pytest.raises(OSError):
            await connect(proxy.url)
        await reader.readuntil(b"}}")
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        assert b" 503 " in await reader.readline()
        assert b"Connection: close" in await reader.read()
        writer.close()

        assert proxy.command.process.poll() is None
        release.set()
        assert (await streaming.content.read()).endswith(DONE)
        assert (await whole).status == 200
        await proxy.ended()
        assert [seen.body["prompt"] for seen in proxy.d.requests] == ["hi", "hi"]


async def test_at_the_deadline_the_rest_ends_with_errors() -> None:
    """Neither a client that does not read nor half a body holds it up."""
    async with served("--drain-seconds", "0.2") as proxy:
        answer, endless = stream(asyncio.Event()), flood(100_000)
        proxy.d.behaviour = chosen(lambda seen: endless if seen.body["prompt"] == "deaf" else answer)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
        reader, half = await connect(proxy.url)
        half.write((head.format(100) + "{").encode())
        await waits(proxy, held_bytes=1)
        streaming = await proxy.begin()
        whole = asyncio.create_task(proxy.post())
        _, deaf = await connect(proxy.url)
        deaf.transport.pause_reading()
        body = '{"prompt": "deaf", "stream": true}'
        deaf.write((head.format(len(body)) + body).encode())
        await eventually(lambda: len(proxy.d.requests) == 3)
        proxy.terminate()
        error = json.loads((await streaming.content.read()).removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == (503, "service_unavailable_error")
        assert "had to stop" in error["message"]
        assert (await whole).status == 503
        assert "had to stop" in (await (await whole).json())["error"]["message"]
        assert b" 503 " in await reader.readline()
        await proxy.ended()
        await eventually(lambda: all(seen.aborted for seen in proxy.d.requests))
        assert "requests were cut off" in proxy.command.log
        deaf.close()
        half.close()


async def test_a_second_signal_ends_it_at_once() -> None:
    async with served("--drain-seconds", "1000") as proxy:
        proxy.d.behaviour = stream(asyncio.Event())
        streaming = await proxy.begin()
        proxy.terminate()
        await proxy.says("stopping: 1 requests")
        assert proxy.command.process.poll() is None
        proxy.terminate()
        assert b'"code":503' in await streaming.content.read()
        await proxy.ended()


async def test_a_proxy_that_is_killed_and_started_again_serves_after_a_ping() -> None:
    port, again = str(free_ports()), []
    async with served("--port", port) as proxy:
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
