"""One engine of the run, a process of its own: a real rank, and a forward thread that obeys the parent.

What the parent and an engine say to each other is JSON, one object a message. The engine checks what
only it can see; what it finds broken it says as `violation`.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch
from chaos.decode import DecodeSide
from chaos.forward import Forward
from chaos.model import SHAPE, Memory, Violation
from chaos.prefill import PrefillSide
from chaos.schedule import DECODES, LEASE
from engine_support import BUSY, make_rank, soon_on_engine_thread
from faulty_links import Faults, FaultyLinks

from p2pkv.control.endpoint import Endpoint
from p2pkv.engine import rank as rank_module
from p2pkv.links.base import LinkFactory
from p2pkv.links.host import HostLinks
from p2pkv.pairing import Address

SECRET = b"a secret of the chaos run"
STAGING = 1 << 20
TURN_SECONDS = 0.003
LOOK_SECONDS = 0.25

PATIENT = "early_claims"
"""The one gauge that may stay for ten leases: D's last word about a prompt that P has never heard of."""


class _Errors(logging.Handler):
    """An error in p2pkv's log is a fault of p2pkv."""

    def __init__(self, violations: deque[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        self._violations.append(f"p2pkv logged an error: {self.format(record)}")


class Side:
    """A P or a D. `inside` is where it listens, `outside` what it advertises; `links` are its own."""

    def __init__(
        self, role: str, outside: Address, inside: Address, wire: Connection, links: LinkFactory
    ) -> None:
        self._wire = wire
        self._violations: deque[str] = deque()
        logger = logging.getLogger("p2pkv")
        logger.propagate = False
        logger.addHandler(_Errors(self._violations))
        rank_module.Endpoint = lambda _, *rest: Endpoint(inside, *rest)  # type: ignore[misc, assignment]
        self.links = FaultyLinks(links, Faults())
        # What a P sends in shared memory lies in the windows of the D's, each within that D's own staging.
        self._staging = STAGING * (len(DECODES) if role == "P" else 1)
        made = make_rank(
            role, SHAPE, 0, outside.port, self.links, host=outside.host,
            lease_seconds=LEASE, staging_bytes=STAGING, chunk_bytes=16384, secret=SECRET,
            verify=role == "P",  # it is enough that one side asks
            ahead_bytes=STAGING,
        )  # fmt: skip
        self.rank = made.rank
        self.memory = Memory(made.pages)
        forward = PrefillSide if role == "P" else DecodeSide
        self.forward: Forward = forward(self.rank, self.memory, self.say, self.broken)
        self._thaw_at = 0.0
        self._next_look = 0.0
        self._looks: deque[dict[str, int]] = deque()
        self._asked = False
        self.say(ready=True)

    def run(self) -> None:
        """Until the parent says `stop`, or is gone."""
        while True:
            if self._wire.poll(TURN_SECONDS):
                order = json.loads(self._wire.recv_bytes())
                if order["do"] == "stop":
                    return
                self._obey(order)
            try:
                for seconds in self.forward.turn(time.monotonic()):
                    time.sleep(seconds)
            except Violation as error:
                self.broken(str(error))
            self._look()
            self.confess()

    def confess(self) -> None:
        """Tell the parent what was found broken."""
        while self._violations:
            self.say(violation=self._violations.popleft())

    def say(self, **message: Any) -> None:
        """Tell the parent."""
        self._wire.send_bytes(json.dumps(message).encode())

    def broken(self, invariant: str) -> None:
        """Note what must not be; from any thread."""
        self._violations.append(invariant)

    def _obey(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "stall":
                self.links.frozen, self._thaw_at = True, time.monotonic() + order["seconds"]
            case "break":
                self.links.change(break_at=random.Random(order["seed"]).randrange(4))
            case "flip":
                draw = random.Random(order["seed"])
                self.links.change(
                    flip_at=draw.randrange(4), flip_place=draw.random(), flip_bit=draw.randrange(8)
                )
            case "baseline":
                # What was to go wrong with a later message of a link must not do so in peace.
                self.links.mend()
                # Answered by the next look, which is taken after all that has been heard so far.
                self._looks.clear()
                self._asked, self._next_look = True, 0.0
            case _:
                del order["do"]
                self.forward.order(order, time.monotonic())

    def _look(self) -> None:
        """Have the rank's thread count, now and then, and judge what it has counted."""
        now = time.monotonic()
        if self.links.frozen and now > self._thaw_at:
            self.links.frozen = False
        if self._asked and self._looks:
            self._asked = False
            self._answer(self._looks[-1])
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if not self.rank.alive:
            self.broken("the engine's thread has ended")
        soon_on_engine_thread(self.rank, self._count)
        while len(self._looks) > 1:
            self._looks.popleft()

    def _answer(self, counts: dict[str, int]) -> None:
        """Whether this engine is at its baseline: nothing held by the rank, and no block by anybody."""
        busy = {name: value for name, value in counts.items() if value}
        empty = self.forward.empty()
        self.say(baseline=empty and not busy, held=busy, blocks=SHAPE.blocks - self.memory.free)

    def _count(self) -> None:
        counts = self.rank.counters.snapshot()
        if counts["staging_bytes"] > self._staging:
            self.broken(f"{counts['staging_bytes']} bytes of staging where {self._staging} are allowed")
        self._looks.append({name: counts.get(name, 0) for name in BUSY if name != PATIENT})


def main(
    name: str,
    outside: str,
    inside: str,
    wire: Connection,
    links: LinkFactory | None = None,
    kind: type[Side] = Side,
) -> None:
    """The whole life of an engine, whose links share memory unless it is told otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    torch.set_num_threads(1)
    links = links or HostLinks(Address.parse(inside).host, STAGING)
    side = kind(name[0], Address.parse(outside), Address.parse(inside), wire, links)
    try:
        side.run()
        side.rank.stop()
        side.confess()
        side.say(stopped=not side.rank.alive)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        side.rank.stop()
