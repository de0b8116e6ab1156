"""Whether a request may be sent a second time: within a budget, and only where there is another instance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from .admission import Admission, RequestPlace
from .limits import Limits, RequestCounters
from .membership.instance import Instance

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


@dataclass(frozen=True)
class Retries:
    """Second tries, of all requests. `clock` is monotonic seconds."""

    admission: Admission
    limits: Limits
    counters: RequestCounters
    clock: Callable[[], float]

    def spend(self, *, whatever: bool = False) -> bool:
        """Whether the budget allows one try more, or allowed `whatever` is left; if so it is counted."""
        allowed = self.admission.budget.spend(self.clock(), whatever=whatever)
        self.counters.retries_refused += not allowed
        return allowed

    def may_leave(
        self, place: RequestPlace, instance: Instance, failed: frozenset[Instance], tries: int
    ) -> bool:
        """Whether a request that this instance holds up has anywhere else to go. The budget does not count:
        an instance that hangs has computed nothing, and each request leaves it once."""
        if tries > self.limits.retries:
            return False
        mode = place.mode_after(instance)
        return self.admission.can_move(place, mode, failed | {instance}) or (
            instance is place.choice.prefill and self.limits.decode_alone > 0
        )

    async def try_elsewhere(
        self, place: RequestPlace, culprit: Instance, failed: frozenset[Instance], tries: int, *, free: bool
    ) -> bool:
        """Moves a request away from those that failed it. False if that was its last try. `tries`: without
        those that count as none, see `Outcome.uncounted`; `free`: the budget does not count."""
        mode = place.mode_after(culprit)
        if tries > self.limits.retries or not self.admission.can_move(place, mode, failed):
            return False
        if not free and not self.spend():
            return False
        await asyncio.sleep(pause(tries))
        return self._move(place, culprit, failed)

    async def resume(
        self, place: RequestPlace, failed: frozenset[Instance], tries: int, *, free: bool
    ) -> bool:
        """Moves a request whose answer has begun away from the decode instance that it lost. False if that
        was its last try, or no other has room. The budget counts each time, and refuses only the second and
        later ones: the first are no more than the answers that were under way. `tries`: how often it has been
        moved so, without the moves that were `free`, for which neither the limit nor the budget counts.
        """
        if not free and (tries == self.limits.resumes or not self.spend(whatever=tries == 0)):
            return False
        if tries:
            await asyncio.sleep(pause(tries))
        return self._move(place, place.choice.decode, failed, alone=self.limits.decode_alone > 0)

    def _move(
        self, place: RequestPlace, culprit: Instance, failed: frozenset[Instance], *, alone: bool = False
    ) -> bool:
        """To another server if any has room: the engines behind one HTTP server may stop together, with
        experts in lockstep and when the server ends. Else it may be left to a D `alone`."""
        mode, others = place.mode_after(culprit), failed.union(culprit.neighbours())
        moved = (
            self.admission.move(place, mode, others)
            or (others != failed and self.admission.move(place, mode, failed))
            or (alone and self.admission.move_to_decode_alone(place, failed))
        )
        self.counters.retried += moved
        return moved


def pause(tries: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Seconds before the next try, after `tries` (at least 1) have failed: random, so that what failed
    together does not come back together."""
    return uniform(0.0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (tries - 1)))
