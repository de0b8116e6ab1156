"""Who goes to an instance now, who waits for a place, in which order, and who is turned away.

First come, first served among those who can be served by the same instances: a request that waits for one
model holds up nobody who wants another.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from .counters import Counters
from .errors import Failure
from .limits import Limits
from .registry import Instance
from .routing import AloneFull, Choice, Full, Help, NoInstance, Router, UnknownModel


@dataclass(eq=False)
class Place:
    """What one request holds at its instances: a seat at D, perhaps one of those for prompts that D computes
    alone, and the trial of an instance in doubt.

    Attributes:
        choice: who serves it.
    """

    model: str | None
    paired: bool
    choice: Choice
    _expecting: Instance | None = None

    def seat(self) -> None:
        """It is coming to its instances."""
        self.choice.decode.seats += 1
        self.choice.decode.alone += self.choice.missed
        self._expecting = self.choice.prefill
        if self._expecting is not None:
            self._expecting.coming += 1

    def sent(self) -> None:
        """P is asked now, and busy by that alone. Idempotent."""
        if self._expecting is not None:
            self._expecting.coming -= 1
            self._expecting = None

    def unseat(self) -> None:
        """It has left them."""
        self.sent()
        self.choice.decode.seats -= 1
        self.choice.decode.alone -= self.choice.missed


Wants = tuple[str | None, bool]
"""A model, and whether P is to help: who wants the same can be served by the same instances."""


@dataclass(eq=False)
class _Waiter:
    number: int
    wants: Wants
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
        self._numbers = itertools.count()
        self._queues: dict[Wants, dict[_Waiter, None]] = {}
        self._places: set[Place] = set()

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

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

    def can_move(self, place: Place, help: Help, avoid: frozenset[Instance]) -> bool:
        """Whether there are other instances with room."""
        try:
            self._router.able(place.model, self._clock(), help=help, avoid=avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        return True

    def move(self, place: Place, help: Help, avoid: frozenset[Instance]) -> bool:
        """Puts a request at other instances, without a wait. False if there are none with room."""
        try:
            other = self._choose(place.model, help, avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        self._unseat(place)
        place.choice = other
        self._seat(place)
        self._counters.alone += other.missed
        self.advance()
        return True

    def stay_alone(self, place: Place, avoid: frozenset[Instance]) -> bool:
        """Lets a D alone go on with a request that has a place; the place itself may be the last one there
        is. False if no D may: then all have as many of those as they may, or there is no D."""
        self._unseat(place)
        try:
            place.choice = self._choose(place.model, Help.MISSED, avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        finally:
            self._seat(place)
        self._counters.alone += 1
        self.advance()
        return True

    def advance(self) -> None:
        """Gives out what places there are; call it when there may be new ones."""
        firsts = [(first.number, first) for queue in self._queues.values() if (first := _first(queue))]
        heapq.heapify(firsts)
        while firsts and self._router.has_room(self._clock()):
            _, waiter = heapq.heappop(firsts)
            try:
                place = Place(*waiter.wants, self._choose(waiter.wants[0], _help(waiter.wants)))
            except (Full, NoInstance, UnknownModel):
                # An instance may come, or come back, before the wait is over.
                continue
            self._seat(place)
            self._counters.alone += place.choice.missed
            self._remove(waiter)
            waiter.placed.set_result(place)
            if following := _first(self._queues.get(waiter.wants, {})):
                heapq.heappush(firsts, (following.number, following))

    def close(self, failure: Failure) -> None:
        """Turns away all who wait."""
        for waiter in [waiter for queue in self._queues.values() for waiter in queue]:
            if not waiter.placed.done():
                waiter.placed.set_exception(failure)

    async def _wait(self, model: str | None, paired: bool) -> Place:
        waiter = _Waiter(next(self._numbers), (model, paired), asyncio.get_running_loop().create_future())
        self._queues.setdefault(waiter.wants, {})[waiter] = None
        try:
            self.advance()
            if not waiter.placed.done():
                self._check_queue(waiter)
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
            self._remove(waiter)

    def _remove(self, waiter: _Waiter) -> None:
        queue = self._queues.get(waiter.wants, {})
        queue.pop(waiter, None)
        if not queue:
            self._queues.pop(waiter.wants, None)

    def _check_queue(self, waiter: _Waiter) -> None:
        """Whether a wait has a prospect. Raises NoInstance, UnknownModel or Failure."""
        try:
            self._router.able(waiter.wants[0], self._clock(), help=_help(waiter.wants))
        except AloneFull as full:
            self._counters.refused_alone += 1
            raise Failure(503, f"{full}; try again in a few seconds.") from None
        except Full:
            pass
        if self.waiting <= self._limits.max_waiting:
            return
        self._counters.refused_full += 1
        raise Failure(
            503,
            "All decode instances have as many requests as they take, and as many as may are waiting; "
            "try again in a few seconds.",
        )

    def _give_back(self, waiter: _Waiter) -> None:
        """A place may have come in the very moment in which the wait ended."""
        placed = waiter.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            self._leave(placed.result())

    def _choose(self, model: str | None, help: Help, avoid: frozenset[Instance] = frozenset()) -> Choice:
        return self._router.choose(model, self._clock(), help=help, avoid=avoid)

    def _leave(self, place: Place) -> None:
        self._unseat(place)
        self.advance()

    def _seat(self, place: Place) -> None:
        self._places.add(place)
        place.seat()
        for instance in place.choice.instances:
            instance.breaker.sent(place, self._clock())

    def _unseat(self, place: Place) -> None:
        self._places.discard(place)
        place.unseat()
        for instance in place.choice.instances:
            instance.breaker.given_up(place)


def _help(wants: Wants) -> Help:
    return Help.WANTED if wants[1] else Help.NONE


def _first(queue: dict[_Waiter, None]) -> _Waiter | None:
    """Who has waited longest, without those who have just been turned away or have left."""
    return next((waiter for waiter in queue if not waiter.placed.done()), None)
