"""The pretend wires between two pretend engines: control lines that carry bytes, links that carry cells.

A link's buffer is a list of cells instead of bytes. Sends and receives match in the order in which
they are posted, as p2pkv/links/base.py demands, and nobody looks whether what comes is what was meant.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

from p2pkv.protocol.messages import AnyMessage, decode, encode

Cell = tuple[str, int, int, int, int]
"""What a computed page holds: (key, KV group, layer, head, token); of a state the tokens that it has seen."""

GARBAGE: Cell = ("garbage", -1, -1, -1, -1)

_identities = count()


def checksum(cells: list[Cell | None]) -> bytes:
    """Of a message on a link."""
    return blake2b(repr(cells).encode(), digest_size=8).digest()


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Line:
    """A control connection that a D rank has dialed to a P rank; FIFO each way, and it may lose all at once.

    `identity` is what P knows it by; a broken connection that the transport mends gets a new one.
    """

    p: int
    d: int
    to_p: deque[bytes] = field(default_factory=deque)
    to_d: deque[bytes] = field(default_factory=deque)
    seen: list[tuple[str, bytes]] = field(default_factory=list)
    identity: int = field(default_factory=lambda: next(_identities))

    def say(self, to: str, message: AnyMessage) -> None:
        (self.to_p if to == "p" else self.to_d).append(encode(message))

    def take(self, to: str) -> AnyMessage:
        data = (self.to_p if to == "p" else self.to_d).popleft()
        self.seen = [*self.seen[-30:], (to, data)]
        return decode(data)

    def replay(self, which: int) -> None:
        """Something that was delivered on this connection comes once more, after what is on its way."""
        if self.seen:
            to, data = self.seen[which % len(self.seen)]
            (self.to_p if to == "p" else self.to_d).append(data)

    def cut(self) -> None:
        """All that is on its way is lost; the transport connects again by itself."""
        self.to_p.clear()
        self.to_d.clear()
        self.seen.clear()
        self.identity = next(_identities)


@dataclass(eq=False)
class Receive:
    nbytes: int
    cells: list[Cell | None] | None = None


@dataclass(eq=False)
class Send:
    nbytes: int
    cells: list[Cell | None]
    taken: bool = False


class LinkBroken(Exception):
    """What a link's calls raise when it cannot go on."""


class Link:
    """The data plane from one P rank to one D rank; each end may abort, which only its own end notices."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.broken = False
        self.spoil: int | None = None
        """Which cell of the next message changes on its way."""
        self.p_down = self.d_down = False
        self.used = self.staged = 0
        self._receives: deque[Receive] = deque()
        self._sends: deque[Send] = deque()

    def post(self, nbytes: int) -> Receive | None:
        self._check(self.d_down)
        if self.used + nbytes > self.window:
            return None
        self.used += nbytes
        self._receives.append(receive := Receive(nbytes))
        return receive

    def release(self, receive: Receive) -> None:
        self.used -= receive.nbytes

    def send(self, nbytes: int, cells: list[Cell | None]) -> Send:
        self._check(self.p_down)
        self.staged += nbytes
        self._sends.append(send := Send(nbytes, cells))
        return send

    def poll(self) -> None:
        self._check(self.p_down and self.d_down)

    def move(self) -> bool:
        """One message arrives, if a receive is posted for it."""
        if self.broken or self.p_down or self.d_down or not self._receives or not self._sends:
            return False
        receive, send = self._receives.popleft(), self._sends.popleft()
        if receive.nbytes != send.nbytes:
            self.broken = True
            return True
        if self.spoil is not None:
            send.cells[self.spoil % len(send.cells)], self.spoil = GARBAGE, None
        receive.cells, send.taken = send.cells, True
        self.staged -= send.nbytes
        return True

    def abort(self, side: str) -> None:
        if side == "p":
            self.p_down, self.staged = True, 0
        else:
            self.d_down, self.used = True, 0

    def _check(self, down: bool) -> None:
        if down or self.broken:
            raise LinkBroken("the link is broken")
