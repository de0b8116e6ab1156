"""The transfers of a rank as P: its prompts, the messages of ranks of D about each, and the gather.

It calls the ranks of D (`to_decode`), and is called by none of them: see `effects`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET

from p2pkv.control.endpoint import Connection
from p2pkv.engine import commands as do
from p2pkv.engine import to_decode
from p2pkv.engine.context import Context, ExpiringDict, log
from p2pkv.engine.data_parallel import Redirects
from p2pkv.engine.early_claims import EarlyClaims
from p2pkv.engine.effects import Emit, SendMessage, Timer
from p2pkv.engine.to_decode import DecodePeer, DecodePeers, PendingSend
from p2pkv.kv.cache import CachedTables, Rectangles
from p2pkv.kv.layouts import Bounds, Tokens
from p2pkv.links.base import Send
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import is_engine_of
from p2pkv.protocol.sender import PromptPhase, Sender
from p2pkv.protocol.state_machine import Decision, Finished, RemoteProtocolError, SendTo, Transmit

MAX_ENDED = 1024
"""Failed transfers whose reasons are kept for late claims."""

TransferMessage = m.Want | m.Grant | m.Done | m.Cancel


@dataclass
class PromptEntry:
    """One prompt that P's scheduler has announced.

    Attributes:
        decode: the D that it is for, by the address of its rank 0: the one in the request's id, or the engine
            of the same instance that has claimed it, with those of its ranks that have (`peers`).
        free: nothing reads its blocks any more.
        unoffered: ranks of D that would take it before its request comes have yet to be asked.
    """

    sender: Sender
    decode: str
    blocks: CachedTables = field(default_factory=CachedTables)
    free: bool = False
    unoffered: bool = False
    peers: dict[int, DecodePeer] = field(default_factory=dict)


class Prefill:
    """All prompts. `ranks`: the ranks of D that have sent Hello."""

    def __init__(self, context: Context, ranks: DecodePeers) -> None:
        self._ctx = context
        self._ranks = ranks
        self._claims = EarlyClaims(context.terms.lease)
        self._redirects = Redirects(context)
        self._ended = ExpiringDict(context.terms.lease, MAX_ENDED)
        """The reasons of transfers that have failed, by key."""
        self._count = context.counters.values
        self.entries: dict[str, PromptEntry] = {}
        self._by_decode: dict[str, dict[str, PromptEntry]] = {}
        """The entries of each D, by the address of its rank 0 and by key."""
        self._leases = Timer(context.timers, self._expire)
        self._expiry = Timer(context.timers, self._expire_claims)
        self._leases.at(0.0)
        context.counters.add_gauges(
            prompts=lambda: sum(1 for e in tuple(self.entries.values()) if not e.sender.prompt.ended),
            prompts_held=lambda: sum(1 for entry in tuple(self.entries.values()) if not entry.free),
            early_claims=lambda: len(self._claims),
            transfers_ended=lambda: len(self._ended),
        )

    # The forward thread's commands.

    def hold(self, command: do.HoldPrompt | do.OfferPrompt, now: float) -> None:
        key, decode = command.key, str(command.decode)
        if key not in self.entries:
            self._ended.discard(key)
            sender = Sender(key, self._ctx.cache.layers, self._ctx.terms)
            entry = self.entries[key] = PromptEntry(sender, decode)
            self._by_decode.setdefault(decode, {})[key] = entry
            self._take_claims(key, now)
            if isinstance(command, do.HoldPrompt) and command.named is not None:
                self._redirects.announce(key, command.named, now)

    def offer(self, command: do.OfferPrompt, now: float) -> None:
        self.hold(command, now)
        entry = self.entries[command.key]
        if not entry.sender.prompt.ended:
            effects = entry.sender.offer(command.tokens, command.digest, command.generation)
            self._apply_decisions(entry, effects, now)
            entry.unoffered = True
            # Nothing of what fits one message is sent before its last layer: what is said of it meanwhile
            # only takes the forward thread's time.
            if self._ctx.cache.nbytes(command.tokens) > self._ctx.options.chunk_bytes:
                self._offer_prefetch(entry)

    def _offer_prefetch(self, entry: PromptEntry) -> None:
        """Offer this prompt to ranks of D that take it before its request comes (`prefetch_bytes`)."""
        if not entry.unoffered:
            return
        entry.unoffered = False
        sender = entry.sender
        message = m.PrefetchOffer(sender.key, sender.tokens, sender.digest)
        for peer in self._ranks:
            decode, rank = peer.key
            takes_it = decode == entry.decode and peer.hello.prefetch and peer.assignment is not None
            if takes_it and rank not in sender.sends:
                self._ctx.effects.append(SendMessage(peer, message))

    def blocks(self, command: do.PromptBlocks, now: float) -> None:
        for entry in self.live(command.key):
            entry.blocks = CachedTables(command.blocks)

    def computed(self, command: do.Computed, now: float) -> None:
        for key, stop in command.prompts:
            for entry in self.live(key):
                effects = entry.sender.computed(command.layer, command.layer_stop, stop, now)
                self._apply_decisions(entry, effects, now)
                if entry.sender.prompt.state is PromptPhase.COMPUTED:
                    self._offer_prefetch(entry)

    def flush(self, command: do.Flush, now: float) -> None:
        for entry in self.live(*command.keys):
            self._apply_decisions(entry, entry.sender.flush(), now)
            self._offer_prefetch(entry)

    def revoke(self, command: do.Revoked, now: float) -> None:
        for entry in self.live(command.key):
            entry.sender.revoke()
        self._ctx.revoked.carried_out(command.key)

    def abort(self, command: do.Abort, now: float) -> None:
        for entry in self.live(command.key):
            self._apply_decisions(entry, entry.sender.abort(command.reason), now)

    def release(self, command: do.Release, now: float) -> None:
        for entry in self.live(command.key):
            self._apply_decisions(entry, entry.sender.release(command.reason), now)

    def forget(self, command: do.Forget, now: float) -> None:
        if command.role == "D":
            return
        self._redirects.forget(command.key)
        entry = self.entries.pop(command.key, None)
        if entry is not None:
            self._out_of_table(entry)

    def _out_of_table(self, entry: PromptEntry) -> None:
        of_this_decode = self._by_decode[entry.decode]
        del of_this_decode[entry.sender.key]
        if not of_this_decode:
            del self._by_decode[entry.decode]

    def live(self, *keys: str) -> Iterator[PromptEntry]:
        """The entries of these keys that have not ended."""
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and not entry.sender.prompt.ended:
                yield entry

    def uses(self, peer: DecodePeer) -> bool:
        """Whether a prompt for this rank's D has not ended."""
        return not all(entry.sender.prompt.ended for entry in self._for(peer))

    def _for(self, peer: DecodePeer) -> list[PromptEntry]:
        return list(self._by_decode.get(peer.hello.addresses[0], {}).values())

    # Messages of ranks of D.

    def heartbeat(self, peer: DecodePeer, message: m.Heartbeat, now: float) -> None:
        """D's rank waits for these; answer which of them P knows."""
        peer.alive(bool(message.transfers), now)
        if message.transfers:
            self._ranks.invite(peer, now)
        effects = self._ctx.effects
        self._ended.expire(now)
        held: list[tuple[str, int]] = []
        unknown: list[tuple[str, int]] = []
        for key, attempt in message.transfers:
            reason = self._ended.get(key)
            entry = self.entries.get(key)
            if entry is None and self._ranks.leaving:
                reason = reason or self._ranks.leaving
            if entry is None and reason is None and (engine := self._redirects.of(key, now)):
                effects.append(SendMessage(peer, m.Redirect(key, attempt, engine)))
                continue
            if reason is not None or (entry is not None and not self._is_for(entry, peer)):
                another = f"P has this request paired with another D, {entry.decode if entry else ''}"
                effects.append(SendMessage(peer, m.Failed(key, attempt, reason or another)))
                continue
            (held if self._claim(peer, key, attempt, now) else unknown).append((key, attempt))
        if not self._ctx.steps.trouble(now):
            effects.append(SendMessage(peer, m.HeartbeatAck(tuple(held), tuple(unknown))))

    def _is_for(self, entry: PromptEntry, peer: DecodePeer) -> bool:
        """Whether this rank's engine may have this prompt: the id names it, or another engine of its instance
        and none has claimed the prompt."""
        decode = peer.hello.addresses[0]
        if entry.decode != decode:
            if entry.peers or not is_engine_of(entry.decode, peer.hello):
                return False
            self._out_of_table(entry)
            entry.decode = decode
            self._by_decode.setdefault(decode, {})[entry.sender.key] = entry
        return True

    def prompt_owner(self, connection: Connection, message: m.PromptOwner, now: float) -> None:
        """Another engine of this instance has requests that name this one: refer D to it."""
        self._redirects.received(message, now)
        for key in message.keys:
            for rank, claim in self._claims.take(key).items() if key not in self.entries else ():
                if peer := self._ranks.get(rank):
                    moved = m.Redirect(key, claim.attempt, message.engine)
                    self._ctx.effects.append(SendMessage(peer, moved))

    def _claim(self, peer: DecodePeer, key: str, attempt: int, now: float) -> bool:
        """Note that D's rank waits for this prompt. Returns whether P vouches for it."""
        entry = self.entries.get(key)
        if entry is None:
            known = self._claims.note(key, peer, attempt, self._ctx.steps.running, now)
            self._expiry.by(self._claims.due)
            return known
        sender, rank = entry.sender, peer.hello.rank
        entry.peers[rank] = peer
        sender.serves(peer.served)
        if peer.assignment is None:
            self._apply_decisions(entry, [] if sender.prompt.ended else sender.flush(), now)
            return True
        effects = sender.claim(rank, peer.assignment, attempt, peer.link.limit, now)
        self._apply_decisions(entry, effects, now)
        return sender.vouches(rank, attempt)

    def _take_claims(self, key: str, now: float) -> None:
        """P's scheduler has announced this prompt: apply what ranks of D have sent about it before."""
        entry = self.entries[key]
        for rank, claim in self._claims.take(key).items():
            peer = self._ranks.get(rank)
            if peer is None or peer.hello.incarnation != claim.incarnation:
                continue
            if self._is_for(entry, peer):  # else its next heartbeat is refused
                self._claim(peer, key, claim.attempt, now)
                if claim.last is not None:
                    self.message(peer, claim.last, now)

    def message(self, peer: DecodePeer, message: TransferMessage, now: float) -> None:
        key = message.key
        if isinstance(message, m.Done | m.Cancel) or (isinstance(message, m.Want) and message.empty):
            peer.confirmed(key, message.attempt)
        entry = self.entries.get(key)
        if entry is None or not self._is_for(entry, peer):
            self._unknown(peer, message, now)
            return
        sender, rank = entry.sender, peer.hello.rank
        entry.peers[rank] = peer
        try:
            match message:
                case m.Grant():
                    effects = sender.grant(rank, message, now)
                case m.Want():
                    effects = sender.want(rank, message, now)
                case m.Done():
                    effects = sender.done(rank, message, now)
                case m.Cancel():
                    effects = sender.cancel(rank, message)
        except RemoteProtocolError as error:
            self._ctx.counters.add("messages_refused")
            log.warning("%s broke the protocol: %s", peer.address, error)
            if isinstance(message, m.Grant) and peer.link.invited:
                # D has posted a receive that no send of ours will fill, so the link is out of step.
                self._ranks.lose_link(peer, f"{peer.address} granted a message that P had not announced", now)
            effects = sender.lost(rank, str(error))
        self._apply_decisions(entry, effects, now)

    def _unknown(self, peer: DecodePeer, message: TransferMessage, now: float) -> None:
        """P does not have this prompt, or has it for another D."""
        match message:
            case m.Grant(key):
                self._ranks.order(peer, key, Transmit(peer.hello.rank, message, ()), now, known=False)
            case m.Want(key) | m.Cancel(key):
                self._claims.keep(key, peer.key, message)
            case m.Done(key):
                # D's last heartbeats still named a prompt that P had already let go.
                self._claims.drop(key, peer.key, message.attempt)

    # What has happened to ranks of D.

    def linked(self, effect: to_decode.DecodeLinked, now: float) -> None:
        """With the link the limit of a chunk is known: announce what has been claimed."""
        peer = effect.peer
        for entry in self._for(peer):
            send = entry.sender.sends.get(peer.hello.rank)
            if send is not None and peer.assignment is not None:
                rank, limit = peer.hello.rank, peer.link.limit
                effects = entry.sender.claim(rank, peer.assignment, send.attempt, limit, now)
                self._apply_decisions(entry, effects, now)

    def unlinked(self, effect: to_decode.DecodeLinkLost, now: float) -> None:
        """What the link carried fails; a claim waits for the next link."""
        for entry in self._for(effect.peer):
            self._apply_decisions(entry, entry.sender.unlinked(effect.peer.hello.rank, effect.reason), now)
        self._ranks.rebuild(effect.peer, now)

    def gone(self, effect: to_decode.DecodeGone, now: float) -> None:
        rank = effect.peer.hello.rank
        for entry in self._for(effect.peer):
            if entry.peers.get(rank) is effect.peer:
                del entry.peers[rank]
            self._apply_decisions(entry, entry.sender.lost(rank, effect.reason, restarted=True), now)

    # The gather.

    def fill(self, effect: to_decode.FillSend, now: float) -> None:
        """Fill one send from the blocks, under the lock that keeps them from being taken back meanwhile. On a
        device the gather is only queued; the send is ordered behind it, and taking blocks back waits."""
        peer, key, order, send = effect.peer, effect.key, effect.order, effect.send
        if not peer.link.linked:
            return
        entry = self.entries.get(key)
        if entry is not None and entry.decode != peer.hello.addresses[0]:
            entry = None
        revoked, wrong = self._ctx.revoked, ""
        with revoked.reading:
            filler = entry is None or key in revoked.keys or not entry.sender.readable(order)
            if entry is not None and not filler:
                try:
                    self._gather(entry, peer, order, send)
                except ValueError as error:
                    filler, wrong = True, str(error)
                self._ctx.copies.launched(key)
        digest = None
        if peer.verify and not filler:
            digest = self._ctx.cache.digest(send.buffer)
            self._ctx.copies.launched(key)  # as it may only be queued
        flight = PendingSend(send, key, order, filler, digest, summed=digest is None or digest.known)
        self._count["chunks_filler" if filler else "chunks_sent"] += 1
        self._count["bytes_sent"] += 0 if filler else order.grant.nbytes
        self._ranks.commit(peer, flight, now)
        if entry is not None and wrong:
            self._apply_decisions(entry, entry.sender.abort(f"P cannot read its blocks: {wrong}"), now)
        if not flight.summed:
            self._ctx.copies.then(key, partial(self._ranks.summed, peer, flight), now)

    def _gather(self, entry: PromptEntry, peer: DecodePeer, order: Transmit, send: Send) -> None:
        buffer, offset = send.buffer, 0
        for piece in order.pieces:
            ours, layers, tokens, heads = self._rectangle(peer, piece)
            size = ours.nbytes(layers[1] - layers[0], piece.start, piece.stop, heads[1] - heads[0])
            part = buffer if size == order.grant.nbytes else buffer[offset : offset + size]
            ours.gather(part, layers, tokens, heads, entry.blocks)
            offset += size

    @staticmethod
    def _rectangle(peer: DecodePeer, piece: m.Piece) -> tuple[Rectangles, Bounds, Tokens, Bounds]:
        """Where a piece lies in this rank's cache: layers, tokens and heads."""
        assert peer.assignment is not None
        edge = peer.assignment.edges[piece.group]
        shift = edge.source_layer - edge.layers.start
        count = edge.heads.stop - edge.heads.start
        span = piece.start, piece.stop
        tokens = span if edge.tokens is None else edge.tokens.on_source(*span)
        layers = piece.layer + shift, piece.layer_stop + shift
        return peer.rows[piece.group], layers, tokens, (edge.source_head, edge.source_head + count)

    def _prepare(self, entry: PromptEntry, peer: DecodePeer, chunk: m.Chunk) -> None:
        """The grant for this chunk is on its way, if it has not come yet: prepare the gather."""
        send = entry.sender.sends.get(peer.hello.rank)
        if send is None or entry.sender.prompt.ended or not send.awaits_grant(chunk):
            return
        self._prepare_pieces(entry, peer, chunk.pieces)

    def _prepare_pieces(self, entry: PromptEntry, peer: DecodePeer, pieces: Sequence[m.Piece]) -> None:
        with contextlib.suppress(ValueError):  # the gather raises it, too
            for piece in pieces:
                ours, layers, tokens, heads = self._rectangle(peer, piece)
                ours.prepare(layers, tokens, heads, entry.blocks)

    def _prepare_all(self, entry: PromptEntry, peer: DecodePeer, limit: int) -> None:
        """D may ask for this prompt with grants: prepare the gathers, as if it had none of the prompt."""
        send = entry.sender.sends.get(peer.hello.rank)
        if send is None or send.cutter is not None or entry.sender.prompt.ended:
            return
        for pieces in entry.sender.foresee(send, limit):
            self._prepare_pieces(entry, peer, pieces)

    def sent(self, effect: to_decode.SendsDue, now: float) -> None:
        """The link launches these sends after their `Sent` messages: send D what they hold."""
        peer, flights = effect.peer, effect.flights
        together = len(flights) if len(flights) > 1 else UNSET
        for sent in flights:
            entry, grant = self.entries.get(sent.key), sent.order.grant
            digest = b"" if sent.digest is None else sent.digest.value()
            if entry is not None and entry.peers.get(peer.hello.rank) is peer:
                decided = entry.sender.sent(sent.order, sent.filler, digest, together)
                self._apply_decisions(entry, decided, now)
            else:
                about = sent.key, grant.attempt, grant.chunk, grant.link
                self._ctx.effects.append(SendMessage(peer, m.Sent(*about, sent.filler, digest, together)))
            together = UNSET

    def taken(self, effect: to_decode.SendTaken, now: float) -> None:
        entry = self.entries.get(effect.key)
        if entry is not None and entry.sender.prompt.state is PromptPhase.OFFERED:
            self._count["bytes_before_last_layer"] += effect.nbytes

    # Time, and the end.

    def _expire(self, now: float) -> None:
        """End what has outlived its lease, or P's patience; messages from D may put that off."""
        paused_since = self._ctx.steps.paused_since
        # The earliest end of a lease or a wait that begins later or runs.
        first = now + min(self._ctx.terms.lease, self._ctx.terms.wait)
        for entry in list(self.entries.values()):
            sender = entry.sender
            self._apply_decisions(entry, sender.tick(now, paused_since), now)
            for end in (sender.deadline, sender.kept_until(paused_since)):
                if end is not None and end < first:
                    first = end
        self._ended.expire(now)
        self._leases.at(first)

    def _expire_claims(self, now: float) -> None:
        self._claims.expire(now)
        self._expiry.by(self._claims.due)

    def paused(self, now: float) -> None:
        """P has been paused or resumed: leases may end sooner."""
        self._leases.at(now)

    def leave(self, reason: str, now: float, finish: bool) -> bool:
        """This rank stops: with `finish`, what D waits for and P has computed may go on. All else ends.
        Returns whether a rank of D was sent an end."""
        self._ranks.leave(reason)
        notified = False
        for key in self._claims.known():
            for rank, claim in self._claims.take(key).items():
                if peer := self._ranks.get(rank):
                    self._ctx.effects.append(SendMessage(peer, m.Failed(key, claim.attempt, reason)))
                    notified = True
        for entry in self.live(*self.entries):
            if not (finish and entry.sender.awaited):
                notified = notified or bool(entry.sender.sends)
                self._apply_decisions(entry, entry.sender.abort(reason), now)
        return notified

    @property
    def finished(self) -> bool:
        return not any(self.live(*self.entries))

    def _apply_decisions(self, entry: PromptEntry, decided: list[Decision], now: float) -> None:
        effects = self._ctx.effects
        for each in decided:
            match each:
                case SendTo(rank, message):
                    if (peer := entry.peers.get(rank)) is not None:
                        effects.append(SendMessage(peer, message))
                        if self._ctx.copies_synchronously:
                            continue
                        if isinstance(message, m.Chunk):
                            self._ctx.idle_work.append(partial(self._prepare, entry, peer, message))
                        elif isinstance(message, m.Offer) and message.ready:
                            self._ctx.idle_work.append(partial(self._prepare_all, entry, peer, message.ready))
                case Transmit(rank):
                    if (peer := entry.peers.get(rank)) is not None:
                        self._ranks.order(peer, entry.sender.key, each, now)
                case Finished(ok, reason):
                    self._finished(entry, ok, reason, now)

    def _released(self, entry: PromptEntry) -> None:
        entry.free = True
        self._ctx.effects.append(Emit(do.BlocksFree(entry.sender.key)))

    def _finished(self, entry: PromptEntry, ok: bool, reason: str, now: float) -> None:
        key = entry.sender.key
        self._ctx.copies.then(key, lambda _: self._released(entry), now)
        self._ctx.counters.add("transfers_sent" if ok else "transfers_failed")
        if ok:
            log.debug("transfer %s is complete", key)
        else:
            self._ended.add(key, reason, now)
            log.warning("transfer %s was not sent: %s (D is %s)", key, reason, entry.decode)
