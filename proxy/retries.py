"""Whether a request may be sent a second time: within a budget, and only where there is another instance."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable

from .admission import Admission, Limits, RequestCounters, RequestPlace
from .registry import Instance

_WINDOW_SECONDS = 10.0
_SHARE = 0.2
_PER_SECOND = 1.0
# Requests and retries are counted together within so many seconds.
_TICK_SECONDS = 0.1
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


class Retries:
    """Second tries, of all requests. `clock` is monotonic seconds."""

    def __init__(
        self, admission: Admission, limits: Limits, counters: RequestCounters, clock: Callable[[], float]
    ) -> None:
        self._admission = admission
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._budget = RetryBudget()

    def admitted(self) -> None:
        """A new request has a place: the budget grows."""
        self._budget.request(self._clock())

    def spend(self) -> bool:
        """Whether the budget allows one try more; if so it is counted."""
        allowed = self._budget.spend(self._clock())
        self._counters.retries_refused += not allowed
        return allowed

    def may_leave(
        self, place: RequestPlace, instance: Instance, failed: frozenset[Instance], tries: int
    ) -> bool:
        """Whether a request that this instance holds up has anywhere else to go. The budget does not count:
        an instance that hangs has computed nothing, and each request leaves it once."""
        if tries > self._limits.retries:
            return False
        help = place.help_after(instance)
        return self._admission.can_move(place, help, failed | {instance}) or (
            instance.role == "P" and self._limits.alone > 0
        )

    async def elsewhere(
        self,
        place: RequestPlace,
        culprit: Instance,
        failed: frozenset[Instance],
        tries: int,
        *,
        free: bool = False,
    ) -> bool:
        """Moves a request away from those that failed it. False if that was its last try.

        Args:
            tries: how many it has had.
            free: the budget does not count.
        """
        if tries > self._limits.retries:
            return False
        help = place.help_after(culprit)
        if not self._admission.can_move(place, help, failed):
            return False
        if not free and not self.spend():
            return False
        await asyncio.sleep(pause(tries))
        if not self._admission.move(place, help, failed):
            return False
        self._counters.retried += 1
        return True


class RetryBudget:
    """Counts requests and retries of the last ten seconds.

    What it allows is a share of the requests: in an outage, when everything fails, retries add that share to
    the load and do not multiply it.
    """

    def __init__(self) -> None:
        self._asked = _Recent()
        self._retried = _Recent()

    def request(self, now: float) -> None:
        """One request has been admitted."""
        self._asked.add(now)

    def spend(self, now: float) -> bool:
        """Whether one retry is within the budget; if so it is counted."""
        allowed = max(_SHARE * self._asked.total(now), _PER_SECOND * _WINDOW_SECONDS)
        if self._retried.total(now) + 1 > allowed:
            return False
        self._retried.add(now)
        return True


class _Recent:
    """How many things happened in the last window, in bounded memory."""

    def __init__(self) -> None:
        self._ticks: deque[list[float]] = deque()
        self._total = 0

    def add(self, now: float) -> None:
        if not self._ticks or now - self._ticks[-1][0] >= _TICK_SECONDS:
            self._ticks.append([now, 0])
        self._ticks[-1][1] += 1
        self._total += 1
        self.total(now)

    def total(self, now: float) -> int:
        while self._ticks and now - self._ticks[0][0] > _WINDOW_SECONDS:
            self._total -= int(self._ticks.popleft()[1])
        return self._total


def pause(tries: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds before the next try, after `tries` (at least 1) have failed: random, so that what failed
    together does not come back together."""
    return uniform(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (tries - 1)))
