"""D's view of the ranks of P: the connection to each, the link from it, and what is to come on that link.

What happens to them is appended to the rank's effects.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from p2pkv.control.endpoint import Connection
from p2pkv.engine.context import Context, log
from p2pkv.engine.effects import Effect
from p2pkv.engine.peers import IDLE_BEATS, IDLE_REASON, Peers, StallTimer, log_connected
from p2pkv.kv.cache import Rectangles
from p2pkv.links.base import Inbound, LinkError, Receive
from p2pkv.pairing import Address
from p2pkv.plan import Edge, Plan
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import DialState, Refused, RowFormat, negotiate, unfit, verified

IDLE_SECONDS = 60.0
"""Seconds without a request after which the connection to a rank of P is closed."""


class PrefillWelcomed(Effect, frozen=True, eq=False):
    """This rank of P has accepted our Hello."""

    peer: PrefillPeer


class PrefillLost(Effect, frozen=True, eq=False):
    """This incarnation of a rank of P is gone, or does not know us any more."""

    peer: PrefillPeer
    reason: str


class PrefillFailed(Effect, frozen=True, eq=False):
    """The requests of this rank of P fail; with `only_loading` only those that load."""

    peer: PrefillPeer
    reason: str
    only_loading: bool = False


class ReceivePosted(Effect, frozen=True, eq=False):
    """A receive is posted for this chunk, at `slot` of the link of that number: grant it."""

    peer: PrefillPeer
    key: str
    chunk: m.Chunk
    link: int
    slot: int


class PostRemaining(Effect, frozen=True, eq=False):
    """The first of several receives is posted, and its grant is out: post those of the other chunks."""

    peer: PrefillPeer


class ReceiveDone(Effect, frozen=True, eq=False):
    """The oldest receive is complete: write its bytes, and call `landed`; or leave it for the next turn."""

    peer: PrefillPeer
    receiving: PostedReceive

    @property
    def nbytes(self) -> int:
        return self.receiving.chunk.nbytes


class AbortPrefillLink(Effect, frozen=True, eq=False):
    """Give up the link of that number, once P has been sent what was decided before."""

    peer: PrefillPeer
    link: int
    reason: str


class WaitingChunk(NamedTuple):
    """A chunk that waits for a receive. `reserve`: bytes of the rank's staging that must stay free then."""

    key: str
    chunk: m.Chunk
    reserve: int


@dataclass(eq=False, slots=True)
class PostedReceive:
    """A receive that is posted for an announced chunk, and P's `Sent` message, if it has come. `live`: its
    link is there, and the bytes have not been read yet."""

    receive: Receive
    key: str
    chunk: m.Chunk
    sent: m.Sent | None = None
    live: bool = True

    @property
    def arrived(self) -> bool:
        return self.sent is not None and self.receive.done()


@dataclass(eq=False)
class InboundLink:
    """The link from one rank of P, if there is one (`number` is -1 if not), and what is on it: announced
    chunks that wait for a receive, and receives that are posted, the oldest first. `burst`: how many more of
    these may land in this turn."""

    ctx: Context
    number: int = -1
    waiting: deque[WaitingChunk] = field(default_factory=deque)
    posted: deque[PostedReceive] = field(default_factory=deque)
    burst: int = 0
    _together: int = 0
    """How many receives are launched together next; `_following`: how many of them have no `Sent` yet."""
    _following: int = 0
    _waited: m.Chunk | None = None
    _inbound: Inbound | None = None
    _up: bool = False
    """Whether the link's two ends have met, or never will."""
    _overdue: StallTimer = field(default_factory=StallTimer)

    @property
    def linked(self) -> bool:
        return self._inbound is not None

    @property
    def up(self) -> bool:
        """Whether there is a link whose two ends have met."""
        return self._inbound is not None and self._up

    @property
    def starves(self) -> bool:
        """Whether a chunk of a request with blocks waits for room, while this link holds none."""
        return self.up and bool(self.waiting) and not (self.posted or self.waiting[0].reserve)

    @property
    def busy(self) -> bool:
        """Whether the next turn may find something to do here."""
        if self.waiting or self.posted:
            return True
        return self._inbound is not None and (not self._up or self._inbound.used > 0)

    def accept(self, message: m.LinkInvite, window: int) -> bytes:
        """Make our end of a new link; its blob. Raises LinkError."""
        self._inbound, blob = self.ctx.links.accept(message.blob, window)
        self.number, self._up = message.link, False
        return blob

    def abort(self) -> None:
        if self._inbound is not None:
            self.ctx.counters.add("links_aborted")
            self._inbound.abort()
        self._inbound, self.number = None, -1
        for each in self.posted:
            each.live = False
        self.waiting.clear()
        self.posted.clear()
        self._following = 0
        self._overdue.clear()

    def overdue(self, now: float, lease: float) -> bool:
        """Whether P has left the oldest posted receive waiting for a lease; to be asked often."""
        oldest = self.posted[0] if self.posted else None
        with contextlib.suppress(LinkError):  # the next poll raises it
            if oldest is not None and oldest.arrived:
                oldest = None  # it is here, and waits for the step that still writes to its blocks
        return self._overdue.check(oldest, now, lease)

    def poll(self) -> None:
        if self._inbound is not None:
            self._inbound.poll()
            if not self._up:
                self._up = True
                with contextlib.suppress(LinkError):  # the next `post` raises it
                    self._up = self._inbound.ready()

    def post(self) -> PostedReceive | None:
        """Post a receive for the next announced chunk, if there is room: chunks of requests that have blocks
        go before those that no request has asked for yet."""
        if self._inbound is None or not self.waiting:
            return None
        if self.waiting[0].reserve:
            admitted = next((each for each in self.waiting if not each.reserve), None)
            if admitted is not None:
                self.waiting.remove(admitted)
                self.waiting.appendleft(admitted)
        first = self.waiting[0]
        try:
            receive = self._inbound.take(first.chunk.nbytes, first.reserve)
        except ValueError as error:
            raise LinkError(f"P announced a chunk that can never be received: {error}") from None
        if receive is None:
            if first.chunk is not self._waited and self.up:
                self._waited = first.chunk
                self.ctx.counters.add("chunks_waited")
            return None
        self.waiting.popleft()
        receiving = PostedReceive(receive, first.key, first.chunk)
        self.posted.append(receiving)
        return receiving

    def admitted(self, key: str) -> None:
        """This request has blocks now: its chunks may use all of the staging."""
        self.waiting = deque(each._replace(reserve=0) if each.key == key else each for each in self.waiting)

    def drop_waiting(self, key: str) -> None:
        """This transfer has ended: post no receive for its chunks any more."""
        self.waiting = deque(each for each in self.waiting if each.key != key)

    def sent(self, message: m.Sent) -> None:
        """P launches a send, so launch the oldest posted receive without a `Sent`; of several that go
        together all, once the last `Sent` has come. Raises LinkError if P names another chunk than that
        receive's: which receive holds what is then unknown."""
        if message.link != self.number:
            return
        posted = next((posted for posted in self.posted if posted.sent is None), None)
        name = (message.key, message.attempt, message.chunk)
        if posted is None or (posted.key, posted.chunk.attempt, posted.chunk.chunk) != name:
            raise LinkError(f"P has sent chunk {message.chunk} of {message.key} out of turn")
        posted.sent = message
        assert self._inbound is not None
        if not self._following:
            self._following = self._together = message.together or 1
        self._following -= 1
        if not self._following:
            self._inbound.launch(self._together)

    def landed(self, receiving: PostedReceive) -> bool:
        """The bytes of the oldest receive have been read; False if the link is gone."""
        if not receiving.live:
            return False
        assert self.posted[0] is receiving
        self.posted.popleft()
        receiving.live = False
        receiving.receive.release()
        return True


@dataclass(eq=False)
class PrefillPeer:
    """One rank of P that this rank has dialed.

    Attributes:
        used: when a request last needed it; -inf: none has.
        hello, plan: None before P's Welcome; until then what follows is empty.
        formats, rows: the form in which its rows travel, by KV group, and our cache in that form.
        verify: whether this rank or P's wants a checksum of each chunk.
        unanswered_since: time of the oldest question of ours that it has not answered; None: it has
            answered all.
        reached: whether its address accepted a connection when a request last looked.
        greeted: a Hello has gone out since it was dialed, or lost.
    """

    ctx: Context
    address: str
    connection: Connection
    dialing: DialState
    link: InboundLink
    used: float = -inf
    hello: m.Hello | None = None
    plan: Plan | None = None
    formats: tuple[RowFormat, ...] = ()
    rows: tuple[Rectangles, ...] = ()
    verify: bool = False
    unanswered_since: float | None = None
    reached: bool = False
    greeted: bool = False

    def __post_init__(self) -> None:
        self.key = self.address

    @property
    def rank(self) -> int:
        """P's rank; only of one that has been welcomed."""
        assert self.hello is not None
        return self.hello.rank

    @property
    def welcomed(self) -> bool:
        """Whether it has accepted our Hello, and knows us still."""
        return self.dialing.open and self.hello is not None and self.plan is not None

    @property
    def needed(self) -> bool:
        """Whether a request has needed it. If none has, it was dialed ahead, and nothing depends on it."""
        return self.used > -inf

    def same_engine_as(self, first: PrefillPeer) -> bool:
        """Whether both describe their engine alike; only of two that have been welcomed."""
        assert self.hello is not None and self.plan is not None
        assert first.hello is not None and first.plan is not None
        return (self.hello.addresses, self.plan.digest) == (first.hello.addresses, first.plan.digest)

    def ranks(self) -> tuple[dict[int, list[Edge]], dict[int, Address]]:
        """The edges from its engine to this rank, by the engine's ranks, and the addresses of those that
        need to know of a request; only of one that has been welcomed."""
        assert self.plan is not None and self.hello is not None
        mine, plan, addresses = self.ctx.hello.rank, self.plan, self.hello.addresses
        edges: dict[int, list[Edge]] = {}
        for edge in plan.to_target(mine):
            edges.setdefault(edge.source, []).append(edge)
        # A rank of P that sends nothing to any rank must still learn that its blocks are free: one rank of D
        # sends it that.
        idle = [rank for rank in range(len(addresses)) if not plan.from_source(rank)]
        idle = [rank for rank in idle if rank % plan.decode[0].world == mine]
        return edges, {rank: Address.parse(addresses[rank]) for rank in [*edges, *idle]}

    def send(self, message: m.AnyMessage, now: float) -> bool:
        """A healthy P answers Hello and Heartbeat at once."""
        sent = self.connection.hold(m.encode(message))
        if sent and self.unanswered_since is None and isinstance(message, m.Heartbeat | m.Hello):
            self.unanswered_since = now
        if isinstance(message, m.Heartbeat) and message.transfers:
            self.used = now
        return sent

    def flush(self) -> bool:
        return self.connection.flush()

    def log_trouble(self, reason: str) -> None:
        log.log(logging.WARNING if self.needed else logging.DEBUG, "%s", reason)

    def send_hello(self, now: float) -> None:
        if due := self.dialing.due(now):
            self.ctx.endpoint.redial(self.connection)
        # The first goes out as soon as the connection is up, which may take long where both are busy.
        if due or not (self.greeted or self.dialing.open or self.dialing.reason):
            self.greeted = self.send(replace(self.ctx.hello_for("D"), to=self.address), now)
            self.flush()

    def welcome(self, message: m.Welcome) -> None:
        """P has accepted our Hello; look at its. Raises Refused."""
        mine, hello = self.ctx.hello_for("D"), message.hello
        plan = negotiate(mine, hello)
        if message.plan != plan.digest or hello.address != self.address:
            raise Refused(
                f"{self.address} answers as {hello.address} with plan {message.plan}, not {plan.digest}: "
                "install the same p2pkv on both sides, and use the addresses that instances advertise"
            )
        self.formats, self.rows = self.ctx.form(hello)
        self.dialing.welcomed()
        self.connection.takes_several(hello.several is True)
        self.hello, self.plan, self.verify = hello, plan, verified(mine, hello)

    def lost(self, now: float) -> None:
        """This incarnation is gone, or does not know us any more: drop its link and send Hello again."""
        self.link.abort()
        self.connection.takes_several(False)
        self.dialing.lost(now)
        self.greeted = False
        self.unanswered_since = None
        self.hello = self.plan = None
        self.formats = self.rows = ()
        self.send_hello(now)

    def abort(self, reason: str) -> None:
        """Give up the link; `reason`: for P."""
        if self.link.linked and not self.ctx.answer(self.connection, m.LinkDown(self.link.number, reason)):
            # A P that does not know would announce chunks for a link that it has alone.
            self.ctx.endpoint.hang_up(self.connection)
        self.link.abort()


class PrefillPeers(Peers[str, PrefillPeer]):
    """The ranks of P, by address: dialed when a request needs them, or ahead of requests."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._ctx = context
        self.window = max(1, context.options.staging_bytes // 2)
        context.counters.add_gauges(
            staging_bytes=lambda: context.links.staging.receives,
            receives_posted=lambda: sum(len(peer.link.posted) for peer in self),
            receives_asked=lambda: sum(len(peer.link.waiting) for peer in self),
            peers=lambda: len(self),
            links=lambda: sum(1 for peer in self if peer.link.linked),
        )

    def need(self, address: Address, now: float) -> PrefillPeer:
        """A rank of P that a request needs; notes whether its address accepts a connection."""
        peer = self.get(str(address))
        if peer is not None and not peer.needed and not peer.dialing.open:
            peer.dialing = DialState(now)  # a failed preconnect must not fail this request
        peer = self.dial(address, now)
        peer.used, peer.reached = now, peer.connection.reached
        return peer

    def dial(self, address: Address, now: float) -> PrefillPeer:
        """A rank of P: dialed if it is not yet, and asked again if it has not answered."""
        peer = self.get(str(address))
        if peer is None:
            connection = self._ctx.endpoint.dial(address)
            peer = PrefillPeer(self._ctx, str(address), connection, DialState(now), InboundLink(self._ctx))
            connection.assign(peer)
            self.add(peer)
        peer.send_hello(now)
        return peer

    # Their messages.

    def welcome(self, peer: PrefillPeer, message: m.Welcome, now: float) -> None:
        peer.unanswered_since = None
        known = peer.hello.incarnation if peer.dialing.open and peer.hello is not None else ""
        if message.you != self._ctx.hello.incarnation or message.hello.incarnation == known:
            return
        try:
            peer.welcome(message)
        except Refused as refused:
            self.refused(peer, unfit(self._ctx.hello.address, peer.address, refused), now)
            return
        log_connected(message.hello, peer.formats, peer.verify)
        self._ctx.effects.append(PrefillWelcomed(peer))

    def refuse(self, peer: PrefillPeer, message: m.Refuse, now: float) -> None:
        self.answered(peer)
        self.refused(peer, message.reason, now)

    def refused(self, peer: PrefillPeer, reason: str, now: float) -> None:
        """There will be no transfers from it for a while."""
        self._ctx.counters.add("messages_refused")
        peer.log_trouble(f"no transfers from {peer.address}: {reason}")
        peer.dialing.refuse(reason, now)
        self._ctx.effects.append(PrefillFailed(peer, reason))

    def unknown_peer(self, peer: PrefillPeer, message: m.UnknownPeer, now: float) -> None:
        peer.unanswered_since = None
        if peer.dialing.open:
            reason = f"{peer.address} is gone: the process that answers there does not know this connection"
            self.lose(peer, reason, now)

    def answered(self, peer: PrefillPeer) -> None:
        peer.unanswered_since = None

    def invited(self, peer: PrefillPeer, message: m.LinkInvite, now: float) -> None:
        if peer.link.linked:
            self.lose_link(peer, f"{peer.address} gave up its link and builds another", now, notify=False)
        try:
            blob = peer.link.accept(message, self.window)
        except LinkError as error:
            self._ctx.answer(peer.connection, m.LinkDown(message.link, str(error)))
            self._ctx.effects.append(PrefillFailed(peer, f"no link from {peer.address}: {error}"))
            return
        self.activate(peer)
        self._ctx.answer(peer.connection, m.LinkAccept(message.link, self.window, blob))

    def link_down(self, peer: PrefillPeer, message: m.LinkDown, now: float) -> None:
        if message.link == peer.link.number:
            self.lose_link(peer, f"{peer.address} aborted the link: {message.reason}", now, notify=False)

    def sent(self, peer: PrefillPeer, message: m.Sent, now: float) -> bool:
        """P has sent a chunk: its receive may be launched; False if the link is then lost."""
        try:
            peer.link.sent(message)
        except LinkError as error:
            self.lose_link(peer, f"the link from {peer.address} is out of step: {error}", now)
            return False
        return True

    def lose_link(self, peer: PrefillPeer, reason: str, now: float, notify: bool = True) -> None:
        """Give up this link; `notify`: whether P must be sent a LinkDown."""
        peer.log_trouble(reason)
        if notify:
            peer.abort(reason)
        else:
            peer.link.abort()
        self._ctx.effects.append(PrefillFailed(peer, reason, only_loading=True))

    def abort_link(self, effect: AbortPrefillLink, now: float) -> None:
        if effect.link == effect.peer.link.number:
            self.lose_link(effect.peer, effect.reason, now)

    def lose(self, peer: PrefillPeer, reason: str, now: float) -> None:
        """This incarnation of a rank of P is gone."""
        peer.log_trouble(reason)
        peer.lost(now)
        self._ctx.effects.append(PrefillLost(peer, reason))

    def disconnected(self, peer: PrefillPeer, now: float) -> None:
        if peer.hello is not None:
            self.lose(peer, f"{peer.address} is gone: the connection to it has ended", now)

    def hang_up(self, peer: PrefillPeer, reason: str = "") -> None:
        """Close the connection, and forget this rank; `reason`: for P, if it has a link to it."""
        if reason:
            peer.abort(reason)
        peer.link.abort()
        self._ctx.endpoint.hang_up(peer.connection)
        self.remove(peer)

    def announced(self, peer: PrefillPeer, chunk: WaitingChunk) -> None:
        peer.link.waiting.append(chunk)
        self._active[peer] = None

    def poll(self, now: float) -> None:
        for peer in self.active:
            was_quiet, link = not peer.link.busy, peer.link
            try:
                link.poll()
                link.burst = self._ctx.burst(link.posted[0].chunk.nbytes if link.posted else 0)
                self._post(peer)
                self._arrive(peer)
            except LinkError as error:
                self._broken(peer, error, now)
            if was_quiet and not link.busy:
                self._active.pop(peer, None)

    @property
    def moving(self) -> bool:
        return any(peer.link.posted for peer in self._active)

    def landed(self, peer: PrefillPeer, receiving: PostedReceive, now: float) -> None:
        """The bytes of the oldest receive have been read."""
        try:
            if peer.link.landed(receiving):
                # Its room is for the link that has waited longest, if one has none.
                starving = (other for other in self._active if other.link.starves)
                self.post_others(PostRemaining(next(starving, peer)), now)
                self._arrive(peer)
        except LinkError as error:
            self._broken(peer, error, now)

    def _post(self, peer: PrefillPeer) -> None:
        """Post receives for announced chunks while there is room; only one if others wait, too. Where nothing
        was posted, the others follow once the grant of the first is out: P fills that one meanwhile."""
        link, effects = peer.link, self._ctx.effects
        while link.waiting and (new := link.post()) is not None:
            effects.append(ReceivePosted(peer, new.key, new.chunk, link.number, new.receive.remote_slot))
            self._active.pop(peer, None)  # its next turn comes behind the others'
            self._active[peer] = None
            if link.waiting and any(other.link.waiting for other in self.active if other is not peer):
                break
            if link.waiting and len(link.posted) == 1 and self._ctx.blocks_thread(new.chunk.nbytes, True):
                effects.append(PostRemaining(peer))
                break

    def post_others(self, effect: PostRemaining, now: float) -> None:
        try:
            self._post(effect.peer)
        except LinkError as error:
            self._broken(effect.peer, error, now)

    def _arrive(self, peer: PrefillPeer) -> None:
        """The oldest receive may be complete, and more may land in this turn. Raises LinkError."""
        link = peer.link
        if link.burst and link.posted and link.posted[0].arrived:
            link.burst -= 1
            self._ctx.effects.append(ReceiveDone(peer, link.posted[0]))

    def _broken(self, peer: PrefillPeer, error: LinkError, now: float) -> None:
        self.lose_link(peer, f"the link from {peer.address} broke: {error}", now)

    # Time, and the end.

    @property
    def busy(self) -> bool:
        return any(peer.link.busy for peer in self.active)

    def check(self, now: float) -> None:
        lease = self._ctx.options.lease_seconds
        for peer in self.active:
            if peer.link.overdue(now, lease):
                reason = f"{peer.address} did not send in time: D has waited {lease:g} s for a chunk"
                self.lose_link(peer, reason, now)

    def redial_silent(self, now: float) -> None:
        """A connection may be dead although neither end has noticed: the next request opens another."""
        lease = self._ctx.options.lease_seconds
        for peer in self:
            if peer.unanswered_since is not None and now - peer.unanswered_since > lease:
                self._ctx.endpoint.hang_up(peer.connection)
                self.lose(peer, f"{peer.address} did not answer in time: not a word for {lease:g} s", now)

    def idle(self, peer: PrefillPeer, now: float) -> bool:
        """Whether no request has needed it for long, and nothing is under way on its link."""
        recent = now - peer.used <= max(IDLE_SECONDS, self._ctx.options.lease_seconds)
        return not (recent or peer.link.posted)

    def close_idle_links(self, used: set[str], now: float) -> None:
        """Close links that are too many. `used`: the addresses of ranks that requests need."""
        linked = [peer for peer in self if peer.link.linked]
        quiet = (IDLE_BEATS + 1) * self._ctx.beat
        unused = (peer for peer in linked if now - peer.used > quiet and peer.address not in used)
        idle = (peer for peer in unused if not (peer.link.posted or peer.link.waiting))
        for peer in nsmallest(len(linked) - self._ctx.options.max_links, idle, lambda peer: peer.used):
            log.info("closing the link from %s: %s", peer.address, IDLE_REASON)
            peer.abort(IDLE_REASON)

    def close(self) -> None:
        for peer in self:
            peer.abort("D is shutting down")
