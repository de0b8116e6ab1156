"""Which instances there are, by their pings, their /health and the list on the command line.

This package needs no proxy: give a `Membership` an aiohttp session, have it `listen`, and `run` it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import aiohttp

from p2pkv.control.discovery import Ping
from p2pkv.control.security import Members

from .instance import PingSource
from .listed import ListedInstance, ListedWatch
from .listener import Listener
from .partner_lists import PartnerLists
from .prober import Prober
from .registry import Registry


class Membership:
    """Keeps one registry up to date, and tells D's which P's they may be paired with. The session is used to
    ask instances, and not closed here; `clock`: monotonic seconds; `listeners`: the oldest first."""

    def __init__(self, session: aiohttp.ClientSession, registry: Registry) -> None:
        self.registry, self.clock = registry, time.monotonic
        self.prober = Prober(session, self.registry, self.clock)
        self.partners = PartnerLists(self.registry)
        self._session = session
        self.listeners: list[Listener] = []
        self._watches: list[ListedWatch] = []

    def take(self, ping: Ping, source: PingSource) -> None:
        """Takes in one ping, from a discovery socket or made up for a listed instance."""
        now = self.clock()
        if self.registry.observe(ping, now, source) is not None:
            self.prober.wakeup.set()
        self.partners.answer(ping, source, now)

    def on_change(self, call: Callable[[], None]) -> None:
        """From now on, `call` whenever there may be instances for waiting requests."""
        self.prober.changed = call

    def listen(self, endpoint: str, members: Members | None = None) -> Listener:
        """Takes pings at this ZMQ endpoint, while it runs. Raises OSError if it cannot be bound."""
        self.listeners.append(Listener(endpoint, self.take, members))
        return self.listeners[-1]

    def watch(self, listed: Sequence[ListedInstance], members: Members | None = None) -> None:
        """While it runs, keeps these instances registered without pings, as long as their /health answers."""
        self._watches += (
            ListedWatch(each, self._session, self.registry, self.take, members, self.clock) for each in listed
        )

    async def run(self) -> None:
        """Runs all parts until cancelled."""
        members: list[Prober | Listener | ListedWatch] = [self.prober, *self.listeners, *self._watches]
        await asyncio.gather(*(each.run() for each in members))

    def close(self) -> None:
        """Frees the ports. Idempotent."""
        for each in self.listeners:
            each.close()
