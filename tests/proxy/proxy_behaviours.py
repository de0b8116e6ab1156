"""What a fake instance does with a request."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web


@dataclass
class Seen:
    """One request that reached an instance.

    Attributes:
        answered: its handler has run to its end.
        aborted: the proxy has closed the connection before that.
    """

    path: str
    headers: Any
    raw: bytes
    answered: bool = False
    aborted: bool = False

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def request_id(self) -> str:
        return str(self.headers["X-Request-Id"])


Behaviour = Callable[[web.Request, Seen], Awaitable[web.StreamResponse]]


def completion(seen: Seen, text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"id": f"cmpl-{seen.request_id}", "object": "text_completion", "choices": [{"text": text}], **more}


async def answer_json(request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.json_response(completion(seen))


def answer_error(status: int, message: str = "no", **options: Any) -> Behaviour:
    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        error = {"error": {"message": f"{message} {seen.request_id}", "type": "X", "code": status}}
        return web.json_response(error, status=status, **options)

    return behaviour


async def event_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


def event(seen: Seen, text: str) -> bytes:
    return b"data: " + json.dumps(completion(seen, text)).encode() + b"\n\n"


def die(request: web.Request) -> None:
    """As kill -9: the connection is reset, whatever was under way."""
    assert request.transport is not None
    request.transport.abort()


DONE = b"data: [DONE]\n\n"
Step = str | bytes | asyncio.Event | Callable[[web.Request], object]


def stream_of(*steps: Step) -> Behaviour:
    """A stream. A text is an event with it, bytes go as they are, an Event is waited for, and `die`,
    `forever` or another function of the request is called."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        for step in steps:
            if isinstance(step, str | bytes):
                await response.write(step if isinstance(step, bytes) else event(seen, step))
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                made = step(request)
                if inspect.isawaitable(made):
                    await made
        return response

    return behaviour


def flood(size: int) -> Behaviour:
    """Events of so many characters, without end."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        while True:
            await response.write(event(seen, "x" * size))

    return behaviour


async def forever(request: web.Request) -> None:
    """Until the connection is closed."""
    await asyncio.Event().wait()


async def never(request: web.Request, seen: Seen) -> web.StreamResponse:
    await forever(request)
    raise AssertionError("unreachable")


never_a_token = stream_of(b": waiting\n\n", forever)
"""The stream's head, as vLLM sends it while D still waits for KV; then nothing but a comment."""


async def dies(request: web.Request, seen: Seen) -> web.StreamResponse:
    die(request)
    return web.Response()


dies_before_a_token = stream_of(b": waiting\n\n", die)


async def dies_in_the_body(request: web.Request, seen: Seen) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id": "')
    die(request)
    return response


def with_a_p(behaviour: Behaviour, otherwise: Behaviour = answer_json) -> Behaviour:
    """What a D does with requests that wait for a P's KV; others it answers."""

    async def either(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await (behaviour if "_addr_" in seen.request_id else otherwise)(request, seen)

    return either


def after(ready: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    async def waits(request: web.Request, seen: Seen) -> web.StreamResponse:
        await ready.wait()
        return await behaviour(request, seen)

    return waits


def telling(called: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    async def tells(request: web.Request, seen: Seen) -> web.StreamResponse:
        called.set()
        return await behaviour(request, seen)

    return tells


def streams(release: asyncio.Event) -> Behaviour:
    """Two events, the second when it may."""
    return stream_of("first", release, "second")


streams_at_once = stream_of("first", "second")


def given_up(seen: Seen, text: str = "hel") -> bytes:
    """What vLLM makes of a request that it is at when it is told to stop, in its spelling of JSON."""
    choice = {"index": 0, "text": text, "finish_reason": "abort"}
    return json.dumps(completion(seen) | {"choices": [choice]}, separators=(",", ":")).encode()


async def stops(request: web.Request, seen: Seen) -> web.StreamResponse:
    return web.Response(body=given_up(seen), content_type="application/json")


async def stops_before_a_token(request: web.Request, seen: Seen) -> web.StreamResponse:
    response = await event_stream(request)
    await response.write(b"data: " + given_up(seen, "") + b"\n\ndata: [DONE]\n\n")
    return response
