"""P's end of a host link whose ends share memory: it gathers straight into D's window."""

from __future__ import annotations

import torch

from p2pkv.links.arena import COMMITTED, NBYTES, TAKEN, Arena, entry, fence, from_landing
from p2pkv.links.base import LinkError, Outbound
from p2pkv.links.guard import Guard


class SharedSend:
    """One send; its buffer is D's slot, so committing it is setting a flag."""

    __slots__ = ("_entry", "_finished", "_link", "_words", "buffer", "sequence")

    def __init__(self, link: SharedOutbound, arena: Arena, sequence: int, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.sequence = sequence
        self._finished = False
        self._link = link
        self._words = arena.words
        self._entry = entry(sequence)

    def commit(self) -> None:
        """Publish the buffer to D."""
        self._link.guard.check()
        self._words[self._entry + NBYTES] = self.buffer.numel()
        fence()
        self._words[self._entry + COMMITTED] = self.sequence + 1

    def done(self) -> bool:
        """Whether D has read the bytes."""
        self._link.guard.check()
        if not self._finished and self.taken():
            self._finished = True
            self._link.finish(self)
        return self._finished

    def taken(self) -> bool:
        """`done` without the checks. A later number there: the entry has been used again since."""
        return self._words[self._entry + TAKEN] > self.sequence


class SharedOutbound(Outbound):
    """P's end. Nothing here makes a system call; a peer that dies is never noticed."""

    def __init__(self, arena: Arena, nonce: bytes) -> None:
        """`nonce`: P's own, by which D knows who has mapped the arena."""
        self.guard = Guard("the link to a peer on this host")
        self._arena: Arena | None = arena
        self._next = 0
        self._used = 0
        self._unfinished: dict[int, SharedSend] = {}
        arena.greet(nonce)

    def ready(self) -> bool:
        """True: D's end was there first."""
        self.guard.check()
        return True

    def reserve(self, nbytes: int, landing: int) -> SharedSend | None:
        """D's slot. Never None: D has granted it. Raises LinkError if `landing` is not the next grant's."""
        self.guard.check()
        assert self._arena is not None
        room = self._arena.room
        room.check(nbytes)
        try:
            offset = from_landing(landing, self._next)
        except LinkError as error:
            raise self.guard.fail(str(error)) from None
        if offset + nbytes > room.capacity:
            raise self.guard.fail(f"landing {landing} lies outside the window of {room.capacity} bytes")
        send = SharedSend(self, self._arena, self._next, room.tensor(offset, nbytes))
        self._unfinished[self._next] = send
        self._used += nbytes
        self._next += 1
        return send

    @property
    def used(self) -> int:
        """Bytes of D's window that this end's unfinished sends stand for."""
        return self._used

    def finish(self, send: SharedSend) -> None:
        """A send has ended."""
        if self._unfinished.pop(send.sequence, None) is not None:
            self._used -= send.buffer.numel()

    def poll(self) -> None:
        """Forget sends that D has taken, if nobody has asked them."""
        self.guard.check()
        while self._unfinished:
            send = next(iter(self._unfinished.values()))
            if not send.taken():
                return
            self.finish(send)

    def abort(self) -> None:
        """Let go of D's memory; tensors that are still held keep it mapped. Idempotent."""
        self.guard.owned()
        self.close("aborted on this side")

    def close(self, reason: str) -> None:
        """`abort` for the factory, whose thread may be another one."""
        self.guard.fail(reason)
        self._arena = None
        self._unfinished.clear()
        self._used = 0

    def __repr__(self) -> str:
        return f"SharedOutbound({len(self._unfinished)} of {self._next} sends unfinished, {self._used} bytes)"
