"""The HTTP application: endpoints on one side, the registry and its tasks on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from p2pkv.control.security import Members

from .admission import Limits
from .errors import errors_as_json, note_begin
from .http import REQUEST_ID
from .listener import Listener
from .registry import Registry
from .routing import Routing
from .serving import Dispatch, Proxy
from .upstream import Client

# A connection on which no request is under way, or not even its head has come, is closed after this.
IDLE_SECONDS = 75.0

PROXY = web.AppKey("proxy", Proxy)
LISTENER = web.AppKey("listener", Listener)
PLAIN_LISTENER = web.AppKey("plain_listener", Listener)


def make_app(
    discovery: str,
    dispatch: Dispatch = "concurrent",
    registry: Registry | None = None,
    limits: Limits | None = None,
    members: Members | None = None,
    plain_discovery: str | None = None,
    routing: Routing | None = None,
) -> web.Application:
    """The application, for `make_runner`: without it a client that leaves is not noticed.

    Args:
        discovery: ZMQ endpoint on which to listen for pings, such as tcp://127.0.0.1:30001.
        limits: how much it takes on.
        members: whose pings `discovery` takes; None for anybody's.
        plain_discovery: a second endpoint, which takes anybody's.
        routing: how it chooses instances.

    Raises:
        OSError: at start-up, if an endpoint cannot be bound.
    """

    limits = limits or Limits()

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            session = await cleanup.enter_async_context(Client())
            known = registry or Registry(lease=limits.lease)
            app[PROXY] = proxy = Proxy(session, known, dispatch, limits, routing or Routing())
            app[LISTENER] = listener = Listener(discovery, proxy.take, members)
            cleanup.callback(listener.close)
            tasks = [asyncio.create_task(listener.run()), asyncio.create_task(proxy.prober.run())]
            if plain_discovery is not None:
                app[PLAIN_LISTENER] = plain = Listener(plain_discovery, proxy.take)
                cleanup.callback(plain.close)
                tasks.append(asyncio.create_task(plain.run()))
            yield
            await _end([*tasks, *proxy.lingering])

    app = web.Application(client_max_size=limits.max_body, middlewares=[errors_as_json])
    app.cleanup_ctx.append(running)
    app.on_response_prepare.extend((_give_back_id, note_begin))
    app.add_routes(_routes())
    return app


def make_runner(app: web.Application, last_seconds: float) -> web.AppRunner:
    """What serves `app`; at its end connections on which nothing moves are closed after `last_seconds`."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=last_seconds,
        keepalive_timeout=IDLE_SECONDS,
    )


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
