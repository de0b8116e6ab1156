"""Two engines in virtual time: the proxy's own placement in front of engines that are only modelled.

An engine computes in steps, as vLLM does: a token of each running answer, and tokens of prompts up to
`CHUNK` in all, or what `--chunks` has for this engine, first come first served. A step takes as long as
`Costs` has it. Not modelled: HTTP, KV blocks, and processes that share a core. The loop is closed: each
client has one request under way. Several proxies get requests in turn; with `--reports` engines report to
all of them what they have to do.

    python benchmarks/pool_simulation.py [--clients 16] [--noise] [--proxies 2 --reports]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))

from bench_fleet import ModelledPrompt
from fleet_engines import VirtualLoop

from p2pkv.control.discovery import Ping, Workload
from p2pkv_proxy.admission import Admission, RequestPlace
from p2pkv_proxy.bodies import Prompt
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.instance import Instance
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.placement import EngineCosts, PlacementCosts
from p2pkv_proxy.policies import Routing, RoutingRequest
from p2pkv_proxy.routing import Router

CHUNK = 256
SWITCH_SECONDS = 20.0
REPORT_SECONDS, REPORT_AGE = 0.5, 0.25
"""Between two reports of an engine; and how old one is when it comes."""


@dataclass(frozen=True)
class Costs:
    """Of one engine: two of bench_servers.py's on two cores.

    Attributes:
        step: seconds of a step; stream: what each running answer adds; token: each token of a prompt.
        push: seconds from the end of a prompt until D has its KV, and for each of its tokens.
        way: until the engine's scheduler has the request.
    """

    step: float = 0.015
    stream: float = 0.0015
    token: float = 0.0004
    push: tuple[float, float] = (0.02, 2e-5)
    way: float = 0.01


COSTS = Costs()


@dataclass
class Mix:
    """Lengths of prompts and answers, drawn evenly between two bounds."""

    prompt: tuple[int, int]
    answer: tuple[int, int]

    def draw(self, dice: random.Random) -> tuple[int, int]:
        return dice.randint(*self.prompt), dice.randint(*self.answer)


SHORT_LONG, LONG_SHORT = Mix((32, 128), (48, 96)), Mix((400, 900), (8, 24))
MIXED, VERY_LONG = Mix((32, 900), (16, 48)), Mix((500, 6000), (16, 48))


def mix_at(name: str, now: float) -> Mix:
    if name == "changes":
        return (SHORT_LONG, LONG_SHORT)[int(now / SWITCH_SECONDS) % 2]
    return VERY_LONG if name == "very long prompts" else MIXES[name]


MIXES = {"short prompts": SHORT_LONG, "long prompts": LONG_SHORT, "mixed": MIXED, "changes": MIXED}


@dataclass(eq=False)
class Job:
    """A prompt to compute, then an answer to decode, at one engine."""

    left: int
    steps: int
    token: Callable[[], None]
    done: asyncio.Future[None]
    more: bool


class Engine:
    def __init__(self, loop: VirtualLoop, chunk: int = CHUNK) -> None:
        self._loop, self._chunk = loop, chunk
        self._prompts: deque[Job] = deque()
        self._answers: list[Job] = []
        self._stepping = False

    async def run(self, prompt: int, steps: int, token: Callable[[], None]) -> None:
        """`token` is called for each of `steps` tokens, the first of which ends the prompt, if there is
        one."""
        job = Job(prompt, steps, token, self._loop.create_future(), steps > 1)
        if prompt:
            self._prompts.append(job)
        else:
            self._answers.append(job)
        if not self._stepping:
            self._step()
        await job.done

    def workload(self) -> Workload:
        jobs, left = [*self._prompts, *self._answers], [each.left for each in self._prompts]
        return Workload(prompts=len(left), tokens=sum(left), answers=sum(each.more for each in jobs))

    def _step(self) -> None:
        answers, budget = list(self._answers), self._chunk - len(self._answers)
        done: list[Job] = []
        total = 0
        for job in self._prompts:
            took = min(job.left, budget - total)
            if took <= 0:
                break
            job.left -= took
            total += took
            if not job.left:
                done.append(job)
        self._stepping = bool(answers or total)
        if self._stepping:
            seconds = COSTS.step + COSTS.stream * len(answers) + COSTS.token * total
            self._loop.call_later(seconds, self._end, answers, done)

    def _end(self, answers: list[Job], done: list[Job]) -> None:
        for job in done:
            self._prompts.remove(job)
            self._answers.append(job)
        for job in answers + done:
            job.token()
            job.steps -= 1
            if not job.steps:
                self._answers.remove(job)
                job.done.set_result(None)
        self._step()


@dataclass
class Seen:
    """What clients saw."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ended: int = 0

    def figures(self, seconds: float) -> dict[str, float]:
        first, gaps = sorted(self.first), sorted(self.gaps)
        return {
            "rps": self.ended / seconds,
            "ttft50": first[len(first) // 2],
            "ttft99": first[int(0.99 * len(first))],
            "gap50": gaps[len(gaps) // 2],
            "gap99": gaps[int(0.99 * len(gaps))],
        }


class Noise(PlacementCosts):
    """Predicts whatever it draws."""

    def _prompt_part(self, engine: EngineCosts, queued: float, new: int) -> tuple[float, float]:
        return self.dice.random(), self.dice.random()

    def _answer_part(self, engine: EngineCosts, tokens: int, share: float) -> tuple[float, float]:
        return self.dice.random(), self.dice.random()


class Proxy:
    """The proxy's parts in front of the engines."""

    def __init__(
        self, loop: VirtualLoop, routing: Routing, noise: PlacementCosts | None, first_turn: Callable[[], int]
    ) -> None:
        self.registry = Registry(first_turn=first_turn)
        self.router = Router(self.registry, routing)
        if noise:
            self.router.costs = noise
        self.admission = Admission(self.router, Limits(), RequestCounters(), loop.time)

    def join(self, ping: Ping) -> None:
        instance = self.registry.observe(ping, 0.0)
        assert instance is not None
        instance.healthy, instance.life = True, float("inf")


class Pool:
    """Engines, proxies, and clients.

    Args:
        system: plain (engines in turn, without the proxy's routing), fixed (half P, half D), pair or auto.
        chunks: tokens of a step of each engine, one for each.
        warm: until then what clients see does not count.
        proxies: how many; with `reports` the engines report to them.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        system: str,
        chunks: Sequence[int],
        seed: int,
        weight: float,
        noise: bool,
        warm: float,
        proxies: int,
        reports: bool,
    ) -> None:
        self.warm = warm
        self.loop, self.system, self.seen = loop, system, Seen()
        self.dice = random.Random(seed)
        routing = Routing(placement="auto" if system == "auto" else "pair", pause_weight=weight)
        dice = random.Random(seed)
        self.proxies = [
            Proxy(
                loop,
                routing,
                Noise(weight, dice=random.Random(seed)) if noise else None,
                (lambda: -dice.randrange(1 << 30)),
            )
            for _ in range(proxies)
        ]
        self.asked = 0
        self.pings: list[Ping] = []
        self.engines: dict[str, Engine] = {}
        self.turn = 0
        self.ways: dict[str, int] = {}
        for number, chunk in enumerate(chunks):
            role: Any = "both" if system != "fixed" else "PD"[number % 2]
            ping = Ping(type=role, http_address=f"10.0.0.{number}:80", zmq_address=f"10.0.0.{number}:90",
                        incarnation="1", model="m", version=5)  # fmt: skip
            self.engines[ping.http_address] = Engine(loop, chunk)
            self.pings.append(ping)
            for proxy in self.proxies:
                proxy.join(ping)
            if reports:
                loop.call_later(REPORT_SECONDS * (number + 1) / len(chunks), self._report, ping)

    def _report(self, ping: Ping) -> None:
        """What an engine has to do now, which the proxies learn a little later."""
        self.loop.call_later(REPORT_SECONDS, self._report, ping)
        work = replace(self.engines[ping.http_address].workload(), age=REPORT_AGE)
        self.loop.call_later(REPORT_AGE, self._reported, replace(ping, workload=work))

    def _reported(self, ping: Ping) -> None:
        for proxy in self.proxies:
            proxy.registry.observe(ping, self.loop.time())

    async def client(self, mix: str, until: float) -> None:
        while self.loop.time() < until:
            await self.one(mix)

    async def arrivals(self, mix: str, until: float, rate: float) -> None:
        async with asyncio.TaskGroup() as open_loop:
            while self.loop.time() < until:
                open_loop.create_task(self.one(mix))
                await asyncio.sleep(self.dice.expovariate(rate))

    async def one(self, mix: str) -> None:
        prompt, answer = mix_at(mix, self.loop.time()).draw(self.dice)
        times = [self.loop.time()]
        await self.serve(prompt, answer, partial(self._note, times))
        if times[0] < self.warm:
            return
        first, *gaps = (late - early for early, late in pairwise(times))
        self.seen.first.append(first)
        self.seen.gaps += gaps
        self.seen.ended += 1

    def _note(self, times: list[float]) -> None:
        times.append(self.loop.time())

    async def serve(self, prompt: int, answer: int, token: Callable[[], None]) -> None:
        if self.system == "plain":
            self.turn += 1
            engine = list(self.engines.values())[self.turn % len(self.engines)]
            await engine.run(prompt, answer, token)
            return
        request = RoutingRequest("m", cast(Prompt, ModelledPrompt(prompt, ())))
        self.asked += 1
        proxy = self.proxies[self.asked % len(self.proxies)]
        async with proxy.admission.place(request, paired=True) as place:
            await self._placed(place, prompt, answer, token)

    async def _placed(self, place: RequestPlace, prompt: int, answer: int, token: Callable[[], None]) -> None:
        choice, progress, began = place.choice, place.progress, False

        def came() -> None:
            nonlocal began
            if not began:
                began = True
                if progress is not None:
                    progress.decodes(self.loop.time())
            token()

        way = "whole" if choice.prefill is None else self._name(choice.prefill) + ">"
        way += self._name(choice.decode)
        self.ways[way] = self.ways.get(way, 0) + 1
        decode = self.engines[choice.decode.ping.http_address]
        place.sent()
        await asyncio.sleep(COSTS.way)
        if choice.prefill is None:
            await decode.run(prompt, answer, came)
        else:
            with choice.prefill.busy(lambda loss: None, prompt):
                await self.engines[choice.prefill.ping.http_address].run(prompt, 1, lambda: None)
            if progress is not None:
                progress.computed(self.loop.time())
            await asyncio.sleep(COSTS.push[0] + COSTS.push[1] * prompt)
            await decode.run(0, answer, came)
        if progress is not None:
            progress.ended(answer - 1, self.loop.time())

    def _name(self, instance: Instance) -> str:
        return "ABCDEFGH"[list(self.engines).index(instance.ping.http_address)]


def simulated(
    system: str, mix: str, *, size: int = 2, clients: int = 16, seconds: float = 120.0, seed: int = 1,
    weight: float = 0.1, noise: bool = False, rate: float = 0.0, chunks: Sequence[int] = (CHUNK,),
    warm: float = 0.0, proxies: int = 1, reports: bool = False,
) -> tuple[dict[str, float], Pool]:  # fmt: skip
    """The figures of one run, and what is left of it. The last of `chunks` is that of all further engines."""
    loop = VirtualLoop()
    every = [chunks[min(number, len(chunks) - 1)] for number in range(size)]
    pool = Pool(loop, system, every, seed, weight, noise, warm, proxies, reports)

    async def run() -> None:
        if rate:
            await pool.arrivals(mix, seconds, rate)
        else:
            await asyncio.gather(*(pool.client(mix, seconds) for _ in range(clients)))

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    figures = pool.seen.figures(loop.time() - warm)
    errors = [
        abs(p.first_token - seen) / seen for proxy in pool.proxies for p, seen in proxy.router.costs.latest
    ]
    if errors:
        figures["error"] = statistics.median(errors)
    return figures, pool


def rows(args: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, float], Pool]]:
    for mix in args.mixes:
        for system in args.systems:
            name, _, weight = system.partition(":")
            figures, pool = simulated(
                name, mix, size=args.size, clients=args.clients, seconds=args.seconds, seed=args.seed,
                weight=float(weight or 0.1), noise=args.noise, rate=args.rate, warm=args.warm,
                chunks=(CHUNK,) if name == "plain" else args.chunks, proxies=args.proxies,
                reports=args.reports,
            )  # fmt: skip
            yield mix, system, figures, pool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--size", type=int, default=2, help="engines")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm", type=float, default=0.0, help="seconds at the beginning that do not count")
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[CHUNK], help="tokens of a step of each engine of the pool"
    )
    parser.add_argument("--rate", type=float, default=0.0, help="of an open loop; 0: a closed one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--proxies", type=int, default=1)
    parser.add_argument("--reports", action="store_true", help="engines report what they have to do")
    parser.add_argument("--noise", action="store_true", help="predictions are drawn, not made")
    parser.add_argument("--mixes", nargs="+", default=list(MIXES))
    parser.add_argument("--systems", nargs="+", default=["plain", "fixed", "pair", "auto"])
    args = parser.parse_args()
    before: dict[str, float] = {}
    for mix, system, figures, pool in rows(args):
        if system == "plain":
            before = figures
        print(f"{mix:14} {system:9}", " ".join(
            f"{name} {value:.3f}" + (f" ({value / before[name]:.2f})" if name in before else "")
            for name, value in figures.items()
        ), pool.ways)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
