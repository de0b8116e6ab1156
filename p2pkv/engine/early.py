"""What arrives before its request: claims on P, KV on D."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import torch

from p2pkv.device import take_memory
from p2pkv.engine.peers import Arrived, DecodeRank
from p2pkv.links.staging import ALIGNMENT, Slots
from p2pkv.protocol.messages import Cancel, Want

# On P: claims of ranks of D for prompts that P's scheduler has not announced yet.


MOST_CLAIMS = 4096
"""The most prompts with such claims."""

CLAIM_LEASES = 10
"""Leases for which a final message (Want or Cancel) is kept: D does not repeat it."""


@dataclass
class Early:
    """One rank's claim. `step`: the step that P was in at the first heartbeat; `last`: D's final message."""

    attempt: int
    since: float
    step: int | None
    last: Want | Cancel | None = None


class EarlyClaims:
    """Claims by key and place, kept for a lease; bounded in number."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._claims: dict[str, dict[DecodeRank, Early]] = {}
        self._next = 0.0
        """No claim expires before this time."""

    def __len__(self) -> int:
        return len(self._claims)

    def note(self, key: str, place: DecodeRank, attempt: int, step: int | None, now: float) -> bool:
        """Keep a claim; whether the step may still run in which P would have heard of the prompt."""
        if key not in self._claims and len(self._claims) >= MOST_CLAIMS:
            return False
        claims = self._claims.setdefault(key, {})
        early = claims.get(place)
        if early is None or early.attempt != attempt:
            early = claims[place] = Early(attempt, now, step)
        early.since = now
        return early.step is not None and early.step == step

    def keep(self, key: str, place: DecodeRank, message: Want | Cancel) -> None:
        """Keep D's final message about a prompt until P's scheduler announces it."""
        early = self._claims.get(key, {}).get(place)
        if early is not None and early.attempt == message.attempt:
            early.last = message

    def drop(self, key: str, place: DecodeRank, attempt: int) -> None:
        """D has all of the prompt: drop the claim, which has outlived it."""
        claims = self._claims.get(key, {})
        if place in claims and claims[place].attempt == attempt:
            del claims[place]
        if not claims:
            self._claims.pop(key, None)

    def take(self, key: str) -> dict[DecodeRank, Early]:
        """P's scheduler has announced this prompt: its claims, which are removed here."""
        return self._claims.pop(key, {})

    def known(self) -> list[str]:
        """The prompts that have claims."""
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
            for place, early in list(claims.items()):
                end = early.since + self._lease * (CLAIM_LEASES if early.last else 1)
                if now > end:
                    del claims[place]
                else:
                    self._next = min(self._next, end)
            if not claims:
                del self._claims[key]


# On D: KV that comes before its request.


@dataclass(eq=False)
class EarlyBuffer:
    """The memory of one prompt. `touched`: when a chunk last came."""

    offset: int
    touched: float
    filled: int = 0
    kept: deque[Arrived] = field(default_factory=deque)


class EarlyBuffers:
    """All early buffers of one rank: parts of one allocation on the cache's device, made when the rank
    starts."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises MemoryError with a sentence if the device has no room."""
        whole = nbytes // ALIGNMENT * ALIGNMENT
        self._block = take_memory(whole, device, "ahead_bytes")
        self._slots = Slots(whole) if whole else None

    @property
    def used(self) -> int:
        """Bytes that buffers hold."""
        return self._slots.used if self._slots is not None else 0

    def take(self, nbytes: int, now: float) -> EarlyBuffer | None:
        """A buffer of so many bytes; None if there is no room now."""
        if self._slots is None or not 1 <= nbytes <= self._block.numel():
            return None
        offset = self._slots.take(nbytes)
        return None if offset is None else EarlyBuffer(offset, now)

    def keep(self, buffer: EarlyBuffer, chunk: Arrived, now: float) -> None:
        """Copy a chunk behind those that the buffer holds. On a device the copy is only queued."""
        start, nbytes = buffer.offset + buffer.filled, chunk.buffer.numel()
        room = self._block[start : start + nbytes]
        if room.device.type == "cpu":
            np.copyto(room.numpy(), chunk.buffer.numpy())
        else:
            room.copy_(chunk.buffer, non_blocking=True)
        buffer.kept.append(replace(chunk, buffer=room))
        buffer.filled += nbytes
        buffer.touched = now

    def give(self, buffer: EarlyBuffer) -> None:
        """Free a buffer."""
        assert self._slots is not None
        buffer.kept.clear()
        self._slots.give(buffer.offset)
