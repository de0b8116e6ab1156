"""The data plane of a D rank for tests: what it has posted, what has come, and the pages it is written to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from protocol.wires import Cell, Line, Link, LinkBroken, Receive, Violation, checksum

from p2pkv.plan import Edge, Plan
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Dialing
from p2pkv.protocol.receiver import LoadPhase, Receiver

if TYPE_CHECKING:
    from protocol.decode_side import DecodeRank


@dataclass(eq=False)
class Posted:
    """A receive, in the order of the link; P says Sent in that order too."""

    receive: Receive
    key: str
    chunk: m.Chunk
    since: float
    said: m.Sent | None = None


@dataclass(eq=False)
class Peer:
    """A rank of P, as D sees it."""

    line: Line
    dialing: Dialing
    hello: m.Hello | None = None
    plan: Plan | None = None
    number: int = 0
    invitation: bytes = b""
    link: Link | None = None
    asked: deque[tuple[str, m.Chunk]] = field(default_factory=deque)
    posted: deque[Posted] = field(default_factory=deque)

    @property
    def idle(self) -> bool:
        return not self.posted and not self.asked and (self.link is None or not self.link.used)

    def heard(self, message: m.Sent) -> bool:
        """Note it; False if it is not about the next receive of which P has not spoken yet."""
        posted = next((each for each in self.posted if each.said is None), None)
        if posted is None:
            return False
        if (posted.key, posted.chunk.attempt, posted.chunk.chunk) != (
            message.key,
            message.attempt,
            message.chunk,
        ):
            return False
        posted.said = message
        return True

    def close(self) -> None:
        if self.link is not None:
            self.link.abort("d")
        self.link = None
        self.asked.clear()
        self.posted.clear()


@dataclass(frozen=True)
class Kept:
    """What has come before the request did."""

    rank: int
    chunk: m.Chunk
    cells: list[Cell | None]


class Incoming:
    """When a receive is posted, and where its cells go; every write to the pages is judged."""

    def __init__(self, owner: DecodeRank) -> None:
        self._owner, self._world = owner, owner.world
        stage, place = divmod(owner.rank, owner.world.decode.tp)
        shapes = owner.world.d_shapes
        self._held = [(each.stage_layers.ranks[stage], each.rank_heads.ranks[place]) for each in shapes]
        """Of each KV group the layers and the heads of this rank."""
        self._cells: dict[str, dict[tuple[int, int, int, int], Cell]] = {}
        self._kept: dict[str, deque[Kept]] = {}
        self._touched: dict[str, float] = {}

    def begin(self, key: str, ahead: bool) -> None:
        self._cells[key] = {}
        if ahead:
            self._kept[key], self._touched[key] = deque(), self._world.now

    def end(self, key: str) -> None:
        self._kept.pop(key, None)

    def forsaken(self, key: str) -> bool:
        """Whether no request has come for what is kept, and nothing more of it, for a lease."""
        return key in self._kept and self._world.now - self._touched[key] > self._world.terms.lease

    def pump(self, rank: int, peer: Peer) -> bool:
        """Post what has room, and take what has come from this P rank; whether anything moved."""
        unloaded = self._unload()
        if peer.link is None:
            return unloaded
        try:
            peer.link.poll()
            return self._post(rank, peer, peer.link) | self._land(rank, peer, peer.link) | unloaded
        except LinkBroken as error:
            self._owner.link_lost(rank, str(error))
            return True

    def _post(self, rank: int, peer: Peer, link: Link) -> bool:
        if not peer.asked:
            return False
        key, chunk = peer.asked[0]
        receiver = self._owner.receivers.get(key)
        if receiver is None or not receiver.pieces(rank, chunk.attempt, chunk.chunk):
            peer.asked.popleft()
            return True
        receive = link.post(chunk.nbytes)
        if receive is None:
            return False
        peer.asked.popleft()
        peer.posted.append(Posted(receive, key, chunk, self._world.now))
        self._owner.run(key, receiver.posted(rank, chunk, peer.number, 0))
        return True

    def _land(self, rank: int, peer: Peer, link: Link) -> bool:
        if not peer.posted or peer.posted[0].said is None or peer.posted[0].receive.cells is None:
            return False
        posted = peer.posted.popleft()
        link.release(posted.receive)
        receiver, chunk = self._owner.receivers.get(posted.key), posted.chunk
        pieces = () if receiver is None else receiver.pieces(rank, chunk.attempt, chunk.chunk)
        assert posted.said is not None and posted.receive.cells is not None
        if receiver is None or not pieces or posted.said.filler:
            return True
        if self._world.verify and checksum(posted.receive.cells) != posted.said.digest:
            self._world.corrupt += 1
            self._owner.run(posted.key, receiver.cancel("a chunk changed on the way"))
            self._owner.link_lost(rank, "what it carries has changed")
            return True
        kept = Kept(rank, chunk, posted.receive.cells)
        if receiver.load.state is LoadPhase.AHEAD:
            self._kept[posted.key].append(kept)
            self._touched[posted.key] = self._world.now
            receiver.kept(rank, chunk.chunk, self._world.now)
        else:
            self._write(posted.key, receiver, kept)
        return True

    def _unload(self) -> bool:
        """Write something of what was kept to the pages that it has by now; whether there was any."""
        for key, kept in self._kept.items():
            receiver = self._owner.receivers[key]
            if kept and receiver.load.state is LoadPhase.LOADING:
                self._write(key, receiver, kept.popleft())
                return True
        return False

    def _write(self, key: str, receiver: Receiver, kept: Kept) -> None:
        owner = self._owner
        end = ("D", owner.incarnation, owner.rank, key, receiver.attempt)
        if receiver.load.ended or end in self._world.ends:
            raise Violation(f"D{owner.rank} writes {key} after its end")
        self._scatter(key, receiver.sources[kept.rank].assignment.edges, kept.chunk.pieces, kept.cells)
        owner.run(key, receiver.scattered(kept.rank, kept.chunk.chunk, self._world.now))

    def _scatter(
        self, key: str, edges: Mapping[int, Edge], pieces: tuple[m.Piece, ...], cells: list[Cell | None]
    ) -> None:
        places = [
            (piece.group, layer, head, token)
            for piece in pieces
            for layer in range(piece.layer, piece.layer_stop)
            for token in range(piece.start, piece.stop)
            for head in edges[piece.group].heads
        ]
        if len(places) != len(cells):
            raise Violation(f"D{self._owner.rank} expects {len(places)} cells of {key} and gets {len(cells)}")
        wanted = self._wanted(key)
        for place, cell in zip(places, cells, strict=True):
            if place[-1] in wanted[place[0]]:
                if cell != self._right(key, place) or place in self._cells[key]:
                    raise Violation(f"D{self._owner.rank} writes {cell} to {place} of {key}")
                self._cells[key][place] = cell

    def _wanted(self, key: str) -> list[range]:
        """The tokens of each KV group that D lacks; of a state token 0."""
        start, stop = self._world.wants.get(key, (0, 0))
        return [range(*(wire.needed(start, stop) if stop > start else (0, 0))) for wire in self._world.wires]

    def _right(self, key: str, place: tuple[int, int, int, int]) -> Cell:
        group, layer, head, token = place
        once = self._world.wires[group].once
        return (key, group, layer, head, self._world.wants[key][1] if once else token)

    def verify(self, key: str) -> None:
        """Every cell that was asked for is what P computed."""
        for group, ((layers, heads), tokens) in enumerate(zip(self._held, self._wanted(key), strict=True)):
            for place in product([group], layers, heads, tokens):
                if self._cells[key].get(place) != self._right(key, place):
                    raise Violation(f"D{self._owner.rank} lacks (group, layer, head, token) {place} of {key}")
