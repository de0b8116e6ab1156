"""The data plane's seam: one ordered, abortable, two-sided link from one P rank to one D rank.

Its shape is NCCL's. Sends and receives match in the order in which they are posted; a send is done
only when the matching receive has taken it; completion is polled, never waited for; a dead peer is
not reported by the link, so deadlines are the caller's; `abort` frees the calls of this end. All
calls to one link come from one thread (NCCL's own rule: one owner thread per device).

On a device, `commit` and `release` order and do not wait: the bytes are sent, or the room is written
again, only after what the calling thread's current stream holds at the call. A link's own operations
go to a stream of its own: they wait for the peer, and no copy of pages may queue up behind them.

A link is set up by two opaque blobs, which the control plane carries:

    P: invitation = factory.invite()              -> to D
    D: inbound, acceptance = factory.accept(invitation, window)  -> to P
    P: outbound = factory.complete(invitation, acceptance)

A *landing* is the receiver's word for "where this receive lies". It travels from D to P with the
grant, so that a link whose ends share memory lets P gather straight into D's buffer; a link that
needs no such thing (NCCL) says which message it is and how long, since nothing else would notice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch


class LinkError(Exception):
    """This link can no longer be used; abort it and, if the peer lives, build a new one."""


class Receive(Protocol):
    """One posted receive.

    Attributes:
        buffer: uint8 [nbytes]; readable from the moment `done()` is True until `release()`.
        landing: what the sender has to be told; opaque, 0 <= landing <= 2**62.
    """

    @property
    def buffer(self) -> torch.Tensor: ...
    @property
    def landing(self) -> int: ...
    def done(self) -> bool:
        """Whether all bytes have arrived. Raises LinkError if they never will."""
        ...

    def release(self) -> None:
        """The bytes have been read: room returns to the window, and the peer's send may end. Idempotent."""
        ...


class Send(Protocol):
    """One send. Fill `buffer` (uint8 [nbytes]), then `commit()`, then poll `done()`."""

    @property
    def buffer(self) -> torch.Tensor: ...
    def commit(self) -> None:
        """The buffer is full: hand it over. It must not be written again."""
        ...

    def done(self) -> bool:
        """Whether the peer's receive has taken the bytes. Raises LinkError if it never will."""
        ...


class Inbound(ABC):
    """D's end of a link."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether both ends are up. Raises LinkError if they never will be."""

    @abstractmethod
    def post(self, nbytes: int) -> Receive | None:
        """Post the next receive in order, or None while the window has no room for `nbytes`.

        Raises ValueError if `nbytes` could never fit, LinkError after `abort`.
        """

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes of the window that posted receives hold now; 0 at the baseline."""

    @abstractmethod
    def poll(self) -> None:
        """Move what can be moved now; never blocks. Raises LinkError when the link is broken."""

    @abstractmethod
    def abort(self) -> None:
        """Free every call of this end at once; later data of the peer lands nowhere. Idempotent."""


class Outbound(ABC):
    """P's end of a link."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether both ends are up. Raises LinkError if they never will be."""

    @abstractmethod
    def reserve(self, nbytes: int, landing: int) -> Send | None:
        """A buffer for the next send in order, or None while this end has no room for it."""

    @property
    @abstractmethod
    def used(self) -> int:
        """Bytes that this end's unfinished sends hold now; 0 at the baseline."""

    @abstractmethod
    def poll(self) -> None:
        """Move what can be moved now; never blocks. Raises LinkError when the link is broken."""

    @abstractmethod
    def abort(self) -> None:
        """Free every call of this end at once. Idempotent."""


class LinkFactory(ABC):
    """Makes the ends of links of one kind for one rank. `kind` is the name that peers compare."""

    kind: str

    @property
    def stuck(self) -> int:
        """Calls that were given up and have not come back; each keeps a thread, and perhaps memory."""
        return 0

    @abstractmethod
    def invite(self) -> bytes:
        """P's first word on a new link (NCCL: the unique id; host: who and where this machine is)."""

    @abstractmethod
    def accept(self, invitation: bytes, window: int) -> tuple[Inbound, bytes]:
        """D's end, with room for `window` bytes of posted receives, and D's answer to the invitation.

        Raises LinkError for an invitation that it cannot take, with a sentence that says why.
        """

    @abstractmethod
    def complete(self, invitation: bytes, acceptance: bytes) -> Outbound:
        """P's end, from D's answer. Raises LinkError if no way to D works, with a sentence."""

    @abstractmethod
    def close(self) -> None:
        """Free what all links of this rank share. Idempotent."""
