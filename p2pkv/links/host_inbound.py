"""D's end of a host link: one arena, into which P writes itself or TCP's pump writes for it."""

from __future__ import annotations

import torch

from p2pkv.links.arena import (
    COMMITTED,
    ENTRIES,
    NBYTES,
    TAKEN,
    Arena,
    create_arena,
    entry,
    fence,
    to_landing,
)
from p2pkv.links.base import Inbound, LinkError
from p2pkv.links.blobs import SharedArena
from p2pkv.links.guard import Guard
from p2pkv.links.tcp import Door, Inlet


class HostReceive:
    """One posted receive. `done` reads one flag of the arena; nothing here makes a system call."""

    __slots__ = (
        "_arrived",
        "_entry",
        "_link",
        "_words",
        "buffer",
        "landing",
        "nbytes",
        "offset",
        "released",
        "stamp",
    )

    def __init__(self, link: HostInbound, arena: Arena, sequence: int, offset: int, nbytes: int) -> None:
        self.buffer: torch.Tensor = arena.room.tensor(offset, nbytes)
        self.landing = to_landing(offset, sequence)
        self.nbytes = nbytes
        self.offset = offset
        self.stamp = sequence + 1
        self.released = False
        self._arrived = False
        self._link = link
        self._words = arena.words
        self._entry = entry(sequence)

    def done(self) -> bool:
        """Whether all bytes have arrived. Raises LinkError if they never will."""
        self._link.guard.check()
        if self._arrived or self.arrived():
            return True
        if self._link.lost is not None:
            raise LinkError(self._link.lost)
        return False

    def arrived(self) -> bool:
        """`done` without the checks. Raises LinkError if P sent another size."""
        if self._words[self._entry + COMMITTED] != self.stamp:
            return self._arrived
        fence()
        sent = self._words[self._entry + NBYTES]
        if sent != self.nbytes:
            raise self._link.guard.fail(f"the peer sent {sent} bytes where {self.nbytes} were posted")
        self._arrived = True
        return True

    def land(self) -> None:
        """TCP's pump has filled the buffer."""
        self._arrived = True

    def release(self) -> None:
        """Return the room; if bytes are still on their way, as soon as they have arrived. Idempotent."""
        self._link.guard.owned()
        if not self.released:
            self.released = True
            self._link.give(self)

    def take(self) -> None:
        """Tell a P that shares the arena that the bytes have been read."""
        fence()
        self._words[self._entry + TAKEN] = self.stamp


class HostInbound(Inbound):
    """D's end. It learns from P's first sign of life whether P shares the arena or comes by TCP.

    Invariant: a slot that P may still write is never posted again. `abort` gives up the whole arena,
    so what a frozen P writes afterwards lands in memory that no link uses.
    """

    def __init__(self, window: int, nonces: tuple[bytes, bytes], host: str, *, shared: bool) -> None:
        """`nonces`: P's, then D's own. Raises LinkError if the system refuses memory or a port."""
        self.guard = Guard("the link from a peer")
        self.lost: str | None = None
        self._peer_nonce, nonce = nonces
        self._arena: Arena | None = create_arena(window, nonce, shared=shared)
        self._door: Door | None = Door(host, nonce)
        self.port = self._door.port
        self._inlet: Inlet | None = None
        self._ready = False
        self._next = 0
        self._live: dict[int, HostReceive] = {}
        self._early: list[HostReceive] = []

    def offer(self) -> SharedArena | None:
        """What a P on this host needs to open the arena; None if it cannot."""
        return None if self._arena is None else self._arena.offer()

    def ready(self) -> bool:
        """Whether P has mapped the arena or said hello over TCP."""
        self.guard.check()
        if not self._ready:
            self._meet()
        if self.lost is not None:
            raise LinkError(self.lost)
        return self._ready

    def post(self, nbytes: int) -> HostReceive | None:
        """Post the next receive, or None while the window has no room for it."""
        self.guard.check()
        if self.lost is not None:
            raise LinkError(self.lost)
        assert self._arena is not None
        sequence = self._next
        if sequence - ENTRIES in self._live:  # its entry of the header is still in use
            self._arena.room.check(nbytes)
            return None
        offset = self._arena.room.take(nbytes)
        if offset is None:
            return None
        receive = HostReceive(self, self._arena, sequence, offset, nbytes)
        self._live[sequence] = receive
        self._next += 1
        return receive

    @property
    def used(self) -> int:
        """Bytes of the window that posted receives hold."""
        return 0 if self._arena is None else self._arena.room.used

    def poll(self) -> None:
        """Take what TCP has brought and return idle pages. Raises LinkError if a receive can never end."""
        self.guard.check()
        if not self._ready:
            self._meet()
        if self._inlet is not None:
            self._pump(self._inlet)
        if self._early:
            self._settle()
        assert self._arena is not None
        self._arena.room.tidy()

    def abort(self) -> None:
        """Give up the arena and the connection. Idempotent."""
        self.guard.owned()
        self.close("aborted on this side")

    def close(self, reason: str) -> None:
        """`abort` for the factory, whose thread may be another one."""
        self.guard.fail(reason)
        self._close_door()
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None
        if self._arena is not None:
            self._arena.seal_off()
            self._arena = None
        self._live.clear()
        self._early.clear()

    def give(self, receive: HostReceive) -> None:
        """A receive has been released: its room returns now, or when its bytes have arrived."""
        if self._arena is None:
            return
        if self.guard.reason is not None:
            return  # P may still write there; the arena goes as a whole
        if not receive.arrived():
            self._early.append(receive)
            return
        receive.take()
        del self._live[receive.stamp - 1]
        self._arena.room.give(receive.offset)

    def __repr__(self) -> str:
        how = "tcp" if self._inlet is not None else "shared memory" if self._ready else "not ready"
        return f"HostInbound({how}, {len(self._live)} receives posted, {self.used} bytes used)"

    def _settle(self) -> None:
        early, self._early = self._early, []
        for receive in early:
            self.give(receive)

    def _meet(self) -> None:
        assert self._arena is not None and self._door is not None
        if self._arena.greeted(self._peer_nonce):
            self._ready = True
        else:
            connection = self._door.admit()
            if connection is None:
                return
            self._inlet = Inlet(connection, self._peer_nonce, self._place, self._landed)
            self._ready = True
            self._pump(self._inlet)
        self._arena.seal_off()
        self._close_door()

    def _pump(self, inlet: Inlet) -> None:
        try:
            inlet.poll()
        except LinkError as error:
            raise self.guard.fail(str(error)) from None
        if inlet.lost is not None:
            self.lost = f"the link from a peer: {inlet.lost}"
            if inlet.taken < self._next:
                raise LinkError(self.lost)

    def _place(self, sequence: int, nbytes: int) -> memoryview:
        receive = self._live.get(sequence)
        if receive is None:
            raise LinkError(f"the peer sent message {sequence}, for which no receive is posted")
        if receive.nbytes != nbytes:
            raise LinkError(f"the peer sent {nbytes} bytes where {receive.nbytes} were posted")
        assert self._arena is not None
        return self._arena.room.view(receive.offset, nbytes)

    def _landed(self, sequence: int) -> None:
        self._live[sequence].land()

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None
