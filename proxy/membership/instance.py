"""One engine as its pings and answers show it: what it serves, whether it is healthy, how busy it is.

Only its own methods write how busy it is (`in_flight`, `places`, `decode_alone`, `expected`, `tokens`). They
keep `order` up to date, by which policies compare instances, so choosing the least busy one of a thousand
computes nothing. No IO, no clock; all `now` are seconds of one monotonic clock.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Protocol

from p2pkv.control.discovery import PING_INTERVAL, Ping, Workload, fit_differences
from p2pkv.pairing import Address

# Three lost pings and a little more: an instance whose ping is only late stays.
LIFE = 3 * PING_INTERVAL + 1.0
REQUEST_TOKENS = 256
"""A request loads D like so many prompt tokens: D's steps take longer with each sequence, and with its KV."""

_BREAKER_WINDOW_SECONDS = 30.0
_BREAKER_OUTCOMES = 100
_BREAKER_FAILURES = 5
_BREAKER_SHARE = 0.5
_BREAKER_FIRST_PAUSE = 1.0
_BREAKER_LONGEST_PAUSE = 30.0
# After so long without a failure a breaker forgets how often it has opened.
_BREAKER_FORGET_SECONDS = 120.0

Role = Literal["P", "D"]
InstanceRole = Literal["P", "D", "both"]
InstanceKey = tuple[InstanceRole, Address, int]
ROLES: dict[str, Role] = {"prefill": "P", "decode": "D"}
ROLE_NAMES: dict[InstanceRole, str] = {"P": "prefill", "D": "decode", "both": "prefill and decode"}
Kind = tuple[frozenset[str], str, int]
LossReason = Literal["gone", "silent", "hung", "stopped", "late", "moved"]
"""Why a call to an instance is given up; blame.CallEnd explains each."""
VOUCHING_VERSION = 4
"""From this version of the pings on, an instance sends none while its engine makes no progress."""
REPLICA_VERSION = 5
"""From this version of the pings on, `replica` has the number for X-data-parallel-rank."""

STATES = ("ready", "starting", "silent", "paused", "engine_paused", "draining", "drained")
"""The states of an instance, see `Instance.state`."""


@dataclass(frozen=True, eq=False, slots=True)
class WorkloadReport:
    """What an instance's scheduler had to do, and when (`at`)."""

    work: Workload
    at: float


class PingSource(Protocol):
    """The connection on which a ping came. Equal sources are one connection."""

    @property
    def member(self) -> bool:
        """Whether it has shown the members' key."""

    def is_connected(self) -> bool:
        """Whether it is still open."""

    def answer(self, frame: bytes) -> bool:
        """Answers a ping. False if the answer could not be sent."""


@dataclass(eq=False)
class ListedSource:
    """Stands for that connection where the command line lists the instance. `answers`: whether its /health
    does; `pinged`: whether it has pinged since, as its own pings count more."""

    answers: bool = True
    pinged: bool = False
    member: bool = False

    def is_connected(self) -> bool:
        return self.answers

    def answer(self, frame: bytes) -> bool:
        return False


class Breaker:
    """Decides whether an instance whose requests fail is given more of them.

    It opens when many of the latest requests failed. After a pause, with a jitter drawn by `uniform`, it lets
    one request through, the trial. If that succeeds the breaker closes; if it fails the next pause is about
    twice as long; other requests decide nothing. A trial that ends without an outcome, because its client
    left, or that has none for long, may be replaced by another one; until then its outcome still counts.

    Attributes:
        opened: how often in a row it has opened; 0 if it has not lately.
        changed: called when it opens or closes.
    """

    _resume: float | None
    _trial: object | None

    def __init__(self, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._uniform = uniform
        self._outcomes: deque[tuple[float, bool]] = deque(maxlen=_BREAKER_OUTCOMES)
        self._patience = -math.inf
        """Until then no other request may become the trial."""
        self.changed: Callable[[], None] = lambda: None
        self.clear()

    @property
    def closed(self) -> bool:
        return self._resume is None

    def admits(self, now: float) -> bool:
        """Whether a request may be sent now."""
        return self._resume is None or now >= max(self._resume, self._patience)

    def sent(self, owner: object, now: float) -> None:
        """The request `owner` was chosen for this instance; if the pause is over, it becomes the trial."""
        if self._resume is not None and self.admits(now):
            self._trial, self._patience = owner, now + _BREAKER_LONGEST_PAUSE

    def given_up(self, owner: object) -> None:
        """`owner` has ended, perhaps without an outcome: another request may become the trial."""
        if self._trial is owner:
            self._patience = -math.inf

    def succeeded(self, now: float, owner: object | None = None) -> bool:
        """`owner` got an answer. True if that closes the breaker."""
        if self._resume is None:
            self._outcomes.append((now, True))
            return False
        if owner is None or owner is not self._trial:
            return False  # it was sent before the pause, or in it for want of another instance
        self._close()
        return True

    def failed(self, now: float, owner: object | None = None) -> bool:
        """`owner` got no answer, or an error of the server's. True if that opens the breaker."""
        if self.forgettable(now):
            self.opened = 0
        self._last_failure = now
        if self._resume is None:
            self._outcomes.append((now, False))
            recent = [success for when, success in self._outcomes if now - when <= _BREAKER_WINDOW_SECONDS]
            failures = recent.count(False)
            bad = failures >= _BREAKER_FAILURES and failures >= _BREAKER_SHARE * len(recent)
        else:
            bad = owner is not None and owner is self._trial
        if bad:
            self.opened += 1
            longest = min(_BREAKER_LONGEST_PAUSE, _BREAKER_FIRST_PAUSE * 2.0 ** min(self.opened - 1, 16))
            self._resume = now + self._uniform(longest / 2, longest)
            self._trial, self._patience = None, -math.inf
            self.changed()
        return bad

    def clear(self) -> None:
        """Forgets all outcomes, which predict nothing any more, and closes."""
        self._last_failure = -math.inf
        self.opened = 0
        self._close()

    def _close(self) -> None:
        self._outcomes.clear()
        self._resume = self._trial = None
        self.changed()

    def forgettable(self, now: float) -> bool:
        """Whether its last failure is too long ago to matter."""
        return now - self._last_failure > _BREAKER_FORGET_SECONDS


class _RoutingFlag:
    """A flag that decides whether an instance gets requests: false at first; setting it calls `changed`."""

    def __set_name__(self, owner: type[Instance], name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Instance, owner: type[Instance]) -> bool:
        return bool(instance.__dict__.get(self._name))

    def __set__(self, instance: Instance, value: bool) -> None:
        instance.__dict__[self._name] = value
        instance.changed()


@dataclass(eq=False)
class Instance:
    """One living engine: an instance, or a data-parallel rank of one, which may share its HTTP server with
    others. A restart makes a new one. Operators set `drained`, vLLM's /pause or a stop `paused`.

    Attributes:
        ping: what is equal in all its pings, see `lasting`.
        report: from its last ping that had one; None if none had.
        last_sign: when it last pinged or answered, or began to: with D's first token, or P's answer.
        life: seconds without a sign after which it counts as silent.
        source: where its pings come from; None if that is unknown: then any other may take its address.
        healthy: its /health has answered 200, and its port has not been found closed since.
        names: model names that it serves; empty while they are unknown: then it may serve any.
        context: of its model, in tokens; 0 while unknown.
        kind: equal for instances that `matches` treats alike.
        written_addresses: its addresses as its answers may contain them.
        name: its address and data-parallel rank; the same after a restart.
        cache: a name for its KV cache, which is empty after a restart.
        point: its place on the ring of partners; the same after a restart.
        places: requests that have a place at this D and have not ended.
        decode_alone: of these, those whose prompts it computes in a P's place: no P could, or they are short.
        expected: requests that this P has been chosen for and not been asked yet.
        tokens: of prompts, estimated: those that this P has to compute, expected and in flight; or those of
            the requests that have a place at this D.
        prefetch_tokens: tokens of prompts whose KV this D takes before it is asked for them.
        turn: the number of the latest choice that fell on it.
        order: work in tokens, requests, turn: the smallest is the least busy.
        full: all D's that have no `room` left for another place.
        changed: called when it may be given requests and could not before, or the other way round.
        left: when it said goodbye; None if it has not.
    """

    healthy, drained, paused = _RoutingFlag(), _RoutingFlag(), _RoutingFlag()

    ping: Ping
    last_seen: float
    source: PingSource | None = None
    life: float = LIFE
    names: frozenset[str] = frozenset()
    context: int = 0
    in_flight: int = 0
    places: int = 0
    decode_alone: int = 0
    expected: int = 0
    tokens: int = 0
    prefetch_tokens: int = 0
    turn: int = 0
    breaker: Breaker = field(default_factory=Breaker)
    order: tuple[float, int, int] = (0.0, 0, 0)
    left: float | None = None
    report: WorkloadReport | None = None
    kind: Kind = field(init=False)
    changed: Callable[[], None] = field(default=lambda: None)
    neighbours: Callable[[], Iterable[Instance]] = field(default=tuple)
    room: float = float("inf")
    full: set[Instance] = field(default_factory=set)
    _ends: set[Callable[[LossReason], None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        ping, self.last_sign = self.ping, self.last_seen
        http, self.zmq_address = Address.parse(ping.http_address), Address.parse(ping.zmq_address)
        self.role: InstanceRole = ping.type
        self.key: InstanceKey = self.role, http, ping.dp_rank
        self.url = f"http://{http}"
        self.written_addresses = tuple({ping.http_address, ping.zmq_address, str(self.zmq_address)})
        self.name = f"{ping.http_address}/{ping.dp_rank}"
        self.cache = f"{self.name} {ping.incarnation}"
        self.point = int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=8).digest())
        self.learn(frozenset())

    def learn(self, served: frozenset[str], context: int = 0) -> None:
        """Takes in the model names that it lists now, beside the one in its ping, and its context."""
        self.context = context
        self.names = served | {self.ping.model} if self.ping.model else served
        self.kind = self.names, self.ping.fit, -1 if self.fits_unknown else self.ping.protocol
        self.changed()

    def has_role(self, role: Role) -> bool:
        """Whether it can be the P, or the D, of a request."""
        return self.role in (role, "both")

    @property
    def vouches(self) -> bool:
        """Whether its pings show that its engine makes progress, not only that a process lives."""
        return self.ping.version >= VOUCHING_VERSION

    @property
    def fits_unknown(self) -> bool:
        """Whether nobody knows what it fits: it is listed, and its ranks have not answered."""
        return isinstance(self.source, ListedSource) and not self.ping.fit

    @property
    def replica(self) -> int | None:
        """X-data-parallel-rank for this engine; None if its HTTP server has no other."""
        ping = self.ping
        if ping.version < REPLICA_VERSION:
            return ping.dp_rank if ping.dp_size > 1 else None
        return ping.replica

    @property
    def load(self) -> int:
        """Requests that are here or on their way here."""
        expected = self.in_flight + self.expected
        return expected if expected > self.places else self.places

    def state(self, now: float, *, needed: bool) -> str:
        """One of STATES: what keeps it from new requests, if anything. `needed`: requests depend on it."""
        if self.drained:
            return "draining" if needed else "drained"
        if not self.healthy:
            return "starting"
        if self.paused:
            return "engine_paused"
        if self.silent(now):
            return "silent"
        return "ready" if self.breaker.closed else "paused"

    def answered(self, now: float) -> None:
        """A sign of life, like pings: if half a fleet's are lost, the rest must not get all requests."""
        self.last_sign = max(self.last_sign, now)

    def pinged(self, ping: Ping, now: float) -> None:
        """Takes in when its ping came, and what its scheduler has to do."""
        self.last_seen = max(self.last_seen, now)
        self.last_sign = max(self.last_sign, now)
        if ping.workload is not None:
            self.report = WorkloadReport(ping.workload, now - ping.workload.age)

    def silent(self, now: float) -> bool:
        """Whether it has neither pinged nor answered for its `life`."""
        return now - self.last_sign > self.life

    def serves(self, model: str | None) -> bool:
        """Whether it may serve `model`; None: any model."""
        return model is None or not self.names or model in self.names

    def matches(self, other: Instance) -> bool:
        """Whether both may serve one request's model, and KV may move between them."""
        return self.shares_model(other) and (self.kind == other.kind or self.fits(other))

    def shares_model(self, other: Instance) -> bool:
        """Whether both may serve one request's model."""
        return not self.names or not other.names or not self.names.isdisjoint(other.names)

    def fits(self, other: Instance) -> bool:
        """Whether a P and a D would accept each other, as far as their pings show."""
        return self.fits_unknown or other.fits_unknown or self.ping.fit == other.ping.fit

    def count_place(self, more: int, *, decode_alone: bool, tokens: int = 0) -> None:
        """This D gets `more` requests, of so many tokens each; -1: one has ended or goes elsewhere.
        `decode_alone`: D computes the prompt in a P's place."""
        self.places += more
        self.decode_alone += more * decode_alone
        self._weigh(more * tokens)
        if self.places >= self.room:
            self.full.add(self)
        else:
            self.full.discard(self)

    def expect(self, more: int, tokens: int = 0) -> None:
        """This P has been chosen for `more` requests; -1: one is in flight now, or will not come."""
        self.expected += more
        self._weigh(more * tokens)

    @contextmanager
    def busy(self, end: Callable[[LossReason], None], tokens: int = 0) -> Iterator[None]:
        """Counts one request as in flight, at a P with its `tokens`; `lost` calls `end`."""
        self.in_flight += 1
        self._weigh(tokens)
        self._ends.add(end)
        try:
            yield
        finally:
            self.in_flight -= 1
            self._weigh(-tokens)
            self._ends.discard(end)

    def count_prefetch(self, tokens: int) -> None:
        """KV of so many more tokens comes to this D before it is wanted; below 0: it no longer does."""
        self.prefetch_tokens += tokens

    def take_turn(self, turn: int) -> None:
        self.turn = turn
        self._weigh()

    def _weigh(self, more_tokens: int = 0) -> None:
        """Updates `order`. Work is in tokens per tensor-parallel rank: a P has prompts to compute, a D has
        requests with their prompts, and an instance of both roles has both."""
        self.tokens = tokens = self.tokens + more_tokens
        load = self.load
        if self.role != "P":
            tokens += (load if self.role == "D" else self.places) * REQUEST_TOKENS
        self.order = tokens / self.ping.tp_size, load, self.turn

    def unreachable(self) -> None:
        """Its HTTP server cannot be reached: no engine there gets requests until its /health answers."""
        for each in (self, *self.neighbours()):
            each.healthy = False

    def lost(self, loss: LossReason) -> None:
        """The instance is lost: it gets no more requests, and its calls in flight end."""
        self.healthy = False
        for end in list(self._ends):
            end(loss)

    def __str__(self) -> str:
        rank = "" if self.replica is None else f" (data-parallel rank {self.ping.dp_rank})"
        return f"{ROLE_NAMES[self.role]} instance {self.ping.http_address}{rank}"


def least_busy(instances: Sequence[Instance]) -> Instance:
    """The one with the least to do, of at least one; among equals, the one whose turn was longest ago. Of
    more than `MAX_COMPARED`, so many are drawn and compared."""
    if len(instances) > MAX_COMPARED:
        instances = random.choices(instances, k=MAX_COMPARED)
    return min(instances, key=_ORDER)


MAX_COMPARED = 128
_ORDER = attrgetter("order")


def differences(one: Instance, other: Instance) -> tuple[str, ...]:
    """The names of what differs in the pings of two instances that do not fit."""
    return tuple(fit_differences(one.ping.fit, other.ping.fit)) or ("the order of words",)
