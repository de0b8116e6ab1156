"""The transfers of a rank as D: its requests, the messages of ranks of P about each, and the scatter.

It calls the ranks of P (`from_prefill`), and is called by none of them: see `effects`.
"""

import contextlib
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

from msgspec.structs import replace

from p2pkv.config import RESERVED_CHUNKS
from p2pkv.device import Fence
from p2pkv.engine import commands as do
from p2pkv.engine import from_prefill
from p2pkv.engine.context import BURST, BURST_BYTES, LOOK_SECONDS, Context, log
from p2pkv.engine.effects import Emit, SendMessage, Timer
from p2pkv.engine.from_prefill import PrefillPeer, PrefillPeers
from p2pkv.engine.prefetch import ArrivedChunk, PrefetchBuffer, PrefetchBuffers
from p2pkv.kv.cache import CachedTables, Rectangles
from p2pkv.kv.layouts import Bounds, Tokens
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from p2pkv.protocol.extents import Extents
from p2pkv.protocol.handshake import Assignment, is_engine_of, unfit
from p2pkv.protocol.receiver import LoadPhase, Receiver
from p2pkv.protocol.state_machine import Decision, Finished, Offered, Post, RemoteProtocolError, SendTo

MAX_TRIES = 3
"""How often a request asks P again when P's ranks contradict, or P's engines redirect to, each other."""

MAX_RELEASES = 1024
"""The most ended requests that D still releases at the engine of P that has them; for others P's lease
ends."""

WAITING_AT_ONCE = 1024
"""Transfers that one `Heartbeat` names at most."""

TransferMessage = m.Offer | m.Chunk | m.Sent | m.Failed


@dataclass
class RequestEntry:
    """One request that D's scheduler has announced.

    Attributes:
        peers: the ranks of P to talk to, once all are connected.
        blocks, wanted, fence, number: those of `commands.Load`.
        lost: when the connection to P was first lost, if P had not begun this request; None while P vouches
            for it.
        want_pending: it has blocks, and P's offer has yet to come: D's router says that P has begun.
        buffer: the memory of KV that came before the request; None: there is none.
        release_at: the engine of P that has the request, and is to be released once the forward thread has
            forgotten it here.
    """

    expect: do.Expect
    receiver: Receiver
    peers: dict[int, PrefillPeer] = field(default_factory=dict)
    blocks: CachedTables = field(default_factory=CachedTables)
    fence: Fence | None = None
    number: int = 0
    wanted: tuple[int, int] = (0, 0)
    tries: int = 0
    lost: float | None = None
    want_pending: bool = False
    buffer: PrefetchBuffer | None = None
    release_at: Address | None = None
    _extents: dict[int, Extents] = field(default_factory=dict)

    @property
    def prefill(self) -> str:
        """The address of P's rank 0."""
        return str(self.expect.prefill)

    @property
    def writable(self) -> bool:
        """Whether the blocks are this request's alone by now."""
        return self.fence is None or self.fence.ready()

    @property
    def prefetch(self) -> bool:
        """Whether P pushes it, although no request for it has come."""
        return self.receiver.load.state is LoadPhase.PREFETCHING

    def rank_of(self, peer: PrefillPeer) -> int | None:
        """The rank of P that `peer` is for this request; None if it is none, or none is connected yet."""
        return next((rank for rank, each in self.peers.items() if each is peer), None)

    def drop_waiting(self) -> None:
        """The request has ended: post no receive for its chunks any more."""
        for peer in self.peers.values():
            peer.link.drop_waiting(self.expect.key)

    def extents(self, rank: int) -> Extents:
        """What this rank of P owes of the wanted tokens; only of a request that loads."""
        if rank not in self._extents:
            self._extents[rank] = self.receiver.sources[rank].assignment.extents(*self.wanted)
        return self._extents[rank]


class Decode:
    """All requests. `ranks`: the ranks of P, which are dialed here when a request needs them."""

    def __init__(self, context: Context, ranks: PrefillPeers) -> None:
        self._ctx = context
        self._ranks = ranks
        self._buffers = PrefetchBuffers(context.options.prefetch_bytes, context.cache.device)
        self._attempts = count(1)
        self._generation = ""
        """Of D's weights; what was computed with others is not taken before its request comes."""
        self._count = context.counters.values
        self.entries: dict[str, RequestEntry] = {}
        self._by_rank: dict[str, dict[str, RequestEntry]] = {}
        """The entries connected to each rank of P, or whose P has it as rank 0, by its address and by key."""
        self._unconnected: dict[str, dict[str, RequestEntry]] = {}
        """Entries not connected yet, by the address of P's rank 0 and by key; ended ones until `connect`."""
        self._releases = set[str]()
        """Keys of ended requests, whose entries only send P's engine that nothing is wanted."""
        self._prefetched: deque[RequestEntry] = deque()
        """Loads of which a part is in a prefetch buffer."""
        self._leases = Timer(context.timers, self._expire)
        self._beat = Timer(context.timers, self._send_heartbeats)
        self._beat.at(0.0)
        context.counters.add_gauges(
            prefetch_bytes=lambda: self._buffers.used,
            requests=lambda: sum(1 for e in tuple(self.entries.values()) if not e.receiver.load.ended),
            loads=lambda: sum(
                1 for e in tuple(self.entries.values()) if e.receiver.load.state is LoadPhase.LOADING
            ),
        )

    # The forward thread's commands.

    def expect(self, command: do.Expect, now: float) -> None:
        entry = self.entries.get(command.key)
        if entry is not None and command.key in self._releases:
            self._forget(entry)
        elif entry is not None and entry.receiver.prefetch:
            if entry.expect == command:
                self._apply_decisions(entry, entry.receiver.adopt(now), now)
                self._expire_by(entry)
                return
            self._apply_decisions(entry, entry.receiver.cancel("D has another prompt under this key"), now)
        elif entry is not None:
            return
        self._enter(RequestEntry(command, self._receiver(command, now)), now)

    def load(self, command: do.Load, now: float) -> None:
        """The request has blocks. Does nothing if its transfer has ended: that event was emitted already."""
        entry = self.entries.get(command.key)
        if entry is None:
            reason = "this rank of D does not know the request: its scheduler has not announced it"
            self._ctx.effects.append(Emit(do.LoadFailed(command.key, reason)))
        elif not entry.receiver.load.ended:
            start, stop = command.start, command.stop
            entry.blocks, entry.wanted = CachedTables(command.blocks), (start, stop)
            entry.fence, entry.number = command.fence, command.number
            entry.want_pending = stop > start and entry.receiver.load.state is LoadPhase.WAITING
            if not entry.want_pending:
                self._want(entry, now)

    def _want(self, entry: RequestEntry, now: float) -> None:
        """P has begun this request, which has its blocks: ask for what it wants."""
        entry.want_pending = False
        # D's scheduler may have ordered it before it knew of P's offer.
        if any(entry.wanted) and entry.receiver.generation not in (None, self._generation):
            reason = "P has computed this prompt with other weights than D's"
            self._apply_decisions(entry, entry.receiver.cancel(reason), now)
            return
        try:
            self._apply_decisions(entry, entry.receiver.want(*entry.wanted, now), now)
        except RemoteProtocolError as error:
            self._protocol_error(entry, error, now)
        self._expire_by(entry)  # a load may stall sooner
        if entry.buffer is not None:
            for peer in entry.peers.values():
                peer.link.admitted(entry.expect.key)
            self._prefetched.append(entry)

    def drop(self, command: do.Drop, now: float) -> None:
        if entry := self.entries.get(command.key):
            self._apply_decisions(entry, entry.receiver.cancel(command.reason), now)

    def forget(self, command: do.Forget, now: float) -> None:
        entry = self.entries.get(command.key)
        if command.role != "P" and entry is not None and command.key not in self._releases:
            self._forget(entry)
            if entry.tries and not entry.peers:  # it ended before it was connected to the engine that has it
                entry.release_at = entry.expect.prefill
            if entry.release_at is not None:
                self._release_other_engine(command.key, entry.release_at, now)

    def _forget(self, entry: RequestEntry) -> None:
        if self.entries.pop(entry.expect.key, None):
            self._releases.discard(entry.expect.key)
            self._out_of_tables(entry)
            entry.drop_waiting()

    def invalidate(self, command: do.Invalidate, now: float) -> None:
        """D's weights have changed, or its caches were reset: let go of all that came before its request."""
        self._generation = command.generation
        for entry in list(self.entries.values()):
            if entry.buffer is not None:
                self._apply_decisions(entry, entry.receiver.cancel(command.reason), now)

    # The tables.

    def _enter(self, entry: RequestEntry, now: float) -> None:
        """A new request: connect it to its ranks of P, at once if they are there."""
        self._await_connection(entry)
        self._connect(entry, now)

    def _await_connection(self, entry: RequestEntry) -> None:
        """The request has to be connected to its ranks of P."""
        key = entry.expect.key
        self.entries[key] = entry
        self._by_rank.setdefault(entry.prefill, {})[key] = entry
        self._unconnected.setdefault(entry.prefill, {})[key] = entry
        self._expire_by(entry)

    def _out_of_tables(self, entry: RequestEntry) -> None:
        for address in [entry.prefill, *(peer.address for peer in entry.peers.values())]:
            for table in (self._by_rank, self._unconnected):
                if (entries := table.get(address)) is not None:
                    entries.pop(entry.expect.key, None)
                    if not entries:
                        del table[address]

    def entries_of(self, peer: PrefillPeer) -> list[RequestEntry]:
        return list(self._by_rank.get(peer.address, {}).values())

    @property
    def used(self) -> set[str]:
        """The addresses of the ranks of P that requests need."""
        return set(self._by_rank)

    def uses(self, peer: PrefillPeer) -> bool:
        """Whether a request is connected to this rank of P."""
        return any(entry.rank_of(peer) is not None for entry in self.entries_of(peer))

    def _receiver(self, expect: do.Expect, now: float, prefetch: bool = False) -> Receiver:
        request = expect.tokens, expect.digest, self._ctx.terms
        return Receiver(expect.key, next(self._attempts), *request, now, prefetch)

    # Connecting.

    @property
    def connected(self) -> bool:
        """Whether no request waits for a connection."""
        return not self._unconnected

    def connect(self, now: float) -> None:
        """A rank of P may be connected now: connect the requests that waited for it and for no other."""
        for prefill, waiting in list(self._unconnected.items()):
            while waiting:
                key, entry = next(iter(waiting.items()))
                self._connect(entry, now)
                if waiting.get(key) is entry and not entry.receiver.load.ended:
                    break  # all of these are for one P: where one still waits for a rank, the others do, too
                waiting.pop(key, None)
            if not waiting and self._unconnected.get(prefill) is waiting:
                del self._unconnected[prefill]

    def _connect(self, entry: RequestEntry, now: float) -> None:
        """Connect the request to all ranks that hold a part of its KV, if all are there; ask them for it."""
        if entry.peers or entry.receiver.load.ended:
            return
        first = self._ranks.need(entry.expect.prefill, now)
        if first.dialing.reason:
            self._apply_decisions(entry, entry.receiver.lost(first.dialing.reason), now)
            return
        if not first.welcomed:
            return
        edges, addresses = first.ranks()
        peers = {rank: self._ranks.need(address, now) for rank, address in addresses.items()}
        if not all(peer.dialing.open and peer.rank == rank for rank, peer in peers.items()):
            return
        if other := next((peer for peer in peers.values() if not peer.same_engine_as(first)), None):
            # One of the two may not know of a restart of its engine: ask it anew.
            what = "they are ranks of one P, and their Hellos describe it differently"
            reason = unfit(first.address, other.address, what)
            entry.tries += 1
            if entry.tries > MAX_TRIES:
                advice = "start all ranks of that P anew, with the same options"
                self._apply_decisions(entry, entry.receiver.lost(f"{reason}; {advice}"), now)
            self._ranks.lose(other, reason, now)
            return
        entry.peers = peers
        self._unconnected.get(entry.prefill, {}).pop(entry.expect.key, None)
        for peer in peers.values():
            self._by_rank.setdefault(peer.address, {})[entry.expect.key] = entry
            beat = m.Heartbeat(((entry.expect.key, entry.receiver.attempt),))
            self._ctx.effects.append(SendMessage(peer, beat))
        assignments = {rank: Assignment.of(some, peers[rank].formats) for rank, some in edges.items()}
        self._apply_decisions(entry, entry.receiver.attach(assignments, now), now)

    def prefetch(self, peer: PrefillPeer, message: m.PrefetchOffer, now: float) -> None:
        """P has begun a prompt for which no request has come: take it if all its ranks are connected."""
        if message.key in self.entries or not peer.welcomed or peer.hello is None:
            return
        edges, addresses = peer.ranks()
        first = Address.parse(peer.hello.addresses[0])
        peers = [self._ranks.get(str(address)) for address in [first, *addresses.values()]]
        if not all(each is not None and each.dialing.open for each in peers):
            return
        owed = [Assignment.of(some, peer.formats).extents(0, message.tokens) for some in edges.values()]
        buffer = self._buffers.take(sum(extents.nbytes for extents in owed), now)
        if buffer is None:
            return
        expect = do.Expect(message.key, first, message.tokens, message.digest)
        entry = RequestEntry(expect, self._receiver(expect, now, prefetch=True), buffer=buffer)
        self._enter(entry, now)

    # Messages of ranks of P.

    def acknowledged(self, peer: PrefillPeer, message: m.HeartbeatAck, now: float) -> None:
        """P vouches for these transfers."""
        self._ranks.answered(peer)
        for key, attempt in message.held:
            entry = self.entries.get(key)
            if entry is not None and entry.receiver.attempt == attempt and peer.hello is not None:
                entry.lost = None
                entry.receiver.held(peer.rank, now)

    def redirected(self, peer: PrefillPeer, message: m.Redirect, now: float) -> None:
        """Another engine of this P has the request: ask that one. Raises RemoteProtocolError."""
        if peer.hello is None:
            return
        if not (peer.hello.instance and is_engine_of(message.engine, peer.hello)):
            raise RemoteProtocolError(f"{message.engine} is no engine of {peer.address}'s instance")
        entry, engine = self.entries.get(message.key), Address.parse(message.engine)
        if entry is None:
            self._release_other_engine(message.key, engine, now)
        elif entry.receiver.attempt != message.attempt:
            return
        elif entry.receiver.load.ended:
            entry.release_at = engine
        elif entry.receiver.load.state is LoadPhase.WAITING:
            entry.tries += 1
            if entry.tries > MAX_TRIES:
                reason = f"the engines of P at {entry.prefill} refer D to one another; none takes the request"
                self._apply_decisions(entry, entry.receiver.lost(reason), now)
                return
            self._out_of_tables(entry)
            entry.expect = replace(entry.expect, prefill=engine)
            entry.receiver = entry.receiver.again(next(self._attempts), now)
            entry.peers = {}
            self._enter(entry, now)

    def _release_other_engine(self, key: str, engine: Address, now: float) -> None:
        """The request ended while D asked another engine of P: this one may free its blocks."""
        if len(self._releases) >= MAX_RELEASES:
            return
        self._releases.add(key)
        expect = do.Expect(key, engine, 0, b"")
        entry = RequestEntry(expect, self._receiver(expect, now))
        entry.receiver.want(0, 0, now)
        self._enter(entry, now)

    def message(self, peer: PrefillPeer, message: TransferMessage, now: float) -> None:
        entry = self.entries.get(message.key)
        if entry is None or peer.hello is None:
            return
        rank, receiver = peer.hello.rank, entry.receiver
        try:
            match message:
                case m.Chunk():
                    decided = receiver.chunk(rank, message, now)
                case m.Offer() if receiver.prefetch and message.generation != self._generation:
                    decided = receiver.cancel("P computes this prompt with other weights than D's")
                case m.Offer():
                    decided = receiver.offer(rank, message, now)
                    if message.ready and not self._ctx.copies_synchronously:
                        self._ctx.idle_work.append(partial(receiver.foresee, rank))
                case m.Sent():
                    decided = receiver.sent(rank, message, now)
                case m.Failed():
                    decided = receiver.failed(rank, message)
        except RemoteProtocolError as error:
            self._protocol_error(entry, error, now)
        else:
            self._apply_decisions(entry, decided, now)

    def sent(self, peer: PrefillPeer, message: m.Sent, now: float) -> None:
        if self._ranks.sent(peer, message, now):
            self.message(peer, message, now)

    def _protocol_error(self, entry: RequestEntry, error: RemoteProtocolError, now: float) -> None:
        """A peer's breach of the protocol ends this transfer only."""
        self._ctx.counters.add("messages_refused")
        self._apply_decisions(entry, entry.receiver.lost(f"P broke the protocol: {error}"), now)

    # What has happened to ranks of P.

    def lost(self, effect: from_prefill.PrefillLost, now: float) -> None:
        """This incarnation is gone. Requests that P had not begun ask the next one; all others fail."""
        peer, reason = effect.peer, effect.reason
        for entry in self.entries_of(peer):
            receiver = entry.receiver
            ends = receiver.wants_nothing or receiver.prefetch
            waiting = receiver.load.state is LoadPhase.WAITING and not ends
            entry.lost = now if entry.lost is None else entry.lost
            if waiting and now - entry.lost < self._ctx.options.lease_seconds:
                # Another connection, or another incarnation, may answer: within one lease of the loss.
                entry.receiver = receiver.again(next(self._attempts), entry.lost)
                self._out_of_tables(entry)
                entry.peers = {}
                self._await_connection(entry)
            else:
                self._apply_decisions(entry, receiver.lost(reason, entry.rank_of(peer)), now)

    def fail(self, effect: from_prefill.PrefillFailed, now: float) -> None:
        """End the requests of this rank of P; with `only_loading` those of them that load."""
        for entry in self.entries_of(effect.peer):
            receiver = entry.receiver
            if not effect.only_loading or receiver.load.state in (LoadPhase.PREFETCHING, LoadPhase.LOADING):
                self._apply_decisions(entry, receiver.lost(effect.reason, entry.rank_of(effect.peer)), now)

    # The data.

    def posted(self, effect: from_prefill.ReceivePosted, now: float) -> None:
        """A receive is posted: grant it, whatever has become of the transfer."""
        peer, chunk = effect.peer, effect.chunk
        entry = self.entries.get(effect.key)
        if entry is not None and peer.hello is not None:
            entry.receiver.posted(peer.hello.rank, chunk)
            if not self._ctx.copies_synchronously:
                self._ctx.idle_work.append(partial(self._prepare, entry, peer, chunk))
        grant = m.Grant(effect.key, chunk.attempt, chunk.chunk, chunk.nbytes, effect.link, effect.slot)
        # First, and in the order of the receives, which P has to keep: a write may be waiting.
        self._ctx.effects.appendleft(SendMessage(peer, grant))

    def land(self, effect: from_prefill.ReceiveDone, now: float) -> None:
        """A receive is complete: write its bytes where they belong, unless the transfer has ended; in the
        next turn, if the step before may still write to those blocks."""
        peer, receiving = effect.peer, effect.receiving
        entry, chunk = self.entries.get(receiving.key), receiving.chunk
        if not receiving.live or peer.hello is None:
            return
        if entry is not None and not entry.receiver.load.ended and not entry.writable:
            return
        rank = peer.hello.rank
        pieces = () if entry is None else entry.receiver.pieces(rank, chunk.attempt, chunk.chunk)
        try:
            if entry is None or not pieces:
                self._ctx.counters.add("chunks_dropped")
                return
            assert receiving.sent is not None
            buffer = receiving.receive.buffer
            digest = self._ctx.cache.digest(buffer) if peer.verify else None  # before the scatter
            arrived = ArrivedChunk(peer, rank, chunk, receiving.sent, buffer, peer.rows, digest)
            if digest is not None and digest.known and arrived.differs():
                self._corrupt(entry, entry.receiver, arrived, now)
            elif entry.prefetch:
                self._store(entry, arrived, now)
            else:
                self._write(entry, arrived, now)
        finally:
            self._ranks.landed(peer, receiving, now)

    def _store(self, entry: RequestEntry, arrived: ArrivedChunk, now: float) -> None:
        """The request has no blocks yet: copy the chunk to its buffer."""
        assert entry.buffer is not None
        self._buffers.keep(entry.buffer, arrived, now)
        self._ctx.copies.launched(entry.expect.key)
        entry.receiver.stored(arrived.rank, arrived.chunk.chunk, now)
        self._count["bytes_prefetched"] += arrived.chunk.nbytes
        at_once = self._ctx.copies_synchronously and entry.buffer.filled <= BURST_BYTES
        if at_once and all(each.satisfied for each in entry.receiver.sources.values()):
            expect = entry.expect
            self._ctx.effects.append(Emit(do.PrefetchComplete(expect.key, expect.tokens, expect.digest)))

    def write_prefetched(self, now: float) -> bool:
        """Write some of what came before its request to the blocks that it has now; whether there is more."""
        waiting = self._prefetched
        for _ in range(BURST):
            while waiting and not (waiting[0].buffer and waiting[0].buffer.chunks):
                waiting.popleft()
            if not waiting or not waiting[0].writable:
                return bool(waiting)
            buffer = waiting[0].buffer
            assert buffer is not None
            self._write(waiting[0], buffer.next(), now)
        self._ctx.endpoint.wake()
        return True

    def _write(self, entry: RequestEntry, arrived: ArrivedChunk, now: float) -> None:
        receiver, key = entry.receiver, entry.expect.key
        try:
            self._scatter(entry, arrived)
        except ValueError as error:
            self._ctx.copies.launched(key)
            self._apply_decisions(entry, receiver.cancel(f"D cannot write its blocks: {error}"), now)
            return
        if self._ctx.copies.launched(key):
            self._written(entry, receiver, arrived, now)
        else:
            self._ctx.copies.then(key, partial(self._written, entry, receiver, arrived), now)

    def _scatter(self, entry: RequestEntry, arrived: ArrivedChunk) -> None:
        buffer, nbytes = arrived.buffer, arrived.chunk.nbytes
        for piece, start, stop in entry.extents(arrived.rank).parts(arrived.chunk.pieces):
            rows, layers, tokens, heads = self._rectangle(entry, arrived.rank, arrived.rows, piece)
            part = buffer if stop - start == nbytes else buffer[start:stop]
            rows.scatter(part, layers, tokens, heads, entry.blocks)

    @staticmethod
    def _rectangle(
        entry: RequestEntry, rank: int, rows: tuple[Rectangles, ...], piece: m.Piece
    ) -> tuple[Rectangles, Bounds, Tokens, Bounds]:
        """Where a piece of this rank of P lies in our cache, seen as `rows`: layers, tokens and heads."""
        edge = entry.receiver.sources[rank].assignment.edges[piece.group]
        shift = edge.target_layer - edge.layers.start
        heads = (edge.target_head, edge.target_head + edge.heads.stop - edge.heads.start)
        span = piece.start, piece.stop
        tokens = span if edge.tokens is None else edge.tokens.on_target(*span)
        return rows[piece.group], (piece.layer + shift, piece.layer_stop + shift), tokens, heads

    def _prepare(self, entry: RequestEntry, peer: PrefillPeer, chunk: m.Chunk) -> None:
        """The bytes of this chunk are on their way, if they have not come yet: prepare the scatter."""
        rank, load = entry.rank_of(peer), entry.receiver.load
        if rank is None or load.state is not LoadPhase.LOADING or not entry.receiver.awaits(rank, chunk):
            return
        with contextlib.suppress(ValueError):  # the scatter raises it, too
            for piece, _, _ in entry.extents(rank).parts(chunk.pieces):
                rows, layers, tokens, heads = self._rectangle(entry, rank, peer.rows, piece)
                rows.prepare(layers, tokens, heads, entry.blocks)

    def _written(self, entry: RequestEntry, receiver: Receiver, arrived: ArrivedChunk, now: float) -> None:
        """The device has written this chunk to the blocks, and computed its checksum."""
        if arrived.digest is not None and arrived.differs():
            self._corrupt(entry, receiver, arrived, now)
            return
        self._count["bytes_scattered"] += arrived.chunk.nbytes
        self._count["chunks_scattered"] += 1
        self._apply_decisions(entry, receiver.scattered(arrived.rank, arrived.chunk.chunk, now), now)

    def _corrupt(self, entry: RequestEntry, receiver: Receiver, arrived: ArrivedChunk, now: float) -> None:
        """The bytes are not what P gathered: end the transfer, and the link, which may spoil others."""
        peer, sent = arrived.peer, arrived.sent
        assert arrived.digest is not None
        self._ctx.counters.add("chunks_corrupt")
        theirs, ours = sent.digest.hex() or "none", arrived.digest.value().hex()
        reason = (
            f"chunk {sent.chunk} from {peer.address} has checksum {ours} here and {theirs} there: its bytes "
            "changed on the way"
        )
        self._apply_decisions(entry, receiver.cancel(reason), now)
        given_up = f"the link is given up: {reason}"
        self._ctx.effects.append(from_prefill.AbortPrefillLink(peer, sent.link, given_up))

    # Time, and the end.

    def _expire(self, now: float) -> None:
        """End what has outlived its lease, and note when the next lease may end, without news from P."""
        lease = self._ctx.terms.lease
        # The earliest end of a lease or of a wait that begins later.
        first = now + min(lease, self._ctx.terms.wait)
        for entry in list(self.entries.values()):
            peer = self._ranks.get(entry.prefill)
            self._apply_decisions(entry, entry.receiver.tick(now, peer is not None and peer.reached), now)
            ends = [entry.receiver.deadline or inf]
            if entry.receiver.prefetch and entry.buffer is not None:
                ends.append(entry.buffer.touched + lease)
                if now - entry.buffer.touched > lease:
                    reason = f"no request has asked for it here for {lease:g} s"
                    self._apply_decisions(entry, entry.receiver.cancel(reason), now)
            first = min(first, *ends)
        if self.entries:
            self._leases.at(first)

    def _expire_by(self, entry: RequestEntry) -> None:
        """This request's next end may come before all others'."""
        self._leases.by(entry.receiver.deadline or inf)

    def _send_heartbeats(self, now: float) -> None:
        """Renew the leases of transfers that wait for P, unless this engine is in trouble."""
        if self._ctx.steps.trouble(now):
            self._beat.at(now + LOOK_SECONDS)
            return
        self._beat.at(now + self._ctx.beat)
        for peer in self._ranks:
            entries = self._by_rank.get(peer.address, {}).values()
            # P's rank 0 may send nothing to this rank, and then need not know of the request.
            ranks = ((entry.rank_of(peer), entry.receiver) for entry in entries)
            transfers = [(r.key, r.attempt) for rank, r in ranks if rank is not None and r.waits_for(rank)]
            for first in range(0, len(transfers), WAITING_AT_ONCE):
                some = tuple(transfers[first : first + WAITING_AT_ONCE])
                self._ctx.effects.append(SendMessage(peer, m.Heartbeat(some)))

    def leave(self, reason: str, now: float) -> None:
        """This rank stops: nothing is loaded any more, and P need not keep anything."""
        for entry in list(self.entries.values()):
            self._apply_decisions(entry, entry.receiver.cancel(reason), now)

    @property
    def finished(self) -> bool:
        return all(entry.receiver.load.ended for entry in self.entries.values())

    def _apply_decisions(self, entry: RequestEntry, decided: list[Decision], now: float) -> None:
        effects, key = self._ctx.effects, entry.expect.key
        for each in decided:
            match each:
                case SendTo(rank, message):
                    if (peer := entry.peers.get(rank)) is not None:
                        effects.append(SendMessage(peer, message))
                case Post(rank, chunk):
                    if (peer := entry.peers.get(rank)) is not None:
                        reserve = RESERVED_CHUNKS * self._ctx.options.chunk_bytes if entry.prefetch else 0
                        self._ranks.announced(peer, from_prefill.WaitingChunk(key, chunk, reserve))
                case Offered(generation):
                    effects.append(Emit(do.Begun(key, generation)))
                    if entry.want_pending:
                        self._want(entry, now)
                case Finished(ok, reason):
                    self._finished(entry, ok, reason, now)

    def _finished(self, entry: RequestEntry, ok: bool, reason: str, now: float) -> None:
        """Emit the outcome once nothing writes to the request's blocks any more."""
        key = entry.expect.key
        entry.drop_waiting()
        if entry.buffer is not None:
            self._buffers.give(entry.buffer)
            entry.buffer = None
        if key in self._releases:
            self._forget(entry)
            return
        if entry.receiver.prefetch:
            log.debug("dropped the KV of %s, which no request had asked for: %s", key, reason)
            self.forget(do.Forget(key), now)
            return
        self._ctx.counters.add("transfers_loaded" if ok else "transfers_failed")
        if not ok:
            log.warning("transfer %s failed: %s (P is %s)", key, reason, entry.expect.prefill)
        event = do.Loaded(key, entry.number) if ok else do.LoadFailed(key, reason)
        self._ctx.copies.then(key, lambda _: self._ctx.effects.append(Emit(event)), now)
