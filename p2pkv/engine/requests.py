"""The requests that D's scheduler has announced to this rank: what the ranks of P say about each, and what
follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np
import torch

from p2pkv.device import Fence, take_memory
from p2pkv.engine import commands as do
from p2pkv.engine.context import Context, log
from p2pkv.engine.peers import Arrived, Peers, PrefillPeer
from p2pkv.links.base import LinkError
from p2pkv.links.staging import ALIGNMENT, Slots
from p2pkv.pairing import Address
from p2pkv.plan import Edge
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Dialing, unfit
from p2pkv.protocol.machine import Effect, Finished, Offered, Post, RemoteProtocolError, Tell
from p2pkv.protocol.receiver import LoadPhase, Receiver

MAX_TRIES = 3
"""How often a request asks ranks of one P anew whose Hellos contradict each other."""

WAITING_AT_ONCE = 1024
"""Transfers that one `Heartbeat` names at most."""


# KV that comes before its request.


@dataclass(eq=False)
class EarlyBuffer:
    """The memory of one prompt. `touched`: when a chunk last came."""

    offset: int
    touched: float
    filled: int = 0
    kept: deque[Arrived] = field(default_factory=deque)


class EarlyBuffers:
    """All early buffers of one rank: parts of one allocation on the cache's device, made when the rank
    starts."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Raises MemoryError with a sentence if the device has no room."""
        whole = nbytes // ALIGNMENT * ALIGNMENT
        self._block = take_memory(whole, device, "ahead_bytes")
        self._slots = Slots(whole) if whole else None

    @property
    def used(self) -> int:
        """Bytes that buffers hold."""
        return self._slots.used if self._slots is not None else 0

    def take(self, nbytes: int, now: float) -> EarlyBuffer | None:
        """A buffer of so many bytes; None if there is no room now."""
        if self._slots is None or not 1 <= nbytes <= self._block.numel():
            return None
        offset = self._slots.take(nbytes)
        return None if offset is None else EarlyBuffer(offset, now)

    def keep(self, buffer: EarlyBuffer, chunk: Arrived, now: float) -> None:
        """Copy a chunk behind those that the buffer holds. On a device the copy is only queued."""
        start, nbytes = buffer.offset + buffer.filled, chunk.buffer.numel()
        room = self._block[start : start + nbytes]
        if room.device.type == "cpu":
            np.copyto(room.numpy(), chunk.buffer.numpy())
        else:
            room.copy_(chunk.buffer, non_blocking=True)
        buffer.kept.append(replace(chunk, buffer=room))
        buffer.filled += nbytes
        buffer.touched = now

    def give(self, buffer: EarlyBuffer) -> None:
        """Free a buffer."""
        assert self._slots is not None
        buffer.kept.clear()
        self._slots.give(buffer.offset)


# What is said about each request.


@dataclass
class RequestEntry:
    """One request that D's scheduler has announced."""

    expect: do.Expect
    receiver: Receiver
    peers: dict[int, PrefillPeer] = field(default_factory=dict)
    """The ranks of P to talk to, once all are connected."""
    blocks: do.Blocks = ()
    fence: Fence | None = None
    """See `commands.Load`."""
    wanted: tuple[int, int] = (0, 0)
    """The tokens to be loaded into these blocks."""
    tries: int = 0
    lost: float | None = None
    """When the connection to P was first lost, if P had not begun this request; None while P vouches for
    it."""
    early: EarlyBuffer | None = None
    """The memory of KV that came before the request; None: there is none."""

    @cached_property
    def prefill(self) -> str:
        """The address of P's rank 0."""
        return str(self.expect.prefill)

    @property
    def writable(self) -> bool:
        """Whether the blocks are this request's alone by now."""
        return self.fence is None or self.fence.ready()

    def rank_of(self, peer: PrefillPeer) -> int | None:
        """The rank of P that `peer` is for this request; None if it is none, or the request is not
        connected yet."""
        return next((rank for rank, each in self.peers.items() if each is peer), None)


class Requests:
    """The conversation about each request with the ranks of P that hold a part of its KV.

    `peers` are the dialed ranks of P by address: a rank that a request needs is dialed and added here, and
    taken out by the consumer when no request needs it.
    """

    def __init__(
        self,
        context: Context,
        peers: Peers[str, PrefillPeer],
        early_buffers: EarlyBuffers,
    ) -> None:
        self._ctx = context
        self._peers = peers
        self._early_buffers = early_buffers
        self._attempt = 0
        self._generation = ""
        """Of D's weights; a prompt of others is not taken before its request comes."""
        self.entries: dict[str, RequestEntry] = {}
        self._of: dict[str, dict[str, RequestEntry]] = {}
        """The entries of each rank of P, by its address and by key: those connected to it, and those whose
        P has it as rank 0."""
        self._unconnected: dict[str, dict[str, RequestEntry]] = {}
        """Entries that are not connected yet, by the address of P's rank 0 and by key. One that has ended
        may stay until the next tick."""
        self._next_look = 0.0
        """No lease ends before this time."""
        self.unloading: deque[RequestEntry] = deque()
        """Loads of which a part is in an early buffer."""
        context.counters.gauges |= {
            "requests": lambda: sum(1 for e in tuple(self.entries.values()) if not e.receiver.load.ended),
            "loads": lambda: sum(
                1 for e in tuple(self.entries.values()) if e.receiver.load.state is LoadPhase.LOADING
            ),
        }

    # The forward thread.

    def expect(self, expect: do.Expect, now: float) -> None:
        entry = self.entries.get(expect.key)
        if entry is not None and entry.receiver.ahead:
            if entry.expect == expect:
                self.run(entry, entry.receiver.adopt(now), now)
                self._look_by(entry)
                return
            self.run(entry, entry.receiver.cancel("D has another request of this name"), now)
        elif entry is not None:
            return
        entry = RequestEntry(expect, self._receiver(expect, now))
        self._enter(entry)
        self._connect(entry, now)

    def _enter(self, entry: RequestEntry) -> None:
        """A new request, which has to be connected to its ranks of P."""
        key = entry.expect.key
        self.entries[key] = entry
        self._of.setdefault(entry.prefill, {})[key] = entry
        self._unconnected.setdefault(entry.prefill, {})[key] = entry

    def _connected(self, entry: RequestEntry, peers: dict[int, PrefillPeer]) -> None:
        """All ranks of P that this request needs are connected."""
        entry.peers = peers
        for peer in peers.values():
            self._of.setdefault(peer.address, {})[entry.expect.key] = entry
        self._unconnected.get(entry.prefill, {}).pop(entry.expect.key, None)

    def _disconnected(self, entry: RequestEntry) -> None:
        """The request must connect to its ranks of P again."""
        self._out_of_tables(entry)
        entry.peers = {}
        self._enter(entry)

    def forget(self, key: str) -> None:
        if entry := self.entries.pop(key, None):
            self._out_of_tables(entry)

    def _out_of_tables(self, entry: RequestEntry) -> None:
        for address in [entry.prefill, *(peer.address for peer in entry.peers.values())]:
            for table in (self._of, self._unconnected):
                if (entries := table.get(address)) is not None:
                    entries.pop(entry.expect.key, None)
                    if not entries:
                        del table[address]

    def _receiver(self, expect: do.Expect, now: float, ahead: bool = False) -> Receiver:
        self._attempt += 1
        options, key = self._ctx.options, expect.key
        return Receiver(
            key,
            self._attempt,
            expect.tokens,
            expect.digest,
            options.lease_seconds,
            now,
            stall=options.stall_seconds,
            wait=options.wait_seconds,
            ahead=ahead,
        )

    def load(self, load: do.Load, now: float) -> None:
        """The request has blocks. Does nothing if its transfer has ended: that event was emitted already."""
        entry = self.entries.get(load.key)
        if entry is None:
            self._ctx.emit(do.LoadFailed(load.key, "this request was not announced to the engine"))
        elif not entry.receiver.load.ended:
            entry.blocks, entry.wanted, entry.fence = load.blocks, (load.start, load.stop), load.fence
            self._guard(entry, lambda: entry.receiver.want(load.start, load.stop, now), now)
            self._look_by(entry)  # a load may stall sooner
            if entry.early is not None:
                self.unloading.append(entry)

    def invalidate(self, generation: str, reason: str, now: float) -> None:
        """D's weights have changed, or its caches were reset: let go of all early buffers."""
        self._generation = generation
        for entry in list(self.entries.values()):
            if entry.early is not None:
                self.run(entry, entry.receiver.cancel(reason), now)

    def drop(self, key: str, reason: str, now: float) -> None:
        if entry := self.entries.get(key):
            self.run(entry, entry.receiver.cancel(reason), now)

    # The ranks of P.

    def connect(self, now: float) -> None:
        """A rank of P is connected now: connect the requests that waited for it and for no other."""
        for prefill, waiting in list(self._unconnected.items()):
            self._connect_all(waiting, now)
            if not waiting and self._unconnected.get(prefill) is waiting:
                del self._unconnected[prefill]

    def _connect_all(self, waiting: dict[str, RequestEntry], now: float) -> None:
        """All of `waiting` are for one P: where one still waits for a rank, the others do, too."""
        while waiting:
            key, entry = next(iter(waiting.items()))
            self._connect(entry, now)
            if waiting.get(key) is entry and not entry.receiver.load.ended:
                return
            waiting.pop(key, None)

    @property
    def connected(self) -> bool:
        """Whether no request waits for a connection."""
        return not self._unconnected

    def wants(self, peer: PrefillPeer) -> bool:
        """Whether a request is connected to this rank of P."""
        return any(entry.rank_of(peer) is not None for entry in self.of(peer))

    def _connect(self, entry: RequestEntry, now: float) -> None:
        """Connect the request to all ranks that hold a part of its KV, if all are there; then tell them
        that it waits."""
        if entry.peers or entry.receiver.load.ended:
            return
        first = self._peer(entry.expect.prefill, now)
        if first.dialing.refused:
            self.run(entry, entry.receiver.lost(first.dialing.reason), now)
            return
        first.reached = first.connection.reached
        if not first.dialing.open or first.hello is None or first.plan is None:
            return
        edges, places = self.ranks(first)
        peers = {rank: self._peer(place, now) for rank, place in places.items()}
        if not all(peer.dialing.open and peer.rank == rank for rank, peer in peers.items()):
            return
        if stray := next((peer for peer in peers.values() if not peer.is_of_the_engine_of(first)), None):
            self._stray(entry, stray, first, now)
            return
        self._connected(entry, peers)
        for peer in peers.values():
            peer.ask(m.Heartbeat(((entry.expect.key, entry.receiver.attempt),)), now)
        assignments = {rank: peers[rank].owes(some) for rank, some in edges.items()}
        self.run(entry, entry.receiver.attach(assignments, now), now)

    def _stray(self, entry: RequestEntry, stray: PrefillPeer, first: PrefillPeer, now: float) -> None:
        """Two ranks of P contradict each other. One may not know yet that its engine has restarted: ask it
        anew."""
        reason = unfit(
            first.address, stray.address, "they say different things of the engine that both are in"
        )
        entry.tries += 1
        if entry.tries > MAX_TRIES:
            advice = "start all ranks of that P anew, with the same options"
            self.run(entry, entry.receiver.lost(f"{reason}; {advice}"), now)
        self.lost(stray, reason, now)

    def ranks(self, peer: PrefillPeer) -> tuple[dict[int, list[Edge]], dict[int, Address]]:
        """The edges from `peer`'s engine to this rank, by its ranks, and the addresses of its ranks that must
        hear of a request."""
        assert peer.plan is not None and peer.hello is not None
        mine, plan, addresses = self._ctx.hello.rank, peer.plan, peer.hello.addresses
        edges: dict[int, list[Edge]] = {}
        for edge in plan.to_target(mine):
            edges.setdefault(edge.source, []).append(edge)
        # A rank of P that sends nothing to anybody must still learn that its blocks are free: one rank of D
        # tells it.
        idle = [rank for rank in range(len(addresses)) if not plan.from_source(rank)]
        idle = [rank for rank in idle if rank % plan.decode_ranks == mine]
        return edges, {rank: Address.parse(addresses[rank]) for rank in [*edges, *idle]}

    def ahead(self, peer: PrefillPeer, message: m.Ahead, now: float) -> None:
        """P has begun a prompt for which no request has come: take it if all ranks that hold a part are
        connected."""
        if message.key in self.entries or peer.hello is None:
            return
        edges, places = self.ranks(peer)
        first = Address.parse(peer.hello.addresses[0])
        peers = [self._peers.get(str(place)) for place in [first, *places.values()]]
        if not all(each is not None and each.dialing.open for each in peers):
            return
        owed = [peer.owes(some).extents(0, message.tokens) for some in edges.values()]
        buffer = self._early_buffers.take(sum(extents.nbytes for extents in owed), now)
        if buffer is None:
            return
        expect = do.Expect(message.key, first, message.tokens, message.digest)
        entry = RequestEntry(expect, self._receiver(expect, now, ahead=True), early=buffer)
        self._enter(entry)
        self._connect(entry, now)

    def _peer(self, address: Address, now: float) -> PrefillPeer:
        """A rank of P that a request needs."""
        peer = self._peers.get(str(address))
        if peer is not None and not peer.needed and not peer.dialing.open:
            peer.dialing = Dialing(
                peer.address, now
            )  # what came of earlier tries is not the request's affair
        peer = self.dial(address, now)
        peer.used = now
        return peer

    def dial(self, address: Address, now: float) -> PrefillPeer:
        """A rank of P: dialed if it is not yet, and asked again if it has not answered."""
        peer = self._peers.get(str(address))
        if peer is None:
            connection, dialing = self._ctx.endpoint.dial(address), Dialing(str(address), now)
            peer = PrefillPeer(self._ctx, connection, dialing, -inf, self._peers)
            peer.connection.tag = peer
            self._peers.add(peer)
        peer.greet(now)
        return peer

    def holding(self, peer: PrefillPeer, held: m.Transfers, now: float) -> None:
        """P vouches for these transfers."""
        for key, attempt in held:
            entry = self.entries.get(key)
            if entry is not None and entry.receiver.attempt == attempt and peer.hello is not None:
                entry.lost = None
                entry.receiver.held(peer.rank, now)

    def about(
        self, peer: PrefillPeer, key: str, message: m.Offer | m.Chunk | m.Sent | m.Failed, now: float
    ) -> None:
        """P says something about one transfer."""
        if isinstance(message, m.Sent):
            try:
                peer.note(message)
            except LinkError as error:
                self.link_lost(peer, f"the link from {peer.address} is out of step: {error}", now)
        entry = self.entries.get(key)
        if entry is None or peer.hello is None:
            return
        rank, receiver = peer.rank, entry.receiver

        def step() -> list[Effect]:
            match message:
                case m.Offer() if receiver.ahead and message.generation != self._generation:
                    return receiver.cancel("P computes it with other weights than D has")
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

    def _guard(self, entry: RequestEntry, step: Callable[[], list[Effect]], now: float) -> None:
        """Run a step of the receiver; a peer's breach of the protocol ends this transfer only."""
        try:
            effects = step()
        except RemoteProtocolError as error:
            self._ctx.counters.add("messages_refused")
            effects = entry.receiver.lost(f"P broke the protocol: {error}")
        self.run(entry, effects, now)

    # What breaks.

    def link_lost(self, peer: PrefillPeer, reason: str, now: float, tell: bool = True) -> None:
        """This link is given up, and what it carried fails; `tell`: whether P must be told."""
        peer.complain(reason)
        peer.abort(reason if tell else "")
        self.fail(peer, reason, now, only_loading=True)

    def lost(self, peer: PrefillPeer, reason: str, now: float) -> None:
        """This incarnation of a rank of P is gone. Requests that P had not begun ask the next one; all
        others fail."""
        peer.complain(reason)
        peer.lost(now)
        for entry in self.of(peer):
            receiver = entry.receiver
            waiting = receiver.load.state is LoadPhase.WAITING and not (receiver.nothing or receiver.ahead)
            entry.lost = now if entry.lost is None else entry.lost
            if waiting and now - entry.lost < self._ctx.options.lease_seconds:
                # Another connection, or another incarnation, may answer: within one lease of the loss.
                waits_since = receiver.waits_since
                entry.receiver = self._receiver(entry.expect, entry.lost)
                entry.receiver.waits_since = waits_since
                self._look_by(entry)
                self._disconnected(entry)
            else:
                self.run(entry, entry.receiver.lost(reason, entry.rank_of(peer)), now)

    def fail(self, peer: PrefillPeer, reason: str, now: float, only_loading: bool = False) -> None:
        """End the requests of this rank of P; with `only_loading` those of them that load."""
        for entry in self.of(peer):
            if not only_loading or entry.receiver.load.state in (LoadPhase.AHEAD, LoadPhase.LOADING):
                self.run(entry, entry.receiver.lost(reason, entry.rank_of(peer)), now)

    def of(self, peer: PrefillPeer) -> list[RequestEntry]:
        """The requests that need this rank of P."""
        return list(self._of.get(peer.address, {}).values())

    def leave(self, reason: str, now: float) -> None:
        """This rank stops: nothing is loaded any more, and P need not keep anything."""
        for entry in list(self.entries.values()):
            self.run(entry, entry.receiver.cancel(reason), now)

    # Time.

    def tick(self, now: float) -> None:
        if now >= self._next_look:
            self._look(now, self._ctx.options.lease_seconds)
        self.connect(now)

    def _look(self, now: float, lease: float) -> None:
        """End what has outlived its lease, and note when the next lease may end; messages from P may put it
        off."""
        # The earliest end of a lease or of a wait that begins later.
        self._next_look = now + min(lease, self._ctx.options.wait_seconds)
        for prefill, waiting in self._unconnected.items():
            for entry in waiting.values():
                first = self._peers.get(prefill)
                entry.receiver.reached = first is not None and first.reached
        for entry in list(self.entries.values()):
            self.run(entry, entry.receiver.tick(now), now)
            ends = [entry.receiver.deadline or inf]
            if entry.receiver.ahead and entry.early is not None:
                ends.append(entry.early.touched + lease)
                if now - entry.early.touched > lease:
                    reason = f"no request has asked for it here for {lease:g} s"
                    self.run(entry, entry.receiver.cancel(reason), now)
            self._next_look = min(self._next_look, *ends)

    def _look_by(self, entry: RequestEntry) -> None:
        """This request's next end may come before all others'."""
        self._next_look = min(self._next_look, entry.receiver.deadline or inf)

    @property
    def due(self) -> float:
        """When the next lease may end, if nothing happens before."""
        return self._next_look if self.entries else inf

    def say_waiting(self, now: float) -> None:
        """Tell each rank of P which transfers wait for it, to renew its leases."""
        for peer in self._peers:
            entries = self._of.get(peer.address, {}).values()
            # P's rank 0 may send nothing to this rank, and then need not hear of the request.
            ranks = ((entry.rank_of(peer), entry.receiver) for entry in entries)
            transfers = [(r.key, r.attempt) for rank, r in ranks if rank is not None and r.waits_for(rank)]
            if transfers:
                peer.used = now
            for first in range(0, len(transfers), WAITING_AT_ONCE):
                some = tuple(transfers[first : first + WAITING_AT_ONCE])
                if not peer.ask(m.Heartbeat(some), now):
                    self.lost(peer, f"{peer.address} is gone: the connection to it has ended", now)
                    break

    # What a receiver wants done.

    def run(self, entry: RequestEntry, effects: list[Effect], now: float) -> None:
        """Do what the receiver of this request has decided."""
        for effect in effects:
            match effect:
                case Tell(rank, message):
                    peer = entry.peers.get(rank)
                    if peer is not None and not self._ctx.tell(peer.connection, message):
                        self.lost(peer, f"{peer.address} is gone: the connection to it has ended", now)
                case Post(rank, chunk):
                    if rank in entry.peers:
                        entry.peers[rank].announced(entry.expect.key, chunk)
                case Offered(generation):
                    self._ctx.emit(do.Begun(entry.expect.key, generation))
                case Finished(ok, reason):
                    self._finished(entry, ok, reason, now)

    def _finished(self, entry: RequestEntry, ok: bool, reason: str, now: float) -> None:
        """Emit the outcome once nothing writes to the request's blocks any more."""
        key = entry.expect.key
        if entry.early is not None:
            self._early_buffers.give(entry.early)
            entry.early = None
        if entry.receiver.ahead:
            log.debug("let go of %s, which no request had asked for: %s", key, reason)
            self.forget(key)
            return
        self._ctx.counters.add("transfers_loaded" if ok else "transfers_failed")
        if not ok:
            log.warning("transfer %s failed: %s", key, reason)
        event = do.Loaded(key) if ok else do.LoadFailed(key, reason)
        self._ctx.copies.then(key, lambda _: self._ctx.emit(event), now)
