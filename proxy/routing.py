"""Which P and which D serve a request: each chosen for itself, the least busy, in turn among equals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .registry import Instance, Registry, Role

Policy = Callable[[Sequence[Instance]], Instance]
"""Picks one of at least one candidate."""


class NoInstance(Exception):
    """Nobody can serve this request now; the message says who is missing."""


class Full(Exception):
    """Those who can serve this request have as many as they take."""


class UnknownModel(Exception):
    """Several models are served here, and none of them under this name."""


@dataclass(frozen=True)
class Choice:
    """Who serves one request; `prefill` is None where D does it alone."""

    prefill: Instance | None
    decode: Instance

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
    """

    def __init__(
        self, registry: Registry, policy: Callable[[], Policy] = LeastBusy, room: int | None = None
    ) -> None:
        self._registry = registry
        self._room = room
        self._pick_prefill = policy()
        self._pick_decode = policy()

    def choose(
        self,
        model: str | None,
        now: float,
        *,
        paired: bool = True,
        avoid: frozenset[Instance] = frozenset(),
    ) -> Choice:
        """A D for a request that names `model`, and a P if it is to be `paired`; none of those to `avoid`.

        Raises NoInstance, UnknownModel or Full.
        """
        prefillers, decoders = self.able(model, now, paired=paired, avoid=avoid)
        decode = self._pick_decode(decoders)
        if not paired:
            return Choice(None, decode)
        return Choice(self._pick_prefill([p for p in prefillers if p.matches(decode)]), decode)

    def able(
        self, model: str | None, now: float, *, paired: bool, avoid: frozenset[Instance] = frozenset()
    ) -> tuple[Sequence[Instance], Sequence[Instance]]:
        """The P's and D's to choose from, at least one D and for a pair a P for each. Raises as `choose`."""
        decoders = _serving(self._routable_decoders(now), model)
        if not paired:
            return [], self._with_room(_without(_trusted(decoders, now), avoid))
        prefillers = _serving(self._registry.routable("P", now), model)
        if not prefillers:
            raise NoInstance(self._nobody("P"))
        matching = _matching(prefillers, decoders)
        if not matching:
            raise NoInstance("No prefill instance and decode instance that are ready serve the same model.")
        prefillers = _without(_trusted(matching, now), avoid)
        decoders = _without(_trusted(_matching(decoders, prefillers), now), avoid)
        return prefillers, self._with_room(decoders)

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
        """What keeps this proxy from serving, in sentences; empty if nothing does."""
        roles: tuple[Role, ...] = ("P", "D")
        return [self._nobody(role) for role in roles if not self._registry.routable(role, now)]

    def _routable_decoders(self, now: float) -> list[Instance]:
        decoders = self._registry.routable("D", now)
        if not decoders:
            raise NoInstance(self._nobody("D"))
        return decoders

    def _nobody(self, role: Role) -> str:
        name = "prefill" if role == "P" else "decode"
        known = len(self._registry.known(role))
        why = (
            f"of {known} registered, none has answered /health with 200 lately"
            if known
            else "none has registered"
        )
        return f"No {name} instance is ready: {why}."


def _serving(instances: Sequence[Instance], model: str | None) -> Sequence[Instance]:
    """Those that serve `model`. If they all serve the same, they are asked even about an unknown name:
    it may be an adapter that was loaded since, and if not, vLLM's own answer is the best."""
    serving = [instance for instance in instances if instance.serves(model)]
    if serving or len({instance.names for instance in instances}) <= 1:
        return serving or instances
    raise UnknownModel(f"The model `{model}` does not exist; served here: {_listed(instances)}.")


def _trusted(instances: Sequence[Instance], now: float) -> Sequence[Instance]:
    """Those whose breakers let requests through; all, if none does: better one in doubt than none."""
    return [each for each in instances if each.breaker.admits(now)] or instances


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
