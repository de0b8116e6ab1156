"""The parent of the run: routes a load to the engines, does the scheduled faults, watches the deadlines."""

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from chaos.engine import LATE_SECONDS, MAX_TP, Build
from chaos.hostile import harass
from chaos.jobs import GRACE, Jobs, Run
from chaos.machines import Machine, hear
from chaos.model import Model
from chaos.rough import BACK, THERE
from chaos.schedule import DECODES, LEASE, PREFILLS, Fault

from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address

START_SECONDS = 60.0
"""For the first import of torch."""

GROUPS = ("", "P", "D", "PD")
"""The roles of which all engines are one data-parallel instance."""


HELD: dict[str, tuple[str, ...]] = {
    "partition": (THERE, BACK),
    "partition to P": (THERE,),
    "partition from P": (BACK,),
}


def draw_machines(seed: int | str, model: Model) -> list[Machine]:
    """Those of the schedule, each spread over some ranks. In some runs all P, all D or both are the engines
    of one data-parallel instance, behind a router that does not know that."""
    draw, groups = random.Random(f"ranks {seed}"), random.Random(f"groups {seed}").choice(GROUPS)
    machines = []
    for names in (PREFILLS, DECODES):
        builds = [Build(model, draw.randint(1, MAX_TP)) for _ in names]
        first = None
        if names[0][0] in groups:
            builds = [replace(builds[0], index=each, engines=len(names)) for each in range(len(names))]
            first = Address("127.0.0.1", free_ports(len(names) * builds[0].tp))
        machines += [Machine(name, build, instance=first) for name, build in zip(names, builds, strict=True)]
    return machines


class LiveRun(Run):
    """The run itself. A context manager: entering starts the engines, leaving ends them by force."""

    def __init__(self, seed: int | str, machines: Sequence[Machine]) -> None:
        self.jobs = Jobs(random.Random(f"load {seed}"), time.monotonic, self.broken)
        self.machines = {machine.name: machine for machine in machines}
        self._doors = [each.door for each in machines if each.door]
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._harassing: list[threading.Thread] = []
        self._baselines: dict[str, dict[str, Any]] = {}
        self.began = time.monotonic()
        self.faults: Counter[str] = Counter()
        self.violations: list[str] = []

    def __enter__(self) -> "LiveRun":
        for door in self._doors:
            door.start()
        for machine in self.machines.values():
            machine.start()
        self.turn_until(self._all_up, START_SECONDS, "the start of every engine")
        self.began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines.values():
            machine.kill()
        for door in self._doors:
            door.close()
        for thread in self._harassing:
            thread.join(10.0)

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.began

    def run(self, faults: list[Fault], seconds: float) -> None:
        """The load and the faults, until both are over and every fault is healed."""
        waiting, next_job = list(reversed(faults)), 0.0
        while self.now < seconds or waiting or self._ends or not self._all_up():
            while waiting and waiting[-1].at <= self.now:
                self._do(waiting.pop())
            if self.now >= next_job and self.now < seconds:
                next_job = self.now + self.jobs.pause()
                self._baselines.clear()
                self.jobs.ask_any(self.of("P"), self.of("D"))
            self.turn()
            if self.now > seconds + START_SECONDS:
                self.broken(f"not every engine is up again: {[m.name for m in self._down()]}")
                return
        for door in self._doors:
            door.manner.garble = False

    def load(self, seconds: float, asks: bool = True) -> None:
        """`asks`: whether requests come meanwhile."""
        end = time.monotonic() + seconds
        next_job = 0.0
        while time.monotonic() < end:
            if asks and time.monotonic() >= next_job:
                next_job = time.monotonic() + self.jobs.pause()
                self.jobs.ask_any(self.of("P"), self.of("D"))
            self.turn()

    def nothing_comes_through(self, seconds: float) -> None:
        """Load of a P and a D for so long. Raises AssertionError if a request, asked first, is loaded."""
        prefill, decode = self.of("P")[0], self.of("D")[0]
        asked = self.jobs.ask(prefill, decode, plain=True, shortest=100, fresh=True)
        self.load(seconds)
        assert asked.outcome != "loaded", "a request came through what should have been cut"

    def recover(self, prefill: str, decode: str, seconds: float) -> None:
        """Until a request has come through: a broken connection may take its time to come back."""
        end, before = time.monotonic() + seconds, self.jobs.outcomes["loaded"]
        while self.jobs.outcomes["loaded"] == before:
            if time.monotonic() > end:
                self.broken(f"no transfer from {prefill} to {decode} in {seconds:g} s after the fault")
                return
            self.jobs.ask(self.machines[prefill], self.machines[decode], plain=True)
            self.turn_until(lambda: not self.jobs.open, LEASE + GRACE, "the end of every request")

    def rest(self) -> None:
        self.turn_until(lambda: not self.jobs.open, LEASE + GRACE, "the end of every request")
        self._baselines.clear()
        if not self.turn_until(self.baseline, 10.0, "the baseline"):
            self.broken(f"still held: {self.held()}")

    def work_again(self, prefill: str, decode: str, seconds: float) -> None:
        """As before the fault, and hold nothing. Raises AssertionError for what was found broken."""
        self.recover(prefill, decode, seconds)
        for _ in range(3):
            self.ask(prefill, decode)
        self.rest()
        found, self.violations = self.violations, []
        assert found == []

    def turn_until(self, condition: Callable[[], bool], seconds: float, what: str) -> bool:
        """Go on until the condition holds; a violation, and False, if it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                self.broken(f"{what} did not come in {seconds:g} s")
                return False
            self.turn()
        return True

    def turn(self) -> None:
        began = time.monotonic()
        for machine, said in hear(list(self.machines.values()), 0.01):
            if said is not None:
                self._heard(machine, said)
            else:
                self._gone(machine)
        while self._ends and self._ends[0][0] <= time.monotonic():
            heapq.heappop(self._ends)[2]()
        self.jobs.check()
        if time.monotonic() - began > LATE_SECONDS:  # the relays are in this process
            self.jobs.held_up = time.monotonic()

    def broken(self, invariant: str) -> None:
        self.violations.append(f"{self.now:.2f} s: {invariant}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)

    def ask(self, prefill: str, decode: str) -> None:
        self._baselines.clear()
        self.jobs.ask(self.machines[prefill], self.machines[decode], must=True)

    def baseline(self) -> bool:
        """Whether every engine holds nothing; asks again those that did."""
        for name, machine in self.machines.items():
            if not self._baselines.get(name, {}).get("baseline"):
                machine.order("baseline")
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            self.turn()
        return all(self._baselines.get(name, {}).get("baseline") for name in self.machines)

    def held(self) -> dict[str, dict[str, Any]]:
        return {name: said for name, said in self._baselines.items() if not said["baseline"]}

    def stop_all(self) -> None:
        for machine in self.machines.values():
            machine.stop()
        self.turn_until(
            lambda: all(each.ended for each in self.machines.values()),
            15.0,
            "the orderly end of every engine",
        )

    # What engines say.

    def _heard(self, machine: Machine, said: dict[str, Any]) -> None:
        self.jobs.heard(machine, said)
        match kind := next(iter(said)):
            case "ready":
                machine.ready()
            case "late":
                self.jobs.held_up = time.monotonic()
            case "violation":
                self.broken(f"{machine.name}: {said[kind]}")
            case "baseline":
                self._baselines[machine.name] = said
            case "stopped":
                machine.ended = True
                if not said[kind]:
                    self.broken(f"{machine.name}: its thread did not end")

    def _gone(self, machine: Machine) -> None:
        if not machine.ended:
            self.broken(f"{machine.name} has ended by itself")
        machine.kill()
        self.jobs.lose(machine)

    def _all_up(self) -> bool:
        return not self._down()

    def _down(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if not machine.up]

    # The faults.

    def _do(self, fault: Fault) -> None:
        machine = self.machines[fault.engine]
        if not machine.up:
            return  # its last restart took longer than planned
        self.faults[fault.kind] += 1
        manner = machine.door.manner if machine.door else None
        match fault.kind:
            case "kill":
                machine.kill()
                self.jobs.lose(machine)
                self._after(fault.seconds, machine.start)
            case "restart":
                machine.stop()
                self.jobs.lose(machine)
                self._after(fault.seconds, lambda: self._start_when_ended(machine, time.monotonic()))
            case "freeze, short" | "freeze, long":
                machine.freeze()
                self._after(fault.seconds, machine.thaw)
            case "stalled link":
                machine.order("stall", seconds=fault.seconds)
            case "broken link":
                machine.order("break", seed=fault.seed)
            case "flipped bit":
                machine.order("flip", seed=fault.seed)
            case "hostile":
                self._harassing = [each for each in self._harassing if each.is_alive()]
                rank = fault.seed % machine.build.tp
                self._harassing.append(harass(machine.inside.shifted(rank), fault.seed))
            case "reset" if manner:
                manner.reset_after = 0
            case "garbled" if manner:
                manner.garble = True
            case _ if manner:
                manner.held = HELD[fault.kind]
                self._after(fault.seconds, lambda: vars(manner).update(held=()))

    def _start_when_ended(self, machine: Machine, since: float) -> None:
        if machine.ended or time.monotonic() - since > 10.0:
            if not machine.ended:
                self.broken(f"{machine.name} did not end in 10 s when it was told to")
            machine.kill()
            machine.start()
        else:
            self._after(0.05, lambda: self._start_when_ended(machine, since))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._ends, (time.monotonic() + seconds, next(self._numbers), act))
