"""Who gets through a handshake, and why one failed: CURVE keys, the ZAP handler, the monitor of a socket.

The secret never travels, and neither does anything from which it could be read; but anyone who records a
handshake can try guesses, so the derivation of the keys is slow and the secret should be random. All members
hold the same keys and have the same rights. Ranks and proxies answer with different keys, so if a forged
request id makes a rank dial a proxy's port, the handshake fails.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from p2pkv.trust import Networks

# Membership: the CURVE keys that only those who know the secret can derive.

Server = Literal["rank", "proxy"]

_LABEL = b"p2pkv membership 1"
_ROUNDS = 200_000  # about a tenth of a second, once per process


class NoCurve(RuntimeError):
    """A secret is set, and this libzmq cannot do anything with it."""


class Members:
    """Those who know `secret`. Raises NoCurve if libzmq was built without CURVE."""

    def __init__(self, secret: bytes) -> None:
        if not zmq.has("curve"):
            raise NoCurve(
                f"a secret is set, and libzmq {zmq.zmq_version()} here was built without CURVE: install "
                "pyzmq from its wheel (`pip install --force-reinstall --only-binary :all: pyzmq`)"
            )
        self._keys = _derive(secret)

    def serve(self, socket: zmq.Socket[Any], server: Server) -> None:
        """Call before `socket` binds: it answers only those who know its key. It needs a ZapHandler, too."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys[server][1])

    def join(self, socket: zmq.Socket[Any], server: Server) -> None:
        """Call before `socket` connects: it shows the members' key to a server that proves its own."""
        public, secret = self._keys["member"]
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.key_of(server))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def key_of(self, server: Server) -> bytes:
        """The public key by which members know a server."""
        return self._keys[server][0]

    def include(self, public: bytes) -> bool:
        """Whether `public`, 32 bytes, is the key that members show."""
        return public == z85.decode(self._keys["member"][0])

    def __repr__(self) -> str:
        return "Members()"


def members_of(secret: bytes | None) -> Members | None:
    """The members, if there is a secret. Raises NoCurve."""
    return None if secret is None else Members(secret)


@lru_cache(maxsize=8)
def _derive(secret: bytes) -> dict[str, tuple[bytes, bytes]]:
    """CURVE key pairs as ZMQ takes them, public and secret, Z85 text of 40 bytes each."""
    slow, keys = hashlib.pbkdf2_hmac("sha256", secret, _LABEL, _ROUNDS), {}
    for name in ("rank", "proxy", "member"):
        own = z85.encode(hashlib.blake2b(name.encode(), key=slow, digest_size=32).digest())
        keys[name] = zmq.curve_public(own), own
    return keys


# Admission: libzmq asks about each connection to a listening socket, once (ZAP, RFC 27).
#
# The owner of the listening socket polls the ZAP handler's socket, too, and answers in its own loop. So
# admission works as long as messages are read: there is no thread that could end and leave every newcomer
# waiting. Without a handler, CURVE would admit any client that knows the server's key, and ZMTP 1.0 would
# bypass CURVE.

_PLACE = "inproc://zeromq.zap.01"  # fixed by the protocol
_DOMAIN = b"p2pkv"  # any, but not empty: without a domain libzmq does not ask about plain connections
_FIELDS = 8  # identity, delimiter, version, request id, domain, address, the peer's identity, mechanism


class ZapHandler:
    """Admits `members` (any process if None) from `allowed` networks (from anywhere if None)."""

    def __init__(self, members: Members | None, allowed: Networks | None) -> None:
        self._members = members
        self._allowed = allowed

    @property
    def needed(self) -> bool:
        """Whether it refuses anything at all."""
        return self._members is not None or self._allowed is not None

    def open(self, context: zmq.Context[Any]) -> zmq.Socket[Any]:
        """The socket on which libzmq asks about connections in `context`; before anything there binds."""
        socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_PLACE)
        return socket

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Call before `socket` binds: libzmq then asks about connections to it."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def answer(self, request: list[bytes]) -> tuple[list[bytes], str]:
        """What to send back, and why the connection is refused; "" if it is not."""
        if len(request) < _FIELDS:
            return [], ""
        # A socket for both families puts IPv4 into IPv6.
        address = request[5].decode("ascii", "replace").removeprefix("::ffff:")
        refusal = self._refusal(address, request[7], request[_FIELDS:])
        status = (b"400", b"not admitted") if refusal else (b"200", b"")
        return [*request[:4], *status, b"" if refusal else b"member", b""], refusal

    def _refusal(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str:
        if self._allowed is not None and not self._allowed.admits(address):
            return f"a connection from {address} was refused: allowed_peers are {self._allowed}"
        if self._members is None:
            return ""
        if mechanism == b"CURVE" and len(credentials) == 1 and self._members.include(credentials[0]):
            return ""
        return f"a connection from {address} was refused: it does not show the members' key"


# Failed handshakes, which libzmq keeps to itself unless a socket is monitored.

HANDSHAKE_SECONDS = 10.0
"""How long a handshake with a proxy may take before the connection is closed; ranks wait for a lease."""

_LONGEST_HANDSHAKE = 86_400.0

_BROKEN = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_FAILED = _BROKEN | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_COURSE = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_numbers = itertools.count()


class HandshakeFailure(NamedTuple):
    """One handshake that failed, or, of a socket that dials, one connection that has ended."""

    detail: str
    spoke: bool = True
    """Whether the other side has sent something wrong, and is not just gone."""
    refused: bool = False
    """The ZAP handler of a listening socket, ours or theirs, has refused it."""
    lost: bool = False
    """The handshake had succeeded; the connection has ended since."""
    late: bool = False
    """The other side has not finished the handshake in time: nothing is known of it."""


class HandshakeMonitor:
    """Reports a socket's failed handshakes, with `dials` its one connection's end, too. Close it first."""

    def __init__(self, monitored: zmq.Socket[Any], *, dials: bool = False) -> None:
        address = f"inproc://p2pkv-watch-{next(_numbers)}"
        self._monitored = monitored
        self.connected: float | None = None
        """When the other side's kernel accepted a socket that dials (monotonic); None before."""
        self.proven = False
        """Its handshake has succeeded."""
        monitored.monitor(address, _FAILED | _COURSE if dials else _FAILED)
        self.socket: zmq.Socket[Any] = monitored.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Without a limit: libzmq's IO thread would wait for room, and the close for the IO thread.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def failures(self) -> Iterator[HandshakeFailure]:
        """The failures since the last call, without waiting."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_CONNECTED:
                self.connected = time.monotonic()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.proven = True
            elif event == zmq.EVENT_DISCONNECTED:
                # Some kinds of garbage end a connection without any other event.
                yield HandshakeFailure("it does not speak this protocol", lost=self.proven)
            else:
                yield failure_of(frames)

    def close(self) -> None:
        if not self._monitored.closed:
            self._monitored.disable_monitor()
        self.socket.close(0)


def failure_of(frames: list[bytes]) -> HandshakeFailure:
    """What libzmq reports of a monitored socket whose handshake has failed."""
    report = parse_monitor_message(frames)
    event, value = report["event"], report["value"]
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return HandshakeFailure("not admitted", refused=True)
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        if value == zmq.EAGAIN:
            return HandshakeFailure("the handshake took too long", spoke=False, late=True)
        return HandshakeFailure("the other side closed the connection in the handshake", spoke=False)
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return HandshakeFailure("one side has a secret and the other has none")
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return HandshakeFailure("the two secrets differ")
    return HandshakeFailure("it does not speak this protocol")


def limit_handshake(socket: zmq.Socket[Any], seconds: float | None = None) -> None:
    """Before `socket` binds or connects: no handshake may take longer; by default HANDSHAKE_SECONDS."""
    limit = min(HANDSHAKE_SECONDS if seconds is None else seconds, _LONGEST_HANDSHAKE)
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(limit * 1000)))


def no_answer(address: object, failure: HandshakeFailure, secret: bool) -> str:
    """The sentence for a process that has dialed `address` in vain, with a secret or without."""
    if failure.refused:
        return f"{address} refused us: is this host in its allowed_peers, and is the secret the same?"
    if failure.late:
        return f"{address} did not answer in time: {failure.detail}; is its process frozen or overloaded?"
    same = "does it have the same secret" if secret else "does it need a secret"
    return f"{address} refused the handshake ({failure.detail}): is p2pkv up there, and {same}?"
