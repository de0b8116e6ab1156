"""The HTTP application: endpoints on one side, the registry and its tasks on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from p2pkv.control.security import Members

from .admission import Limits
from .attempt import Dispatch
from .connections import BoundedRunner
from .errors import errors_as_json, note_begin
from .http import PAIRED, REQUEST_ID, SINGLE
from .instances import Access, changed, described, drain, listed
from .listed import ListedInstance, ListedInstances
from .listener import Listener
from .metrics import Metrics
from .records import recording
from .registry import Registry
from .relay import written_in_time
from .routing import Routing
from .service import Proxy
from .siblings import Siblings, answering
from .status import dashboard, keep_history, metrics_page, status_of, status_page
from .tracing import NoSpans, Tracing
from .upstream import Client
from .worker import Report, Update, Worker

# A connection on which no request is under way, or not even its head has come, is closed after this.
IDLE_SECONDS = 75.0

# What is counted and logged as requests.
API = PAIRED | SINGLE | {"/v1/models"}

PROXY = web.AppKey("proxy", Proxy)
SIBLINGS = web.AppKey("siblings", Siblings)
LISTENER = web.AppKey("listener", Listener)
MOST_CONNECTIONS = web.AppKey("most_connections", int)
PLAIN_LISTENER = web.AppKey("plain_listener", Listener)


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
    tracing: Tracing | None = None,
    listed: Sequence[ListedInstance] = (),
    worker: Worker | None = None,
) -> web.Application:
    """The application, for `make_runner`: without it a client that leaves is not noticed.

    Args:
        discovery: ZMQ endpoint on which to listen for pings, such as tcp://127.0.0.1:30001.
        limits: how much it takes on.
        members: whose pings `discovery` takes; None for anybody's.
        plain_discovery: a second endpoint, which takes anybody's.
        routing: how it chooses instances.
        guard: who may ask, who may see instances, and who may drain them.
        log_requests: write a line for each request.
        tracing: makes the spans of requests, and is closed at the end.
        listed: instances that are there without a ping, as long as their /health answers.
        worker: this process, if it is one of several; then the endpoints are not listened on here.

    Raises:
        OSError: at start-up, if an endpoint cannot be bound.
    """

    guard = guard or Access()
    limits = limits or Limits()
    metrics = Metrics()
    spans = tracing or NoSpans()

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            session = await cleanup.enter_async_context(Client())
            known = registry or Registry(lease=limits.lease)
            app[PROXY] = proxy = Proxy(
                session, known, dispatch, limits, routing or Routing(), metrics=metrics
            )
            parts = _parts(proxy, guard)
            app[SIBLINGS] = Siblings(parts, worker.seat.others if worker else None)
            if worker is not None:
                update = partial(_update, worker, proxy)
                await cleanup.enter_async_context(answering(worker.seat.socket, parts | {"update": update}))
            there = ListedInstances(listed, session, known, proxy.take, members, proxy.clock)
            forever = [proxy.prober.run(), there.run(), keep_history(metrics)]
            if worker is None:
                app[LISTENER] = listener = Listener(discovery, proxy.take, members)
                cleanup.callback(listener.close)
                forever.append(listener.run())
            if worker is None and plain_discovery is not None:
                app[PLAIN_LISTENER] = plain = Listener(plain_discovery, proxy.take)
                cleanup.callback(plain.close)
                forever.append(plain.run())
            tasks = [asyncio.create_task(each) for each in forever]
            yield
            await end([*tasks, *proxy.lingering])
            await asyncio.to_thread(spans.close)

    recorded = recording(metrics, API, spans, log_requests=log_requests)
    # A larger one could never be held, and its client would try again for ever.
    largest = min(limits.max_body, limits.max_held)
    app = web.Application(client_max_size=largest, middlewares=[written_in_time, errors_as_json, recorded])
    app[MOST_CONNECTIONS] = limits.max_connections
    app.cleanup_ctx.append(running)
    app.on_response_prepare.extend((_give_back_id, note_begin))
    app.add_routes(_routes(guard, metrics))
    return app


def make_runner(app: web.Application, last_seconds: float) -> web.AppRunner:
    """What serves `app`, to a bounded number of connections; at its end connections on which nothing moves
    are closed after `last_seconds`."""
    return BoundedRunner(
        app,
        app[MOST_CONNECTIONS],
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=last_seconds,
        keepalive_timeout=IDLE_SECONDS,
    )


def _parts(proxy: Proxy, guard: Access) -> dict[str, Callable[[Any], Any]]:
    """What one worker says for itself."""
    return {
        "metrics": lambda _: proxy.metrics.families(),
        "status": lambda _: status_of(proxy, guard),
        "instances": lambda _: [described(proxy, each) for each in proxy.instances()],
        "drain": partial(drain, proxy, drained=True),
        "resume": partial(drain, proxy, drained=False),
    }


def _update(worker: Worker, proxy: Proxy, update: Any) -> Report:
    """One of the supervisor's, as it arrives."""
    return worker.update(msgspec.convert(update, Update), proxy.registry, proxy.take)


def _routes(guard: Access, metrics: Metrics) -> list[web.RouteDef]:
    async def generate(request: web.Request) -> web.StreamResponse:
        guard.ask(request)
        return await request.app[PROXY].generate(request)

    async def models(request: web.Request) -> web.StreamResponse:
        guard.ask(request)
        return await request.app[PROXY].models(request)

    async def health(request: web.Request) -> web.StreamResponse:
        return await request.app[PROXY].health(request)

    async def ready(request: web.Request) -> web.StreamResponse:
        return await request.app[PROXY].ready(request)

    async def instances(request: web.Request) -> web.StreamResponse:
        return await listed(request.app[SIBLINGS], guard, request)

    async def drained(request: web.Request) -> web.StreamResponse:
        return await changed(request.app[SIBLINGS], guard, request, "drain")

    async def resumed(request: web.Request) -> web.StreamResponse:
        return await changed(request.app[SIBLINGS], guard, request, "resume")

    async def status(request: web.Request) -> web.StreamResponse:
        return await status_page(request.app[SIBLINGS], guard, request)

    async def measured(request: web.Request) -> web.StreamResponse:
        return await metrics_page(request.app[SIBLINGS], metrics, guard, request)

    return [
        *(web.post(path, generate) for path in sorted(PAIRED | SINGLE)),
        web.get("/v1/models", models),
        web.get("/health", health),
        web.get("/ready", ready),
        web.get("/instances", instances),
        web.post("/instances/{address}/drain", drained),
        web.post("/instances/{address}/resume", resumed),
        web.get("/status", status),
        web.get("/metrics", measured),
        web.get("/", dashboard),
    ]


async def _give_back_id(request: web.Request, response: web.StreamResponse) -> None:
    """Returns the client's own X-Request-Id; instances get it as X-Client-Request-Id."""
    theirs = request.headers.get(REQUEST_ID)
    if theirs:
        response.headers[REQUEST_ID] = theirs


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
