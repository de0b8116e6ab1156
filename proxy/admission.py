"""How much the proxy takes on: which request goes to its instances now, which waits, which is turned away;
and whether a request that has failed is sent to other instances.

Requests that the same instances can serve get their places in the order of arrival; among tenants, the one
that has used the least goes first (access.py). A request waiting for one model holds up no other model's.
"""

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from .access import Tenant
from .http import AGAIN, ProxyError
from .limits import Limits, RequestCounters
from .membership.instance import Instance
from .metrics import StreamTimer
from .placement import PlacedRequest
from .policies import RoutingRequest
from .routing import Choice, DecodeAloneFull, Full, PrefillMode, Router, Unroutable

# Second tries.

_WINDOW_SECONDS = 10.0
_SHARE = 0.2
_PER_SECOND = 1.0


class RetryBudget:
    """Allows retries for a share of the requests of about the last ten seconds: in an outage, when all
    fail, retries add that share to the load and do not multiply it."""

    def __init__(self) -> None:
        self._asked = _Recent()
        self._retried = _Recent()

    def request(self, now: float) -> None:
        """One request has been admitted."""
        self._asked.add(now)

    def spend(self, now: float, *, whatever: bool = False) -> bool:
        """Whether one more retry is allowed, which is then counted; `whatever`: even if none is left."""
        allowed = max(_SHARE * self._asked.total(now), _PER_SECOND * _WINDOW_SECONDS)
        if not whatever and self._retried.total(now) + 1 > allowed:
            return False
        self._retried.add(now)
        return True


class _Recent:
    """How many things happened lately: one of ten seconds ago counts a third."""

    def __init__(self) -> None:
        self._count, self._at = 0.0, 0.0

    def add(self, now: float) -> None:
        self._count, self._at = self.total(now) + 1, now

    def total(self, now: float) -> float:
        return self._count * math.exp((self._at - now) / _WINDOW_SECONDS)


# Places at instances.

ALONE_FULL = f"the decode instances compute as many prompts alone as --alone-share lets them; {AGAIN}"


@dataclass(eq=False)
class RequestPlace:
    """What one request holds at its instances: a place at D, perhaps one of those for prompts that D computes
    alone, and perhaps the trial of a breaker.

    Attributes:
        mode: what P was to do for the request when it came.
        progress: what placement by cost learns from the request; None without that placement.
        expecting: the chosen P until it is asked; then None.
        paid: tokens of the answer for which its tenant has paid.
    """

    request: RoutingRequest
    mode: PrefillMode
    choice: Choice
    key: object = field(default_factory=object)
    progress: PlacedRequest | None = None
    expecting: Instance | None = None
    paid: float = 0.0
    _paces: list[StreamTimer] = field(default_factory=list)
    _whole: int = 0

    def streams(self, pace: StreamTimer) -> None:
        """Its answer, or the next part of it, is a stream."""
        self._paces.append(pace)

    def answered(self, tokens: int) -> None:
        """Its answer is no stream and has so many tokens; 0 if that is not known."""
        self._whole = tokens

    def settle(self) -> None:
        """Corrects what its tenant has paid to the tokens that came, if these are known."""
        came = self._whole + sum(each.events for each in self._paces)
        if self.request.tenant is not None and came:
            self.request.tenant.settle(self.request.base, self.paid, came)

    def sent(self) -> None:
        """P is asked now: its open call counts as load, and the expectation no longer. Idempotent."""
        if self.expecting is not None:
            self.expecting.expect(-1, self.choice.prefill_tokens)
            self.expecting = None

    def mode_after(self, culprit: Instance) -> PrefillMode:
        """What a second try needs of P, after `culprit` has failed. Without a P, D alone is asked, which no
        budget of retries bounds."""
        if self.choice.prefill_unavailable:
            return PrefillMode.UNAVAILABLE
        return PrefillMode.NEEDED if culprit is self.choice.prefill else self.mode


Demand = tuple[str | None, PrefillMode, Instance | None]
"""The model, what P is to do, the only D if there is one: equal demands have the same instances."""
Want = tuple[Demand, frozenset[Instance]]
"""A demand, and the instances to avoid: equal wants of one tenant are met in the order of arrival."""
_BEFORE_ALL = 1 << 62


@dataclass(eq=False)
class _Waiter:
    """A request in the queue. `lost`: if its answer has begun, its place at instances that cannot go on with
    it; such a request goes before all others and counts for no tenant."""

    number: int
    request: RoutingRequest
    mode: PrefillMode
    lost: RequestPlace | None = None
    avoid: frozenset[Instance] = frozenset()
    placed: asyncio.Future[RequestPlace] = field(default_factory=asyncio.Future)

    @property
    def tenant(self) -> Tenant | None:
        return self.request.tenant if self.lost is None else None

    @property
    def want(self) -> Want:
        return (self.request.model, self.mode, self.request.only), self.avoid

    @property
    def used(self) -> float:
        return 0.0 if self.tenant is None else self.tenant.used[self.request.base]


@dataclass(eq=False)
class Admission:
    """Gives out places, each of which adds to the `budget` of second tries; keeps a queue of who waits."""

    _router: Router
    _limits: Limits
    _counters: RequestCounters
    _clock: Callable[[], float]
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _queues: dict[Want, dict[Tenant | None, dict[_Waiter, None]]] = field(default_factory=dict)
    _places: set[RequestPlace] = field(default_factory=set)
    budget: RetryBudget = field(default_factory=RetryBudget)

    @property
    def waiting(self) -> int:
        return sum(len(queue) for lines in self._queues.values() for queue in lines.values())

    @property
    def under_way(self) -> int:
        return len(self._places)

    @property
    def choices(self) -> list[Choice]:
        """The instances that serve each request under way."""
        return [place.choice for place in self._places]

    @asynccontextmanager
    async def place(self, request: RoutingRequest, *, paired: bool) -> AsyncIterator[RequestPlace]:
        """A place, at once or later; `paired`: P can help. Raises NoInstance, UnknownModel, ProxyError."""
        place = await self._wait(request, paired)
        self._counters.admitted += 1
        self.budget.request(self._clock())
        try:
            yield place
        finally:
            self._leave(place)

    def has_room(
        self, request: RoutingRequest, mode: PrefillMode, avoid: frozenset[Instance], others: int = 0
    ) -> bool:
        """Whether there are instances with room, also when `others` other requests like it come."""
        try:
            _, able = self._router.able(request, self._clock(), mode=mode, avoid=avoid)
        except Unroutable:
            return False
        return not others or sum(each.room - each.places for each in able) > others

    def move(self, place: RequestPlace, mode: PrefillMode, avoid: frozenset[Instance]) -> bool:
        """Moves a request to other instances, or with UNAVAILABLE to a D alone, without a wait. It gives up
        its own place first, which may be the last one. False if none has room: then it stays."""
        try:
            self._move(place, mode, avoid)
        except Unroutable:
            return False
        self.advance()
        return True

    def _move(self, place: RequestPlace, mode: PrefillMode, avoid: frozenset[Instance]) -> None:
        """Raises as `Router.choose`."""
        self._give_up(place)
        try:
            place.choice = self._router.choose(place.request, self._clock(), mode=mode, avoid=avoid)
        finally:
            self._take(place)
        self._count(place.choice)

    async def move_in_time(self, place: RequestPlace, mode: PrefillMode, avoid: frozenset[Instance]) -> bool:
        """As `move`, but waits for room, ahead of all that have no place yet. False if none comes in time."""
        place.sent()  # P need not expect it meanwhile
        if place.progress is not None:
            place.progress.leave(self._clock())
        number = next(self._numbers) - _BEFORE_ALL
        try:
            await self._queue(_Waiter(number, place.request, mode, place, avoid))
        except (Unroutable, ProxyError):
            return False
        self.advance()
        return True

    def advance(self) -> None:
        """Gives the places there are to those that wait; call it when there may be new ones."""
        # Only one request of each want is tried where that has no room: there may be a thousand tenants.
        ones = [(next(iter(next(iter(lines.values())))), lines) for lines in self._queues.values()]
        served = [lines for one, lines in ones if self.has_room(one.request, one.mode, one.avoid)]
        queues = (queue for lines in served for queue in lines.values())
        firsts = [(first.used, first.number, first) for queue in queues if (first := _first(queue))]
        heapq.heapify(firsts)
        barred = set[Want]()
        while firsts and self._router.has_room(self._clock()):
            used, number, waiter = heapq.heappop(firsts)
            if waiter.want in barred:
                continue
            if used < waiter.used:  # its tenant got a place in another line meanwhile
                heapq.heappush(firsts, (waiter.used, number, waiter))
                continue
            try:
                waiter.placed.set_result(self._place_of(waiter))
            except Unroutable:
                # An instance may come, or come back, before the wait is over.
                if waiter.mode is not PrefillMode.SKIP_IF_SHORT:
                    barred.add(waiter.want)
                continue
            except Exception as error:  # this request's alone: the caller may serve another one
                waiter.placed.set_exception(error)
            self._remove(waiter)
            if following := _first(self._queues.get(waiter.want, {}).get(waiter.tenant, {})):
                heapq.heappush(firsts, (following.used, following.number, following))

    def close(self, failure: ProxyError) -> None:
        """Turns away all who wait."""
        queues = [queue for lines in self._queues.values() for queue in lines.values()]
        for waiter in itertools.chain.from_iterable(queues):
            if not waiter.placed.done():
                waiter.placed.set_exception(failure)

    async def _wait(self, request: RoutingRequest, paired: bool) -> RequestPlace:
        mode = self._router.first_mode(request, paired=paired)
        if not self._queues:
            with suppress(Unroutable):
                return self._new_place(request, mode)
        return await self._queue(_Waiter(next(self._numbers), request, mode))

    async def _queue(self, waiter: _Waiter) -> RequestPlace:
        placed = waiter.placed
        self._queues.setdefault(waiter.want, {}).setdefault(waiter.tenant, {})[waiter] = None
        if waiter.tenant is not None:
            waiter.tenant.wait(waiter.request.base, 1)
        try:
            self.advance()
            if placed.done():
                return placed.result()
            self._check_queue(waiter)
            async with asyncio.timeout(self._limits.max_wait):
                return await placed
        except (TimeoutError, asyncio.CancelledError) as end:
            # A place may have come in the very moment in which the wait ended.
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                if waiter.lost is not None and isinstance(end, TimeoutError):
                    return waiter.lost
                if waiter.lost is None:
                    self._leave(placed.result())
            if isinstance(end, asyncio.CancelledError):
                self._counters.left_waiting += 1
                raise
            self._counters.refused_late += 1
            why = f"No instance had room within {self._limits.max_wait:g} seconds (--max-wait)"
            raise ProxyError(503, f"{why}; {AGAIN}") from None
        finally:
            self._remove(waiter)

    def _place_of(self, waiter: _Waiter) -> RequestPlace:
        """Raises as `Router.choose`."""
        if waiter.lost is None:
            return self._new_place(waiter.request, waiter.mode)
        self._router.able(waiter.request, self._clock(), mode=waiter.mode, avoid=waiter.avoid)
        self._move(waiter.lost, waiter.mode, waiter.avoid)
        return waiter.lost

    def _new_place(self, request: RoutingRequest, mode: PrefillMode) -> RequestPlace:
        """Raises as `Router.choose`."""
        place = RequestPlace(request, mode, self._router.choose(request, self._clock(), mode=mode))
        if request.tenant is not None:
            place.paid = request.tenant.pay(request.base, request.prompt.tokens, request.asked)
        self._take(place)
        self._count(place.choice)
        return place

    def _remove(self, waiter: _Waiter) -> None:
        lines = self._queues.get(waiter.want, {})
        queue = lines.get(waiter.tenant, {})
        if waiter in queue:
            del queue[waiter]
            if waiter.tenant is not None:
                waiter.tenant.wait(waiter.request.base, -1)
        if not queue:
            lines.pop(waiter.tenant, None)
        if not lines:
            self._queues.pop(waiter.want, None)

    def _check_queue(self, waiter: _Waiter) -> None:
        """Raises NoInstance, UnknownModel or ProxyError if the request cannot be served, or cannot wait."""
        try:
            self._router.able(waiter.request, self._clock(), mode=waiter.mode, avoid=waiter.avoid)
        except DecodeAloneFull:
            self._counters.refused_alone += 1
            raise ProxyError(503, f"No prefill instance can serve this request, and {ALONE_FULL}") from None
        except Full:
            pass
        full = self.waiting > self._limits.max_waiting and waiter.lost is None
        if full and not self._crowd_out(waiter.tenant):
            self._counters.refused_full += 1
            why = "No decode instance has room (--max-requests), and the queue is full (--max-waiting)"
            raise ProxyError(503, f"{why}; {AGAIN}")

    def _crowd_out(self, newcomer: Tenant | None) -> bool:
        """Turns away the newest request of the tenant that has the most waiting by weight. Raises ProxyError
        if that tenant is the newcomer. False if there are no tenants."""
        if newcomer is None:
            return False
        crowds = [each for lines in self._queues.values() for each in lines if each is not None]
        most = max(crowds, key=lambda each: (each.crowd, each is newcomer))
        if most is newcomer:
            raise most.crowd_out()
        queues = [lines.get(most, {}) for lines in self._queues.values()]
        waiters = [each for queue in queues for each in queue if not each.placed.done()]
        if waiters:
            last = max(waiters, key=lambda each: each.number)
            last.placed.set_exception(most.crowd_out())
            self._remove(last)
        return True

    def _count(self, choice: Choice) -> None:
        self._counters.decode_alone += choice.prefill_unavailable
        self._counters.prefill_skipped += choice.prefill_skipped

    def _leave(self, place: RequestPlace) -> None:
        self._give_up(place)
        place.settle()
        self.advance()

    def _take(self, place: RequestPlace) -> None:
        """The request is on its way to its instances."""
        self._places.add(place)
        choice, now = place.choice, self._clock()
        choice.decode.count_place(1, decode_alone=choice.in_share, tokens=place.request.prompt.tokens)
        place.expecting = choice.prefill
        if choice.prefill is not None:
            choice.prefill.expect(1, choice.prefill_tokens)
        place.progress = self._router.track(choice, now)
        for instance in choice.instances:
            instance.breaker.sent(place.key, now)

    def _give_up(self, place: RequestPlace) -> None:
        """The request has left its instances."""
        self._places.discard(place)
        place.sent()
        choice = place.choice
        choice.decode.count_place(-1, decode_alone=choice.in_share, tokens=place.request.prompt.tokens)
        if place.progress is not None:
            place.progress.leave(self._clock())
        for instance in choice.instances:
            instance.breaker.given_up(place.key)

    # Second tries.

    def spend(self, *, whatever: bool = False) -> bool:
        """As `RetryBudget.spend`; also counts refusals."""
        allowed = self.budget.spend(self._clock(), whatever=whatever)
        self._counters.retries_refused += not allowed
        return allowed

    def may_leave(
        self, place: RequestPlace, instance: Instance, failed: frozenset[Instance], tries: int
    ) -> bool:
        """Whether a request that this instance holds up has anywhere else to go. The budget does not count:
        an instance that hangs has computed nothing, and each request leaves it once."""
        if tries > self._limits.retries:
            return False
        alone = instance is place.choice.prefill and self._limits.decode_alone > 0
        return alone or self.has_room(place.request, place.mode_after(instance), failed | {instance})

    async def try_elsewhere(
        self, place: RequestPlace, culprit: Instance, failed: frozenset[Instance], tries: int, *, free: bool
    ) -> bool:
        """Moves a request away from the instances that failed it. False if that was its last try. `tries`:
        so far, without those that are `Outcome.uncounted`; `free`: the budget is not asked."""
        mode = place.mode_after(culprit)
        if tries > self._limits.retries or not self.has_room(place.request, mode, failed):
            return False
        if not free and not self.spend():
            return False
        await asyncio.sleep(pause(tries))
        return self._leave_culprit(place, culprit, failed)

    async def resume(
        self, place: RequestPlace, failed: frozenset[Instance], tries: int, *, free: bool
    ) -> bool:
        """Moves a request whose answer has begun away from the decode instance that it lost. False if that
        was its last try, or no other has room in time. The budget counts each time, and refuses only the
        second and later ones: the first are no more than the answers that were under way. `tries`: how often
        it has been moved so, without the moves that were `free`, for which neither limit nor budget counts.
        """
        if not free and (tries == self._limits.resumes or not self.spend(whatever=tries == 0)):
            return False
        if tries:
            await asyncio.sleep(pause(tries))
        decode, alone = place.choice.decode, self._limits.decode_alone > 0
        if self._leave_culprit(place, decode, failed, alone=alone):
            return True
        moved = await self.move_in_time(place, place.mode_after(decode), failed)
        self._counters.retried += moved
        return moved

    def _leave_culprit(
        self, place: RequestPlace, culprit: Instance, failed: frozenset[Instance], *, alone: bool = False
    ) -> bool:
        """Moves to another HTTP server if any has room, as the engines behind one may stop together: experts
        are in lockstep, and the server may end. Else to another engine; else, if allowed, to a D `alone`."""
        mode, others = place.mode_after(culprit), failed.union(culprit.neighbours())
        moved = (
            self.move(place, mode, others)
            or (others != failed and self.move(place, mode, failed))
            or (alone and self.move(place, PrefillMode.UNAVAILABLE, failed))
        )
        self._counters.retried += moved
        return moved


def _first(queue: dict[_Waiter, None]) -> _Waiter | None:
    """The request that has waited longest, without those that have just been turned away or have left."""
    return next((waiter for waiter in queue if not waiter.placed.done()), None)


_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


def pause(tries: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds before the next try, after `tries`, 1 or more: random, so that failures do not come in step."""
    return uniform(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (tries - 1)))
