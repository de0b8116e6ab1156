"""A TCP relay that is rough with what goes through it: late, in slices, held, garbled, cut in mid-message.

One thread moves all connections of a Relay. TCP mends lost packets itself, and what is left of them for those
who use it is this: bytes come late and in other pieces than they were sent, or the connection ends.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
from chaos.engine import STAGING
from faulty_links import WrappedLinks

from p2pkv.demo.processes import free_ports
from p2pkv.links.base import Inbound, LinkFactory, decode_blob, encode_blob
from p2pkv.links.host import HostAcceptance, HostLinks
from p2pkv.pairing import Address

THERE, BACK = "there", "back"
"""The ways of a connection: from whoever dialed, and to it."""

LOOK_SECONDS, BUSY_LOOK_SECONDS = 0.02, 0.002
"""In which a change of manner is noticed, and bytes that are late are looked at."""

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


@dataclass(eq=False)
class _Way:
    name: str
    source: socket.socket
    sink: socket.socket
    pending: deque[tuple[float, bytearray]] = field(default_factory=deque)
    ended: bool = False  # nothing more comes
    shut: bool = False  # nothing more goes

    def close(self) -> None:
        self.shut = True
        self.pending.clear()
        with contextlib.suppress(OSError):
            self.sink.shutdown(socket.SHUT_WR)


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
        self._listeners: list[socket.socket] = []
        self._ways: list[_Way] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        """From now on it listens, unless it is to be closed."""
        self._obey()
        self._thread.start()

    def close(self) -> None:
        """End everything."""
        self._stopping = True
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping:
            self._obey()
            ready = [way.source for way in self._ways if not way.ended and len(way.pending) < 64]
            seconds = BUSY_LOOK_SECONDS if any(way.pending for way in self._ways) else LOOK_SECONDS
            readable, _, _ = select.select([*self._listeners, *ready], [], [], seconds)
            for number, listener in enumerate(self._listeners):
                if listener in readable:
                    self._accept(listener, self._inside.shifted(number))
            for way in list(self._ways):
                if way.source in readable:
                    self._take(way)
                self._give(way)
            self._forget()
        self._reset()
        self._listen(False)

    def _obey(self) -> None:
        self._listen(self.manner.open)
        if self.manner.reset_after == 0:
            self.manner.reset_after = None
            self._reset()

    def _listen(self, now: bool) -> None:
        if now and not self._listeners:
            self._listeners = [socket.create_server((each.host, each.port)) for each in self._places]
        while self._listeners and not now:
            self._listeners.pop().close()

    def _accept(self, listener: socket.socket, inside: Address) -> None:
        client, _ = listener.accept()
        try:
            server = socket.create_connection((inside.host, inside.port), timeout=1.0)
        except OSError:
            client.close()
            return
        for each in (client, server):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ways += [_Way(THERE, client, server), _Way(BACK, server, client)]

    def _take(self, way: _Way) -> None:
        try:
            data = way.source.recv(BUFFERED)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        way.ended = not data
        if not data or way.shut:
            return
        taken = bytearray(data)
        if self.manner.garble and way.name == THERE:
            self.manner.garble = False
            taken[len(taken) // 2] ^= 0x10
        way.pending.append((time.monotonic() + self._draw.uniform(0.0, self.manner.late), taken))

    def _give(self, way: _Way) -> None:
        manner = self.manner
        if way.name in manner.held or way.shut:
            return
        for _ in range(PIECES):
            if not way.pending or way.pending[0][0] > time.monotonic():
                break
            if way.name in manner.half:
                way.close()
                return
            data = way.pending[0][1]
            try:
                count = way.sink.send(data[: self._draw.randint(1, manner.slice)])
            except BlockingIOError:
                break
            except OSError:
                way.close()
                return
            del data[:count]
            if not data:
                way.pending.popleft()
            if manner.reset_after is not None:
                manner.reset_after = max(0, manner.reset_after - count)
                if manner.reset_after == 0:
                    return  # `_obey` resets it
        if way.ended and not way.pending:
            way.close()

    def _forget(self) -> None:
        """Close connections that have ended both ways."""
        for way in list(self._ways):
            both = [each for each in self._ways if {each.source, each.sink} == {way.source, way.sink}]
            if both and all(each.ended and each.shut for each in both):
                for each in both:
                    self._ways.remove(each)
                    each.source.close()

    def _reset(self) -> None:
        for way in self._ways:
            with contextlib.suppress(OSError):
                way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            way.source.close()
        self._ways.clear()


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
    """Links of a rank of the run, which share no memory."""
    return HostLinks(host, STAGING, shared_memory=False)


def rough(host: str) -> RoughLinks:
    """The same, each through a relay."""
    return RoughLinks(tcp(host))
