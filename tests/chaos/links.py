"""Links that stall and break when told to."""

from __future__ import annotations

import dataclasses
import weakref

from p2pkv.links.base import LinkFactory
from p2pkv.links.faulty import Faults, FaultyLinks, _Fate


class ChaosLinks(FaultyLinks):
    """Links of `inner`; `frozen` stalls them. An operation completes up to `delay_polls` polls late."""

    def __init__(self, inner: LinkFactory, delay_polls: int = 0, seed: int = 0) -> None:
        super().__init__(inner, Faults(delay_polls=delay_polls), seed)
        self.inner = inner
        self._fates: weakref.WeakSet[_Fate] = weakref.WeakSet()

    def break_all(self, operations: int) -> None:
        """Every link that there is breaks after so many more operations."""
        for fate in list(self._fates):
            fate.faults = dataclasses.replace(fate.faults, break_at=fate.operations + operations)

    def mend(self) -> None:
        """What has not broken yet will not."""
        for fate in list(self._fates):
            if fate.faults.break_at is not None and fate.operations <= fate.faults.break_at:
                fate.faults = dataclasses.replace(fate.faults, break_at=None)

    def _fate(self) -> _Fate:
        fate = super()._fate()
        self._fates.add(fate)
        return fate
