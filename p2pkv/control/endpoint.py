"""The control plane of one rank: one socket that listens, one for each peer that it dials.

A Line is a connection, whichever side made it. Nothing here blocks but `wait`, and nothing that comes
in raises: bytes go to the caller as they are. All calls but `wake` come from the thread that owns the
endpoint.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import zmq

from p2pkv.pairing import Address
from p2pkv.protocol.messages import MAX_MESSAGE_BYTES

BURST = 256
"""Messages taken from one socket before the others get their turn."""

MAX_STRANGERS = 4096
"""Connections kept in mind; beyond this many, those that have not said Hello are forgotten."""


class PortTaken(Exception):
    """Somebody listens there already."""


class Line:
    """One connection to a peer. `tag` is the owner's, to know whose line it is."""

    __slots__ = ("_identity", "_socket", "tag")

    def __init__(self, socket: zmq.Socket[bytes], identity: bytes | None) -> None:
        self._socket = socket
        self._identity = identity
        self.tag: object = None

    def send(self, data: bytes) -> bool:
        """Hand over one message; False if the peer is gone or its queue is full."""
        frames = [data] if self._identity is None else [self._identity, data]
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ETERM, zmq.ENOTSOCK):
                return False
            raise
        return True


class Endpoint:
    """Listens at `address` at once. Raises PortTaken with a sentence."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._context = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        self._answered: dict[bytes, Line] = {}
        self._dialed: dict[zmq.Socket[bytes], Line] = {}
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._router.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise PortTaken(
                f"cannot listen at {address} ({error}): another instance uses this port, or the host is "
                "not this machine's; give each instance its own kv_port, and one port more for each rank"
            ) from None
        self._poller.register(self._router, zmq.POLLIN)

    def dial(self, address: Address) -> Line:
        """A line to `address`. It comes up by itself; until then its sends return False."""
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.connect(f"tcp://{address}")
        self._poller.register(socket, zmq.POLLIN)
        line = self._dialed[socket] = Line(socket, None)
        return line

    def hang_up(self, line: Line) -> None:
        """Forget a line; a dialed one is closed."""
        if line._identity is not None:
            self._answered.pop(line._identity, None)
        elif self._dialed.pop(line._socket, None) is not None:
            self._poller.unregister(line._socket)
            line._socket.close(0)

    def wait(self, seconds: float) -> None:
        """Sleep until something can be received, somebody wakes us, or the time is over."""
        for socket, _ in self._poller.poll(max(0, int(seconds * 1000 + 0.999))):
            if socket == self._wake:
                os.eventfd_read(self._wake)

    def receive(self) -> Iterator[tuple[Line, bytes]]:
        """What has come in, without waiting."""
        for socket in [self._router, *self._dialed]:
            for _ in range(BURST):
                if socket.closed:
                    break
                try:
                    frames = socket.recv_multipart(zmq.DONTWAIT)
                except zmq.Again:
                    break
                if socket is self._router:
                    if len(frames) == 2:
                        yield self._answer(frames[0]), frames[1]
                elif len(frames) == 1 and socket in self._dialed:
                    yield self._dialed[socket], frames[0]

    def wake(self) -> None:
        """End the owner's `wait`. From any thread, even after `close`."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        for socket in [self._router, *self._dialed]:
            socket.close(0)
        self._dialed.clear()
        self._context.term()
        with self._waking:
            os.close(self._wake)
            self._wake = -1

    def _answer(self, identity: bytes) -> Line:
        line = self._answered.get(identity)
        if line is None:
            if len(self._answered) >= MAX_STRANGERS:
                self._forget_strangers()
            line = self._answered[identity] = Line(self._router, identity)
        return line

    def _forget_strangers(self) -> None:
        """Drop the lines that nobody owns; whoever is still there is a stranger again."""
        self._answered = {key: line for key, line in self._answered.items() if line.tag is not None}

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        return socket
