"""Whether the engine of this rank is stepping, and for how long: the difference between busy and hung."""

from __future__ import annotations


class Steps:
    """Written by the forward thread, read by the engine thread; single attributes, so no lock.

    `stall`: seconds after which a step that has work counts as hung.
    """

    def __init__(self, stall: float) -> None:
        self.stall = stall
        self.held = 0.0
        """By how much the engine thread's clock is behind the forward thread's; see Core.turn."""
        self._number = 0
        self._since: float | None = None

    def begin(self, now: float) -> None:
        self._number += 1
        self._since = now

    def end(self) -> None:
        self._since = None

    @property
    def running(self) -> int | None:
        """The number of the step that runs now; None between steps."""
        number = self._number
        return number if self._since is not None else None

    def stalled(self, now: float) -> bool:
        since = self._since
        return since is not None and now + self.held - since > self.stall
