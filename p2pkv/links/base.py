"""The interface of the data plane: one ordered, abortable, two-sided link from a rank of P to a rank of D.

It is modelled on NCCL. Sends and receives match in the order in which they are posted. A send is done only
when the matching receive has taken it. Completion is polled, never waited for. The link does not report a
dead peer, so its callers need deadlines of their own. `abort` frees the calls of this end. All calls to
one link come from one thread (NCCL's own rule: one owner thread per device).

On a device, `commit` and `release` put work in order and do not wait: the bytes are sent, or the room is
written again, only after the work that the calling thread's current stream holds at the call. Each link has
a stream of its own for its operations: they wait for the peer, and no copy of blocks may queue behind them.

To *launch* an operation is to give it to the device, where it occupies hardware until the peer launches the
matching one. With `LinkFactory.announced` its owner says when, and only then `due` and `launch` are called: P
sends `Sent` to D and then calls `Outbound.launch`, and D calls `Inbound.launch` when that has come. So no
receive waits on D's device for what P has not decided yet. Links that need no device launch nothing, and may
be called the same way; there each send is due once committed.

A link is set up by two opaque blobs, which the control plane carries:

    P: invitation = factory.invite()              -> to D
    D: inbound, acceptance = factory.accept(invitation, window)  -> to P
    P: outbound = factory.complete(invitation, acceptance)

A `remote_slot` is a number of a receive, which D sends to P with the grant. If both ends share
memory, it is where D's buffer lies, and P gathers straight into it. With NCCL it is the number and the size
of the message, because NCCL itself would not notice a wrong one.
"""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableSet
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
import torch

from p2pkv.links.staging import StagingBudget, StagingShare
from p2pkv.trust import Networks


class LinkError(Exception):
    """This link can no longer be used; abort it and, if the peer lives, build a new one."""


class Receive(Protocol):
    """One posted receive. `buffer`: uint8 [nbytes], readable from the moment `done()` is True until
    `release()`. `remote_slot`: for the sender; opaque, 0 <= remote_slot <= 2**62."""

    @property
    def buffer(self) -> torch.Tensor: ...
    @property
    def remote_slot(self) -> int: ...
    def done(self) -> bool:
        """Whether all bytes have arrived. Raises LinkError if they never will."""

    def release(self) -> None:
        """The bytes have been read: room returns to the window, and the peer's send may end. Idempotent."""


class Send(Protocol):
    """One send. Fill `buffer` (uint8 [nbytes]), then `commit()`, then poll `done()`."""

    @property
    def buffer(self) -> torch.Tensor: ...
    def commit(self) -> None:
        """The buffer is full: hand it over. It must not be written again."""

    def done(self) -> bool:
        """Whether the peer's receive has taken the bytes. Raises LinkError if it never will."""


class LinkEnd(ABC):
    """Either end of a link, which its factory may close, too.

    Attributes:
        share: what its unfinished operations hold of the rank's staging.
        closed: it was closed, or aborted.
        up: both ends are up.
    """

    guard: "Guard"
    share: StagingShare
    closed = False
    up = False

    def ready(self) -> bool:
        """Whether both ends are up. Raises LinkError if they never will be."""
        if not self.up:
            self.poll()
        self.guard.check()
        return self.up

    @property
    def used(self) -> int:
        """Bytes that its unfinished operations hold; 0 once closed, when the rest counts for the rank."""
        return 0 if self.closed else self.share.held

    @abstractmethod
    def poll(self) -> None:
        """Move what can be moved now; never blocks. Raises LinkError when the link is broken."""

    def abort(self) -> None:
        """Free every call of this end at once; what the peer still sends is dropped. Idempotent."""
        self.guard.owned()
        self.close("aborted on this side")

    def close(self, reason: str) -> None:
        """`abort` for the factory, whose thread may be another one. Idempotent."""
        if not self.closed:
            self.closed = True
            self.guard.fail(reason)
            self._free()

    @abstractmethod
    def _free(self) -> None:
        """This end has been closed: free what it holds."""


class Inbound(LinkEnd):
    """D's end of a link."""

    @abstractmethod
    def post(self, nbytes: int) -> Receive | None:
        """Post the next receive in order, or None while the window has no room for `nbytes`. Raises
        ValueError if they could never fit, LinkError after `abort`."""

    def take(self, nbytes: int, reserve: int = 0) -> Receive | None:
        """`post`, if both ends are up, and staging has room beside other links and `reserve` bytes."""
        if not self.ready() or not self.share.grants(nbytes, reserve):
            return None
        return self.post(nbytes)

    @property
    def way(self) -> str:
        """For people: how the bytes come, if this kind of link has several ways; "" if it has one."""
        return ""

    def launch(self, count: int = 1) -> None:
        """P has announced its next `count` sends, which it launches together: from now on a `poll` may launch
        as many posted receives, together, too."""


class Outbound(LinkEnd):
    """P's end of a link."""

    @abstractmethod
    def reserve(self, nbytes: int, remote_slot: int) -> Send | None:
        """A buffer for the next send in order, or None while this end has no room for it."""

    def due(self, before: int = 0, most: int = 1) -> int:
        """How many of the next committed sends may be announced now and launched together, `most` at most;
        if there are any, `launch` must follow. `before`: how many are due already. Raises LinkError."""
        return 1

    def launch(self, count: int = 1) -> None:
        """D has the `Sent` of `count` sends that are `due`: launch them together, after those before them."""


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """What the factory of a kind is made from; each kind takes what it needs.

    Attributes:
        host: address or name of this machine that peers can dial.
        staging_bytes: the most bytes in flight that all links of the rank hold together.
        shared_memory: whether ranks of one machine may share memory.
        device: where the KV is; None: the current CUDA device, for a kind that needs one.
        receives: whether this rank is ever D's end; if not, it needs no memory for what comes in.
        allowed: networks outside of which no rank is dialed; None: any may be.
    """

    host: str
    staging_bytes: int
    shared_memory: bool = True
    device: torch.device | None = None
    nccl_channels: int = 8
    nccl_in_flight: int = 1
    nccl_group_bytes: int = 0
    receives: bool = True
    allowed: Networks | None = None


# The two blobs that set up a link: checked, bounded, no pickle.

MAX_BLOB_BYTES = 4096
MAX_STUCK = 16
NONCE_BYTES = 16

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class SetupBlob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """An invitation or an acceptance; its tag is the kind of link. `name`: which of the two, for people."""

    name: ClassVar[str]

    version: Literal[1]


class Invitation(SetupBlob, frozen=True):
    """P's. `nonce`: random; the answer repeats it."""

    name = "invitation"

    nonce: Nonce


class Acceptance(SetupBlob, frozen=True):
    """D's. `answers`: the invitation's nonce."""

    name = "acceptance"

    answers: Nonce


_AnyBlob = TypeVar("_AnyBlob", bound=SetupBlob)

_looking = threading.Lock()
"""msgspec 0.22 crashes the process when two threads, which may be two ranks' here, look at one type for the
first time together. So one of them does, and the others wait."""

_decoder = cache(msgspec.msgpack.Decoder)


encode_blob: Callable[[SetupBlob], bytes] = msgspec.msgpack.encode


def decode_blob(blob: bytes, kind: type[_AnyBlob]) -> _AnyBlob:
    """The `kind` of blob in `blob`. Raises LinkError, and nothing else, for whatever is not one."""
    if len(blob) > MAX_BLOB_BYTES:
        raise LinkError(f"the link {kind.name} has {len(blob)} bytes; at most {MAX_BLOB_BYTES} are expected")
    with _looking:
        decoder: msgspec.msgpack.Decoder[_AnyBlob] = _decoder(kind)
    try:
        return decoder.decode(blob)
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        link = kind.__struct_config__.tag
        raise LinkError(
            f"not a link {kind.name} of kind {link} ({error}); both sides need the same `link` setting and "
            "p2pkv version"
        ) from None


class Guard:
    """The checks that every call to one end of a link makes first. The first caller's thread is the owner."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._ident = 0
        self._name = ""
        self.reason: str | None = None

    def owned(self) -> None:
        """Raises RuntimeError if a second thread calls."""
        if get_ident() != self._ident:
            self._check_thread()

    def check(self) -> None:
        """Raises RuntimeError if a second thread calls, LinkError if this end no longer works."""
        if get_ident() != self._ident:
            self._check_thread()
        if self.reason is not None:
            raise LinkError(self.reason)

    def fail(self, reason: str) -> LinkError:
        """Break this end for good; the first reason stays. Returns the error to be raised."""
        if self.reason is None:
            self.reason = f"{self._what}: {reason}"
        return LinkError(self.reason)

    def _check_thread(self) -> None:
        thread = threading.current_thread()
        if self._ident == 0:
            self._ident, self._name = get_ident(), thread.name
            return
        raise RuntimeError(
            f"{self._what} belongs to thread {self._name!r} ({self._ident}) but was called by thread "
            f"{thread.name!r} ({get_ident()}); all calls to one link must come from one thread"
        )


class LinkFactory:
    """Makes the ends of links of one kind for one rank, and closes them when it is closed.

    Attributes:
        kind: the name that peers compare.
        staging: the budget of this rank, which all its links share.
        announced: whether the owner of the ends launches their operations (see above and `announce_sends`).
            If not, `poll` does as soon as it may.
    """

    kind: str
    staging: StagingBudget
    announced: bool = False
    poll_seconds = 0.001
    """Seconds between two polls while a link has something under way; messages come in between."""
    build_seconds = 0.0
    """Seconds that a link may take to come up once both ends are made, however short the lease is."""

    blobs: tuple[type[Invitation], type[Acceptance]]
    """The classes of this kind's invitation and acceptance."""
    too_many_stuck = ""
    """The error if so many calls are `stuck` that no further link is risked."""

    def __init__(self, ends: MutableSet[LinkEnd] | None = None) -> None:
        """`ends`: an empty set that will hold the ends; a WeakSet lets go of those that were dropped."""
        self._ends = set() if ends is None else ends
        self._closed = False

    def pause(self) -> float:
        """Seconds until the next poll is of use while links have something under way, if no message comes."""
        return self.poll_seconds

    def announce_sends(self) -> None:
        """The owner of the ends launches their operations from now on; call it before the first is made."""
        self.announced = True

    def carry_both_ways(self) -> None:
        """This rank both sends and receives; call it before the first end is made."""
        self.staging.carry_both_ways()

    @property
    def stuck(self) -> int:
        """Calls that were given up and have not come back; each keeps a thread, and perhaps memory."""
        return 0

    def rescue(self, reason: str, wherever: bool) -> None:
        """The owner hangs in a call to the device: break every link that launches something, from a thread
        that is not the owner's, so that nothing on the device waits for a peer. `wherever`: also the link
        that the owner is calling."""

    def invite(self) -> bytes:
        """P's invitation to a new link (NCCL: the unique id; host: who and where this machine is)."""
        self._check()
        return encode_blob(self._invitation(secrets.token_bytes(NONCE_BYTES)))

    def accept(self, invitation: bytes, window: int) -> tuple[Inbound, bytes]:
        """D's end, with room for `window` bytes of posted receives, and D's answer to the invitation. Raises
        LinkError, with a sentence, for an invitation that it cannot take, ValueError for no window."""
        self._check()
        if window < 1:
            raise ValueError(f"window is {window} bytes; it must be positive")
        inbound, acceptance = self._accept(decode_blob(invitation, self.blobs[0]), window)
        self._ends.add(inbound)
        return inbound, encode_blob(acceptance)

    def complete(self, invitation: bytes, acceptance: bytes) -> Outbound:
        """P's end, from D's answer. Raises LinkError if no way to D works, with a sentence."""
        self._check()
        invited, accepted = decode_blob(invitation, self.blobs[0]), decode_blob(acceptance, self.blobs[1])
        if accepted.answers != invited.nonce:
            raise LinkError("D's acceptance answers another invitation")
        outbound = self._complete(invited, accepted)
        self._ends.add(outbound)
        return outbound

    # What a kind makes of its own blobs.

    def _invitation(self, nonce: bytes) -> Invitation:
        raise NotImplementedError

    def _accept(self, invited: Any, window: int) -> tuple[Inbound, Acceptance]:
        raise NotImplementedError

    def _complete(self, invited: Any, accepted: Any) -> Outbound:
        raise NotImplementedError

    def close(self) -> None:
        """Close all ends, and free what they share. Idempotent."""
        self._closed = True
        for end in list(self._ends):
            end.close("its rank has closed")
        self._ends.clear()

    def _check(self) -> None:
        """Raises LinkError if no end can be made any more."""
        if self._closed:
            raise LinkError("this rank's links are closed")
        if self.stuck >= MAX_STUCK:
            raise LinkError(f"{self.stuck} {self.too_many_stuck}")
        for end in [end for end in self._ends if end.closed]:
            self._ends.discard(end)
