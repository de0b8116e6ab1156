"""What one choice of a P and a D takes, by policy, placement and size of the fleet, without servers.

Each engine has three requests under way and reports its queue twice for each request. Prompts of 2,000 tokens
belong to conversations, of which many begin alike. A seeded run is made --repeat times and each of its
choices counts as its fastest; the figure is their mean. Beside it stand what `prefix_aware` takes of that
to remember where the prompt went, what `Admission` takes to note a choice and to let it go, and the fixed
loop of Python that every figure may be compared with.

    python benchmarks/choice_cost.py [--sizes 10,100,1000] [--repeat 8] [--only prefix_aware]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from msgspec.structs import replace

from p2pkv.control.discovery import Ping, Workload
from p2pkv_proxy.admission import Admission, RequestPlace
from p2pkv_proxy.bodies import Prompt
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.placement import Placement
from p2pkv_proxy.policy import Routing, RoutingRequest
from p2pkv_proxy.routing import PrefillMode, Router

MEASURED = 300
UNDER_WAY = 3
POLICIES = ("prefix_aware", "least_loaded", "power_of_two")


class Case(NamedTuple):
    """`links`: D's with a link to each P, which its pings name; 0: no matter."""

    placement: Placement
    policy: str
    roles: Literal["both", "PD"] = "both"
    links: int = 0


CASES = (
    *(Case(placement, policy) for placement in ("auto", "pair") for policy in POLICIES),
    Case("auto", "prefix_aware", "PD"),
    Case("auto", "prefix_aware", links=64),
)


@dataclass
class _Text:
    """In place of a Prompt: its length and its chain of pieces."""

    tokens: int
    chain: tuple[bytes, ...]


class _Connection:
    member = False

    def stands(self) -> bool:
        return True

    def answer(self, frame: bytes) -> bool:
        return True


class Fleet:
    def __init__(self, case: Case, size: int) -> None:
        self.dice = random.Random(1)
        self.now, self.spent, self.remembering, self._source = 0.0, 0, 0, _Connection()
        self.registry = Registry(first_turn=lambda: -self.dice.randrange(1 << 30))
        decode = "least_loaded" if case.policy == "prefix_aware" else case.policy
        router = Router(self.registry, Routing(prefill=case.policy, decode=decode, placement=case.placement))
        router.costs.dice.seed(1)
        self._choose = router.choose
        router.choose = self._timed  # type: ignore[method-assign]
        self._remember = router._pick_prefill.remember
        router._pick_prefill.remember = self._timed_memory  # type: ignore[method-assign]
        self.admission = Admission(router, Limits(), RequestCounters(), lambda: self.now)
        self.pings = [
            Ping(
                type="both" if case.roles == "both" else "PD"[at % 2],  # type: ignore[arg-type]
                http_address=f"10.0.{at >> 8}.{at & 255}:8000",
                zmq_address=f"10.0.{at >> 8}.{at & 255}:9000",
                model="m", version=5, fit="x", partners=case.links,
            )
            for at in range(size)
        ]  # fmt: skip
        for each in self.pings:
            found = self.registry.observe(each, 0.0, self._source)
            assert found is not None
            found.healthy = True

    def _timed(self, *args: Any, **more: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return self._choose(*args, **more)
        finally:
            self.spent = time.perf_counter_ns() - begin

    def _timed_memory(self, *args: Any) -> None:
        begin = time.perf_counter_ns()
        self._remember(*args)
        self.remembering = time.perf_counter_ns() - begin

    def run(self) -> Iterator[tuple[int, int, int, int]]:
        """Nanoseconds of a choice but for remembering the prompt, of that, of noting the choice, and of
        another request's end, for each request."""
        dice, size = self.dice, len(self.pings)
        begins = [[dice.randbytes(16) for _ in range(16)] for _ in range(20)]
        talks = [(*dice.choice(begins), *(dice.randbytes(16) for _ in range(15))) for _ in range(150)]
        under_way: list[RequestPlace] = []
        warm = max(200, (UNDER_WAY + 1) * size)
        for number in range(warm + MEASURED):
            self.now += 0.5 / size
            self._report()
            left = self._end(under_way) if len(under_way) >= UNDER_WAY * size else 0
            if number % 2 and under_way:
                under_way[-1].sent()
                if (progress := under_way[-1].progress) is not None:
                    progress.first_token(self.now)
            prompt = cast(Prompt, _Text(2000, dice.choice(talks)))
            begin = time.perf_counter_ns()
            under_way.append(self.admission._new_place(RoutingRequest("m", prompt), PrefillMode.WANTED))
            whole = time.perf_counter_ns() - begin
            if number >= warm:
                yield self.spent - self.remembering, self.remembering, whole - self.spent, left

    def _report(self) -> None:
        for _ in range(2):
            work = Workload(
                prompts=self.dice.randrange(3), tokens=self.dice.randrange(4000), answers=3, age=0.05
            )
            self.registry.observe(
                replace(self.dice.choice(self.pings), workload=work), self.now, self._source
            )

    def _end(self, under_way: list[RequestPlace]) -> int:
        old = under_way.pop(self.dice.randrange(len(under_way)) if self.dice.random() < 0.5 else 0)
        if old.progress is not None:
            old.progress.ended(20, self.now)
        begin = time.perf_counter_ns()
        self.admission._leave(old)
        return time.perf_counter_ns() - begin


def microseconds(case: Case, size: int, repeat: int) -> list[float]:
    runs = [list(Fleet(case, size).run()) for _ in range(repeat)]
    return [
        statistics.fmean(min(run[at][what] for run in runs) for at in range(MEASURED)) / 1e3
        for what in range(4)
    ]


def loop_microseconds() -> float:
    def turn() -> int:
        begin, seen = time.perf_counter_ns(), dict[int, int]()
        for at in range(2000):
            seen[at & 63] = at
        return time.perf_counter_ns() - begin

    return min(turn() for _ in range(40)) / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10,100,1000", help="of fleets")
    parser.add_argument("--repeat", type=int, default=8)
    parser.add_argument("--only", default="", help="cases whose policy or placement is this")
    args = parser.parse_args()
    sizes = [int(each) for each in args.sizes.split(",")]
    print("| placement, policy, roles, links | " + " | ".join(f"{each:,}" for each in sizes) + " | a loop |")
    print("|---|" + "---:|" * (len(sizes) + 1))
    for case in CASES:
        if args.only in ("", *case[:2]):
            found = (microseconds(case, size, args.repeat) for size in sizes)
            cells = [" + ".join(f"{each:.0f}" for each in four) for four in found]
            name = ", ".join(map(str, itertools.chain(case[:3], [case.links or "any"])))
            print(f"| {name} | " + " | ".join(cells) + f" | {loop_microseconds():.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
