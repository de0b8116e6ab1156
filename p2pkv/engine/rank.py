"""One rank at work: its thread, what the forward thread may call, and what it hears back."""

from __future__ import annotations

import threading
import time

from p2pkv.config import Options
from p2pkv.control.endpoint import Endpoint
from p2pkv.control.members import members_of
from p2pkv.engine.commands import Command
from p2pkv.engine.context import log
from p2pkv.engine.core import Core
from p2pkv.links.base import LinkFactory
from p2pkv.pages.device import own_stream
from p2pkv.pages.geometry import PagedCache
from p2pkv.pairing import Address
from p2pkv.protocol.messages import Hello

STOP_SECONDS = 5.0


class Rank(Core):
    """A Core with a thread of its own. Listens from the start on; `stop` it.

    Raises PortTaken or NoCurve with a sentence.
    """

    def __init__(self, hello: Hello, options: Options, cache: PagedCache, links: LinkFactory) -> None:
        cache.warm_up()
        place = Address.parse(hello.address)
        endpoint = Endpoint(place, members_of(options.secret), options.allowed_peers)
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
            self._ctx.endpoint.wake()

    def stop(self) -> None:
        """End the thread, the sockets and the links, by a deadline. Idempotent."""
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
            self._loop()
            self.close()

    def _loop(self) -> None:
        while not self._stopping:
            try:
                self._sleep()
                self.turn(time.monotonic())
            except Exception:
                # A fault of ours in one turn must not end the thread: leases end what it broke.
                log.exception("an error in p2pkv's engine thread; it goes on")

    def _sleep(self) -> None:
        self._asleep = True  # before the look at the commands: who adds one later wakes us
        self._ctx.endpoint.wait(self.pause(time.monotonic()))
        self._asleep = False
