"""The data on D: posts receives for announced chunks, and writes what has come to the pages."""

from __future__ import annotations

from functools import partial

from p2pkv.engine.context import BURST, Context
from p2pkv.engine.inlet import Inlet, Posted
from p2pkv.engine.requests import Entry, Requests
from p2pkv.links.base import LinkError, Receive
from p2pkv.protocol import messages as m
from p2pkv.protocol.receiver import Receiver


class Incoming:
    """What comes from the ranks of P, `peers` by address; one rank's staging is shared by all of them."""

    def __init__(self, context: Context, peers: dict[str, Inlet], requests: Requests) -> None:
        self._ctx = context
        self._peers = peers
        self._requests = requests

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
                self._requests.link_lost(peer, f"the link from {peer.address} broke: {error}", now)
        return any(peer.posted for peer in self._peers.values())

    def _post(self, peer: Inlet, now: float) -> None:
        """Post receives for announced chunks while there is room; one a turn if other peers wait too."""
        while peer.asked:
            key, chunk = peer.asked[0]
            entry = self._requests.entries.get(key)
            if entry is None or not entry.receiver.pieces(peer.rank, chunk.attempt, chunk.chunk):
                peer.asked.popleft()
                continue
            if self.staged + chunk.nbytes > self._ctx.options.staging_bytes:
                return
            posted = peer.post()
            if posted is None:
                return
            effects = entry.receiver.posted(peer.rank, chunk, peer.link, posted.receive.landing)
            self._requests.run(entry, effects, now)
            if any(other.asked for other in self._peers.values() if other is not peer):
                return

    def _land(self, peer: Inlet, posted: Posted, now: float) -> None:
        """The bytes of a receive are here: write them where they belong, unless nobody wants them now."""
        entry, chunk = self._requests.entries.get(posted.key), posted.chunk
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
            self._requests.run(entry, entry.receiver.cancel(f"D cannot write its pages: {error}"), now)
            return
        finally:
            posted.receive.release()
        landed = partial(self._landed, entry, entry.receiver, peer.rank, chunk)
        self._ctx.copies.then(posted.key, landed, now)

    def _landed(self, entry: Entry, receiver: Receiver, rank: int, chunk: m.Chunk, now: float) -> None:
        """The device has written this chunk to the pages."""
        self._ctx.counters.add("bytes_scattered", chunk.nbytes)
        self._ctx.counters.add("chunks_scattered")
        self._requests.run(entry, receiver.scattered(rank, chunk.chunk, now), now)

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

    @property
    def staged(self) -> int:
        """Bytes that posted receives hold."""
        return sum(peer.staged for peer in tuple(self._peers.values()))
