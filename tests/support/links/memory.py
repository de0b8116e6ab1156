"""Links within one process, for tests. They keep NCCL's rules as strictly as NCCL may apply them.

Data moves only inside `poll`, and only when both ends poll. Nothing tells one end that the other
has aborted or died. Remote slots are checked, so a sender that obeys its grants out of order is found.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque

import torch

from p2pkv.links.base import Guard, Inbound, LinkError, LinkFactory, Outbound
from p2pkv.links.staging import Slots, StagingBudget, StagingShare, aligned

_DEFAULT_STAGING = 1 << 30


class _Wire:
    """What the two ends share; every field is used under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.accepted = False
        self.completed = False
        self.flying: deque[torch.Tensor] = deque()  # committed, not yet taken
        self.taken = 0


class MemoryNetwork:
    """A pretend network: `rank()` for each rank, then invite, accept and complete as over a real one."""

    def __init__(self) -> None:
        self.names = itertools.count()
        self.wires: dict[bytes, _Wire] = {}

    def rank(self, staging_bytes: int = _DEFAULT_STAGING) -> MemoryLinks:
        """One more rank's factory: a D whose receives, or a P whose sends of a link, hold so many bytes."""
        return MemoryLinks(self, staging_bytes)

    def wire(self, name: bytes) -> _Wire:
        if name not in self.wires:
            raise LinkError(f"no link {name!r} was invited on this network")
        return self.wires[name]


class MemoryLinks(LinkFactory):
    kind = "memory"

    def __init__(self, network: MemoryNetwork, staging_bytes: int) -> None:
        self._network = network
        self.staging = StagingBudget(staging_bytes)
        self._ends: list[MemoryInbound | MemoryOutbound] = []
        self._closed = False

    def invite(self) -> bytes:
        self._check()
        name = b"memory/%d" % next(self._network.names)
        self._network.wires[name] = _Wire()
        return name

    def accept(self, invitation: bytes, window: int) -> tuple[MemoryInbound, bytes]:
        self._check()
        wire = self._network.wire(invitation)
        if wire.accepted:
            raise LinkError(f"invitation {invitation!r} was accepted before")
        inbound = MemoryInbound(wire, window, StagingShare(self.staging))
        wire.accepted = True
        self._ends.append(inbound)
        return inbound, b"accept " + invitation

    def complete(self, invitation: bytes, acceptance: bytes) -> MemoryOutbound:
        self._check()
        wire = self._network.wire(invitation)
        if acceptance != b"accept " + invitation or not wire.accepted:
            raise LinkError(f"{acceptance!r} does not answer invitation {invitation!r}")
        outbound = MemoryOutbound(wire, StagingShare(self.staging, sends=True))
        wire.completed = True
        self._ends.append(outbound)
        return outbound

    def close(self) -> None:
        self._closed = True
        for end in self._ends:
            end.close("its rank has closed")
        self._ends.clear()

    def _check(self) -> None:
        if self._closed:
            raise LinkError("this rank's links are closed")


class MemoryReceive:
    def __init__(self, link: MemoryInbound, sequence: int, offset: int, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.remote_slot = sequence
        self.offset = offset
        self.arrived = False
        self.released = False
        self._link = link

    def done(self) -> bool:
        self._link.guard.check()
        return self.arrived

    def release(self) -> None:
        self._link.guard.owned()
        if not self.released:
            self.released = True
            self._link.give(self)


class MemoryInbound(Inbound):
    """D's end: a window of real bytes, so that slots can be told apart."""

    def __init__(self, wire: _Wire, window: int, share: StagingShare) -> None:
        self.guard = Guard("the memory link from a peer")
        self.share = share
        self._slots = Slots(window)
        self._window = torch.zeros(self._slots.capacity, dtype=torch.uint8)
        self._wire = wire
        self._next = 0
        self._waiting: deque[MemoryReceive] = deque()

    def ready(self) -> bool:
        self.guard.check()
        return self._wire.completed

    def post(self, nbytes: int) -> MemoryReceive | None:
        self.guard.check()
        offset = self._slots.take(nbytes, self.share)
        if offset is None:
            return None
        receive = MemoryReceive(self, self._next, offset, self._window[offset : offset + nbytes])
        self._next += 1
        self._waiting.append(receive)
        return receive

    def give(self, receive: MemoryReceive) -> None:
        if receive.arrived and self.guard.reason is None:
            self._slots.give(receive.offset)

    def poll(self) -> None:
        self.guard.check()
        with self._wire.lock:
            while self._waiting and self._wire.flying:
                self._take(self._waiting.popleft(), self._wire.flying.popleft())

    def _free(self) -> None:
        self._waiting.clear()  # later data of the peer stays on the wire for ever
        self._slots.give_all()

    def _take(self, receive: MemoryReceive, data: torch.Tensor) -> None:
        if data.numel() != receive.buffer.numel():
            raise self.guard.fail(
                f"the peer sent {data.numel()} bytes where {receive.buffer.numel()} were posted"
            )
        receive.buffer.copy_(data)
        receive.arrived = True
        self._wire.taken += 1
        if receive.released:
            self._slots.give(receive.offset)


class MemorySend:
    def __init__(self, link: MemoryOutbound, sequence: int, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.sequence = sequence
        self.committed = False
        self._link = link

    def commit(self) -> None:
        self._link.guard.check()
        self.committed = True

    def done(self) -> bool:
        self._link.guard.check()
        return self.sequence < self._link.taken


class MemoryOutbound(Outbound):
    def __init__(self, wire: _Wire, share: StagingShare) -> None:
        self.guard = Guard("the memory link to a peer")
        self.taken = 0
        self._wire = wire
        self.share = share
        self._next = 0
        self._unsent: deque[MemorySend] = deque()
        self._unfinished: deque[MemorySend] = deque()

    def ready(self) -> bool:
        self.guard.check()
        return True

    def reserve(self, nbytes: int, remote_slot: int) -> MemorySend | None:
        self.guard.check()
        if nbytes < 1:
            raise ValueError(f"a message of {nbytes} bytes cannot be sent; it needs at least 1 byte")
        if remote_slot != self._next:
            raise self.guard.fail(f"remote slot {remote_slot} is not that of message {self._next}")
        if not self.share.grants(nbytes):
            return None
        send = MemorySend(self, self._next, nbytes)
        self._next += 1
        self._unsent.append(send)
        self._unfinished.append(send)
        self.share.count(aligned(nbytes))
        return send

    def poll(self) -> None:
        """Put on the wire what is committed, in order, and hear what D has taken."""
        self.guard.check()
        with self._wire.lock:
            while self._unsent and self._unsent[0].committed:
                self._wire.flying.append(self._unsent.popleft().buffer)
            self.taken = self._wire.taken
        while self._unfinished and self._unfinished[0].sequence < self.taken:
            self.share.count(-aligned(self._unfinished.popleft().buffer.numel()))

    def _free(self) -> None:
        with self._wire.lock:
            self._wire.flying.clear()
        self._unsent.clear()
        self._unfinished.clear()
        self.share.count(-self.share.held)
