"""Which instances exist, whether each of them answers, and how busy it is. No IO, no clock.

All `now` are seconds of one monotonic clock.

An instance whose pings stop while their connection stands is silent, not gone: its process may be compiling,
or wait for a core. The router prefers others, and the registry removes it after a lease. It is gone when it
says goodbye, when its connection is closed and no other comes, or when its port refuses.

An address belongs to one instance for as long as its pings keep coming and their connection stands. Another
instance that pings with this address is a mistake or an attack, and is refused. A process that ends, by
kill -9 too, loses its connection; so its successor is taken at once.

How busy an instance is (`in_flight`, `seats`, `alone`, `coming`, `tokens`) only its own methods write.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from msgspec.structs import replace

from p2pkv.control.discovery import PING_INTERVAL, Ping, goodbye
from p2pkv.log import RateLimit
from p2pkv.pairing import Address

logger = logging.getLogger(__name__)

# Three lost pings and a little: an instance whose ping is merely late stays.
LIFE = 3 * PING_INTERVAL + 1.0
# How long a silent instance whose connection stands is kept: as long as p2pkv's own lease, by default.
LEASE = 30.0
MAX_INSTANCES = 4096
# Of a p2pkv whose pings do not say: those of this protocol did not.
_UNSAID_PROTOCOL = 1
_DOUBT = 0.65
"""Share of `life` without a ping after which an instance's /health is asked, and another instance may take
its address."""
_COMPLAIN_SECONDS = 60.0

_BREAKER_WINDOW_SECONDS = 30.0
_BREAKER_OUTCOMES = 100
_BREAKER_FAILURES = 5
_BREAKER_SHARE = 0.5
_BREAKER_FIRST_PAUSE = 1.0
_BREAKER_LONGEST_PAUSE = 30.0
# A breaker that has been closed for so long, without a failure, has no past.
_BREAKER_FORGET_SECONDS = 120.0

Role = Literal["P", "D"]
InstanceKey = tuple[Role, Address, int]
ROLE_NAMES: dict[Role, str] = {"P": "prefill", "D": "decode"}
Kind = tuple[frozenset[str], str, int]
Loss = Literal["gone", "silent", "hung", "stopped", "late"]
"""Why a call to an instance is given up; blame.CallEnd says what each means."""
VOUCHING_VERSION = 4
"""From this version of the pings on, an instance sends none while its engine does not get on."""
Words = tuple[str, ...]


class PingSource(Protocol):
    """The connection on which a ping came. Equal sources are one connection."""

    @property
    def member(self) -> bool:
        """Whether it has shown the members' key."""

    def stands(self) -> bool:
        """Whether it has not been closed."""

    def tell(self, frame: bytes) -> bool:
        """Answer a ping; whether that could be sent."""


@dataclass(eq=False)
class ListedSource:
    """In place of such a connection, of an instance that the command line lists. What an instance says by its
    own pings counts more.

    Attributes:
        answers: its port does.
        pinged: it has pinged by itself since.
    """

    answers: bool = True
    pinged: bool = False
    member: bool = False

    def stands(self) -> bool:
        return self.answers

    def tell(self, frame: bytes) -> bool:
        return False


class Breaker:
    """Whether an instance that fails again and again is given requests.

    It opens when many of the latest requests failed. After a pause it lets one request through, the trial: if
    that succeeds the breaker closes, if it fails the next pause is about twice as long; what becomes of other
    requests decides nothing. A trial that ends without an outcome, because its client left, or that has none
    for long, makes room for another.

    Args:
        uniform: draws the jitter of its pauses.

    Attributes:
        opened: how often in a row it has opened; 0 when it has no past.
    """

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._uniform = uniform
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_BREAKER_OUTCOMES)
        self._resume: float | None = None
        self._trial: object | None = None
        self._left: object | None = None
        """A trial that has ended without an outcome: one that comes later counts, until there is another."""
        self._patience = 0.0
        self._last_failure = float("-inf")
        self.opened = 0

    @property
    def closed(self) -> bool:
        return self._resume is None

    def admits(self, now: float) -> bool:
        """Whether a request may be sent now."""
        if self._resume is None:
            return True
        return now >= self._resume and (self._trial is None or now >= self._patience)

    def sent(self, owner: object, now: float) -> None:
        """`owner` has been chosen for this instance; if the pause is over, it is the trial."""
        if self._resume is not None and self.admits(now):
            self._trial, self._left = owner, None
            self._patience = now + _BREAKER_LONGEST_PAUSE

    def given_up(self, owner: object) -> None:
        """`owner` has ended, perhaps without an outcome: then another one may be the trial."""
        if self._trial is owner:
            self._trial, self._left = None, owner

    def _is_trial(self, owner: object | None) -> bool:
        return owner is not None and (owner is self._trial or owner is self._left)

    def succeeded(self, now: float, owner: object | None = None) -> bool:
        """`owner` got an answer. True if that closes the breaker."""
        if self._resume is None:
            self._outcomes.append((now, True))
            return False
        if not self._is_trial(owner):
            return False  # asked before the pause, or in it for want of another
        self._resume = self._trial = self._left = None
        self._outcomes.clear()
        return True

    def failed(self, now: float, owner: object | None = None) -> bool:
        """`owner` got no answer, or an error of the server's. True if that opens the breaker."""
        if self.forgettable(now):
            self.opened = 0
        self._last_failure = now
        if self._resume is None:
            self._outcomes.append((now, False))
            bad = self._too_many(now)
        else:
            bad = self._is_trial(owner)
        if bad:
            self._open(now)
        return bad

    def clear(self) -> None:
        """Forget all outcomes: they say nothing about what comes."""
        self._outcomes.clear()
        self._resume = self._trial = None
        self._last_failure = float("-inf")
        self.opened = 0

    def forgettable(self, now: float) -> bool:
        """Whether it has no past that matters."""
        return now - self._last_failure > _BREAKER_FORGET_SECONDS

    def _too_many(self, now: float) -> bool:
        recent = [success for when, success in self._outcomes if now - when <= _BREAKER_WINDOW_SECONDS]
        failures = recent.count(False)
        return failures >= _BREAKER_FAILURES and failures >= _BREAKER_SHARE * len(recent)

    def _open(self, now: float) -> None:
        self.opened += 1
        longest = min(_BREAKER_LONGEST_PAUSE, _BREAKER_FIRST_PAUSE * 2.0 ** min(self.opened - 1, 16))
        self._resume = now + self._uniform(longest / 2, longest)
        self._trial = self._left = None


@dataclass(eq=False)
class Instance:
    """One living instance. A restart makes a new one.

    Attributes:
        ping: its latest ping; all its pings are equal, but for `paused`.
        last_seen: when that came.
        life: seconds without a ping after which it counts as silent.
        source: where from; None if that is not known, and then its address is anybody's.
        healthy: its /health has answered 200, and nobody has found its port closed since.
        names: model names under which it answers; empty while unknown, and then it may serve any.
        kind: equal for instances that `matches` does not tell apart.
        in_flight: requests that this proxy has open there.
        seats: requests that have a place at this D and have not ended.
        alone: of these, the ones whose prompt it computes in a P's place: no P could, or it is short.
        coming: requests that this P has been chosen for, and that are not in flight yet.
        tokens: of prompts, estimated: those that this P has to compute, coming and in flight; or those of
            the requests that have a place at this D.
        turn: the number of the latest choice that fell on it.
        breaker: whether it is given requests, after what became of the last ones.
        drained: it gets no new requests, by an operator's word to the proxy.
        paused: it gets none, because vLLM's /pause has been called there.
        left: when it said goodbye; None if it has not.
    """

    ping: Ping
    last_seen: float
    source: PingSource | None = None
    life: float = LIFE
    healthy: bool = False
    names: frozenset[str] = frozenset()
    in_flight: int = 0
    seats: int = 0
    alone: int = 0
    coming: int = 0
    tokens: int = 0
    turn: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    drained: bool = False
    paused: bool = False
    left: float | None = None
    kind: Kind = field(init=False)
    _ends: set[Callable[[Loss], None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.learn(frozenset())

    def learn(self, served: frozenset[str]) -> None:
        """Takes in the names that it lists now, beside the one in its ping."""
        self.names = served | {self.ping.model} if self.ping.model else served
        self.kind = self.names, self.ping.fit, -1 if self.fits_unknown else self.ping.protocol

    @property
    def vouches(self) -> bool:
        """Whether its pings say that its engine gets on, and not only that a process lives."""
        return self.ping.version >= VOUCHING_VERSION

    @property
    def fits_unknown(self) -> bool:
        """Whether nobody has said what it fits: it is listed, and its ranks have not answered."""
        return isinstance(self.source, ListedSource) and not self.ping.fit

    @property
    def role(self) -> Role:
        return self.ping.type

    @cached_property
    def key(self) -> InstanceKey:
        return self.ping.type, Address.parse(self.ping.http_address), self.ping.dp_rank

    @cached_property
    def url(self) -> str:
        return f"http://{Address.parse(self.ping.http_address)}"

    @cached_property
    def zmq_address(self) -> Address:
        return Address.parse(self.ping.zmq_address)

    @property
    def name(self) -> str:
        """Its address, and which of the replicas there it is: the same after a restart."""
        return f"{self.ping.http_address}/{self.ping.dp_rank}"

    @property
    def load(self) -> int:
        """Requests that are here or on their way."""
        return max(self.in_flight + self.coming, self.seats)

    def silent(self, now: float) -> bool:
        """Whether its pings have stopped."""
        return now - self.last_seen > self.life

    def serves(self, model: str | None) -> bool:
        """Whether it may serve `model`, None being whatever it has."""
        return model is None or not self.names or model in self.names

    def matches(self, other: Instance) -> bool:
        """Whether one request's `model` can mean the same to both, and KV may move between them."""
        return self.shares_model(other) and self.fits(other)

    def shares_model(self, other: Instance) -> bool:
        """Whether one request's `model` can mean the same to both."""
        return not self.names or not other.names or not self.names.isdisjoint(other.names)

    def fits(self, other: Instance) -> bool:
        """Whether a P and a D would accept each other, as far as their pings tell."""
        mine, theirs = self.ping, other.ping
        if self.fits_unknown or other.fits_unknown:
            return True
        if mine.fit and theirs.fit:
            return mine.fit == theirs.fit
        return (mine.protocol or _UNSAID_PROTOCOL) == (theirs.protocol or _UNSAID_PROTOCOL)

    def take_seat(self, *, alone: bool, tokens: int = 0) -> None:
        """This D gets one request more; `alone`: it computes the prompt in a P's place."""
        self.seats += 1
        self.alone += alone
        self.tokens += tokens

    def leave_seat(self, *, alone: bool, tokens: int = 0) -> None:
        """That request has ended, or goes elsewhere."""
        self.seats -= 1
        self.alone -= alone
        self.tokens -= tokens

    def expect(self, tokens: int = 0) -> None:
        """This P has been chosen for one request more."""
        self.coming += 1
        self.tokens += tokens

    def expect_no_more(self, tokens: int = 0) -> None:
        """That request is in flight now, has ended, or goes elsewhere."""
        self.coming -= 1
        self.tokens -= tokens

    @contextmanager
    def busy(self, end: Callable[[Loss], None], tokens: int = 0) -> Iterator[None]:
        """Counts one request as in flight here, with the `tokens` that it computes, if it is a P's; `end`
        is called if the instance is lost."""
        self.in_flight += 1
        self.tokens += tokens
        self._ends.add(end)
        try:
            yield
        finally:
            self.in_flight -= 1
            self.tokens -= tokens
            self._ends.discard(end)

    def lost(self, loss: Loss) -> None:
        """It gets no more requests, and those in flight are told."""
        self.healthy = False
        for end in list(self._ends):
            end(loss)

    def __str__(self) -> str:
        return f"{ROLE_NAMES[self.role]} instance {self.ping.http_address}"


class Registry:
    """The living instances, one for each (role, HTTP address, data-parallel rank).

    Args:
        life: seconds without a ping after which an instance is silent, or gone if its connection is.
        lease: seconds without a ping after which it is gone all the same.

    Attributes:
        claims_refused: pings under the address of another live instance.
    """

    def __init__(self, life: float = LIFE, capacity: int = MAX_INSTANCES, lease: float = LEASE) -> None:
        self._life = life
        self._lease = max(life, lease)
        self._silent: set[Instance] = set()
        self._leavers: list[Instance] = []
        """Those that have said goodbye since the last `expire`."""
        self._misfits: set[Instance] = set()
        """Those of whom the log has said so."""
        self._capacity = capacity
        self.claims_refused = 0
        # Once a minute: whoever it is, it tries again every few seconds.
        self._complaints = RateLimit(seconds=_COMPLAIN_SECONDS)
        self._instances: dict[InstanceKey, Instance] = {}
        self._breakers: dict[InstanceKey, Breaker] = {}
        """A crash is no way to get a clean record: they outlive their instances for a while."""
        self._drained: dict[InstanceKey, str] = {}
        """Who is drained, and in which incarnation: a restart ends it, a lost connection does not."""

    def observe(self, ping: Ping, now: float, source: PingSource | None = None) -> Instance | None:
        """Takes one ping in. Returns the instance if it is new, or new again after a restart."""
        newcomer = Instance(_unpaused(ping), now, source, self._life, paused=ping.paused)
        known = self._instances.get(newcomer.key)
        if ping.leaving:
            self._leave(known, newcomer, now)
            return None
        if known is not None and known.ping == newcomer.ping:
            self._renew(known, newcomer)
            return None
        holder = self._holder(newcomer, known, now)
        if holder is not None:
            self._refuse(newcomer, holder, now)
            return None
        if known is None and len(self._instances) >= self._capacity:
            if self._complaints.admits("full", now):
                logger.warning("%s ignored: %d instances are known already", newcomer, self._capacity)
            return None
        if known is not None and isinstance(known.source, ListedSource) and source != known.source:
            known.source.pinged = True
        newcomer.breaker = self._breakers.setdefault(newcomer.key, newcomer.breaker)
        newcomer.drained = self._stays_drained(newcomer, known)
        self._instances[newcomer.key] = newcomer
        logger.info("%s %s", newcomer, "registered" if known is None else "has restarted")
        return newcomer

    def _stays_drained(self, newcomer: Instance, known: Instance | None) -> bool:
        """Whether this is who has been drained, of whom more may be known now. Whether the incarnation of a
        listed one has been learnt changes without a restart."""
        drained, now = self._drained.get(newcomer.key), newcomer.ping.incarnation
        listed = any(each is not None and isinstance(each.source, ListedSource) for each in (known, newcomer))
        if drained is None or (drained != now and not (listed and "" in (drained, now))):
            return False
        self._drained[newcomer.key] = now or drained
        return True

    def _renew(self, known: Instance, again: Instance) -> None:
        known.last_seen = max(known.last_seen, again.last_seen)
        if known.paused != again.paused:
            known.paused = again.paused
            if not again.paused:
                known.breaker.clear()  # what failed was aborted by the pause
            logger.warning(
                "%s %s", known, "is paused: it gets no new requests" if again.paused else "has been resumed"
            )
        if isinstance(known.source, ListedSource) and known.source != again.source:
            known.source.pinged, known.source = True, again.source
            known.learn(known.names)
        elif known.source is None or (again.source != known.source and not known.source.stands()):
            known.source = again.source

    def _holder(self, newcomer: Instance, known: Instance | None, now: float) -> Instance | None:
        """Who has one of the newcomer's addresses and lives; the registered `known` or another."""
        others = [
            each
            for each in self.known(newcomer.role)
            if each.ping.zmq_address == newcomer.ping.zmq_address and each.url != newcomer.url
        ]
        candidates = others if known is None else [known, *others]
        return next((each for each in candidates if self._holds(each, newcomer, now)), None)

    def _holds(self, holder: Instance, newcomer: Instance, now: float) -> bool:
        """Whether the holder still is who it was, as far as its own connection tells. What anybody may have
        said does not keep a member out."""
        if holder.source is None or holder.source == newcomer.source:
            return False
        if isinstance(holder.source, ListedSource):
            return False
        if newcomer.source is not None and newcomer.source.member and not holder.source.member:
            return False
        return now - holder.last_seen <= self._life * _DOUBT and holder.source.stands()

    def _refuse(self, newcomer: Instance, holder: Instance, now: float) -> None:
        self.claims_refused += 1
        if self._complaints.admits("claim", now):
            logger.warning(
                "%s refused (%d such pings so far): this address or its ZMQ address %s belongs to %s, "
                "which is alive; each instance needs addresses of its own",
                newcomer,
                self.claims_refused,
                newcomer.zmq_address,
                holder,
            )

    def _leave(self, known: Instance | None, leaver: Instance, now: float) -> None:
        """A goodbye counts for the incarnation that says it, not for its successor, and not if it comes
        from somebody else while the instance lives."""
        if known is None or goodbye(known.ping) != leaver.ping:
            return
        if self._holds(known, leaver, now):
            self._refuse(leaver, known, now)
        else:
            del self._instances[known.key]
            self._breakers.pop(known.key, None)
            self._drained.pop(known.key, None)
            known.left = now
            self._leavers.append(known)
            logger.info("%s said goodbye", known)

    def drain(self, instance: Instance, drained: bool) -> None:
        """An operator's word: no new requests for this process; or as before."""
        instance.drained = drained
        if drained:
            self._drained[instance.key] = instance.ping.incarnation
        else:
            self._drained.pop(instance.key, None)
        logger.warning("%s %s", instance, "is drained: it gets no new requests" if drained else "is resumed")

    def drains(self) -> list[tuple[Role, str, int, str]]:
        """Which incarnations are drained, as another process can read it."""
        return [(role, str(http), rank, drained) for (role, http, rank), drained in self._drained.items()]

    def adopt_drains(self, drains: Iterable[tuple[Role, str, int, str]]) -> None:
        """Takes over those of another process; an instance may not have pinged here yet."""
        for role, http, rank, incarnation in drains:
            known = self._instances.get(key := (role, Address.parse(http), rank))
            self._drained[key] = incarnation
            if known is not None and known.ping.incarnation == incarnation:
                known.drained = True

    def expire(self, now: float) -> list[Instance]:
        """Removes the instances that are gone. Returns them, and those that have said goodbye since the last
        call."""
        dead = [instance for instance in self._instances.values() if not self._alive(instance, now)]
        for instance in dead:
            del self._instances[instance.key]
            lost = "" if self.overdue(instance, now) else ", and its connection is closed"
            logger.warning("%s removed: no ping for %.0f s%s", instance, now - instance.last_seen, lost)
        self._say_silent(now)
        self._say_misfits()
        for key in [key for key in self._breakers if key not in self._instances]:
            if self._breakers[key].forgettable(now):
                del self._breakers[key]
        leavers, self._leavers = self._leavers, []
        return dead + leavers

    def _say_silent(self, now: float) -> None:
        silent = {each for each in self._instances.values() if each.silent(now)}
        for instance in silent - self._silent:
            logger.warning(
                "%s is silent: no ping for %.0f s, but its connection stands; others are preferred, "
                "and it is removed after %.0f s",
                instance,
                now - instance.last_seen,
                self._lease,
            )
        for instance in self._silent - silent:
            if self._instances.get(instance.key) is instance:
                logger.info("%s pings again", instance)
        self._silent = silent

    def misfits(self) -> dict[Instance, Words]:
        """Those that fit nobody although the other role has instances of their model; and in what each of
        them differs from the nearest of these."""
        kinds: dict[tuple[Role, Kind], list[Instance]] = {}
        for each in self._instances.values():
            kinds.setdefault((each.role, each.kind), []).append(each)
        # Of each kind one is looked at: there may be thousands of instances, and this is done every second.
        ones = [alike[0] for alike in kinds.values()]
        found: dict[Instance, Words] = {}
        for one, alike in zip(ones, kinds.values(), strict=True):
            partners = [other for other in ones if other.role != one.role and one.shares_model(other)]
            if partners and not any(one.fits(other) for other in partners):
                found |= dict.fromkeys(alike, fewest([differences(one, other) for other in partners]))
        return found

    def _say_misfits(self) -> None:
        misfits = self.misfits()
        for instance in misfits.keys() - self._misfits:
            logger.warning(
                "%s fits no %s: the nearest differs in %s%s; this one says: %s",
                instance,
                "decode instance, so it gets no requests"
                if instance.role == "P"
                else "prefill instance, so it gets only requests whose prompts it computes itself",
                " and ".join(misfits[instance]),
                "; use the same version of p2pkv" if "protocol" in misfits[instance] else "",
                instance.ping.fit or "nothing, as p2pkv did before protocol 2",
            )
        for instance in self._misfits - misfits.keys():
            if self._instances.get(instance.key) is instance:
                logger.info("%s now has an instance that it fits", instance)
        self._misfits = set(misfits)

    def unready(self) -> list[Instance]:
        """Those whose /health has yet to answer."""
        return [instance for instance in self._instances.values() if not instance.healthy]

    def late(self, now: float) -> list[Instance]:
        """Those with requests in flight whose ping is late."""
        late = now - self._life * _DOUBT
        return [each for each in self._instances.values() if each.in_flight and each.last_seen < late]

    def sender(self, ping: Ping, source: PingSource) -> Instance | None:
        """Whose ping this is; None if its sender is not registered, or is registered from another source."""
        known = self.of(ping)
        return known if known is not None and known.source == source else None

    def of(self, ping: Ping) -> Instance | None:
        """The one whose latest ping this is."""
        known = self._instances.get((ping.type, Address.parse(ping.http_address), ping.dp_rank))
        return known if known is not None and known.ping == _unpaused(ping) else None

    def at(self, key: InstanceKey) -> Instance | None:
        """The one with this role, HTTP address and data-parallel rank."""
        return self._instances.get(key)

    def known(self, role: Role) -> list[Instance]:
        return [instance for instance in self._instances.values() if instance.role == role]

    def routable(self, role: Role, now: float) -> list[Instance]:
        """Those that are neither gone nor drained nor paused, and were healthy when they were last asked; of
        these some may be silent."""
        return [
            each
            for each in self.known(role)
            if each.healthy and not (each.drained or each.paused) and self._alive(each, now)
        ]

    def _alive(self, instance: Instance, now: float) -> bool:
        if not instance.silent(now):
            return True
        return not self.overdue(instance, now) and instance.source is not None and instance.source.stands()

    def overdue(self, instance: Instance, now: float) -> bool:
        """Whether it has been silent for a lease, which is the end of all patience."""
        return now - instance.last_seen > self._lease


def _unpaused(ping: Ping) -> Ping:
    """What is equal in all pings of an instance."""
    return replace(ping, paused=False) if ping.paused else ping


def differences(one: Instance, other: Instance) -> Words:
    """In what the pings of two that do not fit differ, in words."""
    mine, theirs = one.ping, other.ping
    if not (mine.fit and theirs.fit):
        return ("protocol",)
    here, there = (dict(word.partition("=")[::2] for word in ping.fit.split(", ")) for ping in (mine, theirs))
    return tuple(name for name in here | there if here.get(name) != there.get(name)) or (
        "the order of words",
    )


def fewest(found: list[Words]) -> Words:
    """Of at least one list of differences, the shortest: what has to be changed."""
    return min(found, key=len)
