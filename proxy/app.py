"""The HTTP application: endpoints on one side, the registry and its tasks on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from p2pkv.control.security import Members

from . import admin
from .access import Access
from .attempt import Dispatch
from .connections import BoundedRunner
from .http import PAIRED, SINGLE
from .limits import Limits
from .membership import Membership
from .membership.listed import ListedInstance
from .membership.registry import Registry, random_turn
from .metrics import Metrics
from .policy import Routing
from .service import PROXY, Handler, Proxy, by_proxy, errors_as_json, note_begin, recording, written_in_time
from .siblings import Siblings, answering
from .tracing import Spans
from .upstream import Client
from .worker import Update, WorkerReport, WorkerState

# A connection on which no request is under way, or not even its head has come, is closed after this.
IDLE_SECONDS = 75.0

# What is counted and logged as requests.
API = PAIRED | SINGLE | {"/v1/models"}

SIBLINGS = web.AppKey("siblings", Siblings)
MOST_CONNECTIONS = web.AppKey("most_connections", int)


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
    worker: WorkerState | None = None,
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
        worker: this process, if it is one of several; then the endpoints are not listened on here.

    Raises:
        OSError: at start-up, if an endpoint cannot be bound.
    """

    guard = guard or Access()
    limits = limits or Limits()
    metrics = Metrics()

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            client = await cleanup.enter_async_context(Client())
            membership = Membership(
                client.kept, registry or Registry(lease=limits.lease, first_turn=random_turn)
            )
            cleanup.callback(membership.close)
            app[PROXY] = proxy = Proxy(
                client, membership, dispatch, limits, routing or Routing(), metrics=metrics, guard=guard
            )
            parts = _parts(proxy, guard)
            app[SIBLINGS] = Siblings(parts, worker.config.others if worker else None)
            if worker is not None:
                update = partial(_update, worker, proxy)
                await cleanup.enter_async_context(answering(worker.config.socket, parts | {"update": update}))
            membership.watch(listed, members)
            if worker is None:
                membership.listen(discovery, members)
                if plain_discovery is not None:
                    membership.listen(plain_discovery)
            forever = [membership.run(), admin.keep_history(metrics)]
            tasks = [asyncio.create_task(each) for each in forever]
            yield
            await end([*tasks, *proxy.lingering])
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    recorded = recording(metrics, API, tracing, log_requests=log_requests)
    # A larger one could never be held, and its client would try again for ever.
    largest = min(limits.max_body, limits.max_held)
    app = web.Application(client_max_size=largest, middlewares=[written_in_time, recorded, errors_as_json])
    app[MOST_CONNECTIONS] = limits.max_connections
    app.cleanup_ctx.append(running)
    app.on_response_prepare.extend((note_begin,))
    app.add_routes(_routes(guard))
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
    """What one worker answers for itself."""
    return {
        "metrics": lambda _: proxy.exposition.families(),
        "status": lambda _: admin.status_of(proxy, guard),
        "instances": lambda _: [admin.described(proxy, each) for each in proxy.instances()],
        "drain": lambda about: admin.drain(proxy, about[0], drained=True, seconds=about[1]),
        "resume": lambda about: admin.drain(proxy, about[0], drained=False),
    }


def _update(worker: WorkerState, proxy: Proxy, update: Any) -> WorkerReport:
    """One of the supervisor's, as it arrives."""
    return worker.update(msgspec.convert(update, Update), proxy.registry, proxy.membership.take)


def _routes(guard: Access) -> list[web.RouteDef]:
    Serve = Callable[[Any, Access, web.Request], Awaitable[web.StreamResponse]]

    def of_all_workers(serve: Serve) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            return await serve(request.app[SIBLINGS], guard, request)

        return handler

    return [
        *(web.post(path, by_proxy(Proxy.generate)) for path in sorted(PAIRED | SINGLE)),
        web.get("/v1/models", by_proxy(Proxy.models)),
        web.get("/health", by_proxy(admin.health_page)),
        web.get("/ready", by_proxy(admin.ready_page)),
        web.get("/instances", of_all_workers(admin.listed)),
        web.post("/instances/{address}/drain", of_all_workers(partial(admin.changed, what="drain"))),
        web.post("/instances/{address}/resume", of_all_workers(partial(admin.changed, what="resume"))),
        web.get("/status", of_all_workers(admin.status_page)),
        web.get("/metrics", of_all_workers(admin.metrics_page)),
        web.get("/", admin.dashboard),
    ]


async def end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
