"""P's view of the ranks of D: the connection to each, the link to it, and what is queued on that link.

What happens to them is appended to the rank's effects.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice, takewhile
from operator import attrgetter

from p2pkv.control.endpoint import Connection
from p2pkv.engine.context import Context, log
from p2pkv.engine.effects import Effect
from p2pkv.engine.peers import IDLE_BEATS, IDLE_REASON, Peers, StallTimer, log_connected
from p2pkv.kv.cache import Rectangles
from p2pkv.kv.checksum import Checksum
from p2pkv.links.base import LinkError, Outbound, Send
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Assignment, Refused, negotiate, other_versions, unfit, verified
from p2pkv.protocol.state_machine import Transmit

DecodeRank = tuple[str, int]
"""A rank of a D: the address of the engine's rank 0, and the rank."""

FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""Seconds between tries to build a link that keeps failing, the first after one at once."""

MAX_PEERS = 4096
"""The most ranks of D in the table. Beyond it an idle one is forgotten; it sends Hello again."""

MAX_UNCONFIRMED = 4096
"""Transfers to one rank of D whose end a rank that stops waits for; older ones are forgotten."""

MAX_ORDERS = 4096
"""The most grants of one rank of D that may wait here although they name a prompt that P does not have."""

FORGOTTEN_SECONDS = 180.0
"""Seconds without a transfer after which P forgets a rank: D has hung up by then, and P does not know."""


class DecodeGone(Effect, frozen=True, eq=False):
    """This incarnation of a rank of D is gone, and is not in the table any more."""

    peer: DecodePeer
    reason: str


class DecodeLinked(Effect, frozen=True, eq=False):
    """The link to this rank is up."""

    peer: DecodePeer


class DecodeLinkLost(Effect, frozen=True, eq=False):
    """The link to this rank is gone, with all that was queued on it."""

    peer: DecodePeer
    reason: str


class FillSend(Effect, frozen=True, eq=False):
    """There is room for the send that D has granted: gather it, and call `commit`."""

    peer: DecodePeer
    key: str
    order: Transmit
    send: Send

    @property
    def nbytes(self) -> int:
        return self.order.grant.nbytes


class SendTaken(Effect, frozen=True, eq=False):
    """D has taken so many bytes of this prompt."""

    key: str
    nbytes: int


class SendsDue(Effect, frozen=True, eq=False):
    """The link may launch these sends together: send D their `Sent` messages; then it launches them."""

    peer: DecodePeer
    flights: list[PendingSend]


@dataclass(eq=False, slots=True)
class PendingSend:
    """A committed send that D has not taken yet. `digest`: its checksum; None: it has none.

    Its `Sent` message waits for the checksum (`summed`), for those before it, and until the link may launch
    the send (`due`: it goes out in this turn). `closes`: it is the last of so many that are launched
    together; 0: it is not the last, or not due.
    """

    send: Send
    key: str
    order: Transmit
    filler: bool
    digest: Checksum | None
    summed: bool
    due: bool = False
    closes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of KV."""
        return 0 if self.filler else self.order.grant.nbytes


@dataclass(eq=False)
class OutboundLink:
    """The link to one rank of D: built, used, given up and built again; and what is queued on it.

    Attributes:
        number, since: of the link, or of the try to build one; when D was invited to it.
        window: bytes that D can take on it at a time.
        parked: it was closed as idle; the next transfer that D names builds it again.
        orders: granted sends that wait for a buffer. flights: sends that D has not taken yet.
        pending: those of them whose `Sent` messages have not gone out.
    """

    ctx: Context
    number: int = 0
    window: int = 0
    since: float = 0.0
    linked: bool = False
    parked: bool = False
    orders: deque[tuple[str, Transmit]] = field(default_factory=deque)
    flights: deque[PendingSend] = field(default_factory=deque)
    pending: deque[PendingSend] = field(default_factory=deque)
    _invitation: bytes | None = None
    """What D was invited with; None: it was not."""
    _outbound: Outbound | None = None
    _next: float = 0.0
    _pause: float = 0.0
    _waited: Transmit | None = None
    _overdue: StallTimer = field(default_factory=StallTimer)

    @property
    def invited(self) -> bool:
        """Whether D has been invited: the link is up, or may come up."""
        return self._invitation is not None

    @property
    def accepted(self) -> bool:
        """Whether D has answered the invitation: the link is up, or the two ends bring it up."""
        return self._outbound is not None

    @property
    def busy(self) -> bool:
        return bool(self.orders or self.flights or self.pending)

    @property
    def limit(self) -> int:
        """The most bytes of a chunk; 0 while it is not known."""
        return self.window // 2 if self.linked else 0

    @property
    def used(self) -> int:
        return self._outbound.used if self._outbound is not None else 0

    def invite(self, now: float) -> m.LinkInvite | None:
        """Begin a link if there is none, and it is time to try again; `accept` follows. Raises LinkError."""
        if self.invited or self.parked or now < self._next:
            return None
        self._invitation = b""
        self.number += 1
        self._invitation = self.ctx.links.invite()
        self.since = now
        return m.LinkInvite(self.number, self._invitation)

    def accept(self, message: m.LinkAccept) -> None:
        """D has made its end: make ours. Does nothing if that invitation was given up. Raises LinkError."""
        if message.link == self.number and self._invitation is not None and not self.accepted:
            self._outbound = self.ctx.links.complete(self._invitation, message.blob)
            self.window = message.window

    def carries(self, number: int) -> bool:
        """Whether what is granted on the link of this number is still to be sent. D may have granted it
        before it learned that the link was given up; the number changes with the next invitation only."""
        return number == self.number and self.accepted

    def abort(self, now: float) -> None:
        """Give the link up, and all that it carried. Each new try waits longer."""
        if self._outbound is not None:
            self.ctx.counters.add("links_aborted")
            self._outbound.abort()
        self._outbound, self.linked, self._invitation = None, False, None
        self._next = now + self._pause
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LAST_PAUSE)
        self.orders.clear()
        self.flights.clear()
        self.pending.clear()
        self._overdue.clear()

    def park(self, now: float) -> None:
        """The link was given up: it is built again, at once, when D names a transfer."""
        self.parked, self._next, self._pause = True, now, 0.0

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

    def taken(self) -> Iterator[PendingSend]:
        """Sends that D has taken since the last call, in order. Raises LinkError."""
        while self.flights and self.flights[0].send.done():
            self._pause = 0.0
            yield self.flights.popleft()

    def next_send(self) -> tuple[str, Transmit, Send] | None:
        """The oldest order and a buffer for it, if there is one of each. Raises LinkError."""
        if not self.orders or self._outbound is None or not self.linked:
            return None
        key, order = self.orders[0]
        if order.grant.nbytes > self.window:
            raise LinkError(f"D grants {order.grant.nbytes} bytes in a window of {self.window}")
        try:
            send = self._outbound.reserve(order.grant.nbytes, order.grant.slot)
        except ValueError as error:
            raise LinkError(f"D grants a message that can never be sent: {error}") from None
        if send is None:
            if order is not self._waited:
                self._waited = order
                self.ctx.counters.add("chunks_waited")
            return None
        self.orders.popleft()
        return key, order, send

    @property
    def next_bytes(self) -> int:
        """Bytes of the oldest order; 0 if there is none."""
        return self.orders[0][1].grant.nbytes if self.orders else 0

    def commit(self, flight: PendingSend) -> None:
        """This send is full. Raises LinkError."""
        flight.send.commit()
        self.flights.append(flight)
        self.pending.append(flight)

    def next_due(self, together: bool) -> list[PendingSend]:
        """Make the oldest pending sends due, as many as the link may launch together now, and return them.
        `together`: D can launch several together, too. Raises LinkError."""
        before = sum(1 for _ in takewhile(attrgetter("due"), self.pending))
        waiting = len(self.pending) - before
        if not waiting or not self.pending[before].summed or self._outbound is None:
            return []
        count = self._outbound.due(before, waiting if together else 1)
        due = [*takewhile(attrgetter("summed"), islice(self.pending, before, before + count))]
        for flight in due:
            flight.due = True
        if due:
            due[-1].closes = len(due)
        return due

    @property
    def announcing(self) -> bool:
        """Whether a send is due whose `Sent` message has not gone out."""
        return bool(self.pending) and self.pending[0].due

    @property
    def idle(self) -> bool:
        """Whether no send has been launched that D has not taken yet."""
        return len(self.flights) == len(self.pending)

    def launch(self) -> None:
        """The `Sent` message of the oldest send has just gone out: launch that send; of several that go
        together all, once their last `Sent` is out. Raises LinkError."""
        if self.announcing and self._outbound is not None and (count := self.pending.popleft().closes):
            self._outbound.launch(count)


@dataclass(eq=False)
class DecodePeer:
    """One incarnation of a rank of D that has sent Hello.

    Attributes:
        assignment: the part of each prompt's KV that this rank sends it; None: nothing.
        rows: our cache in the form in which that travels, by KV group.
        served: the ranks of its engine that this rank sends KV to.
        verify: whether this rank or ours wants a checksum of each chunk.
        fresh: it has sent nothing but Hello yet.
        wanted: when D last named a transfer, or sent Hello. named: it has named one.
        last_alive: when its last heartbeat, or answer to an invitation, came.
        burst: how many more sends may be filled in this turn.
        unconfirmed: transfers (key, attempt) that D was sent a part of, and whose end it has not confirmed.
    """

    connection: Connection
    hello: m.Hello
    served: frozenset[int]
    rows: tuple[Rectangles, ...]
    assignment: Assignment | None
    link: OutboundLink
    verify: bool = False
    wanted: float = 0.0
    fresh: bool = True
    named: bool = False
    last_alive: float = 0.0
    burst: int = 0
    unconfirmed: dict[tuple[str, int], None] = field(default_factory=dict)
    _to_launch: list[int] = field(default_factory=list)
    """The numbers of the links of sends whose `Sent` messages are held."""

    def __post_init__(self) -> None:
        self.key: DecodeRank = (self.hello.addresses[0], self.hello.rank)

    @property
    def address(self) -> str:
        return self.hello.address

    @property
    def settled(self) -> bool:
        """Whether nothing is awaited: the link is up, or none is needed now, and nothing is on it."""
        link = self.link
        return (self.assignment is None or link.linked or link.parked) and not link.busy

    def send(self, message: m.AnyMessage, now: float) -> bool:
        if isinstance(message, m.Sent) and not message.filler:
            self.unconfirmed[message.key, message.attempt] = None
            if len(self.unconfirmed) > MAX_UNCONFIRMED:
                del self.unconfirmed[next(iter(self.unconfirmed))]
        elif isinstance(message, m.Failed):
            self.confirmed(message.key, message.attempt)
        sent = self.connection.hold(m.encode(message))
        if sent and isinstance(message, m.Sent):
            self._to_launch.append(message.link)
        return sent

    def flush(self) -> bool:
        """Launch sends only when their `Sent` messages have gone out, since a launch may return only when D
        has launched its receive (CUDA_LAUNCH_BLOCKING=1)."""
        if not self.connection.flush():
            return False
        links, self._to_launch = self._to_launch, []
        with contextlib.suppress(LinkError):  # the next poll raises it
            for number in links:
                if number == self.link.number:
                    self.link.launch()
            if links:
                self.go_on()
        return True

    def confirmed(self, key: str, attempt: int) -> None:
        """D has all of this transfer, or wants nothing more of it."""
        self.unconfirmed.pop((key, attempt), None)

    def go_on(self) -> None:
        """Send D the `Sent` messages of the sends that the link may launch, and fill the next send. If
        nothing is on the wire and the fill would hold up this thread, it comes only once those messages are
        out, so that D writes one chunk while the next is gathered. Raises LinkError."""
        ctx = self.link.ctx
        while due := self.link.next_due(self.hello.together is True):
            ctx.effects.append(SendsDue(self, due))
        if self.link.announcing and ctx.blocks_thread(self.link.next_bytes, self.link.idle):
            return
        if self.burst and (found := self.link.next_send()) is not None:
            self.burst -= 1
            ctx.effects.append(FillSend(self, *found))

    def alive(self, wants: bool, now: float) -> None:
        """D has sent something. `wants`: it has named a transfer, so a parked link may be built again."""
        self.fresh, self.last_alive = False, now
        if wants:
            self.wanted, self.named = now, True
            self.link.parked = False


class DecodePeers(Peers[DecodeRank, DecodePeer]):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self._ctx = context
        self._used: Callable[[DecodePeer], bool] = lambda peer: False
        self.leaving = ""
        context.counters.add_gauges(
            staging_bytes=lambda: sum(peer.link.used for peer in self),
            sends_under_way=lambda: sum(
                len(peer.link.orders) + max(len(peer.link.flights), len(peer.link.pending)) for peer in self
            ),
            peers=lambda: len(self),
            links=lambda: sum(1 for peer in self if peer.link.linked),
        )

    def used_by(self, used: Callable[[DecodePeer], bool]) -> None:
        """`used`: whether a transfer needs the link to a rank."""
        self._used = used

    # Their messages.

    def hello(self, connection: Connection, hello: m.Hello | m.UnknownHello, now: float) -> None:
        mine = self._ctx.hello_for("P")
        try:
            if self.leaving:
                raise Refused(self.leaving)
            if isinstance(hello, m.UnknownHello):
                raise Refused(other_versions(mine, hello))
            if hello.to != mine.address:
                raise Refused(
                    f"{hello.address} dialed {hello.to}, but this rank is {mine.address}: "
                    "use the address that the instance advertises"
                )
            plan = negotiate(mine, hello)
            formats, rows = self._ctx.form(hello)
        except Refused as refused:
            reason = self.leaving or unfit(mine.address, hello.address, refused)
            log.warning("refused the rank of D at %s: %s", hello.address, reason)
            self._ctx.counters.add("messages_refused")
            self._ctx.answer(connection, m.Refuse(hello.incarnation, reason))
            return
        connection.takes_several(hello.several is True)
        self._ctx.answer(connection, m.Welcome(hello.incarnation, mine, plan.digest))
        old = self.get((hello.addresses[0], hello.rank))
        if old is not None and old.connection is connection and old.fresh and old.hello == hello:
            return
        if old is not None:
            self._drop(old, f"{hello.address} is gone: it has restarted or reconnected", now)
        if isinstance(connection.tag, DecodePeer) and connection.tag in self:
            self._drop(connection.tag, f"{connection.tag.address} is gone: another has its connection", now)
        if len(self) >= MAX_PEERS:
            peers = list(self)
            idle = next((peer for peer in peers if not peer.link.busy), peers[0])
            self._drop(idle, f"{idle.address} is forgotten: {MAX_PEERS} ranks of D are connected", now)
        edges = plan.from_source(mine.rank)
        owed = [edge for edge in edges if edge.target == hello.rank]
        # D may have come ahead of any request: no other link has to go for that.
        full = sum(1 for peer in self if peer.link.invited) >= self._ctx.options.max_links
        link = OutboundLink(self._ctx, number=old.link.number if old is not None else 0, parked=full)
        served = frozenset(edge.target for edge in edges)
        assignment = Assignment.of(owed, formats) if owed else None
        verify = verified(mine, hello)
        peer = DecodePeer(connection, hello, served, rows, assignment, link, verify, wanted=now)
        connection.assign(peer)
        self.add(peer)
        log_connected(hello, formats, peer.verify)
        self.invite(peer, now)

    def accept(self, peer: DecodePeer, message: m.LinkAccept, now: float) -> None:
        peer.alive(False, now)
        try:
            peer.link.accept(message)
        except LinkError as error:
            self.lose_link(peer, f"no link to {peer.address}: {error}", now)

    def link_down(self, peer: DecodePeer, message: m.LinkDown, now: float) -> None:
        peer.alive(False, now)
        if message.link != peer.link.number or not peer.link.invited:
            return
        if peer.link.linked and self.idle(peer, now):
            self._park(peer, now)
        else:
            self.lose_link(peer, f"{peer.address} aborted the link: {message.reason}", now, notify=False)

    # The links.

    def invite(self, peer: DecodePeer, now: float) -> None:
        """Begin a link to this rank of D, if there is none and it is time to try again."""
        self.activate(peer)
        if not self._ctx.steps.serving:
            return
        try:
            message = peer.link.invite(now) if peer.assignment is not None else None
        except LinkError as error:
            self.lose_link(peer, f"no link to {peer.address}: {error}", now, notify=False)
            return
        if message is not None:
            self._ctx.answer(peer.connection, message)

    def lose_link(self, peer: DecodePeer, reason: str, now: float, notify: bool = True) -> None:
        """Give up this link; `notify`: whether D must be sent a LinkDown."""
        log.log(logging.WARNING if peer.named else logging.INFO, "%s", reason)
        if notify:
            self._ctx.answer(peer.connection, m.LinkDown(peer.link.number, reason))
        self._abort(peer, now)
        self._ctx.effects.append(DecodeLinkLost(peer, reason))

    def rebuild(self, peer: DecodePeer, now: float) -> None:
        """The link was lost: begin another, unless neither side has a use for it."""
        peer.link.parked = self.idle(peer, now)  # else a dead D would be invited for ever
        self.invite(peer, now)

    def idle(self, peer: DecodePeer, now: float) -> bool:
        """Whether neither side has a use for this link now."""
        # D that has named no transfer may have come ahead of any request.
        quiet = not peer.named or now - peer.wanted > IDLE_BEATS * self._ctx.beat
        return quiet and not peer.link.busy and not self._used(peer)

    def _abort(self, peer: DecodePeer, now: float) -> None:
        peer.link.abort(now)
        peer.unconfirmed.clear()
        self.activate(peer)

    def _park(self, peer: DecodePeer, now: float, reason: str = "") -> None:
        """Close the idle link until D names a transfer; `reason`: for D, which closed it itself if ""."""
        if reason:
            self._ctx.answer(peer.connection, m.LinkDown(peer.link.number, reason))
        self._abort(peer, now)
        peer.link.park(now)

    def order(self, peer: DecodePeer, key: str, order: Transmit, now: float, known: bool = True) -> None:
        """D has granted this send. `known`: P has this prompt."""
        if not peer.link.carries(order.grant.link):
            return
        if not known and len(peer.link.orders) >= MAX_ORDERS:
            self.lose_link(peer, f"{peer.address} has {MAX_ORDERS} grants waiting, and grants more", now)
            return
        peer.link.orders.append((key, order))
        self._active[peer] = None

    def poll(self, now: float) -> None:
        effects = self._ctx.effects
        for peer in self.active:
            was_settled, link = peer.settled, peer.link
            try:
                if link.poll():
                    effects.append(DecodeLinked(peer))
                for flight in link.taken():
                    if flight.nbytes:
                        effects.append(SendTaken(flight.key, flight.nbytes))
                peer.burst = self._ctx.burst(link.next_bytes)
                peer.go_on()
            except LinkError as error:
                self._broken(peer, error, now)
            if was_settled and peer.settled:
                self._active.pop(peer, None)

    @property
    def moving(self) -> bool:
        return any(peer.link.busy for peer in self._active)

    def commit(self, peer: DecodePeer, flight: PendingSend, now: float) -> None:
        try:
            peer.link.commit(flight)
            peer.go_on()
        except LinkError as error:
            self._broken(peer, error, now)

    def summed(self, peer: DecodePeer, flight: PendingSend, now: float) -> None:
        """The checksum of this send is known, and those of all before it."""
        flight.summed = True
        try:
            peer.go_on()
        except LinkError as error:
            self._broken(peer, error, now)

    def _broken(self, peer: DecodePeer, error: LinkError, now: float) -> None:
        self.lose_link(peer, f"the link to {peer.address} broke: {error}", now)

    # Time, and the end.

    def check(self, now: float) -> None:
        """End links that stand still or do not come up."""
        lease = self._ctx.options.lease_seconds
        for peer in self.active:
            link, waited = peer.link, now - peer.link.since
            if link.overdue(now, lease):
                reason = f"{peer.address} did not answer in time: it has taken nothing for {lease:g} s"
                self.lose_link(peer, reason, now)
            elif link.invited and not link.linked and waited > self._patience_with(peer, now):
                reason = f"the link to {peer.address} did not come up in time: D was asked {waited:.0f} s ago"
                self.lose_link(peer, reason, now)
            else:
                self.invite(peer, now)

    @property
    def busy(self) -> bool:
        return any(not peer.settled for peer in self.active)

    def _patience_with(self, peer: DecodePeer, now: float) -> float:
        """Seconds that a link may take to come up; twice as many for a D that is alive and may be busy."""
        lease = self._ctx.options.lease_seconds
        patience = 2 * lease if now - peer.last_alive < lease else lease
        return max(patience, self._ctx.links.build_seconds) if peer.link.accepted else patience

    def look(self, now: float) -> None:
        """Close idle links; let the next turn look at all ranks. Call it several times a second."""
        linked, most = [peer for peer in self if peer.link.linked], self._ctx.options.max_links
        idle = (peer for peer in linked if self.idle(peer, now))
        # The longest unused first, and before them those that no request has used.
        for peer in nsmallest(len(linked) - most, idle, lambda peer: (peer.named, peer.wanted)):
            log.info("closing the link to %s: %s", peer.address, IDLE_REASON)
            self._park(peer, now, IDLE_REASON)
        forgotten = max(FORGOTTEN_SECONDS, 2 * self._ctx.options.lease_seconds)
        for peer in self:
            if now - max(peer.wanted, peer.last_alive) > forgotten and self.idle(peer, now):
                self._ctx.answer(peer.connection, m.LinkDown(peer.link.number, "it has been idle for long"))
                self._drop(peer, f"{peer.address} has sent nothing for {forgotten:.0f} s", now)
            else:
                self.activate(peer)

    def leave(self, reason: str) -> None:
        """This rank stops: no rank of D is accepted any more."""
        self.leaving = reason

    def disconnected(self, peer: DecodePeer, now: float) -> None:
        if peer in self:
            self._drop(peer, f"{peer.address} is gone: the connection to it has ended", now)

    def _drop(self, peer: DecodePeer, reason: str, now: float) -> None:
        """This incarnation of a rank of D is gone: forget it."""
        self._abort(peer, now)
        self.remove(peer)
        if peer.connection.tag is peer:
            peer.connection.assign(None)
        self._ctx.effects.append(DecodeGone(peer, reason))

    @property
    def unfinished(self) -> bool:
        """Whether something is on its way to a D, or may still be."""
        return any(peer.link.busy or peer.unconfirmed for peer in self)

    def close(self) -> None:
        for peer in self:
            self._ctx.answer(peer.connection, m.LinkDown(peer.link.number, "P is shutting down"))
            self._abort(peer, 0.0)
