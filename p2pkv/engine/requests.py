"""The requests that D's scheduler has told of: what is said about each of them, and what becomes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from p2pkv.engine import commands as do
from p2pkv.engine.context import Context, log
from p2pkv.engine.inlet import Inlet
from p2pkv.engine.shelves import Shelf, Shelves
from p2pkv.links.base import LinkError
from p2pkv.pairing import Address
from p2pkv.plan import Edge
from p2pkv.protocol import messages as m
from p2pkv.protocol.effects import Effect, Finished, Offered, Post, Tell
from p2pkv.protocol.handshake import Dialing, unfit
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.receiver import Receiver
from p2pkv.protocol.receiver_states import Load

MAX_TRIES = 3
"""How often ranks of one P that contradict each other are asked anew."""

WAITING_AT_ONCE = 1024
"""Transfers that one `Waiting` names at most."""


@dataclass
class Entry:
    """One request that D's scheduler has told us of."""

    expect: do.Expect
    receiver: Receiver
    peers: dict[int, Inlet] = field(default_factory=dict)
    """The ranks of P to talk to, once all are connected."""
    blocks: do.Blocks = ()
    wanted: tuple[int, int] = (0, 0)
    """The tokens to be loaded into these blocks."""
    tries: int = 0
    lost: float | None = None
    """When P was lost first, of a request that it had not begun; None while P vouches for it."""
    shelf: Shelf | None = None
    """Where KV waits that came before the request did."""

    @cached_property
    def prefill(self) -> str:
        """The address of P's rank 0."""
        return str(self.expect.prefill)

    def rank_of(self, peer: Inlet) -> int | None:
        """Which of this request's ranks of P that is; None if it is none of them, or not yet."""
        return next((rank for rank, each in self.peers.items() if each is peer), None)


class Requests:
    """The conversation about each request with the ranks of P that owe it something.

    `peers` are the dialed ranks of P by address: a rank that a request needs is dialed and added here, and
    taken out by the consumer when no request needs it. `active`: see Inlet.
    """

    def __init__(
        self, context: Context, peers: dict[str, Inlet], active: dict[Inlet, None], shelves: Shelves
    ) -> None:
        self._ctx = context
        self._peers = peers
        self._active = active
        self._shelves = shelves
        self._attempt = 0
        self.entries: dict[str, Entry] = {}
        self._of: dict[str, dict[str, Entry]] = {}
        """By address and key: for each rank of P those connected to it, or of whose P it is rank 0."""
        self._unconnected: dict[str, dict[str, Entry]] = {}
        """Those not connected, by the address of P's rank 0 and key; some that have ended stay for a tick."""
        self._next_look = 0.0
        """No lease ends before."""
        self.unloading: deque[Entry] = deque()
        """Loads of which a part is on a shelf."""
        context.counters.gauges |= {
            "requests": lambda: sum(1 for e in tuple(self.entries.values()) if not e.receiver.load.ended),
            "loads": lambda: sum(
                1 for e in tuple(self.entries.values()) if e.receiver.load.state is Load.LOADING
            ),
        }

    # The forward thread.

    def expect(self, expect: do.Expect, now: float) -> None:
        entry = self.entries.get(expect.key)
        if entry is not None and entry.receiver.ahead:
            if entry.expect == expect:
                self.run(entry, entry.receiver.adopt(), now)
                return
            self.run(entry, entry.receiver.cancel("D has another request of this name"), now)
        elif entry is not None:
            return
        entry = Entry(expect, self._receiver(expect, now))
        self._enter(entry)
        self._connect(entry, now)

    def _enter(self, entry: Entry) -> None:
        """A new request, which has to be connected to its ranks of P."""
        key = entry.expect.key
        self.entries[key] = entry
        self._of.setdefault(entry.prefill, {})[key] = entry
        self._unconnected.setdefault(entry.prefill, {})[key] = entry

    def _connected(self, entry: Entry, peers: dict[int, Inlet]) -> None:
        """These are the ranks of P that this request has to do with."""
        entry.peers = peers
        for peer in peers.values():
            self._of.setdefault(peer.address, {})[entry.expect.key] = entry
        self._unconnected.get(entry.prefill, {}).pop(entry.expect.key, None)

    def _disconnected(self, entry: Entry) -> None:
        """It has to be connected anew."""
        self._out_of_tables(entry)
        entry.peers = {}
        self._enter(entry)

    def forget(self, key: str) -> None:
        if entry := self.entries.pop(key, None):
            self._out_of_tables(entry)

    def _out_of_tables(self, entry: Entry) -> None:
        for address in [entry.prefill, *(peer.address for peer in entry.peers.values())]:
            for table in (self._of, self._unconnected):
                if (entries := table.get(address)) is not None:
                    entries.pop(entry.expect.key, None)
                    if not entries:
                        del table[address]

    def _receiver(self, expect: do.Expect, now: float, ahead: bool = False) -> Receiver:
        self._attempt += 1
        lease, stall = self._ctx.options.lease_seconds, self._ctx.options.stall_seconds
        key, tokens, digest = expect.key, expect.tokens, expect.digest
        return Receiver(key, self._attempt, tokens, digest, lease, now, stall=stall, ahead=ahead)

    def load(self, load: do.Load, now: float) -> None:
        """If the transfer has ended, that has been said already, and is said only once."""
        entry = self.entries.get(load.key)
        if entry is None:
            self._ctx.emit(do.LoadFailed(load.key, "this request was not announced to the engine"))
        elif not entry.receiver.load.ended:
            entry.blocks, entry.wanted = load.blocks, (load.start, load.stop)
            self._guard(entry, lambda: entry.receiver.want(load.start, load.stop, now), now)
            self._next_look = min(self._next_look, entry.receiver.deadline or inf)  # a load may stall sooner
            if entry.shelf is not None:
                self.unloading.append(entry)

    def drop(self, key: str, reason: str, now: float) -> None:
        if entry := self.entries.get(key):
            self.run(entry, entry.receiver.cancel(reason), now)

    # The ranks of P.

    def connect(self, now: float) -> None:
        """A rank of P is connected now: it may be the last one that a request has waited for."""
        for prefill, waiting in list(self._unconnected.items()):
            self._connect_all(waiting, now)
            if not waiting and self._unconnected.get(prefill) is waiting:
                del self._unconnected[prefill]

    def _connect_all(self, waiting: dict[str, Entry], now: float) -> None:
        """All are for one P: what one of them still waits for, the others do, and need not be tried."""
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

    def wants(self, peer: Inlet) -> bool:
        """Whether a request is connected to this rank of P."""
        return any(entry.rank_of(peer) is not None for entry in self.of(peer))

    def _connect(self, entry: Entry, now: float) -> None:
        """Connect the request to all the ranks that owe it something; then say that it waits."""
        if entry.peers or entry.receiver.load.ended:
            return
        first = self._peer(entry.expect.prefill, now)
        if first.dialing.refused:
            self.run(entry, entry.receiver.lost(first.dialing.reason), now)
            return
        first.reached = first.line.reached
        if not first.dialing.open or first.hello is None or first.plan is None:
            return
        edges, places = self._ranks(first)
        peers = {rank: self._peer(place, now) for rank, place in places.items()}
        if not all(peer.dialing.open and peer.rank == rank for rank, peer in peers.items()):
            return
        if stray := next((peer for peer in peers.values() if not peer.is_of_the_engine_of(first)), None):
            self._stray(entry, stray, first, now)
            return
        self._connected(entry, peers)
        for peer in peers.values():
            peer.ask(m.Waiting(((entry.expect.key, entry.receiver.attempt),)), now)
        debts = {rank: peers[rank].owes(edge) for rank, edge in edges.items()}
        self.run(entry, entry.receiver.attach(debts, now), now)

    def _stray(self, entry: Entry, stray: Inlet, first: Inlet, now: float) -> None:
        """What a rank has said may be left from before a restart of its engine: it is asked anew."""
        reason = unfit(
            first.address, stray.address, "they say different things of the engine that both are in"
        )
        entry.tries += 1
        if entry.tries > MAX_TRIES:
            advice = "start all ranks of that P anew, with the same options"
            self.run(entry, entry.receiver.lost(f"{reason}; {advice}"), now)
        self.lost(stray, reason, now)

    def _ranks(self, peer: Inlet) -> tuple[dict[int, Edge], dict[int, Address]]:
        """What the ranks of this rank's engine owe us, and where those are that must hear of a request."""
        assert peer.plan is not None and peer.hello is not None
        mine, plan, addresses = self._ctx.hello.rank, peer.plan, peer.hello.addresses
        edges = {edge.source: edge for edge in plan.to_target(mine)}
        # A rank of P that owes nobody anything must hear so: some rank of D tells it.
        everybody = range(len(addresses))
        idle = [rank for rank in everybody if not plan.from_source(rank) and rank % plan.decode.world == mine]
        return edges, {rank: Address.parse(addresses[rank]) for rank in [*edges, *idle]}

    def ahead(self, peer: Inlet, message: m.Ahead, now: float) -> None:
        """P has begun a prompt that we have no request for: take it, if all who owe a part are connected."""
        if message.key in self.entries or peer.hello is None:
            return
        edges, places = self._ranks(peer)
        first = Address.parse(peer.hello.addresses[0])
        peers = [self._peers.get(str(place)) for place in [first, *places.values()]]
        if not all(each is not None and each.dialing.open for each in peers):
            return
        windows = [peer.owes(edge).window(0, message.tokens) for edge in edges.values()]
        shelf = self._shelves.take(sum(window.nbytes for window in windows), now)
        if shelf is None:
            return
        expect = do.Expect(message.key, first, message.tokens, message.digest)
        entry = Entry(expect, self._receiver(expect, now, ahead=True), shelf=shelf)
        self._enter(entry)
        self._connect(entry, now)

    def _peer(self, address: Address, now: float) -> Inlet:
        peer = self._peers.get(str(address))
        if peer is None:
            line, dialing = self._ctx.endpoint.dial(address), Dialing(str(address), now)
            peer = Inlet(self._ctx, line, dialing, now, self._active)
            peer.line.tag = self._peers[str(address)] = peer
        peer.used = now
        peer.greet(now)
        return peer

    def holding(self, peer: Inlet, held: m.Transfers, now: float) -> None:
        """P vouches for these transfers."""
        for key, attempt in held:
            entry = self.entries.get(key)
            if entry is not None and entry.receiver.attempt == attempt and peer.hello is not None:
                entry.lost = None
                entry.receiver.held(peer.rank, now)

    def about(
        self, peer: Inlet, key: str, message: m.Offer | m.Chunk | m.Sent | m.Failed, now: float
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
        self.run(entry, effects, now)

    # What breaks.

    def link_lost(self, peer: Inlet, reason: str, now: float, tell: bool = True) -> None:
        """This link is of no use any more, and what it carried fails; `tell`: P has to hear so."""
        log.warning("%s", reason)
        peer.abort(reason if tell else "")
        self.fail(peer, reason, now, only_loading=True)

    def lost(self, peer: Inlet, reason: str, now: float) -> None:
        """This incarnation of a P rank is gone; ask whether there is another, for what has not begun."""
        log.warning("%s", reason)
        peer.lost(now)
        for entry in self.of(peer):
            receiver = entry.receiver
            waiting = receiver.load.state is Load.WAITING and not (receiver.nothing or receiver.ahead)
            entry.lost = now if entry.lost is None else entry.lost
            if waiting and now - entry.lost < self._ctx.options.lease_seconds:
                # Another connection, or another incarnation, may answer: within one lease of the loss.
                entry.receiver = self._receiver(entry.expect, entry.lost)
                self._next_look = min(self._next_look, entry.receiver.deadline or inf)
                self._disconnected(entry)
            else:
                self.run(entry, entry.receiver.lost(reason, entry.rank_of(peer)), now)

    def fail(self, peer: Inlet, reason: str, now: float, only_loading: bool = False) -> None:
        """The requests of this rank of P fail, or those of them that load."""
        for entry in self.of(peer):
            if not only_loading or entry.receiver.load.state in (Load.AHEAD, Load.LOADING):
                self.run(entry, entry.receiver.lost(reason, entry.rank_of(peer)), now)

    def of(self, peer: Inlet) -> list[Entry]:
        """The requests that this rank of P has to do with."""
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
        """End what has outlived its lease, and note when the next lease may end: P's word puts it off."""
        self._next_look = now + lease  # of a lease that begins after this
        for prefill, waiting in self._unconnected.items():
            for entry in waiting.values():
                entry.receiver.reached = prefill in self._peers and self._peers[prefill].reached
        for entry in list(self.entries.values()):
            self.run(entry, entry.receiver.tick(now), now)
            ends = [entry.receiver.deadline or inf]
            if entry.receiver.ahead and entry.shelf is not None:
                ends.append(entry.shelf.touched + lease)
                if now - entry.shelf.touched > lease:
                    reason = f"no request has asked for it here for {lease:g} s"
                    self.run(entry, entry.receiver.cancel(reason), now)
            self._next_look = min(self._next_look, *ends)

    @property
    def due(self) -> float:
        """When the next lease may end, if nothing happens before."""
        return self._next_look if self.entries else inf

    def say_waiting(self, now: float) -> None:
        """Tell each rank of P which transfers wait for it, to renew its leases."""
        for address, peer in list(self._peers.items()):
            entries = self._of.get(address, {}).values()
            # P's rank 0 may owe this rank nothing, and need not hear of the request.
            ranks = ((entry.rank_of(peer), entry.receiver) for entry in entries)
            transfers = [(r.key, r.attempt) for rank, r in ranks if rank is not None and r.waits_for(rank)]
            if transfers:
                peer.used = now
            for first in range(0, len(transfers), WAITING_AT_ONCE):
                some = tuple(transfers[first : first + WAITING_AT_ONCE])
                if not peer.ask(m.Waiting(some), now):
                    self.lost(peer, f"{address} is gone: the connection to it has ended", now)
                    break

    # What a receiver wants done.

    def run(self, entry: Entry, effects: list[Effect], now: float) -> None:
        """Do what the receiver of this request has decided."""
        for effect in effects:
            match effect:
                case Tell(rank, message):
                    peer = entry.peers.get(rank)
                    if peer is not None and not self._ctx.tell(peer.line, message):
                        self.lost(peer, f"{peer.address} is gone: the connection to it has ended", now)
                case Post(rank, chunk):
                    if rank in entry.peers:
                        entry.peers[rank].announced(entry.expect.key, chunk)
                case Offered():
                    self._ctx.emit(do.Begun(entry.expect.key))
                case Finished(ok, reason):
                    self._finished(entry, ok, reason, now)

    def _finished(self, entry: Entry, ok: bool, reason: str, now: float) -> None:
        """Say so once nothing writes to the pages any more."""
        key = entry.expect.key
        if entry.shelf is not None:
            self._shelves.give(entry.shelf)
            entry.shelf = None
        if entry.receiver.ahead:
            log.debug("let go of %s, which no request had asked for: %s", key, reason)
            self.forget(key)
            return
        self._ctx.counters.add("transfers_loaded" if ok else "transfers_failed")
        if not ok:
            log.warning("transfer %s failed: %s", key, reason)
        event = do.Loaded(key) if ok else do.LoadFailed(key, reason)
        self._ctx.copies.then(key, lambda _: self._ctx.emit(event), now)
