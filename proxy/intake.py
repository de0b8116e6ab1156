"""Takes requests' bodies in: within a bound for all of them together, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from .counters import Counters
from .errors import Failure
from .limits import Limits


class Intake:
    """Holds bodies while their requests last.

    Attributes:
        held: bytes of them now.
    """

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits
        self._counters = counters
        self.held = 0

    @contextmanager
    def shelf(self) -> Iterator[Shelf]:
        """Room for one body, given back at the end."""
        shelf = Shelf(self)
        try:
            yield shelf
        finally:
            self.held -= shelf.size

    def take(self, size: int) -> None:
        """`size` bytes more. Raises Failure if they are too many."""
        if self.held + size > self._limits.max_held:
            self._counters.refused_full += 1
            raise Failure(503, "This proxy holds as many requests as it can; try again in a few seconds.")
        self.held += size

    @property
    def patience(self) -> float:
        return self._limits.body_patience


class Shelf:
    """One body's room."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.size = 0

    async def read(self, request: web.Request) -> bytes:
        """The whole body. Raises Failure, or HTTPRequestEntityTooLarge."""
        body = bytearray()
        while chunk := await self._next(request):
            self._intake.take(len(chunk))
            self.size += len(chunk)
            body += chunk
            if len(body) > request.client_max_size:
                raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=len(body))
        return bytes(body)

    async def _next(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._intake.patience):
                chunk: bytes = await request.content.readany()
                return chunk
        except web.RequestPayloadError as error:
            # What is left of it cannot be read either, and aiohttp would try.
            request.content.feed_eof()
            why = " ".join(str(error).split())
            raise Failure(400, f"The request's body cannot be read: {why}.", last=True) from None
        except TimeoutError:
            raise Failure(
                408, f"Nothing more of the request's body came for {self._intake.patience:g} seconds."
            ) from None
