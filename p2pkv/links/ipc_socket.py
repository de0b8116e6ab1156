"""The unix socket of a CUDA IPC link: D hands P the descriptor of its memory, then both announce messages.

The socket has a random name and no file (an abstract address), so both processes must be in one network
namespace of one host. Either end's death closes it.
"""

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

MAPPED = 1
"""P has mapped D's memory."""
COMMITTED = 2
"""P's message number `sequence` lies in its slot, with so many bytes."""
TAKEN = 3
"""D has seen that message."""
GOODBYE = 4
"""Nothing of P's writes to D's memory any more."""

_RECORD = struct.Struct("<BQQ")
_CREDENTIALS = struct.Struct("3i")
_WELCOME = b"p2pkv"
_CALLERS = 4
"""Connections that may wait to be looked at."""


@dataclass(frozen=True)
class Record:
    """One of the numbers above, and what it is about."""

    what: int
    sequence: int = 0
    nbytes: int = 0


class Closed(Exception):
    """The other end has closed the socket, or its process has ended; or it sent what is no record."""


class RecordSocket:
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
        while True:
            try:
                data = self._socket.recv(64)
            except BlockingIOError:
                return
            except OSError as error:
                raise Closed(f"closed by the peer ({error})") from None
            if not data:
                raise Closed("closed by the peer")
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


def listen(name: bytes) -> socket.socket:
    """D's listening socket of that name. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(name))
        listener.listen(_CALLERS)
    except OSError:
        listener.close()
        raise
    return listener


def dial(name: bytes, shown: bytes) -> RecordSocket:
    """P's line to the listener of that name. Raises OSError, PermissionError for one of another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        connection.connect(_address(name))
        if not same_user(connection):
            raise PermissionError("the peer's process belongs to another user")
        connection.send(shown)
    except OSError:
        connection.close()
        raise
    return RecordSocket(connection)


def _address(name: bytes) -> bytes:
    return b"\0p2pkv-ipc-" + name.hex().encode()


def same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.getuid()
