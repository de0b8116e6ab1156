"""The discovery socket: takes in pings, and survives whatever else arrives there."""

import asyncio
import itertools
import logging
import math
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import zmq
import zmq.asyncio

from p2pkv.control import security
from p2pkv.control.discovery import MAX_PING_BYTES, BadPing, Ping, decode_ping
from p2pkv.log import RateLimit
from p2pkv.pairing import Address

logger = logging.getLogger(__name__)

_COMPLAIN_SECONDS = 10.0
_LATELY_SECONDS = 0.1
# Messages that are taken in before other work gets its turn. Taken one at a time in a loop that is busy with
# streams, pings would pile up, and a goodbye would wait behind them.
_BURST = 16


@dataclass
class PingConnection:
    """The PingSource of one connection, to which libzmq gives an `identity` of its own."""

    router: zmq.asyncio.Socket
    identity: bytes
    member: bool
    _tried: float = field(default=-math.inf, compare=False)
    _connected: bool = field(default=True, compare=False)

    def is_connected(self) -> bool:
        """Whether an empty message, which no instance reads, could be sent to it. The answer is kept for a
        moment, as each request may ask this of every silent instance."""
        if (now := time.monotonic()) - self._tried >= _LATELY_SECONDS:
            self._tried, self._connected = now, isinstance(self._send(b""), zmq.Again | None)
        return self._connected

    def answer(self, frame: bytes) -> bool:
        return self._send(frame) is None

    def _send(self, frame: bytes) -> BaseException | None:
        # With DONTWAIT the send has been tried before the future is returned.
        sent = self.router.send_multipart([self.identity, frame], zmq.DONTWAIT)
        return cast("asyncio.Future[None]", sent).exception()


Take = Callable[[Ping, PingConnection], None]


class Listener:
    """Binds a ROUTER and hands every ping to `take`. No message from the network can end it.

    Args:
        endpoint: where to bind, as ZMQ writes it. Raises OSError if that is not possible.
        members: whose pings are taken; None: everyone's, unencrypted.
    """

    def __init__(self, endpoint: str, take: Take, members: security.Members | None = None) -> None:
        self._take = take
        self._guarded = members is not None
        self._context = zmq.asyncio.Context()
        self._zap = security.ZapHandler(members, None)
        self._asked = cast("zmq.asyncio.Socket", self._zap.open(self._context))
        self._router = self._context.socket(zmq.ROUTER)
        self._watch = security.HandshakeMonitor(self._router)
        self._failures = cast("zmq.asyncio.Socket", self._watch.socket)
        try:
            _configure(self._router, ipv6="[" in endpoint)
            if members is not None:
                self._zap.guard(self._router)
                members.serve(self._router, "proxy")
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot listen for discovery on {endpoint}: {error}") from error
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.refused = self.shut_out = 0
        """How many messages were no pings; how many connections failed in the handshake."""
        self._complaints = RateLimit(seconds=_COMPLAIN_SECONDS)

    async def run(self) -> None:
        """Listens until cancelled."""
        await asyncio.gather(*(self._forever(step) for step in (self._take_ping, self._admit, self._look)))

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        for taken in itertools.count(1):
            try:
                await step()
            except zmq.ZMQError as error:
                logger.warning("discovery on %s failed, and goes on: %s", self.endpoint, error)
                await asyncio.sleep(0.1)
            except Exception:
                logger.exception("discovery on %s could not handle a message, and goes on", self.endpoint)
                await asyncio.sleep(0.1)
            if taken % _BURST == 0:
                await asyncio.sleep(0)  # a flood must not starve the requests

    async def _take_ping(self) -> None:
        frames = await self._receive()
        try:
            if len(frames) != 2:
                had = f"this had {len(frames) - 1} or more"
                raise BadPing(f"a discovery ping is one frame without a delimiter, {had}")
            ping = decode_ping(frames[1])
            if not ping.version:
                # Its D, asked at once, waits for ever for a prompt that P will not compute.
                raise BadPing(
                    f"the ping of {ping.http_address} has no version, as those of vLLM's P2pNcclConnector, "
                    "whose instances p2pkv-proxy does not serve: keep their own proxy for them"
                )
        except BadPing as error:
            self.refused += 1
            self._complain(f"a message to {self.endpoint} was refused ({self.refused} so far): {error}")
        else:
            self._take(ping, PingConnection(self._router, frames[0], self._guarded))

    async def _receive(self) -> list[bytes]:
        """One message: the peer's identity, which ZMQ adds, and its frames, of which at most two are kept."""
        frames: list[bytes] = []
        more = True
        while more:
            frame = await self._router.recv()
            more = bool(self._router.getsockopt(zmq.RCVMORE))
            if len(frames) <= 2:
                frames.append(frame)
            else:
                await asyncio.sleep(0)
        return frames

    async def _admit(self) -> None:
        """Answers libzmq whether one peer may connect."""
        reply, _ = self._zap.answer(await self._asked.recv_multipart())
        if reply:
            await self._asked.send_multipart(reply)

    async def _look(self) -> None:
        """Takes in one failed handshake."""
        failure = security.failure_of(await self._failures.recv_multipart())
        self.shut_out += 1
        if failure.spoke:
            refused = f"a connection to {self.endpoint} was refused"
            self._complain(f"{refused} ({self.shut_out} so far): {failure.detail}")

    def close(self) -> None:
        """Frees the port. Idempotent."""
        self._watch.close()
        self._router.close(linger=0)
        self._asked.close(linger=0)
        self._context.term()

    def _complain(self, sentence: str) -> None:
        """One line in ten seconds, however much garbage comes."""
        if self._complaints.admits():
            logger.warning("%s", sentence)


def endpoint_of(address: Address) -> str:
    """The endpoint of an address for ZMQ, which binds no names. Raises OSError if a name is not found."""
    if ":" in address.host:
        return f"tcp://{address}"
    return f"tcp://{socket.gethostbyname(address.host)}:{address.port}"


def _configure(router: zmq.asyncio.Socket, *, ipv6: bool) -> None:
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.IPV6, ipv6)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_PING_BYTES)
    security.limit_handshake(router)
    # The original connector pings under a fixed identity: a restarted instance must not be shut out.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    # A send to a closed connection is an error, by which `is_connected` notices it.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 8)
    # Peers that vanished without closing their connections are dropped.
    router.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
    router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
