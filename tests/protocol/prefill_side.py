"""A P rank for tests: its engine and its pages, with nothing but the protocol in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.prefill_data import Held, Outgoing, Pages, Peer
from protocol.wires import Line, Link

from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Assignment, Refused, judge
from p2pkv.protocol.machine import Effect, Finished, Released, RemoteProtocolError, Tell, Transmit
from p2pkv.protocol.sender import PromptPhase, Sender, SendPhase

if TYPE_CHECKING:
    from protocol.world import World


@dataclass
class Early:
    """What a D rank said of a prompt that P has not heard of yet."""

    attempt: int
    since: float
    farewell: m.Want | m.Cancel | None = None


@dataclass
class Prefill:
    """How far the forward pass is: `stop` of the chunk under way, the next local layer of it."""

    chunks: tuple[int, ...]
    at: int = 0
    layer: int = 0
    begun: bool = False

    @property
    def done(self) -> bool:
        return self.at == len(self.chunks)


class PrefillRank:
    def __init__(self, world: World, rank: int, incarnation: str) -> None:
        self.world, self.rank, self.incarnation = world, rank, incarnation
        stage, place = divmod(rank, world.prefill.tp)
        self.layers: list[range] = []
        """Of each KV group, the local numbers of its layers."""
        held: list[Held] = []
        for shape, wire in zip(world.p_shapes, world.wires, strict=True):
            layers, heads = shape.stage_layers.ranks[stage], shape.rank_heads.ranks[place]
            first = self.layers[-1].stop if self.layers else 0
            self.layers.append(range(first, first + len(layers)))
            held.append(Held(range(layers.start, layers.stop), range(heads.start, heads.stop), wire))
        self._many = self.layers[-1].stop
        self.pages = Pages(f"P{rank}", held)
        self._outgoing = Outgoing(self)
        self.peers: dict[int, Peer] = {}
        self.senders: dict[str, Sender] = {}
        self.prefills: dict[str, Prefill] = {}
        self.early: dict[tuple[str, int], Early] = {}

    # The forward pass.

    def hold(self, key: str, chunks: tuple[int, ...]) -> None:
        self.senders[key] = Sender(key, self.layers, self.world.terms)
        self.prefills[key] = Prefill(chunks)
        self.pages.hold(key)
        for (name, rank), early in list(self.early.items()):
            if name == key:
                del self.early[name, rank]
                if rank in self.peers:
                    self._claim(self.peers[rank], key, early.attempt)
                    if early.farewell is not None:
                        self._about(self.peers[rank], key, early.farewell)

    def step(self, key: str, layers: int) -> None:
        """Compute some more layers of the chunk under way."""
        sender, prefill = self.senders[key], self.prefills[key]
        if not prefill.begun:
            prefill.begun = True
            self.run(key, sender.offer(prefill.chunks[-1], self.world.digest(key)))
            self._say_ahead(sender)
        for _ in range(layers):
            if prefill.done:
                return
            stop = prefill.chunks[prefill.at]
            begin = prefill.chunks[prefill.at - 1] if prefill.at else 0
            if self._many:
                local = prefill.layer
                number = next(each for each, layers in enumerate(self.layers) if local in layers)
                self.pages.compute(key, number, local - self.layers[number].start, begin, stop)
                self.run(key, sender.computed(local, local + 1, stop, self.world.now))
            prefill.layer += 1
            if prefill.layer >= self._many:
                prefill.layer, prefill.at = 0, prefill.at + 1
                self.run(key, sender.flush())

    def _say_ahead(self, sender: Sender) -> None:
        for rank, peer in list(self.peers.items()):
            if self.world.ahead and peer.edges and rank not in sender.sends:
                self.tell(peer, m.Ahead(sender.key, sender.tokens, sender.digest))

    def preempt(self, key: str) -> None:
        """The pages go to somebody else; the prefill will begin again."""
        self.pages.take_back(key)
        self.senders[key].revoke()
        self.prefills[key] = Prefill(self.prefills[key].chunks)

    def abort(self, key: str, reason: str) -> None:
        self.run(key, self.senders[key].abort(reason))

    def forget(self, key: str) -> None:
        if key in self.senders and self.senders[key].prompt.ended:
            del self.senders[key]

    # The control plane.

    def receive(self, line: Line, message: m.AnyMessage) -> None:
        if isinstance(message, m.Hello):
            self._hello(line, message)
            return
        peer = self.peers.get(line.d)
        if peer is None or peer.identity != line.identity:
            line.say("d", m.Stranger())
            return
        peer.spoken = True
        match message:
            case m.Heartbeat(transfers):
                self._waiting(peer, transfers)
            case m.LinkAccept(number, window, _):
                if number == peer.number and peer.link is None:
                    peer.link = self.world.links[self.incarnation, self.rank, line.d, number]
                    assert peer.link.window == window
            case m.LinkDown(number, reason):
                if number == peer.number:
                    self.link_lost(peer, reason, tell=False)
            case m.Want(key) | m.Grant(key) | m.Done(key) | m.Cancel(key):
                self._about(peer, key, message)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a P")

    def _hello(self, line: Line, hello: m.Hello) -> None:
        mine = self.world.p_hello(self.rank)
        try:
            plan = judge(mine, hello)
        except Refused as refused:
            line.say("d", m.Refuse(hello.incarnation, str(refused)))
            return
        old = self.peers.get(hello.rank)
        # D repeats its Hello until it is answered. One that comes after other words means that D has
        # started over, and has no link any more.
        known = old is not None and (old.identity, old.hello) == (line.identity, hello) and not old.spoken
        if old is not None and not known:
            self.drop(old, "restarted or reconnected")
        line.say("d", m.Welcome(hello.incarnation, mine, plan.digest))
        if known:
            return
        edges = [edge for edge in plan.from_source(self.rank) if edge.target == hello.rank]
        peer = Peer(line, line.identity, hello, plan, edges, number=0 if old is None else old.number)
        self.peers[hello.rank] = peer
        if edges:
            self._invite(peer)

    def _waiting(self, peer: Peer, transfers: m.Transfers) -> None:
        held, unknown = [], []
        for key, attempt in transfers:
            (held if self._claim(peer, key, attempt) else unknown).append((key, attempt))
        self.tell(peer, m.HeartbeatAck(tuple(held), tuple(unknown)))

    def _claim(self, peer: Peer, key: str, attempt: int) -> bool:
        """Whether P knows of this transfer, and it has not ended."""
        rank, sender = peer.hello.rank, self.senders.get(key)
        if sender is None:
            self.early[key, rank] = Early(attempt, self.world.now)
            return False
        limit = 0 if peer.link is None else peer.link.window // 2
        sender.serves(frozenset(edge.target for edge in peer.plan.from_source(self.rank)))
        if not peer.edges:
            self.run(key, sender.flush())
            return True
        owed = Assignment.of(peer.edges, self.world.wires)
        self.run(key, sender.claim(rank, owed, attempt, limit, self.world.now))
        return sender.vouches(rank, attempt)

    def _about(self, peer: Peer, key: str, message: m.Want | m.Grant | m.Done | m.Cancel) -> None:
        rank, sender = peer.hello.rank, self.senders.get(key)
        if isinstance(message, m.Grant) and message.link != peer.number:
            return
        if sender is None:
            early = self.early.get((key, rank))
            if isinstance(message, m.Grant):
                peer.orders.append((key, Transmit(rank, message, ())))
            elif isinstance(message, m.Want | m.Cancel) and early and early.attempt == message.attempt:
                early.farewell = message
            return
        try:
            effects = self._step(sender, rank, message)
        except RemoteProtocolError as error:
            self.world.breaches += 1
            self.run(key, sender.lost(rank, str(error)))
            if isinstance(message, m.Grant):
                # A receive is posted for which nothing will be sent: only an abort frees it.
                self.link_lost(peer, str(error))
            return
        self.run(key, effects)

    def _step(self, sender: Sender, rank: int, message: m.Want | m.Grant | m.Done | m.Cancel) -> list[Effect]:
        now = self.world.now
        match message:
            case m.Want():
                return sender.want(rank, message, now)
            case m.Grant():
                return sender.grant(rank, message, now)
            case m.Done():
                return sender.done(rank, message, now)
            case m.Cancel():
                return sender.cancel(rank, message)

    def run(self, key: str, effects: list[Effect]) -> None:
        for effect in effects:
            self.world.note(self.incarnation, self.rank, key, effect)
            match effect:
                case Tell(rank, message):
                    if rank in self.peers:
                        self.tell(self.peers[rank], message)
                case Transmit(rank):
                    self.peers[rank].orders.append((key, effect))
                case Released():
                    self.pages.release(key)
                case Finished():
                    self.world.finished(("P", self.incarnation, self.rank, key, 0), effect)

    def tell(self, peer: Peer, message: m.AnyMessage) -> None:
        if peer.identity == peer.line.identity:
            peer.line.say("d", message)
        elif self.peers.get(peer.hello.rank) is peer:
            self.drop(peer, "the connection is gone")

    def drop(self, peer: Peer, reason: str) -> None:
        """This incarnation or connection of a D rank is gone."""
        del self.peers[peer.hello.rank]
        self.early = {name: early for name, early in self.early.items() if name[1] != peer.hello.rank}
        peer.close()
        for key, sender in list(self.senders.items()):
            self.run(key, sender.lost(peer.hello.rank, reason, restarted=True))

    # The data plane.

    def _invite(self, peer: Peer) -> None:
        peer.number += 1
        self.world.links[self.incarnation, self.rank, peer.hello.rank, peer.number] = Link(self.world.window)
        self.tell(peer, m.LinkInvite(peer.number, self.incarnation.encode()))

    def link_lost(self, peer: Peer, reason: str, tell: bool = True) -> None:
        peer.close()
        if tell:
            self.tell(peer, m.LinkDown(peer.number, reason))
        for key, sender in list(self.senders.items()):
            self.run(key, sender.unlinked(peer.hello.rank, reason))
        if self.peers.get(peer.hello.rank) is peer:
            self._invite(peer)

    def transmit(self, peer: Peer) -> bool:
        """Obey the oldest grant of this peer; whether there was one."""
        return self._outgoing.transmit(peer)

    def speak(self, peer: Peer) -> bool:
        """A checksum is known: say the oldest word about a send; whether there was one."""
        return self._outgoing.speak(peer)

    # Time.

    def tick(self) -> None:
        now, lease = self.world.now, self.world.terms.lease
        self.early = {name: early for name, early in self.early.items() if now - early.since < lease}
        for key, sender in list(self.senders.items()):
            self.run(key, sender.tick(now))
        for peer in list(self.peers.values()):
            if peer.flights and not peer.flights[0][0].taken and now - peer.flights[0][1] > lease:
                self.link_lost(peer, "D takes nothing")

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way and no pages are held."""
        return (
            all(peer.idle for peer in self.peers.values())
            and not self.early
            and all(sender.prompt.ended and not self._live(sender) for sender in self.senders.values())
        )

    def _live(self, sender: Sender) -> bool:
        """Whether a send of an ended prompt still wants pages."""
        prompt = sender.prompt
        assert prompt.state is PromptPhase.HELD or sender.key in self.pages.free or not prompt.ended
        return any(
            send.machine.state in (SendPhase.CLAIMED, SendPhase.SENDING) for send in sender.sends.values()
        )
