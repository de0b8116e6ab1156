"""One rank at work: its thread, what the forward thread may call, and what it hears back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from p2pkv.config import Options
from p2pkv.control.endpoint import Endpoint
from p2pkv.control.security import members_of
from p2pkv.device import own_stream
from p2pkv.engine.commands import Command, Event
from p2pkv.engine.context import log
from p2pkv.engine.core import Core
from p2pkv.kv.cache import RankCache
from p2pkv.links.base import LinkFactory
from p2pkv.pairing import Address
from p2pkv.protocol.messages import Hello

FINISH_SECONDS = 2.0
"""How long a rank that is stopped goes on with what is under way."""

LAST_WORDS_SECONDS = 0.3
"""How long peers may take to read that the rest has ended: what they have not read when we close is lost."""

STOP_SECONDS = FINISH_SECONDS + 3.0


class Rank(Core):
    """A Core with a thread of its own. Listens from the start on; `stop` it.

    Raises PortTaken or NoCurve with a sentence.
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
        self._thread = threading.Thread(
            target=self._main, name=f"p2pkv-{hello.role}{hello.rank}", daemon=True
        )
        self._thread.start()

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

    # The engine thread.

    def _emit(self, event: Event) -> None:
        super()._emit(event)
        if not self._happened.is_set():  # else the next `events` is still to come, and will find this one
            self._happened.set()
            self._call()

    def _main(self) -> None:
        with own_stream(self.context.cache.device):
            while not self._stopping:
                self._guarded(self._round)
            self.finish()
            self.close()

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
        while self.told and time.monotonic() < end:
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
