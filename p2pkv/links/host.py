"""The CPU's link: shared memory between ranks of one host, TCP between hosts.

D offers both in its acceptance. P takes the memory if it can open it, and TCP if not. D's end is the same
for both: one arena, into which P writes itself, or the TCP reader writes for it.
"""

import logging
import secrets
import weakref
from typing import Annotated

import torch
from msgspec import Meta

from p2pkv.links import base
from p2pkv.links import shared_memory as memory
from p2pkv.links.base import LinkError, LinkSettings
from p2pkv.links.listener import HandshakeListener
from p2pkv.links.shared_memory import Arena, PidNamespace, SharedArena, SharedOutbound, this_namespace
from p2pkv.links.staging import StagingBudget, StagingShare
from p2pkv.links.tcp import MAGIC, TcpOutbound, TcpReader, is_loopback, listen, numeric
from p2pkv.trust import Networks

logger = logging.getLogger(__name__)

Port = Annotated[int, Meta(ge=1, le=65535)]
_ON_THE_WIRE = {"namespace": "place"}


class HostInvitation(base.Invitation, frozen=True, tag="host", rename=_ON_THE_WIRE):
    """P's invitation. `namespace`: P's; None if P does not want to share memory."""

    namespace: PidNamespace | None


class HostAcceptance(base.Acceptance, frozen=True, tag="host", rename=_ON_THE_WIRE):
    """D's answer. `nonce`, `namespace`: D's own; None where the system has no namespaces. `shared`: how P
    finds the arena; None if D does not share it. `host`, `port`: of D's TCP listener; `host` is numeric."""

    nonce: base.Nonce
    window: Annotated[int, Meta(ge=1, le=1 << 44)]
    namespace: PidNamespace | None
    shared: SharedArena | None
    host: memory.Text
    port: Port


def make_links(settings: LinkSettings) -> "HostLinks":
    """Raises ValueError for a host that peers cannot dial."""
    return HostLinks(settings.host, settings.staging_bytes, settings.shared_memory, settings.allowed)


class HostLinks(base.LinkFactory):
    kind = "host"
    blobs = HostInvitation, HostAcceptance

    def __init__(
        self, host: str, staging_bytes: int, shared_memory: bool = True, allowed: Networks | None = None
    ) -> None:
        """See LinkSettings. Raises ValueError for a host that peers cannot dial or no staging: posted
        receives and sends over TCP take some, sends through shared memory none."""
        super().__init__(weakref.WeakSet())
        self.host = numeric(host)
        self.shared_memory = shared_memory and memory.can_share()
        self._allowed = allowed
        self.staging = StagingBudget(staging_bytes)

    def _invitation(self, nonce: bytes) -> HostInvitation:
        namespace = this_namespace() if self.shared_memory else None
        return HostInvitation(version=1, nonce=nonce, namespace=namespace)

    def _accept(self, invited: HostInvitation, window: int) -> "tuple[HostInbound, HostAcceptance]":
        nonce = secrets.token_bytes(base.NONCE_BYTES)
        shared = self.shared_memory and invited.namespace == this_namespace()
        nonces = invited.nonce, nonce
        inbound = HostInbound(window, nonces, self.host, StagingShare(self.staging), shared=shared)
        return inbound, HostAcceptance(
            version=1,
            answers=invited.nonce,
            nonce=nonce,
            window=window,
            namespace=this_namespace(),
            shared=inbound.offered,
            host=self.host,
            port=inbound.port,
        )

    def _complete(self, invited: HostInvitation, accepted: HostAcceptance) -> SharedOutbound | TcpOutbound:
        outbound = self._share(invited, accepted) or self._dial(invited, accepted)
        logger.info("the link to D at %s:%d is %r", accepted.host, accepted.port, outbound)
        return outbound

    def _share(self, invited: HostInvitation, accepted: HostAcceptance) -> SharedOutbound | None:
        if not self.shared_memory or accepted.shared is None:
            return None
        try:
            arena = memory.open_arena(accepted.shared, accepted.namespace, accepted.window, accepted.nonce)
        except LinkError as error:
            logger.warning("no shared memory with %s:%d, using TCP: %s", accepted.host, accepted.port, error)
            return None
        return SharedOutbound(arena, invited.nonce)

    def _dial(self, invited: HostInvitation, accepted: HostAcceptance) -> TcpOutbound:
        if self._allowed is not None and not self._allowed.admits(accepted.host):
            raise LinkError(
                f"D's {accepted.host} is not dialed: allowed_peers are {self._allowed}; add the "
                "network of that instance"
            )
        here, there = this_namespace(), accepted.namespace
        elsewhere = here is not None and there is not None and here.boot != there.boot
        if is_loopback(accepted.host) and elsewhere:
            raise LinkError(
                f"D listens on {accepted.host}, which only its own machine can reach; set its `host` "
                "option to an address that this machine can reach"
            )
        address = (accepted.host, accepted.port)
        return TcpOutbound(address, accepted.nonce, invited.nonce, StagingShare(self.staging, sends=True))


class HostReceive:
    """One posted receive. `done` reads one flag of the arena; nothing here makes a system call."""

    def __init__(self, link: "HostInbound", arena: Arena, sequence: int, offset: int, nbytes: int) -> None:
        self.buffer: torch.Tensor = arena.pool.tensor(offset, nbytes)
        self.remote_slot = memory.to_remote_slot(offset, sequence)
        self.nbytes = nbytes
        self.offset = offset
        self.stamp = sequence + 1
        self.released = False
        self.landed = False
        """The buffer is full: whoever fills it says so, or `arrived` has found it."""
        self._link = link
        self._words = arena.words
        self._entry = memory.entry(sequence)

    def done(self) -> bool:
        self._link.guard.check()
        if self.landed or self.arrived():
            return True
        if self._link.lost is not None:
            raise LinkError(self._link.lost)
        return False

    def arrived(self) -> bool:
        """`done` without the checks. Raises LinkError if P sent another size."""
        if self._words[self._entry + memory.COMMITTED] != self.stamp:
            return self.landed
        memory.fence()
        sent = self._words[self._entry + memory.NBYTES]
        if sent != self.nbytes:
            raise self._link.guard.fail(f"the peer sent {sent} bytes where {self.nbytes} were posted")
        self.landed = True
        return True

    def release(self) -> None:
        self._link.guard.owned()
        if not self.released:
            self.released = True
            self._link.give(self)

    def take(self) -> None:
        """Mark the bytes as read, which a P that shares the arena sees."""
        memory.fence()
        self._words[self._entry + memory.TAKEN] = self.stamp


class HostInbound(base.Inbound):
    """D's end. The first thing that P does shows whether P shares the arena or connects by TCP. A slot that P
    may still write is never posted again: `abort` gives up the whole arena."""

    def __init__(
        self, window: int, nonces: tuple[bytes, bytes], host: str, share: StagingShare, *, shared: bool
    ) -> None:
        """`nonces`: P's, then D's own. Raises LinkError if the system refuses memory or a port."""
        self.guard = base.Guard("the link from a peer")
        self.share = share
        self.lost: str | None = None
        self._peer_nonce, nonce = nonces
        self._arena: Arena | None = memory.create_arena(window, nonce, shared=shared)
        self.offered = self._arena.offer()
        listener = listen(host)
        self.port = int(listener.getsockname()[1])
        self._door = HandshakeListener(listener, nonce, MAGIC)
        self._reader: TcpReader | None = None
        self._next = 0
        self._live: dict[int, HostReceive] = {}
        self._released: list[HostReceive] = []  # before their bytes had arrived

    def post(self, nbytes: int) -> HostReceive | None:
        self.guard.check()
        if self.lost is not None:
            raise LinkError(self.lost)
        assert self._arena is not None
        sequence = self._next
        if sequence - memory.ENTRIES in self._live:  # its entry of the header is still in use
            self._arena.pool.check(nbytes)
            return None
        offset = self._arena.pool.take(nbytes, self.share)
        if offset is None:
            return None
        receive = self._live[sequence] = HostReceive(self, self._arena, sequence, offset, nbytes)
        self._next += 1
        return receive

    def poll(self) -> None:
        """Take what TCP has brought and return idle pages. Raises LinkError if a receive can never end."""
        self.guard.check()
        if not self.up:
            self._meet()
        if self._reader is not None:
            self._pump(self._reader)
        if self._released:
            released, self._released = self._released, []
            for receive in released:
                self.give(receive)
        assert self._arena is not None
        self._arena.pool.tidy()

    def _free(self) -> None:
        self._door.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if self._arena is not None:
            self._arena.seal_off()
            self._arena.pool.give_all()
            self._arena = None
        self._live.clear()
        self._released.clear()

    def give(self, receive: HostReceive) -> None:
        """A receive has been released: its room returns now, or when its bytes have arrived."""
        if self._arena is None or self.guard.reason is not None:
            return  # P may still write there; the arena goes as a whole
        if not receive.arrived():
            self._released.append(receive)
            return
        receive.take()
        del self._live[receive.stamp - 1]
        self._arena.pool.give(receive.offset)

    @property
    def way(self) -> str:
        return "tcp" if self._reader is not None else "shared memory" if self.up else "not ready"

    def _meet(self) -> None:
        assert self._arena is not None
        if not self._arena.greeted(self._peer_nonce):
            connection = self._door.admit()
            if connection is None:
                return
            self._reader = TcpReader(connection, self._peer_nonce, self._place, self._landed)
        self.up = True
        self._arena.seal_off()
        self._door.close()

    def _pump(self, reader: TcpReader) -> None:
        try:
            reader.poll()
        except LinkError as error:
            raise self.guard.fail(str(error)) from None
        if reader.lost is not None:
            self.lost = f"the link from a peer: {reader.lost}"
            if reader.taken < self._next:
                raise LinkError(self.lost)

    def _place(self, sequence: int, nbytes: int) -> memoryview:
        receive = self._live.get(sequence)
        if receive is None:
            raise LinkError(f"the peer sent message {sequence}, for which no receive is posted")
        if receive.nbytes != nbytes:
            raise LinkError(f"the peer sent {nbytes} bytes where {receive.nbytes} were posted")
        assert self._arena is not None
        return self._arena.pool.view(receive.offset, nbytes)

    def _landed(self, sequence: int) -> None:
        self._live[sequence].landed = True
