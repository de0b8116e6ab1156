"""The policy `consistent_hash`: all requests of a session go to one instance."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from .membership.instance import Instance, least_busy
from .policy import Pick, Policy, RoutingRequest


class ConsistentHash(Policy):
    """The same one for all requests of a session, by rendezvous hashing: each session has an order of its own
    of all instances, and goes to the first that there is. When one comes or goes, only its own sessions move.
    Without a session this is `least_loaded`."""

    help = "the same one for all requests with the same value of --session-header"

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        session = request.session
        if not session:
            return Pick(least_busy(candidates))
        return Pick(max(candidates, key=lambda instance: (_affinity(session, instance), instance.name)))


def _affinity(session: str, instance: Instance) -> float:
    """Drawn for each session and instance; an instance of twice the size is first twice as often."""
    drawn = hashlib.blake2b(f"{instance.name}\0{session}".encode(errors="replace"), digest_size=8).digest()
    between_0_and_1 = (int.from_bytes(drawn) + 0.5) / 2**64
    return -instance.ping.tp_size / math.log(between_0_and_1)
