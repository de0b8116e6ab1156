"""The discovery socket: takes pings in, whatever else arrives there."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import zmq
import zmq.asyncio

from p2pkv.control.discovery import MAX_PING_BYTES, BadPing, Ping, decode_ping
from p2pkv.pairing import Address

logger = logging.getLogger(__name__)

_FRAMES = 2  # the peer's identity, which ZMQ adds, and the ping
_COMPLAIN_SECONDS = 10.0


class Listener:
    """Binds a ROUTER and hands every ping to `take`. No message from the network can end it.

    Args:
        endpoint: where to bind, as ZMQ writes it. Raises OSError if that is not possible.

    Attributes:
        endpoint: where it is bound.
        refused: how many messages were no pings.
    """

    def __init__(self, endpoint: str, take: Callable[[Ping], None]) -> None:
        self._take = take
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            _configure(self._router, ipv6="[" in endpoint)
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen for discovery on {endpoint}: {error}") from error
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.refused = 0
        self._next_complaint = 0.0

    async def run(self) -> None:
        """Listens until cancelled."""
        while True:
            try:
                self._handle(await self._receive())
            except BadPing as error:
                self._complain(error)
            except zmq.ZMQError as error:
                logger.warning("the discovery socket failed, going on: %s", error)
                await asyncio.sleep(0.1)
            except Exception:
                logger.exception("a discovery ping could not be taken in, going on")
            await asyncio.sleep(0)  # a flood must not starve the requests

    def close(self) -> None:
        """Frees the port. Idempotent."""
        self._router.close(linger=0)
        self._context.term()

    async def _receive(self) -> list[bytes]:
        """One message; of its frames no more than one too many are kept."""
        frames: list[bytes] = []
        more = True
        while more:
            frame = await self._router.recv()
            if len(frames) <= _FRAMES:
                frames.append(frame)
            more = bool(self._router.getsockopt(zmq.RCVMORE))
            await asyncio.sleep(0)
        return frames

    def _handle(self, frames: list[bytes]) -> None:
        if len(frames) != _FRAMES:
            raise BadPing(
                f"a discovery ping is one frame without a delimiter, this had {len(frames) - 1} or more"
            )
        self._take(decode_ping(frames[1]))

    def _complain(self, error: BadPing) -> None:
        """One line in ten seconds, however much garbage comes."""
        self.refused += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_complaint:
            self._next_complaint = now + _COMPLAIN_SECONDS
            logger.warning("discovery message refused (%d so far): %s", self.refused, error)


def endpoint_of(address: Address) -> str:
    """`address` as ZMQ binds it, which takes no names. Raises OSError for a name that nobody knows."""
    if ":" in address.host:
        return f"tcp://{address}"
    return f"tcp://{socket.gethostbyname(address.host)}:{address.port}"


def _configure(router: zmq.asyncio.Socket, *, ipv6: bool) -> None:
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, ipv6)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_PING_BYTES)
    router.setsockopt(zmq.HANDSHAKE_IVL, 5000)
    # The original connector pings under a fixed identity: a restarted instance must not be shut out.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    # Peers that vanished without closing their connections are dropped.
    router.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
