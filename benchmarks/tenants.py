"""What one tenant notices of another that sends ten times its share, with stand-ins for P and D.

The real proxy command, over HTTP on loopback, in front of one P and one D that only take as long as the costs
of fleet_engines.py say: P computes one prompt after another, D a token of each stream in each step. One
tenant, `modest`, has --clients, each with one request after another and pauses of --think seconds, drawn anew
for each round. The other, `greedy`, sends ten times --share prompt tokens a second, whatever the answers are.
All prompts have --prompt tokens, all answers --answer. In each round, in an order that shifts by one:

alone: `modest` alone.
no tenants: both, and the proxy has no --tenants.
weights: both; equal weights, no limits, --max-requests 8.
limits: both; each may send --share prompt tokens a second.

Of `modest`: requests a second and median first token, and their ratios to `alone` of the same round. Writes
tenants.json and tenants.md to --out.

    python benchmarks/tenants.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from decode_leg_report import description
from fleet_engines import COSTS
from proxy_side_by_side import ANSWER, EVENT, EVENT_WITH_IDS, FIRST_WITH_IDS, HERE, PATH, Stub, _chunk

from p2pkv.control.discovery import Ping
from p2pkv.control.pinger import Pinger
from p2pkv.demo.processes import free_ports
from p2pkv.demo.servers import LOOPBACK, ProxyServer

CONDITIONS = ("alone", "no tenants", "weights", "limits")
TIMES = 10
"""What `greedy` sends, times its share."""
WARM, REST = 1.0, 1.0
"""Seconds that do not count at the beginning, and between two conditions."""
LEAST, MOST = 0.9, 1.15


# P and D.


class Prefill:
    """One prompt after another; who has left is passed by."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, StandIn]] = deque()
        self._busy = False
        self.computed: dict[bytes, asyncio.Event] = {}

    def event(self, name: bytes) -> asyncio.Event:
        return self.computed.setdefault(name, asyncio.Event())

    def compute(self, tokens: int, of: StandIn) -> None:
        self._queue.append((tokens, of))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._queue and not self._busy:
            tokens, of = self._queue.popleft()
            if not of.left:
                self._busy = True
                seconds = COSTS.begin + tokens / COSTS.prefill
                asyncio.get_running_loop().call_later(seconds, self._end, of)

    def _end(self, of: StandIn) -> None:
        asyncio.get_running_loop().call_later(COSTS.exposed, self.event(of.name).set)
        of.whole(ANSWER)
        self._next()


class Decode:
    """A token of each stream in each step."""

    def __init__(self) -> None:
        self._streams: dict[StandIn, list[int]] = {}
        self._stepping = False

    def add(self, of: StandIn, tokens: int, context: int) -> None:
        self._streams[of] = [tokens, context]
        if not self._stepping:
            self._plan()

    def _plan(self) -> None:
        self._stepping = bool(self._streams)
        if self._stepping:
            context = sum(each[1] for each in self._streams.values())
            seconds = COSTS.step + COSTS.step_stream * len(self._streams) + COSTS.step_token * context
            asyncio.get_running_loop().call_later(seconds, self._step)

    def _step(self) -> None:
        for stream, state in list(self._streams.items()):
            state[0] -= 1
            stream.token(last=not state[0])
            if not state[0] or stream.left:
                del self._streams[stream]
        self._plan()


class StandIn(Stub):
    """A connection to P, or to D."""

    def __init__(self, prefill: Prefill, decode: Decode | None) -> None:
        super().__init__(0.0)
        self._prefill, self._decode = prefill, decode
        self._begun = False
        self.left = False
        self.name = b""

    def connection_lost(self, error: Exception | None) -> None:
        self.left = True

    def whole(self, body: bytes) -> None:
        if not self.left:
            self._whole(body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST"):
            super()._answer(head, body)
            return
        asked = json.loads(body)
        self.name = head.lower().partition(b"x-request-id: ")[2].partition(b"\r\n")[0]
        if self._decode is None:
            self._prefill.compute(len(asked["prompt"]), self)
        else:
            self._ids, self._begun = bool(asked.get("return_token_ids")), False
            self._task = asyncio.create_task(self._generate(asked["max_tokens"], len(asked["prompt"])))

    async def _generate(self, tokens: int, context: int) -> None:
        await self._prefill.event(self.name).wait()
        del self._prefill.computed[self.name]
        assert self._decode is not None
        self._decode.add(self, tokens, context)

    def token(self, *, last: bool) -> None:
        if self.left:
            return
        if not self._begun:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
        event = (EVENT_WITH_IDS if self._begun else FIRST_WITH_IDS) if self._ids else EVENT
        self._begun = True
        self._transport.write(_chunk(event))
        if last:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def serve_engines(ports: tuple[int, int]) -> None:
    """A P and a D, until killed."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        prefill, decode = Prefill(), Decode()
        for port, of in zip(ports, (None, decode), strict=True):
            await loop.create_server(lambda of=of: StandIn(prefill, of), LOOPBACK, port)  # type: ignore[misc]
        await asyncio.Event().wait()

    asyncio.run(serve())


# Their clients.


@dataclass
class Noted:
    """What one tenant saw, of requests that ended within the time that counts."""

    first: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)


@dataclass
class Load:
    session: aiohttp.ClientSession
    url: str
    args: argparse.Namespace
    counts: Callable[[], bool]

    async def one(self, key: str, noted: Noted) -> None:
        body = {
            "model": "tiny",
            "prompt": [7] * self.args.prompt,
            "max_tokens": self.args.answer,
            "stream": True,
        }
        began, first = time.perf_counter(), None
        headers = {"Authorization": f"Bearer {key}"}
        async with self.session.post(self.url + PATH, json=body, headers=headers) as response:
            async for _ in response.content.iter_any():
                first = first or time.perf_counter() - began
        if self.counts():
            noted.statuses[response.status] += 1
            if response.status == 200 and first is not None:
                noted.first.append(first)

    async def closed(self, key: str, noted: Noted, dice: random.Random) -> None:
        while True:
            await asyncio.sleep(dice.expovariate(1 / self.args.think))
            await self.one(key, noted)

    async def opened(self, key: str, noted: Noted, rate: float, dice: random.Random) -> None:
        async with asyncio.TaskGroup() as tasks:
            due = time.perf_counter()
            while True:
                due += dice.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.create_task(self.one(key, noted))


async def measured(url: str, args: argparse.Namespace, *, both: bool, seed: int) -> dict[str, Any]:
    """One condition of one round."""
    modest, greedy = Noted(), Noted()
    begin = time.perf_counter() + WARM
    end = begin + args.seconds
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        load = Load(session, url, args, lambda: begin <= time.perf_counter() <= end)
        dice = [random.Random(f"{seed} {client}") for client in range(args.clients)]
        tasks = [asyncio.create_task(load.closed("modest", modest, each)) for each in dice]
        if both:
            rate = TIMES * args.share / args.prompt
            tasks.append(asyncio.create_task(load.opened("greedy", greedy, rate, random.Random(seed))))
        _, pending = await asyncio.wait(tasks, timeout=end - time.perf_counter())
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        if len(pending) < len(tasks):
            raise RuntimeError(f"a client ended: {ended}")
    await asyncio.sleep(REST)
    return {
        "requests": modest.statuses[200] / args.seconds,
        "first token": statistics.median(modest.first) if modest.first else args.seconds,
        "p90": sorted(modest.first)[int(0.9 * len(modest.first))] if modest.first else args.seconds,
        "statuses": dict(modest.statuses),
        "greedy": dict(greedy.statuses),
    }


# The run.


def proxies(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, ProxyServer]]:
    keys = "".join(f"[{name}]\nkeys = ['{name}']\nLIMITS\n" for name in ("modest", "greedy"))
    limits = {"weights": "", "limits": f"prompt_tokens = {args.share}"}
    for name in CONDITIONS[1:]:
        more: list[str] = ["--max-requests", "8"] if name == "weights" else []
        if name in limits:
            file = folder / f"tenants-{name}.toml"
            file.write_text(keys.replace("LIMITS", limits[name]))
            more += ["--tenants", str(file)]
        yield name, ProxyServer(extra_args=more, log_path=folder / f"tenants-{name.replace(' ', '-')}.log")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of each condition for each round."""
    args.logs.mkdir(parents=True, exist_ok=True)
    made, ports, found = dict(proxies(args, args.logs)), (free_ports(), free_ports()), []
    engines = multiprocessing.get_context("spawn").Process(target=serve_engines, args=(ports,), daemon=True)
    with contextlib.ExitStack() as stack:
        engines.start()
        stack.callback(engines.join)
        stack.callback(engines.terminate)
        for proxy in made.values():
            stack.enter_context(proxy)
            for role, port in zip(("P", "D"), ports, strict=True):
                zmq = f"{LOOPBACK}:{port % 20000 + 40000}"
                ping = Ping(type=role, http_address=f"{LOOPBACK}:{port}", zmq_address=zmq, model="tiny")
                pinger = Pinger(f"{LOOPBACK}:{proxy.discovery_port}", ping, 1.0)
                pinger.start()
                stack.callback(pinger.stop)
        for proxy in made.values():
            proxy.wait_ready(60.0)
        for turn in range(args.rounds):
            row = {}
            for at in range(len(CONDITIONS)):
                name = CONDITIONS[(turn + at) % len(CONDITIONS)]
                # Alone it has the proxy that both have then.
                url = made["limits" if name == "alone" else name].base_url
                row[name] = asyncio.run(measured(url, args, both=name != "alone", seed=turn))
                print(turn + 1, name, json.dumps(row[name]), file=sys.stderr, flush=True)
            found.append({name: row[name] for name in CONDITIONS})
    return found


def page(about: dict[str, Any], found: list[dict[str, Any]], args: argparse.Namespace) -> str:
    def span(values: list[float], form: str = ".2f") -> str:
        return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"

    lines = [
        f"# Two tenants, one of which sends ten times its share ({about['cpu']}, {about['cores']} cores)",
        "",
        f"{about['date']}, `{about['command']}`; load average before: {about['load_average']:.2f}. "
        "No vLLM runs: P and D are stand-ins with a cost model. Medians (lowest to highest) of "
        f"{len(found)} interleaved rounds of {args.seconds:g} s. What is measured: benchmarks/tenants.py.",
        "",
        f"`modest` has {args.clients} clients with pauses of {args.think:g} s; `greedy` sends "
        f"{TIMES * args.share:,} prompt tokens a second. P computes {COSTS.prefill:,.0f} a second. "
        "Of `modest`:",
        "",
        "| | requests a second | first token, median, ms | p90, ms "
        "| requests, of alone | first token, of alone |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in CONDITIONS:
        rows = [(each[name], each["alone"]) for each in found]
        figures = [
            span([row["requests"] for row, _ in rows], ".1f"),
            *(span([1e3 * row[key] for row, _ in rows], ".0f") for key in ("first token", "p90")),
            *(span([row[key] / alone[key] for row, alone in rows]) for key in ("requests", "first token")),
        ]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    greedy = {
        name: sum((Counter(each[name]["greedy"]) for each in found), Counter[int]()) for name in CONDITIONS
    }
    seconds = len(found) * args.seconds
    told = "; ".join(
        f"{name}: "
        + ", ".join(f"{count / seconds:.1f} times {status}" for status, count in sorted(of.items()))
        for name, of in greedy.items()
        if of
    )
    refused = sum(count for each in found for key, count in each["limits"]["statuses"].items() if key != 200)
    lines += [
        "",
        f"`greedy` got, a second: {told}. `modest` got other answers than 200 with limits: {refused}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each condition in a round")
    parser.add_argument("--clients", type=int, default=4, help="of `modest`")
    parser.add_argument("--think", type=float, default=0.3, help="mean seconds between two requests of one")
    parser.add_argument("--share", type=int, default=8000, help="prompt tokens a second of each tenant")
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--answer", type=int, default=24, help="tokens")
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"), help="where logs go")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where results go")
    args = parser.parse_args()
    args.tokens = 0
    about = description(args) | {"load_average": os.getloadavg()[0]}
    found = run(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tenants.json").write_text(json.dumps({"about": about, "rounds": found}, indent=1) + "\n")
    (args.out / "tenants.md").write_text(page(about, found, args))
    print(page(about, found, args))
    rows = [(each["limits"], each["alone"]) for each in found]
    requests, first = (
        statistics.median(row[key] / alone[key] for row, alone in rows) for key in ("requests", "first token")
    )
    return 0 if requests >= LEAST and first <= MOST else 1


if __name__ == "__main__":
    raise SystemExit(main())
