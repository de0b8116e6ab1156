"""One of several workers that serve one port: a proxy like any other, but for where its pings come from.

The supervisor listens at the discovery address. Once a second, and as soon as there is a new instance, it
sends each worker the latest ping of every instance, with a number for the connection that it came on. So each
worker decides by itself which instances there are, as if they had connected to it; and one that begins has
all of them at once. What it answers to a ping goes back in the report.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from p2pkv.control.discovery import Ping

from .membership.instance import InstanceRole, PingSource
from .membership.registry import Registry


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker's process is given: its number, from 1 on, `of` how many, where it takes connections, and
    where the workers' own sockets are, see siblings.py."""

    number: int
    of: int
    addresses: tuple[tuple[socket.AddressFamily, Any], ...]
    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / str(self.number)

    @property
    def others(self) -> dict[int, Path]:
        numbers = range(1, self.of + 1)
        return {number: self.folder / str(number) for number in numbers if number != self.number}


class RepeatedPing(msgspec.Struct, frozen=True):
    """The latest ping of one instance, `at` a time of this host's monotonic clock, on a connection of this
    number, which has shown the members' key if it is one. `serial` grows with each ping."""

    connection: int
    member: bool
    serial: int
    ping: Ping
    at: float

    def now(self) -> Ping:
        """It, with the age that its report has by now."""
        if (work := self.ping.workload) is None:
            return self.ping
        age = work.age + max(0.0, time.monotonic() - self.at)
        return msgspec.structs.replace(self.ping, workload=msgspec.structs.replace(work, age=age))


Drains = list[tuple[InstanceRole, str, int, str]]
"""As Registry.drains has them."""


class Update(msgspec.Struct, frozen=True):
    """From the supervisor; `drains` are for a worker that does not serve yet, `stop` and `hurry` the first
    and the second signal."""

    pings: list[RepeatedPing]
    drains: Drains
    stop: bool = False
    hurry: bool = False


class WorkerReport(msgspec.Struct, frozen=True):
    """The answer to an update: whether it takes requests, what is drained here, and what it answers to pings,
    each with the number of its connection."""

    serving: bool
    drains: Drains
    answers: list[tuple[int, bytes]]


@dataclass(eq=False)
class RepeatedConnection:
    """A connection to the supervisor's discovery address, as a worker knows it; `serials` are of the latest
    pings on it, by instance."""

    member: bool
    send: Callable[[bytes], None]
    open: bool = True
    serials: dict[tuple[str, str, int], int] = field(default_factory=dict)

    def stands(self) -> bool:
        return self.open

    def answer(self, frame: bytes) -> bool:
        self.send(frame)
        return True


@dataclass(eq=False)
class WorkerState:
    """This process as one of several.

    Attributes:
        serving: it takes requests.
        updated: set once it knows which instances there are, and which of them are drained.
        stop, hurry: set when the supervisor asks for it.
    """

    config: WorkerConfig
    serving: bool = False
    updated: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    _updates: int = 0
    _connections: dict[int, RepeatedConnection] = field(default_factory=dict)
    _answers: list[tuple[int, bytes]] = field(default_factory=list)

    def serve(self) -> None:
        """From now on it takes requests."""
        self.serving = True

    def update(
        self, update: Update, registry: Registry, take: Callable[[Ping, PingSource], None]
    ) -> WorkerReport:
        """Takes in what is new."""
        for number in self._connections.keys() - {each.connection for each in update.pings}:
            self._connections.pop(number).open = False
        for each in update.pings:
            self._take(each, take)
        if not self.serving:
            registry.adopt_drains(update.drains)
        # The first one may have left the supervisor before it knew of a drain that missed this worker.
        self._updates += 1
        if self._updates > 1:
            self.updated.set()
        if update.stop:
            self.end()
        if update.hurry:
            self.hurry.set()
        answers, self._answers = self._answers, []
        return WorkerReport(self.serving, registry.drains(), answers)

    def end(self) -> None:
        """Stops, whether it serves or is still starting."""
        self.stop.set()
        self.updated.set()

    def _take(self, repeated: RepeatedPing, take: Callable[[Ping, PingSource], None]) -> None:
        number, ping = repeated.connection, repeated.ping
        if number not in self._connections:
            self._connections[number] = RepeatedConnection(
                repeated.member, lambda frame: self._answers.append((number, frame))
            )
        connection = self._connections[number]
        key = ping.type, ping.http_address, ping.dp_rank
        if connection.serials.get(key) != repeated.serial:
            connection.serials[key] = repeated.serial
            take(repeated.now(), connection)
