"""One rank: what it does in a turn (`Core`), and the thread that gives it turns (`Rank`).

`Core` has no thread and no clock: whoever owns it gives it turns, and says what time it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from p2pkv import __version__
from p2pkv.config import Options
from p2pkv.control.endpoint import Connection, Endpoint
from p2pkv.control.security import members_of
from p2pkv.device import own_stream
from p2pkv.engine.commands import Command, Computed, Event, Revoked
from p2pkv.engine.consumer import Consumer
from p2pkv.engine.context import Context, log
from p2pkv.engine.liveness import LATE_BEAT_SECONDS, Liveness
from p2pkv.engine.producer import Producer
from p2pkv.kv.cache import RankCache
from p2pkv.links.base import LinkFactory
from p2pkv.log import RateLimit
from p2pkv.pairing import Address
from p2pkv.protocol.handshake import fit
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.messages import BadMessage, Hello, Inspect, Report, decode

TICK, IDLE_TICK = 0.02, 0.25
"""Seconds between two looks at deadlines: with something under way, and at most. With nothing under way the
next look is when the next deadline ends."""

HELD_SECONDS = 1.0
"""A turn so much later than it was due: something held this rank up, and it could hear nobody."""

LONG_HELD_SECONDS = 5.0
"""From here on the log says so."""

QUIET_SECONDS = 60.0
"""Between two lines about connections that said nothing wrong and went: a monitor may make many."""


class Core:
    """P's half of a rank or D's, and all that reaches it. It owns what it was made with: see `close`.

    `context` is what the rank works with, and `half` its part of the work: for the owner's thread alone.

    `do`, `revoke`, `events` and `steps` are for the forward thread, `do` for others, too; none of them waits
    for the network, and only `revoke` waits for anything: the device's gathers that are under way, if any.
    All else is for one thread, which may be the same.
    """

    def __init__(
        self, hello: Hello, options: Options, cache: RankCache, links: LinkFactory, endpoint: Endpoint
    ) -> None:
        self.steps = Liveness(options.stall_seconds)
        self._events: deque[Event] = deque()
        self._commands: deque[Command] = deque()
        self.context = Context(hello, options, cache, links, endpoint, self.steps, self._emit)
        self.half = Producer(self.context) if hello.role == "P" else Consumer(self.context)
        self.counters = self.context.counters
        self._soon = False
        self._next_tick = 0.0
        self._quiet = RateLimit(seconds=QUIET_SECONDS)
        self._turned: float | None = None
        self._due = 0.0
        self._held = 0.0
        self._trouble = ""
        self._given_up = False

    # The forward thread.

    def do(self, command: Command) -> None:
        """Hand over one command; commands are carried out in order."""
        self._commands.append(command)

    def layers_per_message(self, tokens: int) -> int:
        """How many layers of so many tokens fill a message."""
        return max(1, -(-self.context.options.chunk_bytes // self.context.cache.layer_bytes(tokens)))

    def revoke(self, keys: Iterable[str]) -> None:
        """These prompts' blocks will be overwritten: on return nothing reads them, and nothing will."""
        keys = list(keys)
        if not keys:
            return
        with self.context.reading:
            self.context.revoked.update(keys)
        self.context.copies.wait(keys)
        for key in keys:
            self.do(Revoked(key))

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        out: list[Event] = []
        while self._events:
            out.append(self._events.popleft())
        return out

    @property
    def ordered(self) -> bool:
        """Whether a command waits to be carried out."""
        return bool(self._commands)

    @property
    def news(self) -> int:
        """How many events the next `events` returns."""
        return len(self._events)

    def _emit(self, event: Event) -> None:
        """Something has happened; the engine thread says so."""
        self._events.append(event)

    # The owner.

    def turn(self, now: float) -> None:
        """Hear what has come in, do what was ordered, move data, look at deadlines. Never waits.

        `now`: seconds of any clock that never goes back. What this raises is a fault of ours: the turn is
        lost, and the next one goes on.

        While this rank is held up (its interpreter's lock, its process, its machine), its own clock stands:
        a silence counts against a peer only while it could have been heard.
        """
        now = self._listening(now)
        self._soon = False
        self._look_after_connections(now)
        self._listen(now)
        self._obey(now)
        soon = self.half.pump(now)
        self.context.copies.poll(now)
        self._soon = soon or len(self.context.copies) > 0
        if now >= self._next_tick:
            self._look_at_engine(now)
            self.half.tick(now)
            self._next_tick = now + IDLE_TICK
        due = max(self.half.due, now + TICK) if self.half.idle else now + TICK
        self._next_tick = min(self._next_tick, due)

    def pause(self, now: float) -> float:
        """Seconds after which the next turn is due, unless a message or a command comes first."""
        if self.ordered:
            pause = self.context.links.poll_seconds if self._blocked() else 0.0
        elif self._soon:
            pause = self.context.links.poll_seconds
        else:
            pause = max(0.0, self._next_tick - (now - self._held))
        if self._turned is not None:
            self._due = self._turned + pause
        return pause

    def hurry(self, now: float) -> None:
        """Look at deadlines soon, although nothing may be under way."""
        self._next_tick = min(self._next_tick, now - self._held + TICK)

    def leave(self, now: float, finish: bool = True) -> None:
        """Take on nothing new, and end what cannot be finished now; without `finish` everything."""
        self.half.leave(now - self._held, finish)

    @property
    def over(self) -> bool:
        """Whether nothing is under way."""
        return self.half.over

    @property
    def notified(self) -> bool:
        """Whether peers were told that something has ended, and need time to read it."""
        return self.half.notified

    def close(self) -> None:
        """Say goodbye, and close the links and the endpoint."""
        for step in (
            self.context.copies.close,
            self.half.close,
            self.context.links.close,
            self.context.endpoint.close,
        ):
            try:
                step()
            except Exception:
                log.exception("while closing")

    # The parts of a turn.

    def _listening(self, now: float) -> float:
        """`now` by the clock that stands while this rank is held up, in a turn or between two."""
        late = 0.0 if self._turned is None else now - self._due
        if late > HELD_SECONDS:
            self._held += late
            self.steps.held = self._held
            level = logging.WARNING if late > LONG_HELD_SECONDS else logging.DEBUG
            log.log(level, "this rank was held up for %.1f s, which count against nobody", late)
        self._turned = self._due = now
        return now - self._held

    def _look_at_engine(self, now: float) -> None:
        """Take in the engine core's beats. Log when it stops getting on, and when it gets on again."""
        self.steps.look(now)
        trouble = self.steps.trouble(now)
        if bool(trouble) != bool(self._trouble):
            if trouble:
                log.warning("%s renews no lease any more: %s", self.context.hello.address, trouble)
            else:
                log.warning("%s renews leases again: its engine gets on", self.context.hello.address)
        self._trouble = trouble
        if self.steps.orphaned and not self._given_up:
            self._given_up = True
            log.error(
                "%s gives up what it holds: the process that started its engine core is gone, so no "
                "client can reach it. Engine core and workers live on; end them (docs/operations.md, "
                '"Engines without an HTTP server")',
                self.context.hello.address,
            )
            self.half.leave(now)

    def _listen(self, now: float) -> None:
        for connection, data in self.context.endpoint.receive():
            try:
                message = decode(data)
                if isinstance(message, Inspect):
                    self._inspect(connection)
                elif not isinstance(message, Report):
                    self.half.receive(connection, message, now)
            except BadMessage as error:
                self.context.counters.add("messages_bad")
                log.debug("dropped: %s", error)
            except RemoteProtocolError as error:
                self.context.counters.add("messages_refused")
                log.debug("dropped: %s", error)

    def _look_after_connections(self, now: float) -> None:
        for failure in self.context.endpoint.failures():
            self.context.counters.add("handshakes_failed")
            if failure.late:
                log.warning("%s It is dialed again while a request waits for it.", failure.reason)
            elif failure.connection is not None:
                self.half.unreachable(failure.connection, failure.reason, now)
            elif not failure.quiet:
                log.warning("%s", failure.reason)
            elif self._quiet.admits(now=now):
                log.warning("%s; said once a minute", failure.reason)

    def _inspect(self, connection: Connection) -> None:
        hello = self.context.hello
        values: dict[str, int | float | str] = {**self.counters.snapshot()}
        values |= {
            "role": hello.role,
            "rank": hello.rank,
            "incarnation": hello.incarnation,
            "model": hello.model,
            "ranks": len(hello.addresses),
            "link": hello.link,
            "protocol": hello.version,
            "fit": fit(hello),
            "p2pkv": __version__,
            "engine": self._trouble or ("paused" if self.steps.paused else "runs"),
            "engine_steps": self.steps.scheduled,
        }
        self.context.tell(connection, Report(values))

    def _blocked(self) -> bool:
        """Whether the next command waits for the device."""
        head = self._commands[0]
        return isinstance(head, Computed) and not head.fence.ready()

    def _obey(self, now: float) -> None:
        while self.ordered and not self._blocked():
            self.half.command(self._commands.popleft(), now)


# The thread.


FINISH_SECONDS = 2.0
"""How long a rank that is stopped goes on with what is under way."""

LAST_WORDS_SECONDS = 0.3
"""How long peers may take to read that the rest has ended: what they have not read when we close is lost."""

STOP_SECONDS = FINISH_SECONDS + 3.0


class Rank(Core):
    """A Core with a thread of its own. Listens from the start on; `stop` it.

    Raises PortTaken, NoCurve or RuntimeError with a sentence.

    Attributes:
        failure: what ended the thread before `stop`, in words; "" while nothing has.
    """

    def __init__(self, hello: Hello, options: Options, cache: RankCache, links: LinkFactory) -> None:
        cache.warm_up()
        place = Address.parse(hello.address)
        endpoint = Endpoint(place, members_of(options.secret), options.allowed_peers, options.lease_seconds)
        self._happened = threading.Event()
        self._call: Callable[[], None] = _nothing
        super().__init__(hello, options, cache, links, endpoint)
        self._asleep = False
        self._stopping = False
        self.failure = ""
        self._begun = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(
            target=self._main, name=f"p2pkv-{hello.role}{hello.rank}", daemon=True
        )
        self._thread.start()
        self._begun.wait()
        if self.failure:
            raise RuntimeError(self.failure)

    # The forward thread.

    def do(self, command: Command) -> None:
        """Hand over one command; commands are carried out in order."""
        super().do(command)
        if self._asleep:
            self.context.endpoint.wake()

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        self._happened.clear()  # before the look: what happens later ends the next wait
        return super().events()

    def wait_for_event(self, seconds: float) -> None:
        """Wait until something has happened since the last `events`, for so long at most, lock released."""
        self._happened.wait(seconds)

    def call_on_event(self, call: Callable[[], None]) -> None:
        """The engine thread calls this when something has happened, once between two calls of `events`."""
        self._call = call

    def stop(self) -> None:
        """End the thread, the sockets and the links, by a deadline. Idempotent.

        P first pushes what it has computed and D waits for, for FINISH_SECONDS at most; all else ends at
        once, on both sides, and peers are told why.
        """
        self._stopping = True
        self.context.endpoint.wake()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.error("the thread %s did not end in %g s", self._thread.name, STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def trouble(self) -> str:
        """Why no new requests should come to this instance, in words; "" if they may. For any thread."""
        if self.failure or not self.alive:
            return self.failure or "its engine thread has ended"
        now = time.monotonic()
        if now - (self._turned or self._started) > self.steps.stall:
            return f"its engine thread has stood still for more than {self.steps.stall:g} s"
        return self.steps.trouble(now - self._held, silence=min(self.steps.stall, LATE_BEAT_SECONDS))

    # The engine thread.

    def _emit(self, event: Event) -> None:
        super()._emit(event)
        if not self._happened.is_set():  # else the next `events` is still to come, and will find this one
            self._happened.set()
            self._call()

    def _main(self) -> None:
        try:
            with own_stream(self.context.cache.device):
                self._begun.set()
                while not self._stopping:
                    self._guarded(self._round)
                self.finish()
                self.close()
        except BaseException as error:
            # No transfer would ever end, so the next step of the engine fails (`failure`).
            self.failure = f"p2pkv's engine thread has ended: {error!r}; restart this instance"
            log.critical("%s: %s", self.context.hello.address, self.failure, exc_info=True)
            self.close()  # so peers notice at once
        finally:
            self._begun.set()

    def finish(self) -> None:
        """Carry out what was ordered before the stop, then end by a deadline what can end well."""
        end, left = time.monotonic() + FINISH_SECONDS, False
        while time.monotonic() < end and not (left and self.over):
            self._guarded(self._hurried)
            if not left and not self.ordered:
                left = True
                self._guarded(lambda: self.leave(time.monotonic()))
        self._guarded(lambda: self.leave(time.monotonic(), finish=False))
        end = time.monotonic() + LAST_WORDS_SECONDS
        while self.notified and time.monotonic() < end:
            self._guarded(self._hurried)

    def _guarded(self, act: Callable[[], None]) -> None:
        """A fault of ours in one turn must not end the thread: leases end what it broke."""
        try:
            act()
        except Exception:
            log.exception("an error in p2pkv's engine thread; it goes on")

    def _hurried(self) -> None:
        self.hurry(time.monotonic())
        self._round()

    def _round(self) -> None:
        self._sleep()
        self.turn(time.monotonic())

    def _sleep(self) -> None:
        self._asleep = True  # before the look at the commands: who adds one later wakes us
        self.context.endpoint.wait(self.pause(time.monotonic()))
        self._asleep = False


def _nothing() -> None: ...
