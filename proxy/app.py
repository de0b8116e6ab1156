"""The HTTP application: endpoints on one side, the registry and its tasks on the other."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
from aiohttp import web

from p2pkv.control.discovery import Ping
from p2pkv.control.members import Members

from .bodies import BadBody, parse
from .dispatch import Exchange, alone, concurrent, sequential
from .errors import RETRY_AFTER, Failure, errors_as_json
from .headers import REQUEST_ID
from .listener import Listener
from .models import merged
from .prober import Prober
from .registry import Registry
from .routing import Choice, NoInstance, Router, UnknownModel
from .upstream import Reply, open_session

MAX_BODY_BYTES = 64 << 20

Dispatch = Literal["concurrent", "sequential"]


@dataclass
class Proxy:
    """All that the handlers share.

    Attributes:
        dispatch: whether P and D get a request at once or one after the other.
        lingering: P's calls whose client has its answer already.
        clock: monotonic seconds.
    """

    session: aiohttp.ClientSession
    registry: Registry
    dispatch: Dispatch
    clock: Callable[[], float] = time.monotonic
    router: Router = field(init=False)
    prober: Prober = field(init=False)
    lingering: set[asyncio.Task[Reply]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.router = Router(self.registry)
        self.prober = Prober(self.session, self.registry, self.clock)

    def take(self, ping: Ping) -> None:
        """One ping from the discovery socket."""
        if self.registry.observe(ping, self.clock()) is not None:
            self.prober.hurry()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        try:
            body = parse(await request.read())
        except BadBody as error:
            raise Failure(400, str(error)) from None
        choice = self._choose(body.model, paired=body.wants_pair)
        exchange = Exchange(self.session, request, body, choice, uuid.uuid4().hex, self.lingering)
        if choice.prefill is None:
            return await alone(exchange)
        return await (concurrent if self.dispatch == "concurrent" else sequential)(exchange)

    def _choose(self, model: str | None, *, paired: bool) -> Choice:
        now = self.clock()
        try:
            return self.router.pair(model, now) if paired else self.router.alone(model, now)
        except NoInstance as error:
            raise Failure(503, f"{error} Try again in a few seconds.") from None
        except UnknownModel as error:
            raise Failure(404, str(error)) from None

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        decoders = self.registry.routable("D", self.clock())
        if not decoders:
            raise Failure(503, " ".join(self.router.missing(self.clock())))
        return await merged(self.session, request, decoders, uuid.uuid4().hex)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request can be served, else 503 and what is missing."""
        now = self.clock()
        missing = self.router.missing(now)
        report = {
            "status": "unavailable" if missing else "ok",
            "prefill": len(self.registry.routable("P", now)),
            "decode": len(self.registry.routable("D", now)),
            "missing": missing,
        }
        return web.json_response(
            report, status=503 if missing else 200, headers=RETRY_AFTER if missing else None
        )


PROXY = web.AppKey("proxy", Proxy)
LISTENER = web.AppKey("listener", Listener)
PLAIN_LISTENER = web.AppKey("plain_listener", Listener)


def make_app(
    discovery: str,
    dispatch: Dispatch = "concurrent",
    registry: Registry | None = None,
    max_body: int = MAX_BODY_BYTES,
    members: Members | None = None,
    plain_discovery: str | None = None,
) -> web.Application:
    """The application; run it with `handler_cancellation=True`, or a client that leaves is not noticed.

    Args:
        discovery: ZMQ endpoint on which to listen for pings, such as tcp://127.0.0.1:30001.
        max_body: bytes of the largest request.
        members: whose pings `discovery` takes; None for anybody's.
        plain_discovery: a second endpoint, which takes anybody's.

    Raises:
        OSError: at start-up, if an endpoint cannot be bound.
    """

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            session = await cleanup.enter_async_context(open_session())
            app[PROXY] = proxy = Proxy(session, registry or Registry(), dispatch)
            app[LISTENER] = listener = Listener(discovery, proxy.take, members)
            cleanup.callback(listener.close)
            tasks = [asyncio.create_task(listener.run()), asyncio.create_task(proxy.prober.run())]
            if plain_discovery is not None:
                app[PLAIN_LISTENER] = plain = Listener(plain_discovery, proxy.take)
                cleanup.callback(plain.close)
                tasks.append(asyncio.create_task(plain.run()))
            yield
            await _end([*tasks, *proxy.lingering])

    app = web.Application(client_max_size=max_body, middlewares=[errors_as_json])
    app.cleanup_ctx.append(running)
    app.on_response_prepare.append(_give_back_id)
    app.add_routes(_routes())
    return app


def _routes() -> list[web.RouteDef]:
    async def generate(request: web.Request) -> web.StreamResponse:
        return await request.app[PROXY].generate(request)

    async def models(request: web.Request) -> web.StreamResponse:
        return await request.app[PROXY].models(request)

    async def health(request: web.Request) -> web.StreamResponse:
        return await request.app[PROXY].health(request)

    return [
        web.post("/v1/completions", generate),
        web.post("/v1/chat/completions", generate),
        web.get("/v1/models", models),
        web.get("/health", health),
    ]


async def _give_back_id(request: web.Request, response: web.StreamResponse) -> None:
    """The client's own X-Request-Id reaches no instance, but the client finds it in the answer."""
    theirs = request.headers.get(REQUEST_ID)
    if theirs:
        response.headers[REQUEST_ID] = theirs


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
