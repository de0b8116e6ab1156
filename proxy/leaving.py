"""What a proxy works on, and how that ends when the proxy is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from .counters import Counters
from .dispatch import Exchange
from .errors import Failure

STOPPING = "This proxy is stopping; try again in a few seconds."
_CUT_OFF = "This proxy had to stop before the answer was complete."
# After the end of what was under way: for the errors to be sent.
_LAST_WORDS_SECONDS = 2.0


@dataclass(eq=False)
class Work:
    """One client's request.

    Attributes:
        exchange: its present try at instances, if it has got so far.
        cut: it was ended because the proxy stops.
    """

    task: asyncio.Task[Any]
    request: web.Request
    exchange: Exchange | None = None
    cut: bool = False

    def cut_off(self) -> None:
        """Ends it with an error, whatever it is at."""
        self.cut = True
        if self.exchange is not None and self.exchange.relay is not None:
            self.exchange.relay.interrupt(_CUT_OFF, 503)
        else:
            self.task.cancel()

    def hang_up(self) -> None:
        """Closes the client's connection, whatever it has not read yet."""
        if self.request.transport is not None:
            self.request.transport.abort()


class Desk:
    """All the work there is.

    Attributes:
        stopping: no more is taken on.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._open: set[Work] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def work(self, request: web.Request) -> Iterator[Work]:
        """One request, from its head to its end. Raises Failure if the proxy stops."""
        if self.stopping:
            raise Failure(503, STOPPING, last=True)
        task = asyncio.current_task()
        assert task is not None
        work = Work(task, request)
        self._open.add(work)
        self._empty.clear()
        try:
            yield work
        except asyncio.CancelledError:
            if not work.cut:
                raise
            task.uncancel()
            raise Failure(503, _CUT_OFF, last=True) from None
        finally:
            self._open.discard(work)
            if not self._open:
                self._empty.set()

    async def clear(self, seconds: float, hurry: asyncio.Event) -> int:
        """Waits for the work to end by itself, for `seconds` at most and not once there is a `hurry`; ends
        the rest, and returns how much that was."""
        self.stopping = True
        waits = [asyncio.create_task(self._empty.wait()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        rest = list(self._open)
        self._counters.cut_off += len(rest)
        for work in rest:
            work.cut_off()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._empty.wait()
        for work in list(self._open):
            work.hang_up()
        return len(rest)
