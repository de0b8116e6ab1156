"""A simulation of a fleet: the proxy's own code in virtual time, in front of engines that are only modelled.

Real, from p2pkv_proxy: membership (each instance pings every 3 s), breakers, admission, the policies,
retries, streams that go on elsewhere. Not real: HTTP, and the engines. A P computes one prompt after another,
and keeps blocks of 512 tokens, least recently used out. A D decodes its streams in a batch. See `Costs` for
the numbers and where they are from. Latencies of a real fleet are not to be had from this: it compares
policies, and shows what faults do to requests.

Requests are those of a trace (Mooncake's, FAST '25: kvcache-ai/Mooncake on GitHub, FAST25-release/traces):
copies of it, each with block hashes of its own, played so fast that the load is the same in all runs.

    python benchmarks/fleet_simulation.py --trace conversation_trace.jsonl [--fleet 200 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import selectors
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from p2pkv import __version__
from p2pkv.control.discovery import Ping
from p2pkv_proxy.admission import Admission, RequestPlace
from p2pkv_proxy.bodies import Prompt
from p2pkv_proxy.errors import ProxyError
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.instance import Instance
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import Pick, Policy, Routing, RoutingRequest
from p2pkv_proxy.retries import Retries
from p2pkv_proxy.routing import POLICIES, NoInstance, Router, UnknownModel

BLOCK, LINKS = 512, 8
"""Tokens of a block of the traces, and pieces of a prompt in p2pkv's chain for each (64 tokens)."""


@dataclass(frozen=True)
class Costs:
    """An instance of eight H100s that serves a model of 8 billion parameters.

    Attributes:
        prefill: prompt tokens a second. Mooncake's figure for 4,096 tokens on H800 TP 8: a transfer of 4.75
            ms is 3.8% of the time to first token, which is 125 ms.
        begin: seconds before a prompt begins. Assumed.
        exposed: seconds of a transfer that computing does not hide: Splitwise's 5 to 8 ms.
        step: seconds of a decode step: the P2pNcclConnector's documented 10.45 ms a token on 8 x H100.
        step_stream, step_token: what each stream and each token of its KV adds. 131,072 bytes a token at
            8 x 3.35 TB/s; a stream's share of the rest is assumed.
        cache: prompt tokens that a P keeps. Assumed.
    """

    prefill: float = 32_768.0
    begin: float = 0.005
    exposed: float = 0.008
    step: float = 0.0095
    step_stream: float = 2e-5
    step_token: float = 5e-9
    cache: int = 2_000_000


COSTS = Costs()
FIRST_TOKEN, PAUSE = 2.0, 0.025
"""A request is good if its first token comes within these seconds, and its mean pause is no longer."""
PING_SECONDS = 3.0
PREFILL_SHARE = 0.7
"""Of the instances, that are P's."""
LOAD = 0.8
"""Of the P's capacity, if no prompt were cached."""


class Clock(selectors.SelectSelector):
    """Nothing is waited for: time passes to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing is left that could happen")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual."""

    def __init__(self) -> None:
        self._virtual = Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


# Engines.


class Lost(Exception):
    """The instance is gone."""


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Prefill:
    """A P: one prompt after another."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._free_at = 0.0
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._open: set[asyncio.Future[None]] = set()
        self.alive = True

    def cached(self, blocks: Sequence[int]) -> int:
        """How many of them, from the first, it has."""
        return next((at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    async def compute(self, blocks: Sequence[int], tokens: int) -> int:
        """Returns how many tokens it had."""
        if not self.alive:
            raise Lost
        had = min(tokens - 1, BLOCK * self.cached(blocks))
        work = COSTS.begin + (tokens - had) / COSTS.prefill
        self._free_at = max(self._free_at, self._loop.time()) + work
        await self._until(self._free_at)
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * BLOCK > COSTS.cache:
            self._blocks.popitem(last=False)
        return had

    async def _until(self, when: float) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_at(when, _finish, done)
        self._open.add(done)
        try:
            await done
        finally:
            self._open.discard(done)
            timer.cancel()

    def die(self) -> None:
        self.alive = False
        for each in list(self._open):
            each.set_exception(Lost())


class Decode:
    """A D: its streams advance together, a token a step."""

    def __init__(self, loop: VirtualLoop, pauses: dict[int, float]) -> None:
        self._loop = loop
        self._pauses = pauses
        self._streams: dict[asyncio.Future[None], tuple[float, int]] = {}
        """Of each the progress at which it ends, and tokens of its KV."""
        self._progress = self._since = 0.0
        self._step = COSTS.step
        self._timer: asyncio.TimerHandle | None = None
        self.alive = True

    async def generate(self, tokens: int, context: int, sent: Callable[[int], None]) -> None:
        """`sent` is called at the end, whatever that is, with how many tokens came. Raises Lost."""
        if not self.alive:
            raise Lost
        self._advance()
        begun, done = self._progress, self._loop.create_future()
        self._streams[done] = (self._progress + tokens, context + tokens // 2)
        self._plan()
        try:
            await done
        finally:
            self._advance()
            self._streams.pop(done, None)
            sent(min(tokens, int(self._progress - begun)))
            self._plan()

    def _advance(self) -> None:
        now = self._loop.time()
        steps = (now - self._since) / self._step
        if self._streams and steps:
            bucket = int(self._step * 1e4)
            self._pauses[bucket] = self._pauses.get(bucket, 0.0) + steps * len(self._streams)
            self._progress += steps
        self._since = now

    def _plan(self) -> None:
        """The next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._streams or not self.alive:
            return
        context = sum(kv for _, kv in self._streams.values())
        self._step = COSTS.step + COSTS.step_stream * len(self._streams) + COSTS.step_token * context
        first = min(end for end, _ in self._streams.values())
        self._timer = self._loop.call_later(max(0.0, first - self._progress) * self._step, self._end)

    def _end(self) -> None:
        self._advance()
        for stream, (end, _) in list(self._streams.items()):
            if end - self._progress < 1e-6 and not stream.done():
                stream.set_result(None)
        self._timer = None

    def die(self) -> None:
        self._advance()
        self.alive = False
        for each in list(self._streams):
            if not each.done():
                each.set_exception(Lost())


# Requests.


@dataclass(frozen=True)
class Asked:
    """One line of a trace."""

    at: float
    tokens: int
    answer: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class ModelledPrompt:
    """What the policies read of a prompt."""

    tokens: int
    blocks: tuple[int, ...]

    @property
    def chain(self) -> tuple[bytes, ...]:
        return tuple(b"%d/%d" % (block, at) for block in self.blocks[:64] for at in range(LINKS))


def requests(trace: Path, rate: float, seconds: float, speed: float, seed: int) -> list[Asked]:
    """The first `seconds` of as many copies of the trace, each played about `speed` times as fast, as
    together have `rate` prompt tokens a second."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    length = max(line["timestamp"] for line in lines) / 1e3
    tokens = sum(line["input_length"] for line in lines)
    copies, dice, made = max(1, round(rate * length / speed / tokens)), random.Random(seed), []
    span = copies * tokens / rate
    for copy in range(copies):
        begin = dice.random() * span
        for line in lines:
            at = (line["timestamp"] / 1e3 * span / length - begin) % span
            if at < seconds:
                blocks = tuple(copy << 32 | each for each in line["hash_ids"])
                made.append(Asked(at, line["input_length"], max(2, line["output_length"]), blocks))
    return sorted(made, key=lambda each: each.at)


@dataclass
class Ended:
    """What became of the requests."""

    first: list[float] = field(default_factory=list)
    good: int = 0
    answered: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    prompt: int = 0
    hit: int = 0
    pauses: dict[int, float] = field(default_factory=dict)

    def figures(self, asked: int, loads: Sequence[int]) -> dict[str, Any]:
        first = sorted(self.first)
        seen, most = 0.0, 0.99 * sum(self.pauses.values())
        slowest = 0
        for slowest, count in sorted(self.pauses.items()):  # noqa: B007
            seen += count
            if seen >= most:
                break
        return {
            "asked": asked,
            "goodput": self.good / asked,
            "not answered": asked - self.answered,
            "why": self.lost,
            "first token, p50": statistics.median(first) if first else None,
            "first token, p99": first[int(0.99 * len(first))] if first else None,
            "pause, p99": slowest / 1e4,
            "hits": self.hit / max(1, self.prompt),
            "busiest P": max(loads) / statistics.mean(loads) if loads else None,
        }


class Source:
    """A connection of an instance to the proxy, as membership asks about it."""

    member = False

    def __init__(self) -> None:
        self.open = True

    def stands(self) -> bool:
        return self.open

    def answer(self, frame: bytes) -> bool:
        return self.open


@dataclass
class Member:
    """An instance of the fleet."""

    ping: Ping
    engine: Prefill | Decode
    source: Source
    computed: int = 0


class Fleet:
    """The proxy's parts, the engines, and the requests."""

    def __init__(self, loop: VirtualLoop, size: int, policy: str, limits: Limits) -> None:
        self.loop = loop
        self.ended = Ended()
        self.registry = Registry()
        self.counters = RequestCounters()
        self.router = Router(
            self.registry,
            Routing(prefill=policy, decode="least_loaded", prefix_memory=1 << 22),
            room=limits.max_requests,
            alone=limits.alone,
        )
        self.admission = Admission(self.router, limits, self.counters, loop.time)
        self.retries = Retries(self.admission, limits, self.counters, loop.time)
        self.limits = limits
        self.members: dict[str, Member] = {}
        self.split: set[str] = set()
        """Those whose pings do not arrive."""
        prefills = round(size * PREFILL_SHARE)
        for number in range(size):
            self.start(number, "P" if number < prefills else "D")

    def start(self, number: int, role: Any, incarnation: str = "first") -> None:
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        ping = Ping(
            type=role,
            http_address=f"{address}:8000",
            zmq_address=f"{address}:14579",
            incarnation=incarnation,
            model="m",
            tp_size=1,
        )
        engine = Prefill(self.loop) if role == "P" else Decode(self.loop, self.ended.pauses)
        self.members[ping.http_address] = Member(ping, engine, Source())
        self._observe(self.members[ping.http_address])

    def _observe(self, member: Member) -> None:
        instance = self.registry.observe(member.ping, self.loop.time(), member.source)
        if instance is not None:
            instance.healthy = True

    async def pings(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            for name, member in self.members.items():
                if member.engine.alive and name not in self.split:
                    self._observe(member)
            self.registry.expire(self.loop.time())
            self.admission.advance()

    def kill(self, name: str) -> None:
        member = self.members[name]
        member.engine.die()
        member.source.open = False

    # One request, as service.py and attempt.py do it.

    async def serve(self, asked: Asked) -> None:
        request = RoutingRequest("m", cast(Prompt, ModelledPrompt(asked.tokens, asked.blocks)))
        self.ended.prompt += asked.tokens
        try:
            async with self.admission.place(request, paired=True) as place:
                await self._attempts(asked, place)
        except (ProxyError, NoInstance, UnknownModel) as error:
            self._lost(str(error).partition(";")[0][:60])

    def _lost(self, why: str) -> None:
        self.ended.lost[why] = self.ended.lost.get(why, 0) + 1

    async def _attempts(self, asked: Asked, place: RequestPlace) -> None:
        failed: frozenset[Instance] = frozenset()
        sent, tries, resumes, first = 0, 1, 0, None
        began = self.loop.time()
        while True:
            choice = place.choice
            try:
                if choice.prefill is not None:
                    await self._prefill(choice.prefill, place, asked, sent)
                else:
                    await asyncio.sleep((asked.tokens + sent) / COSTS.prefill)
                if first is None:
                    first = self.loop.time() - began + COSTS.step
                engine = self._engine(choice.decode)
                assert isinstance(engine, Decode)
                before = sent

                def note(count: int, before: int = before) -> None:
                    nonlocal sent
                    sent = before + count

                with choice.decode.busy(lambda loss: None):
                    await engine.generate(asked.answer - sent, asked.tokens + sent, note)
                self._record(choice.decode, place, success=True)
                self._done(asked, first, self.loop.time() - began)
                return
            except Lost:
                prefill, decode = choice.prefill, choice.decode
                culprit = decode if prefill is None or self._engine(prefill).alive else prefill
                self._record(culprit, place, success=False)
                culprit.healthy = False  # its port refuses, as the next call and the prober find
                failed |= {culprit}
                if sent and resumes < self.limits.resumes:
                    if await self.retries.resume(place, failed, resumes):
                        resumes += 1
                        continue
                elif not sent and await self.retries.elsewhere(place, culprit, failed, tries):
                    tries += 1
                    continue
                elif not sent and culprit is prefill and self.admission.stay_alone(place, failed):
                    continue
                self._lost("lost with its instance")
                return

    async def _prefill(self, instance: Instance, place: RequestPlace, asked: Asked, sent: int) -> None:
        engine = self._engine(instance)
        assert isinstance(engine, Prefill)
        place.sent()
        with instance.busy(lambda loss: None, place.choice.prefill_tokens):
            had = await engine.compute(asked.blocks, asked.tokens + sent)
        self.ended.hit += had
        self.members[instance.ping.http_address].computed += asked.tokens + sent - had
        self._record(instance, place, success=True)
        await asyncio.sleep(COSTS.exposed)

    def _engine(self, instance: Instance) -> Prefill | Decode:
        return self.members[instance.ping.http_address].engine

    def _record(self, instance: Instance, place: RequestPlace, *, success: bool) -> None:
        now = self.loop.time()
        if success:
            instance.breaker.succeeded(now, place.key)
        else:
            instance.breaker.failed(now, place.key)

    def _done(self, asked: Asked, first: float, whole: float) -> None:
        ended = self.ended
        ended.answered += 1
        ended.first.append(first)
        pause = (whole - first) / (asked.answer - 1)
        ended.good += first <= FIRST_TOKEN and pause <= PAUSE


# What others do, as vllm-router describes it.


class CacheAware(Policy):
    """The one that has most of the prompt, if that is more than half of it; else the one that has least in
    its cache. If the loads differ too much, the one with the least to do."""

    help = "vllm-router's cache_aware"

    def __init__(self) -> None:
        self._index = POLICIES["prefix_aware"].of(Routing(prefix_memory=1 << 22))
        self._given: dict[str, int] = {}

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        loads = [each.load for each in candidates]
        cached = self._index.cached(candidates, request)
        if max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads):
            chosen = min(candidates, key=lambda each: each.load)
        else:
            chosen = max(candidates, key=lambda each: cached.get(each, 0))
            if cached.get(chosen, 0) <= 0.5 * request.prompt.tokens:
                chosen = min(candidates, key=lambda each: self._given.get(each.name, 0))
        self._given[chosen.name] = self._given.get(chosen.name, 0) + request.prompt.tokens
        self._index([chosen], request)
        return Pick(chosen, cached.get(chosen, 0))


OTHERS: dict[str, type[Policy]] = {"cache_aware (as vllm-router's)": CacheAware}


# Faults.


async def rack(fleet: Fleet) -> None:
    """40 of a thousand die at one moment."""
    names = list(fleet.members)
    for name in random.Random(1).sample(names, max(1, len(names) // 25)):
        fleet.kill(name)


async def split(fleet: Fleet) -> None:
    """The pings of half of the instances do not arrive for 20 s; requests do."""
    fleet.split = set(random.Random(2).sample(list(fleet.members), len(fleet.members) // 2))
    await asyncio.sleep(20.0)
    fleet.split = set()


async def restarts(fleet: Fleet) -> None:
    """Three in ten are killed and started again within a minute, one after the other."""
    names = random.Random(3).sample(list(fleet.members), 3 * len(fleet.members) // 10)
    for name in names:
        fleet.kill(name)
        fleet.loop.call_later(10.0, again, fleet, name)
        await asyncio.sleep(60.0 / len(names))


def again(fleet: Fleet, name: str) -> None:
    host = [int(part) for part in name.partition(":")[0].split(".")]
    number = (host[1] << 16) + (host[2] << 8) + host[3]
    fleet.start(number, fleet.members[name].ping.type, "second")


FAULTS = {"rack of 4% dies": rack, "half unheard for 20 s": split, "30% restarted in a minute": restarts}


async def after(seconds: float, fault: Callable[[Fleet], Awaitable[None]], fleet: Fleet) -> None:
    await asyncio.sleep(seconds)
    await fault(fleet)


def simulated(
    trace: Path, size: int, policy: str, fault: str | None, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one run."""
    rate = LOAD * round(size * PREFILL_SHARE) * COSTS.prefill
    asked = requests(trace, rate, args.seconds, args.speed, args.seed)
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    limits = Limits(max_requests=256, max_waiting=1 << 20, max_wait=30.0)
    fleet = Fleet(loop, size, policy, limits)

    async def run() -> None:
        background = [asyncio.create_task(fleet.pings())]
        if fault is not None:
            background.append(asyncio.create_task(after(args.seconds / 3, FAULTS[fault], fleet)))
        tasks = []
        for each in asked:
            await asyncio.sleep(max(0.0, each.at - loop.time()))
            tasks.append(asyncio.create_task(fleet.serve(each)))
        await asyncio.gather(*tasks)
        for task in background:
            task.cancel()

    began = time.process_time()
    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    loads = [each.computed for each in fleet.members.values() if isinstance(each.engine, Prefill)]
    figures = fleet.ended.figures(len(asked), loads)
    figures["resumed"] = fleet.counters.retried
    figures["CPU, us a request"] = 1e6 * (time.process_time() - began) / max(1, len(asked))
    return figures


def runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    POLICIES.update(OTHERS)
    for trace in args.trace:
        for size in args.fleet:
            for policy in args.policy or POLICIES:
                yield {"trace": trace, "size": size, "policy": policy, "fault": None}
            for fault in FAULTS:
                yield {"trace": trace, "size": size, "policy": "prefix_aware", "fault": fault}


def page(rows: Sequence[dict[str, Any]], when: str) -> Iterator[str]:
    yield f"# A simulated fleet ({when})"
    yield ""
    yield (
        "**A simulation**: the proxy's own code in virtual time, modelled engines; see fleet_simulation.py. "
        f"Good: first token within {FIRST_TOKEN:g} s and a mean pause of at most {PAUSE * 1e3:g} ms."
    )
    yield ""
    heads = "trace|instances|policy|fault|good|not answered|first token p50, p99|pause p99|hits|busiest P"
    yield "| " + " | ".join(heads.split("|")) + " |"
    yield "|---|---:|---|---|---:|---:|---|---:|---:|---:|"
    for row in rows:
        p50, p99 = row["first token, p50"], row["first token, p99"]
        yield (
            f"| {row['trace'].partition('_')[0]} | {row['size']:,} | {row['policy']} "
            f"| {row['fault'] or '-'} | "
            f"{row['goodput']:.3f} | {row['not answered']} of {row['asked']:,} | {p50:.2f} s, {p99:.2f} s | "
            f"{1e3 * row['pause, p99']:.1f} ms | {row['hits']:.2f} | {row['busiest P']:.2f} |"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, nargs="+", required=True)
    parser.add_argument("--fleet", type=int, nargs="+", default=[200])
    parser.add_argument("--policy", nargs="+", help="(default: all)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of requests (default: %(default)g)")
    parser.add_argument("--speed", type=float, default=60.0, help="of the trace (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    logging.disable(logging.WARNING)
    rows = []
    for run in runs(args):
        rows.append(run | {"trace": run["trace"].stem} | simulated(**run, args=args))
        print(json.dumps(rows[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fleet_simulation.json").write_text(json.dumps(rows) + "\n")
    (args.out / "fleet_simulation.md").write_text(
        "\n".join(page(rows, f"{datetime.now(UTC):%Y-%m-%d}, p2pkv {__version__}")) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
