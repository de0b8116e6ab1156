"""How much the proxy takes on: which request goes to its instances now, which waits, which is turned away.

Requests that the same instances can serve get their places in the order of arrival. A request that waits for
one model holds up no request for another.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .errors import ProxyError
from .registry import LEASE, Instance
from .routing import AloneFull, Asked, Choice, Full, Help, NoInstance, Router, UnknownModel


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one proxy.

    Attributes:
        max_requests: requests under way at one decode instance. It should be more than the instance's batch
            holds, or the batch runs empty.
        max_waiting: requests that wait for a place, in all.
        max_wait: seconds that one of them waits at most.
        max_body: bytes of the largest request.
        max_values: values (objects, lists, texts, fields) in the largest request.
        max_messages: messages, or items of the input of /v1/responses, in the largest request.
        max_held: bytes of the bodies of all requests that an instance may still be sent.
        body_seconds: how long a body may take to come, from its head to its last byte.
        max_connections: of clients, at a time.
        retries: how often one request is tried again elsewhere, before its first byte.
        lease: seconds for which an instance may be silent while its connection stands, before it is gone.
        first_token_seconds: for the first token of a streamed answer; 0: no deadline.
        event_seconds: from one event of a streamed answer to the next; 0: no deadline.
        alone_share: of one decode instance's places, the share for requests whose prompts it computes in a
            prefill instance's place, because none can or because they are short; 0 for none.
    """

    max_requests: int = 1024
    max_waiting: int = 1024
    max_wait: float = 30.0
    max_body: int = 64 << 20
    max_values: int = 1 << 17
    max_messages: int = 4096
    max_held: int = 1 << 30
    body_seconds: float = 60.0
    max_connections: int = 16384
    retries: int = 1
    lease: float = LEASE
    first_token_seconds: float = 0.0
    event_seconds: float = 0.0
    alone_share: float = 0.25

    @property
    def alone(self) -> int:
        """The places of that share: at least one, unless there is none."""
        return max(1, int(self.max_requests * self.alone_share)) if self.alone_share > 0 else 0


@dataclass
class RequestCounters:
    """What the proxy has counted since it started; GET /health shows it.

    Attributes:
        admitted: requests that were given a place at an instance.
        refused_full: turned away because too many waited, or their bodies held too much.
        refused_late: turned away after the longest wait.
        left_waiting: whose client left while they waited.
        alone: requests that a decode instance was given because no prefill instance could serve them.
        refused_alone: turned away because as many of those as may were under way.
        spared: requests that a decode instance was given because their prompts are short.
        retried: tries at another instance.
        retries_refused: failures that were not tried again because the budget of retries was spent.
        breakers_opened: how often an instance was given a pause.
        cut_off: requests that were ended because the proxy stopped.
    """

    admitted: int = 0
    refused_full: int = 0
    refused_late: int = 0
    left_waiting: int = 0
    alone: int = 0
    refused_alone: int = 0
    spared: int = 0
    retried: int = 0
    retries_refused: int = 0
    breakers_opened: int = 0
    cut_off: int = 0


# Places at instances.


@dataclass(eq=False)
class RequestPlace:
    """What one request holds at its instances: a seat at D, perhaps one of those for prompts that D computes
    alone, and the trial of an instance in doubt.

    Attributes:
        asked: what the request wants.
        help: what P was to do for it when it came.
        choice: who serves it.
        key: by which breakers know it.
    """

    asked: Asked
    help: Help
    choice: Choice
    key: object = field(default_factory=object)
    _expecting: Instance | None = None

    def seat(self) -> None:
        """The request is on its way to its instances."""
        self.choice.decode.take_seat(alone=self.choice.in_share, tokens=self.asked.tokens)
        self._expecting = self.choice.prefill
        if self._expecting is not None:
            self._expecting.expect(self.choice.prefill_tokens)

    def sent(self) -> None:
        """P is asked now: from here on its call counts, and the expectation no more. Idempotent."""
        if self._expecting is not None:
            self._expecting.expect_no_more(self.choice.prefill_tokens)
            self._expecting = None

    def unseat(self) -> None:
        """The request has left its instances."""
        self.sent()
        self.choice.decode.leave_seat(alone=self.choice.in_share, tokens=self.asked.tokens)

    def help_after(self, culprit: Instance) -> Help:
        """What a second try needs of P, after `culprit` has failed. Without a P, D alone is asked, which no
        budget of retries bounds."""
        if self.choice.missed:
            return Help.MISSED
        return Help.NEEDED if culprit.role == "P" else self.help


Wants = tuple[str | None, Help]
"""A model, and what P is to do: who wants the same can be served by the same instances."""


@dataclass(eq=False)
class _Waiter:
    number: int
    asked: Asked
    help: Help
    placed: asyncio.Future[RequestPlace]

    @property
    def wants(self) -> Wants:
        return self.asked.model, self.help


class Admission:
    """Gives out places, and keeps those in a queue who wait for one. `clock` is the registry's."""

    def __init__(
        self, router: Router, limits: Limits, counters: RequestCounters, clock: Callable[[], float]
    ) -> None:
        self._router = router
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._numbers = itertools.count()
        self._queues: dict[Wants, dict[_Waiter, None]] = {}
        self._places: set[RequestPlace] = set()

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def under_way(self) -> int:
        return len(self._places)

    @property
    def choices(self) -> list[Choice]:
        """Who serves what is under way."""
        return [place.choice for place in self._places]

    @asynccontextmanager
    async def place(self, asked: Asked, *, paired: bool) -> AsyncIterator[RequestPlace]:
        """A place, as soon as there is one; `paired`: P can help.

        Raises NoInstance, UnknownModel, or ProxyError if there is none in time.
        """
        place = await self._wait(asked, paired)
        self._counters.admitted += 1
        try:
            yield place
        finally:
            self._leave(place)

    def can_move(self, place: RequestPlace, help: Help, avoid: frozenset[Instance]) -> bool:
        """Whether there are other instances with room."""
        try:
            self._router.able(place.asked.model, self._clock(), help=help, avoid=avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        return True

    def move(self, place: RequestPlace, help: Help, avoid: frozenset[Instance]) -> bool:
        """Puts a request at other instances, without a wait. False if there are none with room."""
        try:
            other = self._choose(place.asked, help, avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        self._unseat(place)
        place.choice = other
        self._seat(place)
        self._count(other)
        self.advance()
        return True

    def stay_alone(self, place: RequestPlace, avoid: frozenset[Instance]) -> bool:
        """Lets a D alone go on with a request that has a place, which may be the last one there is.

        False if no D may: all compute as many prompts alone as they may, or there is no D.
        """
        self._unseat(place)
        try:
            place.choice = self._choose(place.asked, Help.MISSED, avoid)
        except (NoInstance, UnknownModel, Full):
            return False
        finally:
            self._seat(place)
        self._count(place.choice)
        self.advance()
        return True

    def advance(self) -> None:
        """Gives out what places there are; call it when there may be new ones."""
        firsts = [(first.number, first) for queue in self._queues.values() if (first := _first(queue))]
        heapq.heapify(firsts)
        while firsts and self._router.has_room(self._clock()):
            _, waiter = heapq.heappop(firsts)
            try:
                choice = self._choose(waiter.asked, waiter.help)
            except (Full, NoInstance, UnknownModel):
                # An instance may come, or come back, before the wait is over.
                continue
            except Exception as error:  # this request's alone: whoever calls us may serve another one
                self._remove(waiter)
                waiter.placed.set_exception(error)
            else:
                place = RequestPlace(waiter.asked, waiter.help, choice)
                self._seat(place)
                self._count(choice)
                self._remove(waiter)
                waiter.placed.set_result(place)
            if following := _first(self._queues.get(waiter.wants, {})):
                heapq.heappush(firsts, (following.number, following))

    def close(self, failure: ProxyError) -> None:
        """Turns away all who wait."""
        for waiter in [waiter for queue in self._queues.values() for waiter in queue]:
            if not waiter.placed.done():
                waiter.placed.set_exception(failure)

    async def _wait(self, asked: Asked, paired: bool) -> RequestPlace:
        help, placed = (
            self._router.first_help(asked, paired=paired),
            asyncio.get_running_loop().create_future(),
        )
        waiter = _Waiter(next(self._numbers), asked, help, placed)
        self._queues.setdefault(waiter.wants, {})[waiter] = None
        try:
            self.advance()
            if waiter.placed.done():
                return waiter.placed.result()
            self._check_queue(waiter)
            async with asyncio.timeout(self._limits.max_wait):
                return await waiter.placed
        except TimeoutError:
            self._give_back(waiter)
            self._counters.refused_late += 1
            raise ProxyError(
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
        """Whether a wait has a prospect. Raises NoInstance, UnknownModel or ProxyError."""
        try:
            self._router.able(waiter.asked.model, self._clock(), help=waiter.help)
        except AloneFull as full:
            self._counters.refused_alone += 1
            raise ProxyError(503, f"{full}; try again in a few seconds.") from None
        except Full:
            pass
        if self.waiting <= self._limits.max_waiting:
            return
        self._counters.refused_full += 1
        raise ProxyError(
            503,
            "All decode instances have as many requests as they take, and as many as may are waiting; "
            "try again in a few seconds.",
        )

    def _give_back(self, waiter: _Waiter) -> None:
        """A place may have come in the very moment in which the wait ended."""
        placed = waiter.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            self._leave(placed.result())

    def _choose(self, asked: Asked, help: Help, avoid: frozenset[Instance] = frozenset()) -> Choice:
        return self._router.choose(asked, self._clock(), help=help, avoid=avoid)

    def _count(self, choice: Choice) -> None:
        self._counters.alone += choice.missed
        self._counters.spared += choice.spared

    def _leave(self, place: RequestPlace) -> None:
        self._unseat(place)
        self.advance()

    def _seat(self, place: RequestPlace) -> None:
        self._places.add(place)
        place.seat()
        for instance in place.choice.instances:
            instance.breaker.sent(place.key, self._clock())

    def _unseat(self, place: RequestPlace) -> None:
        self._places.discard(place)
        place.unseat()
        for instance in place.choice.instances:
            instance.breaker.given_up(place.key)


def _first(queue: dict[_Waiter, None]) -> _Waiter | None:
    """Who has waited longest, without those who have just been turned away or have left."""
    return next((waiter for waiter in queue if not waiter.placed.done()), None)
