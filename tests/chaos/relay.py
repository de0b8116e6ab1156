"""A P's front door: TCP forwarders that can hold, reset or garble what goes through them."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from dataclasses import dataclass, field

from p2pkv.pairing import Address

LOOK_SECONDS = 0.02
"""How long a change of a door may take to be noticed."""


@dataclass
class _Pair:
    """One connection and its continuation behind the door."""

    client: socket.socket
    server: socket.socket

    def close(self, reset: bool) -> None:
        for each in (self.client, self.server):
            if reset:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()


@dataclass
class Door:
    """Forwards `outside` to `inside`, and so the `ports` - 1 ports after them, those of other ranks.

    The flags may be set at any time by any thread.

    Attributes:
        open: whether anybody listens outside; closing it ends nothing that goes through already.
        to_p, from_p: whether bytes go this way; what is held arrives when the way is free again.
        reset: end all connections, once.
        garble: flip a bit in the next bytes to P, once.
    """

    outside: Address
    inside: Address
    ports: int = 1
    open: bool = False
    to_p: bool = True
    from_p: bool = True
    reset: bool = False
    garble: bool = False
    garbled: int = 0
    _listeners: list[socket.socket] = field(default_factory=list)
    _pairs: list[_Pair] = field(default_factory=list)

    def ready_to_read(self) -> dict[socket.socket, _Pair | None]:
        """The sockets to read from now."""
        self._obey()
        out: dict[socket.socket, _Pair | None] = dict.fromkeys(self._listeners)
        for pair in self._pairs:
            if self.to_p:
                out[pair.client] = pair
            if self.from_p:
                out[pair.server] = pair
        return out

    def read(self, source: socket.socket, pair: _Pair | None) -> None:
        """This socket has something."""
        if pair is None:
            self._accept(source)
        elif not (self.to_p if source is pair.client else self.from_p):
            return  # held since
        elif pair in self._pairs and not self._forward(source, pair):
            self._pairs.remove(pair)
            pair.close(reset=False)

    def shut(self) -> None:
        """End everything."""
        self.open, self.reset = False, True
        self._obey()

    def _obey(self) -> None:
        if self.open and not self._listeners:
            places = [self.outside.shifted(each) for each in range(self.ports)]
            self._listeners = [socket.create_server((place.host, place.port)) for place in places]
        elif not self.open:
            while self._listeners:
                self._listeners.pop().close()
        if self.reset:
            self.reset = False
            while self._pairs:
                self._pairs.pop().close(reset=True)

    def _accept(self, listener: socket.socket) -> None:
        inside = self.inside.shifted(self._listeners.index(listener))
        client, _ = listener.accept()
        try:
            server = socket.create_connection((inside.host, inside.port), timeout=1.0)
        except OSError:
            client.close()
            return
        client.settimeout(1.0)
        self._pairs.append(_Pair(client, server))

    def _forward(self, source: socket.socket, pair: _Pair) -> bool:
        """Whether the connection goes on."""
        target = pair.server if source is pair.client else pair.client
        with contextlib.suppress(OSError):
            data = bytearray(source.recv(1 << 16))
            if data and self.garble and source is pair.client:
                self.garble = False
                self.garbled += 1
                data[len(data) // 2] ^= 0x10
            target.sendall(data)
            return bool(data)
        return False


class Doors:
    """All doors, moved by one thread. A context manager."""

    def __init__(self, doors: dict[str, Door]) -> None:
        self.doors = doors
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="doors", daemon=True)

    def __enter__(self) -> Doors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping:
            waiting = {
                source: (door, pair)
                for door in self.doors.values()
                for source, pair in door.ready_to_read().items()
            }
            readable, _, _ = select.select(list(waiting), [], [], LOOK_SECONDS)
            for source in readable:
                if source.fileno() >= 0:
                    door, pair = waiting[source]
                    door.read(source, pair)
        for door in self.doors.values():
            door.shut()
