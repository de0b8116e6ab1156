"""The control plane of a run in one thread: what p2pkv sees of ZMQ and TCP, on a virtual clock.

A connection keeps the order of messages and loses none while it lives. When it ends, what is on its way is
lost, and each end hears of that in its own time. It may be held up, or deaf: open, and silent for ever.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from virtual.clock import Clock

from p2pkv.control.endpoint import LASTING, ConnectionFailure
from p2pkv.control.security import HANDSHAKE_SECONDS
from p2pkv.pairing import Address

LATENCY = 0.0003
"""Mean seconds that a message takes."""

RETRY, LAST_RETRY = 0.02, 1.0
"""libzmq's pauses between two tries of one dial."""

PAST = 40
"""Delivered messages of a way that may come again."""

NOTICED = 0.2
"""Most seconds in which an end hears that its connection has gone."""


class Line:
    """One end of a connection, as p2pkv's own Connection; the dialing end has an `address`."""

    def __init__(self, address: Address | None) -> None:
        self.address = address
        self.tag: object = None
        self.since = 0.0
        self.refuses = 0  # so many messages find the queue full
        self.way: Way | None = None
        self.dialing = False
        self._several = False
        self._held: list[bytes] = []

    def assign(self, owner: object) -> None:
        self.tag = owner

    @property
    def reached(self) -> bool:
        """Whether the handshake of a dialed connection is over."""
        return self.way is not None

    @property
    def shut(self) -> bool:
        return self.way is None and not self.dialing

    def send(self, data: bytes) -> bool:
        if self._held and not self.flush():
            return False
        if self.way is None:
            return False
        if self.refuses > 0:
            self.refuses -= 1
            return False
        self.way.send(data)
        return True

    @property
    def holding(self) -> int:
        return len(self._held)

    def takes_several(self, does: bool) -> None:
        self._several = does

    def hold(self, data: bytes) -> bool:
        if not self._several:
            return self.send(data)
        self._held.append(data)
        return self.way is not None

    def flush(self) -> bool:
        held, self._held = self._held, []
        sent = [self.send(data) for data in held]
        return all(sent)


@dataclass(eq=False)
class Way:
    """One direction of a connection. `target` hears it on `connection`."""

    network: Network
    source: Endpoint
    target: Endpoint
    connection: Line
    other: Way | None = None
    deaf: bool = False
    dead: bool = False
    _flying: deque[tuple[float, bytes]] = field(default_factory=deque)
    _past: deque[bytes] = field(default_factory=lambda: deque(maxlen=PAST))

    def send(self, data: bytes) -> None:
        """It arrives behind all that was sent before."""
        if self.deaf or self.dead:
            return
        due = self.network.clock.now + self.network.latency()
        if self._flying:
            due = max(due, self._flying[-1][0])
        self._flying.append((due, data))
        self._wait()

    def replay(self, draw: random.Random) -> None:
        """Something that was delivered comes again."""
        if self._past:
            self.send(draw.choice(self._past))

    def _wait(self) -> None:
        self.network.clock.after(self._flying[0][0] - self.network.clock.now, self.move)

    def move(self) -> None:
        """Deliver what is due, unless this way is held."""
        network = self.network
        while self._flying and not self.dead and not network.holds(self.source, self.target):
            due, data = self._flying[0]
            if due > network.clock.now:
                self._wait()  # the clock may have rounded down
                return
            self._flying.popleft()
            self._past.append(data)
            network.note("message", self.source.name, self.target.name, data)
            self.target.take(self.connection, data)


class Network:
    """All endpoints by address, and what is wrong between them."""

    def __init__(self, clock: Clock, draw: random.Random, note: Callable[..., None]) -> None:
        self.clock = clock
        self.note = note
        self.draw = draw
        self.slow = 0.0  # seconds that a message may take longer
        self.endpoints: dict[str, Endpoint] = {}
        self.ways: list[Way] = []
        self._held: dict[tuple[str, str], int] = {}

    def latency(self) -> float:
        """Seconds that the next message takes."""
        return self.draw.expovariate(1 / LATENCY) + self.draw.uniform(0.0, self.slow)

    def holds(self, source: Endpoint, target: Endpoint) -> bool:
        return self._held.get((source.name, target.name), 0) > 0

    def hold(self, source: str, target: str, by: int) -> None:
        """Hold this way once more, or, with -1, once less."""
        self._held[source, target] = self._held.get((source, target), 0) + by
        for way in list(self.ways):
            way.move()

    def connect(self, source: Endpoint, connection: Line, target: Endpoint) -> None:
        far = Line(None)
        there = Way(self, source, target, far)
        back = Way(self, target, source, connection)
        there.other, back.other = back, there
        connection.way, far.way, connection.dialing = there, back, False
        connection.since = self.clock.now
        self.ways += [there, back]
        self.note("connected", source.name, target.name)

    def cut(self, way: Way) -> None:
        """This connection ends; each end hears so a little later."""
        for each in (way, way.other):
            if not each.dead:
                each.dead = True
                self.ways.remove(each)
                # Until then what the end says goes nowhere.
                self.clock.after(
                    self.draw.uniform(0.0, NOTICED), lambda each=each: each.target.lost(each.connection)
                )

    def of(self, name: str) -> list[Way]:
        return [way for way in self.ways if name in (way.source.name, way.target.name)]


class Endpoint:
    """p2pkv's Endpoint, for one thread. `ring` is called when there is something to hear."""

    def __init__(self, name: str, address: Address, network: Network, ring: Callable[[], None]) -> None:
        self.name = name
        self.address = address
        self.listens = True
        self.answers = True  # False: frozen, or its handshakes are
        self._network = network
        self._ring = ring
        self._inbox: deque[tuple[Line, bytes, Way | None]] = deque()
        self._failures: deque[ConnectionFailure] = deque()
        network.endpoints[str(address)] = self

    # What p2pkv calls.

    def dial(self, address: Address) -> Line:
        connection = Line(address)
        self.redial(connection)
        return connection

    def redial(self, connection: Line) -> None:
        if connection.address is None or not connection.shut:
            return
        connection.dialing, connection.since = True, self._network.clock.now
        self._try(connection, RETRY, connection.since)

    def _try(self, connection: Line, pause: float, since: float) -> None:
        """One try to connect, and the next one if nobody answers."""
        network = self._network
        target = network.endpoints.get(str(connection.address))
        if target is None:
            raise AssertionError(f"{self.name} dials {connection.address}, where nobody was ever named")
        if not self.listens or not connection.dialing or connection.since != since:
            return
        open_ways = not network.holds(self, target) and not network.holds(target, self)
        if target.listens and target.answers and open_ways:
            network.connect(self, connection, target)
        elif network.clock.now - since > HANDSHAKE_SECONDS and target.listens:
            connection.dialing = False
            reason = f"{connection.address} did not answer in time: the handshake took too long"
            self._failures.append(ConnectionFailure(connection, reason, late=True))
            self._ring()
        else:
            later = pause + network.latency()
            network.clock.after(later, lambda: self._try(connection, min(2 * pause, LAST_RETRY), since))

    def hang_up(self, connection: Line) -> None:
        if connection.address is None:
            return  # the other end does not hear so; what it says comes on a connection that nobody owns
        connection.dialing = False
        if connection.way is not None:
            self._network.cut(connection.way)
            connection.way = None

    def failures(self) -> Iterator[ConnectionFailure]:
        while self._failures:
            yield self._failures.popleft()

    def receive(self) -> Iterator[tuple[Line, bytes]]:
        while self._inbox:
            connection, data, way = self._inbox.popleft()
            if (
                connection.address is None or connection.way is way
            ):  # who dials closes a connection with what came on it
                yield connection, data

    def wake(self) -> None:
        self._ring()

    def close(self) -> None:
        self.vanish()

    # What the network tells.

    def take(self, connection: Line, data: bytes) -> None:
        if self.listens and connection.way is not None:
            self._inbox.append((connection, data, connection.way))
            self._ring()

    def lost(self, connection: Line) -> None:
        if connection.way is None or not connection.way.dead or not self.listens:
            return
        connection.way = None
        if connection.address is not None and self._network.clock.now - connection.since > LASTING:
            self.redial(connection)

    def vanish(self) -> None:
        self.listens = False
        for way in self._network.of(self.name):
            if self in (way.source, way.target) and not way.dead:
                self._network.cut(way)
