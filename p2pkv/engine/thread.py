"""The thread of a rank: it gives a `Core` its turns, and carries what the forward thread orders to it."""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from p2pkv.config import Options
from p2pkv.control.endpoint import Endpoint, PortTaken, sleep_precisely
from p2pkv.control.security import members_of
from p2pkv.device import own_stream
from p2pkv.engine.commands import Command, Event, Loaded, PrefetchComplete
from p2pkv.engine.context import log
from p2pkv.engine.core import TICK, Core
from p2pkv.engine.core_liveness import LATE_BEAT_SECONDS
from p2pkv.kv.cache import RankCache
from p2pkv.links.base import LinkFactory
from p2pkv.links.watchdog import Watchdog
from p2pkv.pairing import Address
from p2pkv.protocol.messages import Hello

FINISH_SECONDS = 2.0
"""How long a rank that is stopped goes on with what is under way."""

NOTIFY_SECONDS = 0.3
"""How long peers may take to read that the rest has ended: what they have not read when we close is lost."""

STOP_SECONDS = FINISH_SECONDS + 3.0


class Rank:
    """A Core with a thread of its own. Listens from the start on; `stop` it. `failure`: a sentence: what
    ended the thread before `stop`. Raises PortTaken, NoCurve or RuntimeError with a sentence."""

    def __init__(
        self, hello: Hello, options: Options, cache: RankCache, links: LinkFactory, serving: bool = True
    ) -> None:
        """`serving`: False: vLLM has yet to warm up; see Liveness."""
        cache.warm_up()
        address = Address.parse(hello.address)
        members, allowed = members_of(options.secret), options.allowed_peers
        try:
            endpoint = Endpoint(address, members, allowed, options.lease_seconds)
        except PortTaken as error:
            raise PortTaken(
                f"{error}; {options.ports}: give each instance of a host a kv_port of its own, and leave as "
                "many ports behind it free as it has ranks in all its engines"
            ) from None
        self._event_set = threading.Event()
        self.on_event: Callable[[Event], None] = lambda event: None
        """The engine thread calls this with the first event after each `events`, and each `Loaded` and
        `PrefetchComplete`."""
        self.core = core = Core(hello, options, cache, links, endpoint, self._report, serving=serving)
        self.context, self.steps, self.counters = core.context, core.steps, core.counters
        self._commands = core.commands
        self._endpoint = endpoint
        self._asleep = False
        self._stopping = False
        self.failure = ""
        self._begun = threading.Event()
        self._started = time.monotonic()
        self._watchdog = Watchdog(links, options.lease_seconds)
        name = f"p2pkv-{options.role}{hello.rank}"
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self._begun.wait()
        if self.failure:
            raise RuntimeError(self.failure)

    # The forward thread.

    def do(self, command: Command) -> None:
        self._commands.append(command)
        if self._asleep:
            self._endpoint.wake()

    def layers_per_message(self, tokens: int) -> int:
        return self.core.layers_per_message(tokens)

    def revoke(self, keys: Iterable[str]) -> None:
        self.core.revoke(keys)
        if self._asleep:
            self._endpoint.wake()

    def events(self) -> list[Event]:
        self._event_set.clear()  # before the look: what happens later ends the next wait
        return self.core.events()

    def wait_for_event(self, seconds: float) -> None:
        """Wait for a new event, `seconds` at most, with the interpreter's lock released."""
        self._event_set.wait(seconds)

    def stop(self) -> None:
        """End the thread, the sockets and the links, by a deadline. Idempotent. P first pushes what it has
        computed and D waits for, in FINISH_SECONDS at most; all else ends at once, with a reason to peers."""
        self._stopping = True
        self._endpoint.wake()
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.error("the thread %s did not end in %g s", self._thread.name, STOP_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def trouble(self) -> str:
        """Why no new requests should come to this instance, a sentence; "" if they may. For any thread."""
        if self.failure or not self.alive:
            return self.failure or "its engine thread has ended"
        now, clock, steps = time.monotonic(), self.core.clock, self.core.steps
        if now - (clock.turned or self._started) > steps.stall:
            return f"its engine thread has stood still for more than {steps.stall:g} s"
        return steps.trouble(now - clock.held, silence=min(steps.stall, LATE_BEAT_SECONDS))

    # The engine thread.

    def _report(self, event: Event) -> None:
        known = self._event_set.is_set()  # then the next `events` is still to come, and will find this one
        self._event_set.set()
        if not known or isinstance(event, Loaded | PrefetchComplete):
            self.on_event(event)

    def _main(self) -> None:
        sleep_precisely()
        try:
            with own_stream(self.context.cache.device):
                try:
                    self._begun.set()
                    while not self._stopping:
                        self._guarded(self._round)
                    self.finish()
                    self._close()
                except BaseException as error:
                    self._fail(error)
        except BaseException as error:
            self._fail(error)
        finally:
            self._watchdog.close()
            self._begun.set()

    def _fail(self, error: BaseException) -> None:
        # No transfer would ever end, so the next step of the engine fails (`failure`).
        self.failure = f"p2pkv's engine thread has ended: {error!r}; restart this instance"
        log.critical("%s: %s", self.context.hello.address, self.failure, exc_info=True)
        self._close()  # so peers notice at once, and nothing on the device waits for one of them

    def finish(self) -> None:
        """Carry out what was ordered before the stop, then end by a deadline what can end well."""
        hurried = partial(self._round, TICK)
        end, left = time.monotonic() + FINISH_SECONDS, False
        while time.monotonic() < end and not (left and self.core.finished):
            self._guarded(hurried)
            if not left and not self.core.commands:
                left = True
                self._guarded(lambda: self.core.leave(time.monotonic()))
        self._guarded(lambda: self.core.leave(time.monotonic(), finish=False))
        end = time.monotonic() + NOTIFY_SECONDS
        while self.core.notified and time.monotonic() < end:
            self._guarded(hurried)

    def _guarded(self, act: Callable[[], None]) -> None:
        """A fault of ours in one turn must not end the thread: leases end what it broke."""
        try:
            act()
        except Exception:
            log.exception("an error in p2pkv's engine thread, which goes on; what broke ends after a lease")

    def _round(self, most: float = inf) -> None:
        self._asleep = True  # before the look at the commands: who adds one later wakes us
        self._endpoint.wait(min(most, self.core.pause(time.monotonic())))
        self._asleep = False
        with self._watchdog.turn():
            self.core.turn(time.monotonic())

    def _close(self) -> None:
        with self._watchdog.turn():
            self.core.close()
