"""A connection of an endpoint, as its owner holds it."""

from __future__ import annotations

from typing import NamedTuple

import zmq

from p2pkv.control.watch import Watch
from p2pkv.pairing import Address


class Line:
    """One connection to a peer. `tag` is the owner's, to know whose line it is.

    A dialed line, which has an `address`, is shut when its handshake has failed or it has ended
    too soon, until `Endpoint.redial`.
    """

    __slots__ = ("_identity", "_socket", "_watch", "address", "awaited", "since", "tag")

    def __init__(
        self,
        address: Address | None,
        socket: zmq.Socket[bytes] | None = None,
        identity: bytes | None = None,
    ) -> None:
        self.address = address
        self.since = 0.0  # when it was dialed last
        self.awaited = 0.0  # until when its other side, which had shaken hands, may be restarting
        self.tag: object = None
        self._socket = socket
        self._identity = identity
        self._watch: Watch | None = None

    @property
    def shut(self) -> bool:
        return self._socket is None

    @property
    def reached(self) -> bool:
        """Whether somebody listens at the other end of a dialed line, although it may not have answered."""
        return self._watch is not None and self._watch.connected is not None

    def send(self, data: bytes) -> bool:
        """Hand over one message; False if the peer is gone or its queue is full."""
        if self._socket is None:
            return False
        try:
            if self._identity is None:
                self._socket.send(data, zmq.DONTWAIT)
            else:
                self._socket.send_multipart([self._identity, data], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ETERM, zmq.ENOTSOCK):
                return False
            raise
        return True


class Trouble(NamedTuple):
    """A connection that has not come about, and why, in a sentence."""

    line: Line | None
    """The dialed line, which is shut now; None for somebody who wanted to connect to us."""
    reason: str
    quiet: bool = False
    """Whoever it was has just gone: a port scan, a monitor, or a peer that has seen first that we differ."""
    late: bool = False
    """A dialed peer has not answered in time. It may be busy: dial it again while somebody waits for it."""
