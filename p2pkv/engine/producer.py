"""P's half of a rank: answers the ranks of D, and pushes to them what its prompts' pages hold.

Here is what reaches it, from the forward thread, from the ranks of D and by time, and who is connected. What
is said about a prompt is in `prompts`, its data in `outgoing`.
"""

from __future__ import annotations

from p2pkv.control.endpoint import Line
from p2pkv.engine import commands as do
from p2pkv.engine.context import Context, log
from p2pkv.engine.idle import FORGOTTEN_SECONDS, LOOK_SECONDS, REASON, surplus
from p2pkv.engine.outgoing import Outgoing
from p2pkv.engine.outlet import Outlet, Place
from p2pkv.engine.prompts import Entry, Prompts
from p2pkv.links.base import LinkError
from p2pkv.protocol import messages as m
from p2pkv.protocol.handshake import Refused, judge, unfit
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.wire import Debt

MAX_PEERS = 4096
"""Ranks of D kept in mind; beyond this many, one with nothing under way is forgotten: it says Hello again."""


class Producer:
    def __init__(self, context: Context) -> None:
        self._ctx = context
        self._peers: dict[Place, Outlet] = {}
        self._active: dict[Outlet, None] = {}
        """Those with something under way, and those whose link is not up."""
        self._next_look = 0.0
        self._leaving = ""
        self.told = False
        """Whether ranks of D were told that something has ended because this rank stops."""
        self._prompts = Prompts(context, self._peers)
        self._outgoing = Outgoing(context, self._peers, self._active, self._prompts)
        context.counters.gauges |= {
            "staging_bytes": lambda: sum(peer.used for peer in tuple(self._peers.values())),
            "sends_under_way": lambda: sum(
                len(peer.orders) + max(len(peer.flights), len(peer.words))
                for peer in tuple(self._peers.values())
            ),
            "peers": lambda: len(self._peers),
            "links": lambda: sum(1 for peer in tuple(self._peers.values()) if peer.linked),
            "links_stuck": lambda: context.links.stuck,
        }

    # The forward thread.

    def command(self, command: do.Command, now: float) -> None:
        match command:
            case do.Hold(key, decode):
                self._prompts.hold(key, str(decode), now)
            case do.OfferPrompt(key, decode, tokens, digest):
                self._offer(self._prompts.hold(key, str(decode), now), tokens, digest, now)
            case do.Pages(key, blocks):
                for entry in self._prompts.live(key):
                    entry.blocks = blocks
            case do.Computed(prompts, layer, layer_stop, _):
                for key, stop in prompts:
                    for entry in self._prompts.live(key):
                        self._prompts.run(entry, entry.sender.computed(layer, layer_stop, stop, now), now)
            case do.Flush(keys):
                for entry in self._prompts.live(*keys):
                    self._prompts.run(entry, entry.sender.flush(), now)
            case do.Revoked(key):
                self._revoke(key)
            case do.Abort(key, reason):
                for entry in self._prompts.live(key):
                    self._prompts.run(entry, entry.sender.abort(reason), now)
            case do.Forget(key):
                self._prompts.forget(key)
            case _:
                raise AssertionError(f"{command} is not for a P")

    def _offer(self, entry: Entry, tokens: int, digest: bytes, now: float) -> None:
        if not entry.sender.prompt.ended:
            self._prompts.run(entry, entry.sender.offer(tokens, digest), now)
            self._prompts.say_ahead(entry)

    def _revoke(self, key: str) -> None:
        for entry in self._prompts.live(key):
            entry.sender.revoke()
        with self._ctx.reading:
            self._ctx.revoked.subtract([key])
            self._ctx.revoked = +self._ctx.revoked

    # The ranks of D, and their links.

    def receive(self, line: Line, message: m.AnyMessage, now: float) -> None:
        if isinstance(message, m.Hello):
            self._hello(line, message, now)
            return
        peer = line.tag
        if not isinstance(peer, Outlet) or self._peers.get(peer.place) is not peer:
            self._ctx.tell(line, m.Stranger())
            return
        peer.fresh, peer.heard = False, now
        match message:
            case m.Waiting(transfers):
                self._prompts.waiting(peer, transfers, now)
            case m.LinkAccept():
                self._accept(peer, message, now)
            case m.LinkDown(link, reason):
                if link == peer.link and peer.linked and self._prompts.idle(peer, now):
                    peer.park(now)
                elif link == peer.link:
                    reason = f"{peer.address} aborted the link: {reason}"
                    self._prompts.link_lost(peer, reason, now, tell=False)
            case m.Want(key) | m.Grant(key) | m.Done(key) | m.Cancel(key):
                self._prompts.about(peer, key, message, now)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a P")

    def _hello(self, line: Line, hello: m.Hello, now: float) -> None:
        mine = self._ctx.hello
        try:
            if self._leaving:
                raise Refused(self._leaving)
            if hello.to != mine.address:
                raise Refused(
                    f"{hello.address} dialed {hello.to}, but this rank is {mine.address}: "
                    "use the address that the instance advertises"
                )
            plan = judge(mine, hello)
            wire, pages = self._ctx.form(hello)
        except Refused as refused:
            reason = self._leaving or unfit(mine.address, hello.address, refused)
            log.warning("refused %s: %s", hello.address, reason)
            self._ctx.counters.add("messages_refused")
            self._ctx.tell(line, m.Refuse(hello.incarnation, reason))
            return
        self._ctx.tell(line, m.Welcome(hello.incarnation, mine, plan.digest))
        old = self._peers.get((hello.addresses[0], hello.rank))
        if old is not None and old.line is line and old.fresh and old.hello == hello:
            return
        debts = {edge.target: Debt(edge, wire) for edge in plan.from_source(mine.rank)}
        peer = Outlet(self._ctx, line, hello, plan, pages, debts.get(hello.rank), self._active, wanted=now)
        if old is not None:
            self._prompts.drop(old, f"{hello.address} is gone: it has restarted or reconnected", now)
            peer.link = old.link
        self._make_room(line, now)
        line.tag = self._peers[peer.place] = peer
        sums = ", with checksums" if peer.verify else ""
        log.info("D rank %d at %s is connected; what travels: %s%s", hello.rank, hello.address, wire, sums)
        self._prompts.invite(peer, now)

    def _make_room(self, line: Line, now: float) -> None:
        """One connection is one rank, and they are bounded in number."""
        if isinstance(line.tag, Outlet) and self._peers.get(line.tag.place) is line.tag:
            self._prompts.drop(line.tag, f"{line.tag.address} says that it is another", now)
        if len(self._peers) >= MAX_PEERS:
            peers = list(self._peers.values())
            idle = next((peer for peer in peers if not peer.busy), peers[0])
            self._prompts.drop(idle, f"{idle.address} makes room for another", now)

    def unreachable(self, line: Line, reason: str, now: float) -> None:
        """A P dials nobody."""
        raise AssertionError(reason)

    def _accept(self, peer: Outlet, message: m.LinkAccept, now: float) -> None:
        try:
            peer.accept(message)
        except LinkError as error:
            self._prompts.link_lost(peer, f"no link to {peer.address}: {error}", now)

    def _close_idle(self, now: float) -> None:
        linked = [peer for peer in self._peers.values() if peer.linked]
        most = self._ctx.options.max_links

        def idle(peer: Outlet) -> bool:
            return self._prompts.idle(peer, now)

        for peer in surplus(linked, most, idle, lambda peer: peer.wanted):
            log.info("closing the link to %s: %s", peer.address, REASON)
            peer.park(now, REASON)
        forgotten = max(FORGOTTEN_SECONDS, 2 * self._ctx.options.lease_seconds)
        for peer in linked:
            if peer.linked and now - peer.wanted > forgotten and idle(peer):
                peer.park(now, "it has been idle for long")

    # The data.

    def pump(self, now: float) -> bool:
        """Move what can be moved now; whether to come back soon."""
        return self._outgoing.pump(now)

    # Time.

    def tick(self, now: float) -> None:
        self._prompts.tick(now)
        lease = self._ctx.options.lease_seconds
        for peer in list(self._active):
            if peer.overdue(now, lease):
                self._prompts.link_lost(
                    peer, f"{peer.address} did not answer in time: it has taken nothing for {lease:g} s", now
                )
            elif peer.building and now - peer.since > self._patience_with(peer, now):
                reason = f"the link to {peer.address} did not come up in time: in {now - peer.since:.0f} s"
                self._prompts.link_lost(peer, reason, now)
            self._prompts.invite(peer, now)
        if now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            self._close_idle(now)
            for peer in self._peers.values():
                peer.stir()

    def _patience_with(self, peer: Outlet, now: float) -> float:
        """How long a link may take to come up: while D is heard of, its process may just be busy."""
        lease = self._ctx.options.lease_seconds
        return 2 * lease if now - peer.heard < lease else lease

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that has to be looked at often."""
        return all(peer.up and not peer.busy for peer in self._active)

    @property
    def due(self) -> float:
        """When the next deadline ends, if nothing happens before."""
        return self._prompts.due

    # The end.

    def leave(self, now: float, finish: bool = True) -> None:
        """Take on nothing new, and end what cannot be finished now; without `finish` everything."""
        self._leaving = f"{self._ctx.hello.address} is gone: it is shutting down"
        self.told |= self._prompts.leave(self._leaving, now, finish)

    @property
    def over(self) -> bool:
        """Whether nothing is under way."""
        return not any(self._prompts.live(*self._prompts.entries)) and not any(
            peer.unfinished for peer in self._peers.values()
        )

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.abort(0.0, "P is shutting down")
