"""Whether an instance that fails again and again is given requests. No IO, no clock: `now` is an argument.

It opens when many of the latest requests failed. After a pause one request, the trial, is let through: if it
succeeds the breaker closes, if it fails the next pause is about twice as long. A trial that ends without an
outcome, since its client left, or that has none for long, makes room for another.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

_WINDOW_SECONDS = 30.0
_OUTCOMES = 100
_FAILURES = 5
_SHARE = 0.5
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
# Closed, and without a failure, for so long, it has no past.
_FORGET_SECONDS = 120.0


class Breaker:
    """One instance's. `uniform` draws the jitter of its pauses.

    Attributes:
        opened: how often in a row it has opened; 0 when it has no past.
    """

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._uniform = uniform
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_OUTCOMES)
        self._resume: float | None = None
        self._trial: object | None = None
        self._patience = 0.0
        self._last_failure = float("-inf")
        self.opened = 0

    @property
    def closed(self) -> bool:
        return self._resume is None

    def admits(self, now: float) -> bool:
        """Whether a request may be sent now."""
        if self._resume is None:
            return True
        return now >= self._resume and (self._trial is None or now >= self._patience)

    def sent(self, owner: object, now: float) -> None:
        """`owner` has been chosen for this instance; if the pause is over, it is the trial."""
        if self._resume is not None and self.admits(now):
            self._trial = owner
            self._patience = now + _LONGEST_PAUSE

    def given_up(self, owner: object) -> None:
        """`owner` has ended, perhaps without an outcome: then somebody else may be the trial."""
        if self._trial is owner:
            self._trial = None

    def succeeded(self, now: float) -> bool:
        """An answer came. True if that closes the breaker."""
        if self._resume is None:
            self._outcomes.append((now, True))
            return False
        if self._trial is None:
            return False  # asked before the pause; only the trial decides
        self._resume = self._trial = None
        self._outcomes.clear()
        return True

    def failed(self, now: float) -> bool:
        """No answer came, or an error of the server's. True if that opens the breaker."""
        if self.forgettable(now):
            self.opened = 0
        self._last_failure = now
        if self._resume is None:
            self._outcomes.append((now, False))
            bad = self._too_many(now)
        else:
            bad = self._trial is not None
        if bad:
            self._open(now)
        return bad

    def forgettable(self, now: float) -> bool:
        """Whether it has no past that matters."""
        return now - self._last_failure > _FORGET_SECONDS

    def _too_many(self, now: float) -> bool:
        recent = [success for when, success in self._outcomes if now - when <= _WINDOW_SECONDS]
        failures = recent.count(False)
        return failures >= _FAILURES and failures >= _SHARE * len(recent)

    def _open(self, now: float) -> None:
        self.opened += 1
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(self.opened - 1, 16))
        self._resume = now + self._uniform(longest / 2, longest)
        self._trial = None
