"""The data plane of a P rank for tests: what it sends, and the pages that this is read from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.wires import GARBAGE, Cell, Line, Link, LinkBroken, Send, Violation, checksum

from p2pkv.plan import Edge, Plan
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Wire
from p2pkv.protocol.machine import Transmit
from p2pkv.protocol.pieces import Extent, Extents
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
    edges: list[Edge]
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


@dataclass(frozen=True)
class Held:
    """The layers and heads of one KV group that this rank holds."""

    layers: range
    heads: range
    wire: Wire


class Pages:
    """The cells of the local layers and heads, by prompt; every read is judged."""

    def __init__(self, name: str, groups: list[Held]) -> None:
        self.free: set[str] = set()
        self._name, self._groups = name, groups
        self._cells: dict[str, dict[tuple[int, int, int, int], Cell]] = {}
        """By KV group, local layer, local head and token; of a state token 0."""

    def hold(self, key: str) -> None:
        self._cells[key] = {}

    def compute(self, key: str, group: int, local: int, start: int, stop: int) -> None:
        """What a forward does: write tokens [start, stop) of one local layer, or the state after them.

        What has left a window by then is somebody else's.
        """
        held, cells = self._groups[group], self._cells[key]
        layer = held.layers[local]
        for number, head in enumerate(held.heads):
            if held.wire.once:
                cells[group, local, number, 0] = (key, group, layer, head, stop)
                continue
            for token in range(max(0, start - held.wire.window + 1) if held.wire.window else 0):
                cells[group, local, number, token] = GARBAGE
            for token in range(start, stop):
                cells[group, local, number, token] = (key, group, layer, head, token)

    def take_back(self, key: str) -> None:
        """Somebody else writes to them from now on."""
        self._cells[key] = dict.fromkeys(self._cells[key], GARBAGE)

    def release(self, key: str) -> None:
        if key in self.free:
            raise Violation(f"{self._name} releases {key} twice")
        self.free.add(key)
        self.take_back(key)

    def gather(
        self, key: str, edges: Mapping[int, Edge], pieces: tuple[m.Piece, ...], extents: Extents
    ) -> list[Cell | None]:
        """The rows of these pieces; of tokens that are not in their window anything."""
        if key in self.free:
            raise Violation(f"{self._name} reads {key} after it was released")
        return [
            self._read(key, edges[piece.group], layer, token, head, extents.by_group[piece.group])
            for piece in pieces
            for layer in range(piece.layer, piece.layer_stop)
            for token in range(piece.start, piece.stop)
            for head in edges[piece.group].heads
        ]

    def _read(self, key: str, edge: Edge, layer: int, token: int, head: int, extent: Extent) -> Cell | None:
        local = layer - edge.layers.start + edge.source_layer
        place = (edge.group, local, head - edge.heads.start + edge.source_head, token)
        cell = self._cells[key].get(place)
        right = (key, edge.group, layer, head, token if extent.ready is None else extent.ready)
        if token < extent.stop and cell != right:
            raise Violation(f"{self._name} reads {cell} where {right} should be")
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
        assert cutter is not None
        edges = {edge.group: edge for edge in peer.edges}
        return self._owner.pages.gather(sender.key, edges, order.pieces, cutter.extents)
