"""What the parts of a rank report, and what the core then does: one queue, in order, and one heap of timers.

Calls go down, from transfers to peers to links; effects go up. What has happened to a peer, and what is to be
sent or emitted, is appended to `Context.effects`, of which the core takes one after the other until none is
left (see `Core`). So no handler runs inside another. The effects that are about ranks of D are in
`to_decode`, those about ranks of P in `from_prefill`.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

from msgspec import Struct

from p2pkv.engine.commands import Event
from p2pkv.protocol.messages import AnyMessage


class Effect(Struct, frozen=True, eq=False):
    """Something that has happened to a peer, or that is to be done."""


Effects = deque[Effect]


class Peer(Protocol):
    """A rank of the other side."""

    @property
    def key(self) -> Any:
        """The key by which `Peers` finds it."""

    def send(self, message: AnyMessage, now: float) -> bool:
        """Hand over one message, which goes out at the next `flush` at the latest; False if the connection
        has ended or its queue is full."""

    def flush(self) -> bool:
        """Let everything out that was handed over; False as above."""


class SendMessage(Effect, frozen=True, eq=False):
    """Send this message. If that is not possible, the peer is gone."""

    peer: Peer
    message: AnyMessage


class Emit(Effect, frozen=True, eq=False):
    """Report this to the forward thread."""

    event: Event


class Timer:
    """Calls `act`, with the time, once at `due`; inf: not at all."""

    def __init__(self, timers: "Timers", act: Callable[[float], object]) -> None:
        self._timers = timers
        self.act = act
        self.due = inf

    def at(self, when: float) -> None:
        """Call `act` then, and at no other time."""
        self.due = when
        self._timers.push(self)

    def by(self, when: float) -> None:
        """Call `act` then, unless it is called sooner."""
        if when < self.due:
            self.at(when)


class Timers:
    """All timers of a rank: a heap of (time, timer), in which those that have been set anew are stale."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._serial = itertools.count()

    def push(self, timer: Timer) -> None:
        heapq.heappush(self._heap, (timer.due, next(self._serial), timer))

    @property
    def due(self) -> float:
        """When the next timer is due; inf if none is set."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].due:
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def take_due(self, now: float) -> list[Timer]:
        """The timers that are due by now, which are not set any more."""
        found = []
        while self.due <= now:
            _, _, timer = heapq.heappop(self._heap)
            timer.due = inf
            found.append(timer)
        return found
