"""Claims of ranks of D for prompts that P's scheduler has not announced yet."""

from dataclasses import dataclass
from math import inf

from p2pkv.engine.to_decode import DecodePeer, DecodeRank
from p2pkv.protocol.messages import Cancel, Want

MAX_CLAIMS = 1 << 16
"""The most such claims, of all ranks of D."""

CLAIM_LEASES = 10
"""Leases for which a final message (Want or Cancel) is kept: D does not repeat it."""


@dataclass
class EarlyClaim:
    """One rank's claim. `step`: the step that P was in at the first heartbeat; `last`: D's final message."""

    incarnation: str
    attempt: int
    since: float
    step: int | None
    last: Want | Cancel | None = None


class EarlyClaims:
    """Claims by key and rank of D, kept for a lease; bounded in number."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._claims: dict[str, dict[DecodeRank, EarlyClaim]] = {}
        self._next = 0.0
        """No claim expires before this time."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._claims)

    def note(self, key: str, peer: DecodePeer, attempt: int, step: int | None, now: float) -> bool:
        """Keep a claim. Returns whether P may still be in the step in which it announces the prompt."""
        claims, incarnation = self._claims.get(key, {}), peer.hello.incarnation
        if (claim := claims.get(peer.key)) is None:
            if self._count >= MAX_CLAIMS:
                return False
            self._claims[key] = claims
            self._count += 1
        # A D that has restarted counts its attempts from the start again.
        if claim is None or (claim.incarnation, claim.attempt) != (incarnation, attempt):
            claim = claims[peer.key] = EarlyClaim(incarnation, attempt, now, step)
        claim.since = now
        return claim.step is not None and claim.step == step

    def keep(self, key: str, rank: DecodeRank, message: Want | Cancel) -> None:
        """Keep D's final message about a prompt until P's scheduler announces it."""
        claim = self._claims.get(key, {}).get(rank)
        if claim is not None and claim.attempt == message.attempt:
            claim.last = message

    def drop(self, key: str, rank: DecodeRank, attempt: int) -> None:
        """D has all of the prompt: drop the claim, which has outlived it."""
        claims = self._claims.get(key, {})
        if rank in claims and claims[rank].attempt == attempt:
            del claims[rank]
            self._count -= 1
        if not claims:
            self._claims.pop(key, None)

    def take(self, key: str) -> dict[DecodeRank, EarlyClaim]:
        """P's scheduler has announced this prompt: its claims, which are removed here."""
        taken = self._claims.pop(key, {})
        self._count -= len(taken)
        return taken

    def known(self) -> list[str]:
        return list(self._claims)

    @property
    def due(self) -> float:
        """When `expire` has something to do."""
        return self._next if self._claims else inf

    def expire(self, now: float) -> None:
        """Drop what is older than a lease. A look at all claims is worth it once a lease or so."""
        if now < self._next:
            return
        self._next = now + self._lease  # the earliest end of a claim that comes or is renewed later
        for key, claims in list(self._claims.items()):
            for rank, claim in list(claims.items()):
                end = claim.since + self._lease * (CLAIM_LEASES if claim.last else 1)
                if now > end:
                    self.drop(key, rank, claim.attempt)
                else:
                    self._next = min(self._next, end)
