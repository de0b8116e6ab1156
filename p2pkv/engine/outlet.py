"""P's view of one rank of D: its connection, the link to it, and what is on its way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from p2pkv.control.endpoint import Line
from p2pkv.engine.context import Context
from p2pkv.links.base import LinkError, Outbound, Send
from p2pkv.pages.dense import Rectangles
from p2pkv.plan import Plan
from p2pkv.protocol.effects import Transmit
from p2pkv.protocol.handshake import verified
from p2pkv.protocol.messages import Hello, LinkAccept, LinkDown, LinkInvite
from p2pkv.protocol.wire import Debt

Place = tuple[str, int]
"""A rank of a D: the address of the engine's rank 0, and the rank."""

FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""Seconds between tries to build a link that keeps failing, the first after one at once."""


MAX_UNCONFIRMED = 4096
"""Transfers of one rank of D on whose last word a rank that stops would wait."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A send that D has not taken yet."""

    send: Send
    key: str
    nbytes: int


@dataclass(eq=False, slots=True)
class Word:
    """A `Sent` that waits for its checksum, or for those before it."""

    say: Callable[[float], None]
    due: bool = False


@dataclass(eq=False)
class Outlet:
    """One incarnation of a rank of D that has said Hello.

    `debt` is what this rank owes it, if anything, and `pages` our cache in the form in which that travels.
    """

    ctx: Context
    line: Line
    hello: Hello
    plan: Plan
    pages: Rectangles
    debt: Debt | None
    active: dict[Outlet, None] = field(default_factory=dict, repr=False)
    """The ranks of D to be looked at in every turn: shared by all of this rank's."""
    link: int = 0
    window: int = 0
    since: float = 0.0
    fresh: bool = True
    """Whether Hello is all that this rank has said yet."""
    linked: bool = False
    wanted: float = 0.0
    """When D last named a transfer."""
    heard: float = 0.0
    """When it last said anything but Hello."""
    parked: bool = False
    """Whether the link was closed as idle, and waits for D to name a transfer."""
    orders: deque[tuple[str, Transmit]] = field(default_factory=deque)
    flights: deque[Flight] = field(default_factory=deque)
    words: deque[Word] = field(default_factory=deque)
    """In the order of the sends; only where checksums are wanted."""
    unconfirmed: dict[tuple[str, int], None] = field(default_factory=dict)
    """Transfers (key, attempt) of which D has been sent something, and has not said its last word."""
    _waited: Transmit | None = None
    _invited: bool = False
    _next: float = 0.0
    _pause: float = 0.0
    _invitation: bytes = b""
    _outbound: Outbound | None = None
    _oldest: Flight | None = None
    _moved: float = 0.0

    @cached_property
    def place(self) -> Place:
        return self.hello.addresses[0], self.hello.rank

    @cached_property
    def served(self) -> frozenset[int]:
        """The ranks of its engine that are owed something by this rank."""
        return frozenset(edge.target for edge in self.plan.from_source(self.ctx.hello.rank))

    @property
    def address(self) -> str:
        return self.hello.address

    @cached_property
    def verify(self) -> bool:
        """Whether this rank or ours wants a checksum of each chunk."""
        return verified(self.ctx.hello, self.hello)

    def stir(self) -> None:
        """The next turns look at this rank, for as long as it is busy or its link is not up."""
        self.active[self] = None

    def order(self, key: str, order: Transmit) -> None:
        """D has granted this send."""
        self.orders.append((key, order))
        self.stir()

    @property
    def busy(self) -> bool:
        """Whether the link has something to send or to say about it."""
        return bool(self.orders or self.flights or self.words)

    @property
    def up(self) -> bool:
        """Whether there is nothing to wait for: the link is up, or none is needed now."""
        return self.debt is None or self.linked or self.parked

    @property
    def limit(self) -> int:
        """The most bytes of a chunk; 0 while it is not known."""
        return self.window // 2 if self.linked else 0

    @property
    def building(self) -> bool:
        """Whether D has been invited to a link that is not up yet."""
        return self._invited and not self.linked

    @property
    def used(self) -> int:
        return self._outbound.used if self._outbound is not None else 0

    def invite(self, now: float) -> None:
        """Begin a link if there is none, and it is time to try again; D's answer comes to `accept`.

        Raises LinkError if this rank can make none now.
        """
        self.stir()
        if self.debt is None or self._invited or self.parked or now < self._next:
            return
        self._invited = True
        self.link += 1
        self._invitation = self.ctx.links.invite()
        self.since = now
        self.ctx.tell(self.line, LinkInvite(self.link, self._invitation))

    def accept(self, message: LinkAccept) -> None:
        """D's end is up. Raises LinkError if ours cannot be. An answer to what we gave up comes too late."""
        if message.link == self.link and self.building and self._outbound is None:
            self._outbound = self.ctx.links.complete(self._invitation, message.blob)
            self.window = message.window

    def abort(self, now: float, tell: str = "") -> None:
        """Give the link up, and all that it carried; `tell`: why, for D. Each new try waits longer."""
        if tell:
            self.ctx.tell(self.line, LinkDown(self.link, tell))
        if self._outbound is not None:
            self.ctx.counters.add("links_aborted")
            self._outbound.abort()
        self._outbound, self.linked, self._invited = None, False, False
        self._next = now + self._pause
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LAST_PAUSE)
        self.orders.clear()
        self.flights.clear()
        self.words.clear()
        self.unconfirmed.clear()
        self._oldest = None
        self.stir()

    def park(self, now: float, tell: str = "") -> None:
        """Close the idle link until D names a transfer; `tell`: why, for D."""
        self.abort(now, tell)
        self.parked, self._next, self._pause = True, now, 0.0

    def want(self, now: float) -> None:
        """D names a transfer: a parked link may be built again."""
        self.wanted, self.parked = now, False

    def sent(self, key: str, attempt: int) -> None:
        """Something of this transfer has gone out."""
        self.unconfirmed[key, attempt] = None
        if len(self.unconfirmed) > MAX_UNCONFIRMED:
            del self.unconfirmed[next(iter(self.unconfirmed))]

    def confirmed(self, key: str, attempt: int) -> None:
        """D has all of this transfer, or wants nothing more of it."""
        self.unconfirmed.pop((key, attempt), None)

    @property
    def unfinished(self) -> bool:
        """Whether something is on its way to D, or may still be."""
        return self.busy or bool(self.unconfirmed)

    def poll(self) -> bool:
        """Move what can be moved; whether the link has just come up. Raises LinkError."""
        if self._outbound is None:
            return False
        self._outbound.poll()
        if self.linked or not self._outbound.ready():
            return False
        self.linked = True
        return True

    def overdue(self, now: float, lease: float) -> bool:
        """Whether one send has been the next one for longer than a lease; to be asked often.

        A slow link is not a dead one: those behind it wait longer than that.
        """
        oldest = self.flights[0] if self.flights else None
        if oldest is not self._oldest:
            self._oldest, self._moved = oldest, now
        return oldest is not None and now - self._moved > lease

    def taken(self) -> Iterator[Flight]:
        """Sends that D has taken since the last call, in order. Raises LinkError."""
        while self.flights and self.flights[0].send.done():
            self._pause = 0.0
            yield self.flights.popleft()

    def speak(self, word: Word, now: float) -> None:
        """This word may be said; it is, and those behind it that may, once all before it have been."""
        word.due = True
        while self.words and self.words[0].due:
            self.words.popleft().say(now)

    def next_send(self) -> tuple[str, Transmit, Send] | None:
        """The oldest order and a buffer for it, if there is one of each. Raises LinkError."""
        if not self.orders or self._outbound is None or not self.linked:
            return None
        key, order = self.orders[0]
        if order.grant.nbytes > self.window:
            raise LinkError(f"D grants {order.grant.nbytes} bytes in a window of {self.window}")
        send = self._outbound.reserve(order.grant.nbytes, order.grant.landing)
        if send is None:
            if order is not self._waited:
                self._waited = order
                self.ctx.counters.add("chunks_waited")
            return None
        self.orders.popleft()
        return key, order, send
