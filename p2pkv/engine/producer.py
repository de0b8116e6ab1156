"""P's half of a rank: answers the ranks of D, and pushes to them what its prompts' pages hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from p2pkv.control.endpoint import Line
from p2pkv.engine import commands as do
from p2pkv.engine.context import BURST, Context, Ends, log
from p2pkv.engine.early import EarlyClaims
from p2pkv.engine.idle import FORGOTTEN_SECONDS, IDLE_BEATS, REASON, surplus
from p2pkv.engine.outlet import Flight, Outlet, Place
from p2pkv.links.base import LinkError, Send
from p2pkv.plan import Edge
from p2pkv.protocol import messages as m
from p2pkv.protocol.effects import Effect, Finished, Released, Tell, Transmit
from p2pkv.protocol.handshake import Refused, judge
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.sender import Prompt, Sender, Terms
from p2pkv.protocol.wire import Debt

MAX_PEERS = 4096
"""Ranks of D kept in mind; beyond this many, one with nothing under way is forgotten: it says Hello again."""

MAX_ORDERS = 4096
"""Grants of one rank of D that wait to be obeyed, and to which no chunk of ours belongs."""


@dataclass
class Entry:
    """One prompt that P's scheduler has told us of."""

    sender: Sender
    decode: str
    blocks: do.Blocks = ()
    free: bool = False


class Producer:
    def __init__(self, context: Context) -> None:
        self._ctx = context
        options = context.options
        self._terms = Terms(options.chunk_bytes, options.lease_seconds, options.whole_request)
        self._entries: dict[str, Entry] = {}
        self._peers: dict[Place, Outlet] = {}
        self._early = EarlyClaims(options.lease_seconds)
        self._ends = Ends(options.lease_seconds)
        context.counters.gauges |= {
            "prompts": lambda: sum(1 for e in tuple(self._entries.values()) if not e.sender.prompt.ended),
            "pages_held": lambda: sum(1 for entry in tuple(self._entries.values()) if not entry.free),
            "early_claims": lambda: len(self._early),
            "tombstones": lambda: len(self._ends),
            "staging_bytes": lambda: sum(peer.used for peer in tuple(self._peers.values())),
            "sends_under_way": lambda: sum(
                len(peer.orders) + len(peer.flights) for peer in tuple(self._peers.values())
            ),
            "peers": lambda: len(self._peers),
            "links": lambda: sum(1 for peer in tuple(self._peers.values()) if peer.linked),
            "links_stuck": lambda: context.links.stuck,
        }

    # The forward thread.

    def command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Hold(key, decode):
                self._entry(key, str(decode), now)
            case do.OfferPrompt(key, decode, tokens, digest):
                self._offer(self._entry(key, str(decode), now), tokens, digest, now)
            case do.Pages(key, blocks):
                for entry in self._live(key):
                    entry.blocks = blocks
            case do.Computed(prompts, layer, layer_stop, _):
                for key, stop in prompts:
                    for entry in self._live(key):
                        self._run(entry, entry.sender.computed(layer, layer_stop, stop, now), now)
            case do.Flush(keys):
                for entry in self._live(*keys):
                    self._run(entry, entry.sender.flush(), now)
            case do.Revoked(key):
                self._revoke(key)
            case do.Abort(key, reason):
                for entry in self._live(key):
                    self._run(entry, entry.sender.abort(reason), now)
            case do.Forget(key):
                self._entries.pop(key, None)
            case _:
                raise AssertionError(f"{command} is not for a P")

    def _offer(self, entry: Entry, tokens: int, digest: bytes, now: float) -> None:
        if not entry.sender.prompt.ended:
            self._run(entry, entry.sender.offer(tokens, digest), now)

    def _revoke(self, key: str) -> None:
        for entry in self._live(key):
            entry.sender.revoke()
        with self._ctx.reading:
            self._ctx.revoked.subtract([key])
            self._ctx.revoked = +self._ctx.revoked

    # The peers.

    def receive(self, line: Line, message: m.AnyMessage, now: float) -> None:
        if isinstance(message, m.Hello):
            self._hello(line, message, now)
            return
        peer = line.tag
        if not isinstance(peer, Outlet) or self._peers.get(peer.place) is not peer:
            self._ctx.tell(line, m.Stranger())
            return
        peer.fresh = False
        match message:
            case m.Waiting(transfers):
                self._waiting(peer, transfers, now)
            case m.LinkAccept():
                self._accept(peer, message, now)
            case m.LinkDown(link, reason):
                if link == peer.link and peer.linked and self._idle(peer, now):
                    peer.park(now)
                elif link == peer.link:
                    self._link_lost(peer, f"{peer.address} aborted the link: {reason}", now, tell=False)
            case m.Want(key) | m.Grant(key) | m.Done(key) | m.Cancel(key):
                self._about(peer, key, message, now)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a P")

    def _hello(self, line: Line, hello: m.Hello, now: float) -> None:
        mine = self._ctx.hello
        try:
            if hello.to != mine.address:
                raise Refused(
                    f"{hello.address} dialed {hello.to}, but this rank is {mine.address}: "
                    "use the address that the instance advertises"
                )
            plan = judge(mine, hello)
            wire, pages = self._ctx.form(hello)
        except Refused as refused:
            log.warning("refused %s: %s", hello.address, refused)
            self._ctx.counters.add("messages_refused")
            self._ctx.tell(line, m.Refuse(hello.incarnation, str(refused)))
            return
        self._ctx.tell(line, m.Welcome(hello.incarnation, mine, plan.digest))
        old = self._peers.get((hello.addresses[0], hello.rank))
        if old is not None and old.line is line and old.fresh and old.hello == hello:
            return
        debts = {edge.target: Debt(edge, wire) for edge in plan.from_source(mine.rank)}
        peer = Outlet(self._ctx, line, hello, plan, pages, debts.get(hello.rank), wanted=now)
        if old is not None:
            self._drop(old, f"{hello.address} has restarted or reconnected", now)
            peer.link = old.link
        self._make_room(line, now)
        line.tag = self._peers[peer.place] = peer
        log.info("D rank %d at %s is connected; what travels: %s", hello.rank, hello.address, wire)
        peer.invite(now)

    def _make_room(self, line: Line, now: float) -> None:
        """One connection is one rank, and they are bounded in number."""
        if isinstance(line.tag, Outlet) and self._peers.get(line.tag.place) is line.tag:
            self._drop(line.tag, f"{line.tag.address} says that it is another", now)
        if len(self._peers) >= MAX_PEERS:
            peers = list(self._peers.values())
            idle = next((peer for peer in peers if not peer.orders and not peer.flights), peers[0])
            self._drop(idle, f"{idle.address} makes room for another", now)

    def unreachable(self, line: Line, reason: str, now: float) -> None:
        """A P dials nobody."""
        raise AssertionError(reason)

    def _waiting(self, peer: Outlet, transfers: m.Transfers, now: float) -> None:
        if transfers:
            peer.want(now)
        held: list[tuple[str, int]] = []
        unknown: list[tuple[str, int]] = []
        for key, attempt in transfers:
            reason = self._ends.get(key)
            entry = self._entries.get(key)
            if reason is not None or (entry is not None and entry.decode != peer.hello.addresses[0]):
                reason = (
                    reason or f"P has this request paired with another D, {entry.decode if entry else ''}"
                )
                self._ctx.tell(peer.line, m.Failed(key, attempt, reason))
                continue
            (held if self._claim(peer, key, attempt, now) else unknown).append((key, attempt))
        if not self._ctx.steps.stalled(now):
            self._ctx.tell(peer.line, m.Holding(tuple(held), tuple(unknown)))

    def _claim(self, peer: Outlet, key: str, attempt: int, now: float) -> bool:
        """Note that D's rank waits for this prompt; whether P vouches for it."""
        entry = self._entries.get(key)
        if entry is None:
            return self._early.note(key, peer.place, attempt, self._ctx.steps.running, now)
        sender = entry.sender
        sender.expects = frozenset(edge.target for edge in peer.plan.from_source(self._ctx.hello.rank))
        if peer.debt is None:
            self._run(entry, [] if sender.prompt.ended else sender.flush(), now)
            return True
        self._run(entry, sender.claim(peer.hello.rank, peer.debt, attempt, peer.limit, now), now)
        return sender.vouches(peer.hello.rank, attempt)

    def _claim_early(self, key: str, now: float) -> None:
        """P has heard of this prompt: take in what was said before."""
        for place, early in self._early.take(key).items():
            if peer := self._peers.get(place):
                self._claim(peer, key, early.attempt, now)
                if early.last is not None:
                    self._about(peer, key, early.last, now)

    def _about(
        self, peer: Outlet, key: str, message: m.Want | m.Grant | m.Done | m.Cancel, now: float
    ) -> None:
        entry = self._entries.get(key)
        if entry is None:
            if isinstance(message, m.Grant) and message.link == peer.link:
                if len(peer.orders) >= MAX_ORDERS:
                    self._link_lost(peer, f"{peer.address} grants without end", now)
                    return
                peer.orders.append((key, Transmit(peer.hello.rank, message, ())))
            elif isinstance(message, m.Want | m.Cancel):
                self._early.keep(key, peer.place, message)
            elif isinstance(message, m.Done):
                # D still said that it waited when P had already let the prompt go.
                self._early.drop(key, peer.place, message.attempt)
            return
        sender = entry.sender
        try:
            match message:
                case m.Want():
                    effects = sender.want(peer.hello.rank, message, now)
                case m.Grant():
                    effects = sender.grant(peer.hello.rank, message, now)
                case m.Done():
                    effects = sender.done(peer.hello.rank, message, now)
                case m.Cancel():
                    effects = sender.cancel(peer.hello.rank, message)
        except RemoteProtocolError as error:
            self._ctx.counters.add("messages_refused")
            log.warning("%s: %s", peer.address, error)
            effects = sender.lost(peer.hello.rank, str(error))
            if isinstance(message, m.Grant):
                # D has posted a receive that nobody will fill in order.
                self._link_lost(peer, f"{peer.address} granted what was not announced", now)
        self._run(entry, effects, now)

    # The links.

    def _accept(self, peer: Outlet, message: m.LinkAccept, now: float) -> None:
        try:
            peer.accept(message)
        except LinkError as error:
            self._link_lost(peer, f"no link to {peer.address}: {error}", now)

    def _link_lost(self, peer: Outlet, reason: str, now: float, tell: bool = True) -> None:
        """This link is of no use any more. What it carried fails; a new one is made, if D still asks."""
        log.warning("%s", reason)
        peer.abort(now, reason if tell else "")
        self._lose(peer, reason, now)
        peer.parked = self._idle(peer, now)  # a dead D must not be invited for ever
        peer.invite(now)

    def _idle(self, peer: Outlet, now: float) -> bool:
        """Whether neither side has a use for this link now."""
        quiet = now - peer.wanted > IDLE_BEATS * self._ctx.beat and not (peer.orders or peer.flights)
        return quiet and not any(
            entry.decode == peer.hello.addresses[0] for entry in self._live(*self._entries)
        )

    def _close_idle(self, now: float) -> None:
        linked = [peer for peer in self._peers.values() if peer.linked]
        most = self._ctx.options.max_links
        for peer in surplus(linked, most, lambda each: self._idle(each, now), lambda each: each.wanted):
            log.info("closing the link to %s: %s", peer.address, REASON)
            peer.park(now, REASON)
        forgotten = max(FORGOTTEN_SECONDS, 2 * self._ctx.options.lease_seconds)
        for peer in linked:
            if peer.linked and now - peer.wanted > forgotten and self._idle(peer, now):
                peer.park(now, "it has been idle for long")

    def _drop(self, peer: Outlet, reason: str, now: float) -> None:
        """This incarnation of a D rank is gone."""
        peer.abort(now)
        self._peers.pop(peer.place, None)
        self._lose(peer, reason, now)

    def _lose(self, peer: Outlet, reason: str, now: float) -> None:
        for entry in list(self._entries.values()):
            if entry.decode == peer.hello.addresses[0]:
                self._run(entry, entry.sender.lost(peer.hello.rank, reason), now)

    # The data.

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        for peer in list(self._peers.values()):
            try:
                self._pump(peer, now)
            except LinkError as error:
                self._link_lost(peer, f"the link to {peer.address} broke: {error}", now)
        return any(peer.orders or peer.flights for peer in self._peers.values())

    def _pump(self, peer: Outlet, now: float) -> None:
        if peer.poll():
            self._linked(peer, now)
        for flight in peer.taken():
            entry = self._entries.get(flight.key)
            if entry is not None and entry.sender.prompt.state is Prompt.OFFERED:
                self._ctx.counters.add("bytes_early", flight.nbytes)
        for _ in range(BURST):
            if (found := peer.next_send()) is None:
                break
            self._transmit(peer, *found, now)

    def _linked(self, peer: Outlet, now: float) -> None:
        """The link is up, and so is the limit of a chunk: what has been claimed can be announced."""
        for entry in list(self._entries.values()):
            leg = entry.sender.legs.get(peer.hello.rank)
            if entry.decode == peer.hello.addresses[0] and leg is not None and peer.debt is not None:
                effects = entry.sender.claim(peer.hello.rank, peer.debt, leg.attempt, peer.limit, now)
                self._run(entry, effects, now)

    def _transmit(self, peer: Outlet, key: str, order: Transmit, send: Send, now: float) -> None:
        """Fill one send from the pages, under the lock that keeps them from being taken back meanwhile.

        The gather may only be queued: the send is ordered behind it, `Copies` knows of it, and whoever
        takes pages back waits for it.
        """
        entry = self._entries.get(key)
        wrong = ""
        with self._ctx.reading:
            void = entry is None or not entry.sender.readable(order) or key in self._ctx.revoked
            if entry is not None and peer.debt is not None and not void:
                try:
                    self._gather(entry, peer, peer.debt.edge, order, send)
                except ValueError as error:
                    void, wrong = True, str(error)
                self._ctx.copies.launched(key)
        send.commit()
        peer.flights.append(Flight(send, key, 0 if void else order.grant.nbytes, now))
        self._ctx.counters.add("chunks_void" if void else "chunks_sent")
        if not void:
            self._ctx.counters.add("bytes_sent", order.grant.nbytes)
        if entry is not None:
            if wrong:
                self._run(entry, entry.sender.abort(f"P cannot read its pages: {wrong}"), now)
            self._run(entry, entry.sender.sent(order, void), now)
        else:
            self._ctx.tell(
                peer.line, m.Sent(key, order.grant.attempt, order.grant.chunk, order.grant.link, True)
            )

    def _gather(self, entry: Entry, peer: Outlet, edge: Edge, order: Transmit, send: Send) -> None:
        pages, offset = peer.pages, 0
        shift = edge.source_layer - edge.layers.start
        heads = (edge.source_head, edge.source_head + len(edge.heads))
        for piece in order.pieces:
            layers = (piece.layer + shift, piece.layer_stop + shift)
            size = pages.nbytes(layers[1] - layers[0], piece.start, piece.stop, len(edge.heads))
            pages.gather(
                send.buffer[offset : offset + size], layers, (piece.start, piece.stop), heads, entry.blocks
            )
            offset += size

    # Time.

    def tick(self, now: float) -> None:
        for entry in list(self._entries.values()):
            self._run(entry, entry.sender.tick(now), now)
        lease = self._ctx.options.lease_seconds
        self._early.expire(now)
        for peer in list(self._peers.values()):
            if peer.flights and now - peer.flights[0].since > lease:
                self._link_lost(peer, f"{peer.address} has taken nothing for {lease:g} s", now)
            elif peer.building and now - peer.since > lease:
                self._link_lost(peer, f"the link to {peer.address} did not come up in {lease:g} s", now)
            peer.invite(now)
        self._close_idle(now)
        self._ends.expire(now)

    @property
    def idle(self) -> bool:
        """Whether nothing is due soon."""
        return not self._entries and not len(self._early) and all(peer.up for peer in self._peers.values())

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.abort(0.0, "P is shutting down")

    # Inside.

    def _entry(self, key: str, decode: str, now: float) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            self._ends.discard(key)
            entry = self._entries[key] = Entry(Sender(key, self._ctx.cache.layers, self._terms), decode)
            self._claim_early(key, now)
        return entry

    def _live(self, *keys: str) -> Iterator[Entry]:
        """The entries of these keys that have not ended."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and not entry.sender.prompt.ended:
                yield entry

    def _run(self, entry: Entry, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Tell(rank, message):
                    peer = self._peers.get((entry.decode, rank))
                    if peer is not None and not self._ctx.tell(peer.line, message):
                        self._drop(peer, f"the connection to {peer.address} is gone", now)
                case Transmit():
                    peer = self._peers.get((entry.decode, effect.rank))
                    if peer is not None and effect.grant.link == peer.link:
                        peer.orders.append((entry.sender.key, effect))
                case Released():
                    self._ctx.copies.then(entry.sender.key, lambda _: self._released(entry), now)
                case Finished(ok, reason):
                    self._finished(entry, ok, reason, now)

    def _released(self, entry: Entry) -> None:
        entry.free = True
        self._ctx.emit(do.PagesFree(entry.sender.key))

    def _finished(self, entry: Entry, ok: bool, reason: str, now: float) -> None:
        key = entry.sender.key
        self._ctx.counters.add("transfers_sent" if ok else "transfers_failed")
        if ok:
            log.debug("sent %s", key)
        else:
            self._ends.add(key, reason, now)
            log.warning("transfer %s was not sent: %s", key, reason)
