"""Room for KV that P pushes before the request for it has come to D: it waits for its pages here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from p2pkv.engine.arrived import Arrived
from p2pkv.links.slots import ALIGNMENT, Slots


@dataclass(eq=False)
class Shelf:
    """The room of one prompt. `touched`: when it last got something."""

    offset: int
    touched: float
    filled: int = 0
    kept: deque[Arrived] = field(default_factory=deque)


class Shelves:
    """One rank's, in a block of memory of the cache's device, taken when the rank starts."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        whole = nbytes // ALIGNMENT * ALIGNMENT
        self._block = torch.empty(whole, dtype=torch.uint8, device=device)
        self._slots = Slots(whole) if whole else None

    @property
    def used(self) -> int:
        """Bytes that prompts hold."""
        return self._slots.used if self._slots is not None else 0

    def take(self, nbytes: int, now: float) -> Shelf | None:
        """Room for a prompt of so many bytes; None if there is none now."""
        if self._slots is None or not 1 <= nbytes <= self._block.numel():
            return None
        offset = self._slots.take(nbytes)
        return None if offset is None else Shelf(offset, now)

    def keep(self, shelf: Shelf, chunk: Arrived, now: float) -> None:
        """Copy a chunk behind those that are there. On a device the copy is only queued."""
        start, nbytes = shelf.offset + shelf.filled, chunk.buffer.numel()
        room = self._block[start : start + nbytes]
        if room.device.type == "cpu":
            np.copyto(room.numpy(), chunk.buffer.numpy())
        else:
            room.copy_(chunk.buffer, non_blocking=True)
        shelf.kept.append(replace(chunk, buffer=room))
        shelf.filled += nbytes
        shelf.touched = now

    def give(self, shelf: Shelf) -> None:
        """The prompt needs its room no more."""
        assert self._slots is not None
        shelf.kept.clear()
        self._slots.give(shelf.offset)
