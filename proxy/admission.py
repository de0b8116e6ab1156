"""Who goes to an instance now, who waits for a place, in which order, and who is turned away.

First come, first served among those who can be served by the same instances: a request that waits for one
model holds up nobody who wants another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from .counters import Counters
from .errors import Failure
from .limits import Limits
from .registry import Instance
from .routing import Choice, Full, NoInstance, Router, UnknownModel


@dataclass(eq=False)
class Place:
    """What one request holds at its instances: a seat at D, and the trial of an instance in doubt.

    Attributes:
        choice: who serves it.
    """

    model: str | None
    paired: bool
    choice: Choice


@dataclass(eq=False)
class _Waiter:
    model: str | None
    paired: bool
    placed: asyncio.Future[Place]


class Admission:
    """Gives out places. `clock` is the registry's."""

    def __init__(
        self, router: Router, limits: Limits, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._router = router
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._queue: dict[_Waiter, None] = {}
        self._places: set[Place] = set()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def under_way(self) -> int:
        return len(self._places)

    @asynccontextmanager
    async def place(self, model: str | None, *, paired: bool) -> AsyncIterator[Place]:
        """A place, as soon as there is one. Raises NoInstance, UnknownModel, or Failure if there is none
        in time."""
        place = await self._wait(model, paired)
        self._counters.admitted += 1
        try:
            yield place
        finally:
            self._leave(place)

    def can_move(self, place: Place, avoid: frozenset[Instance]) -> bool:
        """Whether there are other instances with room."""
        try:
            self._router.able(place.model, self._clock(), paired=place.paired, avoid=avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        return True

    def move(self, place: Place, avoid: frozenset[Instance]) -> bool:
        """Puts a request at other instances, without a wait. False if there are none with room."""
        try:
            other = self._choose(place.model, place.paired, avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        self._unseat(place)
        place.choice = other
        self._seat(place)
        self.advance()
        return True

    def advance(self) -> None:
        """Gives out what places there are; call it when there may be new ones."""
        stuck: set[tuple[str | None, bool]] = set()
        for waiter in list(self._queue):
            if not self._router.has_room(self._clock()):
                return
            if waiter.placed.done() or (waiter.model, waiter.paired) in stuck:
                continue
            try:
                choice = self._choose(waiter.model, waiter.paired)
            except (Full, NoInstance, UnknownModel):
                # An instance may come, or come back, before the wait is over.
                stuck.add((waiter.model, waiter.paired))
                continue
            place = Place(waiter.model, waiter.paired, choice)
            self._seat(place)
            del self._queue[waiter]
            waiter.placed.set_result(place)

    def close(self, failure: Failure) -> None:
        """Turns away all who wait."""
        for waiter in list(self._queue):
            if not waiter.placed.done():
                waiter.placed.set_exception(failure)

    async def _wait(self, model: str | None, paired: bool) -> Place:
        with suppress(Full):
            self._router.able(model, self._clock(), paired=paired)
        waiter = _Waiter(model, paired, asyncio.get_running_loop().create_future())
        self._queue[waiter] = None
        try:
            self.advance()
            if not waiter.placed.done() and len(self._queue) > self._limits.max_waiting:
                raise self._refused_full()
            async with asyncio.timeout(self._limits.max_wait):
                return await waiter.placed
        except TimeoutError:
            self._give_back(waiter)
            self._counters.refused_late += 1
            raise Failure(
                503, f"No instance had room for this request within {self._limits.max_wait:g} seconds."
            ) from None
        except asyncio.CancelledError:
            self._give_back(waiter)
            self._counters.left_waiting += 1
            raise
        finally:
            self._queue.pop(waiter, None)

    def _refused_full(self) -> Failure:
        self._counters.refused_full += 1
        return Failure(
            503,
            "All decode instances have as many requests as they take, and as many as may are waiting; "
            "try again in a few seconds.",
        )

    def _give_back(self, waiter: _Waiter) -> None:
        """A place may have come in the very moment in which the wait ended."""
        placed = waiter.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            self._leave(placed.result())

    def _choose(self, model: str | None, paired: bool, avoid: frozenset[Instance] = frozenset()) -> Choice:
        return self._router.choose(model, self._clock(), paired=paired, avoid=avoid)

    def _leave(self, place: Place) -> None:
        self._unseat(place)
        self.advance()

    def _seat(self, place: Place) -> None:
        self._places.add(place)
        place.choice.decode.seats += 1
        for instance in place.choice.instances:
            instance.breaker.sent(place, self._clock())

    def _unseat(self, place: Place) -> None:
        self._places.discard(place)
        place.choice.decode.seats -= 1
        for instance in place.choice.instances:
            instance.breaker.given_up(place)
