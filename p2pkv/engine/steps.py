"""Whether the engine of this rank is stepping, and for how long: the difference between busy and hung."""

from __future__ import annotations


class Steps:
    """Written by the forward thread, read by the engine thread; one attribute, so no lock.

    `stall`: seconds after which a step that has work counts as hung.
    """

    def __init__(self, stall: float) -> None:
        self.stall = stall
        self._since: float | None = None

    def begin(self, now: float) -> None:
        self._since = now

    def end(self) -> None:
        self._since = None

    @property
    def busy(self) -> bool:
        return self._since is not None

    def stalled(self, now: float) -> bool:
        since = self._since
        return since is not None and now - since > self.stall
