"""D's half of a rank: dials the ranks of P, and writes what they push into its requests' pages.

Here is what reaches it, from the forward thread, from the ranks of P and by time, and who is connected. What
is said about a request is in `requests`, its data in `incoming`.
"""

from __future__ import annotations

from math import inf

from p2pkv.control.endpoint import Line
from p2pkv.engine import commands as do
from p2pkv.engine.context import Context, log
from p2pkv.engine.idle import IDLE_BEATS, LOOK_SECONDS, REASON, surplus
from p2pkv.engine.incoming import Incoming
from p2pkv.engine.inlet import Inlet
from p2pkv.engine.requests import Requests
from p2pkv.engine.shelves import Shelves
from p2pkv.links.base import LinkError
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Refused, unfit
from p2pkv.protocol.machine import RemoteProtocolError

IDLE_SECONDS = 60.0
"""A dialed rank of P that nobody has asked for anything for so long is hung up on."""


ANSWERS = (m.Welcome, m.Refuse, m.Stranger, m.Holding)
"""What a P says to what we have asked. All else may come over a connection on which P does not hear us."""


class Consumer:
    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._peers: dict[str, Inlet] = {}
        self._active: dict[Inlet, None] = {}
        """Those with something under way, and those whose link is not up."""
        self._next_look = 0.0
        shelves = Shelves(context.options.ahead_bytes, context.cache.device)
        self._requests = Requests(context, self._peers, self._active, shelves)
        self._incoming = Incoming(context, self._peers, self._active, self._requests, shelves)
        self._next_beat = 0.0
        self._window = max(1, context.options.staging_bytes // 2)
        context.counters.gauges |= {
            "staging_bytes": lambda: self._incoming.staged,
            "ahead_bytes": lambda: shelves.used,
            "receives_posted": lambda: sum(len(peer.posted) for peer in tuple(self._peers.values())),
            "receives_asked": lambda: sum(len(peer.asked) for peer in tuple(self._peers.values())),
            "peers": lambda: len(self._peers),
            "links": lambda: sum(1 for peer in tuple(self._peers.values()) if peer.linked),
            "links_stuck": lambda: context.links.stuck,
        }

    # The forward thread.

    def command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Expect():
                self._requests.expect(command, now)
            case do.Load():
                self._requests.load(command, now)
            case do.Drop(key, reason):
                self._requests.drop(key, reason, now)
            case do.Forget(key):
                self._requests.forget(key)
            case _:
                raise AssertionError(f"{command} is not for a D")

    # The ranks of P, and their links.

    def receive(self, line: Line, message: m.AnyMessage, now: float) -> None:
        if isinstance(message, m.Hello):
            reason = f"{self._ctx.hello.address} is a consumer: consumers dial producers, nobody dials them"
            self._ctx.tell(line, m.Refuse(message.incarnation, reason))
            return
        peer = line.tag
        if not isinstance(peer, Inlet):
            return
        if isinstance(message, ANSWERS):
            peer.mute = None
        match message:
            case m.Welcome():
                self._welcome(peer, message, now)
            case m.Refuse(_, reason):
                self._refuse(peer, reason, now)
            case m.Stranger():
                if peer.dialing.open:
                    self._requests.lost(
                        peer, f"{peer.address} is gone: who answers there does not know this connection", now
                    )
            case m.Holding(held, _):
                self._requests.holding(peer, held, now)
            case m.Ahead():
                self._requests.ahead(peer, message, now)
            case m.LinkInvite():
                self._invited(peer, message, now)
            case m.LinkDown(link, reason):
                if link == peer.link:
                    reason = f"{peer.address} aborted the link: {reason}"
                    self._requests.link_lost(peer, reason, now, tell=False)
            case m.Offer(key) | m.Chunk(key) | m.Sent(key) | m.Failed(key):
                self._requests.about(peer, key, message, now)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a D")

    def _welcome(self, peer: Inlet, message: m.Welcome, now: float) -> None:
        again = peer.hello is not None and peer.hello.incarnation == message.hello.incarnation
        if message.you != self._ctx.hello.incarnation or again:
            return
        try:
            peer.welcome(message)
        except Refused as refused:
            self._refuse(peer, unfit(self._ctx.hello.address, peer.address, refused), now)
            return
        sums = ", with checksums" if peer.verify else ""
        log.info("P rank %d at %s is connected; what travels: %s%s", peer.rank, peer.address, peer.wire, sums)
        self._requests.connect(now)

    def _refuse(self, peer: Inlet, reason: str, now: float) -> None:
        self._ctx.counters.add("messages_refused")
        log.warning("no transfers from %s: %s", peer.address, reason)
        peer.dialing.refuse(reason, now)
        self._requests.fail(peer, reason, now)

    def unreachable(self, line: Line, reason: str, now: float) -> None:
        """Whoever listens there is no member, or nobody that we may dial; it is left alone for a while."""
        if isinstance(line.tag, Inlet):
            self._refuse(line.tag, reason, now)

    def _invited(self, peer: Inlet, message: m.LinkInvite, now: float) -> None:
        if peer.linked:
            self._requests.link_lost(peer, f"{peer.address} builds its link anew", now, tell=False)
        try:
            peer.invited(message, self._window)
        except LinkError as error:
            self._requests.fail(peer, f"no link from {peer.address}: {error}", now)

    def _redial(self, peer: Inlet, reason: str, now: float) -> None:
        """A connection may be dead although neither end was told: the next request gets a new one."""
        self._ctx.endpoint.hang_up(peer.line)
        self._requests.lost(peer, reason, now)

    def _hang_up(self, peer: Inlet) -> None:
        peer.abort()
        self._ctx.endpoint.hang_up(peer.line)
        del self._peers[peer.address]

    def _close_idle(self, now: float) -> None:
        linked = [peer for peer in self._peers.values() if peer.linked]
        quiet = (IDLE_BEATS + 1) * self._ctx.beat

        def idle(peer: Inlet) -> bool:
            return now - peer.used > quiet and not (peer.posted or peer.asked or self._requests.of(peer))

        for peer in surplus(linked, self._ctx.options.max_links, idle, lambda peer: peer.used):
            log.info("closing the link from %s: %s", peer.address, REASON)
            peer.abort(REASON)

    # The data.

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        return self._incoming.pump(now)

    # Time.

    def tick(self, now: float) -> None:
        self._requests.tick(now)
        lease = self._ctx.options.lease_seconds
        for peer in list(self._active):
            if peer.overdue(now, lease):
                reason = f"{peer.address} did not send in time what was granted: nothing for {lease:g} s"
                self._requests.link_lost(peer, reason, now)
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._look(now, lease)
        if now >= self._next_beat and not self._ctx.steps.stalled(now):
            self._next_beat = now + self._ctx.beat
            self._requests.say_waiting(now)

    def _look(self, now: float, lease: float) -> None:
        """At all ranks of P, those with nothing under way too."""
        for peer in list(self._peers.values()):
            if peer.mute is not None and now - peer.mute > lease:
                self._redial(peer, f"{peer.address} did not answer in time: nothing for {lease:g} s", now)
            if now - peer.used <= max(IDLE_SECONDS, lease) or peer.posted or self._requests.wants(peer):
                peer.stir()
            else:
                self._hang_up(peer)
        self._close_idle(now)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that has to be looked at often."""
        return self._requests.connected and not any(peer.busy for peer in self._active)

    @property
    def due(self) -> float:
        """When the next deadline ends, if nothing happens before."""
        return min(self._requests.due, self._next_beat if self._requests.entries else inf)

    # The end.

    told = False
    """Whether a peer needs time to hear of it: a P hears even what was said just before the end."""

    def leave(self, now: float, finish: bool = True) -> None:
        """Load nothing any more, whatever `finish`: nobody would use it."""
        self._requests.leave(f"{self._ctx.hello.address} is gone: it is shutting down", now)

    @property
    def over(self) -> bool:
        """Whether nothing is under way."""
        return not any(not entry.receiver.load.ended for entry in self._requests.entries.values())

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.abort("D is shutting down")
