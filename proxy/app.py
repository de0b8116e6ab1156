"""The HTTP server: clients' connections, what is done around each request, and the endpoints."""

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_protocol import RequestHandler

from p2pkv.control.security import Members
from p2pkv.log import RateLimit

from . import admin, exposition
from .access import Access, Tenants
from .attempt import Dispatch
from .cors import Cors
from .http import AGAIN, PAIRED, REQUEST_ID, SINGLE, ProxyError, _sentence, error_response
from .limits import Limits
from .membership import Membership
from .membership.listed import ListedInstance
from .membership.registry import Registry, random_turn
from .metrics import CURRENT, RECORD, Metrics, RequestRecord, RequestSpan, trace_id_of
from .policies import Routing
from .relay import STALL_SECONDS, hang_up
from .service import PROXY, Proxy, by_proxy
from .tracing import Spans
from .upstream import Client

logger = logging.getLogger(__name__)

# Connections.

# A connection without a request under way, or without a whole head, is closed after this.
IDLE_SECONDS = 75.0
_FULL = f"This proxy has as many connections as it accepts (--max-connections); {AGAIN}"
# Between two log lines that connections are full, and between two about what is no HTTP.
_LOG_SECONDS = 10.0
_HANDSHAKE_SECONDS = 10.0
# Connections in a TLS handshake that may exist beyond the limit of connections.
_HANDSHAKES_BESIDE = 64
# How long a client has to read the end of its last answer, and of TLS.
_CLOSING_SECONDS = 5.0
# How long a refused client has to read the refusal.
_REFUSED_SECONDS = 1.0
MAX_HEAD = 4 << 20
"""Bytes of a request's head, and of each of its headers: as many as vLLM's servers take."""
# Bytes of all heads that are not whole yet; beyond them none may be larger than servers usually allow.
_MAX_HEADS, _USUAL_HEAD = 256 << 20, 1 << 16
_LONG_HEAD = f"The request line and headers are too large: at most {MAX_HEAD} bytes are allowed."
_FULL_OF_HEADS = f"This proxy already waits for the rest of too many large request headers; {AGAIN}"


class BoundedRunner(web.AppRunner):
    """Serves an app of `make_app` on at most `Limits.max_connections` connections. When it ends, those on
    which nothing moves are closed after `last_seconds`. Its sites get no ssl_context.

    A new connection beyond the limit replaces the oldest that has no request under way, so a client that
    opens many and sends nothing shuts no others out. If each has a request, the new one gets a 503.

    With `tls` all connections begin with a TLS handshake, and count while they are in it. 64 of these may
    exceed the limit, so that a client can get the 503; of more, the oldest is closed.
    """

    def __init__(self, app: web.Application, last_seconds: float, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(
            app,
            max_line_size=MAX_HEAD,
            max_field_size=MAX_HEAD,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=last_seconds,
            keepalive_timeout=IDLE_SECONDS,
        )
        self._heads = _Heads()
        self._tls = tls
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}
        """The oldest comes first."""
        self._log_limit = RateLimit(seconds=_LOG_SECONDS)

    @property
    def server(self) -> web.Server | None:
        """What aiohttp's sites call for the protocol of each new connection."""
        return None if self._server is None else cast("web.Server", self._protocol)

    def _protocol(self) -> asyncio.Protocol:
        # asyncio's own TLS server reports a connection only after its handshake.
        return self._taken() if self._tls is None else _Newcomer(self._begin_handshake)

    def _taken(self) -> asyncio.Protocol:
        """The protocol that serves one more connection, or refuses it."""
        assert self._server is not None
        if not self._has_room():
            return _Newcomer(_refuse)
        # The server itself would make one like this; aiohttp has no public name for its options.
        return _Connection(self._heads, self._server, loop=asyncio.get_running_loop(), **self._server._kwargs)

    def _begin_handshake(self, accepted: asyncio.Transport) -> None:
        shared: socket.socket = accepted.get_extra_info("socket")
        accepted.abort()  # it goes on in a copy of its descriptor
        try:
            connection = shared.dup()
        except OSError:
            return  # for want of descriptors
        if not self._has_room(len(self._handshakes)) and len(self._handshakes) > _HANDSHAKES_BESIDE:
            oldest = next(iter(self._handshakes))
            self._handshakes.pop(oldest)
            with suppress(OSError):  # its client has left
                oldest.shutdown(socket.SHUT_RDWR)
        self._handshakes[connection] = asyncio.create_task(self._secure(connection))

    async def _secure(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):  # the client has left, was too slow, or speaks no TLS
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: _Newcomer(partial(self._serve, connection)),
                    connection,
                    ssl=self._tls,
                    ssl_handshake_timeout=_HANDSHAKE_SECONDS,
                )
        finally:
            self._handshakes.pop(connection, None)

    def _serve(self, connection: socket.socket, secured: asyncio.Transport) -> None:
        self._handshakes.pop(connection, None)  # or it would count twice for a moment
        successor = self._taken()
        secured.set_protocol(successor)
        successor.connection_made(secured)

    def _has_room(self, handshakes: int = 0) -> bool:
        """Whether one more connection may exist, beside so many handshakes; closes an idle one if need be."""
        assert self._server is not None
        limit = self.app[PROXY].limits.max_connections
        known, most = self._server.connections, limit - handshakes
        if len(known) < most:
            return True
        there = [(each, one) for each in known if (one := each.transport) and not one.is_closing()]
        if len(there) < most:
            return True
        if self._log_limit.admits():
            logger.warning(f"there are {limit} connections (--max-connections), and this proxy takes no more")
        for each, transport in there:
            # aiohttp has no public names for "waits for a request", and for the requests that have come.
            if each._waiter is not None and not each._messages:
                transport.close()  # what is left of its last answer still goes out
                if self._tls is not None:  # then a close waits for the client's
                    asyncio.get_running_loop().call_later(_CLOSING_SECONDS, transport.abort)
                return True
        return False


@dataclass
class _Heads:
    """Of all connections: bytes `held` of heads that are not whole, and how many were no HTTP (`bad`)."""

    held: int = 0
    bad: int = 0
    _log_limit: RateLimit = field(default_factory=lambda: RateLimit(seconds=_LOG_SECONDS))

    def refuse(self, what: str) -> None:
        """Counts what is no HTTP, and logs it, at most once in ten seconds."""
        self.bad += 1
        if self._log_limit.admits():
            logger.warning("a client sent what is no HTTP request (%d so far): %s", self.bad, what)


class _Connection(RequestHandler):
    """A connection that answers errors in JSON, and logs nothing of requests' heads, which hold keys."""

    __slots__ = ("_drop", "_head", "_heads")

    def __init__(self, heads: _Heads, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._heads, self._head = heads, 0
        self._drop: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Serves it until it is closed, by either side."""
        transport = self.transport
        try:
            await super().start()
        finally:
            # The rest of the last answer still goes out, but not for ever to a client that does not read.
            if self._manager is not None and transport is not None:
                self._drop = self._loop.call_later(STALL_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # aiohttp bounds each header and their number. With a _waiter it waits for a head, and for no body.
        head = 0 if self._waiter is None or self._messages else self._head + len(data)
        self._count_head(head)
        crowded = head > _USUAL_HEAD and self._heads.held > _MAX_HEADS
        if (head > MAX_HEAD or crowded) and self.transport is not None:
            self._count_head(0)
            self.transport.write(_whole_answer(*((503, _FULL_OF_HEADS) if crowded else (431, _LONG_HEAD))))
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._count_head(0)
        if self._drop is not None:
            self._drop.cancel()
        super().connection_lost(exc)

    def _count_head(self, size: int) -> None:
        self._heads.held += size - self._head
        self._head = size

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request, or to a request whose handler failed."""
        if isinstance(exc, HttpProcessingError):
            what = type(exc).__name__  # its message has what the client sent
            self._heads.refuse(what)
            why = f"The proxy cannot read this as an HTTP/1.1 request ({what})."
            status, why = (431, _LONG_HEAD) if isinstance(exc, LineTooLong) else (status, why)
        else:
            self.log_exception("Error handling request from %s", request.remote, exc_info=exc)
            why = "The proxy itself failed; see its log."
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already, so there cannot be another one")
        response = error_response(status, why)
        response.force_close()
        return response


async def on_expect(request: web.Request) -> web.StreamResponse | None:
    """Answers a client that waits before it sends its body; an error if it expects anything else."""
    if request.version != HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_response(417, "This proxy supports only `Expect: 100-continue`: leave the header out.")
    with suppress(ConnectionError):  # the client has left
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer itself has been sent
    return None


class _Newcomer(asyncio.Protocol):
    """A new connection, which `take` gets."""

    def __init__(self, take: Callable[[asyncio.Transport], None]) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass.
        self._take(cast("asyncio.Transport", transport))


def _whole_answer(status: int, message: str) -> bytes:
    """The bytes of an error response, after which the connection ends."""
    answer = error_response(status, message)
    assert isinstance(answer.body, bytes)
    headers = {**answer.headers, "Content-Length": len(answer.body), "Connection": "close"}
    lines = [f"HTTP/1.1 {status} {answer.reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join((*lines, "", "")).encode() + answer.body


def _refuse(connection: asyncio.Transport) -> None:
    """Answers with 503, whatever the client will ask, and closes."""
    connection.write(_whole_answer(503, _FULL))
    connection.close()
    # Over TLS, a close waits for the client's.
    asyncio.get_running_loop().call_later(_REFUSED_SECONDS, connection.abort)


# Around each request.

_BEGUN = web.RequestKey("begun", bool)
"""Whether the head of an answer has been sent."""


async def note_begin(request: web.Request, response: web.StreamResponse) -> None:
    """To be called before an answer's head is sent, which gets the client's own X-Request-Id."""
    request[_BEGUN] = True
    if theirs := request.headers.get(REQUEST_ID):
        response.headers[REQUEST_ID] = theirs


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what a handler raises into a response; an unexpected error becomes a 500 without details."""
    try:
        return await handler(request)
    except ProxyError as failure:
        if failure.status in (429, 503) and RECORD in request and not request[RECORD].tries:
            request[RECORD].end("shed")
        response = error_response(failure.status, str(failure))
        if failure.last:
            response.force_close()
        if failure.retry_after:
            response.headers["Retry-After"] = str(failure.retry_after)
        if failure.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        return response
    except web.HTTPException as error:
        response = error_response(error.status, _sentence(request, error))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        raise  # the client's own connection; no answer would arrive
    except Exception:
        logger.exception("%s %s failed in this proxy itself", request.method, request.path)
        if _BEGUN in request:
            if RECORD in request:
                request[RECORD].ended_with(500)
            # The client would take a second head for more of its answer.
            hang_up(request)
            raise ConnectionResetError from None
        return error_response(500, "The proxy itself failed; see its log.")


_MAX_ID = 200
"""The most characters of the client's X-Request-Id that a log line repeats."""


def recording(metrics: Metrics, tracing: Spans | None, *, log_requests: bool) -> Middleware:
    """The middleware that records requests to the API or to unknown paths; `log_requests`: and logs them."""

    @web.middleware
    async def recorded(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        if resource is not None and path not in API:
            return await handler(request)
        client_id, trace_id = request.headers.get(REQUEST_ID, "")[:_MAX_ID], trace_id_of(request.headers)
        span = RequestSpan() if tracing is None else tracing.request(path, request.headers)
        record = RequestRecord(metrics, path, client_id, trace_id=trace_id, span=span)
        request[RECORD] = record
        before = CURRENT.set(record)
        try:
            response = await handler(request)
            record.ended_with(response.status)
            return response
        except (asyncio.CancelledError, ConnectionError):
            record.end("left")
            raise
        finally:
            metrics.ended(record, record.outcome or "left")
            record.span.end(record)
            if log_requests:
                logger.info("request ended: %s", record, extra={"request": record.as_fields()})
            CURRENT.reset(before)

    return recorded


@web.middleware
async def written_in_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Writes an answer that was not relayed, and disconnects a client that does not read it."""
    response = await handler(request)
    if response.prepared:
        return response
    deadline = asyncio.get_running_loop().call_later(STALL_SECONDS, hang_up, request)
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        logger.debug("a client left before its answer was written")
    finally:
        deadline.cancel()
    return response


# The application.

# What is counted and logged as requests.
API = PAIRED | SINGLE | {"/v1/models"}


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
    """The application, for a BoundedRunner: without one, clients that leave are not noticed.

    Args:
        discovery: ZMQ endpoint on which to listen for pings, such as tcp://127.0.0.1:30001.
        members: whose pings `discovery` takes; None: everyone's.
        plain_discovery: a second endpoint, which takes everyone's.
        tracing: makes the spans of requests, and is closed at the end.
        listed: instances that need no ping, as long as their /health answers.

    Raises OSError at start-up if an endpoint cannot be bound.
    """
    limits = limits or Limits()
    metrics = Metrics()

    async def running(app: web.Application) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            client = await cleanup.enter_async_context(aclosing(Client()))
            known = registry or Registry(lease=limits.lease, first_turn=random_turn)
            membership = Membership(client.pooled, known)
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
            tasks = [asyncio.create_task(each) for each in (membership.run(), admin.keep_history(proxy))]
            yield
            tasks += proxy.background
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    recorded = recording(metrics, tracing, log_requests=log_requests)
    # A body beyond max_held never fits, so its client must not get a 503 and try again for ever.
    largest = min(limits.max_body, limits.max_held)
    app = web.Application(client_max_size=largest, middlewares=[written_in_time, recorded, errors_as_json])
    app.cleanup_ctx.append(running)
    app.on_response_prepare.append(note_begin)
    if cors is not None and cors.origins:
        app.middlewares.insert(1, cors.answer)
        app.on_response_prepare.append(cors.prepare)
    app.add_routes(_ROUTES)
    return app


_ROUTES = [
    *(web.post(path, by_proxy(Proxy.generate), expect_handler=on_expect) for path in sorted(PAIRED | SINGLE)),
    web.get("/v1/models", by_proxy(Proxy.models)),
    web.get("/health", by_proxy(admin.health_page)),
    web.get("/ready", by_proxy(admin.ready_page)),
    web.get("/instances", by_proxy(admin.instances_page)),
    web.post("/instances/{address}/drain", by_proxy(partial(admin.drain, drained=True))),
    web.post("/instances/{address}/resume", by_proxy(partial(admin.drain, drained=False))),
    web.get("/status", by_proxy(admin.status_page)),
    web.get("/metrics", by_proxy(exposition.metrics_page)),
    web.get("/", admin.dashboard),
]
