"""The unix socket of a CUDA IPC link: D hands P the descriptor of its memory, then both announce messages.

The socket has a random name and no file (an abstract address), so both processes must be in one network
namespace of one host. Either end's death closes it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from p2pkv.links.base import NONCE_BYTES

MAPPED = 1
"""P has mapped D's memory."""
COMMITTED = 2
"""P's message number `sequence` lies in its slot, with so many bytes."""
TAKEN = 3
"""D has seen that."""
GOODBYE = 4
"""Nothing of P's writes to D's memory any more."""

_RECORD = struct.Struct("<BQQ")
_CREDENTIALS = struct.Struct("3i")
_WELCOME = b"p2pkv"
_CALLERS = 4
"""Connections that may wait to be looked at; a stranger's is closed."""


@dataclass(frozen=True)
class Record:
    """One of the numbers above, and what it is about."""

    what: int
    sequence: int = 0
    nbytes: int = 0


class Closed(Exception):
    """The other end has closed the socket, or its process has ended; or it sent what is no record."""


class Line:
    """One end of a connected socket. Nothing waits, but `wait_for_end`. Raises Closed."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._out: deque[bytes] = deque()

    def send(self, what: int, sequence: int = 0, nbytes: int = 0) -> None:
        """Send a record, at the latest at a later `flush`."""
        self._out.append(_RECORD.pack(what, sequence, nbytes))
        self.flush()

    def flush(self) -> None:
        """Send what the socket had no room for."""
        try:
            while self._out:
                self._socket.send(self._out[0])
                self._out.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise Closed(f"closed by the peer ({error})") from None

    def records(self) -> Iterator[Record]:
        """What has come."""
        while (data := self._receive()) is not None:
            if len(data) != _RECORD.size:
                raise Closed(f"closed: the peer sent {len(data)} bytes where {_RECORD.size} belong")
            yield Record(*_RECORD.unpack(data))

    def send_fd(self, fd: int) -> None:
        """Hand over a descriptor; the first thing that D sends."""
        try:
            socket.send_fds(self._socket, [_WELCOME], [fd])
        except OSError as error:
            raise Closed(f"closed by the peer ({error})") from None

    def receive_fd(self) -> int | None:
        """The descriptor, which the caller closes; None while it has not come."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 64, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Closed(f"closed by the peer ({error})") from None
        if data == _WELCOME and len(fds) == 1:
            return fds[0]
        for fd in fds:
            os.close(fd)
        raise Closed("closed by the peer before it gave its memory")

    def hang_up(self) -> None:
        """Send nothing any more: the other end finds the line closed, and its own records still come."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_end(self) -> bool:
        """Wait, on a helper thread, until the other end has left; whether with GOODBYE."""
        self._socket.setblocking(True)
        try:
            return any(record.what == GOODBYE for record in self.records())
        except Closed:
            return False

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> bytes | None:
        try:
            data = self._socket.recv(64)
        except BlockingIOError:
            return None
        except OSError as error:
            raise Closed(f"closed by the peer ({error})") from None
        if not data:
            raise Closed("closed by the peer")
        return data


class Door:
    """D's listening socket for one link, until its P has come.

    Attributes:
        name: random; the socket's address.
    """

    def __init__(self, expected: bytes) -> None:
        """`expected`: what P shows first. Raises OSError."""
        self.name = secrets.token_bytes(NONCE_BYTES)
        self._expected = expected
        self._callers: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.setblocking(False)
            self._listener.bind(_address(self.name))
            self._listener.listen(_CALLERS)
        except OSError:
            self._listener.close()
            raise

    def line(self) -> Line | None:
        """The line to P, once it has come; the door is then closed. None until then."""
        with contextlib.suppress(BlockingIOError):
            while len(self._callers) < _CALLERS:
                self._callers.append(self._listener.accept()[0])
                self._callers[-1].setblocking(False)
        for caller in tuple(self._callers):
            try:
                shown = caller.recv(64)
            except BlockingIOError:
                continue
            except OSError:
                shown = b""
            self._callers.remove(caller)
            if shown == self._expected and _same_user(caller):
                self.close()
                return Line(caller)
            caller.close()
        return None

    def close(self) -> None:
        """Idempotent."""
        self._listener.close()
        for caller in self._callers:
            caller.close()
        self._callers.clear()


def dial(name: bytes, shown: bytes) -> Line:
    """P's line to the door of that name. Raises OSError, PermissionError for one of another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(_address(name))
        if not _same_user(connection):
            raise PermissionError("the peer's process belongs to another user")
        connection.send(shown)
    except OSError:
        connection.close()
        raise
    return Line(connection)


def _address(name: bytes) -> bytes:
    return b"\0p2pkv-ipc-" + name.hex().encode()


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()
