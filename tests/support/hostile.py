"""What strangers do to a port: greetings, garbage, and messages that are nearly right."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq
from protocol.samples import KINDS, example

from p2pkv.control.security import Members
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
ZMTP_1 = b"\x01\x00" + b"\x06\x00hello" + b"\x02\x00x"  # an anonymous peer, then messages
ZMTP_2 = SIGNATURE + b"\x01\x05" + b"\x00\x00" + b"\x00\x05hello"  # revision 1, DEALER
ZMTP_3_NULL = SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
ZMTP_3_CURVE = SIGNATURE + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\1" + b"\0" * 31
NULL_READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
HUGE_FRAME = b"\x02" + struct.pack(">Q", 1 << 62) + b"x" * 100
RAW = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
    "zeros": bytes(5000),
    "ones": b"\xff" * 5000,
    "ZMTP 1.0": ZMTP_1,
    "ZMTP 2.0": ZMTP_2,
    "a greeting and no more": ZMTP_3_NULL,
    "half a greeting": ZMTP_3_CURVE[:30],
    "CURVE without its hello": ZMTP_3_CURVE + b"\x04\xff" + bytes(255),
    "a huge command": ZMTP_3_CURVE + b"\x06" + struct.pack(">Q", 1 << 62),
    "a huge frame": ZMTP_3_NULL + NULL_READY + HUGE_FRAME,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 600,
}


def shout(address: Address, data: bytes) -> socket.socket:
    """A TCP connection that says `data`; the caller closes it."""
    connection = socket.create_connection((address.host, address.port), timeout=5)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    return connection


@contextlib.contextmanager
def dealer(
    address: Address, members: Members | None = None, server: Any = "rank"
) -> Iterator[zmq.Socket[bytes]]:
    """A bare socket connected there; with `members`, as one of them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDTIMEO, 5000)
        if members is not None:
            members.join(made, server)
        made.connect(f"tcp://{address}")
        yield made


@contextlib.contextmanager
def router(members: Members | None = None) -> Iterator[tuple[zmq.Socket[bytes], Address]]:
    """A bare socket that listens on loopback, and where; with `members`, as their proxy."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, 20_000)
        made.setsockopt(zmq.SNDHWM, 0)  # a ROUTER drops what does not fit
        if members is not None:
            members.serve(made, "proxy")
        yield made, Address("127.0.0.1", made.bind_to_random_port("tcp://127.0.0.1"))


class Canary:
    """Listens on loopback, answers each connection with `greeting`, and keeps what it is told. With `leave`,
    it then hangs up, as a server with another secret does. `after` is what it says when a peer in the clear
    has shaken hands."""

    def __init__(self, greeting: bytes = b"", *, leave: bool = False, after: bytes = b"") -> None:
        self._greeting = greeting
        self._after = after
        self._leave = leave
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.heard: list[bytearray] = []
        """What each connection has said."""
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name="canary", daemon=True)

    def __enter__(self) -> "Canary":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A connection of our own ends the accept, and the reads end with their sockets.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._thread.join(5)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                self.heard.append(said := bytearray())
                threading.Thread(target=self._hear, args=(connection, said), daemon=True).start()

    def _hear(self, connection: socket.socket, said: bytearray) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(self._greeting)
            if self._leave:
                said += connection.recv(4096)
                connection.shutdown(socket.SHUT_RDWR)
            while data := connection.recv(4096):
                said += data
                if self._after and b"READY" in said:
                    connection.sendall(self._after)


def nearly_right(message: Any, encode: Callable[[Any], bytes]) -> Iterator[bytes]:
    """Every truncation of a message, and what does not belong into it in every field."""
    wire = encode(message)
    for length in range(len(wire)):
        yield wire[:length]
    yield wire + b"\x00"
    fields = msgspec.to_builtins(message, builtin_types=(bytes,)) | {"t": type(message).__struct_config__.tag}
    for name in fields:
        for value in (None, -1, 1 << 63, "x" * 9000, [[]] * 50, {"t": "Hello"}, b"\x00", [1 << 40] * 5000):
            yield msgspec.msgpack.encode(fields | {name: value})
    yield msgspec.msgpack.encode(fields | {"another": 1})


DEEP = [b"\x91" * 100_000 + b"\x90", b"\x81\xa1k" * 1000 + b"\x80", b"\xdd\xff\xff\xff\xff", b"\xc1", b""]


def nonsense() -> Iterator[bytes]:
    """Nearly right messages of every kind, and what is far from right."""
    for kind in KINDS:
        yield from nearly_right(example(kind), m.encode)
    yield from DEEP
