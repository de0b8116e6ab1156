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


class UnknownModel(Exception):
    """Several models are served here, and none of them under this name."""


@dataclass(frozen=True)
class Choice:
    """Who serves one request; `prefill` is None where D does it alone."""

    prefill: Instance | None
    decode: Instance


class LeastBusy:
    """The candidate with the fewest requests in flight; among equals, who has waited longest for a turn."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)

    def __call__(self, candidates: Sequence[Instance]) -> Instance:
        chosen = min(candidates, key=lambda instance: (instance.in_flight, instance.turn))
        chosen.turn = next(self._turns)
        return chosen


class Router:
    """Chooses among the registry's routable instances.

    P and D have a policy each, so that neither choice depends on the other's, beyond the model.
    """

    def __init__(self, registry: Registry, policy: Callable[[], Policy] = LeastBusy) -> None:
        self._registry = registry
        self._pick_prefill = policy()
        self._pick_decode = policy()

    def pair(self, model: str | None, now: float) -> Choice:
        """A P and a D for a request that names `model`. Raises NoInstance or UnknownModel."""
        decoders = _serving(self._routable_decoders(now), model)
        prefillers = _serving(self._registry.routable("P", now), model)
        if not prefillers:
            raise NoInstance(self._nobody("P"))
        matched = [d for d in decoders if any(p.matches(d) for p in prefillers)]
        if not matched:
            raise NoInstance("No prefill instance and decode instance that are ready serve the same model.")
        decode = self._pick_decode(matched)
        return Choice(self._pick_prefill([p for p in prefillers if p.matches(decode)]), decode)

    def alone(self, model: str | None, now: float) -> Choice:
        """A D for a request that needs no P. Raises NoInstance or UnknownModel."""
        return Choice(None, self._pick_decode(_serving(self._routable_decoders(now), model)))

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


def _listed(instances: Sequence[Instance]) -> str:
    return ", ".join(sorted(set().union(*(instance.names for instance in instances))))
