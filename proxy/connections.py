"""Clients' connections: how many there may be at a time, and which is closed when there are too many."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from aiohttp import web

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
        super().__init__(app, **options)
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
        return self._server() if self._has_room() else _Refusal()

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


class _Newcomer(asyncio.Protocol):
    """A connection for whoever is to `take` it."""

    def __init__(self, take: Callable[[asyncio.Transport], None]) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass.
        self._take(cast("asyncio.Transport", transport))


class _Refusal(asyncio.Protocol):
    """Answers whatever a client will ask."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection, answer = cast("asyncio.Transport", transport), error_response(503, _FULL)
        assert isinstance(answer.body, bytes)
        headers = {**answer.headers, "Content-Length": len(answer.body), "Connection": "close"}
        lines = [f"HTTP/1.1 503 {answer.reason}", *(f"{name}: {value}" for name, value in headers.items())]
        connection.write("\r\n".join((*lines, "", "")).encode() + answer.body)
        connection.close()
        # Over TLS, a close waits for the client's.
        asyncio.get_running_loop().call_later(_REFUSED_SECONDS, connection.abort)
