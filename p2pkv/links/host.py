"""The CPU's link: shared memory between ranks of one host, TCP between hosts.

D offers both in its acceptance; P takes the memory if it can open it, and TCP if not.
"""

from __future__ import annotations

import logging
import secrets
import weakref

from p2pkv.links import blobs
from p2pkv.links.arena import can_share, open_arena
from p2pkv.links.base import LinkError, LinkFactory
from p2pkv.links.blobs import NONCE_BYTES, Acceptance, Invitation
from p2pkv.links.host_inbound import HostInbound
from p2pkv.links.shared_memory import SharedOutbound
from p2pkv.links.tcp import is_loopback, numeric
from p2pkv.links.tcp_outbound import Budget, TcpOutbound
from p2pkv.trust import Networks

logger = logging.getLogger(__name__)


class HostLinks(LinkFactory):
    """Makes host links for one rank."""

    kind = "host"

    def __init__(
        self, host: str, staging_bytes: int, shared_memory: bool = True, allowed: Networks | None = None
    ) -> None:
        """Raises ValueError for a host that peers cannot dial or no staging.

        Args:
            host: address or name of this machine that peers can dial; D's ends listen there.
            staging_bytes: what all TCP sends of this rank may hold together; shared memory needs none.
            shared_memory: False makes every link use TCP.
            allowed: networks outside of which no D is dialed; None for any.
        """
        self.host = numeric(host)
        self.shared_memory = shared_memory and can_share()
        self._allowed = allowed
        self._budget = Budget(staging_bytes)
        self._links: weakref.WeakSet[HostInbound | SharedOutbound | TcpOutbound] = weakref.WeakSet()
        self._closed = False

    def invite(self) -> bytes:
        """A nonce, and where this process runs."""
        self._check()
        place = blobs.here() if self.shared_memory else None
        nonce = secrets.token_bytes(NONCE_BYTES)
        return blobs.encode(Invitation(kind="host", version=1, nonce=nonce, place=place))

    def accept(self, invitation: bytes, window: int) -> tuple[HostInbound, bytes]:
        """D's end, listening, with its arena made. ValueError if `window` is not positive."""
        self._check()
        if window < 1:
            raise ValueError(f"window is {window} bytes; it must be positive")
        invited = blobs.decode(invitation, Invitation)
        nonce = secrets.token_bytes(NONCE_BYTES)
        shared = self.shared_memory and invited.place is not None and invited.place == blobs.here()
        inbound = HostInbound(window, (invited.nonce, nonce), self.host, shared=shared)
        self._links.add(inbound)
        acceptance = Acceptance(
            kind="host",
            version=1,
            answers=invited.nonce,
            nonce=nonce,
            window=window,
            place=blobs.here(),
            shared=inbound.offer(),
            host=self.host,
            port=inbound.port,
        )
        return inbound, blobs.encode(acceptance)

    def complete(self, invitation: bytes, acceptance: bytes) -> SharedOutbound | TcpOutbound:
        """P's end. Over TCP it is not `ready` yet; shared memory is."""
        self._check()
        invited = blobs.decode(invitation, Invitation)
        accepted = blobs.decode(acceptance, Acceptance)
        if accepted.answers != invited.nonce:
            raise LinkError("this acceptance answers another invitation")
        outbound = self._share(invited, accepted) or self._dial(invited, accepted)
        self._links.add(outbound)
        logger.info("link to %s:%d: %r", accepted.host, accepted.port, outbound)
        return outbound

    def close(self) -> None:
        """Abort every link of this rank that is still there. Idempotent."""
        self._closed = True
        for link in list(self._links):
            link.close("its rank has closed")
        self._links.clear()

    def _check(self) -> None:
        if self._closed:
            raise LinkError("this rank's links are closed")

    def _share(self, invited: Invitation, accepted: Acceptance) -> SharedOutbound | None:
        if not self.shared_memory or accepted.shared is None:
            return None
        try:
            arena = open_arena(accepted)
        except LinkError as error:
            logger.warning("no shared memory with %s:%d, using TCP: %s", accepted.host, accepted.port, error)
            return None
        return SharedOutbound(arena, invited.nonce)

    def _dial(self, invited: Invitation, accepted: Acceptance) -> TcpOutbound:
        if self._allowed is not None and not self._allowed.admits(accepted.host):
            raise LinkError(
                f"the peer's {accepted.host} is not dialed: allowed_peers are {self._allowed}; add the "
                "network of that instance"
            )
        place = blobs.here()
        elsewhere = place is not None and accepted.place is not None and place.boot != accepted.place.boot
        if is_loopback(accepted.host) and elsewhere:
            raise LinkError(
                f"the peer listens on {accepted.host}, which only its own machine can reach; set its `host` "
                "option to an address that this machine can reach"
            )
        address = (accepted.host, accepted.port)
        return TcpOutbound(address, accepted.nonce, invited.nonce, self._budget)


__all__ = ["HostInbound", "HostLinks", "SharedOutbound", "TcpOutbound"]
