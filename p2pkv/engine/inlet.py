"""D's view of one rank of P: the dialed connection, the link from it, and what is on its way here."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field

import msgspec

from p2pkv.control.endpoint import Line
from p2pkv.engine.context import Context
from p2pkv.links.base import Inbound, LinkError, Receive
from p2pkv.pages.dense import Rectangles
from p2pkv.plan import Edge, Plan
from p2pkv.protocol.handshake import Dialing, Refused, judge, verified
from p2pkv.protocol.messages import Chunk, Hello, LinkAccept, LinkDown, LinkInvite, Sent, Waiting, Welcome
from p2pkv.protocol.wire import Debt, Wire


@dataclass(slots=True)
class Posted:
    """A receive that waits for its bytes, and P's word about them."""

    receive: Receive
    key: str
    chunk: Chunk
    said: Sent | None = None

    @property
    def here(self) -> bool:
        return self.said is not None and self.receive.done()


@dataclass(eq=False)
class Inlet:
    """One rank of P that this rank has dialed. `used` is when somebody last wanted it.

    Once it has been welcomed, `wire` is the form in which its rows travel, and `pages` our cache in it.
    """

    ctx: Context
    line: Line
    dialing: Dialing
    used: float
    active: dict[Inlet, None] = field(default_factory=dict, repr=False)
    """The ranks of P to be looked at in every turn: shared by all of this rank's."""
    hello: Hello | None = None
    plan: Plan | None = None
    wire: Wire | None = None
    pages: Rectangles | None = None
    mute: float | None = None
    """Since when it has answered nothing that we asked; None if it has, or we did not ask."""
    reached: bool = False
    """Whether somebody listened at its address when a request last looked."""
    link: int = -1
    asked: deque[tuple[str, Chunk]] = field(default_factory=deque)
    """Announced chunks that wait for room."""
    posted: deque[Posted] = field(default_factory=deque)
    _waited: Chunk | None = None
    _inbound: Inbound | None = None
    _up: bool = False
    """Whether the link's two ends have met, or never will."""
    _oldest: Posted | None = None
    _moved: float = 0.0

    @property
    def address(self) -> str:
        return self.dialing.address

    @property
    def rank(self) -> int:
        """P's rank; only of one that has been welcomed."""
        assert self.hello is not None
        return self.hello.rank

    @property
    def verify(self) -> bool:
        """Whether this rank or ours wants a checksum of each chunk."""
        return self.hello is not None and verified(self.ctx.hello, self.hello)

    def is_of_the_engine_of(self, first: Inlet) -> bool:
        """Whether both have said the same of their engine; only of two that have been welcomed."""
        assert self.hello is not None and self.plan is not None
        assert first.hello is not None and first.plan is not None
        return (self.hello.addresses, self.plan.digest) == (first.hello.addresses, first.plan.digest)

    def owes(self, edge: Edge) -> Debt:
        """What this rank owes us with `edge`; only of one that has been welcomed."""
        assert self.wire is not None
        return Debt(edge, self.wire)

    @property
    def staged(self) -> int:
        """Bytes that posted receives hold."""
        return self._inbound.used if self._inbound is not None else 0

    @property
    def busy(self) -> bool:
        """Whether the next turn may find something to do here."""
        return bool(self.asked or self.posted or (self._inbound is not None and not self._up) or self.staged)

    def stir(self) -> None:
        """The next turns look at this rank, for as long as it is busy."""
        self.active[self] = None

    def announced(self, key: str, chunk: Chunk) -> None:
        """This chunk waits for room."""
        self.asked.append((key, chunk))
        self.stir()

    def greet(self, now: float) -> None:
        """Say Hello, if it is time to."""
        if self.dialing.due(now):
            self.ctx.endpoint.redial(self.line)
            self.ask(msgspec.structs.replace(self.ctx.hello, to=self.address), now)

    def ask(self, message: Hello | Waiting, now: float) -> bool:
        """Say something that a P in health answers at once; False if the connection is gone."""
        told = self.ctx.tell(self.line, message)
        if told and self.mute is None:
            self.mute = now
        return told

    def welcome(self, message: Welcome) -> None:
        """P has accepted our Hello; judge its. Raises Refused."""
        mine, hello = self.ctx.hello, message.hello
        plan = judge(mine, hello)
        if message.plan != plan.digest or hello.address != self.address:
            raise Refused(
                f"{self.address} answers as {hello.address} with plan {message.plan}, not {plan.digest}: "
                "install the same p2pkv on both sides, and use the addresses that instances advertise"
            )
        self.wire, self.pages = self.ctx.form(hello)
        self.dialing.welcomed()
        self.hello, self.plan = hello, plan

    def lost(self, now: float) -> None:
        """This incarnation is gone, or has forgotten us; ask for another."""
        self.abort()
        self.dialing.lost(now)
        self.mute = None
        self.hello = self.plan = self.wire = self.pages = None
        self.greet(now)

    def invited(self, message: LinkInvite, window: int) -> None:
        """Make our end of a new link. Raises LinkError."""
        try:
            self._inbound, blob = self.ctx.links.accept(message.blob, window)
        except LinkError as error:
            self.ctx.tell(self.line, LinkDown(message.link, str(error)))
            raise
        self.link, self._up = message.link, False
        self.stir()
        self.ctx.tell(self.line, LinkAccept(message.link, window, blob))

    @property
    def linked(self) -> bool:
        return self._inbound is not None

    def abort(self, tell: str = "") -> None:
        """Give the link up, and all that it carried; `tell`: why, for P."""
        if self._inbound is not None:
            if tell and not self.ctx.tell(self.line, LinkDown(self.link, tell)):
                # A P that was not told would announce chunks for a link that it has alone.
                self.ctx.endpoint.hang_up(self.line)
            self.ctx.counters.add("links_aborted")
            self._inbound.abort()
        self._inbound, self.link = None, -1
        self.asked.clear()
        self.posted.clear()
        self._oldest = None

    def overdue(self, now: float, lease: float) -> bool:
        """Whether one posted receive has been the next one for longer than a lease; to be asked often.

        A slow link is not a dead one: those behind it wait longer than that.
        """
        oldest = self.posted[0] if self.posted else None
        if oldest is not self._oldest:
            self._oldest, self._moved = oldest, now
        return oldest is not None and now - self._moved > lease

    def poll(self) -> None:
        """Move what can be moved. Raises LinkError."""
        if self._inbound is not None:
            self._inbound.poll()
            if not self._up:
                self._up = True
                with contextlib.suppress(LinkError):  # whoever posts a receive is told
                    self._up = self._inbound.ready()

    def post(self) -> Posted | None:
        """Post a receive for the oldest announced chunk, if the link has room. Raises LinkError."""
        if not self.asked or self._inbound is None or not self._inbound.ready():
            return None
        key, chunk = self.asked[0]
        try:
            receive = self._inbound.post(chunk.nbytes)
        except ValueError as error:
            raise LinkError(f"P announced a chunk that can never be received: {error}") from None
        if receive is None:
            return None
        self.asked.popleft()
        posted = Posted(receive, key, chunk)
        self.posted.append(posted)
        return posted

    def wait(self) -> None:
        """There is no room for the oldest announced chunk: count that, once."""
        if self._inbound is not None and self._inbound.ready() and self.asked[0][1] is not self._waited:
            self._waited = self.asked[0][1]
            self.ctx.counters.add("chunks_waited")

    def note(self, message: Sent) -> None:
        """P says what it has put into the oldest posted receive of which it had not said so yet.

        Raises LinkError if it means another: what is in the receives is then unknown.
        """
        if message.link != self.link:
            return
        posted = next((posted for posted in self.posted if posted.said is None), None)
        name = (message.key, message.attempt, message.chunk)
        if posted is None or (posted.key, posted.chunk.attempt, posted.chunk.chunk) != name:
            raise LinkError(f"P has sent chunk {message.chunk} of {message.key} out of turn")
        posted.said = message
