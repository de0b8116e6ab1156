"""Whether, and when, a failed request is tried at another instance. No IO; `now` is an argument.

The budget is a share of what was asked lately, so that in an outage, when everything fails, retries add that
share to the load and do not multiply it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 10.0
_SHARE = 0.2
_AT_LEAST_PER_SECOND = 1.0
# Instants that are kept apart; within one of them all count as one.
_TICK_SECONDS = 0.1
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


class Budget:
    """Counts requests and retries of the last ten seconds."""

    def __init__(self) -> None:
        self._asked = _Recent()
        self._retried = _Recent()

    def request(self, now: float) -> None:
        """One request has been admitted."""
        self._asked.add(now)

    def spend(self, now: float) -> bool:
        """Whether one retry is within the budget; if so it is counted."""
        allowed = max(_SHARE * self._asked.total(now), _AT_LEAST_PER_SECOND * _WINDOW_SECONDS)
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
