"""Which P and which D serve a request: each chosen for itself, the least busy, in turn among equals.

A request that P should help with goes to the first of these that there is:

1. a P in good health, and a D;
2. a D alone, which computes the prompt itself, while it has a place left of the share for that;
3. a P in doubt, whose pings or whose last answers failed: better than none.

Among D's, too, those in doubt come last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from .registry import Instance, Registry, Role

Policy = Callable[[Sequence[Instance]], Instance]
"""Picks one of at least one candidate."""


class NoInstance(Exception):
    """Nobody can serve this request now; the message says who is missing."""


class Full(Exception):
    """Those who can serve this request have as many requests as they take."""


class AloneFull(Full):
    """No P can serve this request, and every D computes as many prompts alone as it may. The message says so
    to the client."""


class UnknownModel(Exception):
    """Several models are served here, and none of them under this name."""


class Help(Enum):
    """What P does for a request."""

    NONE = auto()  # D has to do it by itself
    WANTED = auto()  # P computes the prompt, or D alone if none can
    NEEDED = auto()  # P computes the prompt, and nobody else
    MISSED = auto()  # no P can: D alone, within its share


@dataclass(frozen=True)
class Choice:
    """Who serves one request; `prefill` is None where D does it alone.

    Attributes:
        missed: P would have helped, and none could.
    """

    prefill: Instance | None
    decode: Instance
    missed: bool = False

    @property
    def instances(self) -> list[Instance]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


class LeastBusy:
    """The candidate with the fewest requests, there or coming; among equals, whose turn was longest ago."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)

    def __call__(self, candidates: Sequence[Instance]) -> Instance:
        chosen = min(candidates, key=lambda instance: (instance.load, instance.turn))
        chosen.turn = next(self._turns)
        return chosen


class Router:
    """Chooses among the registry's routable instances.

    P and D have a policy each, so that neither choice depends on the other's, beyond the model.

    Args:
        room: requests that one D takes at a time.
        alone: of those, how many whose prompts it computes because no P can; 0: none.
    """

    def __init__(
        self,
        registry: Registry,
        policy: Callable[[], Policy] = LeastBusy,
        room: int | None = None,
        alone: int = 0,
    ) -> None:
        self._registry = registry
        self._room = room
        self._alone = alone
        self._pick_prefill = policy()
        self._pick_decode = policy()

    def choose(
        self,
        model: str | None,
        now: float,
        *,
        help: Help = Help.WANTED,
        avoid: frozenset[Instance] = frozenset(),
    ) -> Choice:
        """A D for a request that names `model`, and a P as `help` says; none of those to `avoid`.

        Raises NoInstance, UnknownModel or Full.
        """
        prefillers, decoders = self.able(model, now, help=help, avoid=avoid)
        decode = self._pick_decode(decoders)
        if not prefillers:
            return Choice(None, decode, missed=help is not Help.NONE)
        return Choice(self._pick_prefill([p for p in prefillers if p.matches(decode)]), decode)

    def able(
        self, model: str | None, now: float, *, help: Help, avoid: frozenset[Instance] = frozenset()
    ) -> tuple[Sequence[Instance], Sequence[Instance]]:
        """The P's and D's to choose from: at least one D, and a P for each or none at all. Raises as
        `choose`."""
        decoders = _serving(self._routable_decoders(now), model)
        if help is Help.NONE:
            return [], self._with_room(_best(_without(decoders, avoid), now))
        if help is Help.MISSED:
            return [], self._with_room_alone(decoders, now, avoid)
        try:
            prefillers = self._prefillers(model, decoders, now, avoid)
        except (NoInstance, UnknownModel):
            if help is Help.NEEDED or not self._alone:
                raise
            return [], self._with_room_alone(decoders, now, avoid)
        sound = _sound(prefillers, now)
        if not sound and self._alone:
            if help is Help.NEEDED:
                raise NoInstance(self._nobody("P"))
            try:
                return [], self._with_room_alone(decoders, now, avoid)
            except AloneFull:
                pass
        prefillers = sound or _best(prefillers, now)
        return prefillers, self._with_room(_best(_without(_matching(decoders, prefillers), avoid), now))

    def _prefillers(
        self, model: str | None, decoders: Sequence[Instance], now: float, avoid: frozenset[Instance]
    ) -> Sequence[Instance]:
        """The P's that could make a pair with one of these, at least one.

        Raises NoInstance or UnknownModel.
        """
        prefillers = _serving(self._registry.routable("P", now), model)
        if not prefillers:
            raise NoInstance(self._nobody("P"))
        matching = _matching(prefillers, decoders)
        if not matching:
            raise NoInstance("No prefill instance and decode instance that are ready serve the same model.")
        return _without(matching, avoid)

    def _with_room_alone(
        self, decoders: Sequence[Instance], now: float, avoid: frozenset[Instance]
    ) -> Sequence[Instance]:
        able = [
            each
            for each in self._with_room(_best(_without(decoders, avoid), now))
            if each.alone < self._alone
        ]
        if not able:
            raise AloneFull(
                "No prefill instance can serve this request, and the decode instances compute as many "
                "prompts by themselves as they may"
            )
        return able

    def has_room(self, now: float) -> bool:
        """Whether any D takes one request more."""
        return any(self._takes(instance) for instance in self._registry.routable("D", now))

    def _with_room(self, decoders: Sequence[Instance]) -> Sequence[Instance]:
        able = [each for each in decoders if self._takes(each)]
        if not able:
            raise Full
        return able

    def _takes(self, decode: Instance) -> bool:
        return self._room is None or decode.seats < self._room

    def missing(self, now: float) -> list[str]:
        """Who is not there, in sentences; without a D nothing is served, without a P perhaps by D alone."""
        roles: tuple[Role, ...] = ("P", "D")
        return [self._nobody(role) for role in roles if not self._registry.routable(role, now)]

    def _routable_decoders(self, now: float) -> list[Instance]:
        decoders = self._registry.routable("D", now)
        if not decoders:
            raise NoInstance(self._nobody("D"))
        return decoders

    def _nobody(self, role: Role) -> str:
        name = "prefill" if role == "P" else "decode"
        known = self._registry.known(role)
        drained = sum(instance.drained for instance in known)
        why = f"of {len(known)} registered, none has answered /health with 200 lately"
        if not known:
            why = "none has registered"
        elif drained:
            why = f"of {len(known)} registered, {drained} drained, and no other has answered /health lately"
        return f"No {name} instance is ready: {why}."


def _serving(instances: Sequence[Instance], model: str | None) -> Sequence[Instance]:
    """Those that serve `model`. If they all serve the same, they are asked even about an unknown name:
    it may be an adapter that was loaded since, and if not, vLLM's own answer is the best."""
    serving = [instance for instance in instances if instance.serves(model)]
    if serving or len({instance.names for instance in instances}) <= 1:
        return serving or instances
    raise UnknownModel(f"The model `{model}` does not exist; served here: {_listed(instances)}.")


def _sound(instances: Sequence[Instance], now: float) -> Sequence[Instance]:
    """Those that ping, and whose breakers let requests through."""
    return [each for each in instances if each.breaker.admits(now) and not each.silent(now)]


def _best(instances: Sequence[Instance], now: float) -> Sequence[Instance]:
    """The sound ones; else those that are only silent; else all: better one in doubt than none."""
    return _sound(instances, now) or [each for each in instances if each.breaker.admits(now)] or instances


def _matching(instances: Sequence[Instance], others: Sequence[Instance]) -> Sequence[Instance]:
    """Those with whom one of the others could make a pair."""
    return [each for each in instances if any(each.matches(other) for other in others)]


def _without(instances: Sequence[Instance], avoid: frozenset[Instance]) -> Sequence[Instance]:
    left = [each for each in instances if each not in avoid]
    if not left:
        raise NoInstance("There is no other instance that could serve this request.")
    return left


def _listed(instances: Sequence[Instance]) -> str:
    return ", ".join(sorted(set().union(*(instance.names for instance in instances))))
