"""The HTTP application: endpoints on one side, the registry and its tasks on the other."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiohttp import web

from p2pkv.control.security import Members

from . import admin
from .access import Access
from .attempt import Dispatch
from .connections import BoundedRunner, on_expect
from .cors import Cors
from .http import PAIRED, SINGLE
from .limits import Limits
from .membership import Membership
from .membership.listed import ListedInstance
from .membership.registry import Registry, random_turn
from .metrics import Metrics
from .policies import Routing
from .service import PROXY, Proxy, by_proxy, errors_as_json, note_begin, recording, written_in_time
from .tenants import Tenants
from .tracing import Spans
from .upstream import Client

# A connection on which no request is under way, or not even its head has come, is closed after this.
IDLE_SECONDS = 75.0

# What is counted and logged as requests.
API = PAIRED | SINGLE | {"/v1/models"}

MAX_CONNECTIONS = web.AppKey("most_connections", int)


def make_app(
    discovery: str,
    dispatch: Dispatch = "concurrent",
    registry: Registry | None = None,
    limits: Limits | None = None,
    members: Members | None = None,
    plain_discovery: str | None = None,
    routing: Routing | None = None,
    guard: Access | None = None,
    log_requests: bool = False,
    tracing: Spans | None = None,
    listed: Sequence[ListedInstance] = (),
    tenants: Tenants | None = None,
    cors: Cors | None = None,
) -> web.Application:
    """The application, for `make_runner`: without it a client that leaves is not noticed.

    Args:
        discovery: ZMQ endpoint on which to listen for pings, such as tcp://127.0.0.1:30001.
        limits: how much it takes on.
        members: whose pings `discovery` takes; None for all.
        plain_discovery: a second endpoint, which takes all.
        routing: how it chooses instances.
        guard: who may ask, who may see instances, and who may drain them.
        log_requests: write a line for each request.
        tracing: makes the spans of requests, and is closed at the end.
        listed: instances that are there without a ping, as long as their /health answers.
        tenants: whose requests they are; None if all are alike.
        cors: what browsers may do from pages of other origins.

    Raises:
        OSError: at start-up, if an endpoint cannot be bound.
    """

    limits = limits or Limits()
    metrics = Metrics()

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            client = await cleanup.enter_async_context(Client())
            membership = Membership(
                client.pooled, registry or Registry(lease=limits.lease, first_turn=random_turn)
            )
            cleanup.callback(membership.close)
            app[PROXY] = proxy = Proxy(
                client,
                membership,
                dispatch,
                limits,
                routing or Routing(),
                metrics=metrics,
                guard=guard or Access(),
                tenants=tenants,
            )
            membership.watch(listed, members)
            membership.listen(discovery, members)
            if plain_discovery is not None:
                membership.listen(plain_discovery)
            forever = [membership.run(), admin.keep_history(metrics)]
            tasks = [asyncio.create_task(each) for each in forever]
            yield
            await end([*tasks, *proxy.background])
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    recorded = recording(metrics, API, tracing, log_requests=log_requests)
    # A larger one could never be held, and its client would try again for ever.
    largest = min(limits.max_body, limits.max_held)
    middlewares = [written_in_time, recorded, errors_as_json]
    if cors is not None and cors.origins:
        middlewares.insert(1, cors.middleware())
    app = web.Application(client_max_size=largest, middlewares=middlewares)
    app[MAX_CONNECTIONS] = limits.max_connections
    app.cleanup_ctx.append(running)
    app.on_response_prepare.append(note_begin)
    if cors is not None and cors.origins:
        app.on_response_prepare.append(cors.prepare)
    app.add_routes(_ROUTES)
    return app


def make_runner(
    app: web.Application, last_seconds: float, tls: ssl.SSLContext | None = None
) -> web.AppRunner:
    """What serves `app`, to a bounded number of connections, over `tls` if there is that; at its end
    connections on which nothing moves are closed after `last_seconds`. Its sites get no ssl_context."""
    return BoundedRunner(
        app,
        app[MAX_CONNECTIONS],
        tls,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=last_seconds,
        keepalive_timeout=IDLE_SECONDS,
    )


_ROUTES = [
    *(web.post(path, by_proxy(Proxy.generate), expect_handler=on_expect) for path in sorted(PAIRED | SINGLE)),
    web.get("/v1/models", by_proxy(Proxy.models)),
    web.get("/health", by_proxy(admin.health_page)),
    web.get("/ready", by_proxy(admin.ready_page)),
    web.get("/instances", by_proxy(admin.instances_page)),
    web.post("/instances/{address}/drain", by_proxy(partial(admin.drain, drained=True))),
    web.post("/instances/{address}/resume", by_proxy(partial(admin.drain, drained=False))),
    web.get("/status", by_proxy(admin.status_page)),
    web.get("/metrics", by_proxy(admin.metrics_page)),
    web.get("/", admin.dashboard),
]


async def end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
