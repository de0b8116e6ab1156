"""What ranks of D have said about prompts that P has not heard of yet."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from p2pkv.engine.outlet import Place
from p2pkv.protocol.messages import Cancel, Want

MOST = 4096
"""Prompts that D has heard of and P has not."""

PATIENCE = 10
"""Leases for which D's last word about such a prompt is kept: it will not be said again."""


@dataclass
class Early:
    """One rank's claim. `step`: the step that P was in at the first asking; `last`: D's last word."""

    attempt: int
    since: float
    step: int | None
    last: Want | Cancel | None = None


class EarlyClaims:
    """Claims by key and place, kept for a lease; bounded in number."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._claims: dict[str, dict[Place, Early]] = {}
        self._next = 0.0
        """No claim expires before."""

    def __len__(self) -> int:
        return len(self._claims)

    def note(self, key: str, place: Place, attempt: int, step: int | None, now: float) -> bool:
        """Keep a claim; whether the step may still run in which P would have heard of the prompt."""
        if key not in self._claims and len(self._claims) >= MOST:
            return False
        claims = self._claims.setdefault(key, {})
        early = claims.get(place)
        if early is None or early.attempt != attempt:
            early = claims[place] = Early(attempt, now, step)
        early.since = now
        return early.step is not None and early.step == step

    def keep(self, key: str, place: Place, message: Want | Cancel) -> None:
        """D's last word about a prompt, for when P hears of it."""
        early = self._claims.get(key, {}).get(place)
        if early is not None and early.attempt == message.attempt:
            early.last = message

    def drop(self, key: str, place: Place, attempt: int) -> None:
        """D has all that it waited for: the claim has outlived the prompt."""
        claims = self._claims.get(key, {})
        if place in claims and claims[place].attempt == attempt:
            del claims[place]
        if not claims:
            self._claims.pop(key, None)

    def take(self, key: str) -> dict[Place, Early]:
        """P has heard of this prompt: what was said before."""
        return self._claims.pop(key, {})

    def known(self) -> list[str]:
        """The prompts of which something was said."""
        return list(self._claims)

    @property
    def due(self) -> float:
        """When `expire` has something to do."""
        return self._next if self._claims else inf

    def expire(self, now: float) -> None:
        """Drop what is older than a lease. A look at all claims is worth it once a lease or so."""
        if now < self._next:
            return
        self._next = now + self._lease  # of a claim that comes or is renewed after this
        for key, claims in list(self._claims.items()):
            for place, early in list(claims.items()):
                end = early.since + self._lease * (PATIENCE if early.last else 1)
                if now > end:
                    del claims[place]
                else:
                    self._next = min(self._next, end)
            if not claims:
                del self._claims[key]
