"""What a routing policy is, and what it knows. How to add one: see `POLICIES` in routing.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from .bodies import PIECE_TOKENS, Prompt
from .membership.instance import Instance
from .placement import Placement
from .settings import at_least, header, not_negative, option
from .tenants import Tenant


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How instances are chosen, each given by an option. `POLICIES` in routing.py has the policies."""

    # fmt: off
    prefill: str = option("--prefill-policy", "least_loaded", str, "POLICY",
        "how the prefill instance is chosen, see above")
    decode: str = option("--decode-policy", "least_loaded", str, "POLICY",
        "how the decode instance is chosen, see above")
    placement: Placement = option("--placement", "pair", str, None,  # noqa: RUF009
        "pair: the policies choose a prefill instance for each prompt and a decode instance for the answer; "
        "auto: least predicted cost, and an instance of both roles may serve a request whole",
        choices=("pair", "auto"))
    pause_weight: float = option("--pause-weight", 0.1, not_negative, "N",
        "for --placement auto: the cost of a second for which a prompt stops an answer, where a second of "
        "waiting costs 1; the larger, the more prompts and answers are kept apart")
    session_header: str = option("--session-header", "X-Session-Id", header, "NAME",
        "for consistent_hash: the HTTP header that names a session; without it: least_loaded")
    prefix_memory: int = option("--prefix-memory", 1 << 16, at_least(1), "N",
        "for prefix_aware: how many pieces of prompts the proxy remembers for prefill and as many for decode "
        f"instances: {PIECE_TOKENS} tokens each at a prompt's beginning, 512 beyond")
    skip_below: int = option("--skip-prefill-below", 0, at_least(0), "TOKENS",
        "a prompt of fewer tokens goes to a decode instance alone, within --alone-share; with "
        "--decode-policy prefix_aware only tokens new to it count; 0: none does")
    # fmt: on


@dataclass(frozen=True, eq=False)
class RoutingRequest:
    """What routing knows of a request.

    Attributes:
        model: that it names; None if it names none.
        prompt: its length and its beginning.
        session: to which it belongs; "" if it names none.
        tenant: whose it is, for the queue; None if there are no tenants.
        asked: tokens of its answer at most, with a tenant; 0 if it does not say.
        only: the D that has what it goes on with; None if any may serve it.
    """

    model: str | None = None
    prompt: Prompt = field(default_factory=lambda: Prompt({}))
    session: str = ""
    tenant: Tenant | None = None
    asked: int = 0
    only: Instance | None = None


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

    def __init__(self, routing: Routing | None = None) -> None:
        """For a proxy with these options."""

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        raise NotImplementedError

    def cached(self, candidates: Sequence[Instance], request: RoutingRequest) -> dict[Instance, int]:
        """Tokens of the prompt that each has been given before; those that are left out have none."""
        return {}

    def with_holder(
        self, some: Sequence[Instance], candidates: Sequence[Instance], request: RoutingRequest
    ) -> Sequence[Instance]:
        """Some of the candidates, and the one that has been given most of the prompt."""
        return some

    def remember(self, instances: Iterable[Instance], request: RoutingRequest) -> None:
        """These are given the prompt, by another choice."""
