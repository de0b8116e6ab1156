"""What a rank does as P and what as D: which part takes each command, message and effect.

A rank has a PrefillRole, a DecodeRole or both. Each matches everything once, in its three tables.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from p2pkv.control.endpoint import Connection
from p2pkv.engine import commands as do
from p2pkv.engine import from_prefill, to_decode
from p2pkv.engine.context import Context
from p2pkv.engine.decode import Decode
from p2pkv.engine.from_prefill import PrefillPeer, PrefillPeers
from p2pkv.engine.preconnect import Preconnect
from p2pkv.engine.prefill import Prefill
from p2pkv.engine.to_decode import DecodePeer, DecodePeers
from p2pkv.protocol import messages as m

Handle = Callable[[Any, float], object]
"""The handler of a command or an effect: it gets that, and the time."""

Receive = Callable[[Any, Any, float], object]
"""The handler of a message: it gets the peer that sent it, the message and the time. One in `unowned` gets
the connection, which may have no peer, in place of the peer."""


class Role(ABC):
    """What a rank does as P, or as D.

    Attributes:
        peers, peer: the table of its peers, and their class.
        notified: peers were sent the end of a transfer, and need time to read it.
    """

    peer: ClassVar[type]
    peers: DecodePeers | PrefillPeers
    transfers: Prefill | Decode
    commands: Mapping[type, Handle]
    messages: Mapping[type, Receive]
    unowned: Mapping[type, Receive]
    effects: Mapping[type, Handle]
    notified = False

    def after(self, now: float) -> bool:
        """Do the rest of a turn, when the effects of `poll` are applied; whether data is under way."""
        return self.peers.moving

    @property
    def busy(self) -> bool:
        """Whether something is under way that has to be looked at often."""
        return self.peers.busy

    def check(self, now: float) -> None:
        self.peers.check(now)

    @abstractmethod
    def look(self, now: float) -> None:
        """Look at all peers."""

    @abstractmethod
    def leave(self, now: float, finish: bool = True) -> None:
        """Take on nothing new, and end what cannot be finished now; without `finish` everything."""

    @property
    def finished(self) -> bool:
        return self.transfers.finished


class PrefillRole(Role):
    """A rank as P: answers the ranks of D, and pushes to them what its prompts' blocks hold."""

    peer: ClassVar[type] = DecodePeer
    peers: DecodePeers
    transfers: Prefill

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.peers = peers = DecodePeers(context)
        self.transfers = transfers = Prefill(context, peers)
        peers.used_by(transfers.uses)
        self.commands = {
            do.HoldPrompt: transfers.hold,
            do.OfferPrompt: transfers.offer,
            do.PromptBlocks: transfers.blocks,
            do.Computed: transfers.computed,
            do.Flush: transfers.flush,
            do.Revoked: transfers.revoke,
            do.Abort: transfers.abort,
            do.Release: transfers.release,
            do.Forget: transfers.forget,
        }
        self.messages = {
            m.Heartbeat: transfers.heartbeat,
            m.LinkAccept: peers.accept,
            m.LinkDown: peers.link_down,
            m.Want: transfers.message,
            m.Grant: transfers.message,
            m.Done: transfers.message,
            m.Cancel: transfers.message,
        }
        hello, owner = peers.hello, transfers.prompt_owner
        self.unowned = {m.Hello: hello, m.UnknownHello: hello, m.PromptOwner: owner}
        self.effects = {
            to_decode.DecodeLinked: transfers.linked,
            to_decode.DecodeLinkLost: transfers.unlinked,
            to_decode.DecodeGone: transfers.gone,
            to_decode.FillSend: transfers.fill,
            to_decode.SendTaken: transfers.taken,
            to_decode.SendsDue: transfers.sent,
        }

    def look(self, now: float) -> None:
        self.peers.look(now)

    def leave(self, now: float, finish: bool = True) -> None:
        reason = f"{self._ctx.hello.address} is gone: it is shutting down"
        self.notified |= self.transfers.leave(reason, now, finish)

    @property
    def finished(self) -> bool:
        return super().finished and not self.peers.unfinished


class DecodeRole(Role):
    """A rank as D: dials the ranks of P, and writes what they push to its requests' blocks."""

    peer: ClassVar[type] = PrefillPeer
    peers: PrefillPeers
    transfers: Decode
    # D need not wait until its last messages are read (`notified`): P gets them even if D closes right after.

    def __init__(self, context: Context) -> None:
        self._ctx = context
        self.peers = peers = PrefillPeers(context)
        self.transfers = transfers = Decode(context, peers)
        self.preconnect = Preconnect(context, peers)
        self.commands = {
            do.Expect: transfers.expect,
            do.Load: transfers.load,
            do.Drop: transfers.drop,
            do.Forget: transfers.forget,
            do.Invalidate: transfers.invalidate,
            do.NamePartners: self.preconnect.name,
        }
        self.messages = {
            m.Welcome: peers.welcome,
            m.Refuse: peers.refuse,
            m.UnknownPeer: peers.unknown_peer,
            m.HeartbeatAck: transfers.acknowledged,
            m.Redirect: transfers.redirected,
            m.PrefetchOffer: transfers.prefetch,
            m.LinkInvite: peers.invited,
            m.LinkDown: peers.link_down,
            m.Offer: transfers.message,
            m.Chunk: transfers.message,
            m.Sent: transfers.sent,
            m.Failed: transfers.message,
        }
        self.unowned = {m.Hello: self._hello, m.Partners: self.preconnect.received}
        self.effects = {
            from_prefill.PrefillWelcomed: lambda _, now: transfers.connect(now),
            from_prefill.PrefillLost: transfers.lost,
            from_prefill.PrefillFailed: transfers.fail,
            from_prefill.ReceivePosted: transfers.posted,
            from_prefill.PostRemaining: peers.post_others,
            from_prefill.ReceiveDone: transfers.land,
            from_prefill.AbortPrefillLink: peers.abort_link,
        }

    def _hello(self, connection: Connection, message: m.Hello, now: float) -> None:
        reason = f"{self._ctx.hello.address} is a consumer (D), not a P: check the router's addresses"
        self._ctx.answer(connection, m.Refuse(message.incarnation, reason))

    def after(self, now: float) -> bool:
        return self.transfers.write_prefetched(now) or super().after(now)

    def check(self, now: float) -> None:
        self.transfers.connect(now)
        super().check(now)

    @property
    def busy(self) -> bool:
        return not self.transfers.connected or super().busy

    def look(self, now: float) -> None:
        self.peers.redial_silent(now)
        for peer in self.peers:
            if self.peers.idle(peer, now) and not (self.transfers.uses(peer) or self.preconnect.keeps(peer)):
                self.peers.hang_up(peer)
            else:
                self.peers.activate(peer)
        self.peers.close_idle_links(self.transfers.used, now)
        self.preconnect.look(now)

    def leave(self, now: float, finish: bool = True) -> None:
        """Load nothing any more, whatever `finish`: no request would use it."""
        self.preconnect.leave()
        self.transfers.leave(f"{self._ctx.hello.address} is gone: it is shutting down", now)
