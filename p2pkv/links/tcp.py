"""D's end of a host link over TCP: the door that P knocks at, and the pump from the socket into the arena.

P says its 24-byte hello (magic and D's nonce), D answers with P's nonce. Then P sends messages, each a
header (sequence number, size) and its bytes; D answers each with the count of messages taken. Plain
sockets and not ZMQ: the kernel copies straight into the slot of the posted receive, and a stranger
costs no memory beyond a hello.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import struct
from collections.abc import Callable

from p2pkv.links.base import LinkError
from p2pkv.links.blobs import NONCE_BYTES

MAGIC = b"p2pkv\x00L1"
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
HEADER = struct.Struct("<QQ")  # sequence number, bytes that follow
TAKEN = struct.Struct("<Q")  # messages taken so far
PIECE_BYTES = 1 << 20
BURST_BYTES = 8 << 20  # what one poll may move: a few milliseconds at most
_GUESTS = 8
_BACKLOG = 64  # knocks between two polls; the kernel drops the rest, and they knock again


class Door:
    """A listening socket that lets in the one connection which knows the nonce, and then closes.

    Strangers are dropped at their first wrong byte; at most 8 may be undecided, then the oldest goes.
    """

    def __init__(self, host: str, nonce: bytes) -> None:
        """`host` is numeric. Raises LinkError if it cannot be bound."""
        self._hello = MAGIC + nonce
        self._guests: list[tuple[socket.socket, bytearray]] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise LinkError(
                f"cannot listen on {host}: {error}; `host` must be an address of this machine"
            ) from error
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])

    def admit(self) -> socket.socket | None:
        """The connection that has shown the nonce, if there is one now."""
        self._accept()
        for guest in list(self._guests):
            verdict = self._hear(*guest)
            if verdict is None:
                continue
            self._guests.remove(guest)
            if verdict:
                return guest[0]
            guest[0].close()
        return None

    def close(self) -> None:
        """Close the listener and whoever is undecided. Idempotent."""
        self._listener.close()
        for guest, _ in self._guests:
            guest.close()
        self._guests.clear()

    def _accept(self) -> None:
        for _ in range(_GUESTS):
            try:
                guest, _address = self._listener.accept()
            except OSError:  # nobody there, gone again, or no descriptor left: all the same to us
                return
            guest.setblocking(False)
            self._guests.append((guest, bytearray()))
            if len(self._guests) > _GUESTS:
                self._guests.pop(0)[0].close()

    def _hear(self, guest: socket.socket, heard: bytearray) -> bool | None:
        """True: the hello is right; False: it never will be; None: not all of it is here."""
        try:
            part = guest.recv(HELLO_BYTES - len(heard))
        except BlockingIOError:
            return None
        except OSError:
            return False
        heard += part
        if not part or not MAGIC.startswith(heard[: len(MAGIC)]):
            return False
        if len(heard) < HELLO_BYTES:
            return None
        return hmac.compare_digest(bytes(heard), self._hello)


class Inlet:
    """Takes messages off P's connection, in order, into the slots that `place` names.

    place(sequence, nbytes) -> memoryview [nbytes]; it raises LinkError if no such receive is posted.
    landed(sequence) is called when all bytes of a message are there.
    """

    def __init__(
        self,
        connection: socket.socket,
        answer: bytes,
        place: Callable[[int, int], memoryview],
        landed: Callable[[int], None],
    ) -> None:
        self.taken = 0
        self.lost: str | None = None
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._place = place
        self._landed = landed
        self._header = memoryview(bytearray(HEADER.size))
        self._into: memoryview | None = None
        self._filled = 0
        self._answers = bytearray(answer)

    def poll(self) -> None:
        """Take what is here; `lost` says if the connection ended. LinkError for what P may not send."""
        if self.lost is None:
            try:
                self._take_all()
                self._answer()
            except OSError as error:
                self.lost = f"the connection broke: {error}"

    def close(self) -> None:
        """Close the connection; nothing is written into any slot after this. Idempotent."""
        self._socket.close()
        self._into = None

    def _take_all(self) -> None:
        budget = BURST_BYTES
        while budget > 0:
            into = self._header if self._into is None else self._into
            try:
                count = self._socket.recv_into(into[self._filled :])
            except BlockingIOError:
                return
            if count == 0:
                self.lost = "the peer closed the connection"
                return
            budget -= count
            self._filled += count
            if self._filled == len(into):
                self._advance()

    def _advance(self) -> None:
        self._filled = 0
        if self._into is None:
            sequence, nbytes = HEADER.unpack(self._header)
            if sequence != self.taken:
                raise LinkError(f"the peer sent message {sequence} where {self.taken} was next")
            self._into = self._place(sequence, nbytes)
            return
        self._into = None
        self._landed(self.taken)
        self.taken += 1
        self._answers += TAKEN.pack(self.taken)

    def _answer(self) -> None:
        while self._answers:
            try:
                count = self._socket.send(self._answers)
            except BlockingIOError:
                return
            del self._answers[:count]


def numeric(host: str) -> str:
    """The numeric address of `host`, which peers are told. Raises ValueError if it is not one to dial."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"host {host!r} has no address ({error}); give an address of this machine") from None
    address = str(found[0][4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise ValueError(
            f"host {host!r} is no address that a peer can dial; give one address of this machine"
        )
    return address


def is_loopback(address: str) -> bool:
    """Whether the numeric `address` is for its own host only. Raises LinkError if it is no address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        raise LinkError(f"the peer announced {address!r}, which is not a numeric address") from None
