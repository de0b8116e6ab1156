"""A D rank for tests: its engine and its pages, with nothing but the protocol in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace
from protocol.decode_data import Incoming, Peer
from protocol.wires import Line, Violation

from p2pkv.plan import Edge, Plan
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Assignment, Dialing, Refused, judge
from p2pkv.protocol.machine import Effect, Finished, Offered, Post, RemoteProtocolError, Tell
from p2pkv.protocol.receiver import Receiver

if TYPE_CHECKING:
    from protocol.world import World


class DecodeRank:
    def __init__(self, world: World, rank: int, incarnation: str) -> None:
        self.world, self.rank, self.incarnation = world, rank, incarnation
        self.peers: dict[int, Peer] = {}
        self.receivers: dict[str, Receiver] = {}
        self.offered: set[str] = set()
        self.attempts: dict[str, int] = {}
        self.claimed: dict[str, set[int]] = {}
        self._incoming = Incoming(self)
        self._attempt = 0
        self._next_beat = 0.0

    # The requests.

    def expect(self, key: str, tokens: int) -> None:
        if key in self.receivers and self.receivers[key].ahead:
            self.attempts[key] = self.receivers[key].attempt
            self.offered.discard(key)
            self.run(key, self.receivers[key].adopt(self.world.now))
            return
        self._expect(key, tokens)
        self.attempts[key] = self._attempt
        self.connect(key)

    def _ahead(self, key: str, tokens: int, plan: Plan) -> None:
        """P has begun what no request has come for."""
        sources = {edge.source for edge in plan.to_target(self.rank)}
        connected = [rank in self.peers and self.peers[rank].dialing.open for rank in sorted(sources)]
        if key in self.receivers or not all(connected):
            return
        self._expect(key, tokens, ahead=True)
        self.connect(key)

    def _expect(self, key: str, tokens: int, ahead: bool = False) -> None:
        terms = self.world.terms
        self._attempt += 1
        self._incoming.begin(key, ahead)
        self.claimed.pop(key, None)
        self.offered.discard(key)
        self.receivers[key] = Receiver(
            key,
            self._attempt,
            tokens,
            self.world.digest(key),
            terms.lease,
            self.world.now,
            ahead=ahead,
        )

    def want(self, key: str, start: int, stop: int) -> None:
        self.run(key, self.receivers[key].want(start, stop, self.world.now))

    def cancel(self, key: str, reason: str) -> None:
        if key in self.receivers:
            self.run(key, self.receivers[key].cancel(reason))

    def forget(self, key: str) -> None:
        if key in self.receivers and self.receivers[key].load.ended:
            del self.receivers[key]

    # The control plane.

    def connect(self, key: str) -> None:
        """Dial rank 0 of P, learn its shape, dial those that owe something, claim."""
        receiver = self.receivers[key]
        if receiver.sources or receiver.load.ended:
            return
        first = self._dial(0)
        if first.dialing.refused:
            self.run(key, receiver.lost(first.dialing.reason))
        if not first.dialing.open or first.plan is None:
            return
        edges: dict[int, list[Edge]] = {}
        for edge in first.plan.to_target(self.rank):
            edges.setdefault(edge.source, []).append(edge)
        ranks = {*edges, *self._idle(first.plan)}
        dialed = [self._dial(rank) for rank in sorted(ranks)]
        if all(peer.dialing.open for peer in dialed):
            self.claimed[key] = ranks
            for rank in sorted(ranks):
                self._tell(rank, m.Heartbeat(((key, receiver.attempt),)))
            assignments = {rank: Assignment.of(some, self.world.wires) for rank, some in edges.items()}
            self.run(key, receiver.attach(assignments, self.world.now))

    def _idle(self, plan: Plan) -> list[int]:
        """The ranks of P that owe nobody anything, and hear so from this rank of D."""
        ranks = [rank for rank in range(plan.prefill[0].world) if not plan.from_source(rank)]
        return [rank for rank in ranks if rank % plan.decode_ranks == self.rank]

    def _dial(self, rank: int) -> Peer:
        if rank not in self.peers:
            self.peers[rank] = Peer(self.world.dial(rank, self.rank), Dialing(f"p:{rank}", self.world.now))
        peer = self.peers[rank]
        if peer.dialing.due(self.world.now):
            peer.line.say("p", replace(self.world.d_hello(self.rank), to=f"p:{rank}"))
        return peer

    def receive(self, line: Line, message: m.AnyMessage) -> None:
        peer = self.peers[line.p]
        match message:
            case m.Welcome():
                self._welcome(peer, message)
            case m.Refuse(_, reason):
                peer.dialing.refuse(reason, self.world.now)
            case m.Stranger():
                if peer.dialing.open:
                    self.lose(line.p, "P does not know this connection any more")
            case m.HeartbeatAck(held, _):
                for key, attempt in held:
                    receiver = self.receivers.get(key)
                    if receiver is not None and receiver.attempt == attempt:
                        receiver.held(line.p, self.world.now)
            case m.Ahead(key, tokens, _):
                if peer.plan is not None:
                    self._ahead(key, tokens, peer.plan)
            case m.LinkInvite(number, blob):
                self._invited(line.p, peer, number, blob)
            case m.LinkDown(number, reason):
                if number == peer.number:
                    self.link_lost(line.p, reason, tell=False)
            case m.Offer(key) | m.Chunk(key) | m.Sent(key) | m.Failed(key):
                self._about(line.p, peer, key, message)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a D")

    def _welcome(self, peer: Peer, message: m.Welcome) -> None:
        mine = self.world.d_hello(self.rank)
        same = peer.hello is not None and peer.hello.incarnation == message.hello.incarnation
        if message.you != mine.incarnation or (same and peer.dialing.open):
            return
        try:
            plan = judge(mine, message.hello)
        except Refused as refused:
            peer.dialing.refuse(str(refused), self.world.now)
            return
        if plan.digest != message.plan:
            raise Violation("the two sides compute different plans")
        peer.dialing.welcomed()
        peer.hello, peer.plan = message.hello, plan
        for key in list(self.receivers):
            self.connect(key)

    def _invited(self, rank: int, peer: Peer, number: int, blob: bytes) -> None:
        again = peer.invitation == blob and number <= peer.number
        if not peer.dialing.open or again:
            return
        peer.invitation = blob
        if peer.link is not None:
            self.link_lost(rank, "P builds its link anew", tell=False)
        peer.number, peer.link = number, self.world.links[blob.decode(), rank, self.rank, number]
        self._tell(rank, m.LinkAccept(number, peer.link.window, b""))

    def _about(self, rank: int, peer: Peer, key: str, message: m.Offer | m.Chunk | m.Sent | m.Failed) -> None:
        if isinstance(message, m.Sent) and not peer.heard(message):
            if peer.link is not None:
                self.world.breaches += 1
                self.link_lost(rank, f"{message} is not what the link carries next")
            return
        receiver = self.receivers.get(key)
        if receiver is None:
            return
        try:
            self.run(key, self._step(receiver, rank, message))
        except RemoteProtocolError as error:
            self.world.breaches += 1
            self.run(key, receiver.lost(str(error)))

    def _step(
        self, receiver: Receiver, rank: int, message: m.Offer | m.Chunk | m.Sent | m.Failed
    ) -> list[Effect]:
        now = self.world.now
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

    def run(self, key: str, effects: list[Effect]) -> None:
        for effect in effects:
            self.world.note(self.incarnation, self.rank, key, effect)
            match effect:
                case Tell(rank, message):
                    self._tell(rank, message)
                case Post(rank, chunk):
                    self.peers[rank].asked.append((key, chunk))
                case Offered():
                    if key in self.offered:
                        raise Violation(f"D{self.rank} reports the offer of {key} twice")
                    self.offered.add(key)
                case Finished() if self.receivers[key].ahead:
                    self._incoming.end(key)
                    del self.receivers[key]
                case Finished(ok):
                    self._incoming.end(key)
                    attempt = self.receivers[key].attempt
                    self.world.finished(("D", self.incarnation, self.rank, key, attempt), effect)
                    if ok:
                        self._incoming.verify(key)

    def _tell(self, rank: int, message: m.AnyMessage) -> None:
        if rank in self.peers and self.peers[rank].dialing.open:
            self.peers[rank].line.say("p", message)

    def lose(self, rank: int, reason: str) -> None:
        """This incarnation of a P rank, or the connection to it, is gone."""
        peer = self.peers[rank]
        peer.close()
        peer.number = 0
        peer.dialing.lost(self.world.now)
        peer.hello = peer.plan = None
        self._fail(rank, reason)
        self._dial(rank)

    # The data plane.

    def link_lost(self, rank: int, reason: str, tell: bool = True) -> None:
        peer = self.peers[rank]
        peer.close()
        if tell:
            self._tell(rank, m.LinkDown(peer.number, reason))
        self._fail(rank, reason)

    def _fail(self, rank: int, reason: str) -> None:
        for key, receiver in list(self.receivers.items()):
            if rank in receiver.sources or not receiver.sources:
                self.run(key, receiver.lost(reason, rank))

    def pump(self, rank: int) -> bool:
        """Post what has room, and take what has come from this P rank; whether anything moved."""
        return self._incoming.pump(rank, self.peers[rank])

    # Time.

    def tick(self) -> None:
        now, lease = self.world.now, self.world.terms.lease
        for key, receiver in list(self.receivers.items()):
            self.run(key, receiver.tick(now))
            if receiver.ahead and self._incoming.forsaken(key):
                self.run(key, receiver.cancel("no request has asked for it"))
        for key in list(self.receivers):
            self.connect(key)
        for rank, peer in list(self.peers.items()):
            if peer.posted and now - peer.posted[0].since > lease:
                self.link_lost(rank, "P has not sent what was granted")
        if now >= self._next_beat:
            self._next_beat = now + lease / 6
            self._beat()

    def _beat(self) -> None:
        for rank in list(self.peers):
            live = [
                (key, receiver.attempt)
                for key, receiver in self.receivers.items()
                if not receiver.load.ended and rank in self.claimed.get(key, ())
            ]
            if live:
                self._tell(rank, m.Heartbeat(tuple(live)))

    @property
    def at_rest(self) -> bool:
        """Whether nothing is under way."""
        return all(peer.idle for peer in self.peers.values()) and all(
            receiver.load.ended for receiver in self.receivers.values()
        )
