"""Which instances exist, and whether each is alive. No IO, no clock: all `now` are seconds of one monotonic
clock.

An instance whose pings stop while their connection stands is silent, not gone: its process may be compiling,
or waiting for a core. The router prefers others, and the registry removes it after a lease. It is gone when
it says goodbye, when its connection is closed and no other comes, or when its port refuses.

An address belongs to one instance as long as its pings come and their connection stands. Another instance
that pings with this address is a mistake or an attack, and is refused. A process that ends, even by kill -9,
loses its connection, so its successor is taken at once.
"""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from p2pkv.control.discovery import Ping, goodbye, lasting
from p2pkv.log import RateLimit
from p2pkv.pairing import Address

from .instance import LIFE, ROLES, Breaker, Instance, InstanceKey, ListedSource, PingSource, Role, differences

logger = logging.getLogger(__name__)

# How long a silent instance whose connection stands is kept: by default as long as p2pkv's own lease.
LEASE = 30.0
MAX_INSTANCES = 4096
_DOUBT = 0.65
"""Share of `life` without a ping after which /health is asked, and another instance may take the address."""
_COMPLAIN_SECONDS = 60.0
_LOST_SECONDS = 600.0  # a large model takes minutes to load


def random_turn() -> int:
    """For `Registry.first_turn`: so several proxies, each of which knows only its own requests, do not choose
    idle instances in the same order at about the same times."""
    return -random.randrange(1 << 30)


@dataclass(eq=False)
class Registry:
    """The living instances, one for each (role, HTTP address, data-parallel rank).

    Args:
        life: seconds without a ping after which an instance is silent, or gone if its connection is closed.
        lease: seconds without a ping after which it is gone in any case.
        first_turn: gives a newcomer's turn, at most 0. Among equals the lowest turn is chosen.

    Attributes:
        claims_refused: pings with the address of another live instance.
        lost: instances that left lately; their models are expected back.
        version: grows when an instance comes, goes, or can newly or no longer be given requests; unless time
            alone is the reason.
    """

    life: float = LIFE
    capacity: int = MAX_INSTANCES
    lease: float = LEASE
    first_turn: Callable[[], int] = lambda: 0
    claims_refused: int = 0
    version: int = 0
    full: set[Instance] = field(default_factory=set)
    lost: list[Instance] = field(default_factory=list)
    _room: float = float("inf")
    _instances: dict[InstanceKey, Instance] = field(default_factory=dict)
    _leavers: list[Instance] = field(default_factory=list)
    """Instances that have said goodbye since the last `expire`."""
    _silent: set[Instance] = field(default_factory=set)
    _misfits: set[Instance] = field(default_factory=set)
    """Instances that fit no other, as far as the log has named them."""
    _breakers: dict[InstanceKey, Breaker] = field(default_factory=dict)
    """They outlive their instances for a while, so that a crash does not reset them."""
    _drained: dict[InstanceKey, str] = field(default_factory=dict)
    """The incarnation of each drained instance: a restart ends the drain, a lost connection does not."""
    # Once a minute, as a refused instance tries again every few seconds.
    _complaints: RateLimit = field(default_factory=lambda: RateLimit(seconds=_COMPLAIN_SECONDS))

    def __post_init__(self) -> None:
        self.lease = max(self.life, self.lease)

    def observe(self, ping: Ping, now: float, source: PingSource | None = None) -> Instance | None:
        """Takes in one ping. Returns the instance if it is new, or new again after a restart."""
        known = self.of(ping)
        if known is not None:
            if not self._holds(known, source, now):
                known.pinged(ping, now)
                self._renew(known, ping.paused, source)
            return None
        newcomer = Instance(lasting(ping), now, source, self.life)
        newcomer.pinged(ping, now)
        newcomer.take_turn(self.first_turn())
        newcomer.paused = ping.paused
        known = self._instances.get(newcomer.key)
        if ping.leaving:
            self._leave(known, newcomer, now)
            return None
        holder = self._holder(newcomer, known, now)
        if holder is not None:
            self._refuse(newcomer, holder, now)
            return None
        if known is None and len(self._instances) >= self.capacity:
            if self._complaints.admits("full", now):
                logger.warning(f"{newcomer} ignored: {self.capacity} instances, the most, are known already")
            return None
        self._replace_listed(newcomer)
        newcomer.breaker = self._breakers.setdefault(newcomer.key, newcomer.breaker)
        newcomer.drained = self._stays_drained(newcomer, known)
        newcomer.neighbours = partial(self._neighbours, newcomer)
        newcomer.changed = newcomer.breaker.changed = self._change
        newcomer.room, newcomer.full = self._room, self.full
        self._instances[newcomer.key] = newcomer
        self._change()
        logger.info("%s %s", newcomer, "registered" if known is None else "has restarted")
        return newcomer

    def _replace_listed(self, newcomer: Instance) -> None:
        """An instance that pings replaces its listed one; with both roles, it may be listed once for each."""
        role, http, rank = newcomer.key
        for each in list(ROLES.values()) if role == "both" else [role]:
            listed = self._instances.get((each, http, rank))
            if listed and isinstance(listed.source, ListedSource) and listed.source != newcomer.source:
                listed.source.pinged = True
                del self._instances[listed.key]
                if listed.drained:
                    drained = self._drained.pop(listed.key)
                    self._drained[newcomer.key] = drained or newcomer.ping.incarnation

    def _neighbours(self, instance: Instance) -> list[Instance]:
        """The other engines behind its HTTP server."""
        same = (each for each in self._instances.values() if each.url == instance.url)
        return [each for each in same if each.role == instance.role and each is not instance]

    def _stays_drained(self, newcomer: Instance, known: Instance | None) -> bool:
        """Whether this is the drained instance, not its successor. The incarnation of a listed instance may
        become known, or unknown, without a restart."""
        drained, now = self._drained.get(newcomer.key), newcomer.ping.incarnation
        listed = any(each is not None and isinstance(each.source, ListedSource) for each in (known, newcomer))
        if drained is None or (drained != now and not (listed and "" in (drained, now))):
            return False
        self._drained[newcomer.key] = now or drained
        return True

    def _renew(self, known: Instance, paused: bool, source: PingSource | None) -> None:
        if known.paused != paused:
            known.paused = paused
            if not paused:
                known.breaker.clear()  # what failed was aborted by the pause
            why = "is paused by vLLM's /pause, or is stopping: it gets no new requests"
            logger.warning("%s %s", known, why if paused else "is no longer paused")
        if isinstance(known.source, ListedSource) and known.source != source:
            known.source.pinged, known.source = True, source
            known.learn(known.names, known.context)
        else:
            known.source = source

    def _holder(self, newcomer: Instance, known: Instance | None, now: float) -> Instance | None:
        """The live instance that has one of the newcomer's addresses; the registered `known` or another."""
        for each in self._instances.values():
            shares_role = newcomer.role == "both" or each.has_role(newcomer.role)
            same = shares_role and each.zmq_address == newcomer.zmq_address and each.url != newcomer.url
            if (same or each is known) and self._holds(each, newcomer.source, now):
                return each
        return None

    def _holds(self, holder: Instance, source: PingSource | None, now: float) -> bool:
        """Whether the holder's own connection shows that it lives, so that nothing from another `source`
        counts. A holder without the members' key does not keep a member out."""
        if holder.source in (None, source) or isinstance(holder.source, ListedSource):
            return False
        if source is not None and source.member and not holder.source.member:
            return False
        return now - holder.last_seen <= self.life * _DOUBT and holder.source.is_connected()

    def _refuse(self, newcomer: Instance, holder: Instance, now: float) -> None:
        self.claims_refused += 1
        if self._complaints.admits("claim", now):
            logger.warning(
                f"{newcomer} refused ({self.claims_refused} such pings so far): its address or its ZMQ "
                f"address {newcomer.zmq_address} belongs to {holder}, which is alive; each instance needs "
                "addresses of its own"
            )

    def _leave(self, known: Instance | None, leaver: Instance, now: float) -> None:
        """A goodbye ends the incarnation that sent it; from another sender only if that is not alive."""
        if known is None or goodbye(known.ping) != leaver.ping:
            return
        if self._holds(known, leaver.source, now):
            self._refuse(leaver, known, now)
        else:
            self._remove(known)
            self._breakers.pop(known.key, None)
            self._drained.pop(known.key, None)
            known.left = now
            self._leavers.append(known)
            logger.info("%s said goodbye, as it is being stopped", known)

    def drain(self, instance: Instance, drained: bool) -> None:
        """Drains this instance for an operator, or resumes it."""
        instance.drained = drained
        if drained:
            self._drained[instance.key] = instance.ping.incarnation
        else:
            self._drained.pop(instance.key, None)
        logger.warning("%s %s", instance, "is drained: it gets no new requests" if drained else "is resumed")

    def expire(self, now: float) -> list[Instance]:
        """Removes those that are gone; returns them and those that have said goodbye since the last call."""
        dead = [instance for instance in self._instances.values() if not self.alive(instance, now)]
        self.lost = [each for each in self.lost if now - each.last_seen < _LOST_SECONDS]
        for instance in dead:
            self._remove(instance)
            lost = "" if self.overdue(instance, now) else ", and its connection is closed"
            logger.warning("%s removed: no ping for %.0f s%s", instance, now - instance.last_seen, lost)
        self._log_silent(now)
        self._log_misfits()
        past = {key for key, each in self._breakers.items() if each.forgettable(now)}
        for key in past - self._instances.keys():
            del self._breakers[key]
        leavers, self._leavers = self._leavers, []
        return dead + leavers

    def _remove(self, instance: Instance) -> None:
        del self._instances[instance.key]
        self._change()
        self.lost.append(instance)
        del self.lost[: -self.capacity]

    def _log_silent(self, now: float) -> None:
        silent = {each for each in self._instances.values() if each.silent(now)}
        for instance in silent - self._silent:
            logger.warning(
                f"{instance} is silent: no ping for {now - instance.last_seen:.0f} s, but its connection "
                f"stands; others are preferred, and it is removed once it is silent for {self.lease:.0f} s"
            )
        for instance in self._silent - silent:
            if self._instances.get(instance.key) is instance:
                logger.info("%s pings again", instance)
        self._silent = silent

    def misfits(self) -> dict[Instance, tuple[str, ...]]:
        """Instances that fit no other although the other role has some of their model, and in what each of
        them differs from the nearest of these."""
        kinds: dict[object, list[Instance]] = {}
        for each in self._instances.values():
            kinds.setdefault((each.role, each.kind), []).append(each)
        # Only one of each kind is compared: there may be thousands of instances, and this runs every second.
        ones = [alike[0] for alike in kinds.values()]
        found: dict[Instance, tuple[str, ...]] = {}
        for one, alike in zip(ones, kinds.values(), strict=True):
            if one.role == "both":
                continue  # it fits itself
            partners = [other for other in ones if other.role != one.role and one.shares_model(other)]
            if partners and not any(one.fits(other) for other in partners):
                found |= dict.fromkeys(alike, min((differences(one, each) for each in partners), key=len))
        return found

    def _log_misfits(self) -> None:
        misfits = self.misfits()
        for instance in misfits.keys() - self._misfits:
            logger.warning(
                "%s fits no %s: the nearest differs in %s%s; this one needs: %s",
                instance,
                "decode instance, so it gets no requests"
                if instance.role == "P"
                else "prefill instance, so it gets only requests whose prompts it computes itself",
                " and ".join(misfits[instance]),
                "; use the same version of p2pkv" if "protocol" in misfits[instance] else "",
                instance.ping.fit or "nothing",
            )
        for instance in self._misfits - misfits.keys():
            if self._instances.get(instance.key) is instance:
                logger.info("%s now has an instance that it fits", instance)
        self._misfits = set(misfits)

    def limit_places(self, room: float) -> None:
        """Sets how many requests each D takes at a time, from now on."""
        self._room = room
        self.full.clear()
        for each in self._instances.values():
            each.room = room
            if each.places >= room:
                self.full.add(each)

    def late(self, now: float) -> list[Instance]:
        """Instances with requests in flight whose ping is late."""
        late = now - self.life * _DOUBT
        return [each for each in self._instances.values() if each.in_flight and each.last_seen < late]

    def of(self, ping: Ping) -> Instance | None:
        """The instance whose latest ping this is; None if it has another, or is not registered."""
        known = self._instances.get((ping.type, Address.parse(ping.http_address), ping.dp_rank))
        return known if known is not None and known.ping == lasting(ping) else None

    def at(self, key: InstanceKey) -> Instance | None:
        """The instance with this role, HTTP address and data-parallel rank."""
        return self._instances.get(key)

    def known(self, role: Role) -> list[Instance]:
        """All that can be P, or D, instances of both roles included."""
        return [instance for instance in self._instances.values() if instance.has_role(role)]

    def routable(self, role: Role, now: float) -> list[Instance]:
        """The `candidates` with this role that are not gone; some may be silent."""
        return [each for each in self.candidates() if each.has_role(role) and self.alive(each, now)]

    def candidates(self) -> list[Instance]:
        """Instances that are neither drained nor paused, and were healthy when they were last asked."""
        everyone = self._instances.values()
        return [each for each in everyone if each.healthy and not (each.drained or each.paused)]

    def _change(self) -> None:
        self.version += 1

    def alive(self, instance: Instance, now: float) -> bool:
        """Whether it pings, or its connection stands and its lease is not over."""
        if not instance.silent(now):
            return True
        source = instance.source
        return not self.overdue(instance, now) and source is not None and source.is_connected()

    def overdue(self, instance: Instance, now: float) -> bool:
        """Whether it has been silent for a lease, after which it is gone in any case."""
        return now - instance.last_sign > self.lease
