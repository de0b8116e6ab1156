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

from p2pkv.control.endpoint import LASTING, Trouble
from p2pkv.control.security import HANDSHAKE_SECONDS
from p2pkv.pairing import Address

LATENCY = 0.0003
"""Mean seconds that a message takes."""

RETRY, LAST_RETRY = 0.02, 1.0
"""libzmq's pauses between two tries of one dial."""

NOTICED = 0.2
"""Most seconds in which an end hears that its connection has gone."""


class Line:
    """One end of a connection, as p2pkv's own Line. `address` is set at the dialing end."""

    def __init__(self, address: Address | None) -> None:
        self.address = address
        self.tag: object = None
        self.since = 0.0
        self.refuses = 0  # so many messages find the queue full
        self.way: Way | None = None
        self.dialing = False

    @property
    def reached(self) -> bool:
        """Whether the handshake of a dialed line is over."""
        return self.way is not None

    @property
    def shut(self) -> bool:
        return self.way is None and not self.dialing

    def send(self, data: bytes) -> bool:
        """Hand over one message; False if the peer is gone or its queue is full."""
        if self.way is None:
            return False
        if self.refuses > 0:
            self.refuses -= 1
            return False
        self.way.send(data)
        return True


@dataclass(eq=False)
class Way:
    """One direction of a connection. `target` hears it on `line`."""

    network: Network
    source: Endpoint
    target: Endpoint
    line: Line
    other: Way | None = None
    deaf: bool = False
    dead: bool = False
    _flying: deque[tuple[float, bytes]] = field(default_factory=deque)

    def send(self, data: bytes) -> None:
        """It arrives behind all that was sent before."""
        if self.deaf or self.dead:
            return
        due = self.network.clock.now + self.network.latency()
        if self._flying:
            due = max(due, self._flying[-1][0])
        self._flying.append((due, data))
        self._wait()

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
            network.note("message", self.source.name, self.target.name, data)
            self.target.take(self.line, data)


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
        """Whether nothing goes this way now."""
        return self._held.get((source.name, target.name), 0) > 0

    def hold(self, source: str, target: str, by: int) -> None:
        """Hold this way once more, or, with -1, once less."""
        self._held[source, target] = self._held.get((source, target), 0) + by
        for way in list(self.ways):
            way.move()

    def connect(self, source: Endpoint, line: Line, target: Endpoint) -> None:
        """The connection is up: either end can speak."""
        far = Line(None)
        there = Way(self, source, target, far)
        back = Way(self, target, source, line)
        there.other, back.other = back, there
        line.way, far.way, line.dialing = there, back, False
        line.since = self.clock.now
        self.ways += [there, back]
        self.note("connected", source.name, target.name)

    def cut(self, way: Way) -> None:
        """This connection ends; each end hears so a little later."""
        assert way.other is not None
        for each in (way, way.other):
            if not each.dead:
                each.dead = True
                self.ways.remove(each)
                # Until then what the end says goes nowhere.
                self.clock.after(
                    self.draw.uniform(0.0, NOTICED), lambda each=each: each.target.lost(each.line)
                )

    def of(self, name: str) -> list[Way]:
        """The ways to and from this endpoint."""
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
        self._troubles: deque[Trouble] = deque()
        network.endpoints[str(address)] = self

    # What p2pkv calls.

    def dial(self, address: Address) -> Line:
        line = Line(address)
        self.redial(line)
        return line

    def redial(self, line: Line) -> None:
        if line.address is None or not line.shut:
            return
        line.dialing, line.since = True, self._network.clock.now
        self._try(line, RETRY, line.since)

    def _try(self, line: Line, pause: float, since: float) -> None:
        """One try to connect, and the next one if nobody answers."""
        network = self._network
        target = network.endpoints.get(str(line.address))
        if target is None:
            raise AssertionError(f"{self.name} dials {line.address}, where nobody was ever named")
        if not self.listens or not line.dialing or line.since != since:
            return
        open_ways = not network.holds(self, target) and not network.holds(target, self)
        if target.listens and target.answers and open_ways:
            network.connect(self, line, target)
        elif network.clock.now - since > HANDSHAKE_SECONDS and target.listens:
            line.dialing = False
            reason = f"{line.address} did not answer in time: the handshake took too long"
            self._troubles.append(Trouble(line, reason, late=True))
            self._ring()
        else:
            later = pause + network.latency()
            network.clock.after(later, lambda: self._try(line, min(2 * pause, LAST_RETRY), since))

    def hang_up(self, line: Line) -> None:
        if line.address is None:
            return  # the other end does not hear so; what it says comes on a line that nobody owns
        line.dialing = False
        if line.way is not None:
            self._network.cut(line.way)
            line.way = None

    def troubles(self) -> Iterator[Trouble]:
        while self._troubles:
            yield self._troubles.popleft()

    def receive(self) -> Iterator[tuple[Line, bytes]]:
        while self._inbox:
            line, data, way = self._inbox.popleft()
            if line.address is None or line.way is way:  # who dials closes a connection with what came on it
                yield line, data

    def wake(self) -> None:
        self._ring()

    def close(self) -> None:
        self.vanish()

    # What the network tells.

    def take(self, line: Line, data: bytes) -> None:
        """A message has come."""
        if self.listens and line.way is not None:
            self._inbox.append((line, data, line.way))
            self._ring()

    def lost(self, line: Line) -> None:
        """The connection of this line has ended."""
        if line.way is None or not line.way.dead or not self.listens:
            return
        line.way = None
        if line.address is not None and self._network.clock.now - line.since > LASTING:
            self.redial(line)

    def vanish(self) -> None:
        """The process has ended."""
        self.listens = False
        for way in self._network.of(self.name):
            if self in (way.source, way.target) and not way.dead:
                self._network.cut(way)
