"""A TCP relay that is rough with what goes through it: late, in slices, held, garbled, cut in mid-message.

TCP mends lost packets itself, and what is left of them for those
who use it is this: bytes come late and in other pieces than they were sent, or the connection ends.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial

import msgspec
from chaos.engine import STAGING

from p2pkv.demo.processes import free_ports
from p2pkv.links.base import Inbound, LinkFactory, decode_blob, encode_blob
from p2pkv.links.host import HostAcceptance, HostLinks
from p2pkv.pairing import Address
from support.links.faulty import WrappedLinks

THERE, BACK = "there", "back"
"""The ways of a connection: from whoever dialed, and to it."""

LOOK_SECONDS = 0.02
"""In which a change of manner is noticed."""

BUFFERED = 1 << 17
PIECES = 64
"""Of one way, before the others have their turn."""


@dataclass
class Manner:
    """How bytes go through. May be set at any time by any thread.

    Attributes:
        slice: most bytes that go through at once; less, by chance.
        late: most seconds that bytes wait.
        held: ways on which nothing moves.
        half: ways that are closed as soon as something goes there; the other way of that connection stays.
        reset_after: so many bytes later every connection is reset, once; 0: now.
        garble: flip a bit in the next bytes of who dialed, once.
        open: whether anybody listens; closing it ends nothing that goes through already.
    """

    slice: int = 1 << 16
    late: float = 0.0
    held: tuple[str, ...] = ()
    half: tuple[str, ...] = ()
    reset_after: int | None = None
    garble: bool = False
    open: bool = True


class Relay:
    """Listens at `outside` and on the `ports` - 1 ports after it, and takes whoever comes to the same one
    behind `inside`; from `start` to `close`."""

    def __init__(
        self, outside: Address, inside: Address, manner: Manner, ports: int = 1, seed: int = 1
    ) -> None:
        self.manner = manner
        self._places = [outside.shifted(each) for each in range(ports)]
        self._inside = inside
        self._draw = random.Random(seed)
        self._servers: list[asyncio.Server] = []
        self._sinks: set[asyncio.StreamWriter] = set()
        self._began, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="relay", daemon=True)

    def start(self) -> None:
        """From now on it listens, unless it is to be closed."""
        self._thread.start()
        assert self._began.wait(5.0), "the relay cannot listen"

    def close(self) -> None:
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(5.0)

    async def _run(self) -> None:
        while not self._stopping:
            await self._listen(self.manner.open)
            self._began.set()
            if self.manner.reset_after == 0:
                self._reset()
            await asyncio.sleep(LOOK_SECONDS)
        self._reset()
        await self._listen(False)

    async def _listen(self, now: bool) -> None:
        if now and not self._servers:
            for number, each in enumerate(self._places):
                take = partial(self._take, self._inside.shifted(number))
                self._servers.append(await asyncio.start_server(take, each.host, each.port))
        while self._servers and not now:
            self._servers.pop().close()

    async def _take(
        self, inside: Address, client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        sinks = [to_client]
        try:
            opening = asyncio.open_connection(inside.host, inside.port)
            server, to_server = await asyncio.wait_for(opening, 1.0)
            sinks.append(to_server)
            self._sinks.update(sinks)
            await asyncio.gather(self._carry(THERE, client, to_server), self._carry(BACK, server, to_client))
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # nobody answers inside, or the relay ends
        finally:
            self._sinks.difference_update(sinks)
            for each in sinks:
                each.close()

    async def _carry(self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        manner, shut, sent = self.manner, False, 0
        with contextlib.suppress(OSError):
            while data := bytearray(await source.read(BUFFERED)):
                if manner.garble and way == THERE:
                    manner.garble = False
                    data[len(data) // 2] ^= 0x10
                await asyncio.sleep(self._draw.uniform(0.0, manner.late))
                while data and not shut:
                    while way in manner.held:
                        await asyncio.sleep(LOOK_SECONDS)
                    if way in manner.half:
                        shut = True  # what still comes goes nowhere
                        sink.write_eof()
                        break
                    count = min(self._draw.randint(1, manner.slice), len(data))
                    sink.write(bytes(data[:count]))
                    del data[:count]
                    sent += 1
                    if sent % PIECES == 0:
                        await sink.drain()
                        await asyncio.sleep(0)
                    if manner.reset_after is not None:
                        manner.reset_after = max(0, manner.reset_after - count)
                        if manner.reset_after == 0:
                            self._reset()
        with contextlib.suppress(OSError):
            sink.write_eof()

    def _reset(self) -> None:
        self.manner.reset_after = None
        for sink in self._sinks:
            with contextlib.suppress(OSError):
                end = sink.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sink.transport.abort()


class RoughLinks(WrappedLinks):
    """Links of `inner`, which are TCP; those from a P go through a relay of D's."""

    MOST = 16

    def __init__(self, inner: LinkFactory) -> None:
        super().__init__(inner)
        self.manner = Manner()
        self._relays: deque[Relay] = deque()

    def accept(self, invitation: bytes, window: int) -> tuple[Inbound, bytes]:
        """The inner link's, with the relay's port in place of its own."""
        inbound, blob = super().accept(invitation, window)
        said = decode_blob(blob, HostAcceptance)
        place = Address(said.host, free_ports())
        relay = Relay(place, Address(said.host, said.port), self.manner, seed=len(self._relays))
        relay.start()
        self._relays.append(relay)
        if len(self._relays) > self.MOST:
            self._relays.popleft().close()
        assert said.shared is None
        return inbound, encode_blob(msgspec.structs.replace(said, port=place.port))

    def close(self) -> None:
        super().close()
        for relay in self._relays:
            relay.close()


def tcp(host: str) -> HostLinks:
    return HostLinks(host, STAGING, shared_memory=False)


def rough(host: str) -> RoughLinks:
    return RoughLinks(tcp(host))
