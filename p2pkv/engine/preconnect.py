"""The P's that the proxy has named to this D: their ranks are dialed, and the links to them built, before a
request needs them (`preconnect`).

Nothing depends on it. A try that comes to nothing is given up without failing any request, and made again
after a pause that grows. A link that was built ahead goes first when there are too many, and none is begun
when there are `max_links` already. A rank of P that a request has needed is that request's: here it is only
kept, with its link, for as long as its P is a partner.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from p2pkv.control.endpoint import Connection
from p2pkv.engine.commands import NamePartners
from p2pkv.engine.context import Context, log
from p2pkv.engine.effects import SendMessage
from p2pkv.engine.from_prefill import PrefillPeer, PrefillPeers
from p2pkv.pairing import Address, PairingError
from p2pkv.protocol import messages as m
from p2pkv.protocol.state_machine import RemoteProtocolError

AT_ONCE = 4
"""Tries that may be made at once, so that a D which has just started does not build all its links together. A
try counts for FRESH_SECONDS at most: a P that never answers holds up no other one for longer."""

FRESH_SECONDS = 2.0

PATIENCE_SECONDS = 10.0
"""How long the ranks of a P may take to accept us, and to begin their links."""

FIRST_PAUSE, LAST_PAUSE = 10.0, 320.0
"""Seconds between two tries to reach a partner; each pause is twice as long as the one before."""

LEFT_SECONDS = 60.0
"""How long a partner is kept that is named no more: a proxy that has restarted knows no instance at first."""

BEAT_SECONDS = 20.0
"""Between two heartbeats to a rank of P that no request uses: P forgets a silent D."""


@dataclass(eq=False)
class Partner:
    """One P, by the address of its rank 0.

    Attributes:
        until: when it is forgotten, since the proxy names it no more.
        since, next, pause: when the try that is under way began (None: none is), when the next may begin, and
            how long the pause after it is.
        places, sources: the addresses of its ranks that this rank talks to, as far as they are known; how
            many of these send KV to this rank, and so have a link: at least one is expected.
        up: whether all of its ranks are connected, and all of its links up.
        beaten: when its ranks were last sent a heartbeat from here.
        logged: whether it was logged that it could not be reached.
    """

    address: str
    until: float = inf
    since: float | None = None
    places: tuple[str, ...] = ()
    sources: int = 1
    up: bool = False
    beaten: float = 0.0
    next: float = 0.0
    pause: float = FIRST_PAUSE
    logged: bool = False


class Preconnect:
    """What this rank of D does ahead of requests. Rank 0 passes the proxy's partners on to the others."""

    def __init__(self, context: Context, peers: PrefillPeers) -> None:
        self._ctx = context
        self._peers = peers
        self._partners: dict[str, Partner] = {}
        self._by_address: dict[str, Partner] = {}
        """Partners by the addresses of the ranks that were dialed."""
        self._named: tuple[str, ...] = ()
        self._others: dict[str, Connection] = {}
        """Rank 0: the connections to the other ranks of this engine."""
        self._outdated: list[str] = []
        """Those of them that do not know yet what rank 0 was sent last."""
        self._on = context.options.preconnect
        context.counters.add_gauges(partners=lambda: len(self._partners))

    # What the proxy names.

    def name(self, command: NamePartners, now: float) -> None:
        if not self._on:
            return
        self._named = command.addresses
        self._outdated = list(self._ctx.hello.addresses[1:])
        self._take(command.addresses, now)

    def received(self, connection: Connection, message: m.Partners, now: float) -> None:
        """Rank 0 of this engine passes on what the proxy has named."""
        engine = self._ctx.hello.addresses[0]
        if message.engine != engine:
            raise RemoteProtocolError(f"partners for a rank of {message.engine}, but this is one of {engine}")
        if self._on:
            self._take(message.addresses, now)

    def _take(self, addresses: Iterable[str], now: float) -> None:
        named = dict.fromkeys(filter(_dialable, addresses))
        left = dict(self._partners)
        # In the order in which they are named, which is the order in which they are tried.
        self._partners = {address: left.pop(address, Partner(address)) for address in named}
        for partner in self._partners.values():
            partner.until = inf
        for partner in left.values():  # no proxy knows more than 4,096 instances
            partner.until = min(partner.until, now + LEFT_SECONDS if len(left) <= 4096 else now)
        self._partners |= left

    def _pass_on(self) -> None:
        """Pass on to the other ranks of this engine what they do not know yet."""
        message = m.Partners(self._ctx.hello.addresses[0], self._named)
        for place in list(self._outdated):
            if place not in self._others:
                self._others[place] = self._ctx.endpoint.dial(Address.parse(place))
            self._ctx.endpoint.redial(self._others[place])
            if self._ctx.answer(self._others[place], message):
                self._outdated.remove(place)

    # Time.

    def keeps(self, peer: PrefillPeer) -> bool:
        """Whether a rank of P stays connected although no request needs it."""
        partner = self._by_address.get(peer.address)
        return partner is not None and (partner.up or partner.since is not None)

    def look(self, now: float) -> None:
        """See what has become of the tries under way, and begin others; call it several times a second."""
        self._pass_on()
        for partner in list(self._partners.values()):
            if now >= partner.until:
                self._let_go(partner)
                del self._partners[partner.address]
            else:
                self._look_at(partner, now)
        self._begin(now)

    def leave(self) -> None:
        """This rank stops: nothing is begun any more."""
        self._on = False
        self._partners.clear()
        self._by_address.clear()
        self._outdated.clear()

    def _begin(self, now: float) -> None:
        if not self._ctx.steps.serving:
            return
        links = sum(1 for peer in self._peers if peer.link.linked)
        tries = [each for each in self._partners.values() if each.since is not None]
        room = self._ctx.options.max_links - links
        room -= sum(max(0, each.sources - self._linked(each)) for each in tries)
        fresh = sum(1 for each in tries if each.since is not None and now - each.since < FRESH_SECONDS)
        for partner in self._partners.values():
            if room < partner.sources or fresh >= AT_ONCE:
                return
            resting = partner.since is not None or partner.up or now < partner.next or partner.until < inf
            if resting or partner.address in self._by_address or self._peers.get(partner.address) is not None:
                continue
            partner.since = now
            self._dial(partner, (partner.address,), now)
            room, fresh = room - partner.sources, fresh + 1

    def _linked(self, partner: Partner) -> int:
        return sum(1 for peer in self._dialed(partner) if peer.link.linked)

    def _dialed(self, partner: Partner) -> list[PrefillPeer]:
        found = (self._peers.get(place) for place in partner.places or (partner.address,))
        return [peer for peer in found if peer is not None]

    def _dial(self, partner: Partner, places: tuple[str, ...], now: float) -> list[PrefillPeer]:
        partner.places = places
        self._by_address |= dict.fromkeys(places, partner)
        return [self._peers.dial(Address.parse(place), now) for place in places]

    def _look_at(self, partner: Partner, now: float) -> None:
        first = self._peers.get(partner.address)
        if first is None:
            self._let_go(partner)
            return
        was_up, partner.up = partner.up, False
        peers, reason = self._meet(partner, first, now)
        if not reason and self._all_up(partner, first, peers):
            partner.up, partner.since = True, None
            if not was_up:
                partner.next, partner.pause, partner.logged = 0.0, FIRST_PAUSE, False
                if unused := [peer for peer in peers if peer.link.linked and not peer.needed]:
                    self._ctx.counters.add("links_preconnected", len(unused))
                    log.info("the link to P at %s is up, ahead of requests", partner.address)
            self._beat(partner, peers, now)
        elif any(peer.needed for peer in peers):
            partner.since = None  # what is wrong is the requests' affair now
        elif was_up:
            self._give_up(partner, "its link was closed", now)
        elif partner.since is not None and (reason or self._too_long(partner, peers, now)):
            self._give_up(partner, reason or "it did not answer in time", now)
        elif partner.since is None:
            partner.since = now  # something else than a request has dialed it

    def _meet(self, partner: Partner, first: PrefillPeer, now: float) -> tuple[list[PrefillPeer], str]:
        """The ranks of this P that this rank has to do with, all of them dialed; and what is wrong, or ""."""
        if partner.since is None and not first.dialing.open:
            return [first], ""
        if first.dialing.reason:
            return [first], first.dialing.reason
        if not first.welcomed:
            return self._dial(partner, (partner.address,), now), ""
        edges, places = first.ranks()
        partner.sources = len(edges)
        if len(edges) > self._ctx.options.max_links:
            return self._dialed(partner), f"{len(edges)} of its ranks send to this one, more than max_links"
        addresses = dict.fromkeys([partner.address, *map(str, places.values())])
        peers = self._dial(partner, tuple(addresses), now)
        return peers, next((peer.dialing.reason for peer in peers if peer.dialing.reason), "")

    def _all_up(self, partner: Partner, first: PrefillPeer, peers: list[PrefillPeer]) -> bool:
        """Whether every rank of this P that sends to us has its link, and all are connected."""
        if not all(peer.welcomed for peer in peers):
            return False
        edges, _ = first.ranks()
        return all(peer.link.up for peer in peers if peer.rank in edges)

    def _too_long(self, partner: Partner, peers: list[PrefillPeer], now: float) -> bool:
        """Whether the ranks have had their time. A link that has begun has a deadline of its own."""
        assert partner.since is not None
        ready = self._linked(partner) >= partner.sources and all(peer.dialing.open for peer in peers)
        return now - partner.since > PATIENCE_SECONDS and not ready

    def _beat(self, partner: Partner, peers: list[PrefillPeer], now: float) -> None:
        """Show ranks of P that no request uses that we are still there, and see whether they are."""
        if now - partner.beaten < BEAT_SECONDS:
            return
        partner.beaten = now
        for peer in peers:
            if now - peer.used > BEAT_SECONDS:
                self._ctx.effects.append(SendMessage(peer, m.Heartbeat(())))

    def _give_up(self, partner: Partner, reason: str, now: float) -> None:
        if not partner.logged:
            partner.logged = True
            log.info(
                f"no link to P at {partner.address} ahead of requests ({reason}): it is tried again later, "
                "and the first request for this P builds its own (logged once)"
            )
        partner.next, partner.pause = now + partner.pause, min(2 * partner.pause, LAST_PAUSE)
        self._let_go(partner)

    def _let_go(self, partner: Partner) -> None:
        """Forget the ranks of this P, but for those that a request has needed."""
        for peer in self._dialed(partner):
            if not peer.needed:
                self._peers.hang_up(peer, "D does not need it now")
        for place in partner.places:
            self._by_address.pop(place, None)
        partner.since, partner.places, partner.up = None, (), False


def _dialable(address: str) -> bool:
    try:
        Address.parse(address)
    except PairingError:
        return False
    return True
