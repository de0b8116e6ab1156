"""The prompts that P's scheduler has announced to this rank: what the ranks of D say about each, and what
follows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from p2pkv.engine import commands as do
from p2pkv.engine.context import Context, EndedTransfers, log
from p2pkv.engine.peers import IDLE_BEATS, DecodePeer, DecodeRank, Peers
from p2pkv.links.base import LinkError
from p2pkv.protocol import messages as m
from p2pkv.protocol.machine import Effect, Finished, Released, RemoteProtocolError, Tell, Transmit
from p2pkv.protocol.messages import Cancel, Want
from p2pkv.protocol.sender import Sender, Terms

MAX_ORDERS = 4096
"""The most grants of one rank of D that may wait here although they name a prompt that P does not have."""


# Claims of ranks of D for prompts that P's scheduler has not announced yet.


MOST_CLAIMS = 4096
"""The most prompts with such claims."""

CLAIM_LEASES = 10
"""Leases for which a final message (Want or Cancel) is kept: D does not repeat it."""


@dataclass
class EarlyClaim:
    """One rank's claim. `step`: the step that P was in at the first heartbeat; `last`: D's final message."""

    incarnation: str
    attempt: int
    since: float
    step: int | None
    last: Want | Cancel | None = None


class EarlyClaims:
    """Claims by key and place, kept for a lease; bounded in number."""

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._claims: dict[str, dict[DecodeRank, EarlyClaim]] = {}
        self._next = 0.0
        """No claim expires before this time."""

    def __len__(self) -> int:
        return len(self._claims)

    def note(self, key: str, peer: DecodePeer, attempt: int, step: int | None, now: float) -> bool:
        """Keep a claim; whether the step may still run in which P would have heard of the prompt."""
        if key not in self._claims and len(self._claims) >= MOST_CLAIMS:
            return False
        claims = self._claims.setdefault(key, {})
        early, incarnation = claims.get(peer.place), peer.hello.incarnation
        # A D that has restarted counts its attempts from the start again.
        if early is None or (early.incarnation, early.attempt) != (incarnation, attempt):
            early = claims[peer.place] = EarlyClaim(incarnation, attempt, now, step)
        early.since = now
        return early.step is not None and early.step == step

    def keep(self, key: str, place: DecodeRank, message: Want | Cancel) -> None:
        """Keep D's final message about a prompt until P's scheduler announces it."""
        early = self._claims.get(key, {}).get(place)
        if early is not None and early.attempt == message.attempt:
            early.last = message

    def drop(self, key: str, place: DecodeRank, attempt: int) -> None:
        """D has all of the prompt: drop the claim, which has outlived it."""
        claims = self._claims.get(key, {})
        if place in claims and claims[place].attempt == attempt:
            del claims[place]
        if not claims:
            self._claims.pop(key, None)

    def take(self, key: str) -> dict[DecodeRank, EarlyClaim]:
        """P's scheduler has announced this prompt: its claims, which are removed here."""
        return self._claims.pop(key, {})

    def known(self) -> list[str]:
        """The prompts that have claims."""
        return list(self._claims)

    @property
    def due(self) -> float:
        """When `expire` has something to do."""
        return self._next if self._claims else inf

    def expire(self, now: float) -> None:
        """Drop what is older than a lease. A look at all claims is worth it once a lease or so."""
        if now < self._next:
            return
        self._next = now + self._lease  # the earliest end of a claim that comes or is renewed later
        for key, claims in list(self._claims.items()):
            for place, early in list(claims.items()):
                end = early.since + self._lease * (CLAIM_LEASES if early.last else 1)
                if now > end:
                    del claims[place]
                else:
                    self._next = min(self._next, end)
            if not claims:
                del self._claims[key]


# What is said about each prompt.


@dataclass
class PromptEntry:
    """One prompt that P's scheduler has announced."""

    sender: Sender
    decode: str
    blocks: do.Blocks = ()
    free: bool = False


class Prompts:
    """The conversation about each prompt with the ranks of the D that it is for.

    `peers` are the ranks of D that have said Hello: the producer adds them, and one that is gone is taken
    out here (`drop`).
    """

    def __init__(self, context: Context, peers: Peers[DecodeRank, DecodePeer]) -> None:
        self._ctx = context
        self._peers = peers
        options = context.options
        self._terms = Terms(options.chunk_bytes, options.lease_seconds, options.wait_seconds)
        self._early = EarlyClaims(options.lease_seconds)
        self._ended = EndedTransfers(options.lease_seconds)
        self._leaving = ""
        self.entries: dict[str, PromptEntry] = {}
        self._paired: dict[str, dict[str, PromptEntry]] = {}
        """The entries of each D, by the address of its rank 0 and by key."""
        self._next_look = 0.0
        """No lease ends before this time, and none before P is paused or resumed."""
        self._paused_since: float | None = None
        context.counters.gauges |= {
            "prompts": lambda: sum(1 for e in tuple(self.entries.values()) if not e.sender.prompt.ended),
            "prompts_held": lambda: sum(1 for entry in tuple(self.entries.values()) if not entry.free),
            "early_claims": lambda: len(self._early),
            "transfers_ended": lambda: len(self._ended),
        }

    # The table.

    def hold(self, key: str, decode: str, now: float) -> PromptEntry:
        """The entry of this prompt, from now on if it is new."""
        entry = self.entries.get(key)
        if entry is None:
            self._ended.discard(key)
            entry = self.entries[key] = PromptEntry(Sender(key, self._ctx.cache.layers, self._terms), decode)
            self._paired.setdefault(decode, {})[key] = entry
            self._claim_early(key, now)
        return entry

    def forget(self, key: str) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            of_this_decode = self._paired[entry.decode]
            del of_this_decode[key]
            if not of_this_decode:
                del self._paired[entry.decode]

    def live(self, *keys: str) -> Iterator[PromptEntry]:
        """The entries of these keys that have not ended."""
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and not entry.sender.prompt.ended:
                yield entry

    def paired(self, key: str, peer: DecodePeer) -> PromptEntry | None:
        """The entry of this key, if this peer's D is the one that it is for; else None."""
        entry = self.entries.get(key)
        return entry if entry is not None and entry.decode == peer.hello.addresses[0] else None

    @property
    def due(self) -> float:
        """When `tick` has something to do, if nothing happens before."""
        return min(self._next_look, self._early.due)

    # The ranks of D.

    def waiting(self, peer: DecodePeer, transfers: m.Transfers, now: float) -> None:
        """D's rank waits for these; answer which of them P knows."""
        if transfers:
            peer.want(now)
            self.invite(peer, now)
        held: list[tuple[str, int]] = []
        unknown: list[tuple[str, int]] = []
        for key, attempt in transfers:
            reason = self._ended.get(key)
            entry = self.entries.get(key)
            if entry is None and self._leaving:
                reason = reason or self._leaving
            if reason is not None or (entry is not None and entry.decode != peer.hello.addresses[0]):
                another = f"P has this request paired with another D, {entry.decode if entry else ''}"
                reason = reason or another
                self._ctx.tell(peer.connection, m.Failed(key, attempt, reason))
                continue
            (held if self._claim(peer, key, attempt, now) else unknown).append((key, attempt))
        if not self._ctx.steps.trouble(now):
            self._ctx.tell(peer.connection, m.HeartbeatAck(tuple(held), tuple(unknown)))

    def _claim(self, peer: DecodePeer, key: str, attempt: int, now: float) -> bool:
        """Note that D's rank waits for this prompt; whether P vouches for it."""
        entry = self.entries.get(key)
        if entry is None:
            return self._early.note(key, peer, attempt, self._ctx.steps.running, now)
        sender = entry.sender
        sender.expects = peer.served
        if peer.assignment is None:
            self.run(entry, [] if sender.prompt.ended else sender.flush(), now)
            return True
        self.run(entry, sender.claim(peer.hello.rank, peer.assignment, attempt, peer.limit, now), now)
        return sender.vouches(peer.hello.rank, attempt)

    def say_ahead(self, entry: PromptEntry) -> None:
        """Offer this prompt to the ranks of D that may take it before the request for it comes
        (`ahead_bytes`)."""
        sender = entry.sender
        message = m.Ahead(sender.key, sender.tokens, sender.digest)
        for peer in self._peers:
            decode, rank = peer.place
            if decode == entry.decode and peer.hello.ahead and peer.assignment and rank not in sender.sends:
                self._ctx.tell(peer.connection, message)

    def _claim_early(self, key: str, now: float) -> None:
        """P's scheduler has announced this prompt: apply what ranks of D said about it before."""
        for place, early in self._early.take(key).items():
            peer = self._peers.get(place)
            if peer is not None and peer.hello.incarnation == early.incarnation:
                self._claim(peer, key, early.attempt, now)
                if early.last is not None:
                    self.about(peer, key, early.last, now)

    def about(
        self, peer: DecodePeer, key: str, message: m.Want | m.Grant | m.Done | m.Cancel, now: float
    ) -> None:
        """D's rank says something about one transfer."""
        if isinstance(message, m.Done | m.Cancel) or (isinstance(message, m.Want) and message.empty):
            peer.confirmed(key, message.attempt)
        entry = self.paired(key, peer)
        if entry is None:
            if isinstance(message, m.Grant) and message.link == peer.link:
                if len(peer.orders) >= MAX_ORDERS:
                    self.link_lost(peer, f"{peer.address} grants without end", now)
                    return
                peer.order(key, Transmit(peer.hello.rank, message, ()))
            elif isinstance(message, m.Want | m.Cancel):
                self._early.keep(key, peer.place, message)
            elif isinstance(message, m.Done):
                # D's last heartbeats still named a prompt that P had already let go.
                self._early.drop(key, peer.place, message.attempt)
            return
        sender = entry.sender
        try:
            match message:
                case m.Want():
                    effects = sender.want(peer.hello.rank, message, now)
                case m.Grant():
                    effects = sender.grant(peer.hello.rank, message, now)
                case m.Done():
                    effects = sender.done(peer.hello.rank, message, now)
                case m.Cancel():
                    effects = sender.cancel(peer.hello.rank, message)
        except RemoteProtocolError as error:
            self._ctx.counters.add("messages_refused")
            log.warning("%s: %s", peer.address, error)
            effects = sender.lost(peer.hello.rank, str(error))
            if isinstance(message, m.Grant):
                # D has posted a receive that no send of ours will fill, so the link is out of step.
                self.link_lost(peer, f"{peer.address} granted what was not announced", now)
        self.run(entry, effects, now)

    def linked(self, peer: DecodePeer, now: float) -> None:
        """The link is up, and with it the limit of a chunk is known: announce what has been claimed."""
        for entry in self._of(peer):
            send = entry.sender.sends.get(peer.hello.rank)
            if send is not None and peer.assignment is not None:
                effects = entry.sender.claim(peer.hello.rank, peer.assignment, send.attempt, peer.limit, now)
                self.run(entry, effects, now)

    def invite(self, peer: DecodePeer, now: float) -> None:
        """Begin a link to this rank of D, if there is none and it is time to try again."""
        try:
            peer.invite(now)
        except LinkError as error:
            self.link_lost(peer, f"no link to {peer.address}: {error}", now, tell=False)

    # What breaks.

    def link_lost(self, peer: DecodePeer, reason: str, now: float, tell: bool = True) -> None:
        """This link is given up. What it carried fails; a new link is built if D still waits for
        something."""
        log.log(logging.WARNING if peer.named else logging.INFO, "%s", reason)
        peer.abort(now, reason if tell else "")
        for entry in self._of(peer):
            self.run(entry, entry.sender.unlinked(peer.hello.rank, reason), now)
        peer.parked = self.idle(peer, now)  # else a dead D would be invited for ever
        self.invite(peer, now)

    def idle(self, peer: DecodePeer, now: float) -> bool:
        """Whether neither side has a use for this link now."""
        # D that has named no transfer may have come ahead of any request.
        quiet = (not peer.named or now - peer.wanted > IDLE_BEATS * self._ctx.beat) and not peer.busy
        return quiet and all(entry.sender.prompt.ended for entry in self._of(peer))

    def drop(self, peer: DecodePeer, reason: str, now: float) -> None:
        """This incarnation of a D rank is gone: it is forgotten, and its transfers fail."""
        peer.abort(now)
        self._peers.remove(peer)
        for entry in self._of(peer):
            self.run(entry, entry.sender.lost(peer.hello.rank, reason, restarted=True), now)

    def _of(self, peer: DecodePeer) -> list[PromptEntry]:
        return list(self._paired.get(peer.hello.addresses[0], {}).values())

    def leave(self, reason: str, now: float, finish: bool) -> bool:
        """This rank stops: with `finish`, what D waits for and P has computed may go on. All else ends.

        Returns whether some rank of D was told so.
        """
        self._leaving, notified = reason, False
        for key in self._early.known():
            for place, early in self._early.take(key).items():
                if peer := self._peers.get(place):
                    self._ctx.tell(peer.connection, m.Failed(key, early.attempt, reason))
                    notified = True
        for entry in self.live(*self.entries):
            if not (finish and entry.sender.awaited):
                notified = notified or bool(entry.sender.sends)
                self.run(entry, entry.sender.abort(reason), now)
        return notified

    # Time.

    def tick(self, now: float) -> None:
        paused_since = self._ctx.steps.paused_since
        if now >= self._next_look or paused_since != self._paused_since:
            self._paused_since = paused_since
            # The earliest end of a lease or a wait that begins later or runs. Messages from D may put it off.
            self._next_look = now + min(self._terms.lease, self._terms.wait)
            for entry in list(self.entries.values()):
                sender = entry.sender
                self.run(entry, sender.tick(now, paused_since), now)
                for end in (sender.deadline, sender.kept_until(paused_since)):
                    self._next_look = min(self._next_look, inf if end is None else end)
        self._early.expire(now)
        self._ended.expire(now)

    # What a sender wants done.

    def run(self, entry: PromptEntry, effects: list[Effect], now: float) -> None:
        """Do what the sender of this prompt has decided."""
        for effect in effects:
            match effect:
                case Tell(rank, message):
                    peer = self._peers.get((entry.decode, rank))
                    if peer is not None and isinstance(message, m.Sent) and not message.filler:
                        peer.sent(message.key, message.attempt)
                    elif peer is not None and isinstance(message, m.Failed):
                        peer.confirmed(message.key, message.attempt)
                    if peer is not None and not self._ctx.tell(peer.connection, message):
                        self.drop(peer, f"{peer.address} is gone: the connection to it has ended", now)
                case Transmit():
                    peer = self._peers.get((entry.decode, effect.rank))
                    if peer is not None and effect.grant.link == peer.link:
                        peer.order(entry.sender.key, effect)
                case Released():
                    self._ctx.copies.then(entry.sender.key, lambda _: self._released(entry), now)
                case Finished(ok, reason):
                    self._finished(entry, ok, reason, now)

    def _released(self, entry: PromptEntry) -> None:
        entry.free = True
        self._ctx.emit(do.BlocksFree(entry.sender.key))

    def _finished(self, entry: PromptEntry, ok: bool, reason: str, now: float) -> None:
        key = entry.sender.key
        self._ctx.counters.add("transfers_sent" if ok else "transfers_failed")
        if ok:
            log.debug("sent %s", key)
        else:
            self._ended.add(key, reason, now)
            log.warning("transfer %s was not sent: %s", key, reason)
