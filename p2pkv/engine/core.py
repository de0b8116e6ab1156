"""The core of a rank: its turns. A turn takes in messages and commands, moves data and looks at the timers.

`Core` has no thread and no clock: its owner gives it turns, and the time. In a turn every message and command
is matched once, in the tables of the rank's roles (see `roles`). What peers and transfers decide comes to one
queue of effects, which is emptied in order before the next message, command or timer: none of them is called
while it is at work.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from p2pkv import __version__
from p2pkv.config import Options
from p2pkv.control.endpoint import Connection, Endpoint
from p2pkv.engine.commands import Command, Computed, Event, Revoked
from p2pkv.engine.context import LOOK_SECONDS, Context, Counters, log
from p2pkv.engine.core_liveness import Liveness
from p2pkv.engine.effects import Emit, SendMessage, Timer
from p2pkv.engine.from_prefill import PostRemaining, PrefillPeer, ReceiveDone
from p2pkv.engine.roles import DecodeRole, Handle, PrefillRole, Receive, Role
from p2pkv.engine.to_decode import FillSend
from p2pkv.kv.cache import RankCache
from p2pkv.links.base import LinkFactory
from p2pkv.log import RateLimit
from p2pkv.protocol.handshake import fit
from p2pkv.protocol.messages import BadMessage, Hello, Inspect, Report, UnknownPeer, decode
from p2pkv.protocol.state_machine import RemoteProtocolError

COPIES = (FillSend, ReceiveDone)
"""Effects that copy a message."""

TICK = 0.02
"""Seconds between two looks at what is under way."""

FENCE_SECONDS = 0.001
"""Seconds between two looks at the forward's fence while nothing else is awaited."""

HELD_SECONDS = 1.0
"""A turn that is so many seconds late: something held this rank up, and it could read no message."""

LONG_HELD_SECONDS = 5.0
"""A rank that was held up for so long logs it as a warning."""

QUIET_SECONDS = 60.0
"""Between two lines about connections that sent nothing wrong and ended: a monitor may make many."""


class StallFreeClock:
    """The time of a rank, which stands while something else holds the rank up (its interpreter's lock, its
    process, its machine): a silence counts against a peer only while its messages could have been read.
    `turned`: when the last turn began, by the owner's clock. `held`: seconds that this one has stood."""

    def __init__(self) -> None:
        self.turned: float | None = None
        self.held = 0.0
        self._due = 0.0

    def turn(self, now: float) -> float:
        """A turn begins; the time by this clock."""
        late = 0.0 if self.turned is None else now - self._due
        if late > HELD_SECONDS:
            self.held += late
            level = logging.WARNING if late > LONG_HELD_SECONDS else logging.DEBUG
            log.log(level, "this rank was held up for %.1f s; that time counts against no lease", late)
        self.turned = self._due = now
        return now - self.held

    def expect(self, pause: float) -> None:
        """The next turn is due so many seconds after the last one."""
        if self.turned is not None:
            self._due = self.turned + pause


class Tables(NamedTuple):
    """The handler of each command, message and effect, and of a peer that no message reaches. A message's is
    found by the class of the peer that sent it and its own; in `unowned` by its own, on any connection."""

    commands: dict[type, list[Handle]]
    messages: dict[tuple[type, type], Receive]
    unowned: dict[type, Receive]
    effects: dict[type, Handle]
    disconnected: dict[type, Handle]


class Core:
    """A rank's roles, and all that reaches them. It owns what it was made with, and closes that in `close`.

    The forward thread may use `do`, `revoke`, `events` and `steps`, any thread `do`. Only `revoke` waits, for
    gathers under way on the device. All else is for one thread, which may be the forward thread.

    Attributes:
        prefill, decode: its roles; None: it does not have that role.
        commands: what was ordered and is not carried out yet.
    """

    def __init__(
        self,
        hello: Hello,
        options: Options,
        cache: RankCache,
        links: LinkFactory,
        endpoint: Endpoint,
        on_event: Callable[[Event], None] | None = None,
        serving: bool = True,
    ) -> None:
        """`on_event` is called by the owner's thread with each event. `serving`: see Liveness."""
        self.commands: deque[Command] = deque()
        self._events: deque[Event] = deque()
        self._on_event = on_event
        links.announce_sends()
        if options.prefills and options.decodes:
            links.carry_both_ways()
        steps = Liveness(options.stall_seconds, serving)
        self.context = Context(hello, options, cache, links, endpoint, steps)
        self.prefill = PrefillRole(self.context) if options.prefills else None
        self.decode = DecodeRole(self.context) if options.decodes else None
        self.roles: list[Role] = [role for role in (self.prefill, self.decode) if role is not None]
        self.table = self._make_table()
        self.clock = StallFreeClock()
        self._poll_soon = False
        self._tick = Timer(self.context.timers, self._check)
        self._look = Timer(self.context.timers, self._check_peers)
        self._look.at(0.0)
        self._quiet = RateLimit(seconds=QUIET_SECONDS)
        self._trouble = ""
        self._given_up = False

    def _make_table(self) -> Tables:
        table = Tables({}, {}, {}, {SendMessage: self._send, Emit: self._emit}, {})
        for role in self.roles:
            for kind, handle in role.commands.items():
                table.commands.setdefault(kind, []).append(handle)
            table.messages.update({(role.peer, kind): take for kind, take in role.messages.items()})
            for kind, take in role.unowned.items():
                table.unowned.setdefault(kind, take)  # a rank that is P, too, refuses no Hello as a D does
            table.effects.update(role.effects)
            table.disconnected[role.peer] = role.peers.disconnected
        return table

    # The forward thread.

    @property
    def steps(self) -> Liveness:
        return self.context.steps

    @property
    def counters(self) -> Counters:
        return self.context.counters

    def do(self, command: Command) -> None:
        """Hand over one command; commands are carried out in order."""
        self.commands.append(command)

    def layers_per_message(self, tokens: int) -> int:
        """How many layers of so many tokens fill a message, on the average."""
        cache = self.context.cache
        return -(-self.context.options.chunk_bytes * cache.layer_count // max(1, cache.nbytes(tokens)))

    def revoke(self, keys: Iterable[str]) -> None:
        """These prompts' blocks will be overwritten: on return nothing reads them, and nothing will."""
        keys = list(keys)
        if not keys:
            return
        self.context.revoked.add(keys)
        self.context.copies.wait(keys)
        for key in keys:
            self.do(Revoked(key))

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    # The owner.

    def turn(self, now: float) -> None:
        """Take in messages and commands, move data, look at what is due. Never waits. What this raises is a
        fault of ours: the turn is lost. `now`: seconds of any clock that never goes back."""
        now, context, soon = self.clock.turn(now), self.context, False
        context.steps.held = self.clock.held
        self._check_connections(now)
        self._receive_messages(now)
        self._run_commands(now)
        for role in self.roles:
            role.peers.poll(now)
        self._apply(now)
        self._flush(now)
        for role in self.roles:
            soon = role.after(now) or soon
        context.copies.poll(now)
        self._apply(now)
        self._flush(now)
        self._poll_soon = soon or len(context.copies) > 0
        if context.idle_work:
            context.idle_work.popleft()()
        if context.timers.due <= now:
            due = context.timers.take_due(now)
            try:
                while due:
                    due[0].act(now)
                    self._apply(now)
                    del due[0]
            finally:
                for timer in due:  # an error of ours ends the turn: these are due again soon
                    timer.by(now + LOOK_SECONDS)
            self._flush(now)
        if self._tick.due > now + TICK and any(role.busy for role in self.roles):
            self._tick.at(now + TICK)

    def pause(self, now: float) -> float:
        """Seconds after which the next turn is due, unless a message or a command comes first."""
        if self.commands and self._blocked():
            # Each look at a fence is a call to the driver: look as often as at links only while one is busy.
            seconds = self._poll_pause() if self._poll_soon else FENCE_SECONDS
            pause = max(seconds, self.context.links.poll_seconds)
        elif self.commands or self.context.idle_work:
            pause = 0.0
        elif self._poll_soon:
            pause = self._poll_pause()
        else:
            pause = max(0.0, self.context.timers.due - (now - self.clock.held))
        self.clock.expect(pause)
        return pause

    def _poll_pause(self) -> float:
        """Seconds until a link may have done something; D reports a load as soon as its last copy is done."""
        links = self.context.links
        return links.poll_seconds if self.decode is not None and self.context.copies else links.pause()

    def leave(self, now: float, finish: bool = True) -> None:
        now -= self.clock.held
        for role in self.roles:
            role.leave(now, finish)
        self._apply(now)
        self._flush(now)

    @property
    def finished(self) -> bool:
        return all(role.finished for role in self.roles)

    @property
    def notified(self) -> bool:
        """Whether peers were sent the end of a transfer, and need time to read it."""
        return any(role.notified for role in self.roles)

    def close(self) -> None:
        """Notify peers, and close the links and the endpoint."""
        context, closes = self.context, [role.peers.close for role in self.roles]
        for step in (context.copies.close, *closes, context.links.close, context.endpoint.close):
            try:
                step()
            except Exception:
                log.exception("an error while this rank was closing, which goes on")

    # The parts of a turn.

    def _receive_messages(self, now: float) -> None:
        messages, effects = self.table.messages, self.context.effects
        for connection, data in self.context.endpoint.receive():
            try:
                message, peer = decode(data), connection.tag
                take = messages.get((type(peer), type(message)))
                if take is not None:
                    take(peer, message, now)
                else:
                    self._receive_unowned(connection, message, now)
            except (BadMessage, RemoteProtocolError) as error:
                self.counters.add("messages_bad" if isinstance(error, BadMessage) else "messages_refused")
                log.debug("a message of a peer is dropped: %s", error)
            if effects:
                self._apply(now)

    def _receive_unowned(self, connection: Connection, message: object, now: float) -> None:
        """A message that its peer may not send, or that comes on a connection of no peer."""
        if isinstance(message, Inspect):
            self._inspect(connection)
        elif isinstance(message, Report):
            pass
        elif (take := self.table.unowned.get(type(message))) is not None:
            take(connection, message, now)
        elif type(connection.tag) in self.table.disconnected:
            raise RemoteProtocolError(
                f"{type(message).__name__} is not for a rank of role {self.context.options.role}"
            )
        elif self.prefill is not None and not isinstance(message, UnknownPeer):
            # Two ranks of both roles would answer each other's UnknownPeer without end. What comes to a D is
            # late: of ranks of P that are not its peers any more.
            self.context.answer(connection, UnknownPeer())

    def _run_commands(self, now: float) -> None:
        commands = self.commands
        while commands and not self._blocked():
            command = commands.popleft()
            takers = self.table.commands.get(type(command))
            if takers is None:
                raise AssertionError(f"{command} is not for a rank of role {self.context.options.role}")
            for take in takers:
                take(command, now)
            self._apply(now)

    def _blocked(self) -> bool:
        """Whether the next command waits for the device."""
        head = self.commands[0]
        return isinstance(head, Computed) and not head.fence.ready()

    def _apply(self, now: float) -> None:
        """Do what was decided, and what follows from that, until nothing is left to do."""
        effects, outbox, table = self.context.effects, self.context.outbox, self.table.effects
        while effects:
            effect = effects.popleft()
            if outbox and (
                isinstance(effect, PostRemaining)
                or (isinstance(effect, COPIES) and self.context.blocks_thread(effect.nbytes))
            ):
                self._flush_outbox(now)  # peers copy meanwhile
            table[type(effect)](effect, now)

    def _send(self, effect: SendMessage, now: float) -> None:
        peer = effect.peer
        if peer.send(effect.message, now):
            self.context.outbox.append(peer)
        else:
            self.table.disconnected[type(peer)](peer, now)

    def _flush(self, now: float) -> None:
        """Send what is held for peers since this turn began, and do what follows from that."""
        while self.context.outbox:
            self._flush_outbox(now)
            self._apply(now)

    def _flush_outbox(self, now: float) -> None:
        outbox = self.context.outbox
        while outbox:
            peer = outbox.popleft()
            if not peer.flush():
                self.table.disconnected[type(peer)](peer, now)

    def _emit(self, effect: Emit, now: float) -> None:
        self._events.append(effect.event)
        if self._on_event is not None:
            self._on_event(effect.event)

    def _check_connections(self, now: float) -> None:
        for failure in self.context.endpoint.failures():
            self.counters.add("handshakes_failed")
            if failure.late:
                log.warning("%s It is dialed again while a request waits for it.", failure.reason)
            elif failure.connection is not None:
                peer = failure.connection.tag
                if self.decode is not None and isinstance(peer, PrefillPeer):
                    self.decode.peers.refused(peer, failure.reason, now)
                    self._apply(now)
            elif not failure.quiet:
                log.warning("%s", failure.reason)
            elif self._quiet.admits(now=now):
                log.warning("%s; logged once a minute", failure.reason)

    def _check(self, now: float) -> None:
        for role in self.roles:
            role.check(now)

    def _check_peers(self, now: float) -> None:
        self._look.at(now + LOOK_SECONDS)
        self._check_engine(now)
        for role in self.roles:
            role.look(now)

    def _check_engine(self, now: float) -> None:
        """Take in the engine core's beats. Log when it stops getting on, and when it gets on again."""
        steps, address = self.steps, self.context.hello.address
        paused_since = steps.paused_since
        steps.look(now)
        if self.prefill is not None and steps.paused_since != paused_since:
            self.prefill.transfers.paused(now)
        trouble = steps.trouble(now)
        if bool(trouble) != bool(self._trouble):
            if trouble:
                log.warning("%s renews no lease while this lasts; transfers may end: %s", address, trouble)
            else:
                log.warning("%s renews leases again: its engine runs again", address)
        self._trouble = trouble
        if steps.beat is not None and steps.beat.orphaned and not self._given_up:
            self._given_up = True
            log.error(
                f"{address} gives up what it holds: the process that started its engine core is gone, so no "
                "client can reach it. Engine core and workers live on; end them (docs/operations.md, "
                '"Engines without an HTTP server")'
            )
            self.leave(now + self.clock.held)

    def _inspect(self, connection: Connection) -> None:
        hello = self.context.hello
        values: dict[str, int | float | str] = {
            **self.counters.snapshot(),
            "role": self.context.options.role,
            "rank": hello.rank,
            "incarnation": hello.incarnation,
            "model": hello.model,
            "ranks": len(hello.addresses),
            "addresses": " ".join(hello.addresses),
            "instance": hello.instance,
            "link": hello.link,
            "protocol": hello.version,
            "fit": fit(hello),
            "p2pkv": __version__,
            "engine": self._trouble or ("paused" if self.steps.paused else "runs"),
            "engine_steps": self.steps.scheduled,
        }
        self.context.answer(connection, Report(values))
