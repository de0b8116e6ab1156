"""Which P and which D serve a request: each chosen by a policy of its own.

A P and a D make a pair only if they serve the same model and fit: see `Instance.matches`.

A request that P should help with goes to the first of these that there is:

1. a P in good health, and a D;
2. a D alone, which computes the prompt itself, while it has a place left of the share for that;
3. a P in doubt, whose pings or whose last answers failed: better than none.

Among D's, too, those in doubt come last. With `skip_below`, a request with a short prompt goes to 2 before 1.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal, NamedTuple, get_args

from .prefixes import PIECE_TOKENS, PrefixIndex, Prompt
from .registry import ROLE_NAMES, Instance, Kind, Registry, Role, differences, fewest

PolicyName = Literal["least_loaded", "round_robin", "power_of_two", "prefix_aware", "consistent_hash"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

REQUEST_TOKENS = 256
"""A request weighs as much on D as so many tokens of its prompt: a step of D's takes longer with each
sequence, and with the KV that each of them reads."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How instances are chosen.

    Attributes:
        prefill, decode: the policies for P and for D.
        session_header: for consistent_hash: requests with the same value go to the same instance.
        prefix_memory: for prefix_aware: pieces of prompts that are remembered for P's, and as many for D's.
        skip_below: a prompt of fewer tokens goes to D alone, within the share for that; 0: none does. With
            `prefix_aware` for D, tokens that D has been given before do not count.
    """

    prefill: PolicyName = "least_loaded"
    decode: PolicyName = "least_loaded"
    session_header: str = "X-Session-Id"
    prefix_memory: int = 1 << 16
    skip_below: int = 0


@dataclass(frozen=True, eq=False)
class Asked:
    """What routing knows of a request.

    Attributes:
        model: that it names; None if it names none.
        prompt: its length and its beginning.
        session: to which it belongs; "" if it does not say.
    """

    model: str | None = None
    prompt: Prompt = field(default_factory=lambda: Prompt({}))
    session: str = ""

    @property
    def tokens(self) -> int:
        return self.prompt.tokens


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
    SPARED = auto()  # if the prompt is short: D alone, within its share; else as WANTED


@dataclass(frozen=True)
class Choice:
    """Who serves one request; `prefill` is None where D does it alone.

    Attributes:
        missed: P would have helped, and none could.
        spared: P could have helped, and the prompt, or what D has to compute of it, is too short for that.
        prefill_tokens: of the prompt, that P has to compute, as far as the proxy can tell.
    """

    prefill: Instance | None
    decode: Instance
    missed: bool = False
    spared: bool = False
    prefill_tokens: int = 0

    @property
    def in_share(self) -> bool:
        """Whether it takes a place of D's share for prompts that it computes in a P's place."""
        return self.missed or self.spared

    @property
    def instances(self) -> list[Instance]:
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


# The policies.


class Pick(NamedTuple):
    """One of the candidates; `cached`: tokens of the prompt that it has been given before."""

    instance: Instance
    cached: int = 0


Policy = Callable[[Sequence[Instance], Asked], Pick]
"""Picks one of at least one candidate, all P's or all D's."""


def work(instance: Instance) -> float:
    """What it has to do, in tokens for each of its tensor-parallel ranks: a P has prompts to compute, a D has
    requests with their prompts."""
    ping = instance.ping
    requests = instance.load * REQUEST_TOKENS if ping.type == "D" else 0
    return (requests + instance.tokens) / ping.tp_size


def least_loaded(candidates: Sequence[Instance], asked: Asked) -> Pick:
    """The one with the least to do; among equals, whose turn was longest ago."""
    return Pick(min(candidates, key=_least))


def _least(instance: Instance) -> tuple[float, int, int]:
    return work(instance), instance.load, instance.turn


def round_robin(candidates: Sequence[Instance], asked: Asked) -> Pick:
    """Whose turn was longest ago, however much it has to do."""
    return Pick(min(candidates, key=lambda instance: instance.turn))


class PowerOfTwo:
    """Of two that are drawn at random, the one with less to do. Several proxies that do so do not all send
    their next requests to the same instance."""

    def __init__(self, dice: random.Random | None = None) -> None:
        self._dice = dice or random.Random()

    def __call__(self, candidates: Sequence[Instance], asked: Asked) -> Pick:
        return least_loaded(self._dice.sample(candidates, min(2, len(candidates))), asked)


class PrefixAware:
    """The one where this prompt is computed soonest: after what there is to do already, and without the
    beginning that the instance has been given before.

    So requests with one beginning go to one instance, until another one would be done sooner although it has
    to compute all of it. Where nobody knows the beginning this is `least_loaded`.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def __call__(self, candidates: Sequence[Instance], asked: Asked) -> Pick:
        cached = self.cached(candidates, asked)

        def cost(instance: Instance) -> tuple[float, int, int]:
            rest = (asked.tokens - cached[instance]) / instance.ping.tp_size
            return work(instance) + rest, instance.load, instance.turn

        chosen = min(candidates, key=cost)
        self._index.add(asked.prompt.chain, _holder(chosen))
        return Pick(chosen, cached[chosen])

    def cached(self, candidates: Sequence[Instance], asked: Asked) -> dict[Instance, int]:
        """Tokens of the prompt that each has been given before."""
        held = self._index.held(asked.prompt.chain)
        return {each: min(asked.tokens, held.get(_holder(each), 0) * PIECE_TOKENS) for each in candidates}


def _holder(instance: Instance) -> Hashable:
    """A restarted instance has an empty cache, so it is another holder."""
    return instance.name, instance.ping.incarnation


def consistent_hash(candidates: Sequence[Instance], asked: Asked) -> Pick:
    """The same one for all requests of a session, by rendezvous hashing: each session has an order of its own
    of all instances, and goes to the first that there is. When one comes or goes, only its own sessions move.
    Without a session this is `least_loaded`."""
    if not asked.session:
        return least_loaded(candidates, asked)
    return Pick(max(candidates, key=lambda instance: (_affinity(asked.session, instance), instance.name)))


def _affinity(session: str, instance: Instance) -> float:
    """Drawn for each session and instance; an instance of twice the size is first twice as often."""
    drawn = hashlib.blake2b(f"{instance.name}\0{session}".encode(errors="replace"), digest_size=8).digest()
    between_0_and_1 = (int.from_bytes(drawn) + 0.5) / 2**64
    return -instance.ping.tp_size / math.log(between_0_and_1)


def make_policy(name: PolicyName, prefix_memory: int) -> Policy:
    """The policy of this name."""
    if name == "power_of_two":
        return PowerOfTwo()
    if name == "prefix_aware":
        return PrefixAware(PrefixIndex(prefix_memory))
    plain = {"least_loaded": least_loaded, "round_robin": round_robin, "consistent_hash": consistent_hash}
    return plain[name]


# The rule.


class Router:
    """Chooses among the registry's routable instances.

    P and D have a policy each. P is chosen first, among those that match some D with room; then D, among
    those that match this P.

    Args:
        routing: which policies.
        room: requests that one D takes at a time.
        alone: of those, how many whose prompts it computes in a P's place; 0: none.
    """

    def __init__(
        self,
        registry: Registry,
        routing: Routing | None = None,
        room: int | None = None,
        alone: int = 0,
    ) -> None:
        self._registry = registry
        self._room = room
        self._alone = alone
        self.routing = routing or Routing()
        self._pick_prefill = make_policy(self.routing.prefill, self.routing.prefix_memory)
        self._pick_decode = make_policy(self.routing.decode, self.routing.prefix_memory)
        self._turns = itertools.count(1)

    def first_help(self, asked: Asked, *, paired: bool) -> Help:
        """What P shall do for a new request; `paired`: it can do something."""
        if not paired:
            return Help.NONE
        most = self.routing.skip_below
        maybe = most > 0 and (asked.tokens < most or isinstance(self._pick_decode, PrefixAware))
        return Help.SPARED if maybe else Help.WANTED

    def choose(
        self,
        asked: Asked,
        now: float,
        *,
        help: Help = Help.WANTED,
        avoid: frozenset[Instance] = frozenset(),
    ) -> Choice:
        """A D for a request, and a P as `help` says; none of those to `avoid`.

        Raises NoInstance, UnknownModel or Full.
        """
        prefillers, decoders = self.able(asked.model, now, help=help, avoid=avoid)
        if help is Help.SPARED and not prefillers:
            if near := self._with_little_left(decoders, asked):
                return Choice(None, self._pick(self._pick_decode, near, asked).instance, spared=True)
            prefillers, decoders = self.able(asked.model, now, help=Help.WANTED, avoid=avoid)
        if not prefillers:
            decode = self._pick(self._pick_decode, decoders, asked).instance
            return Choice(None, decode, missed=help is not Help.NONE)
        prefill, cached = self._pick(self._pick_prefill, _matching(prefillers, decoders), asked)
        decode = self._pick(self._pick_decode, _matching(decoders, [prefill]), asked).instance
        return Choice(prefill, decode, prefill_tokens=asked.tokens - cached)

    def _with_little_left(self, decoders: Sequence[Instance], asked: Asked) -> Sequence[Instance]:
        """Those that would compute so few tokens of this prompt that P is not needed."""
        policy = self._pick_decode
        cached = policy.cached(decoders, asked) if isinstance(policy, PrefixAware) else {}
        return [each for each in decoders if asked.tokens - cached.get(each, 0) < self.routing.skip_below]

    def _pick(self, policy: Policy, candidates: Sequence[Instance], asked: Asked) -> Pick:
        pick = policy(candidates, asked)
        pick.instance.turn = next(self._turns)
        return pick

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
        if help is Help.SPARED and self._alone:
            with suppress(Full):
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
            raise NoInstance(_why_none_match(prefillers, decoders))
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
        absent = [self._nobody(role) for role in roles if not self._registry.routable(role, now)]
        return absent + self._who_fits_nobody()

    def helped(self, now: float) -> bool:
        """Whether there is a pair for any request at all."""
        return bool(_matching(self._registry.routable("P", now), self._registry.routable("D", now)))

    def _who_fits_nobody(self) -> list[str]:
        counted = Counter((each.role, words) for each, words in self._registry.misfits().items())
        return [
            f"{count} {ROLE_NAMES[role]} instance{'s fit' if count > 1 else ' fits'} no "
            f"{ROLE_NAMES['D' if role == 'P' else 'P']} instance: they differ in {' and '.join(words)}."
            for (role, words), count in sorted(counted.items())
        ]

    def _routable_decoders(self, now: float) -> list[Instance]:
        decoders = self._registry.routable("D", now)
        if not decoders:
            raise NoInstance(self._nobody("D"))
        return decoders

    def _nobody(self, role: Role) -> str:
        known = self._registry.known(role)
        out = {
            "drained": sum(instance.drained for instance in known),
            "paused by vLLM's /pause": sum(instance.paused and not instance.drained for instance in known),
        }
        unused = " and ".join(f"{count} {what}" for what, count in out.items() if count)
        why = f"of {len(known)} registered, none has answered /health with 200 lately"
        if not known:
            why = "none has registered"
        elif unused:
            why = f"of {len(known)} registered, {unused}, and no other has answered /health lately"
        return f"No {ROLE_NAMES[role]} instance is ready: {why}."


def _why_none_match(prefillers: Sequence[Instance], decoders: Sequence[Instance]) -> str:
    """Of at least one P and one D."""
    ps, ds = ({each.kind: each for each in some}.values() for some in (prefillers, decoders))
    found = [differences(p, d) for p in ps for d in ds if p.shares_model(d)]
    if not found:
        return "No prefill instance and decode instance that are ready serve the same model."
    return (
        "No prefill instance that is ready fits a decode instance for this model: they differ in "
        f"{' and '.join(fewest(found))}."
    )


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


def _listed(instances: Sequence[Instance]) -> str:
    return ", ".join(sorted(set().union(*(instance.names for instance in instances))))
