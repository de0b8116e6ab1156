"""The parent of the run: routes a load to the engines, does the scheduled faults, watches the deadlines."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos.hostile import harass
from chaos.machines import Machine, hear
from chaos.relay import Doors
from chaos.schedule import DECODES, LEASE, PREFILLS, Fault

GRACE = 5.0
"""A load, and P's pages, end within the lease and this after the last progress; seconds."""

START_SECONDS = 60.0
"""For the first import of torch."""

AT_ONCE = 6
"""Requests of one D that may be under way."""

GAP = 0.06
"""Mean seconds between two requests."""

PROMPTS, LONGEST = 12, 700


@dataclass
class Job:
    """One request. `last`: when it last made progress, or something happened to one of its engines."""

    key: str
    prefill: Machine
    decode: Machine
    last: float
    in_prefill: bool = False
    in_decode: bool = False
    plain: bool = False


class World:
    """The run itself. A context manager: entering starts the engines, leaving ends them by force."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(f"load {seed}")
        self.machines = {name: Machine(name) for name in (*PREFILLS, *DECODES)}
        self._doors = Doors({name: each.door for name, each in self.machines.items() if each.door})
        self.jobs: dict[str, Job] = {}
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._harassing: list[threading.Thread] = []
        self._baselines: dict[str, dict[str, Any]] = {}
        self.began = time.monotonic()
        self.faults: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.nbytes = 0
        self.slowest = 0.0
        self.violations: list[str] = []

    def __enter__(self) -> World:
        self._doors.__enter__()
        for machine in self.machines.values():
            machine.start()
        self.turn_until(self._all_up, START_SECONDS, "the start of every engine")
        self.began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines.values():
            machine.kill()
        self._doors.__exit__()
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
                next_job = self.now + self._draw.expovariate(1 / GAP)
                self._ask_any()
            self.turn()
            if self.now > seconds + START_SECONDS:
                self.broken(f"not every engine is up again: {[m.name for m in self._down()]}")
                return
        for door in self._doors.doors.values():
            door.garble = False

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
        """Hear the engines, heal what is due, look at the clock."""
        for machine, said in hear(list(self.machines.values()), 0.01):
            if said is not None:
                self._heard(machine, said)
            else:
                self._gone(machine)
        while self._ends and self._ends[0][0] <= time.monotonic():
            heapq.heappop(self._ends)[2]()
        self._check_deadlines()

    def broken(self, invariant: str) -> None:
        """Note a violation."""
        self.violations.append(f"{self.now:.2f} s: {invariant}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)

    def ask(self, prefill: Machine, decode: Machine, plain: bool = False) -> Job:
        """Send one request to both, as a router does; with `plain` no client leaves."""
        self._baselines.clear()
        draw, key = self._draw, f"key-{next(self._numbers)}"
        prompt, tokens = draw.randrange(PROMPTS), draw.randint(1, LONGEST)
        chunk = draw.choice([48, 100, 256, LONGEST])
        abort, preempt, leaves = (not plain and draw.random() < 0.1 for _ in range(3))
        job = self.jobs[key] = Job(key, prefill, decode, time.monotonic(), plain=plain)
        job.in_prefill = prefill.order(
            "prefill", key=key, decode=str(decode.outside), prompt=prompt, tokens=tokens, chunk=chunk,
            abort_at=draw.randrange(tokens) if abort else -1,
            preempt_at=draw.randrange(tokens) if preempt else -1,
        )  # fmt: skip
        job.in_decode = decode.order(
            "load", key=key, prefill=str(prefill.outside), prompt=prompt, tokens=tokens,
            leave=draw.uniform(0.0, 0.5) if leaves else -1,
        )  # fmt: skip
        self._settle(job)
        return job

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
        """What engines that are not at their baseline hold."""
        return {name: said for name, said in self._baselines.items() if not said["baseline"]}

    def stop_all(self) -> None:
        """End every engine in good order."""
        for machine in self.machines.values():
            machine.stop()
        self.turn_until(
            lambda: all(each.ended for each in self.machines.values()),
            15.0,
            "the orderly end of every engine",
        )

    # The load.

    def _ask_any(self) -> None:
        decode = self.machines[self._draw.choice(DECODES)]
        prefill = self.machines[self._draw.choice(PREFILLS)]
        if sum(1 for job in self.jobs.values() if job.decode is decode) < AT_ONCE:
            self.ask(prefill, decode)

    def _heard(self, machine: Machine, said: dict[str, Any]) -> None:
        kind = next(iter(said))
        job = self.jobs.get(said[kind]) if kind in ("computed", "begun", "freed", "loaded") else None
        if job is not None:
            self.slowest = max(self.slowest, time.monotonic() - max(job.last, machine.continued))
            job.last = time.monotonic()
        match kind:
            case "ready":
                machine.ready()
            case "freed" if job is not None:
                job.in_prefill = False
                self._settle(job)
            case "loaded" if job is not None:
                job.in_decode = False
                self._count(job, said)
                self._settle(job)
            case "violation":
                self.broken(f"{machine.name}: {said[kind]}")
            case "baseline":
                self._baselines[machine.name] = said
            case "stopped":
                machine.ended = True
                if not said[kind]:
                    self.broken(f"{machine.name}: its thread did not end")

    def _count(self, job: Job, said: dict[str, Any]) -> None:
        reason = said["reason"]
        self.outcomes["failed" if reason else "loaded"] += 1
        self.nbytes += said["nbytes"]
        if reason:
            # Without addresses and numbers, so that they can be counted.
            words = (word for word in reason.split() if not any(map(str.isdigit, word)))
            self.reasons[" ".join(words)[:90]] += 1
        if reason and job.plain:
            pair = f"{job.prefill.name} to {job.decode.name}"
            self.broken(f"a transfer in peace, {pair}, failed: {reason}")

    def _settle(self, job: Job) -> None:
        if not job.in_prefill and not job.in_decode:
            self.jobs.pop(job.key, None)

    def _lose(self, machine: Machine) -> None:
        """A process has ended: what was its own needs no outcome, what was others' has its clock set."""
        for job in list(self.jobs.values()):
            if machine is job.prefill:
                job.in_prefill, job.last = False, time.monotonic()
            elif machine is job.decode:
                self.outcomes["lost with D"] += job.in_decode
                job.in_decode, job.last = False, time.monotonic()
            self._settle(job)

    def _gone(self, machine: Machine) -> None:
        if not machine.ended:
            self.broken(f"{machine.name} has ended by itself")
        machine.kill()
        self._lose(machine)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for job in list(self.jobs.values()):
            for machine, waits in ((job.prefill, job.in_prefill), (job.decode, job.in_decode)):
                quiet = now - max(job.last, machine.continued)
                if waits and not machine.frozen and quiet > LEASE + GRACE:
                    self.broken(f"{job.key} has no end on {machine.name} after {quiet:.1f} s")
                    del self.jobs[job.key]
                    break

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
        door = machine.door
        match fault.kind:
            case "kill":
                machine.kill()
                self._lose(machine)
                self._after(fault.seconds, machine.start)
            case "restart":
                machine.stop()
                self._lose(machine)
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
                self._harassing.append(harass(machine.inside, fault.seed))
            case "reset" if door:
                door.reset = True
            case "garbled" if door:
                door.garble = True
            case _ if door:
                door.to_p, door.from_p = fault.kind == "partition from P", fault.kind == "partition to P"
                self._after(fault.seconds, lambda: vars(door).update(to_p=True, from_p=True))

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
