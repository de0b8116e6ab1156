"""Clients' connections: how many there may be at a time, and which is closed when there are too many."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.web_protocol import RequestHandler

from p2pkv.log import RateLimit

from .errors import error_response

logger = logging.getLogger(__name__)

_FULL = "This proxy has as many connections as it takes; try again in a few seconds."
# Between two log lines about it.
_FULL_SECONDS = 10.0
_HANDSHAKE_SECONDS = 10.0
# Beyond the limit.
_HANDSHAKES_BESIDE = 64
# For a client to take the end of its last answer in, and the end of TLS.
_CLOSING_SECONDS = 5.0
# For a client that is refused, to take that in.
_REFUSED_SECONDS = 1.0
MAX_HEAD = 4 << 20
"""Bytes of a request's head, and of each of its headers, as vLLM's servers take."""
# Of all heads that have not come whole, beyond which one may not be larger than the usual limit of servers.
_MAX_HEADS, _USUAL_HEAD = 256 << 20, 1 << 16
_LONG_HEAD = f"The head of a request may have {MAX_HEAD} bytes."


class BoundedRunner(web.AppRunner):
    """An AppRunner with at most `most` connections.

    One more takes the place of the one that has been open for longest without a request under way: so a
    client that opens many and sends nothing does not shut others out. If each has a request under way, it
    gets a 503.

    With `tls` all connections begin with a TLS handshake. Those that are in it count, too. 64 of them may go
    beyond `most`, so that a client learns by a 503 that there is no room; of more the oldest is closed.
    """

    def __init__(
        self, app: web.Application, most: int, tls: ssl.SSLContext | None = None, **options: Any
    ) -> None:
        super().__init__(app, max_line_size=MAX_HEAD, max_field_size=MAX_HEAD, **options)
        self._heads = _Heads()
        self._most = most
        self._tls = tls
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}
        """The oldest comes first."""
        self._log_limit = RateLimit(seconds=_FULL_SECONDS)

    @property
    def server(self) -> web.Server | None:
        """What makes the protocol of each new connection; aiohttp's sites ask for it."""
        # A site only calls it.
        return None if self._server is None else cast("web.Server", self._protocol)

    def _protocol(self) -> asyncio.Protocol:
        # A TLS server of asyncio's own tells of a connection only when its handshake has ended.
        return self._taken() if self._tls is None else _Newcomer(self._begin_handshake)

    def _taken(self) -> asyncio.Protocol:
        """What serves one more connection, or refuses it."""
        assert self._server is not None
        if not self._has_room():
            return _Refusal()
        # As the server itself would make one; aiohttp has no public name for its options.
        return _Connection(self._heads, self._server, loop=asyncio.get_running_loop(), **self._server._kwargs)

    def _begin_handshake(self, accepted: asyncio.Transport) -> None:
        shared: socket.socket = accepted.get_extra_info("socket")
        accepted.abort()  # it goes on in a copy of its descriptor
        try:
            connection = shared.dup()
        except OSError:
            return  # for want of descriptors
        if not self._has_room(len(self._handshakes)) and len(self._handshakes) > _HANDSHAKES_BESIDE:
            self._end_oldest_handshake()
        self._handshakes[connection] = asyncio.create_task(self._secure(connection))

    def _end_oldest_handshake(self) -> None:
        oldest = next(iter(self._handshakes))
        self._handshakes.pop(oldest)
        with suppress(OSError):  # its client has left
            oldest.shutdown(socket.SHUT_RDWR)

    async def _secure(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Newcomer(partial(self._serve, connection)),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
        except OSError:
            pass  # the client has left, was too slow, or speaks no TLS
        finally:
            self._handshakes.pop(connection, None)

    def _serve(self, connection: socket.socket, secured: asyncio.Transport) -> None:
        self._handshakes.pop(connection, None)  # or it would count twice for a moment
        successor = self._taken()
        secured.set_protocol(successor)
        successor.connection_made(secured)

    def _has_room(self, handshakes: int = 0) -> bool:
        """Whether there may be one more beside so many handshakes; closes an idle one if need be."""
        assert self._server is not None
        known, most = self._server.connections, self._most - handshakes
        if len(known) < most:
            return True
        there = [(each, one) for each in known if (one := each.transport) and not one.is_closing()]
        if len(there) < most:
            return True
        if self._log_limit.admits():
            logger.warning("clients have %d connections, and this proxy takes no more", self._most)
        for each, transport in there:
            if each._current_request is None:  # aiohttp has no public name for it
                transport.close()  # what is left of its last answer still goes out
                if self._tls is not None:  # then a close waits for the client's
                    asyncio.get_running_loop().call_later(_CLOSING_SECONDS, transport.abort)
                return True
        return False


@dataclass
class _Heads:
    """Bytes of the heads that have not come whole, of all connections."""

    held: int = 0


class _Connection(RequestHandler):
    """One whose errors are JSON, and of whose requests' heads nothing comes into a log: they hold keys."""

    __slots__ = ("_head", "_heads")

    def __init__(self, heads: _Heads, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._heads, self._head = heads, 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # aiohttp bounds each header, and their number. It waits for the rest of a head then, and for no body.
        head = 0 if self._waiter is None or self._messages else self._head + len(data)
        self._count_head(head)
        crowded = head > _USUAL_HEAD and self._heads.held > _MAX_HEADS
        if (head > MAX_HEAD or crowded) and self.transport is not None:
            self._count_head(0)
            self.transport.write(_whole_answer(*((503, _FULL) if crowded else (431, _LONG_HEAD))))
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._count_head(0)
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
        """The answer to what is no request, or whose handler failed."""
        if isinstance(exc, HttpProcessingError):
            what = type(exc).__name__  # its message has what came
            error = HttpProcessingError(code=status, message=what)
            self.log_exception("Error handling request from %s", request.remote, exc_info=error)
            why = f"This is not a request of HTTP/1.1 that can be read ({what})."
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
    """Answers a client that waits with its body; an error if it expects what no server here does."""
    if request.version != HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_response(417, "Of expectations only `Expect: 100-continue` is met here.")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the answer itself has been sent
    return None


class _Newcomer(asyncio.Protocol):
    """A connection for whoever is to `take` it."""

    def __init__(self, take: Callable[[asyncio.Transport], None]) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass.
        self._take(cast("asyncio.Transport", transport))


def _whole_answer(status: int, message: str) -> bytes:
    """An error, as it goes over a connection that ends then."""
    answer = error_response(status, message)
    assert isinstance(answer.body, bytes)
    headers = {**answer.headers, "Content-Length": len(answer.body), "Connection": "close"}
    lines = [f"HTTP/1.1 {status} {answer.reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join((*lines, "", "")).encode() + answer.body


class _Refusal(asyncio.Protocol):
    """Answers whatever a client will ask."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast("asyncio.Transport", transport)
        connection.write(_whole_answer(503, _FULL))
        connection.close()
        # Over TLS, a close waits for the client's.
        asyncio.get_running_loop().call_later(_REFUSED_SECONDS, connection.abort)
