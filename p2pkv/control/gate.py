"""Who gets through the handshake of a listening socket: libzmq asks, once for each connection (ZAP, RFC 27).

The owner of the listening socket polls the gate's and answers in its own loop. So there is no thread of
its own that could end and leave every newcomer waiting: as long as messages are read, admission works.
Without a gate, CURVE would take any client that knows the server's key, and ZMTP 1.0 would pass it by.
"""

from __future__ import annotations

from typing import Any

import zmq

from p2pkv.control.members import Members
from p2pkv.trust import Networks

_PLACE = "inproc://zeromq.zap.01"  # fixed by the protocol
_DOMAIN = b"p2pkv"  # any, but not empty: without a domain libzmq does not ask about plain connections
_FIELDS = 8  # identity, delimiter, version, request id, domain, address, the peer's identity, mechanism


class Gate:
    """Admits `members` (anybody if None) from `allowed` networks (from anywhere if None)."""

    def __init__(self, members: Members | None, allowed: Networks | None) -> None:
        self._members = members
        self._allowed = allowed

    @property
    def needed(self) -> bool:
        """Whether it would ever refuse anybody."""
        return self._members is not None or self._allowed is not None

    def open(self, context: zmq.Context[Any]) -> zmq.Socket[Any]:
        """The socket on which libzmq asks about connections in `context`; before anything there binds."""
        socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_PLACE)
        return socket

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Before it binds: connections to `socket` are asked about."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def answer(self, request: list[bytes]) -> tuple[list[bytes], str]:
        """What to send back, and why the connection is refused; "" if it is not."""
        if len(request) < _FIELDS:
            return [], ""
        path, version, number = request[:2], request[2], request[3]
        refusal = self._judge(_plain(request[5]), request[7], request[_FIELDS:])
        status = (b"400", b"not admitted") if refusal else (b"200", b"")
        return [*path, version, number, *status, b"" if refusal else b"member", b""], refusal

    def _judge(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str:
        if self._allowed is not None and not self._allowed.admits(address):
            return f"a connection from {address} was refused: allowed_peers are {self._allowed}"
        if self._members is None:
            return ""
        if mechanism == b"CURVE" and len(credentials) == 1 and self._members.include(credentials[0]):
            return ""
        return f"a connection from {address} was refused: it does not show the members' key"


def _plain(address: bytes) -> str:
    """As people write it: a socket for both families puts IPv4 into IPv6."""
    return address.decode("ascii", "replace").removeprefix("::ffff:")
