"""One engine of the run, a process of its own: real ranks, and a forward thread that obeys the parent.

What the parent and an engine say to each other is JSON, one object a message. The engine checks what
only it can see; what it finds broken it says as `violation`.
"""

import json
import logging
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from chaos import decode, prefill, schedule
from chaos.crew import Crew
from chaos.forward import Forward
from chaos.model import ONE_GROUP, Memory, Model, RankPages, Violation, hello_of, make_rank_pages

from p2pkv.config import Options
from p2pkv.control.endpoint import Endpoint
from p2pkv.engine import thread as thread_module
from p2pkv.engine.core import Core
from p2pkv.engine.thread import Rank
from p2pkv.links.base import LinkFactory
from p2pkv.links.host import HostLinks
from p2pkv.pairing import Address
from support.engine.engines import busy, soon_on_engine_thread
from support.links.faulty import Faults, FaultyLinks

SECRET = b"a secret of the chaos run"
STAGING = 1 << 20
"""Of a rank."""

MAX_TP = 2
"""Two cores and six engines, each rank a thread: more of them would be late because of each other."""

TURN_SECONDS = 0.003
LOOK_SECONDS = 0.25
LATE_SECONDS = 0.1 * schedule.LEASE
"""A request takes several hops between engines: ten that are so late, on a busy machine, last a lease."""


class _Errors(logging.Handler):
    """An error in p2pkv's log is a fault of p2pkv."""

    def __init__(self, violations: deque[str]) -> None:
        super().__init__(logging.ERROR)
        self._violations = violations

    def emit(self, record: logging.LogRecord) -> None:
        self._violations.append(f"p2pkv logged an error: {self.format(record)}")


@dataclass(frozen=True)
class Build:
    """What an engine is: its model, and over how many ranks it spreads it. `cut`: see `RankPages`; `index`:
    which one of the `engines` of a data-parallel instance it is."""

    model: Model = ONE_GROUP
    tp: int = 1
    cut: int = 0
    index: int = 0
    engines: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * (2 if self.cut else 1)

    def pages(self) -> list[RankPages]:
        return [make_rank_pages(self.model, rank, self.tp, self.cut) for rank in range(self.ranks)]

    def options(self, role: Literal["P", "D"], outside: Address, **more: Any) -> Options:
        return Options(
            role=role, host=outside.host, kv_port=outside.port - self.index * self.ranks,
            engine_index=self.index, engine_ranks=self.ranks, data_parallel=self.engines > 1,
            lease_seconds=schedule.LEASE, verify=role == "P",  # it is enough that one side asks
            **more,
        )  # fmt: skip

    def forward(
        self, role: str, pages: list[RankPages], ranks: Sequence[Core], say: Callable[..., None],
        broken: Callable[[str], None],
    ) -> Forward:  # fmt: skip
        crew = Crew(ranks, broken, [each.layers for each in pages])
        side = prefill.PrefillSide if role == "P" else decode.DecodeSide
        return side(crew, Memory(self.model, pages), say, broken)


class Side:
    """A P or a D. `inside`: where it listens; `outside`: what it advertises; `links`: those of a rank."""

    def __init__(
        self,
        role: Literal["P", "D"],
        outside: Address,
        inside: Address,
        wire: Connection,
        links: Callable[[str], LinkFactory],
        build: Build,
    ) -> None:
        self._wire = wire
        self._violations: deque[str] = deque()
        logger = logging.getLogger("p2pkv")
        logger.propagate = False
        logger.addHandler(_Errors(self._violations))
        thread_module.Endpoint = lambda place, *rest: Endpoint(  # type: ignore[misc, assignment]
            inside.shifted(place.port - outside.port), *rest
        )
        self.links = [FaultyLinks(links(inside.host), Faults()) for _ in range(build.ranks)]
        # What a P sends in shared memory lies in the windows of the D's ranks, each within its own staging.
        self._staging = STAGING * (MAX_TP * len(schedule.DECODES) if role == "P" else 1)
        room = {"staging_bytes": STAGING, "prefetch_bytes": STAGING, "chunk_bytes": 16384}
        options = build.options(role, outside, secret=SECRET, **room)
        pages = build.pages()
        self.ranks = [
            Rank(hello_of(options, build.model, each, its.kind), options, each.cache, its)
            for each, its in zip(pages, self.links, strict=True)
        ]
        self.forward = build.forward(role, pages, self.ranks, self.say, self.broken)
        self._thaw_at: float | None = None
        self._next_look = 0.0
        self._looks: list[deque[dict[str, int]]] = [deque() for _ in self.ranks]
        self._asked = False
        self.say(ready=True)

    def run(self) -> None:
        """Until the parent says `stop`, or is gone."""
        now = time.monotonic()
        while True:
            before, now = now, time.monotonic()
            if now - before > LATE_SECONDS:
                self.say(late=now - before)
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
        while self._violations:
            self.say(violation=self._violations.popleft())

    def say(self, **message: Any) -> None:
        self._wire.send_bytes(json.dumps(message).encode())

    def broken(self, invariant: str) -> None:
        self._violations.append(invariant)

    def _obey(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "stall":
                self._freeze_links(True)
                self._thaw_at = time.monotonic() + order["seconds"]
            case "break":
                draw = random.Random(order["seed"])
                for links in self._some_links(draw):
                    links.change(break_at=draw.randrange(4))
            case "flip":
                draw = random.Random(order["seed"])
                for links in self._some_links(draw):
                    links.change(
                        flip_at=draw.randrange(4), flip_place=draw.random(), flip_bit=draw.randrange(8)
                    )
            case "manner":
                for links in self.links:
                    vars(links.inner.manner).update(order["values"])  # type: ignore[attr-defined]
            case "baseline":
                # What was to go wrong with a later message of a link must not do so in peace.
                for links in self.links:
                    links.mend()
                # Answered by the next look, which is taken after all that has been heard so far.
                for looks in self._looks:
                    looks.clear()
                self._asked, self._next_look = True, 0.0
            case _:
                del order["do"]
                self.forward.order(order, time.monotonic())

    def _some_links(self, draw: random.Random) -> list[FaultyLinks]:
        return draw.choice([self.links, [draw.choice(self.links)]])

    def _freeze_links(self, frozen: bool) -> None:
        for links in self.links:
            links.frozen = frozen

    def _look(self) -> None:
        """Have the ranks' threads count, now and then, and judge what they have counted."""
        now = time.monotonic()
        if self._thaw_at is not None and now > self._thaw_at:
            self._thaw_at = None
            self._freeze_links(False)
        if self._asked and all(self._looks):
            self._asked = False
            self._answer([looks[-1] for looks in self._looks])
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        for rank, looks in zip(self.ranks, self._looks, strict=True):
            if not rank.alive:
                self.broken("the engine's thread has ended")
            soon_on_engine_thread(rank, partial(self._count, rank, looks))
            while len(looks) > 1:
                looks.popleft()

    def _answer(self, counts: list[dict[str, int]]) -> None:
        """Whether this engine is at its baseline: nothing held by a rank, and no block by anybody."""
        held, empty = busy(counts), self.forward.empty()
        self.say(baseline=empty and not held, held=held, blocks=self.forward.memory.held)

    def _count(self, rank: Rank, looks: deque[dict[str, int]]) -> None:
        counts = rank.counters.snapshot()
        if counts["staging_bytes"] > self._staging:
            self.broken(f"{counts['staging_bytes']} bytes of staging where {self._staging} are allowed")
        looks.append(counts)

    def stop(self) -> bool:
        """End every rank; whether all have ended."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(Rank.stop, self.ranks))
        return not any(rank.alive for rank in self.ranks)


def shared(host: str) -> LinkFactory:
    return HostLinks(host, STAGING)


def main(
    name: str,
    outside: Address,
    inside: Address,
    wire: Connection,
    build: Build | None = None,
    links: Callable[[str], LinkFactory] = shared,
) -> None:
    """The whole life of an engine. `links`: those of a rank on a host."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    torch.set_num_threads(1)
    side = Side("P" if name.startswith("P") else "D", outside, inside, wire, links, build or Build())
    try:
        side.run()
        ended = side.stop()
        side.confess()
        side.say(stopped=ended)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        side.stop()
