"""A simulation of a fleet: the proxy's own code in virtual time, in front of engines that are only modelled.

Real, from p2pkv_proxy: membership (each instance pings every 3 s), breakers, admission, the policies,
retries, streams that go on elsewhere, the partners that D's connect to. Not real: HTTP, and what
fleet_engines.py models. Latencies of a real fleet are not to be had from this: it compares policies, and
shows what faults do to requests.

Requests are those of a trace (Mooncake's, FAST '25: kvcache-ai/Mooncake on GitHub, FAST25-release/traces):
copies of it, each with block hashes of its own, played so fast that the load is the same in all runs.

    python benchmarks/bench_fleet.py --trace conversation_trace.jsonl [--fleet 200 1000] [--processes 4]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from fleet_engines import BLOCK, COSTS, Closed, Decode, Links, Lost, Prefill, VirtualLoop

from p2pkv import __version__
from p2pkv.control.discovery import Ping
from p2pkv_proxy.admission import Admission, RequestPlace
from p2pkv_proxy.bodies import MAX_PIECES, PIECE_TOKENS, Prompt
from p2pkv_proxy.http import ProxyError
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.instance import Instance
from p2pkv_proxy.membership.partner_lists import PartnerLists
from p2pkv_proxy.membership.registry import Registry, random_turn
from p2pkv_proxy.policies import Pick, Policy, Routing, RoutingRequest
from p2pkv_proxy.routing import POLICIES, NoInstance, PrefillMode, Router, UnknownModel

FIRST_TOKEN, PAUSE = 2.0, 0.025
"""A request is good if its first token comes within these seconds, and its mean pause is no longer."""
PING_SECONDS = 3.0
PREFILL_SHARE = 0.7
"""Of the instances, that are P's."""
LOAD = 0.8
"""Of the P's capacity, if no prompt were cached."""
SHARED_BLOCKS = 2
"""A prompt that has more than so many first blocks of an earlier one goes on with its conversation."""
CLIENT_PAUSE = 0.1
"""Seconds after which a client whose proxy has died asks another one."""


# Requests.


@dataclass(frozen=True)
class Asked:
    """One line of a trace; `session`: its conversation."""

    at: float
    tokens: int
    answer: int
    blocks: tuple[int, ...]
    session: str


@dataclass(frozen=True)
class ModelledPrompt:
    """What the policies read of a prompt."""

    tokens: int
    blocks: tuple[int, ...]

    @cached_property
    def chain(self) -> tuple[int, ...]:
        pieces = BLOCK // PIECE_TOKENS
        return tuple(8 * block + at for block in self.blocks[: MAX_PIECES // pieces] for at in range(pieces))


def sessions(lines: Sequence[dict[str, Any]]) -> list[int]:
    """The conversation of each line."""
    of: dict[int, int] = {}
    found = []
    for number, line in enumerate(lines):
        blocks = line["hash_ids"]
        known = next((at for at, block in enumerate(blocks) if block not in of), len(blocks))
        session = of[blocks[known - 1]] if known > SHARED_BLOCKS else number
        found.append(session)
        for block in blocks:
            of.setdefault(block, session)
    return found


def requests(trace: Path, rate: float, seconds: float, span: float, seed: int) -> list[Asked]:
    """The first `seconds` of as many copies of the trace, each played within about `span` seconds, as
    together have `rate` prompt tokens a second."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    length = max(line["timestamp"] for line in lines) / 1e3
    tokens = sum(line["input_length"] for line in lines)
    copies, dice, made = max(1, round(rate * span / tokens)), random.Random(seed), []
    span = copies * tokens / rate
    talks = sessions(lines)
    for copy in range(copies):
        begin = dice.random() * span
        for line, talk in zip(lines, talks, strict=True):
            at = (line["timestamp"] / 1e3 * span / length - begin) % span
            if at < seconds:
                blocks = tuple(copy << 32 | each for each in line["hash_ids"])
                answer = max(2, line["output_length"])
                made.append(Asked(at, line["input_length"], answer, blocks, f"{copy}/{talk}"))
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
    asked_again: int = 0
    pauses: dict[int, float] = field(default_factory=dict)

    def figures(self, asked: int) -> dict[str, Any]:
        first = sorted(self.first)
        seen, most = 0.0, 0.99 * sum(self.pauses.values())
        slowest = 0
        for slowest, count in sorted(self.pauses.items()):  # noqa: B007
            seen += count
            if seen >= most:
                break
        return {
            "asked": asked,
            "goodput": round(self.good / asked, 4),
            "not answered": asked - self.answered,
            "why": self.lost,
            "first token, p50": round(statistics.median(first), 3) if first else None,
            "first token, p99": round(first[int(0.99 * len(first))], 3) if first else None,
            "pause, p99": slowest / 1e4,
            "hits": round(self.hit / max(1, self.prompt), 3),
            "asked again": self.asked_again,
        }


class Source:
    """A connection of an instance to the proxy, as membership asks about it."""

    member = False

    def __init__(self) -> None:
        self.open = True

    def is_connected(self) -> bool:
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


class Proxy:
    """The proxy's parts, as its service puts them together.

    Attributes:
        open: requests of clients.
    """

    def __init__(self, clock: Callable[[], float], policy: str, limits: Limits) -> None:
        self.clock = clock
        self.limits = limits
        self.registry = Registry(first_turn=random_turn)
        self.counters = RequestCounters()
        routing = Routing(prefill=policy, decode=DECODE.get(policy, "least_loaded"), prefix_memory=1 << 22)
        self.router = Router(
            self.registry, routing, room=limits.max_requests, decode_alone=limits.decode_alone
        )
        self.admission = Admission(self.router, limits, self.counters, clock)
        self.partners = PartnerLists(self.registry)
        self.open: set[asyncio.Task[None]] = set()

    def observe(self, member: Member) -> Instance | None:
        instance = self.registry.observe(member.ping, self.clock(), member.source)
        if instance is not None:
            instance.healthy = True
        return instance

    def tick(self) -> None:
        self.registry.expire(self.clock())
        self.admission.advance()

    def record(self, instance: Instance, place: RequestPlace, *, success: bool) -> None:
        if success:
            instance.answered(self.clock())
        outcome = instance.breaker.succeeded if success else instance.breaker.failed
        outcome(self.clock(), place.key)


class Fleet:
    """Proxies, engines, and the requests."""

    def __init__(self, loop: VirtualLoop, size: int, policy: str, limits: Limits, proxies: int) -> None:
        self.loop = loop
        self.ended = Ended()
        self.links = Links()
        self.proxies = [Proxy(loop.time, policy, limits) for _ in range(proxies)]
        self.members: dict[str, Member] = {}
        self.split: set[str] = set()
        """Those whose pings do not arrive."""
        self._dice = random.Random(4)
        prefills = round(size * PREFILL_SHARE)
        for number in range(size):
            self.start(number, "P" if number < prefills else "D")
        for name in self.members:
            self._preconnect(name)

    def start(self, number: int, role: Any, incarnation: str = "first") -> str:
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        ping = Ping(
            type=role,
            http_address=f"{address}:8000",
            zmq_address=f"{address}:14579",
            incarnation=incarnation,
            model="m",
            tp_size=1,
            partners=COSTS.max_links if role == "D" else 0,
        )
        engine = Prefill(self.loop) if role == "P" else Decode(self.loop, self.ended.pauses)
        self.members[ping.http_address] = Member(ping, engine, Source())
        self._observe(self.members[ping.http_address])
        return ping.http_address

    def _observe(self, member: Member) -> None:
        for proxy in self.proxies:
            proxy.observe(member)

    def _preconnect(self, name: str) -> None:
        """A D connects to the P's that a proxy names."""
        proxy, ping = self.proxies[0], self.members[name].ping
        instance = proxy.registry.of(ping)
        if ping.type == "D" and instance is not None:
            for address in proxy.partners.of(instance, self.loop.time()):
                self.links.preconnect(address.replace(":14579", ":8000"), name)

    async def pings(self) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            for name, member in self.members.items():
                if member.engine.alive and name not in self.split:
                    self._observe(member)
            for proxy in self.proxies:
                proxy.tick()

    def kill(self, name: str) -> None:
        member = self.members[name]
        member.engine.die()
        member.source.open = False
        self.links.forget(name)

    def again(self, name: str) -> None:
        """It has started again."""
        host = [int(part) for part in name.partition(":")[0].split(".")]
        number = (host[1] << 16) + (host[2] << 8) + host[3]
        self._preconnect(self.start(number, self.members[name].ping.type, "second"))

    def figures(self, asked: int) -> dict[str, Any]:
        ps = [each.computed for each in self.members.values() if isinstance(each.engine, Prefill)]
        ds = [each.engine.generated for each in self.members.values() if isinstance(each.engine, Decode)]
        return {
            **self.ended.figures(asked),
            "busiest P": round(max(ps) / statistics.mean(ps), 3),
            "busiest D": round(max(ds) / statistics.mean(ds), 3),
            "links": self.links.most,
            "links built in the way": self.links.built,
            "resumed or retried": sum(proxy.counters.retried for proxy in self.proxies),
        }

    async def client(self, asked: Asked) -> None:
        """Asks one of the proxies, and another one if that dies."""
        began = self.loop.time()
        while True:
            proxy = self._dice.choice(self.proxies)
            task = asyncio.create_task(self._serve(proxy, asked, began))
            proxy.open.add(task)
            try:
                await task
                return
            except asyncio.CancelledError:
                self.ended.asked_again += 1
                await asyncio.sleep(CLIENT_PAUSE)
            finally:
                proxy.open.discard(task)

    # One request, as service.py and attempt.py do it.

    async def _serve(self, proxy: Proxy, asked: Asked, began: float) -> None:
        prompt = cast(Prompt, ModelledPrompt(asked.tokens, asked.blocks))
        request = RoutingRequest("m", prompt, session=asked.session)
        try:
            async with proxy.admission.place(request, paired=True) as place:
                await self._attempts(proxy, asked, place, began)
        except (ProxyError, NoInstance, UnknownModel) as error:
            self._lost(str(error).partition(";")[0][:60])

    def _lost(self, why: str) -> None:
        self.ended.lost[why] = self.ended.lost.get(why, 0) + 1

    async def _attempts(self, proxy: Proxy, asked: Asked, place: RequestPlace, began: float) -> None:
        failed: frozenset[Instance] = frozenset()
        sent, tries, resumes, first = 0, 1, 0, None
        while True:
            choice = place.choice
            try:
                if choice.prefill is not None:
                    await self._prefill(proxy, choice.prefill, place, asked, sent)
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
                proxy.record(choice.decode, place, success=True)
                self._done(asked, first, self.loop.time() - began)
                return
            except Lost as loss:
                closed = isinstance(loss, Closed)
                prefill, decode = choice.prefill, choice.decode
                culprit = decode if prefill is None or self._engine(prefill).alive else prefill
                proxy.record(culprit, place, success=False)
                culprit.healthy = False  # its port refuses, as the next call and the prober find
                failed |= {culprit}
                if sent and resumes - closed < proxy.limits.resumes:
                    if await proxy.admission.resume(place, failed, resumes - closed, free=closed):
                        resumes += not closed
                        continue
                elif not sent:
                    admission = proxy.admission
                    if await admission.try_elsewhere(place, culprit, failed, tries - closed, free=closed):
                        tries += not closed
                        continue
                    if culprit is prefill and admission.move(place, PrefillMode.UNAVAILABLE, failed):
                        continue
                self._lost("after its first token" if sent else "before its first token")
                return

    async def _prefill(
        self, proxy: Proxy, instance: Instance, place: RequestPlace, asked: Asked, sent: int
    ) -> None:
        engine = self._engine(instance)
        assert isinstance(engine, Prefill)
        name, tokens = instance.ping.http_address, asked.tokens + sent
        link_at = self.loop.time()
        if not self.links.stands(name, place.choice.decode.ping.http_address):
            link_at += COSTS.link
        place.sent()
        with instance.busy(lambda loss: None, place.choice.prefill_tokens):
            had = await engine.compute(asked.blocks, tokens)
        self.ended.prompt += tokens
        self.ended.hit += had
        self.members[name].computed += tokens - had
        proxy.record(instance, place, success=True)
        await asyncio.sleep(COSTS.exposed + max(0.0, link_at - self.loop.time()))

    def _engine(self, instance: Instance) -> Prefill | Decode:
        return self.members[instance.ping.http_address].engine

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

    def __init__(self, routing: Routing | None = None) -> None:
        self._index = POLICIES["prefix_aware"](Routing(prefix_memory=1 << 22))
        self._given: dict[str, int] = {}

    def __call__(self, candidates: Sequence[Instance], request: RoutingRequest) -> Pick:
        loads = [each.load for each in candidates]
        cached = self._index.cached(candidates, request)
        if max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads):
            chosen = min(candidates, key=lambda each: each.load)
        else:
            chosen = max(cached or candidates, key=lambda each: cached.get(each, 0))
            if cached.get(chosen, 0) <= 0.5 * request.prompt.tokens:
                chosen = min(candidates, key=lambda each: self._given.get(each.name, 0))
        self._given[chosen.name] = self._given.get(chosen.name, 0) + request.prompt.tokens
        self._index([chosen], request)
        return Pick(chosen, cached.get(chosen, 0))


CACHE_AWARE = "cache_aware"
OTHERS: dict[str, type[Policy]] = {CACHE_AWARE: CacheAware}
SYSTEMS = {
    "prefix_aware": "p2pkv: prefix_aware",
    "least_loaded": "p2pkv: least_loaded",
    "round_robin": "round robin",
    "power_of_two": "power of two",
    "consistent_hash": "consistent hash",
    CACHE_AWARE: "cache-aware",
}
"""By P's policy; what the page calls them."""
DECODE = {
    "round_robin": "round_robin",
    "power_of_two": "power_of_two",
    "consistent_hash": "consistent_hash",
    CACHE_AWARE: "power_of_two",
}
"""D's policy, where it is not least_loaded."""


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


async def proxy_dies(fleet: Fleet) -> None:
    """With it end the requests that it has under way; its clients ask the others."""
    victim = fleet.proxies.pop()
    for task in list(victim.open):
        task.cancel()


async def restarts(fleet: Fleet) -> None:
    """Three in ten are killed one after the other within 20 s, and each is there again 10 s later."""
    names = random.Random(3).sample(list(fleet.members), 3 * len(fleet.members) // 10)
    for name in names:
        fleet.kill(name)
        fleet.loop.call_later(10.0, fleet.again, name)
        await asyncio.sleep(20.0 / len(names))


@dataclass(frozen=True)
class Fault:
    """What happens, after a third of the usual time; and how many times as long requests come."""

    happens: Callable[[Fleet], Awaitable[None]]
    proxies: int = 1
    longer: float = 1.0


FAULTS = {
    "4% die at once": Fault(rack),
    "pings of half lost for 20 s": Fault(split, longer=3.0),
    "one of four proxies dies": Fault(proxy_dies, proxies=4),
    "30% restart within half a minute": Fault(restarts, longer=4.0),
}


def simulated(
    trace: Path, size: int, policy: str, fault: str | None, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one run."""
    random.seed(args.seed)
    what = FAULTS[fault] if fault else Fault(lambda _: asyncio.sleep(0))
    rate = LOAD * round(size * PREFILL_SHARE) * COSTS.prefill
    seconds = args.seconds * what.longer
    span = max(args.span, seconds)
    asked = requests(trace, rate, seconds, span, args.seed)
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    limits = Limits(max_requests=256, max_waiting=1 << 20, max_wait=30.0)
    began = time.process_time()
    fleet = Fleet(loop, size, policy, limits, what.proxies)

    async def fault_comes() -> None:
        await asyncio.sleep(args.seconds / 3)
        await what.happens(fleet)

    async def run() -> None:
        background = [asyncio.create_task(fleet.pings()), asyncio.create_task(fault_comes())]
        tasks = []
        for each in asked:
            await asyncio.sleep(max(0.0, each.at - loop.time()))
            tasks.append(asyncio.create_task(fleet.client(each)))
        await asyncio.gather(*tasks)
        for task in background:
            task.cancel()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
    spent = time.process_time() - began
    cpu = round(1e6 * spent / max(1, len(asked)))
    return fleet.figures(len(asked)) | {"seconds": seconds, "span": span, "CPU, us a request": cpu}


def runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    POLICIES.update(OTHERS)
    for trace in args.trace:
        for size in args.fleet:
            for fault in args.fault or [None, *FAULTS]:
                for policy in args.policy or SYSTEMS:
                    yield {"trace": trace, "size": size, "policy": policy, "fault": fault or None}


NOTES = """\
- The traces are of an hour and of 17 minutes and are played much faster, so that turns of a conversation
  often come before the one before is computed: there are fewer hits than in a real fleet.
- The policies of others run in p2pkv's router, with its retries and its choice of pairs that have links.
  Round robin, power of two and consistent hash are policies of p2pkv, too.
- Of several proxies each knows only the requests that it has sent itself, so all systems place worse with
  four than with one, but for consistent hash: its choice needs no knowledge. On the synthetic trace, whose
  conversations have long common beginnings, it is the best then (0.92; prefix_aware 0.91), as any proxy
  sends a conversation to the same P. With one proxy it is behind, as it does not look at loads.
  A request of the proxy that dies is asked again by its client, from its beginning.
- Where the pings of half of the instances are lost, those that answer are not silent, so they get requests
  as the others do.
- What is not answered was lost with its instance once more than --retries (1) or --resume-limit (2) allow.
  A try at an instance that is gone before it is asked does not count.
- Not modelled: calls that hang when the network splits (only pings are lost), HTTP, tensor parallelism."""


def page(rows: Sequence[dict[str, Any]], when: str) -> Iterator[str]:
    yield f"# A simulated fleet ({when})"
    yield ""
    yield (
        "**A simulation**: the proxy's own code in virtual time, modelled engines; see bench_fleet.py. "
        f"Good: first token within {FIRST_TOKEN:g} s and a mean pause of at most {PAUSE * 1e3:g} ms. "
        f"Constants and their sources: fleet_engines.py. Links: of one instance, at most; built late: "
        f"requests whose link had to be built. At {COSTS.communicator} MB for a communicator, "
        f"{COSTS.max_links} links take {COSTS.communicator * COSTS.max_links / 1000:.1f} GB of a device."
    )
    yield ""
    yield NOTES
    heads = "system|good|not answered|first token p50, p99|pause p99|hits|busiest P, D|links, built late|run"
    for trace, size, fault in dict.fromkeys((row["trace"], row["size"], row["fault"]) for row in rows):
        yield ""
        yield f"## {trace}, {size:,} instances: {fault or 'no fault'}"
        one = next(row for row in rows if (row["trace"], row["size"], row["fault"]) == (trace, size, fault))
        yield ""
        yield f"{one['seconds']:g} s of requests; all of the trace is played within {one['span']:g} s."
        yield ""
        yield "| " + " | ".join(heads.split("|")) + " |"
        yield "|---|---:|---:|---|---:|---:|---|---|---|"
        for row in rows:
            if (row["trace"], row["size"], row["fault"]) == (trace, size, fault):
                yield line(row)


def line(row: dict[str, Any]) -> str:
    p50, p99 = row["first token, p50"], row["first token, p99"]
    late = row["links built in the way"] / row["asked"]
    return (
        f"| {SYSTEMS[row['policy']]} | {row['goodput']:.3f} | {row['not answered']} of {row['asked']:,} "
        f"| {p50:.2f} s, {p99:.2f} s | {1e3 * row['pause, p99']:.1f} ms | {row['hits']:.2f} "
        f"| {row['busiest P']:.2f}, {row['busiest D']:.2f} | {row['links']}, {late:.0%} "
        f"| {row['run']} |"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, nargs="+", required=True)
    parser.add_argument("--fleet", type=int, nargs="+", default=[200])
    parser.add_argument("--policy", nargs="+", choices=SYSTEMS, help="(default: all)")
    parser.add_argument("--fault", nargs="+", choices=["", *FAULTS], help="(default: all; '': none)")
    parser.add_argument("--seconds", type=float, default=9.0, help="of requests (default: %(default)g)")
    parser.add_argument(
        "--span", type=float, default=24.0, help="seconds for all of a trace, at least (default: %(default)g)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args()


def one(args: argparse.Namespace, run: dict[str, Any]) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    POLICIES.update(OTHERS)
    figures = simulated(**run, args=args)
    return run | {"trace": run["trace"].stem.partition("_")[0], "run": f"{today()}, {commit()}"} | figures


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    args = arguments()
    written = args.out / "fleet.json"
    rows = json.loads(written.read_text()) if written.exists() else []
    with multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(partial(one, args), runs(args)):
            print(json.dumps(row), flush=True)
            same = ("trace", "size", "policy", "fault")
            rows = [each for each in rows if any(each[name] != row[name] for name in same)] + [row]
    faults, systems = [None, *FAULTS], [*SYSTEMS]
    rows.sort(
        key=lambda row: (
            row["trace"], row["size"], faults.index(row["fault"]), systems.index(row["policy"])
        )
    )  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    written.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    text = page(rows, f"{today()}, p2pkv {__version__}")
    (args.out / "fleet.md").write_text("\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
