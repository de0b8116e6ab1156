"""A whole run in one thread: engines, network, requests and faults, all out of one seed.

Nothing here asks for the time, for a random number of its own, or for the order of a set: a seed gives the
same run in every process, which its trace proves.
"""

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from chaos.engine import Build
from chaos.jobs import GRACE, Jobs, Run
from chaos.model import Model, draw_model
from chaos.schedule import LEASE
from virtual.clock import Clock
from virtual.faults import WEIGHTS, Fault, Heal, UnknownPeer
from virtual.machine import CHUNKS, Machine
from virtual.network import Network

from p2pkv.protocol.handshake import REFUSED_FOR
from support.links.memory import MemoryNetwork

LONGEST = 220
"""Tokens of a prompt, at most."""

SETTLE = 0.5
"""Seconds between the end of one fault and the next one of the same engine."""

SWEEP_SECONDS = 5.0
"""Between two looks at every free block."""

LAST = 60
"""Lines of the trace that are kept to be shown."""


class Broken(Exception):
    """An invariant does not hold."""


class World(Run):
    """`say`: print the trace as it grows."""

    def __init__(
        self,
        seed: int | str,
        prefills: int = 2,
        decodes: int = 2,
        say: bool = False,
        model: Model | None = None,
        tps: Sequence[int] = (),
        stages: bool = False,
        chunks: Sequence[int] = CHUNKS,
        groups: str | None = None,
        gap: float | None = None,
    ) -> None:
        """`model`, and `tps`, the ranks that a stage may have: by default the seed decides. `stages`: an
        engine may have two of them; without `tps`, too. `groups`: the roles of which all engines are one
        data-parallel instance, behind a router that does not know that: "P", "D", "PD" or "", by default the
        seed decides. `gap`: mean seconds between two faults; by default the seed decides."""
        stages = stages or not tps
        self.draw = random.Random(f"virtual {seed}")
        self.model = model or draw_model(random.Random(f"model {seed}"))
        # One rank in each engine is most of what there is, and the fastest.
        tps = tps or self.draw.choice([(1,), (1, 2, 4)])
        drawn = self.draw.choice([0.3, 0.6, 1.5, 4.0])
        self._gap = gap or drawn
        self._say = say
        self._hash = hashlib.blake2b(digest_size=16)
        self._last: deque[str] = deque(maxlen=LAST)
        self.clock = Clock()
        self.network = Network(self.clock, self.draw, self.note)
        self.wires = MemoryNetwork()
        self.jobs = Jobs(self.draw, lambda: self.clock.now, self.broken)
        self.faults: Counter[str] = Counter()
        self.lines = 0
        self._began = self.clock.now
        self._until = 0.0
        self._suffering: Counter[str] = Counter()
        names = [f"P{index}" for index in range(prefills)] + [f"D{index}" for index in range(decodes)]
        builds = [self._draw_build(tps, stages) for _ in names]
        if groups is None:
            groups = random.Random(f"groups {seed}").choice(["", "P", "D", "PD"])
        self.groups = groups
        self.chunk_bytes = self.draw.choice(chunks)
        self.machines: dict[str, Machine] = {}
        for n, (name, build) in enumerate(zip(names, builds, strict=True)):
            role, first = name[0], n
            if role in groups:
                index, engines = int(name[1:]), prefills if role == "P" else decodes
                first = n - index
                build = replace(builds[first], index=index, engines=engines)
            self.machines[name] = Machine(name, build, 7000 + 10 * first, self)
        self.decode_ranks = sum(each.build.ranks for each in self.of("D"))
        self.unknown_peer = UnknownPeer(self.network)
        for machine in self.machines.values():
            machine.start()
        self._sweep()
        self._watch()

    def _draw_build(self, tps: Sequence[int], stages: bool) -> Build:
        """Few engines have two stages: twice the ranks take twice the time."""
        tp = self.draw.choice(tps)
        cut = self.draw.choice([0, *self.model.cuts]) if stages and self.draw.random() < 0.4 else 0
        return Build(self.model, tp, cut if tp < 4 else 0)

    # The trace.

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return self.clock.now - self._began

    @property
    def trace(self) -> str:
        """What stands for all that has happened: equal for equal runs."""
        return self._hash.hexdigest()

    def note(self, *words: object) -> None:
        line = f"{self.now:.6f} {' '.join(map(repr, words))}"
        self._hash.update(line.encode())
        self._last.append(line)
        self.lines += 1
        if self._say:
            print(line)

    def broken(self, invariant: str) -> None:
        """Raises Broken, with what happened before."""
        last = "\n".join(f"  {line[:240]}" for line in self._last)
        raise Broken(f"at {self.now:.3f} s: {invariant}\nwhat happened before:\n{last}")

    # The run.

    def run(self, seconds: float) -> None:
        """Load and faults for so many virtual seconds; then everything heals, ends, and works."""
        self._until = self.clock.now + seconds
        self._load()
        self.clock.after(1.0, self._fault)
        self.turn_until(lambda: self.clock.now >= self._until, LEASE * 20)
        self.end()

    def end(self) -> None:
        self.turn_until(lambda: not self._suffering.total(), LEASE * 20)
        for machine in self.machines.values():
            for worker in machine.life.workers:
                worker.links.mend()
        for way in self.network.ways:
            way.connection.refuses = 0
        self.ask_all(must=False, longest=LONGEST)  # it takes a request to find out that a connection is deaf
        self.turn_until(lambda: not self.jobs.open, 2 * (LEASE + GRACE))
        self.wait(REFUSED_FOR + 1)  # a P that failed a handshake is left alone for so long
        self._rest("after the faults")
        self.ask_all(longest=LONGEST)
        self.turn_until(lambda: not self.jobs.open, LEASE + GRACE)
        self.wait(1.0)
        self._rest("at the end")

    def _load(self) -> None:
        if self.clock.now < self._until:
            self.jobs.ask_any(self.of("P"), self.of("D"), LONGEST)
            self.clock.after(self.jobs.pause(), self._load)

    def turn_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Go on until the condition holds. Raises Broken if it does not in time."""
        limit = max(self.clock.now, self._until) + seconds
        while not condition():
            if self.clock.now > limit:
                self.broken(f"the run does not end: {list(self.jobs.open.values())} {self._suffering}")
            self.clock.step()

    def wait(self, seconds: float) -> None:
        self.clock.pass_by(seconds)

    # The faults.

    def _fault(self) -> None:
        if self.clock.now >= self._until:
            return
        self.clock.after(self.draw.expovariate(1 / self._gap), self._fault)
        fault = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        idle = [machine for machine in self.machines.values() if not self._suffering[machine.name]]
        if not idle:
            return
        self.strike(fault, self.draw.choice(idle))

    def strike(self, fault: Fault, machine: Machine) -> None:
        """This happens to an engine that does not suffer from another fault."""
        if self._suffering[machine.name]:
            return
        self.note("fault", fault.__name__, machine.name)
        self.faults[fault.__name__] += 1
        self._suffering[machine.name] += 1
        self._heal_later(machine, fault(self, machine, self.draw))

    def _heal_later(self, machine: Machine, heal: Heal) -> None:
        seconds, act = heal

        def end() -> None:
            self.note("healed", machine.name)
            act()
            self.clock.after(SETTLE, settled)

        def settled() -> None:
            self._suffering[machine.name] -= 1

        self.clock.after(seconds, end)

    # What must hold.

    def _watch(self) -> None:
        self.jobs.check()
        for machine in self.machines.values():
            machine.check_bounds()
        self.clock.after(0.1, self._watch)

    def _sweep(self) -> None:
        """No free block has been written to."""
        for machine in self.machines.values():
            if machine.life is not None and not machine.life.forward.memory.clean():
                machine.broken("a block was written to after it had been given back")
        self.clock.after(SWEEP_SECONDS, self._sweep)

    def _rest(self, when: str) -> None:
        for machine in self.machines.values():
            if held := machine.held():
                machine.broken(f"still held {when}: {held}")
