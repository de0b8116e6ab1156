"""What a fake instance does with a request."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from support.waiting import eventually


@dataclass
class Seen:
    """One request that reached an instance. `answered`: its handler has run to its end; `aborted`: the proxy
    has closed the connection before that."""

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


def answers(make: Callable[[Seen], web.StreamResponse]) -> Behaviour:
    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        return make(seen)

    return behaviour


answer_json = answers(lambda seen: web.json_response(completion(seen)))


def answer_error(status: int, message: str = "no", **options: Any) -> Behaviour:
    def error(seen: Seen) -> web.Response:
        said = {"message": f"{message} {seen.request_id}", "type": "X", "code": status}
        return web.json_response({"error": said}, status=status, **options)

    return answers(error)


EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8"}


async def event_stream(request: web.Request, headers: dict[str, str] = EVENT_STREAM) -> web.StreamResponse:
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


def event(seen: Seen, text: str) -> bytes:
    return b"data: " + json.dumps(completion(seen, text)).encode() + b"\n\n"


def die(request: web.Request, _: Seen | None = None) -> None:
    """As kill -9: the connection is reset, whatever was under way."""
    request.transport.abort()


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""With `--sse-keep-alive-interval` vLLM sends it while there is nothing else."""
Step = str | bytes | asyncio.Event | Callable[[web.Request, Seen], object]


def stream_of(*steps: Step, headers: dict[str, str] = EVENT_STREAM) -> Behaviour:
    """A stream. A text is an event with it, bytes go as they are, an Event is waited for, and `die`,
    `forever` or another function is called: what it returns goes, too, if it is bytes."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request, headers)
        for step in steps:
            if isinstance(step, str):
                await response.write(event(seen, step))
            elif isinstance(step, bytes):
                await response.write(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                made = step(request, seen)
                if inspect.isawaitable(made):
                    made = await made
                if isinstance(made, bytes):
                    await response.write(made)
        return response

    return behaviour


async def a_moment(request: web.Request, seen: Seen) -> None:
    """So that what comes before and after travels by itself."""
    await asyncio.sleep(0)


def flood(size: int) -> Behaviour:
    """Events of so many characters, far more than any client reads."""
    return stream_of(*["x" * size] * 10_000)


async def forever(*_: object) -> None:
    """Until the connection is closed."""
    await asyncio.Event().wait()


async def never(request: web.Request, seen: Seen) -> web.StreamResponse:
    await forever()
    raise AssertionError("unreachable")


never_a_token = stream_of(b": waiting\n\n", forever)
"""The stream's head, as vLLM sends it while D still waits for KV; then nothing but a comment."""


async def dies(request: web.Request, seen: Seen) -> web.StreamResponse:
    die(request)
    return web.Response()


dies_before_a_token = stream_of(b": waiting\n\n", die)


dies_in_the_body = stream_of(
    b'{"id": "', die, headers={"Content-Type": "application/json", "Content-Length": "1000"}
)


def chosen(choose: Callable[[Seen], Behaviour]) -> Behaviour:
    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        return await choose(seen)(request, seen)

    return behaviour


def with_a_p(behaviour: Behaviour, otherwise: Behaviour = answer_json) -> Behaviour:
    """What a D does with requests that wait for a P's KV; others it answers."""
    return chosen(lambda seen: behaviour if "_addr_" in seen.request_id else otherwise)


def by_kind(streamed: Behaviour, whole: Behaviour) -> Behaviour:
    return chosen(lambda seen: streamed if seen.body.get("stream") else whole)


def after(ready: asyncio.Event | Callable[[], bool], behaviour: Behaviour) -> Behaviour:
    async def waits(request: web.Request, seen: Seen) -> web.StreamResponse:
        await (ready.wait() if isinstance(ready, asyncio.Event) else eventually(ready))
        return await behaviour(request, seen)

    return waits


def streams(release: asyncio.Event) -> Behaviour:
    return stream_of("first", release, "second")


streams_at_once = stream_of("first", "second")


def given_up(seen: Seen, text: str = "hel") -> bytes:
    """What vLLM makes of a request that it is at when it is told to stop, in its spelling of JSON."""
    choice = {"index": 0, "text": text, "finish_reason": "abort"}
    return json.dumps(completion(seen) | {"choices": [choice]}, separators=(",", ":")).encode()


def given_up_event(_: web.Request, seen: Seen) -> bytes:
    return b"data: " + given_up(seen, "") + b"\n\n"


stops = answers(lambda seen: web.Response(body=given_up(seen), content_type="application/json"))
stops_before_a_token = stream_of(given_up_event, DONE)
