"""The requests of a run: drawn, routed to the two engines, and held to their deadlines."""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chaos.schedule import LEASE

from p2pkv.engine.decode import MAX_TRIES

GRACE = 5.0
"""A load, and P's pages, end within the lease and this after the last progress; seconds."""

PATIENCE = (1 + MAX_TRIES) * LEASE + GRACE
"""Seconds without progress in the midst of faults: each time that P seems to have restarted, D asks anew."""

AT_ONCE = 6
"""Requests of one D that may be under way."""

GAP = 0.06
"""Mean seconds between two requests."""

PROMPTS, LONGEST = 12, 700


Engine = Any
"""An engine as its requests see it: a `chaos.machines.Machine`, or one of tests/virtual."""


@dataclass
class Job:
    """One request. `last`: when it last made progress, or something happened to one of its engines."""

    key: str
    prefill: Engine
    decode: Engine
    last: float
    in_prefill: bool = False
    in_decode: bool = False
    must: bool = False
    outcome: str = ""
    """What became of it on D: "loaded", "failed" or nothing yet."""


class Jobs:
    """All requests under way, by key, and what became of the others. `broken` is told what must not be."""

    def __init__(self, draw: random.Random, now: Callable[[], float], broken: Callable[[str], None]) -> None:
        self._draw = draw
        self._now = now
        self._broken = broken
        self._numbers = itertools.count()
        self._fresh = itertools.count(PROMPTS)
        self.open: dict[str, Job] = {}
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.nbytes = 0
        self.recomputed = 0
        self.slowest = 0.0
        self.held_up = -LEASE
        """When the machine last held an engine up for so long that a lease may end."""

    def ask(
        self,
        prefill: Engine,
        decode: Engine,
        plain: bool = False,
        must: bool = False,
        longest: int = LONGEST,
        shortest: int = 1,
        fresh: bool = False,
    ) -> Job:
        """Send one request to both, as a router does; some routers let D wait for P's answer. `plain`: no
        client leaves; `must`: it is to load; `fresh`: D has no prefix of it."""
        draw, key = self._draw, f"key-{next(self._numbers)}"
        prompt = next(self._fresh) if fresh else draw.randrange(PROMPTS)
        tokens = draw.randint(shortest, longest)
        chunk = draw.choice([48, 100, 256, LONGEST])
        abort, preempt, leaves = (not (plain or must) and draw.random() < 0.1 for _ in range(3))
        late = draw.random() < 0.3
        # A router that knows no data-parallel ranks names any engine of P and of D.
        on_p, on_d = (
            draw.choice(each.named) if len(each.named) > 1 else each.outside for each in (prefill, decode)
        )
        job = self.open[key] = Job(key, prefill, decode, self._now(), must=must)
        job.in_prefill = prefill.order(
            "prefill", key=key, decode=str(on_d), named=str(on_p), prompt=prompt, tokens=tokens, chunk=chunk,
            abort_at=draw.randrange(tokens) if abort else -1,
            preempt_at=draw.randrange(tokens) if preempt else -1,
        )  # fmt: skip
        job.in_decode = decode.order(
            "load", key=key, prefill=str(on_p), prompt=prompt, tokens=tokens,
            after=draw.uniform(0.0, 0.5) if late else 0.0, leave=draw.uniform(0.0, 0.5) if leaves else -1,
            recompute=draw.random() < 0.5,
        )  # fmt: skip
        self._settle(job)
        return job

    def ask_any(self, prefills: list[Engine], decodes: list[Engine], longest: int = LONGEST) -> None:
        decode, prefill = self._draw.choice(decodes), self._draw.choice(prefills)
        if sum(1 for job in self.open.values() if job.decode is decode) < AT_ONCE:
            self.ask(prefill, decode, longest=longest)

    def pause(self) -> float:
        """Seconds until the next request comes."""
        return self._draw.expovariate(1 / GAP)

    def heard(self, engine: Engine, said: dict[str, Any]) -> None:
        """An engine says that a request has made progress, or has ended there."""
        kind = next(iter(said))
        job = self.open.get(said[kind]) if kind in ("computed", "begun", "freed", "loaded") else None
        if job is None:
            return
        self.slowest = max(self.slowest, self._now() - max(job.last, engine.continued))
        job.last = self._now()
        if kind == "freed":
            job.in_prefill = False
        elif kind == "loaded":
            job.in_decode = False
            self._count(job, said)
        self._settle(job)

    def _count(self, job: Job, said: dict[str, Any]) -> None:
        reason = said["reason"]
        job.outcome = "failed" if reason else "loaded"
        self.outcomes[job.outcome] += 1
        self.nbytes += said["nbytes"]
        self.recomputed += said["recomputed"]
        if reason:
            # Without addresses and numbers, so that they can be counted.
            words = (word for word in reason.split() if not any(map(str.isdigit, word)))
            self.reasons[" ".join(words)[:90]] += 1
        if reason and job.must and self._now() - self.held_up < LEASE:
            self.outcomes["asked again, as the machine had held engines up"] += 1
            self.ask(job.prefill, job.decode, must=True)
        elif reason and job.must:
            pair = f"{job.prefill.name} to {job.decode.name}"
            self._broken(f"a transfer in peace, {pair}, failed: {reason}")

    def _settle(self, job: Job) -> None:
        if not job.in_prefill and not job.in_decode:
            self.open.pop(job.key, None)

    def lose(self, engine: Engine) -> None:
        """A process has ended: what was its own needs no outcome, what was others' has its clock set."""
        for job in list(self.open.values()):
            if engine is job.prefill:
                job.in_prefill, job.last = False, self._now()
            elif engine is job.decode:
                self.outcomes["lost with D"] += job.in_decode
                job.in_decode, job.last = False, self._now()
            self._settle(job)

    def check(self) -> None:
        now = self._now()
        for job in list(self.open.values()):
            for engine, waits in ((job.prefill, job.in_prefill), (job.decode, job.in_decode)):
                quiet = now - max(job.last, engine.continued)
                if waits and not engine.frozen and quiet > PATIENCE:
                    self._broken(f"{job.key} has no end on {engine.name} after {quiet:.1f} s")
                    del self.open[job.key]
                    break

    def report(self) -> None:
        print(f"{self.outcomes.total()} transfers, {self.nbytes / 1e6:.1f} MB compared")
        for outcome, count in sorted(self.outcomes.items()):
            print(f"  {count:5} {outcome}")
        print(f"  {self.recomputed:5} of those that failed were computed by D, in the same blocks")
        print("why they failed:")
        for reason, count in self.reasons.most_common(12):
            print(f"  {count:5} {reason}")
        print(f"the longest time without progress of a request: {self.slowest:.1f} s")


class Run:
    """What a run on any clock has: a model in its engines, requests, and the faults that have happened."""

    machines: dict[str, Any]
    jobs: Jobs
    faults: Counter[str]
    now: float

    def of(self, role: str) -> list[Any]:
        return [machine for machine in self.machines.values() if machine.name.startswith(role)]

    def ask_all(self, must: bool = True, longest: int = LONGEST) -> None:
        for p, d in itertools.product(self.of("P"), self.of("D")):
            self.jobs.ask(p, d, must=must, longest=longest)

    def report(self, seed: str) -> None:
        print(f"seed {seed}: {self.faults.total()} faults in {self.now:.0f} s")
        print(f"the model has {next(iter(self.machines.values())).build.model}")
        print("ranks: " + ", ".join(f"{name} {each.build.ranks}" for name, each in self.machines.items()))
        groups = sorted({name[0] for name, each in self.machines.items() if each.build.engines > 1})
        print(f"one data-parallel instance: {' and '.join(groups) or 'none'}")
        for kind, count in sorted(self.faults.items()):
            print(f"  {count:5} {kind}")
        self.jobs.report()
