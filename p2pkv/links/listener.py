"""A listening socket that lets one caller in."""

import hmac
import socket
from collections.abc import Callable

_GUESTS = 8


class HandshakeListener:
    """Lets in the connection that shows the nonce, then closes. Of more than 8 undecided the oldest goes."""

    def __init__(
        self,
        listener: socket.socket,
        nonce: bytes,
        magic: bytes = b"",
        trusts: Callable[[socket.socket], bool] = lambda guest: True,
    ) -> None:
        """`magic`: what comes before the nonce, and is no secret: strangers are dropped at its first wrong
        byte. `trusts`: whether a connection's process may enter."""
        self._socket = listener
        self._magic = magic
        self._hello = magic + nonce
        self._trusts = trusts
        self._guests: list[tuple[socket.socket, bytearray]] = []
        listener.setblocking(False)

    def admit(self) -> socket.socket | None:
        """The connection that has shown the nonce, if there is one now."""
        self._accept()
        for guest in list(self._guests):
            verdict = self._read_hello(*guest)
            if verdict is None:
                continue
            self._guests.remove(guest)
            if verdict and self._trusts(guest[0]):
                self.close()
                return guest[0]
            guest[0].close()
        return None

    def close(self) -> None:
        """Close the listener and connections without a whole hello. Idempotent."""
        self._socket.close()
        for guest, _ in self._guests:
            guest.close()
        self._guests.clear()

    def _accept(self) -> None:
        for _ in range(_GUESTS):
            try:
                guest, _address = self._socket.accept()
            except OSError:  # no process there, gone again, or no descriptor left: no connection in each case
                return
            guest.setblocking(False)
            self._guests.append((guest, bytearray()))
            if len(self._guests) > _GUESTS:
                self._guests.pop(0)[0].close()

    def _read_hello(self, guest: socket.socket, received: bytearray) -> bool | None:
        """True: the hello is right; False: it never will be; None: not all of it has arrived."""
        try:
            part = guest.recv(len(self._hello) - len(received))
        except BlockingIOError:
            return None
        except OSError:
            return False
        received += part
        if not part or not self._magic.startswith(received[: len(self._magic)]):
            return False
        if len(received) < len(self._hello):
            return None
        return hmac.compare_digest(bytes(received), self._hello)
