"""One rank at work: its thread, what the forward thread may call, and what it hears back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from p2pkv.config import Options
from p2pkv.control.endpoint import Endpoint, Line
from p2pkv.control.members import members_of
from p2pkv.engine.commands import After, Command, Computed, Event, Revoked
from p2pkv.engine.consumer import Consumer
from p2pkv.engine.context import Context, log
from p2pkv.engine.producer import Producer
from p2pkv.engine.steps import Steps
from p2pkv.links.base import LinkFactory
from p2pkv.pages.device import own_stream
from p2pkv.pages.geometry import PagedCache
from p2pkv.pairing import Address
from p2pkv.protocol.machine import RemoteProtocolError
from p2pkv.protocol.messages import BadMessage, Hello, Inspect, Report, decode

TICK, IDLE_TICK = 0.02, 0.25
"""Seconds between two looks at deadlines, with something under way and without."""

SOON = 0.001
"""Seconds to sleep while a link has something under way; messages end the sleep at once."""

FINISH_SECONDS = 2.0
"""How long a rank that is stopped goes on with what is under way."""

LAST_WORDS_SECONDS = 0.3
"""How long peers may take to read that the rest has ended: what they have not read when we close is lost."""

STOP_SECONDS = FINISH_SECONDS + 3.0

QUIET_SECONDS = 60.0
"""Between two lines about connections that said nothing wrong and went: a monitor may make many."""


class Rank:
    """Listens from the start on; `stop` it. Raises PortTaken or NoCurve with a sentence.

    `do`, `revoke`, `events` and `steps` are for the forward thread; none of them waits for the
    network, and only `revoke` waits for anything: the device's gathers that are under way, if any.
    """

    def __init__(self, hello: Hello, options: Options, cache: PagedCache, links: LinkFactory) -> None:
        cache.warm_up()
        self.steps = Steps(options.stall_seconds)
        self._events: deque[Event] = deque()
        self._commands: deque[Command] = deque()
        endpoint = Endpoint(Address.parse(hello.address), members_of(options.secret), options.allowed_peers)
        self._ctx = Context(hello, options, cache, links, endpoint, self.steps, self._events.append)
        self._half = Producer(self._ctx) if hello.role == "P" else Consumer(self._ctx)
        self.counters = self._ctx.counters
        self._next_quiet = 0.0
        self._soon = False
        self._next_tick = 0.0
        self._asleep = False
        self._stopping = False
        self._thread = threading.Thread(
            target=self._main, name=f"p2pkv-{hello.role}{hello.rank}", daemon=True
        )
        self._thread.start()

    # The forward thread.

    def do(self, command: Command) -> None:
        """Hand over one command; commands are carried out in order."""
        self._commands.append(command)
        if self._asleep:
            self._ctx.endpoint.wake()

    def layers_per_message(self, tokens: int) -> int:
        """How many layers of so many tokens fill a message."""
        cache, options = self._ctx.cache, self._ctx.options
        layer = max(1, tokens * cache.heads * cache.row_bytes // cache.unit_tokens)
        return cache.layers if options.whole_request else max(1, -(-options.chunk_bytes // layer))

    def revoke(self, keys: Iterable[str]) -> None:
        """These prompts' pages will be overwritten: on return nothing reads them, and nothing will."""
        keys = list(keys)
        if not keys:
            return
        with self._ctx.reading:
            self._ctx.revoked.update(keys)
        self._ctx.copies.wait(keys)
        for key in keys:
            self.do(Revoked(key))

    def events(self) -> list[Event]:
        """What has happened since the last call."""
        out: list[Event] = []
        while self._events:
            out.append(self._events.popleft())
        return out

    def stop(self) -> None:
        """End the thread, the sockets and the links, by a deadline. Idempotent.

        P first pushes what it has computed and D waits for, for FINISH_SECONDS at most; all else ends at
        once, on both sides, and peers are told why.
        """
        self._stopping = True
        self._ctx.endpoint.wake()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.error("the thread %s did not end in %g s", self._thread.name, STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # The engine thread.

    def _main(self) -> None:
        with own_stream(self._ctx.cache.device):
            while not self._stopping:
                self._round()
            self._finish()
            self._close()

    def _finish(self) -> None:
        """Carry out what was ordered before the stop, then end by a deadline what can end well."""
        end, left = time.monotonic() + FINISH_SECONDS, False
        while time.monotonic() < end and not (left and self._half.over):
            self._round(soon=True)
            if not left and not self._commands:
                left = True
                self._guarded(lambda: self._half.leave(time.monotonic()))
        self._guarded(lambda: self._half.leave(time.monotonic(), finish=False))
        end = time.monotonic() + LAST_WORDS_SECONDS
        while self._half.told and time.monotonic() < end:
            self._round(soon=True)

    def _round(self, soon: bool = False) -> None:
        if soon:
            self._next_tick = min(self._next_tick, time.monotonic() + TICK)
        self._guarded(self._turn)

    def _guarded(self, act: Callable[[], None]) -> None:
        """A fault of ours in one round must not end the thread: leases end what it broke."""
        try:
            act()
        except Exception:
            log.exception("an error in p2pkv's engine thread; it goes on")
            self._soon = False

    def _turn(self) -> None:
        self._sleep()
        now = time.monotonic()
        self._look_after_connections(now)
        self._listen(now)
        self._obey(now)
        soon = self._half.pump(now)
        self._ctx.copies.poll(now)
        self._soon = soon or len(self._ctx.copies) > 0
        if now >= self._next_tick:
            self._half.tick(now)
            self._next_tick = now + IDLE_TICK
        if not self._half.idle:
            self._next_tick = min(self._next_tick, now + TICK)

    def _sleep(self) -> None:
        self._asleep = True
        if self._commands:
            seconds = SOON if self._blocked() else 0.0
        else:
            seconds = SOON if self._soon else max(0.0, self._next_tick - time.monotonic())
        self._ctx.endpoint.wait(seconds)
        self._asleep = False

    def _listen(self, now: float) -> None:
        for line, data in self._ctx.endpoint.receive():
            try:
                message = decode(data)
                if isinstance(message, Inspect):
                    self._inspect(line)
                elif not isinstance(message, Report):
                    self._half.receive(line, message, now)
            except BadMessage as error:
                self._ctx.counters.add("messages_bad")
                log.debug("dropped: %s", error)
            except RemoteProtocolError as error:
                self._ctx.counters.add("messages_refused")
                log.debug("dropped: %s", error)

    def _look_after_connections(self, now: float) -> None:
        for line, reason, quiet in self._ctx.endpoint.troubles():
            self._ctx.counters.add("handshakes_failed")
            if line is not None:
                self._half.unreachable(line, reason, now)
            elif not quiet:
                log.warning("%s", reason)
            elif now >= self._next_quiet:
                log.warning("%s; said once a minute", reason)
                self._next_quiet = now + QUIET_SECONDS

    def _inspect(self, line: Line) -> None:
        hello = self._ctx.hello
        values: dict[str, int | float | str] = {**self.counters.snapshot()}
        values |= {
            "role": hello.role,
            "rank": hello.rank,
            "incarnation": hello.incarnation,
            "model": hello.model,
        }
        self._ctx.tell(line, Report(values))

    def _blocked(self) -> bool:
        """Whether the next command waits for the device."""
        head = self._commands[0]
        return isinstance(head, Computed) and not head.fence.ready()

    def _obey(self, now: float) -> None:
        while self._commands and not self._blocked():
            command = self._commands.popleft()
            if isinstance(command, After):
                command.fence.follow()
            else:
                self._half.command(command, now)

    def _close(self) -> None:
        for step in (
            self._ctx.copies.close,
            self._half.close,
            self._ctx.links.close,
            self._ctx.endpoint.close,
        ):
            try:
                step()
            except Exception:
                log.exception("while closing")
