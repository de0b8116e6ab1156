"""D's half of a rank: dials the ranks of P, and writes what they push to its requests' blocks.

`Consumer` gets what comes from the forward thread, from the ranks of P and by time; `Incoming` posts the
receives and writes what has come. What is said about a request is in `requests`.
"""

from __future__ import annotations

from functools import partial
from math import inf

from p2pkv.config import RESERVED_CHUNKS
from p2pkv.control.endpoint import Connection
from p2pkv.engine import commands as do
from p2pkv.engine.context import BURST, Context, log
from p2pkv.engine.partners import LinksAhead
from p2pkv.engine.peers import (
    IDLE_BEATS,
    IDLE_REASON,
    LOOK_SECONDS,
    Arrived,
    Check,
    Peers,
    Posted,
    PrefillPeer,
    prefill_peers,
    surplus,
)
from p2pkv.engine.requests import EarlyBuffers, RequestEntry, Requests
from p2pkv.links.base import LinkError
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Refused, listed, unfit
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.receiver import LoadPhase, Receiver

IDLE_SECONDS = 60.0
"""Seconds without a request after which the connection to a rank of P is closed."""


ANSWERS = (m.Welcome, m.Refuse, m.Stranger, m.HeartbeatAck)
"""Messages with which P answers ours. Any other may come over a connection on which P does not hear us."""


class Consumer:
    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.peers = prefill_peers()
        self._next_look = 0.0
        early_buffers = EarlyBuffers(context.options.ahead_bytes, context.cache.device)
        self.requests = Requests(context, self.peers, early_buffers)
        self.incoming = Incoming(context, self.peers, self.requests, early_buffers)
        self.partners = LinksAhead(context, self.peers, self.requests, self._hang_up)
        self._next_beat = 0.0
        self.window = max(1, context.options.staging_bytes // 2)
        context.counters.gauges |= {
            "staging_bytes": lambda: context.links.staging.used,
            "ahead_bytes": lambda: early_buffers.used,
            "receives_posted": lambda: sum(len(peer.posted) for peer in self.peers),
            "receives_asked": lambda: sum(len(peer.asked) for peer in self.peers),
            "peers": lambda: len(self.peers),
            "links": lambda: sum(1 for peer in self.peers if peer.linked),
            "links_stuck": lambda: context.links.stuck,
        }

    # The forward thread.

    def command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Expect():
                self.requests.expect(command, now)
            case do.Load():
                self.requests.load(command, now)
            case do.Drop(key, reason):
                self.requests.drop(key, reason, now)
            case do.Forget(key):
                self.requests.forget(key)
            case do.Invalidate(generation, reason):
                self.requests.invalidate(generation, reason, now)
            case do.NamePartners(addresses):
                self.partners.name(addresses, now)
            case _:
                raise AssertionError(f"{command} is not for a D")

    # The ranks of P, and their links.

    def receive(self, connection: Connection, message: m.AnyMessage, now: float) -> None:
        if isinstance(message, m.Hello):
            reason = f"{self._ctx.hello.address} is a consumer: consumers dial producers, nobody dials them"
            self._ctx.tell(connection, m.Refuse(message.incarnation, reason))
            return
        if isinstance(message, m.Partners):
            self.partners.received(message, now)
            return
        peer = connection.tag
        if not isinstance(peer, PrefillPeer):
            return
        if isinstance(message, ANSWERS):
            peer.unanswered_since = None
        match message:
            case m.Welcome():
                self._welcome(peer, message, now)
            case m.Refuse(_, reason):
                self._refuse(peer, reason, now)
            case m.Stranger():
                if peer.dialing.open:
                    self.requests.lost(
                        peer, f"{peer.address} is gone: who answers there does not know this connection", now
                    )
            case m.HeartbeatAck(held, _):
                self.requests.holding(peer, held, now)
            case m.Ahead():
                self.requests.ahead(peer, message, now)
            case m.LinkInvite():
                self._invited(peer, message, now)
            case m.LinkDown(link, reason):
                if link == peer.link:
                    reason = f"{peer.address} aborted the link: {reason}"
                    self.requests.link_lost(peer, reason, now, tell=False)
            case m.Offer(key) | m.Chunk(key) | m.Sent(key) | m.Failed(key):
                self.requests.about(peer, key, message, now)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a D")

    def _welcome(self, peer: PrefillPeer, message: m.Welcome, now: float) -> None:
        again = peer.hello is not None and peer.hello.incarnation == message.hello.incarnation
        if message.you != self._ctx.hello.incarnation or again:
            return
        try:
            peer.welcome(message)
        except Refused as refused:
            self._refuse(peer, unfit(self._ctx.hello.address, peer.address, refused), now)
            return
        sums = ", with checksums" if peer.verify else ""
        log.info(
            "P rank %d at %s is connected; what travels: %s%s",
            peer.rank,
            peer.address,
            listed(peer.wires),
            sums,
        )
        self.requests.connect(now)

    def _refuse(self, peer: PrefillPeer, reason: str, now: float) -> None:
        self._ctx.counters.add("messages_refused")
        peer.complain(f"no transfers from {peer.address}: {reason}")
        peer.dialing.refuse(reason, now)
        self.requests.fail(peer, reason, now)

    def unreachable(self, connection: Connection, reason: str, now: float) -> None:
        """Whoever listens at that address is not a member, or must not be dialed: leave it alone for a
        while."""
        if isinstance(connection.tag, PrefillPeer):
            self._refuse(connection.tag, reason, now)

    def _invited(self, peer: PrefillPeer, message: m.LinkInvite, now: float) -> None:
        if peer.linked:
            self.requests.link_lost(peer, f"{peer.address} builds its link anew", now, tell=False)
        try:
            peer.invited(message, self.window)
        except LinkError as error:
            self.requests.fail(peer, f"no link from {peer.address}: {error}", now)

    def _redial(self, peer: PrefillPeer, reason: str, now: float) -> None:
        """The connection may be dead although neither end was told: the next request opens another."""
        self._ctx.endpoint.hang_up(peer.connection)
        self.requests.lost(peer, reason, now)

    def _hang_up(self, peer: PrefillPeer) -> None:
        peer.abort()
        self._ctx.endpoint.hang_up(peer.connection)
        self.peers.remove(peer)

    def _close_idle(self, now: float) -> None:
        linked = [peer for peer in self.peers if peer.linked]
        quiet = (IDLE_BEATS + 1) * self._ctx.beat

        def idle(peer: PrefillPeer) -> bool:
            return now - peer.used > quiet and not (peer.posted or peer.asked or self.requests.of(peer))

        for peer in surplus(linked, self._ctx.options.max_links, idle, lambda peer: peer.used):
            log.info("closing the link from %s: %s", peer.address, IDLE_REASON)
            peer.abort(IDLE_REASON)

    # The data.

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        return self.incoming.pump(now)

    # Time.

    def tick(self, now: float) -> None:
        self.requests.tick(now)
        lease = self._ctx.options.lease_seconds
        for peer in self.peers.watched:
            if peer.overdue(now, lease):
                reason = f"{peer.address} did not send in time what was granted: nothing for {lease:g} s"
                self.requests.link_lost(peer, reason, now)
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look(now, lease)
        if now >= self._next_beat and not self._ctx.steps.trouble(now):
            self._next_beat = now + self._ctx.beat
            self.requests.say_waiting(now)

    def _look(self, now: float, lease: float) -> None:
        """Look at all ranks of P, also at those with nothing under way."""
        for peer in self.peers:
            if peer.unanswered_since is not None and now - peer.unanswered_since > lease:
                self._redial(peer, f"{peer.address} did not answer in time: nothing for {lease:g} s", now)
            recent = now - peer.used <= max(IDLE_SECONDS, lease)
            if recent or peer.posted or self.requests.wants(peer) or self.partners.keeps(peer):
                peer.stir()
            else:
                self._hang_up(peer)
        self._close_idle(now)
        self.partners.look(now)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that has to be looked at often."""
        return self.requests.connected and not any(peer.busy for peer in self.peers.watched)

    @property
    def due(self) -> float:
        """When the next deadline ends, if nothing happens before."""
        return min(self.requests.due, self._next_beat if self.requests.entries else inf)

    # The end.

    notified = False
    """D need not wait for anybody to read its last messages: P gets them even if D closes right after."""

    def leave(self, now: float, finish: bool = True) -> None:
        """Load nothing any more, whatever `finish`: nobody would use it."""
        self.partners.leave()
        self.requests.leave(f"{self._ctx.hello.address} is gone: it is shutting down", now)

    @property
    def over(self) -> bool:
        """Whether nothing is under way."""
        return not any(not entry.receiver.load.ended for entry in self.requests.entries.values())

    def close(self) -> None:
        for peer in self.peers:
            peer.abort("D is shutting down")


# The data.


class Incoming:
    """What comes from the ranks of P. A turn looks at the `watched` of `peers`."""

    def __init__(
        self,
        context: Context,
        peers: Peers[str, PrefillPeer],
        requests: Requests,
        early_buffers: EarlyBuffers,
    ) -> None:
        self._ctx = context
        self.peers = peers
        self.requests = requests
        self._early_buffers = early_buffers

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        for peer in self.peers.watched:
            if peer not in self.peers:
                continue
            rests = not peer.busy
            try:
                peer.poll()
                newest = peer.newest
                self.post(peer, now)
                for _ in range(BURST):
                    if not peer.posted or not self._may_land(peer.posted[0]):
                        break
                    self._land(peer, peer.posted.popleft(), now)
                self.post(peer, now)
                if peer.newest is not newest:
                    peer.poll()  # which may launch receives: their grants are out by now
            except LinkError as error:
                self.requests.link_lost(peer, f"the link from {peer.address} broke: {error}", now)
            if rests and not peer.busy:
                self.peers.rest(peer)
        self._unload(now)
        return bool(self.requests.unloading) or any(peer.posted for peer in self.peers.watched)

    def post(self, peer: PrefillPeer, now: float) -> None:
        """Post receives for announced chunks while there is room; only one if other peers wait, too."""
        while peer.asked:
            self._admitted_first(peer)
            key, chunk = peer.asked[0]
            entry = self.requests.entries.get(key)
            if entry is None or not entry.receiver.pieces(peer.rank, chunk.attempt, chunk.chunk):
                peer.asked.popleft()
                continue
            reserve = RESERVED_CHUNKS * self._ctx.options.chunk_bytes if _is_ahead(entry) else 0
            posted = peer.post(reserve)
            if posted is None:
                peer.wait()
                return
            effects = entry.receiver.posted(peer.rank, chunk, peer.link, posted.receive.remote_slot)
            self.requests.run(entry, effects, now)
            if any(other.asked for other in self.peers.watched if other is not peer):
                return

    def _admitted_first(self, peer: PrefillPeer) -> None:
        """Chunks of requests that have blocks go before chunks that no request has asked for yet."""
        for index, (key, _) in enumerate(peer.asked):
            entry = self.requests.entries.get(key)
            if entry is None or not _is_ahead(entry):
                if index:
                    first = peer.asked[index]
                    del peer.asked[index]
                    peer.asked.appendleft(first)
                return

    def _may_land(self, posted: Posted) -> bool:
        """Whether the bytes are here, and nobody else writes where they belong."""
        if not posted.arrived:
            return False
        entry = self.requests.entries.get(posted.key)
        return entry is None or entry.receiver.load.ended or entry.writable

    def _land(self, peer: PrefillPeer, posted: Posted, now: float) -> None:
        """A receive is complete: write its bytes where they belong, unless the transfer has ended."""
        entry, chunk = self.requests.entries.get(posted.key), posted.chunk
        pieces = () if entry is None else entry.receiver.pieces(peer.rank, chunk.attempt, chunk.chunk)
        try:
            if entry is None or not pieces:
                self._ctx.counters.add("chunks_dropped")
                return
            check, buffer = self.check(peer, posted), posted.receive.buffer
            arrived = Arrived(peer, peer.rank, chunk, buffer, peer.rows, check)
            refuted = check is not None and check.refuted
            if not refuted:
                (self._keep if _is_ahead(entry) else self._write)(entry, arrived, now)
        finally:
            posted.receive.release()
        if refuted:
            self._corrupt(entry, entry.receiver, arrived, now)

    def check(self, peer: PrefillPeer, posted: Posted) -> Check | None:
        """The checksum of the bytes that arrived, computed before the scatter; None where none is wanted."""
        if not peer.verify or posted.sent is None:
            return None
        return Check(self._ctx.cache.digest(posted.receive.buffer), posted.sent)

    def _keep(self, entry: RequestEntry, arrived: Arrived, now: float) -> None:
        """The request has no blocks yet: copy the chunk to its early buffer."""
        assert entry.early is not None
        self._early_buffers.keep(entry.early, arrived, now)
        self._ctx.copies.launched(entry.expect.key)
        entry.receiver.kept(arrived.rank, arrived.chunk.chunk, now)
        self._ctx.counters.add("bytes_ahead", arrived.chunk.nbytes)

    def _unload(self, now: float) -> None:
        """Write what waits in early buffers to the blocks that it has now, some of it each turn."""
        waiting = self.requests.unloading
        for _ in range(BURST):
            while waiting and not (waiting[0].early and waiting[0].early.kept):
                waiting.popleft()
            if not waiting or not waiting[0].writable:
                return
            buffer = waiting[0].early
            assert buffer is not None
            self._write(waiting[0], buffer.kept.popleft(), now)
        self._ctx.endpoint.wake()

    def _write(self, entry: RequestEntry, arrived: Arrived, now: float) -> None:
        """Write a chunk to the blocks."""
        receiver, key = entry.receiver, entry.expect.key
        try:
            self._scatter(entry, arrived)
        except ValueError as error:
            self.requests.run(entry, receiver.cancel(f"D cannot write its blocks: {error}"), now)
            return
        finally:
            self._ctx.copies.launched(key)
        self._ctx.copies.then(key, partial(self._landed, entry, receiver, arrived), now)

    def _landed(self, entry: RequestEntry, receiver: Receiver, arrived: Arrived, now: float) -> None:
        """The device has written this chunk to the blocks, and computed its checksum."""
        if arrived.check is not None and arrived.check.differs():
            self._corrupt(entry, receiver, arrived, now)
            return
        self._ctx.counters.add("bytes_scattered", arrived.chunk.nbytes)
        self._ctx.counters.add("chunks_scattered")
        self.requests.run(entry, receiver.scattered(arrived.rank, arrived.chunk.chunk, now), now)

    def _corrupt(self, entry: RequestEntry, receiver: Receiver, arrived: Arrived, now: float) -> None:
        """The bytes differ from what P gathered: end the transfer, and the link, since it may spoil
        others."""
        peer, check = arrived.peer, arrived.check
        assert check is not None
        self._ctx.counters.add("chunks_corrupt")
        theirs, ours = check.sent.digest.hex() or "none", check.digest.value().hex()
        reason = (
            f"chunk {check.sent.chunk} from {peer.address} has checksum {ours} here and {theirs} there: its "
            "bytes changed on the way"
        )
        self.requests.run(entry, receiver.cancel(reason), now)
        if peer.link == check.sent.link:
            self.requests.link_lost(peer, f"the link is given up: {reason}", now)

    def _scatter(self, entry: RequestEntry, arrived: Arrived) -> None:
        assignment, offset = entry.receiver.sources[arrived.rank].assignment, 0
        extents = assignment.extents(*entry.wanted)
        for piece in arrived.chunk.pieces:
            extent, edge = extents.by_group[piece.group], assignment.edges[piece.group]
            rows, shift = arrived.rows[piece.group], edge.target_layer - edge.layers.start
            heads = (edge.target_head, edge.target_head + len(edge.heads))
            for begin, part in extent.within(piece):
                layers = (part.layer + shift, part.layer_stop + shift)
                part_bytes = arrived.buffer[offset + begin :][: extent.size(part)]
                rows.scatter(part_bytes, layers, (part.start, part.stop), heads, entry.blocks)
            offset += extent.size(piece)


def _is_ahead(entry: RequestEntry) -> bool:
    return entry.receiver.load.state is LoadPhase.AHEAD
