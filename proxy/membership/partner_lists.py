"""The answer to a D's pings: the P's that it may be paired with, so that it connects to them before the first
request. If a fleet is larger than an instance's links, requests go to such pairs. No IO, no clock.

Each D is sent as many P's as it asks for. If there are more, D's get different ones: all P's lie on a ring,
each at the hash of its name, and a D's part begins at the hash of its own. So the links spread over all P's,
each P gets about as many, and an instance that comes or goes changes the lists of only a few D's.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from weakref import WeakKeyDictionary

from p2pkv.control.discovery import MAX_PARTNERS, Ping, encode_partners

from .instance import Instance, Kind, PingSource
from .registry import Registry

# Rings are made anew so often, so an answer may be out of date by that.
RING_SECONDS = 1.0
# A list that has not changed is sent again after this, as an instance that was busy may have lost it.
REPEAT_SECONDS = 60.0

_Ring = list[tuple[int, str]]
"""The points of some P's, in order, with their ZMQ addresses."""


def _after(ring: _Ring, point: int, most: int) -> Iterator[str]:
    """The addresses from `point` on, once around the ring, at most so many."""
    first = bisect_left(ring, (point, ""))
    for step in range(min(most, len(ring))):
        yield ring[(first + step) % len(ring)][1]


class PartnerLists:
    """Answers the pings of D's that ask for partners, whenever their list has changed."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._rings: dict[Kind, tuple[_Ring, _Ring]] = {}
        self._made = float("-inf")
        self._sent: WeakKeyDictionary[Instance, tuple[PingSource, bytes, float]] = WeakKeyDictionary()

    def answer(self, ping: Ping, source: PingSource, now: float) -> None:
        """Sends the sender of this ping its partners, unless it has them or did not ask."""
        if ping.type == "P" or ping.leaving or not ping.partners:
            return
        instance = self._registry.of(ping)
        if instance is None or instance.source != source:
            return  # the instance is not registered, or pings over another connection
        frame = encode_partners(self.of(instance, now))
        known, sent, when = self._sent.get(instance, (None, b"", now))
        if (known, sent) == (source, frame) and now - when < REPEAT_SECONDS:
            return
        if source.answer(frame):
            self._sent[instance] = source, frame, now

    def of(self, decode: Instance, now: float) -> list[str]:
        """ZMQ addresses of P's that this D may be paired with, at most as many as it asks for; first those
        that get requests now. Drained P's get none and are left out."""
        most = min(decode.ping.partners, MAX_PARTNERS)
        around = self._around(decode, now)
        found = chain.from_iterable(_after(ring, decode.point, most + 1) for ring in around)
        others = (address for address in found if address != decode.ping.zmq_address)
        return list(islice(others, most))

    def _around(self, decode: Instance, now: float) -> tuple[_Ring, _Ring]:
        """The P's that match D's of this kind: those that get requests now, and the others."""
        if now - self._made >= RING_SECONDS:
            self._rings, self._made = {}, now
        if decode.kind not in self._rings:
            ready, well, others = set(self._registry.routable("P", now)), _Ring(), _Ring()
            for each in self._registry.known("P"):
                if each.matches(decode) and not each.drained:
                    (well if each in ready else others).append((each.point, each.ping.zmq_address))
            self._rings[decode.kind] = sorted(well), sorted(others)
        return self._rings[decode.kind]


class LinkedPairs:
    """With which D's each P has links, in a fleet where an instance keeps links to at most `most` others:
    with those that connect to it before any request, as `PartnerLists` told them. A request of another pair
    would have to build a link, and close one that others need."""

    def __init__(self, prefillers: Sequence[Instance], decoders: Sequence[Instance], most: int) -> None:
        self._ps = sorted(each.point for each in prefillers)
        self._ds = sorted(decoders, key=attrgetter("point"))
        self._twice, self._points = self._ds * 2, [each.point for each in self._ds]
        # Each D has so many of the P's that follow it on the ring that no P has more than `most` D's.
        self._each = max(1, min(most, most * len(self._ps) // len(self._ds)))
        self._usual = max(2, self._each * len(self._ds) // len(self._ps))

    @classmethod
    def of(cls, prefillers: Sequence[Instance], decoders: Sequence[Instance]) -> "LinkedPairs | None":
        """None if there is room for all links, or if nothing is known about that."""
        most = min((each.ping.partners for each in decoders), default=0)
        if not most or max(len(prefillers), len(decoders)) <= most:
            return None
        return cls(prefillers, decoders, most)

    def decoders(self, prefill: Instance) -> Sequence[Instance]:
        """The D's linked to this P: at least two, and as many as are linked to an average P."""
        if self._each >= len(self._ps):
            return self._ds
        last = bisect_right(self._points, prefill.point)
        after = self._ps[bisect_left(self._ps, prefill.point) - self._each]
        first = bisect_right(self._points, after)
        if after > prefill.point:
            first -= len(self._ds)
        first = max(min(first, last - self._usual), last - len(self._ds))
        return self._twice[first + len(self._ds) : last + len(self._ds)]
