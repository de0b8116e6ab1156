"""What a policy knows of a request, and the policies that look at more than how busy instances are.

A new policy is a class here and a line in `POLICIES` in routing.py. `prefix_aware` sends prompts that begin
alike to one instance, which then has their KV in its cache: vLLM finds it by a chain of hashes, each over a
block and the hash before it. The proxy has no tokenizer, so its chain (`Prompt.chain`) is over pieces of the
text, or of the token ids if the client sends these. Equal chains mean equal beginnings, for the same model.
The proxy can only guess what an instance still has in its cache, from what it has sent there.
"""

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar, NamedTuple

from .access import Tenant
from .bodies import PIECE_TOKENS, Chain, Prompt
from .membership.instance import Instance, least_busy
from .placement import Placement
from .settings import at_least, header, not_negative, option


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How instances are chosen, each given by an option."""

    # fmt: off
    prefill: str = option("--prefill-policy", "least_loaded", str, "POLICY",
        "how the prefill instance is chosen, see above")
    decode: str = option("--decode-policy", "least_loaded", str, "POLICY",
        "how the decode instance is chosen, see above")
    placement: Placement = option("--placement", "pair", str, None,  # noqa: RUF009
        "pair: the policies choose a prefill instance for each prompt and a decode instance for the answer; "
        "auto: least predicted cost; an instance of both roles may serve a whole request",
        choices=("pair", "auto"))
    pause_weight: float = option("--pause-weight", 0.1, not_negative, "N",
        "for --placement auto: the cost of a second for which a prompt stops an answer, where a second of "
        "waiting costs 1; the larger, the more prompts and answers are kept apart")
    session_header: str = option("--session-header", "X-Session-Id", header, "NAME",
        "for consistent_hash: the HTTP header that names a session; without it: least_loaded")
    prefix_memory: int = option("--prefix-memory", 1 << 16, at_least(1), "N",
        "for prefix_aware: how many pieces of prompts the proxy remembers, for prefill and for decode "
        f"instances each: {PIECE_TOKENS} tokens at a prompt's beginning, 512 beyond")
    skip_below: int = option("--skip-prefill-below", 0, at_least(0), "TOKENS",
        "a prompt of fewer tokens goes to a decode instance alone, within --alone-share; with "
        "--decode-policy prefix_aware only tokens new to that instance count; 0: none does")
    # fmt: on


@dataclass(frozen=True, eq=False)
class RoutingRequest:
    """What routing knows of a request.

    Attributes:
        model: the name in the request; None if it names none.
        session: the session in its header; "" if it names none.
        tenant: whose request it is, for the queue; None if the proxy has no tenants.
        base: with a tenant, the base model of the instances that serve it; "" if that is not known.
        asked: with a tenant, the most tokens of the answer; 0 if the request names no bound.
        only: the D that has the response it goes on with; None if any D may serve it.
    """

    model: str | None = None
    prompt: Prompt = field(default_factory=lambda: Prompt({}))
    session: str = ""
    tenant: Tenant | None = None
    asked: int = 0
    only: Instance | None = None
    base: str = ""


class Pick(NamedTuple):
    """The chosen instance; `cached`: tokens of the prompt that it has been given before."""

    instance: Instance
    cached: int = 0


class Policy:
    """Picks one of the candidates: at least one, all P's or all D's."""

    help: ClassVar[str]
    """Says in `--help` which instance it picks."""
    knows_prompts: ClassVar[bool] = False
    """Whether `cached` may return anything."""

    def __init__(self, routing: Routing | None = None) -> None:
        """Makes the policy of a proxy with these options."""

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        raise NotImplementedError

    def cached(self, candidates: Sequence[Instance], request: RoutingRequest) -> dict[Instance, int]:
        """Tokens of the prompt that each candidate has been given before; left out where there are none."""
        return {}

    def with_holder(
        self, some: Sequence[Instance], candidates: Sequence[Instance], request: RoutingRequest
    ) -> Sequence[Instance]:
        """`some` of the candidates, and the candidate that has been given the most of the prompt."""
        return some

    def remember(self, instances: Iterable[Instance], request: RoutingRequest) -> None:
        """Notes that these instances are given the prompt, where the policy did not choose them."""


_LONG_SESSION = 256
"""Characters; a header may have 4 MiB."""


class ConsistentHash(Policy):
    """The same one for all requests of a session, by rendezvous hashing: each session orders all instances in
    its own way and goes to the first that is there. If one comes or goes, only its own sessions move. Without
    a session this is `least_loaded`."""

    help = "the same one for all requests with the same value of --session-header"

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        session = request.session
        if not session:
            return Pick(least_busy(candidates))
        if len(session) > _LONG_SESSION:  # else it would be read once for each instance
            session = hashlib.blake2b(session.encode(errors="replace")).hexdigest()
        return Pick(max(candidates, key=lambda instance: (_affinity(session, instance), instance.name)))


def _affinity(session: str, instance: Instance) -> float:
    """A number drawn for each session and instance; an instance of twice the size is first twice as often."""
    drawn = hashlib.blake2b(f"{instance.name}\0{session}".encode(errors="replace"), digest_size=8).digest()
    between_0_and_1 = (int.from_bytes(drawn) + 0.5) / 2**64
    return -instance.ping.tp_size / math.log(between_0_and_1)


MAX_HOLDERS = 32
"""The most instances that are remembered for one piece."""
_EACH, _EVERY = 32, 8
"""The first 32 pieces of a prompt are remembered, and then every eighth: else a long prompt would cost four
times as much memory and time, only to know what is cached in steps of 64 and not of 512 tokens."""

_WEIGHT_OF_NEW = 2
"""Weight of the tokens that an instance has to compute for this prompt, beside those that it computes before
them: they hold up this request, and the next. With 1, a conversation's turn that comes while the turn before
is computed would as easily go elsewhere, where all of it is computed again."""


class PrefixAware(Policy):
    """The one with the least to do: what it has already, and twice what it has not been given before of this
    prompt. So requests with the same beginning go to one instance, until that has much more to do than
    another, which has to compute all of it. For a new beginning this is `least_loaded`."""

    help = (
        "the one that has lately been given a prompt with the same beginning, and so may have that in its "
        "cache, unless another one has much less to do; for long system prompts and for conversations"
    )
    knows_prompts = True

    def __init__(self, routing: Routing | None = None) -> None:
        self._index = PrefixIndex((routing or Routing()).prefix_memory)
        self._candidates: Sequence[Instance] = ()
        self._by_cache: dict[Hashable, Instance] = {}
        """The candidates by cache; kept, as `with_holder` mostly gets the same ones again."""

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        tokens, cached = request.prompt.tokens, self.cached(candidates, request)

        def cost(instance: Instance) -> tuple[float, int, int]:
            work, load, turn = instance.order
            new = tokens - cached.get(instance, 0)
            return work + _WEIGHT_OF_NEW * new / instance.ping.tp_size, load, turn

        if len({each.ping.tp_size for each in candidates}) == 1:
            candidates = [least_busy(candidates), *cached]  # the least cost is one of theirs
        chosen = min(candidates, key=cost)
        self.remember([chosen], request)
        return Pick(chosen, cached.get(chosen, 0))

    def remember(self, instances: Iterable[Instance], request: RoutingRequest) -> None:
        self._index.add(_remembered(request.prompt.chain), *(each.cache for each in instances))

    def with_holder(
        self, some: Sequence[Instance], candidates: Sequence[Instance], request: RoutingRequest
    ) -> Sequence[Instance]:
        if candidates is not self._candidates:
            self._candidates, self._by_cache = candidates, {each.cache: each for each in candidates}
        holders = map(self._by_cache.get, self._index.most(_remembered(request.prompt.chain)))
        holder = next(filter(None, holders), None)
        return some if holder is None or holder in some else [*some, holder]

    def cached(self, candidates: Sequence[Instance], request: RoutingRequest) -> dict[Instance, int]:
        held = self._index.held(_remembered(request.prompt.chain))
        if not held:
            return {}
        found = {each: held[each.cache] for each in candidates if each.cache in held}
        return {each: min(request.prompt.tokens, _pieces(n) * PIECE_TOKENS) for each, n in found.items()}


def _remembered(chain: Chain) -> Chain:
    return *chain[:_EACH], *chain[_EACH + _EVERY - 1 :: _EVERY]


def _pieces(remembered: int) -> int:
    return remembered if remembered <= _EACH else _EACH + _EVERY * (remembered - _EACH)


class PrefixIndex:
    """Who has lately been given which beginnings of prompts; `capacity`: the most pairs of link and holder.

    What was given longest ago is forgotten first, and a prompt's end before its beginning: so whatever is
    remembered of a prompt starts at its start. The same calls give the same answers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._links: OrderedDict[bytes, dict[Hashable, None]] = OrderedDict()
        self._size = 0

    def most(self, chain: Chain) -> Collection[Hashable]:
        """Who has been given the longest known beginning of a prompt."""
        known = deque(takewhile(bool, map(self._links.get, chain)), maxlen=1)
        return next(iter(known), None) or ()

    def held(self, chain: Chain) -> dict[Hashable, int]:
        """How many pieces of a prompt, from its beginning, each holder has been given, if any."""
        known = list(takewhile(bool, map(self._links.get, chain)))
        # A holder of a piece holds those before it, too. So two pieces with equally many holders have the
        # same ones, and the later piece counts (at MAX_HOLDERS nearly so).
        last = {len(holders or ()): depth for depth, holders in enumerate(known, 1)}
        found: dict[Hashable, int] = {}
        for depth in last.values():
            found |= dict.fromkeys(known[depth - 1] or (), depth)
        return found

    def add(self, chain: Sequence[bytes], *given: Hashable) -> None:
        """The holders `given` get a prompt that begins with this chain."""
        links, to_end = self._links, self._links.move_to_end
        for link in reversed(chain):
            holders = links.setdefault(link, {})
            to_end(link)
            for holder in given:
                if holder in holders:
                    del holders[holder]
                elif len(holders) < MAX_HOLDERS:
                    self._size += 1
                else:
                    del holders[next(iter(holders))]
                holders[holder] = None
        while self._size > self._capacity:
            self._size -= len(self._links.popitem(last=False)[1])
