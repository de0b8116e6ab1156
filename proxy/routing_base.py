"""What a routing policy is, and what it knows. How to add one: see `POLICIES` in routing.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Self

from .bodies import Prompt
from .membership.instance import Instance
from .placement import Placement


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How instances are chosen.

    Attributes:
        prefill, decode: the policies for P and for D.
        session_header: for consistent_hash: requests with the same value go to the same instance.
        prefix_memory: for prefix_aware: pieces of prompts that are remembered for P's, and as many for D's.
        skip_below: a prompt of fewer tokens goes to D alone, within the share for that; 0: none does. With
            `prefix_aware` for D, tokens that D has been given before do not count.
        placement: who decides whether one instance serves a request whole or two do: `auto`, predicted cost
            (placement.py); `pair`, always two where there are two, each chosen by its policy.
        pause_weight: for `auto`: what a second counts for which a prompt stops an answer.
    """

    prefill: str = "least_loaded"
    decode: str = "least_loaded"
    session_header: str = "X-Session-Id"
    prefix_memory: int = 1 << 16
    skip_below: int = 0
    placement: Placement = "pair"
    pause_weight: float = 0.1


@dataclass(frozen=True, eq=False)
class RoutingRequest:
    """What routing knows of a request.

    Attributes:
        model: that it names; None if it names none.
        prompt: its length and its beginning.
        session: to which it belongs; "" if it names none.
    """

    model: str | None = None
    prompt: Prompt = field(default_factory=lambda: Prompt({}))
    session: str = ""


class Pick(NamedTuple):
    """One of the candidates; `cached`: tokens of the prompt that it has been given before."""

    instance: Instance
    cached: int = 0


class Policy:
    """Picks one of at least one candidate, all P's or all D's.

    Attributes:
        help: which one it picks, for `--help`.
        knows_prompts: `cached` has something to return.
    """

    help: ClassVar[str]
    knows_prompts: ClassVar[bool] = False

    @classmethod
    def of(cls, routing: Routing) -> Self:
        """One for a proxy with these options."""
        return cls()

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        raise NotImplementedError

    def cached(self, candidates: Sequence[Instance], request: RoutingRequest) -> dict[Instance, int]:
        """Tokens of the prompt that each has been given before; those that are left out have none."""
        return {}
