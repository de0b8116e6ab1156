"""Which P and which D serve a request: each is chosen by a policy of its own.

A P and a D make a pair only if they serve the same model and fit: see `Instance.matches`.

A request that P can help with goes to the first of these that exists:

1. a healthy P, and a D;
2. a D alone, which computes the prompt itself, while it has a place left in its --alone-share;
3. a P in doubt (it is silent, or its breaker is open), and a D: better than none.

An instance of both roles is among the P's and among the D's. If it is the best of both,
`Router._other_prefill` decides. D's in doubt come last, too. With `skip_below`, a request with a short prompt
tries 2 before 1.
"""

import itertools
import random
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from .membership.instance import ROLE_NAMES, ROLES, Instance, Kind, Role, differences, least_busy
from .membership.partner_lists import LinkedPairs
from .membership.registry import Registry
from .placement import OnError, PlacedRequest, PlacementCosts, Prediction
from .policies import ConsistentHash, Pick, Policy, PrefixAware, Routing, RoutingRequest


class LeastLoaded(Policy):
    help = (
        "the one with the least to do: the fewest prompt tokens to compute (prefill), the fewest requests "
        "and prompt tokens (decode)"
    )

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        return Pick(least_busy(candidates))


class RoundRobin(Policy):
    help = "each in turn"

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        return Pick(min(candidates, key=lambda instance: instance.turn))


class PowerOfTwo(Policy):
    """Keeps several proxies from sending all their next requests to the same instance."""

    help = "two are drawn at random, and of these the one with less to do; for several proxies side by side"

    def __init__(self, routing: Routing | None = None, dice: random.Random | None = None) -> None:
        self._dice = dice or random.Random()

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        return Pick(least_busy(self._dice.sample(candidates, min(2, len(candidates)))))


_NONE_SERVES = "No decode instance that serves the model `{}` is ready."
_BUSIER = 8
"""D's with a link to the P are preferred up to twice the requests of the least busy D, and so many more."""

POLICIES: dict[str, type[Policy]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "prefix_aware": PrefixAware,
    "consistent_hash": ConsistentHash,
}


class Unroutable(Exception):
    """No instances can be chosen for this request now."""


class NoInstance(Unroutable):
    """No instance can serve it; the message says which role is missing, and why."""


class Full(Unroutable):
    """All instances that can serve it have as many requests as they take."""


class DecodeAloneFull(Full):
    """No P can serve this request, and every D computes as many prompts alone as it may."""


class UnknownModel(Unroutable):
    """Several models are served here, but none with this name."""


class PrefillMode(Enum):
    """What P does for a request."""

    NONE = auto()  # nothing: P cannot help
    WANTED = auto()  # P computes the prompt; if no P can, D alone does
    NEEDED = auto()  # P computes the prompt; D never does in its place
    UNAVAILABLE = auto()  # no P can: D alone, within its share
    SKIP_IF_SHORT = auto()  # if the prompt is short: D alone, within its share; else as WANTED


class Choice(NamedTuple):
    """Which instances serve one request; `prefill` is None where D serves it alone.

    Attributes:
        prefill_unavailable: a P was wanted, and none could help.
        prefill_skipped: a P could have helped, but D has too few tokens of the prompt to compute for that.
        prefill_tokens: tokens of the prompt that P has to compute, as far as the proxy knows.
        single_instance: an instance of both roles is the best P and the best D, and serves it alone.
        prediction: why `--placement auto` chose these; None if it did not.
    """

    prefill: Instance | None
    decode: Instance
    prefill_unavailable: bool = False
    prefill_skipped: bool = False
    prefill_tokens: int = 0
    single_instance: bool = False
    prediction: Prediction | None = None

    @property
    def in_share(self) -> bool:
        """Whether it takes one of D's places for prompts that D computes in a P's place."""
        return self.prefill_unavailable or self.prefill_skipped

    @property
    def instances(self) -> list[Instance]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


@dataclass(eq=False)
class _Fleet:
    """The instances for one model, without those to avoid; valid until something changes about them."""

    _of: "FleetCache"
    _model: str | None
    _avoid: frozenset[Instance]

    def __post_init__(self) -> None:
        self._now = self._of.now
        self._decoders = _serving(self._of.decoders, self._model)

    @cached_property
    def decoders(self) -> Sequence[Instance]:
        """The best D's for a request that no P helps with. Raises NoInstance."""
        return _best(_without(self._decoders, self._avoid), self._now)

    @cached_property
    def _matching_prefillers(self) -> Sequence[Instance]:
        if not self._of.prefillers:
            raise NoInstance(_why_none(self._of.registry, "P"))
        serving = _serving(self._of.prefillers, self._model)
        matching = _matching(serving, self._decoders)
        if not matching:
            raise NoInstance(_why_none_match(serving, self._decoders))
        return _without(matching, self._avoid)

    @cached_property
    def healthy(self) -> bool:
        """Whether a P that could make a pair is healthy. Raises NoInstance or UnknownModel if none could."""
        return bool(_healthy(self._matching_prefillers, self._now))

    @cached_property
    def pair(self) -> tuple[Sequence[Instance], Sequence[Instance]]:
        """The best P's, and the best D's that match one of them. Raises as `healthy`."""
        prefillers = _best(self._matching_prefillers, self._now)
        return prefillers, _best(_without(_matching(self._decoders, prefillers), self._avoid), self._now)

    @cached_property
    def linked_pairs(self) -> LinkedPairs | None:
        """Which pairs of `pair` have links; None if that does not matter."""
        return LinkedPairs.of(*self.pair) if self.all_match else None

    @cached_property
    def all_match(self) -> bool:
        """Whether each P of `pair` matches each D."""
        return len({each.kind for side in self.pair for each in side}) == 1


class FleetCache:
    """What is computed from all instances once, not for each request, until one comes, goes or changes.

    Time alone makes an instance silent that does not ping, at `_until` at the earliest. Those that are silent
    or have an open breaker are few: their state is compared for each request.
    """

    def __init__(self, registry: Registry, now: float) -> None:
        self.registry, self.now, self._version = registry, now, registry.version
        candidates = registry.candidates()
        doubtful = [each for each in candidates if each.silent(now) or not each.breaker.closed]
        self._doubtful = {each: self._state(each, now) for each in doubtful}
        well = [each.last_sign + each.life for each in candidates if each not in self._doubtful]
        self._until = min(well, default=float("inf"))
        self.prefillers = registry.routable("P", now)
        self.decoders = registry.routable("D", now)
        self.bases: dict[str, str] = {}
        """By name of a model or adapter: the base model of a D that serves it."""
        for each in self.decoders:
            self.bases |= dict.fromkeys(each.names, each.ping.model or min(each.names, default=""))
        contexts = [each.context for each in self.decoders]
        self.context = max(contexts) if contexts and all(contexts) else None  # tokens, at most; None: unknown
        sides = self.prefillers, self.decoders
        self._alike = all(len({each.names for each in side}) <= 1 for side in sides)
        self._fleets: dict[str | None, _Fleet] = {}

    def _state(self, instance: Instance, now: float) -> tuple[bool, bool, bool]:
        return self.registry.alive(instance, now), instance.silent(now), instance.breaker.admits(now)

    def is_valid(self, now: float) -> bool:
        return (
            self._version == self.registry.version
            and self.now <= now <= self._until
            and all(self._state(each, now) == state for each, state in self._doubtful.items())
        )

    def knows(self, model: str | None) -> bool:
        """Whether a D lists this model, or no D lists any, or the request names none."""
        return model is None or not self.bases or model in self.bases

    def base_of(self, model: str | None) -> str:
        """The base model of a D that may serve this one; "" if none is known."""
        return self.bases.get(model or "") or next(iter(self.bases.values()), "")

    def fleet(self, model: str | None, avoid: frozenset[Instance]) -> _Fleet:
        """The instances for this model, without those to `avoid`. Raises NoInstance or UnknownModel."""
        if not self.decoders:
            raise NoInstance(_why_none(self.registry, "D"))
        if model not in self.bases:
            served = any(each.serves(model) for each in self.decoders)
            if not served and any(model in each.names for each in _everyone(self.registry, self.bases)):
                raise NoInstance(_NONE_SERVES.format(model))
            if self._alike:
                model = None  # as for a request that names none, see `_serving`
        known = None if avoid else self._fleets.get(model)
        if known is None:
            known = _Fleet(self, model, avoid)
            if not avoid and (model is None or model in self.bases):  # so that clients cannot make entries
                self._fleets[model] = known
        return known


class Router:
    """Chooses among the registry's routable instances, by a policy each: first a P that matches a D with
    room, then a D that matches this P.

    Args:
        room: requests that one D takes at a time; None: any number.
        decode_alone: how many of these may have prompts that D computes in a P's place; 0: none.
    """

    def __init__(
        self,
        registry: Registry,
        routing: Routing | None = None,
        room: int | None = None,
        decode_alone: int = 0,
        on_error: OnError = lambda *_: None,
    ) -> None:
        self._registry = registry
        registry.limit_places(float("inf") if room is None else room)
        self._decode_alone = decode_alone
        self.routing = routing or Routing()
        self._pick_prefill = POLICIES[self.routing.prefill](self.routing)
        self._pick_decode = POLICIES[self.routing.decode](self.routing)
        self._turns = itertools.count(1)
        self._last: FleetCache | None = None
        self.costs = PlacementCosts(self.routing.pause_weight, on_error)
        self._by_cost = self.routing.placement == "auto"

    def track(self, choice: Choice, now: float) -> PlacedRequest | None:
        """What placement by cost learns from a request at these instances; None without that placement."""
        if not self._by_cost:
            return None
        prefill, tokens = choice.prefill or choice.decode, choice.prefill_tokens
        return PlacedRequest(self.costs, prefill, choice.decode, tokens, choice.prediction, now)

    def first_mode(self, request: RoutingRequest, *, paired: bool) -> PrefillMode:
        """What P shall do for a new request; `paired`: P can help with it."""
        if not paired:
            return PrefillMode.NONE
        if self._by_cost:
            return PrefillMode.WANTED  # which covers short prompts, too
        most = self.routing.skip_below
        maybe = most > 0 and (request.prompt.tokens < most or self._pick_decode.knows_prompts)
        return PrefillMode.SKIP_IF_SHORT if maybe else PrefillMode.WANTED

    def choose(
        self,
        request: RoutingRequest,
        now: float,
        *,
        mode: PrefillMode = PrefillMode.WANTED,
        avoid: frozenset[Instance] = frozenset(),
    ) -> Choice:
        """A D for a request, and a P if `mode` asks for one, none of those to `avoid`. Raises Unroutable."""
        fleet = self._fleet(request, now, avoid)
        prefillers, decoders = self._able(fleet, mode)
        if mode is PrefillMode.SKIP_IF_SHORT and not prefillers:
            # D's that would have so few tokens of this prompt to compute that P is not needed.
            known, least = self._pick_decode.cached(decoders, request), self.routing.skip_below
            if near := [each for each in decoders if request.prompt.tokens - known.get(each, 0) < least]:
                decode = self._pick(self._pick_decode, near, request).instance
                return Choice(None, decode, prefill_skipped=True)
            prefillers, decoders = self._able(fleet, PrefillMode.WANTED)
        if not prefillers:
            decode = self._pick(self._pick_decode, decoders, request).instance
            return Choice(None, decode, prefill_unavailable=mode is not PrefillMode.NONE)
        if not fleet.all_match:
            prefillers = _matching(prefillers, decoders)
        if self._by_cost:
            decode_alone = self._decode_alone if mode is PrefillMode.WANTED else 0
            if cheapest := self._cheapest(fleet, prefillers, decoders, request, now, decode_alone):
                return cheapest
        prefill, cached = self._pick(self._pick_prefill, prefillers, request)
        if not fleet.all_match:
            decoders = _matching(decoders, [prefill])
        elif fleet.linked_pairs is not None:
            linked = self._linked(fleet.linked_pairs, prefill)
            # D's with a link, unless they are much busier than others.
            if linked and least_busy(linked).load <= 2 * least_busy(decoders).load + _BUSIER:
                decoders = linked
        decode = self._pick(self._pick_decode, decoders, request).instance
        if decode is prefill:
            prefillers = prefillers if fleet.all_match else _matching(prefillers, [decode])
            return self._other_prefill(decode, prefillers, request)
        return Choice(prefill, decode, prefill_tokens=request.prompt.tokens - cached)

    def _other_prefill(
        self, decode: Instance, prefillers: Sequence[Instance], request: RoutingRequest
    ) -> Choice:
        """Where the best D is also the best P: another P, so that D's other requests need not wait for this
        prompt; D alone if every other P is busier than D by at least this prompt."""
        others = list(prefillers)
        others.remove(decode)
        if others:
            prefill, cached = self._pick(self._pick_prefill, others, request)
            if prefill.order[0] - decode.order[0] < request.prompt.tokens / decode.ping.tp_size:
                return Choice(prefill, decode, prefill_tokens=request.prompt.tokens - cached)
        return Choice(None, decode, single_instance=True)

    def _cheapest(
        self,
        fleet: _Fleet,
        prefillers: Sequence[Instance],
        decoders: Sequence[Instance],
        request: RoutingRequest,
        now: float,
        decode_alone: int,
    ) -> Choice | None:
        policy, tokens = self._pick_prefill, request.prompt.tokens
        some, linked_pairs = self.costs.some, fleet.linked_pairs
        near = (lambda each: some(self._linked(linked_pairs, each) or decoders)) if linked_pairs else None
        few = some(prefillers)
        if few is not prefillers and policy.knows_prompts:  # the holder may not be among those drawn
            few = policy.with_holder(few, prefillers, request)
        # In a pool of both roles the same ones serve for both choices, which halves the work.
        decoding = few if prefillers == decoders else some(decoders)
        every = few if decoding is few else [*few, *decoding]
        cached = policy.cached(every, request) if policy.knows_prompts else {}
        if (found := self.costs.cheapest(few, decoding, decode_alone, tokens, cached, now, near)) is None:
            return None
        prefill, decode, prediction = found
        choice = Choice(
            None if prefill is decode else prefill,
            decode,
            prefill_skipped=prefill is decode and decode.role == "D",
            prefill_tokens=tokens - cached.get(prefill, 0),
            single_instance=prefill is decode and decode.role == "both",
            prediction=prediction,
        )
        for each in choice.instances:
            each.take_turn(next(self._turns))
        policy.remember(choice.instances, request)
        return choice

    def _linked(self, linked_pairs: LinkedPairs, prefill: Instance) -> Sequence[Instance]:
        """The D's with a link to this P that have room."""
        full, near = self._registry.full, linked_pairs.decoders(prefill)
        return [each for each in near if each not in full] if full else near

    def _pick(self, policy: Policy, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        pick = policy(candidates, request)
        pick.instance.take_turn(next(self._turns))
        return pick

    def able(
        self,
        request: RoutingRequest,
        now: float,
        *,
        mode: PrefillMode,
        avoid: frozenset[Instance] = frozenset(),
    ) -> tuple[Sequence[Instance], Sequence[Instance]]:
        """The P's and D's that `choose` would choose from. Raises as it does."""
        return self._able(self._fleet(request, now, avoid), mode)

    def _fleet(self, request: RoutingRequest, now: float, avoid: frozenset[Instance]) -> _Fleet:
        """Raises NoInstance or UnknownModel."""
        cache = self.fleet_cache(now)
        if request.only is not None:
            if request.only not in cache.decoders:
                raise NoInstance("The decode instance that has the previous response is not ready.")
            avoid = avoid.union(each for each in cache.decoders if each is not request.only)
        return cache.fleet(request.model, avoid)

    def _able(self, fleet: _Fleet, mode: PrefillMode) -> tuple[Sequence[Instance], Sequence[Instance]]:
        """The P's and D's to choose from: at least one D, and matching P's or none. Raises Unroutable."""
        if mode is PrefillMode.NONE:
            return [], self._with_room(fleet.decoders)
        if mode is PrefillMode.UNAVAILABLE:
            return [], self._with_room_alone(fleet)
        if mode is PrefillMode.SKIP_IF_SHORT and self._decode_alone:
            with suppress(Full):
                return [], self._with_room_alone(fleet)
        try:
            healthy = fleet.healthy
        except Unroutable:
            if mode is PrefillMode.NEEDED or not self._decode_alone:
                raise
            return [], self._with_room_alone(fleet)
        if not healthy and self._decode_alone:
            if mode is PrefillMode.NEEDED:
                raise NoInstance(_why_none(self._registry, "P"))
            with suppress(DecodeAloneFull):
                return [], self._with_room_alone(fleet)
        prefillers, decoders = fleet.pair
        return prefillers, self._with_room(decoders)

    def _with_room_alone(self, fleet: _Fleet) -> Sequence[Instance]:
        with_room = self._with_room(fleet.decoders)
        if able := [each for each in with_room if each.decode_alone < self._decode_alone]:
            return able
        raise DecodeAloneFull

    def has_room(self, now: float) -> bool:
        """Whether any D takes one request more."""
        full = self._registry.full
        return any(each not in full for each in self.fleet_cache(now).decoders)

    def _with_room(self, decoders: Sequence[Instance]) -> Sequence[Instance]:
        full = self._registry.full
        if full and not (decoders := [each for each in decoders if each not in full]):
            raise Full
        return decoders

    def fleet_cache(self, now: float) -> FleetCache:
        if self._last is None or not self._last.is_valid(now):
            self._last = FleetCache(self._registry, now)
        return self._last

    def missing(self, now: float) -> list[str]:
        """What is missing, in sentences. Without a D nothing is served; without a P D may serve alone."""
        registry, roles = self._registry, ROLES.values()
        absent = [_why_none(registry, role) for role in roles if not registry.routable(role, now)]
        if (served := [each.names for each in registry.routable("D", now)]) and all(served):
            names = frozenset[str]().union(*served)
            everyone = _everyone(registry, names)
            lost = (each for each in everyone if each.names and names.isdisjoint(each.names))
            absent += map(_NONE_SERVES.format, sorted({each.ping.model or min(each.names) for each in lost}))
        misfits = Counter((each.role, names) for each, names in registry.misfits().items())
        return absent + [
            f"{count} {ROLE_NAMES[role]} instance{'s fit' if count > 1 else ' fits'} no "
            f"{ROLE_NAMES['D' if role == 'P' else 'P']} instance: they differ in {' and '.join(names)}."
            for (role, names), count in sorted(misfits.items())
        ]

    def has_pair(self, now: float) -> bool:
        """Whether any routable P and D make a pair."""
        return bool(_matching(self._registry.routable("P", now), self._registry.routable("D", now)))


def _everyone(registry: Registry, served: Container[str]) -> list[Instance]:
    """All P's and D's, and those that left lately; without P's whose base model is `served` by D's, as what
    only these P's have is an adapter."""
    everyone = [*registry.known("P"), *registry.known("D"), *registry.lost]
    return [each for each in everyone if each.role != "P" or each.ping.model not in served]


def _why_none(registry: Registry, role: Role) -> str:
    known = registry.known(role)
    out = {
        "drained": sum(each.drained for each in known),
        "paused by vLLM's /pause or stopping": sum(each.paused and not each.drained for each in known),
    }
    unused = " and ".join(f"{count} {what}" for what, count in out.items() if count)
    why = f"of {len(known)} registered, none has answered /health with 200 lately"
    if not known:
        why = "none has registered"
    elif unused:
        why = f"of {len(known)} registered, {unused}, and no other has answered /health with 200 lately"
    return f"No {ROLE_NAMES[role]} instance is ready: {why}."


def _why_none_match(prefillers: Sequence[Instance], decoders: Sequence[Instance]) -> str:
    """A sentence about at least one P and one D."""
    ps, ds = ({each.kind: each for each in some}.values() for some in (prefillers, decoders))
    found = [differences(p, d) for p in ps for d in ds if p.shares_model(d)]
    if not found:
        return "The prefill and decode instances that are ready serve different models."
    nearest = min(found, key=len)
    what = "No prefill instance that is ready fits a decode instance for this model"
    return f"{what}: the nearest two differ in {' and '.join(nearest)}."


def _serving(instances: Sequence[Instance], model: str | None) -> Sequence[Instance]:
    """Those that serve `model`; if none does and all serve the same models, all: the name may be an adapter
    that was loaded since, and if not, vLLM's own error is the best answer. Else raises UnknownModel."""
    serving = [instance for instance in instances if instance.serves(model)]
    if serving or len({instance.names for instance in instances}) <= 1:
        return serving or instances
    names = ", ".join(sorted(set().union(*(instance.names for instance in instances))))
    raise UnknownModel(f"The model `{model}` does not exist; served here: {names}.")


def _healthy(instances: Sequence[Instance], now: float) -> Sequence[Instance]:
    """The instances that ping or answer, and whose breakers let requests through."""
    return [each for each in instances if each.breaker.admits(now) and not each.silent(now)]


def _best(instances: Sequence[Instance], now: float) -> Sequence[Instance]:
    """The healthy ones; else those that are only silent; else all, as one in doubt is better than none."""
    return _healthy(instances, now) or [each for each in instances if each.breaker.admits(now)] or instances


def _matching(instances: Sequence[Instance], others: Sequence[Instance]) -> Sequence[Instance]:
    """Those that could make a pair with one of the others."""
    kinds = {other.kind: other for other in others}
    fitting: dict[Kind, bool] = dict.fromkeys(kinds, True)
    for each in instances:
        if each.kind not in fitting:
            fitting[each.kind] = any(each.matches(other) for other in kinds.values())
    return [each for each in instances if fitting[each.kind]]


def _without(instances: Sequence[Instance], avoid: frozenset[Instance]) -> Sequence[Instance]:
    left = [each for each in instances if each not in avoid]
    if not left:
        raise NoInstance("There is no other instance that could serve this request.")
    return left
