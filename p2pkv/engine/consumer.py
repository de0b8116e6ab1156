"""D's half of a rank: dials the ranks of P, and writes what they push into its requests' pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from p2pkv.control.endpoint import Line
from p2pkv.engine import commands as do
from p2pkv.engine.context import BURST, Context, log
from p2pkv.engine.idle import IDLE_BEATS, REASON, surplus
from p2pkv.engine.inlet import Inlet, Posted
from p2pkv.links.base import LinkError, Receive
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from p2pkv.protocol.effects import Effect, Finished, Offered, Post, Tell
from p2pkv.protocol.handshake import Dialing, Refused
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.receiver import Load, Receiver

IDLE_SECONDS = 60.0
"""A dialed rank of P that nobody has asked for anything for so long is hung up on."""

MAX_TRIES = 3
"""How often a request that P has not begun is asked for anew when P has restarted."""


@dataclass
class Entry:
    """One request that D's scheduler has told us of."""

    expect: do.Expect
    receiver: Receiver
    peers: dict[int, Inlet] = field(default_factory=dict)
    """The ranks of P to talk to, once all are connected."""
    blocks: do.Blocks = ()
    tries: int = 0


class Consumer:
    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._entries: dict[str, Entry] = {}
        self._peers: dict[str, Inlet] = {}
        self._attempt = 0
        self._next_beat = 0.0
        self._window = max(1, context.options.staging_bytes // 2)
        context.counters.gauges |= {
            "requests": lambda: sum(1 for e in self._entries.values() if not e.receiver.load.ended),
            "loads": lambda: sum(1 for e in self._entries.values() if e.receiver.load.state is Load.LOADING),
            "staging_bytes": self._staged,
            "receives_posted": lambda: sum(len(peer.posted) for peer in self._peers.values()),
            "receives_asked": lambda: sum(len(peer.asked) for peer in self._peers.values()),
            "peers": lambda: len(self._peers),
            "links": lambda: sum(1 for peer in self._peers.values() if peer.linked),
            "links_stuck": lambda: context.links.stuck,
        }

    # The forward thread.

    def command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Expect():
                self._expect(command, now)
            case do.Load(key, start, stop, blocks):
                if entry := self._entries.get(key):
                    self._load(entry, start, stop, blocks, now)
                else:
                    self._ctx.emit(do.LoadFailed(key, "this request was not announced to the engine"))
            case do.Drop(key, reason):
                if entry := self._entries.get(key):
                    self._run(entry, entry.receiver.cancel(reason), now)
            case do.Forget(key):
                self._entries.pop(key, None)
            case _:
                raise AssertionError(f"{command} is not for a D")

    def _expect(self, expect: do.Expect, now: float) -> None:
        if expect.key in self._entries:
            return
        entry = self._entries[expect.key] = Entry(expect, self._receiver(expect, now))
        self._connect(entry, now)

    def _receiver(self, expect: do.Expect, now: float) -> Receiver:
        self._attempt += 1
        lease = self._ctx.options.lease_seconds
        return Receiver(expect.key, self._attempt, expect.tokens, expect.digest, lease, now)

    def _load(self, entry: Entry, start: int, stop: int, blocks: do.Blocks, now: float) -> None:
        """If the transfer has ended, that has been said already, and is said only once."""
        if entry.receiver.load.ended:
            return
        entry.blocks = blocks
        self._guard(entry, lambda: entry.receiver.want(start, stop, now), now)

    # The peers.

    def receive(self, line: Line, message: m.AnyMessage, now: float) -> None:
        if isinstance(message, m.Hello):
            reason = f"{self._ctx.hello.address} is a consumer: consumers dial producers, nobody dials them"
            self._ctx.tell(line, m.Refuse(message.incarnation, reason))
            return
        peer = line.tag
        if not isinstance(peer, Inlet):
            return
        peer.mute = None
        match message:
            case m.Welcome():
                self._welcome(peer, message, now)
            case m.Refuse(_, reason):
                self._refuse(peer, reason, now)
            case m.Stranger():
                if peer.dialing.open:
                    self._lost(peer, f"{peer.address} does not know this connection any more", now)
            case m.Holding(held, _):
                self._holding(peer, held, now)
            case m.LinkInvite():
                self._invited(peer, message, now)
            case m.LinkDown(link, reason):
                if link == peer.link:
                    self._link_lost(peer, f"{peer.address} aborted the link: {reason}", now, tell=False)
            case m.Offer(key) | m.Chunk(key) | m.Sent(key) | m.Failed(key):
                self._about(peer, key, message, now)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a D")

    def _peer(self, address: Address, now: float) -> Inlet:
        peer = self._peers.get(str(address))
        if peer is None:
            peer = Inlet(self._ctx, self._ctx.endpoint.dial(address), Dialing(str(address), now), now)
            peer.line.tag = self._peers[str(address)] = peer
        peer.used = now
        peer.greet(now)
        return peer

    def _welcome(self, peer: Inlet, message: m.Welcome, now: float) -> None:
        again = peer.hello is not None and peer.hello.incarnation == message.hello.incarnation
        if message.you != self._ctx.hello.incarnation or again:
            return
        try:
            peer.welcome(message)
        except Refused as refused:
            self._refuse(peer, str(refused), now)
            return
        log.info("P rank %d at %s is connected; what travels: %s", peer.rank, peer.address, peer.wire)
        for entry in list(self._entries.values()):
            self._connect(entry, now)

    def _refuse(self, peer: Inlet, reason: str, now: float) -> None:
        self._ctx.counters.add("messages_refused")
        log.warning("no transfers from %s: %s", peer.address, reason)
        peer.dialing.refuse(reason, now)
        self._fail(peer, f"{peer.address} and this instance do not fit: {reason}", now)

    def unreachable(self, line: Line, reason: str, now: float) -> None:
        """Whoever listens there is no member, or nobody that we may dial; it is left alone for a while."""
        if isinstance(line.tag, Inlet):
            self._refuse(line.tag, reason, now)

    def _connect(self, entry: Entry, now: float) -> None:
        """Connect the request to all the ranks that owe it something; then say that it waits."""
        if entry.peers or entry.receiver.load.ended:
            return
        first = self._peer(entry.expect.prefill, now)
        if first.dialing.refused:
            reason = f"{first.address} and this instance do not fit: {first.dialing.reason}"
            self._run(entry, entry.receiver.lost(reason), now)
            return
        if not first.dialing.open or first.hello is None or first.plan is None:
            return
        mine, plan = self._ctx.hello.rank, first.plan
        edges = {edge.source: edge for edge in plan.to_target(mine)}
        # A rank of P that owes nobody anything must hear so: some rank of D tells it.
        everybody = range(len(first.hello.addresses))
        idle = [rank for rank in everybody if not plan.from_source(rank) and rank % plan.decode.world == mine]
        places = {rank: Address.parse(first.hello.addresses[rank]) for rank in [*edges, *idle]}
        peers = {rank: self._peer(place, now) for rank, place in places.items()}
        if not all(peer.dialing.open and peer.rank == rank for rank, peer in peers.items()):
            return
        entry.peers = peers
        for peer in peers.values():
            peer.ask(m.Waiting(((entry.expect.key, entry.receiver.attempt),)), now)
        debts = {rank: peers[rank].owes(edge) for rank, edge in edges.items()}
        self._run(entry, entry.receiver.attach(debts, now), now)

    def _holding(self, peer: Inlet, held: m.Transfers, now: float) -> None:
        for key, attempt in held:
            entry = self._entries.get(key)
            if entry is not None and entry.receiver.attempt == attempt and peer.hello is not None:
                entry.receiver.held(peer.rank, now)

    def _about(
        self, peer: Inlet, key: str, message: m.Offer | m.Chunk | m.Sent | m.Failed, now: float
    ) -> None:
        if isinstance(message, m.Sent):
            try:
                peer.note(message)
            except LinkError as error:
                self._link_lost(peer, f"the link from {peer.address} is out of step: {error}", now)
        entry = self._entries.get(key)
        if entry is None or peer.hello is None:
            return
        rank, receiver = peer.rank, entry.receiver

        def step() -> list[Effect]:
            match message:
                case m.Offer():
                    return receiver.offer(rank, message, now)
                case m.Chunk():
                    return receiver.chunk(rank, message, now)
                case m.Failed():
                    return receiver.failed(rank, message)
                case m.Sent():
                    receiver.sent(rank, message, now)
                    return []

        self._guard(entry, step, now)

    def _guard(self, entry: Entry, step: Callable[[], list[Effect]], now: float) -> None:
        """Run a step of the receiver; a peer's breach of the protocol ends this transfer only."""
        try:
            effects = step()
        except RemoteProtocolError as error:
            self._ctx.counters.add("messages_refused")
            effects = entry.receiver.lost(f"P broke the protocol: {error}")
        self._run(entry, effects, now)

    # The links.

    def _invited(self, peer: Inlet, message: m.LinkInvite, now: float) -> None:
        if peer.linked:
            self._link_lost(peer, f"{peer.address} builds its link anew", now, tell=False)
        try:
            peer.invited(message, self._window)
        except LinkError as error:
            self._fail(peer, f"no link from {peer.address}: {error}", now)

    def _link_lost(self, peer: Inlet, reason: str, now: float, tell: bool = True) -> None:
        log.warning("%s", reason)
        peer.abort(reason if tell else "")
        self._fail(peer, reason, now, only_loading=True)

    def _lost(self, peer: Inlet, reason: str, now: float) -> None:
        """This incarnation of a P rank is gone; ask whether there is another, for what has not begun."""
        log.warning("%s", reason)
        peer.lost(now)
        for entry in self._of(peer):
            receiver = entry.receiver
            waiting = receiver.load.state is Load.WAITING and not receiver.nothing
            if waiting and entry.tries < MAX_TRIES:
                entry.receiver, entry.peers = self._receiver(entry.expect, now), {}
                entry.tries += 1
            else:
                self._run(entry, entry.receiver.lost(reason, self._rank_in(entry, peer)), now)

    def _fail(self, peer: Inlet, reason: str, now: float, only_loading: bool = False) -> None:
        for entry in self._of(peer):
            if not only_loading or entry.receiver.load.state is Load.LOADING:
                self._run(entry, entry.receiver.lost(reason, self._rank_in(entry, peer)), now)

    def _rank_in(self, entry: Entry, peer: Inlet) -> int | None:
        return next((rank for rank, each in entry.peers.items() if each is peer), None)

    def _of(self, peer: Inlet) -> list[Entry]:
        """The requests that this rank of P has to do with."""
        return [
            entry
            for entry in self._entries.values()
            if peer in entry.peers.values() or str(entry.expect.prefill) == peer.address
        ]

    # The data.

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        for peer in list(self._peers.values()):
            try:
                peer.poll()
                self._post(peer, now)
                for _ in range(BURST):
                    if not peer.posted or not peer.posted[0].here:
                        break
                    self._land(peer, peer.posted.popleft(), now)
                self._post(peer, now)
            except LinkError as error:
                self._link_lost(peer, f"the link from {peer.address} broke: {error}", now)
        return any(peer.posted for peer in self._peers.values())

    def _post(self, peer: Inlet, now: float) -> None:
        """Post receives for announced chunks while there is room; one a turn if other peers wait too."""
        while peer.asked:
            key, chunk = peer.asked[0]
            entry = self._entries.get(key)
            if entry is None or not entry.receiver.pieces(peer.rank, chunk.attempt, chunk.chunk):
                peer.asked.popleft()
                continue
            if self._staged() + chunk.nbytes > self._ctx.options.staging_bytes:
                return
            posted = peer.post(now)
            if posted is None:
                return
            self._run(entry, entry.receiver.posted(peer.rank, chunk, peer.link, posted.receive.landing), now)
            if any(other.asked for other in self._peers.values() if other is not peer):
                return

    def _land(self, peer: Inlet, posted: Posted, now: float) -> None:
        """The bytes of a receive are here: write them where they belong, unless nobody wants them now."""
        entry, chunk = self._entries.get(posted.key), posted.chunk
        pieces = () if entry is None else entry.receiver.pieces(peer.rank, chunk.attempt, chunk.chunk)
        try:
            if entry is None or not pieces:
                self._ctx.counters.add("chunks_dropped")
                return
            try:
                self._scatter(entry, peer, pieces, posted.receive)
            finally:
                self._ctx.copies.launched(posted.key)
        except ValueError as error:
            assert entry is not None
            self._run(entry, entry.receiver.cancel(f"D cannot write its pages: {error}"), now)
            return
        finally:
            posted.receive.release()
        landed = partial(self._landed, entry, entry.receiver, peer.rank, chunk)
        self._ctx.copies.then(posted.key, landed, now)

    def _landed(self, entry: Entry, receiver: Receiver, rank: int, chunk: m.Chunk, now: float) -> None:
        """The device has written this chunk to the pages."""
        self._ctx.counters.add("bytes_scattered", chunk.nbytes)
        self._ctx.counters.add("chunks_scattered")
        self._run(entry, receiver.scattered(rank, chunk.chunk, now), now)

    def _scatter(self, entry: Entry, peer: Inlet, pieces: tuple[m.Piece, ...], receive: Receive) -> None:
        pages, edge, offset = peer.pages, entry.receiver.sources[peer.rank].debt.edge, 0
        assert pages is not None
        shift = edge.target_layer - edge.layers.start
        heads = (edge.target_head, edge.target_head + len(edge.heads))
        for piece in pieces:
            layers = (piece.layer + shift, piece.layer_stop + shift)
            size = pages.nbytes(layers[1] - layers[0], piece.start, piece.stop, len(edge.heads))
            part = receive.buffer[offset : offset + size]
            pages.scatter(part, layers, (piece.start, piece.stop), heads, entry.blocks)
            offset += size

    def _staged(self) -> int:
        return sum(peer.staged for peer in self._peers.values())

    # Time.

    def tick(self, now: float) -> None:
        for entry in list(self._entries.values()):
            self._run(entry, entry.receiver.tick(now), now)
            self._connect(entry, now)
        lease = self._ctx.options.lease_seconds
        for peer in list(self._peers.values()):
            if peer.mute is not None and now - peer.mute > lease:
                self._redial(peer, f"{peer.address} has answered nothing for {lease:g} s", now)
            if peer.posted and now - peer.posted[0].since > lease:
                self._link_lost(peer, f"{peer.address} has not sent what was granted for {lease:g} s", now)
            wanted = any(peer in entry.peers.values() for entry in self._entries.values())
            if not wanted and not peer.posted and now - peer.used > max(IDLE_SECONDS, lease):
                self._hang_up(peer)
        self._close_idle(now)
        if now >= self._next_beat and not self._ctx.steps.stalled(now):
            self._next_beat = now + self._ctx.beat
            self._say_waiting(now)

    def _say_waiting(self, now: float) -> None:
        waiting: dict[str, list[tuple[str, int]]] = {}
        for key, entry in self._entries.items():
            if not entry.receiver.load.ended:
                for peer in entry.peers.values():
                    peer.used = now
                    waiting.setdefault(peer.address, []).append((key, entry.receiver.attempt))
        for address, transfers in waiting.items():
            peer = self._peers[address]
            for first in range(0, len(transfers), 1024):
                if not peer.ask(m.Waiting(tuple(transfers[first : first + 1024])), now):
                    self._lost(peer, f"the connection to {address} is gone", now)
                    break

    def _redial(self, peer: Inlet, reason: str, now: float) -> None:
        """A connection may be dead although neither end was told: the next request gets a new one."""
        self._ctx.endpoint.hang_up(peer.line)
        self._lost(peer, reason, now)

    def _hang_up(self, peer: Inlet) -> None:
        peer.abort()
        self._ctx.endpoint.hang_up(peer.line)
        del self._peers[peer.address]

    def _close_idle(self, now: float) -> None:
        linked = [peer for peer in self._peers.values() if peer.linked]
        quiet = (IDLE_BEATS + 1) * self._ctx.beat

        def idle(peer: Inlet) -> bool:
            return now - peer.used > quiet and not (peer.posted or peer.asked or self._of(peer))

        for peer in surplus(linked, self._ctx.options.max_links, idle, lambda peer: peer.used):
            log.info("closing the link from %s: %s", peer.address, REASON)
            peer.abort(REASON)

    @property
    def idle(self) -> bool:
        """Whether nothing is due soon."""
        return not self._entries and not any(peer.posted for peer in self._peers.values())

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.abort("D is shutting down")

    # Inside.

    def _run(self, entry: Entry, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Tell(rank, message):
                    peer = entry.peers.get(rank)
                    if peer is not None and not self._ctx.tell(peer.line, message):
                        self._lost(peer, f"the connection to {peer.address} is gone", now)
                case Post(rank, chunk):
                    if rank in entry.peers:
                        entry.peers[rank].asked.append((entry.expect.key, chunk))
                case Offered():
                    self._ctx.emit(do.Begun(entry.expect.key))
                case Finished(ok, reason):
                    self._finished(entry, ok, reason, now)

    def _finished(self, entry: Entry, ok: bool, reason: str, now: float) -> None:
        """Say so once nothing writes to the pages any more."""
        key = entry.expect.key
        self._ctx.counters.add("transfers_loaded" if ok else "transfers_failed")
        if not ok:
            log.warning("transfer %s failed: %s", key, reason)
        event = do.Loaded(key) if ok else do.LoadFailed(key, reason)
        self._ctx.copies.then(key, lambda _: self._ctx.emit(event), now)
