"""Fake instances over real HTTP and real pings, and a proxy in the same event loop."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from proxy_behaviours import Behaviour, Seen, answer_json, chosen

from p2pkv.control.discovery import Ping
from p2pkv.control.pinger import Pinger
from p2pkv.control.security import Members
from p2pkv.demo.processes import free_ports
from p2pkv_proxy.access import Access
from p2pkv_proxy.app import BoundedRunner, make_app
from p2pkv_proxy.attempt import Attempt, Dispatch
from p2pkv_proxy.bodies import Prompt
from p2pkv_proxy.http import PAIRED, SINGLE
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Instance, Role
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import Routing
from p2pkv_proxy.relay import AnswerFilter, Scrubber
from p2pkv_proxy.routing import Choice, Router
from p2pkv_proxy.service import PROXY, Proxy
from support.waiting import DEADLINE, eventually

PING_SECONDS = 0.1
_ports = itertools.count(21001)


def ping(role: Role = "P", port: int = 8100, **more: Any) -> Ping:
    """As an instance of the registry's own tests, which nobody can reach."""
    address = f"10.0.0.1:{port}"
    return Ping(type=role, http_address=address, zmq_address=f"10.0.0.1:{port + 10000}", **more)


def prompt_of(fields: Mapping[str, Any]) -> Prompt:
    return Prompt({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()})


def filter_of(
    path: str, *, streamed: bool = True, old: str = "the request's id", new: str = "the client's id"
) -> AnswerFilter:
    scrubber = Scrubber(Choice(None, join(Registry(), ping("D"))), old, new)
    return AnswerFilter(path, scrubber, streamed=streamed)


def join(registry: Registry, message: Ping, now: float = 0.0, line: Any = None) -> Instance:
    instance = registry.observe(message, now, line)
    instance.healthy = True
    return instance


def held(deployment: Deployment) -> dict[str, int]:
    """Whatever the proxy holds for requests; all 0 when nothing is under way."""
    proxy = deployment.proxy
    gauges = {
        name: value
        for name, value in proxy.gauges().items()
        if name not in ("breakers_open", "silent", "engines_paused")
    }
    return gauges | {
        "seats": sum(instance.places for instance in deployment.everyone()),
        "ahead": sum(instance.prefetch_tokens for instance in deployment.everyone()),
        "coming": sum(instance.expected for instance in deployment.everyone()),
        "tokens": sum(instance.tokens for instance in deployment.everyone()),
        "lingering": len(proxy.background),
        "handlers": len(proxy.active),
        "connections": sum(
            len(each.connector._acquired)
            for each in (proxy.session.pooled, proxy.session._fresh)
            if each.connector
        ),
    }


def attempt_of(deployment: Deployment) -> Attempt:
    """Of the only request under way."""
    (active,) = deployment.proxy.active
    return active.attempt  # type: ignore[return-value]


def asked(instances: Iterable[FakeInstance]) -> list[int]:
    """How many requests reached each, fewest first; one that came twice over two connections is one."""
    return sorted(len({seen.request_id for seen in each.requests}) for each in instances)


def all_do(instances: Iterable[FakeInstance], behaviour: Behaviour) -> None:
    for each in instances:
        each.behaviour = behaviour


def take_turns(instances: Iterable[FakeInstance], *behaviours: Behaviour) -> None:
    """The first request to any of these gets the first behaviour, and so on; all later ones the last."""
    several = list(instances)
    all_do(several, chosen(lambda _: behaviours[min(sum(asked(several)), len(behaviours)) - 1]))


def called(*instances: FakeInstance) -> bool:
    return all(instance.requests for instance in instances)


def outcomes(instance: Instance) -> list[bool]:
    return [success for _, success in instance.breaker._outcomes]


@dataclass(eq=False)
class Line:
    """A connection of an instance, of tests that have none. `full`: takes nothing; `told`: what was sent."""

    open: bool = True
    member: bool = False
    full: bool = False
    told: list[bytes] = field(default_factory=list)

    def is_connected(self) -> bool:
        return self.open

    def answer(self, frame: bytes) -> bool:
        if not self.full:
            self.told.append(frame)
        return not self.full


def fleet(
    *roles: Any, registry: Registry | None = None, routing: Routing | None = None, **options: Any
) -> tuple[Router, list[Instance]]:
    """A router, and a healthy instance of each role; in place of a role, a pair has more of the ping, too."""
    registry = registry or Registry()
    several = [each if isinstance(each, tuple) else (each, {}) for each in roles]
    pool = [join(registry, ping(role, 10 + n, **more)) for n, (role, more) in enumerate(several)]
    return Router(registry, routing or Routing(), **options), pool


def fail(instance: Instance, now: float = 0.0) -> None:
    for _ in range(5):
        instance.breaker.failed(now)


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    error: dict[str, Any] = (await response.json())["error"]
    assert set(error) >= {"message", "type", "code"}
    assert error["code"] == response.status
    return error


async def quiet(deployment: Deployment) -> None:
    try:
        await eventually(lambda: not any(held(deployment).values()))
    except AssertionError:
        raise AssertionError(f"something is left: {held(deployment)}") from None


@dataclass
class FakeInstance:
    """A vLLM server, as far as a proxy can tell.

    Attributes:
        behaviour: what becomes of a request; change it at will.
        health: the status of /health.
        models: names in /v1/models.
        context: tokens of their context there; None if they have none.
        key: if set, /v1/models wants it as a bearer token.
        fit, version, first_token, ahead_tokens, parses, sampler, resumes: as its ping has them.
        frozen: /health and /v1/models are never answered any more.
        healths, lists: how often it was asked for /health, and for /v1/models.
        requests: what has arrived, in order.
    """

    role: Role
    model: str = "tiny"
    behaviour: Behaviour = answer_json
    health: int = 200
    models: tuple[str, ...] = ("tiny",)
    context: int | None = None
    key: str = ""
    fit: str = ""
    version: int = 1
    first_token: int = 0
    ahead_tokens: int = 1 << 20
    parses: bool = False
    sampler: str = "V2"
    resumes: int = 2
    frozen: bool = False
    healths: int = 0
    lists: int = 0
    incarnation: str = "first"
    requests: list[Seen] = field(default_factory=list)
    http_address: str = ""
    zmq_address: str = field(default_factory=lambda: f"127.0.0.1:{next(_ports)}")
    runner: web.AppRunner | None = None

    @property
    def ping(self) -> Ping:
        said = set(Ping.__struct_fields__) & {each.name for each in fields(self)}
        return Ping(type=self.role, **{name: getattr(self, name) for name in said})

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app[FAKE] = self
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                *(web.post(path, self._generate) for path in sorted(PAIRED | SINGLE)),
            ]
        )
        self.runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, max_field_size=4 << 20
        )
        await self.runner.setup()
        port = int(self.http_address.rpartition(":")[2] or free_ports())
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.http_address = f"127.0.0.1:{self.runner.addresses[0][1]}"

    def kill(self) -> None:
        """As kill -9: at one moment the port refuses and all connections end."""
        self.refuse()
        for handler in self.runner.server.connections:
            if handler.transport is not None:
                handler.transport.abort()

    def refuse(self) -> None:
        """The port refuses, and connections stand, as of a vLLM that ends what it has."""
        for site in self.runner.sites:
            site._server.close()

    async def stop(self) -> None:
        """Closes the port. Idempotent."""
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def _health(self, request: web.Request) -> web.Response:
        self.healths += 1
        if self.frozen:
            await asyncio.Event().wait()
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        self.lists += 1
        if self.frozen:
            await asyncio.Event().wait()
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        data = [{"id": name, "object": "model", "owned_by": self.http_address} for name in self.models]
        if self.context is not None:
            data = [{**each, "max_model_len": self.context} for each in data]
        return web.json_response({"object": "list", "data": data})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(request.path, request.headers.copy(), await request.read())
        self.requests.append(seen)
        try:
            response = await self.behaviour(request, seen)
        except asyncio.CancelledError:
            seen.aborted = True
            raise
        seen.answered = True
        return response


FAKE = web.AppKey("fake", FakeInstance)


class RawInstance(FakeInstance):
    """One without an HTTP server: it answers each connection with `answer`, then closes it."""

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.http_address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.server.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    async def body(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0]))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@contextmanager
def pinging(discovery: str, ping: Ping, interval: float = PING_SECONDS, **more: Any) -> Iterator[Pinger]:
    pinger = Pinger(discovery, ping, interval, **more)
    pinger.start()
    try:
        yield pinger
    finally:
        pinger.stop()


async def serve(cleanup: AsyncExitStack, instance: FakeInstance) -> None:
    """Until `cleanup` stops it."""
    await instance.start()
    cleanup.push_async_callback(instance.stop)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


@dataclass
class Front:
    """A proxy, as its clients see it. `discovery`: where instances ping it."""

    url: str
    discovery: str
    client: aiohttp.ClientSession
    cleanup: AsyncExitStack
    members: Members | None = None
    instances: list[FakeInstance] = field(default_factory=list)
    pingers: dict[str, Pinger] = field(default_factory=dict)

    @property
    def prefills(self) -> list[FakeInstance]:
        return [each for each in self.instances if each.role == "P"]

    @property
    def decodes(self) -> list[FakeInstance]:
        return [each for each in self.instances if each.role != "P"]

    @property
    def p(self) -> FakeInstance:
        return self.prefills[0]

    @property
    def d(self) -> FakeInstance:
        return self.decodes[0]

    async def add(
        self, role: Role, kind: Callable[..., FakeInstance] | None = None, **options: Any
    ) -> FakeInstance:
        """A new instance that has begun to ping; it may not be ready yet."""
        instance = (kind or FakeInstance)(role, **options)
        await self.enlist(instance)
        self.instances.append(instance)
        return instance

    async def enlist(self, instance: FakeInstance) -> None:
        await serve(self.cleanup, instance)
        self.begin_ping(instance)

    def begin_ping(self, instance: FakeInstance) -> Pinger:
        pinger = self.cleanup.enter_context(pinging(self.discovery, instance.ping, members=self.members))
        self.pingers[instance.http_address] = pinger
        return pinger

    async def post(
        self,
        body: Any = None,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        **fields: Any,
    ) -> aiohttp.ClientResponse:
        """The response's head; its body is the caller's to read. `fields`: of a body that is not given."""
        body = {"model": "tiny", "prompt": "hi", "max_tokens": 5, **fields} if body is None else body
        return await self.client.post(self.url + path, json=body, headers=headers)

    async def serves(self, times: int, *request: Any, **more: Any) -> None:
        """So many requests as `post` sends them, one after the other, are answered."""
        for _ in range(times):
            async with await self.post(*request, **more) as response:
                assert response.status == 200, await response.text()
                await response.read()

    async def refusal(self, status: int, *request: Any, **more: Any) -> str:
        """The sentence of the error that a request gets, as `post` sends it."""
        response = await self.post(*request, **more)
        assert response.status == status, await response.text()
        return str((await error_of(response))["message"])

    async def begin(self, **fields: Any) -> aiohttp.ClientResponse:
        """A stream of which the client has the first event."""
        response = await self.post(stream=True, **fields)
        assert response.status == 200
        assert b"first" in await response.content.readuntil(b"\n\n")
        return response

    async def order(
        self, instance: FakeInstance, what: str, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        """Such as to drain it."""
        url = f"{self.url}/instances/{instance.http_address}/{what}"
        return await self.client.post(url, headers=headers)

    async def text(self, path: str) -> str:
        async with self.client.get(self.url + path) as response:
            assert response.status == 200
            return await response.text()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()


@dataclass(kw_only=True)
class Deployment(Front):
    """A proxy in this event loop, and its instances."""

    app: web.Application
    registry: Registry
    plain_discovery: str = ""

    @property
    def proxy(self) -> Proxy:
        return self.app[PROXY]

    @property
    def refused(self) -> int:
        return self.app[PROXY].membership.listeners[0].refused

    async def newcomer(self, role: Role, *kind: Any, **options: Any) -> FakeInstance:
        made = await self.add(role, *kind, **options)
        await eventually(lambda: made.http_address in self.routable(role), "the new instance")
        return made

    def everyone(self) -> list[Instance]:
        return self.proxy.instances()

    def known(self, instance: FakeInstance) -> Instance:
        return next(each for each in self.everyone() if each.ping == instance.ping)

    def no_more_pings(self, instance: FakeInstance) -> None:
        """Its connections stay, and /health is answered, as by vLLM's server while the engine core hangs."""
        self.pingers[instance.http_address]._interval = 1000.0

    def freeze(self, instance: FakeInstance) -> None:
        """From now on it neither pings nor answers /health; its connections stay open."""
        self.no_more_pings(instance)
        instance.frozen = True

    async def goodbye(self, instance: FakeInstance) -> None:
        """Until it gets no requests any more."""
        self.pingers[instance.http_address].stop()
        await eventually(lambda: instance.http_address not in self.routable(instance.role))

    def routable(self, role: Role) -> list[str]:
        return [i.ping.http_address for i in self.registry.routable(role, time.monotonic())]

    async def ready(self, prefill: int, decode: int) -> None:
        await eventually(
            lambda: len(self.routable("P")) == prefill and len(self.routable("D")) == decode, "instances"
        )

    async def under_way(
        self, *instances: FakeInstance, body: Any = None
    ) -> asyncio.Task[aiohttp.ClientResponse]:
        """A request that has come to each of these instances, which had none."""
        asking = asyncio.create_task(self.post(body))
        await eventually(lambda: called(*instances), "the request")
        return asking


@asynccontextmanager
async def deployed(
    dispatch: Dispatch,
    prefill: int = 0,
    decode: int = 0,
    life: float = 10.0,
    lease: float = 30.0,
    limits: Limits | None = None,
    members: Members | None = None,
    routing: Routing | None = None,
    guard: Access | None = None,
    **options: Any,
) -> AsyncIterator[Deployment]:
    """Fails if a request still holds anything at the end. `options`: bounds, and what else an app takes."""
    bounds = {name: options.pop(name) for name in Limits.__dataclass_fields__ if name in options}
    async with AsyncExitStack() as cleanup:
        registry = Registry(life, lease=lease)
        limits = limits or Limits(**{"max_body": 1 << 20} | bounds)
        plain = None if members is None else "tcp://127.0.0.1:*"
        app = make_app(
            "tcp://127.0.0.1:*", dispatch, registry, limits, members, plain, routing, guard, **options
        )
        runner = BoundedRunner(app, 0.1)
        cleanup.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = await cleanup.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE))
        )
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        discovery = app[PROXY].membership.listeners[0].endpoint.removeprefix("tcp://")
        deployment = Deployment(url, discovery, client, cleanup, members, app=app, registry=registry)
        if plain is not None:
            deployment.plain_discovery = app[PROXY].membership.listeners[1].endpoint.removeprefix("tcp://")
        for _ in range(prefill):
            await deployment.add("P")
        for _ in range(decode):
            await deployment.add("D")
        await deployment.ready(prefill, decode)
        yield deployment
        await quiet(deployment)
