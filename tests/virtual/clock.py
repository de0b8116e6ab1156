"""A clock that stands still while anybody works, and jumps to what is due next."""

import heapq
import itertools
from collections.abc import Callable

Act = Callable[[], None]


class Clock:
    """Everything that is due, in order of time; what is due at the same time in the order of its asking."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Act]] = []

    def after(self, seconds: float, act: Act) -> None:
        heapq.heappush(self._due, (self.now + max(0.0, seconds), next(self._numbers), act))

    def step(self) -> None:
        self.now, _, act = heapq.heappop(self._due)
        act()

    def pass_by(self, seconds: float) -> None:
        end = self.now + seconds
        self.after(seconds, lambda: None)
        while self.now < end:
            self.step()


class Alarm:
    """One thing that is done at the earliest of the times that were asked for."""

    def __init__(self, clock: Clock, act: Act) -> None:
        self._clock = clock
        self._act = act
        self._due = float("inf")

    def within(self, seconds: float) -> None:
        """Have it done in so many seconds, or sooner."""
        due = self._clock.now + seconds
        if due < self._due:
            self._due = due
            self._clock.after(seconds, lambda: self._ring(due))

    def clear(self) -> None:
        self._due = float("inf")

    def _ring(self, due: float) -> None:
        if due == self._due:
            self.clear()
            self._act()
