"""One engine of the run: real cores with real pages, a forward thread, and the turns of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from chaos.engine import Build
from chaos.model import RankPages, Violation, hello_of
from chaos.schedule import LEASE
from virtual.clock import Alarm, Clock
from virtual.network import Endpoint, Network

from p2pkv.engine.core import Core
from p2pkv.pairing import Address
from p2pkv.protocol import sender
from p2pkv.protocol.receiver import MAX_CHUNKS
from support.engine.engines import busy
from support.links.faulty import Faults, FaultyLinks

STAGING, CHUNKS = 1 << 18, (4096, 16384)
"""Bytes of a rank; of a message, one of these in all engines of a run. Some short ones hold one KV group."""

STALL = 1.05 * LEASE
"""`stall_seconds` of every engine: shorter than a long hang."""

GAP = 0.0005
"""Mean seconds between two turns of a thread that has something to do."""


class Worker:
    """One rank of an incarnation: the turns of its engine thread."""

    def __init__(self, life: Life, pages: RankPages, incarnation: str) -> None:
        machine = life.machine
        role, place = machine.name[0], machine.outside
        self.life = life
        self.machine = machine
        wires = machine.wires.rank(STAGING)
        self.links = FaultyLinks(wires, Faults(delay_polls=3), machine.draw.randrange(1 << 30))
        self.endpoint = Endpoint(machine.name, place.shifted(pages.rank), machine.network, self.ring)
        room = {"staging_bytes": STAGING, "prefetch_bytes": STAGING, "chunk_bytes": machine.chunk_bytes}
        options = machine.build.options(role, place, stall_seconds=STALL, **room)
        hello = hello_of(options, machine.build.model, pages, self.links.kind, incarnation)
        self.core = Core(hello, options, pages.cache, self.links, self.endpoint)  # type: ignore[arg-type]
        self._turns = Alarm(machine.clock, self._turn)

    def ring(self) -> None:
        self._turns.within(self.machine.jitter())

    def _turn(self) -> None:
        if not self.life.alive or self.machine.frozen:
            return
        now = self.machine.clock.now
        self.machine.note("turn", self.machine.name, self.core.context.hello.rank)
        self.core.turn(now)
        self.machine.look(self.core)
        if self.core._events:
            self.life.step_in(self.machine.jitter())
        self._turns.within(max(self.core.pause(now), self.machine.jitter()))

    def go_on(self) -> None:
        """After a freeze."""
        self._turns.clear()
        self.ring()


class Life:
    """One incarnation: what a kill takes away as a whole."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.alive = True
        self._working: Iterator[float] | None = None
        self._steps = Alarm(machine.clock, self._step)
        self.hung_until = 0.0
        build = machine.build
        pages = build.pages()
        self.workers = [Worker(self, each, f"{machine.draw.getrandbits(128):032x}") for each in pages]
        cores = [each.core for each in self.workers]
        self.forward = build.forward(machine.name[0], pages, cores, machine.say, machine.broken)

    def ring(self) -> None:
        for worker in self.workers:
            worker.ring()

    # The forward thread.

    def order(self, order: dict[str, Any]) -> None:
        self.forward.order(order, self.machine.clock.now)
        self.step_in(self.machine.jitter())
        self.ring()

    def step_in(self, seconds: float) -> None:
        self._steps.within(seconds)

    def _step(self) -> None:
        clock = self.machine.clock
        if not self.alive or self.machine.frozen:
            return
        if clock.now < self.hung_until:
            self.step_in(self.hung_until - clock.now)
            return
        if self._working is None:
            self._working = self.forward.turn(clock.now)
        try:
            seconds = next(self._working, None)
        except Violation as error:
            self.machine.broken(str(error))
            seconds = None
        if seconds is None:
            self._working = None
        for worker in self.workers:
            if worker.core.commands:
                worker.ring()
        if seconds is not None:
            self.step_in(seconds + self.machine.jitter())
        elif not self.forward.idle or any(worker.core._events for worker in self.workers):
            self.step_in(0.002 + 4 * self.machine.jitter())

    def hang(self, until: float) -> None:
        """The forward thread stands still in a step; the engine's own goes on."""
        self.hung_until = until
        self.forward.crew.begin_step(self.machine.clock.now)
        self.machine.clock.after(until - self.machine.clock.now, self._unhang)

    def _unhang(self) -> None:
        if self._working is None:
            self.forward.crew.end_step()

    def go_on(self) -> None:
        """After a freeze."""
        self._steps.clear()
        for worker in self.workers:
            worker.go_on()
        self.step_in(self.machine.jitter())


class Machine:
    """A name and an address, and the incarnation that lives there, if any.

    Attributes as of `chaos.machines.Machine`, on the virtual clock.
    """

    def __init__(self, name: str, build: Build, port: int, world: Any) -> None:
        """`port`: where the ports of its data-parallel instance begin."""
        self.name = name
        self.build = build
        self.chunk_bytes: int = world.chunk_bytes
        self.named = tuple(Address("127.0.0.1", port + each * build.ranks) for each in range(build.engines))
        self.outside = self.named[build.index]
        self.clock: Clock = world.clock
        self.network: Network = world.network
        self.wires = world.wires
        self.draw = world.draw
        self.note: Callable[..., None] = world.note
        self.life: Life | None = None
        self.frozen = False
        self.continued = self.clock.now
        self.slow = 1.0
        self._world = world

    def jitter(self) -> float:
        """Seconds that a thread waits for its turn."""
        return float(self.draw.expovariate(1 / (GAP * self.slow)))

    def say(self, **said: Any) -> None:
        self.note("said", self.name, *said.items())
        self._world.jobs.heard(self, said)

    def broken(self, invariant: str) -> None:
        self._world.broken(f"{self.name}: {invariant}")

    # What the run does to it.

    def start(self) -> None:
        self.continued = self.clock.now
        self.frozen = False
        self.life = Life(self)
        self.life.go_on()

    def kill(self) -> None:
        """As by kill -9: not a word to anybody."""
        life, self.life = self.life, None
        if life is not None:
            life.alive = False
            for worker in life.workers:
                worker.endpoint.vanish()

    def stop(self) -> None:
        life, self.life = self.life, None
        if life is not None:
            life.alive = False
            for worker in life.workers:
                worker.core.close()

    def freeze(self) -> None:
        self.frozen = True
        self._answer(False)

    def thaw(self) -> None:
        self.frozen, self.continued = False, self.clock.now
        self._answer(True)
        if self.life is not None:
            self.life.go_on()

    def _answer(self, answers: bool) -> None:
        """Whether the handshakes of this process go on."""
        for worker in self.life.workers if self.life is not None else []:
            worker.endpoint.answers = answers

    def some_links(self) -> list[FaultyLinks]:
        """Those of one rank, or of all."""
        links = [worker.links for worker in self.life.workers]
        return self.draw.choice([links, [self.draw.choice(links)]])  # type: ignore[no-any-return]

    def note_progress(self) -> None:
        self.continued = self.clock.now

    def order(self, word: str, **details: Any) -> bool:
        """Tell it something, which takes a little; False if there is nobody to tell."""
        life = self.life
        if life is None:
            return False
        self.note("order", self.name, word, *details.items())
        self.clock.after(self.network.latency() * 10, lambda: life.alive and life.order(details))
        return True

    # What must hold at any time.

    def look(self, core: Core) -> None:
        staging = core.counters.snapshot()["staging_bytes"]
        allowed = STAGING * (self._world.decode_ranks if self.name.startswith("P") else 1)
        if staging > allowed:
            self.broken(f"{staging} bytes of staging where {allowed} are allowed")

    def check_bounds(self) -> None:
        for worker in self.life.workers if self.life is not None else []:
            self._check_bounds(worker.core)

    def _check_bounds(self, core: Core) -> None:
        chunks = [0]
        if core.prefill is not None:
            prompts = core.prefill.transfers.entries.values()
            sends = [send for entry in prompts for send in entry.sender.sends.values()]
            chunks += [len(send.announced) - sender.MAX_ANNOUNCED for send in sends]
        if core.decode is not None:
            loads = [entry.receiver for entry in core.decode.transfers.entries.values()]
            chunks += [len(each.chunks) - MAX_CHUNKS for load in loads for each in load.sources.values()]
        if max(chunks) > 0:
            self.broken("it keeps more chunks in mind than it may")
        peers = core.counters.snapshot()["peers"]
        if peers > len(self.network.endpoints):
            self.broken(f"{peers} peers of {len(self.network.endpoints)} that there are")

    def held(self) -> dict[str, int]:
        """What it holds that it should not when nothing is under way."""
        held = busy([worker.core.counters.snapshot() for worker in self.life.workers])
        if not self.life.forward.empty():
            held["blocks"] = self.life.forward.memory.held
        return held
