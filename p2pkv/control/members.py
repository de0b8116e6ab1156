"""Membership: the CURVE keys that whoever knows the secret can derive, and nobody else.

The secret never travels, and neither does anything from which it could be read; but whoever records a
handshake can try guesses, so the derivation is slow and the secret should be random. All members hold
the same keys: they are one party.

Ranks and proxies answer with different keys. So a rank that is made to dial a proxy's port, by a forged
request id, does not get through the handshake.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import zmq
from zmq.utils import z85

Server = Literal["rank", "proxy"]

_LABEL = b"p2pkv membership 1"
_ROUNDS = 200_000  # about a tenth of a second, once per process


class Keys(NamedTuple):
    """A CURVE key pair as ZMQ takes it, Z85 text of 40 bytes each."""

    public: bytes
    secret: bytes


class NoCurve(RuntimeError):
    """A secret is set, and this libzmq cannot do anything with it."""


class Members:
    """Those who know `secret`. Raises NoCurve if libzmq was built without CURVE."""

    __slots__ = ("_keys",)

    def __init__(self, secret: bytes) -> None:
        if not zmq.has("curve"):
            raise NoCurve(
                f"a secret is set, and libzmq {zmq.zmq_version()} here was built without CURVE: install "
                "pyzmq from its wheel (`pip install --force-reinstall --only-binary :all: pyzmq`)"
            )
        self._keys = _derive(secret)

    def serve(self, socket: zmq.Socket[Any], server: Server) -> None:
        """Before it binds: `socket` answers only those who know its key. It needs a Gate beside it."""
        keys = self._keys[server]
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)

    def join(self, socket: zmq.Socket[Any], server: Server) -> None:
        """Before it connects: `socket` shows the members' key to a server that proves its own."""
        mine = self._keys["member"]
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys[server].public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, mine.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, mine.secret)

    def include(self, public: bytes) -> bool:
        """Whether `public`, 32 bytes, is the key that members show."""
        return public == z85.decode(self._keys["member"].public)

    def __repr__(self) -> str:
        return "Members()"


def members_of(secret: bytes | None) -> Members | None:
    """The members, if there is a secret. Raises NoCurve."""
    return None if secret is None else Members(secret)


@lru_cache(maxsize=8)
def _derive(secret: bytes) -> dict[str, Keys]:
    slow = hashlib.pbkdf2_hmac("sha256", secret, _LABEL, _ROUNDS)
    return {name: _pair(slow, name) for name in ("rank", "proxy", "member")}


def _pair(slow: bytes, name: str) -> Keys:
    secret = z85.encode(hashlib.blake2b(name.encode(), key=slow, digest_size=32).digest())
    return Keys(zmq.curve_public(secret), secret)
