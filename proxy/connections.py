"""Clients' connections: how many there may be at a time, and which is closed when there are too many."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from aiohttp import web

from p2pkv.log import RateLimit

from .errors import error_response

logger = logging.getLogger(__name__)

_FULL = "This proxy has as many connections as it takes; try again in a few seconds."
# Between two log lines about it.
_FULL_SECONDS = 10.0


class BoundedRunner(web.AppRunner):
    """An AppRunner with at most `most` connections.

    One more takes the place of the one that has been open for longest without a request under way: so a
    client that opens many and sends nothing does not shut others out. If each has a request under way, it
    gets a 503.
    """

    def __init__(self, app: web.Application, most: int, **options: Any) -> None:
        super().__init__(app, **options)
        self._most = most
        self._log_limit = RateLimit(seconds=_FULL_SECONDS)

    @property
    def server(self) -> web.Server | None:
        """What makes the protocol of each new connection; aiohttp's sites ask for it."""
        # A site only calls it.
        return None if self._server is None else cast("web.Server", self._protocol)

    def _protocol(self) -> asyncio.Protocol:
        assert self._server is not None
        there = self._server.connections
        if len(there) < self._most or self._made_room(there):
            return self._server()
        return _Refusal()

    def _made_room(self, there: list[web.RequestHandler]) -> bool:
        if self._log_limit.admits():
            logger.warning("clients have %d connections, and this proxy takes no more", len(there))
        for each in there:
            transport = each.transport
            # aiohttp has no public name for it.
            if each._current_request is None and transport is not None and not transport.is_closing():
                transport.close()
                return True
        return False


class _Refusal(asyncio.Protocol):
    """Answers whatever a client will ask."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        answer = error_response(503, _FULL)
        assert isinstance(answer.body, bytes) and isinstance(transport, asyncio.Transport)
        headers = {**answer.headers, "Content-Length": len(answer.body), "Connection": "close"}
        lines = [f"HTTP/1.1 503 {answer.reason}", *(f"{name}: {value}" for name, value in headers.items())]
        transport.write("\r\n".join((*lines, "", "")).encode() + answer.body)
        transport.close()
