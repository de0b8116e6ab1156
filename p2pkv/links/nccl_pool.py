"""The device memory of one rank's NCCL links: what is being sent, or received, lies in its slots."""

from __future__ import annotations

import threading

import torch

from p2pkv.links.nccl_device import Device
from p2pkv.links.slots import Slots, aligned


class Pool:
    """Slots in one block of device memory, taken once and for all: a full device fails at the start.

    The owner thread takes slots; whoever has seen the device finish with them gives them back.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises ValueError if `nbytes` is not positive, MemoryError if the device has no room."""
        self._slots = Slots(nbytes)
        self._bytes = device.memory(self._slots.capacity)
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """Bytes of the whole pool."""
        return self._slots.capacity

    @property
    def used(self) -> int:
        """Bytes in slots, those of links included whose abort has not come back."""
        return self._slots.used

    def check(self, nbytes: int) -> None:
        """Raises ValueError if `nbytes` is not positive or could never fit."""
        self._slots.check(nbytes)

    def take(self, nbytes: int) -> int | None:
        """The offset of a new slot, or None while there is no room; ValueError if it could never fit."""
        with self._lock:
            return self._slots.take(nbytes)

    def take_fairly(self, nbytes: int, held: int) -> int | None:
        """`take` for a link that holds `held` bytes already.

        Who holds something must leave as much to the others, so a silent peer never takes everything.
        """
        left = self.capacity - self.used - aligned(nbytes)
        if held and held + aligned(nbytes) > left:
            self.check(nbytes)
            return None
        return self.take(nbytes)

    def give(self, offset: int) -> None:
        """Return the slot at `offset`."""
        with self._lock:
            self._slots.give(offset)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over the slot."""
        return self._bytes[offset : offset + nbytes]
