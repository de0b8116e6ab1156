"""The data on P: fills granted sends from the pages, and hands them to the links."""

from __future__ import annotations

from functools import partial

from p2pkv.engine.context import BURST, Context
from p2pkv.engine.outlet import Flight, Outlet, Place, Word
from p2pkv.engine.prompts import Entry, Prompts
from p2pkv.links.base import LinkError, Send
from p2pkv.pages.digest import Digest
from p2pkv.plan import Edge
from p2pkv.protocol import messages as m
from p2pkv.protocol.effects import Transmit
from p2pkv.protocol.sender_states import Prompt


class Outgoing:
    """What goes to the ranks of D, `peers` by place; only those that are `active` are looked at in a turn."""

    def __init__(
        self, context: Context, peers: dict[Place, Outlet], active: dict[Outlet, None], prompts: Prompts
    ) -> None:
        self._ctx = context
        self._peers = peers
        self._active = active
        self._prompts = prompts

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        for peer in list(self._active):
            if self._peers.get(peer.place) is not peer:
                del self._active[peer]
                continue
            rests = peer.up and not peer.busy
            try:
                self._pump(peer, now)
            except LinkError as error:
                self._prompts.link_lost(peer, f"the link to {peer.address} broke: {error}", now)
            if rests and peer.up and not peer.busy:
                self._active.pop(peer, None)
        return any(peer.busy for peer in self._active)

    def _pump(self, peer: Outlet, now: float) -> None:
        if peer.poll():
            self._prompts.linked(peer, now)
        for flight in peer.taken():
            entry = self._prompts.entries.get(flight.key)
            if entry is not None and entry.sender.prompt.state is Prompt.OFFERED:
                self._ctx.counters.add("bytes_early", flight.nbytes)
        for _ in range(BURST):
            if (found := peer.next_send()) is None:
                break
            self._transmit(peer, *found, now)

    def _transmit(self, peer: Outlet, key: str, order: Transmit, send: Send, now: float) -> None:
        """Fill one send from the pages, under the lock that keeps them from being taken back meanwhile.

        The gather may only be queued: the send is ordered behind it, `Copies` knows of it, and whoever
        takes pages back waits for it.
        """
        entry = self._prompts.paired(key, peer)
        wrong = ""
        with self._ctx.reading:
            void = entry is None or not entry.sender.readable(order) or key in self._ctx.revoked
            if entry is not None and peer.debt is not None and not void:
                try:
                    self._gather(entry, peer, peer.debt.edge, order, send)
                except ValueError as error:
                    void, wrong = True, str(error)
                self._ctx.copies.launched(key)
        digest = None if void or not peer.verify else self._digest(key, send)
        send.commit()
        peer.flights.append(Flight(send, key, 0 if void else order.grant.nbytes))
        self._ctx.counters.add("chunks_void" if void else "chunks_sent")
        if not void:
            self._ctx.counters.add("bytes_sent", order.grant.nbytes)
        if entry is not None and wrong:
            self._prompts.run(entry, entry.sender.abort(f"P cannot read its pages: {wrong}"), now)
        if not peer.verify:
            self._say(peer, key, entry, order, void, None, now)
            return
        word = Word(partial(self._say, peer, key, entry, order, void, digest))
        peer.words.append(word)
        self._ctx.copies.then(key, partial(peer.speak, word), now)

    def _digest(self, key: str, send: Send) -> Digest:
        """The checksum of what has been gathered; `Copies` knows of it, since it may only be queued too."""
        digest = self._ctx.cache.digest(send.buffer)
        self._ctx.copies.launched(key)
        return digest

    def _say(
        self,
        peer: Outlet,
        key: str,
        entry: Entry | None,
        order: Transmit,
        void: bool,
        digest: Digest | None,
        now: float,
    ) -> None:
        """Tell D what this send holds."""
        value, grant = b"" if digest is None else digest.value(), order.grant
        if entry is not None:
            self._prompts.run(entry, entry.sender.sent(order, void, value), now)
        else:
            self._ctx.tell(peer.line, m.Sent(key, grant.attempt, grant.chunk, grant.link, void))

    def _gather(self, entry: Entry, peer: Outlet, edge: Edge, order: Transmit, send: Send) -> None:
        pages, offset = peer.pages, 0
        shift = edge.source_layer - edge.layers.start
        heads = (edge.source_head, edge.source_head + len(edge.heads))
        for piece in order.pieces:
            layers = (piece.layer + shift, piece.layer_stop + shift)
            size = pages.nbytes(layers[1] - layers[0], piece.start, piece.stop, len(edge.heads))
            pages.gather(
                send.buffer[offset : offset + size], layers, (piece.start, piece.stop), heads, entry.blocks
            )
            offset += size
