"""Clients' requests that are under way, and how all of them end when the proxy stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from .admission import RequestCounters
from .attempt import Attempt
from .errors import ProxyError
from .registry import Instance

STOPPING = "This proxy is stopping; try again in a few seconds."
_CUT_OFF = "This proxy had to stop before the answer was complete."
# After the end of what was under way: for the errors to be sent.
_LAST_WORDS_SECONDS = 2.0


@dataclass(eq=False)
class ActiveRequest:
    """One client's request.

    Attributes:
        attempt: its present try at instances, if it has got so far.
        cut: it was ended because the proxy stops.
    """

    task: asyncio.Task[Any]
    request: web.Request
    attempt: Attempt | None = None
    cut: bool = False

    def cut_off(self) -> None:
        """Ends it with an error, whatever it is at."""
        self.cut = True
        if self.attempt is not None and self.attempt.relay is not None:
            self.attempt.relay.interrupt(_CUT_OFF, 503)
        else:
            self.task.cancel()

    def hang_up(self) -> None:
        """Closes the client's connection, whatever it has not read yet."""
        if self.request.transport is not None:
            self.request.transport.abort()


class ActiveRequests:
    """All requests that are under way.

    Attributes:
        stopping: no more are taken on.
    """

    def __init__(self, counters: RequestCounters) -> None:
        self._counters = counters
        self._open: set[ActiveRequest] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._open)

    def needs(self, prefill: Instance) -> bool:
        """Whether a request waits for KV of this P."""
        return any(each.attempt is not None and each.attempt.needs(prefill) for each in self._open)

    @contextmanager
    def enter(self, request: web.Request) -> Iterator[ActiveRequest]:
        """One request, from its head to its end. Raises ProxyError if the proxy stops."""
        if self.stopping:
            raise ProxyError(503, STOPPING, last=True)
        task = asyncio.current_task()
        assert task is not None
        active = ActiveRequest(task, request)
        self._open.add(active)
        self._empty.clear()
        try:
            yield active
        except asyncio.CancelledError:
            if not active.cut:
                raise
            task.uncancel()
            raise ProxyError(503, _CUT_OFF, last=True) from None
        finally:
            self._open.discard(active)
            if not self._open:
                self._empty.set()

    async def clear(self, seconds: float, hurry: asyncio.Event) -> int:
        """Waits for requests to end by themselves, for `seconds` at most and not once there is a `hurry`;
        ends the rest, and returns how many those were."""
        self.stopping = True
        waits = [asyncio.create_task(self._empty.wait()), asyncio.create_task(hurry.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        rest = list(self._open)
        self._counters.cut_off += len(rest)
        for each in rest:
            each.cut_off()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._empty.wait()
        for each in list(self._open):
            each.hang_up()
        return len(rest)
