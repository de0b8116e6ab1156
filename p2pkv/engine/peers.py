"""The peers of one rank: the connection to each, the link, and the messages that are under way on it.

On P a DecodePeer stands for each rank of D that has said Hello; on D a PrefillPeer for each rank of P that
this rank has dialed.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Generic, TypeVar

import msgspec
import torch

from p2pkv.control.endpoint import Connection
from p2pkv.engine.context import Context, log
from p2pkv.kv.cache import Rectangles
from p2pkv.kv.checksum import Checksum
from p2pkv.links.base import Inbound, LinkError, Outbound, Receive, Send
from p2pkv.plan import Edge, Plan
from p2pkv.protocol.handshake import Assignment, Dialing, Refused, Wire, judge, verified
from p2pkv.protocol.machine import Transmit
from p2pkv.protocol.messages import Chunk, Heartbeat, Hello, LinkAccept, LinkDown, LinkInvite, Sent, Welcome

_Key = TypeVar("_Key")
_Peer = TypeVar("_Peer")


class Peers(Generic[_Key, _Peer]):
    """All peers of this rank, by `key`, and those of them that every turn looks at.

    The engine thread writes both tables, by the methods of this class only; any thread may read.
    """

    def __init__(self, key: Callable[[_Peer], _Key]) -> None:
        self._key = key
        self._all: dict[_Key, _Peer] = {}
        self._watched: dict[_Peer, None] = {}

    def add(self, peer: _Peer) -> None:
        """From now on `peer` is the one of its key."""
        self._all[self._key(peer)] = peer

    def remove(self, peer: _Peer) -> None:
        """Forget the peer of this one's key, if there is any."""
        self._all.pop(self._key(peer), None)

    def get(self, key: _Key) -> _Peer | None:
        return self._all.get(key)

    def __contains__(self, peer: _Peer) -> bool:
        """Whether `peer` is still the one of its key: it was neither removed nor replaced."""
        return self._all.get(self._key(peer)) is peer

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[_Peer]:
        """The peers of now, whatever is added or removed meanwhile."""
        return iter(tuple(self._all.values()))

    def watch(self, peer: _Peer) -> None:
        """Let every turn look at this peer, until `rest`."""
        self._watched[peer] = None

    def rest(self, peer: _Peer) -> None:
        self._watched.pop(peer, None)

    @property
    def watched(self) -> list[_Peer]:
        """The peers that this turn looks at."""
        for peer in [peer for peer in self._watched if peer not in self]:
            del self._watched[peer]
        return list(self._watched)


class Overdue:
    """Whether a link stands still: whether one message has been its next one for too long.

    A slow link does not stand still: the messages behind the next one wait longer than that.
    """

    def __init__(self) -> None:
        self._next: object = None
        self._since = 0.0

    def clear(self) -> None:
        """The link is gone: let go of its message, which may hold memory of it."""
        self._next = None

    def check(self, next_one: object, now: float, seconds: float) -> bool:
        """Whether `next_one` (None: nothing is under way) has been the next for longer; to be asked often."""
        if next_one is not self._next:
            self._next, self._since = next_one, now
        return next_one is not None and now - self._since > seconds


# P's view of a rank of D.


DecodeRank = tuple[str, int]
"""A rank of a D: the address of the engine's rank 0, and the rank."""


def decode_peers() -> Peers[DecodeRank, DecodePeer]:
    return Peers(lambda peer: peer.place)


FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""Seconds between tries to build a link that keeps failing, the first after one at once."""


MAX_UNCONFIRMED = 4096
"""Transfers to one rank of D whose end a rank that stops waits for; older ones are forgotten."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A send that D has not taken yet."""

    send: Send
    key: str
    nbytes: int


@dataclass(eq=False, slots=True)
class PendingSent:
    """A `Sent` message that waits for its checksum (`due`: it is known), or for those before it."""

    say: Callable[[float], None]
    due: bool = False


@dataclass(eq=False)
class DecodePeer:
    """One incarnation of a rank of D that has said Hello.

    Attributes:
        assignment: the part of each prompt's KV that this rank sends it; None: nothing.
        rows: our cache in the form in which that travels, by KV group.
        table: the peers of this rank.
        link: number of the link, or of the try to build one.
        window: bytes that D can take on this link at a time.
        since: when D was invited to the link.
        fresh: it has said nothing but Hello yet.
        wanted: when D last named a transfer, or said Hello. named: it has named one.
        last_heard: when it last said anything but Hello.
        parked: its link was closed as idle; the next transfer that D names builds it again.
        orders: granted sends that wait for a buffer. flights: sends that D has not taken yet.
        pending: `Sent` messages in the order of the sends; only where checksums are wanted.
        unconfirmed: transfers (key, attempt) that D was sent a part of, and whose end it has not confirmed.
    """

    ctx: Context
    connection: Connection
    hello: Hello
    plan: Plan
    rows: tuple[Rectangles, ...]
    assignment: Assignment | None
    table: Peers[DecodeRank, DecodePeer] = field(default_factory=decode_peers, repr=False)
    link: int = 0
    window: int = 0
    since: float = 0.0
    fresh: bool = True
    linked: bool = False
    wanted: float = 0.0
    named: bool = False
    last_heard: float = 0.0
    parked: bool = False
    orders: deque[tuple[str, Transmit]] = field(default_factory=deque)
    flights: deque[Flight] = field(default_factory=deque)
    pending: deque[PendingSent] = field(default_factory=deque)
    unconfirmed: dict[tuple[str, int], None] = field(default_factory=dict)
    _waited: Transmit | None = None
    _invited: bool = False
    _next: float = 0.0
    _pause: float = 0.0
    _invitation: bytes = b""
    _outbound: Outbound | None = None
    _overdue: Overdue = field(default_factory=Overdue)

    @cached_property
    def place(self) -> DecodeRank:
        return self.hello.addresses[0], self.hello.rank

    @cached_property
    def served(self) -> frozenset[int]:
        """The ranks of its engine that this rank sends KV to."""
        return frozenset(edge.target for edge in self.plan.from_source(self.ctx.hello.rank))

    @property
    def address(self) -> str:
        return self.hello.address

    @cached_property
    def verify(self) -> bool:
        """Whether this rank or ours wants a checksum of each chunk."""
        return verified(self.ctx.hello, self.hello)

    def stir(self) -> None:
        """Let every turn look at this peer, for as long as it is busy or its link is not up."""
        self.table.watch(self)

    def order(self, key: str, order: Transmit) -> None:
        """D has granted this send."""
        self.orders.append((key, order))
        self.stir()

    @property
    def busy(self) -> bool:
        """Whether the link has something to send or to say about it."""
        return bool(self.orders or self.flights or self.pending)

    @property
    def up(self) -> bool:
        """Whether there is nothing to wait for: the link is up, or none is needed now."""
        return self.assignment is None or self.linked or self.parked

    @property
    def limit(self) -> int:
        """The most bytes of a chunk; 0 while it is not known."""
        return self.window // 2 if self.linked else 0

    @property
    def building(self) -> bool:
        """Whether D has been invited to a link that is not up yet."""
        return self._invited and not self.linked

    @property
    def accepted(self) -> bool:
        """Whether D has answered the invitation: the link is up, or the two ends bring it up."""
        return self._outbound is not None

    @property
    def used(self) -> int:
        return self._outbound.used if self._outbound is not None else 0

    def invite(self, now: float) -> None:
        """Begin a link if there is none, and it is time to try again; D's answer comes to `accept`.

        Raises LinkError if this rank can make none now.
        """
        self.stir()
        if self.assignment is None or self._invited or self.parked or now < self._next:
            return
        self._invited = True
        self.link += 1
        self._invitation = self.ctx.links.invite()
        self.since = now
        self.ctx.tell(self.connection, LinkInvite(self.link, self._invitation))

    def accept(self, message: LinkAccept) -> None:
        """D has made its end: make ours. Does nothing if that invitation was given up. Raises LinkError."""
        if message.link == self.link and self.building and self._outbound is None:
            self._outbound = self.ctx.links.complete(self._invitation, message.blob)
            self.window = message.window

    def abort(self, now: float, tell: str = "") -> None:
        """Give the link up, and all that it carried; `tell`: the reason, for D. Each new try waits longer."""
        if tell:
            self.ctx.tell(self.connection, LinkDown(self.link, tell))
        if self._outbound is not None:
            self.ctx.counters.add("links_aborted")
            self._outbound.abort()
        self._outbound, self.linked, self._invited = None, False, False
        self._next = now + self._pause
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LAST_PAUSE)
        self.orders.clear()
        self.flights.clear()
        self.pending.clear()
        self.unconfirmed.clear()
        self._overdue.clear()
        self.stir()

    def park(self, now: float, tell: str = "") -> None:
        """Close the idle link until D names a transfer; `tell`: why, for D."""
        self.abort(now, tell)
        self.parked, self._next, self._pause = True, now, 0.0

    def want(self, now: float) -> None:
        """D names a transfer: a parked link may be built again."""
        self.wanted, self.named, self.parked = now, True, False

    def sent(self, key: str, attempt: int) -> None:
        """Something of this transfer has gone out."""
        self.unconfirmed[key, attempt] = None
        if len(self.unconfirmed) > MAX_UNCONFIRMED:
            del self.unconfirmed[next(iter(self.unconfirmed))]

    def confirmed(self, key: str, attempt: int) -> None:
        """D has all of this transfer, or wants nothing more of it."""
        self.unconfirmed.pop((key, attempt), None)

    @property
    def unfinished(self) -> bool:
        """Whether something is on its way to D, or may still be."""
        return self.busy or bool(self.unconfirmed)

    def poll(self) -> bool:
        """Move what can be moved; whether the link has just come up. Raises LinkError."""
        if self._outbound is None:
            return False
        self._outbound.poll()
        if self.linked or not self._outbound.ready():
            return False
        self.linked = True
        return True

    def overdue(self, now: float, lease: float) -> bool:
        """Whether D has not taken the oldest send for a lease; to be asked often."""
        return self._overdue.check(self.flights[0] if self.flights else None, now, lease)

    def taken(self) -> Iterator[Flight]:
        """Sends that D has taken since the last call, in order. Raises LinkError."""
        while self.flights and self.flights[0].send.done():
            self._pause = 0.0
            yield self.flights.popleft()

    def say_sent(self, sent: PendingSent, now: float) -> None:
        """`sent` may go out now. `Sent` messages go out in order: send all at the front that may go."""
        sent.due = True
        while self.pending and self.pending[0].due:
            self.pending.popleft().say(now)

    def next_send(self) -> tuple[str, Transmit, Send] | None:
        """The oldest order and a buffer for it, if there is one of each. Raises LinkError."""
        if not self.orders or self._outbound is None or not self.linked:
            return None
        key, order = self.orders[0]
        if order.grant.nbytes > self.window:
            raise LinkError(f"D grants {order.grant.nbytes} bytes in a window of {self.window}")
        send = self._outbound.reserve(order.grant.nbytes, order.grant.slot)
        if send is None:
            if order is not self._waited:
                self._waited = order
                self.ctx.counters.add("chunks_waited")
            return None
        self.orders.popleft()
        return key, order, send


# D's view of a rank of P.


def prefill_peers() -> Peers[str, PrefillPeer]:
    return Peers(lambda peer: peer.address)


@dataclass(slots=True)
class Posted:
    """A receive that is posted for an announced chunk, and P's `Sent` message about it, if it has come."""

    receive: Receive
    key: str
    chunk: Chunk
    sent: Sent | None = None

    @property
    def arrived(self) -> bool:
        return self.sent is not None and self.receive.done()


@dataclass(eq=False)
class PrefillPeer:
    """One rank of P that this rank has dialed.

    Attributes:
        used: when a request last needed it; -inf: none has.
        table: the peers of this rank.
        hello, plan: None before P's Welcome.
        wires, rows: the form in which its rows travel, by KV group, and our cache in that form; empty before
            P's Welcome.
        unanswered_since: time of the oldest question of ours that it has not answered; None: it has
            answered all.
        reached: whether its address accepted a connection when a request last looked.
        link: number of the link; -1: there is none.
        asked: announced chunks that wait for a receive.
        posted: receives that are posted, the oldest first.
    """

    ctx: Context
    connection: Connection
    dialing: Dialing
    used: float
    table: Peers[str, PrefillPeer] = field(default_factory=prefill_peers, repr=False)
    hello: Hello | None = None
    plan: Plan | None = None
    wires: tuple[Wire, ...] = ()
    rows: tuple[Rectangles, ...] = ()
    unanswered_since: float | None = None
    reached: bool = False
    link: int = -1
    asked: deque[tuple[str, Chunk]] = field(default_factory=deque)
    posted: deque[Posted] = field(default_factory=deque)
    _waited: Chunk | None = None
    _inbound: Inbound | None = None
    _up: bool = False
    """Whether the link's two ends have met, or never will."""
    _overdue: Overdue = field(default_factory=Overdue)

    @property
    def address(self) -> str:
        return self.dialing.address

    @property
    def rank(self) -> int:
        """P's rank; only of one that has been welcomed."""
        assert self.hello is not None
        return self.hello.rank

    @property
    def verify(self) -> bool:
        """Whether this rank or ours wants a checksum of each chunk."""
        return self.hello is not None and verified(self.ctx.hello, self.hello)

    def is_of_the_engine_of(self, first: PrefillPeer) -> bool:
        """Whether both have said the same of their engine; only of two that have been welcomed."""
        assert self.hello is not None and self.plan is not None
        assert first.hello is not None and first.plan is not None
        return (self.hello.addresses, self.plan.digest) == (first.hello.addresses, first.plan.digest)

    def owes(self, edges: Sequence[Edge]) -> Assignment:
        """What this rank owes us with `edges`; only of one that has been welcomed."""
        return Assignment.of(edges, self.wires)

    @property
    def needed(self) -> bool:
        """Whether a request has needed it. If none has, it was dialed ahead, and nobody misses it."""
        return self.used > -inf

    def complain(self, reason: str) -> None:
        """Log what is wrong with this peer."""
        log.log(logging.WARNING if self.needed else logging.DEBUG, "%s", reason)

    @property
    def busy(self) -> bool:
        """Whether the next turn may find something to do here."""
        return bool(
            self.asked or self.posted or (self._inbound is not None and (not self._up or self._inbound.used))
        )

    def stir(self) -> None:
        """Let every turn look at this peer, for as long as it is busy."""
        self.table.watch(self)

    def announced(self, key: str, chunk: Chunk) -> None:
        """This chunk waits for room."""
        self.asked.append((key, chunk))
        self.stir()

    def greet(self, now: float) -> None:
        """Say Hello, if it is time to."""
        if self.dialing.due(now):
            self.ctx.endpoint.redial(self.connection)
            self.ask(msgspec.structs.replace(self.ctx.hello, to=self.address), now)

    def ask(self, message: Hello | Heartbeat, now: float) -> bool:
        """Send a question that a healthy P answers at once; False if the connection is gone."""
        sent = self.ctx.tell(self.connection, message)
        if sent and self.unanswered_since is None:
            self.unanswered_since = now
        return sent

    def welcome(self, message: Welcome) -> None:
        """P has accepted our Hello; judge its. Raises Refused."""
        mine, hello = self.ctx.hello, message.hello
        plan = judge(mine, hello)
        if message.plan != plan.digest or hello.address != self.address:
            raise Refused(
                f"{self.address} answers as {hello.address} with plan {message.plan}, not {plan.digest}: "
                "install the same p2pkv on both sides, and use the addresses that instances advertise"
            )
        self.wires, self.rows = self.ctx.form(hello)
        self.dialing.welcomed()
        self.hello, self.plan = hello, plan

    def lost(self, now: float) -> None:
        """This incarnation is gone, or does not know us any more: drop its link and say Hello again."""
        self.abort()
        self.dialing.lost(now)
        self.unanswered_since = None
        self.hello = self.plan = None
        self.wires = self.rows = ()
        self.greet(now)

    def invited(self, message: LinkInvite, window: int) -> None:
        """Make our end of a new link. Raises LinkError."""
        try:
            self._inbound, blob = self.ctx.links.accept(message.blob, window)
        except LinkError as error:
            self.ctx.tell(self.connection, LinkDown(message.link, str(error)))
            raise
        self.link, self._up = message.link, False
        self.stir()
        self.ctx.tell(self.connection, LinkAccept(message.link, window, blob))

    @property
    def linked(self) -> bool:
        return self._inbound is not None

    @property
    def up(self) -> bool:
        """Whether there is a link whose two ends have met."""
        return self._inbound is not None and self._up

    def abort(self, tell: str = "") -> None:
        """Give the link up, and all that it carried; `tell`: why, for P."""
        if self._inbound is not None:
            if tell and not self.ctx.tell(self.connection, LinkDown(self.link, tell)):
                # A P that was not told would announce chunks for a link that it has alone.
                self.ctx.endpoint.hang_up(self.connection)
            self.ctx.counters.add("links_aborted")
            self._inbound.abort()
        self._inbound, self.link = None, -1
        self.asked.clear()
        self.posted.clear()
        self._overdue.clear()

    def overdue(self, now: float, lease: float) -> bool:
        """Whether P has left the oldest posted receive waiting for a lease; to be asked often."""
        oldest = self.posted[0] if self.posted else None
        with contextlib.suppress(LinkError):  # whoever polls is told
            if oldest is not None and oldest.arrived:
                oldest = None  # it is here, and waits for the step that still writes to its blocks
        return self._overdue.check(oldest, now, lease)

    def poll(self) -> None:
        """Move what can be moved. Raises LinkError."""
        if self._inbound is not None:
            self._inbound.poll()
            if not self._up:
                self._up = True
                with contextlib.suppress(LinkError):  # whoever posts a receive is told
                    self._up = self._inbound.ready()

    @property
    def newest(self) -> Posted | None:
        """The receive that was posted last, of those that wait."""
        return self.posted[-1] if self.posted else None

    def post(self, reserve: int) -> Posted | None:
        """Post a receive for the oldest announced chunk, if the link has room, and the rank's staging has,
        of which `reserve` bytes must stay free. Raises LinkError."""
        if not self.asked or self._inbound is None or not self._inbound.ready():
            return None
        key, chunk = self.asked[0]
        if not self._inbound.share.grants(chunk.nbytes, reserve):
            return None
        try:
            receive = self._inbound.post(chunk.nbytes)
        except ValueError as error:
            raise LinkError(f"P announced a chunk that can never be received: {error}") from None
        if receive is None:
            return None
        self.asked.popleft()
        posted = Posted(receive, key, chunk)
        self.posted.append(posted)
        return posted

    def wait(self) -> None:
        """There is no room for the oldest announced chunk: count that, once."""
        if self._inbound is not None and self._inbound.ready() and self.asked[0][1] is not self._waited:
            self._waited = self.asked[0][1]
            self.ctx.counters.add("chunks_waited")

    def note(self, message: Sent) -> None:
        """P has sent a chunk: it belongs to the oldest posted receive without a `Sent`.

        Raises LinkError if P names another chunk: which receive holds what is then unknown.
        """
        if message.link != self.link:
            return
        posted = next((posted for posted in self.posted if posted.sent is None), None)
        name = (message.key, message.attempt, message.chunk)
        if posted is None or (posted.key, posted.chunk.attempt, posted.chunk.chunk) != name:
            raise LinkError(f"P has sent chunk {message.chunk} of {message.key} out of turn")
        posted.sent = message


@dataclass(frozen=True, slots=True)
class Check:
    """The checksum of the bytes that arrived, and P's message with its own."""

    digest: Checksum
    sent: Sent

    @property
    def refuted(self) -> bool:
        """Whether ours is computed by now, and differs from P's."""
        return self.digest.known and self.differs()

    def differs(self) -> bool:
        """Whether ours differs from P's. Call it only once the device has computed ours."""
        return self.digest.value() != self.sent.digest


@dataclass(frozen=True, eq=False, slots=True)
class Arrived:
    """One chunk that has arrived.

    Attributes:
        peer, rank: who sent it. By the time it is written to our blocks the peer may have disconnected, or
            have been replaced by another incarnation.
        buffer: uint8 [nbytes].
        rows: our cache in the form that the bytes have, by KV group.
        check: None where no checksum is wanted.
    """

    peer: PrefillPeer
    rank: int
    chunk: Chunk
    buffer: torch.Tensor
    rows: tuple[Rectangles, ...]
    check: Check | None


# Peers with nothing under way.


IDLE_BEATS = 2
"""Heartbeats without a transfer after which P may close a link. D waits for one more, since P decides by D's
heartbeats."""

LOOK_SECONDS = 0.25
"""Seconds between two looks at all peers; the turns between look only at those that have something to do."""

FORGOTTEN_SECONDS = 180.0
"""Seconds without a transfer after which P closes its end: D has hung up by then, and P is not told."""

IDLE_REASON = "it is idle, and there are more than max_links links; the next request builds it again"


def surplus(
    linked: Iterable[_Peer],
    most: int,
    idle: Callable[[_Peer], bool],
    used: Callable[[_Peer], float | tuple[bool, float]],
) -> list[_Peer]:
    """The peers whose links to close, so that at most `most` of `linked` are left: idle ones, the longest
    unused first, and before them those that no request has used.

    A peer that is not idle keeps its link, so more than `most` may be left under load.
    """
    peers = list(linked)
    excess = len(peers) - most
    if excess <= 0:
        return []
    return sorted(filter(idle, peers), key=used)[:excess]
