"""What two ends of a simulated communicator say to each other over a unix socket."""

from __future__ import annotations

import ctypes
import socket
import struct
from dataclasses import dataclass

from nccl_simulated_gpu import Work

HEADER = struct.Struct("<cQ")


@dataclass(eq=False)
class Op:
    send: bool
    ptr: int
    nbytes: int
    stream: int
    done: bool = False
    work: Work | None = None
    """The kernel, once it runs; of a simulation with a GPU."""

    @property
    def memory(self) -> memoryview:
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.ptr)).cast("B")


def accept(root: socket.socket) -> socket.socket | None:
    """A connection, if somebody has dialed."""
    root.setblocking(False)
    try:
        return root.accept()[0]
    except OSError:
        return None


def dial(name: bytes) -> socket.socket | None:
    """A connection, if somebody listens by that name."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(name)
        return line
    except OSError:
        line.close()
        return None


def send(line: socket.socket, op: Op) -> None:
    """The message, and the word that it was taken."""
    line.sendall(HEADER.pack(b"M", op.nbytes))
    line.sendall(op.memory)
    exactly(line, bytearray(1))


def exactly(line: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    """Fill `into`. Raises OSError when the line ends."""
    view = memoryview(into)
    while view:
        count = line.recv_into(view)
        if count == 0:
            raise OSError("the peer is gone")
        view = view[count:]
    return into
