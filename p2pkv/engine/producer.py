"""P's half of a rank: answers the ranks of D, and pushes to them what its prompts' blocks hold.

`Producer` gets what comes from the forward thread, from the ranks of D and by time; `Outgoing` fills the
sends. What is said about a prompt is in `prompts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from p2pkv.control.endpoint import Connection
from p2pkv.engine import commands as do
from p2pkv.engine.context import BURST, Context, log
from p2pkv.engine.peers import (
    FORGOTTEN_SECONDS,
    IDLE_REASON,
    LOOK_SECONDS,
    DecodePeer,
    DecodeRank,
    Flight,
    Peers,
    PendingSent,
    decode_peers,
    surplus,
)
from p2pkv.engine.prompts import PromptEntry, Prompts
from p2pkv.kv.cache import Rectangles
from p2pkv.kv.checksum import Checksum
from p2pkv.links.base import LinkError, Send
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Assignment, Refused, judge, listed, unfit
from p2pkv.protocol.machine import RemoteProtocolError, Transmit
from p2pkv.protocol.sender import PromptPhase

MAX_PEERS = 4096
"""The most ranks of D in the table. Beyond it one with nothing under way is forgotten; it says Hello
again."""


class Producer:
    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.peers = decode_peers()
        self._next_look = 0.0
        self.leaving = ""
        self.notified = False
        """Whether ranks of D were told, because this rank stops, that a transfer has ended."""
        self.prompts = Prompts(context, self.peers)
        self.outgoing = Outgoing(context, self.peers, self.prompts)
        context.counters.gauges |= {
            "staging_bytes": lambda: sum(peer.used for peer in self.peers),
            "sends_under_way": lambda: sum(
                len(peer.orders) + max(len(peer.flights), len(peer.pending)) for peer in self.peers
            ),
            "peers": lambda: len(self.peers),
            "links": lambda: sum(1 for peer in self.peers if peer.linked),
            "links_stuck": lambda: context.links.stuck,
        }

    # The forward thread.

    def command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Hold(key, decode):
                self.prompts.hold(key, str(decode), now)
            case do.OfferPrompt(key, decode):
                self._offer(self.prompts.hold(key, str(decode), now), command, now)
            case do.PromptBlocks(key, blocks):
                for entry in self.prompts.live(key):
                    entry.blocks = blocks
            case do.Computed(prompts, layer, layer_stop, _):
                for key, stop in prompts:
                    for entry in self.prompts.live(key):
                        self.prompts.run(entry, entry.sender.computed(layer, layer_stop, stop, now), now)
            case do.Flush(keys):
                for entry in self.prompts.live(*keys):
                    self.prompts.run(entry, entry.sender.flush(), now)
            case do.Revoked(key):
                self._revoke(key)
            case do.Abort(key, reason):
                for entry in self.prompts.live(key):
                    self.prompts.run(entry, entry.sender.abort(reason), now)
            case do.Forget(key):
                self.prompts.forget(key)
            case _:
                raise AssertionError(f"{command} is not for a P")

    def _offer(self, entry: PromptEntry, offer: do.OfferPrompt, now: float) -> None:
        if not entry.sender.prompt.ended:
            self.prompts.run(entry, entry.sender.offer(offer.tokens, offer.digest, offer.generation), now)
            self.prompts.say_ahead(entry)

    def _revoke(self, key: str) -> None:
        for entry in self.prompts.live(key):
            entry.sender.revoke()
        with self._ctx.reading:
            self._ctx.revoked.subtract([key])
            self._ctx.revoked = +self._ctx.revoked

    # The ranks of D, and their links.

    def receive(self, connection: Connection, message: m.AnyMessage, now: float) -> None:
        if isinstance(message, m.Hello):
            self._hello(connection, message, now)
            return
        peer = connection.tag
        if not isinstance(peer, DecodePeer) or peer not in self.peers:
            self._ctx.tell(connection, m.Stranger())
            return
        peer.fresh, peer.last_heard = False, now
        match message:
            case m.Heartbeat(transfers):
                self.prompts.waiting(peer, transfers, now)
            case m.LinkAccept():
                self._accept(peer, message, now)
            case m.LinkDown(link, reason):
                if link == peer.link and peer.linked and self.prompts.idle(peer, now):
                    peer.park(now)
                elif link == peer.link:
                    reason = f"{peer.address} aborted the link: {reason}"
                    self.prompts.link_lost(peer, reason, now, tell=False)
            case m.Want(key) | m.Grant(key) | m.Done(key) | m.Cancel(key):
                self.prompts.about(peer, key, message, now)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a P")

    def _hello(self, connection: Connection, hello: m.Hello, now: float) -> None:
        mine = self._ctx.hello
        try:
            if self.leaving:
                raise Refused(self.leaving)
            if hello.to != mine.address:
                raise Refused(
                    f"{hello.address} dialed {hello.to}, but this rank is {mine.address}: "
                    "use the address that the instance advertises"
                )
            plan = judge(mine, hello)
            wires, rows = self._ctx.form(hello)
        except Refused as refused:
            reason = self.leaving or unfit(mine.address, hello.address, refused)
            log.warning("refused %s: %s", hello.address, reason)
            self._ctx.counters.add("messages_refused")
            self._ctx.tell(connection, m.Refuse(hello.incarnation, reason))
            return
        self._ctx.tell(connection, m.Welcome(hello.incarnation, mine, plan.digest))
        old = self.peers.get((hello.addresses[0], hello.rank))
        if old is not None and old.connection is connection and old.fresh and old.hello == hello:
            return
        edges = [edge for edge in plan.from_source(mine.rank) if edge.target == hello.rank]
        assignment = Assignment.of(edges, wires) if edges else None
        peer = DecodePeer(self._ctx, connection, hello, plan, rows, assignment, self.peers, wanted=now)
        if old is not None:
            self.prompts.drop(old, f"{hello.address} is gone: it has restarted or reconnected", now)
            peer.link = old.link
        self._make_room(connection, now)
        # D may have come ahead of any request: no other link has to go for that.
        peer.parked = self._full
        connection.tag = peer
        self.peers.add(peer)
        sums = ", with checksums" if peer.verify else ""
        log.info(
            "D rank %d at %s is connected; what travels: %s%s", hello.rank, hello.address, listed(wires), sums
        )
        self.prompts.invite(peer, now)

    def _make_room(self, connection: Connection, now: float) -> None:
        """Forget what this connection was before, and a peer if there are too many."""
        if isinstance(connection.tag, DecodePeer) and connection.tag in self.peers:
            self.prompts.drop(connection.tag, f"{connection.tag.address} says that it is another", now)
        if len(self.peers) >= MAX_PEERS:
            peers = list(self.peers)
            idle = next((peer for peer in peers if not peer.busy), peers[0])
            self.prompts.drop(idle, f"{idle.address} makes room for another", now)

    def unreachable(self, connection: Connection, reason: str, now: float) -> None:
        """A P dials nobody."""
        raise AssertionError(reason)

    def _accept(self, peer: DecodePeer, message: m.LinkAccept, now: float) -> None:
        try:
            peer.accept(message)
        except LinkError as error:
            self.prompts.link_lost(peer, f"no link to {peer.address}: {error}", now)

    @property
    def _full(self) -> bool:
        """Whether one link more would be one too many."""
        links = sum(1 for peer in self.peers if peer.linked or peer.building)
        return links >= self._ctx.options.max_links

    def _close_idle(self, now: float) -> None:
        linked = [peer for peer in self.peers if peer.linked]
        most = self._ctx.options.max_links

        def idle(peer: DecodePeer) -> bool:
            return self.prompts.idle(peer, now)

        for peer in surplus(linked, most, idle, lambda peer: (peer.named, peer.wanted)):
            log.info("closing the link to %s: %s", peer.address, IDLE_REASON)
            peer.park(now, IDLE_REASON)
        forgotten = max(FORGOTTEN_SECONDS, 2 * self._ctx.options.lease_seconds)
        for peer in linked:
            if peer.linked and now - max(peer.wanted, peer.last_heard) > forgotten and idle(peer):
                peer.park(now, "it has been idle for long")

    # The data.

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        return self.outgoing.pump(now)

    # Time.

    def tick(self, now: float) -> None:
        self.prompts.tick(now)
        lease = self._ctx.options.lease_seconds
        for peer in self.peers.watched:
            if peer.overdue(now, lease):
                self.prompts.link_lost(
                    peer, f"{peer.address} did not answer in time: it has taken nothing for {lease:g} s", now
                )
            elif peer.building and now - peer.since > self._patience_with(peer, now):
                reason = f"the link to {peer.address} did not come up in time: in {now - peer.since:.0f} s"
                self.prompts.link_lost(peer, reason, now)
            self.prompts.invite(peer, now)
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._close_idle(now)
            for peer in self.peers:
                peer.stir()

    def _patience_with(self, peer: DecodePeer, now: float) -> float:
        """Seconds that a link may take to come up: twice as many while D is heard of, since it may just be
        busy."""
        lease = self._ctx.options.lease_seconds
        patience = 2 * lease if now - peer.last_heard < lease else lease
        return max(patience, self._ctx.links.build_seconds) if peer.accepted else patience

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that has to be looked at often."""
        return all(peer.up and not peer.busy for peer in self.peers.watched)

    @property
    def due(self) -> float:
        """When the next deadline ends, if nothing happens before."""
        return self.prompts.due

    # The end.

    def leave(self, now: float, finish: bool = True) -> None:
        """Take on nothing new, and end what cannot be finished now; without `finish` everything."""
        self.leaving = f"{self._ctx.hello.address} is gone: it is shutting down"
        self.notified |= self.prompts.leave(self.leaving, now, finish)

    @property
    def over(self) -> bool:
        """Whether nothing is under way."""
        return not any(self.prompts.live(*self.prompts.entries)) and not any(
            peer.unfinished for peer in self.peers
        )

    def close(self) -> None:
        for peer in self.peers:
            peer.abort(0.0, "P is shutting down")


# The data.


class Outgoing:
    """What goes to the ranks of D. A turn looks at the `watched` of `peers`."""

    def __init__(
        self,
        context: Context,
        peers: Peers[DecodeRank, DecodePeer],
        prompts: Prompts,
    ) -> None:
        self._ctx = context
        self.peers = peers
        self.prompts = prompts

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        for peer in self.peers.watched:
            if peer not in self.peers:
                continue
            rests = peer.up and not peer.busy
            try:
                self._pump(peer, now)
            except LinkError as error:
                self.prompts.link_lost(peer, f"the link to {peer.address} broke: {error}", now)
            if rests and peer.up and not peer.busy:
                self.peers.rest(peer)
        return any(peer.busy for peer in self.peers.watched)

    def _pump(self, peer: DecodePeer, now: float) -> None:
        if peer.poll():
            self.prompts.linked(peer, now)
        for flight in peer.taken():
            entry = self.prompts.entries.get(flight.key)
            if entry is not None and entry.sender.prompt.state is PromptPhase.OFFERED:
                self._ctx.counters.add("bytes_early", flight.nbytes)
        for _ in range(BURST):
            if (found := peer.next_send()) is None:
                break
            self._transmit(peer, *found, now)

    def _transmit(self, peer: DecodePeer, key: str, order: Transmit, send: Send, now: float) -> None:
        """Fill one send from the blocks, under the lock that keeps them from being taken back meanwhile.

        On a device the gather is only queued. The send is ordered behind it, and `Copies` knows of it, so
        that
        whoever takes blocks back waits for it.
        """
        entry = self.prompts.paired(key, peer)
        wrong = ""
        with self._ctx.reading:
            filler = entry is None or not entry.sender.readable(order) or key in self._ctx.revoked
            if entry is not None and peer.assignment is not None and not filler:
                try:
                    self._gather(entry, peer.rows, peer.assignment, order, send)
                except ValueError as error:
                    filler, wrong = True, str(error)
                self._ctx.copies.launched(key)
        digest = None if filler or not peer.verify else self._digest(key, send)
        send.commit()
        peer.flights.append(Flight(send, key, 0 if filler else order.grant.nbytes))
        self._ctx.counters.add("chunks_filler" if filler else "chunks_sent")
        if not filler:
            self._ctx.counters.add("bytes_sent", order.grant.nbytes)
        if entry is not None and wrong:
            self.prompts.run(entry, entry.sender.abort(f"P cannot read its blocks: {wrong}"), now)
        if not peer.verify:
            self._say(peer, key, entry, order, filler, None, now)
            return
        pending = PendingSent(partial(self._say, peer, key, entry, order, filler, digest))
        peer.pending.append(pending)
        self._ctx.copies.then(key, partial(peer.say_sent, pending), now)

    def _digest(self, key: str, send: Send) -> Checksum:
        """The checksum of the gathered bytes. It may only be queued, so `Copies` knows of it, too."""
        digest = self._ctx.cache.digest(send.buffer)
        self._ctx.copies.launched(key)
        return digest

    def _say(
        self,
        peer: DecodePeer,
        key: str,
        entry: PromptEntry | None,
        order: Transmit,
        filler: bool,
        digest: Checksum | None,
        now: float,
    ) -> None:
        """Tell D what this send holds."""
        value, grant = b"" if digest is None else digest.value(), order.grant
        if entry is not None:
            self.prompts.run(entry, entry.sender.sent(order, filler, value), now)
        else:
            self._ctx.tell(peer.connection, m.Sent(key, grant.attempt, grant.chunk, grant.link, filler))

    def _gather(
        self,
        entry: PromptEntry,
        rows: Sequence[Rectangles],
        assignment: Assignment,
        order: Transmit,
        send: Send,
    ) -> None:
        offset = 0
        for piece in order.pieces:
            edge, ours = assignment.edges[piece.group], rows[piece.group]
            shift = edge.source_layer - edge.layers.start
            layers = (piece.layer + shift, piece.layer_stop + shift)
            heads = (edge.source_head, edge.source_head + len(edge.heads))
            size = ours.nbytes(layers[1] - layers[0], piece.start, piece.stop, len(edge.heads))
            part = send.buffer[offset : offset + size]
            ours.gather(part, layers, (piece.start, piece.stop), heads, entry.blocks)
            offset += size
