"""KV that has come to D: a chunk, and the memory where chunks wait for their request (`prefetch_bytes`)."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from p2pkv.device import take_memory
from p2pkv.engine.from_prefill import PrefillPeer
from p2pkv.kv.cache import Rectangles
from p2pkv.kv.checksum import Checksum
from p2pkv.links.staging import ALIGNMENT, Slots
from p2pkv.protocol.messages import Chunk, Sent


@dataclass(frozen=True, eq=False, slots=True)
class ArrivedChunk:
    """One chunk that has arrived: its bytes, and `rows`, our cache in their form, by KV group: the peer may
    be gone when it is written to our blocks. `digest`: our checksum of it; None where none is wanted."""

    peer: PrefillPeer
    rank: int
    chunk: Chunk
    sent: Sent
    buffer: torch.Tensor
    rows: tuple[Rectangles, ...]
    digest: Checksum | None

    def differs(self) -> bool:
        """Whether our checksum differs from P's. Call it only once the device has computed ours."""
        return self.digest is not None and self.digest.value() != self.sent.digest


@dataclass(eq=False)
class PrefetchBuffer:
    """The memory of one prompt. `touched`: when a chunk last came."""

    offset: int
    touched: float
    filled: int = 0
    chunks: deque[ArrivedChunk] = field(default_factory=deque)

    def next(self) -> ArrivedChunk:
        return self.chunks.popleft()


class PrefetchBuffers:
    """All of one rank: parts of one allocation on the cache's device, made when the rank starts."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises MemoryError with a sentence if the device has no room."""
        whole = nbytes // ALIGNMENT * ALIGNMENT
        self._block = take_memory(whole, device, "prefetch_bytes")
        self._slots = Slots(max(whole, ALIGNMENT))

    @property
    def used(self) -> int:
        return self._slots.used

    def take(self, nbytes: int, now: float) -> PrefetchBuffer | None:
        """A buffer of so many bytes; None if there is no room now."""
        if not 1 <= nbytes <= self._block.numel():
            return None
        offset = self._slots.take(nbytes)
        return None if offset is None else PrefetchBuffer(offset, now)

    def keep(self, buffer: PrefetchBuffer, chunk: ArrivedChunk, now: float) -> None:
        """Copy a chunk behind those that the buffer holds. On a device the copy is only queued."""
        start, nbytes = buffer.offset + buffer.filled, chunk.buffer.numel()
        room = self._block[start : start + nbytes]
        if room.device.type == "cpu":
            np.copyto(room.numpy(), chunk.buffer.numpy())
        else:
            room.copy_(chunk.buffer, non_blocking=True)
        buffer.chunks.append(replace(chunk, buffer=room))
        buffer.filled += nbytes
        buffer.touched = now

    def give(self, buffer: PrefetchBuffer) -> None:
        buffer.chunks.clear()
        self._slots.give(buffer.offset)
