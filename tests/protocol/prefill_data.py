"""The data plane of a P rank for tests: what it sends, and the pages that this is read from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.wires import GARBAGE, Cell, Line, Link, LinkBroken, Send, Violation, checksum

from p2pkv.plan import Edge, Plan
from p2pkv.protocol import messages as m
from p2pkv.protocol.machine import Transmit
from p2pkv.protocol.sender import Sender

if TYPE_CHECKING:
    from protocol.prefill_side import PrefillRank


@dataclass(eq=False)
class Peer:
    """A rank of D, as P sees it."""

    line: Line
    identity: int
    hello: m.Hello
    plan: Plan
    edge: Edge | None
    number: int = 0
    spoken: bool = False
    link: Link | None = None
    orders: deque[tuple[str, Transmit]] = field(default_factory=deque)
    flights: deque[tuple[Send, float]] = field(default_factory=deque)
    words: deque[Callable[[], None]] = field(default_factory=deque)
    """What is to be said about the sends, in their order."""

    @property
    def idle(self) -> bool:
        return not self.orders and not self.words and (self.link is None or not self.link.staged)

    def close(self) -> None:
        if self.link is not None:
            self.link.abort("p")
        self.link = None
        self.orders.clear()
        self.flights.clear()
        self.words.clear()


class Pages:
    """The cells of the local layers and heads, by prompt; every read is judged."""

    def __init__(self, name: str, layers: range, heads: range) -> None:
        self.free: set[str] = set()
        self._name, self._layers, self._heads = name, layers, heads
        self._cells: dict[str, dict[tuple[int, int, int], Cell]] = {}

    def hold(self, key: str) -> None:
        self._cells[key] = {}

    def compute(self, key: str, local: int, start: int, stop: int) -> None:
        """What a forward does: write tokens [start, stop) of one local layer."""
        for number, head in enumerate(self._heads):
            for token in range(start, stop):
                self._cells[key][local, number, token] = (key, self._layers[local], head, token)

    def take_back(self, key: str) -> None:
        """Somebody else writes to them from now on."""
        self._cells[key] = dict.fromkeys(self._cells[key], GARBAGE)

    def release(self, key: str) -> None:
        if key in self.free:
            raise Violation(f"{self._name} releases {key} twice")
        self.free.add(key)
        self.take_back(key)

    def gather(self, key: str, edge: Edge, pieces: tuple[m.Piece, ...], needed: int) -> list[Cell | None]:
        """The rows of these pieces; of tokens beyond `needed` anything."""
        if key in self.free:
            raise Violation(f"{self._name} reads {key} after it was released")
        return [
            self._read(key, edge, layer, token, head, token < needed)
            for piece in pieces
            for layer in range(piece.layer, piece.layer_stop)
            for token in range(piece.start, piece.stop)
            for head in edge.heads
        ]

    def _read(self, key: str, edge: Edge, layer: int, token: int, head: int, needed: bool) -> Cell | None:
        local = layer - edge.layers.start + edge.source_layer
        cell = self._cells[key].get((local, head - edge.heads.start + edge.source_head, token))
        if needed and cell != (key, layer, head, token):
            raise Violation(f"{self._name} reads {cell} for layer {layer}, token {token} of {key}")
        return cell


class Outgoing:
    """When a grant is obeyed, and what is said of it."""

    def __init__(self, owner: PrefillRank) -> None:
        self._owner, self._world = owner, owner.world

    def transmit(self, peer: Peer) -> bool:
        """Obey the oldest grant of this peer; whether there was one."""
        if peer.link is None:
            return False
        try:
            peer.link.poll()
        except LinkBroken as error:
            self._owner.link_lost(peer, str(error))
            return True
        while peer.flights and peer.flights[0][0].taken:
            peer.flights.popleft()
        if not peer.orders or len(peer.flights) >= 4:
            return False
        key, order = peer.orders.popleft()
        sender = self._owner.senders.get(key)
        filler = sender is None or not sender.readable(order)
        cells = [GARBAGE] if sender is None or filler else self._gather(sender, peer, order)
        peer.flights.append((peer.link.send(order.grant.nbytes, cells), self._world.now))
        digest = checksum(cells) if self._world.verify and not filler else b""
        peer.words.append(lambda: self._say(peer, key, sender, order, filler, digest))
        if not self._world.verify:
            self.speak(peer)
        return True

    def speak(self, peer: Peer) -> bool:
        """A checksum is known: say the oldest word about a send; whether there was one."""
        if not peer.words:
            return False
        peer.words.popleft()()
        return True

    def _say(
        self, peer: Peer, key: str, sender: Sender | None, order: Transmit, filler: bool, digest: bytes
    ) -> None:
        if sender is not None:
            self._owner.run(key, sender.sent(order, filler, digest))
        else:
            grant = order.grant
            self._owner.tell(peer, m.Sent(key, grant.attempt, grant.chunk, grant.link, True))

    def _gather(self, sender: Sender, peer: Peer, order: Transmit) -> list[Cell | None]:
        cutter = sender.sends[order.rank].cutter
        assert peer.edge is not None and cutter is not None
        return self._owner.pages.gather(sender.key, peer.edge, order.pieces, cutter.windows.by_group[0].stop)
