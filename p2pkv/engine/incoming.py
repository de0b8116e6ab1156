"""The data on D: posts receives for announced chunks, and writes what has come to the pages."""

from __future__ import annotations

from functools import partial

from p2pkv.config import RESERVED_CHUNKS
from p2pkv.engine.arrived import Arrived, Check
from p2pkv.engine.context import BURST, Context
from p2pkv.engine.inlet import Inlet, Posted
from p2pkv.engine.requests import Entry, Requests
from p2pkv.engine.shelves import Shelves
from p2pkv.links.base import LinkError
from p2pkv.protocol.receiver import Receiver
from p2pkv.protocol.receiver_states import Load


class Incoming:
    """What comes from the ranks of P; one rank's staging is shared by all of them.

    `peers`: all of them, by address; only those that are `active` are looked at in a turn.
    """

    def __init__(
        self,
        context: Context,
        peers: dict[str, Inlet],
        active: dict[Inlet, None],
        requests: Requests,
        shelves: Shelves,
    ) -> None:
        self._ctx = context
        self._peers = peers
        self._active = active
        self._others = 0
        """Bytes that receives of others than the rank of P that has its turn hold."""
        self._requests = requests
        self._shelves = shelves

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        staged = sum(peer.staged for peer in self._active)
        for peer in list(self._active):
            if self._peers.get(peer.address) is not peer:
                del self._active[peer]
                continue
            rests, self._others = not peer.busy, staged - peer.staged
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
            staged = self._others + peer.staged
            if rests and not peer.busy:
                self._active.pop(peer, None)
        self._unload(now)
        return any(peer.posted for peer in self._active)

    def _post(self, peer: Inlet, now: float) -> None:
        """Post receives for announced chunks while there is room; one a turn if other peers wait too."""
        while peer.asked:
            self._admitted_first(peer)
            key, chunk = peer.asked[0]
            entry = self._requests.entries.get(key)
            if entry is None or not entry.receiver.pieces(peer.rank, chunk.attempt, chunk.chunk):
                peer.asked.popleft()
                continue
            reserve = RESERVED_CHUNKS * self._ctx.options.chunk_bytes if _is_ahead(entry) else 0
            posted = peer.post() if self._may_hold(peer, chunk.nbytes, reserve) else None
            if posted is None:
                peer.wait()
                return
            effects = entry.receiver.posted(peer.rank, chunk, peer.link, posted.receive.landing)
            self._requests.run(entry, effects, now)
            if any(other.asked for other in self._active if other is not peer):
                return

    def _admitted_first(self, peer: Inlet) -> None:
        """What has pages goes before what no request has asked for yet."""
        for index, (key, _) in enumerate(peer.asked):
            entry = self._requests.entries.get(key)
            if entry is None or not _is_ahead(entry):
                if index:
                    first = peer.asked[index]
                    del peer.asked[index]
                    peer.asked.appendleft(first)
                return

    def _land(self, peer: Inlet, posted: Posted, now: float) -> None:
        """The bytes of a receive are here: write them where they belong, unless nobody wants them now."""
        entry, chunk = self._requests.entries.get(posted.key), posted.chunk
        pieces = () if entry is None else entry.receiver.pieces(peer.rank, chunk.attempt, chunk.chunk)
        try:
            if entry is None or not pieces:
                self._ctx.counters.add("chunks_dropped")
                return
            assert peer.pages is not None
            check, buffer = self._check(peer, posted), posted.receive.buffer
            here = Arrived(peer, peer.rank, chunk, buffer, peer.pages, check)
            refuted = check is not None and check.refuted
            if not refuted:
                (self._keep if _is_ahead(entry) else self._write)(entry, here, now)
        finally:
            posted.receive.release()
        if refuted:
            self._corrupt(entry, entry.receiver, here, now)

    def _check(self, peer: Inlet, posted: Posted) -> Check | None:
        """The checksum of what has come, ahead of the scatter; None where nobody wants it."""
        if not peer.verify or posted.said is None:
            return None
        return Check(self._ctx.cache.digest(posted.receive.buffer), posted.said)

    def _keep(self, entry: Entry, here: Arrived, now: float) -> None:
        """No request has pages for it yet."""
        assert entry.shelf is not None
        self._shelves.keep(entry.shelf, here, now)
        self._ctx.copies.launched(entry.expect.key)
        entry.receiver.kept(here.rank, here.chunk.chunk, now)
        self._ctx.counters.add("bytes_ahead", here.chunk.nbytes)

    def _unload(self, now: float) -> None:
        """Write what waits on shelves to the pages that it has now, some of it each turn."""
        waiting = self._requests.unloading
        for _ in range(BURST):
            while waiting and not (waiting[0].shelf and waiting[0].shelf.kept):
                waiting.popleft()
            if not waiting:
                return
            shelf = waiting[0].shelf
            assert shelf is not None
            self._write(waiting[0], shelf.kept.popleft(), now)
        self._ctx.endpoint.wake()

    def _write(self, entry: Entry, here: Arrived, now: float) -> None:
        """Write a chunk to the pages."""
        receiver, key = entry.receiver, entry.expect.key
        try:
            self._scatter(entry, here)
        except ValueError as error:
            self._requests.run(entry, receiver.cancel(f"D cannot write its pages: {error}"), now)
            return
        finally:
            self._ctx.copies.launched(key)
        self._ctx.copies.then(key, partial(self._landed, entry, receiver, here), now)

    def _landed(self, entry: Entry, receiver: Receiver, here: Arrived, now: float) -> None:
        """The device has written this chunk to the pages, and computed its checksum."""
        if here.check is not None and here.check.differs():
            self._corrupt(entry, receiver, here, now)
            return
        self._ctx.counters.add("bytes_scattered", here.chunk.nbytes)
        self._ctx.counters.add("chunks_scattered")
        self._requests.run(entry, receiver.scattered(here.rank, here.chunk.chunk, now), now)

    def _corrupt(self, entry: Entry, receiver: Receiver, here: Arrived, now: float) -> None:
        """What has come is not what P had gathered: nothing that this link carries can be believed."""
        peer, check = here.peer, here.check
        assert check is not None
        self._ctx.counters.add("chunks_corrupt")
        theirs, ours = check.said.digest.hex() or "none", check.digest.value().hex()
        reason = (
            f"chunk {check.said.chunk} from {peer.address} has checksum {ours} here and {theirs} there: its "
            "bytes changed on the way"
        )
        self._requests.run(entry, receiver.cancel(reason), now)
        if peer.link == check.said.link:
            self._requests.link_lost(peer, f"the link is given up: {reason}", now)

    def _scatter(self, entry: Entry, here: Arrived) -> None:
        debt, offset = entry.receiver.sources[here.rank].debt, 0
        window, edge = debt.window(*entry.wanted), debt.edge
        shift = edge.target_layer - edge.layers.start
        heads = (edge.target_head, edge.target_head + len(edge.heads))
        for piece in here.chunk.pieces:
            for begin, part in window.within(piece):
                layers = (part.layer + shift, part.layer_stop + shift)
                part_bytes = here.buffer[offset + begin :][: window.size(part)]
                here.pages.scatter(part_bytes, layers, (part.start, part.stop), heads, entry.blocks)
            offset += window.size(piece)

    def _may_hold(self, peer: Inlet, nbytes: int, reserve: int) -> bool:
        """Whether this peer's receives may hold so many bytes more, and leave `reserve` bytes.

        Who holds something must leave as much to the others, so peers that are silent never take everything.
        """
        held = peer.staged
        left = self._ctx.options.staging_bytes - self._others - held - nbytes - reserve
        return left >= 0 and (not held or held + nbytes <= left)

    @property
    def staged(self) -> int:
        """Bytes that posted receives hold."""
        return sum(peer.staged for peer in tuple(self._peers.values()))


def _is_ahead(entry: Entry) -> bool:
    return entry.receiver.load.state is Load.AHEAD
