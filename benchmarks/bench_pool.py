"""Engines as a pool of both roles behind p2pkv-proxy, beside as many plain servers in turn.

The systems, each with --engines engines of bench_servers.py's model, one OpenMP thread each, and steps of
--chunk tokens:

plain: servers without a connector, asked in turn.
direct: the engines of the pool asked in turn, each request whole: what the connector costs, and no proxy.
fixed: P's and D's: the engines of the pool, listed at a proxy that makes half of them P's.
pair: the pool with --placement pair: each prompt at another engine than its answer, unless it is far busier.
auto: the pool with --placement auto. `auto:N` has --pause-weight N.

Loads: `closed`, a loop of --clients; and a number, an open loop, in which requests come at random moments, so
often that they are this share of what the plain servers answered in their closed loops so far. Each lasts
--seconds, 40 where the mix changes every 20 s, and has the same requests for each system; rounds are
interleaved. The mixes are those of pool_simulation.py. Writes NAME.json and NAME.md
to --out. With --resume what is in NAME.json is kept, and only what is missing is measured.

    python benchmarks/bench_pool.py [--only mixed] [--rounds 5] [--loads closed 0.5 0.8 0.95] [--resume]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench_servers import MODEL, MODEL_SAID, NAME, ServerSettings, memory_gib
from clients import Asker, Asking, Failed, Taken, asking, description, paired_ratio, percentile, within
from pool_simulation import MIXES, SWITCH_SECONDS, mix_at

from p2pkv.demo import client
from p2pkv.demo.processes import ending_on_signals, free_ports
from p2pkv.demo.servers import LOOPBACK, ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model

LONGEST = 1024
FIGURES = {
    "requests a second": lambda row: row["ended"] / row["seconds"],
    "first token, median": lambda row: percentile(row["first"], 50.0),
    "first token, p99": lambda row: percentile(row["first"], 99.0),
    "pause, median": lambda row: percentile(row["gaps"], 50.0),
    "pause, p99": lambda row: percentile(row["gaps"], 99.0),
}
Ask = Callable[[Asking], Awaitable[Taken]]
Row = dict[str, Any]
Key = tuple[str, str, str, int]
CLOSED = "closed"


def requests(mix: str, number: int, since: float) -> Iterator[Asking]:
    """The same for each system in a round, but for what a mix that changes asks for at that time."""
    draw = random.Random(number)
    while True:
        tokens, answer = mix_at(mix, time.monotonic() - since).draw(draw)
        yield asking(tokens, MODEL.vocab, NAME, answer=answer, draw=draw)


async def loop(
    ask: Ask, mix: str, number: int, seconds: float, *, clients: int = 0, rate: float = 0.0
) -> Row:
    """Each of the `clients` asks again when it has its answer, or requests come at this `rate`, until
    `seconds` are over; then they end what is under way."""
    begin, taken, failed = time.monotonic(), list[Taken](), list[str]()
    left, draw = requests(mix, number, begin), random.Random(number)

    async def one_request() -> None:
        try:
            taken.append(await within(60.0, ask(next(left))))
        except Failed as error:
            failed.append(str(error))
            await asyncio.sleep(0.2)

    async def one_client() -> None:
        while time.monotonic() - begin < seconds:
            await one_request()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one_client())
        at = draw.expovariate(rate) if rate else seconds
        while at < seconds:
            await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
            group.create_task(one_request())
            at += draw.expovariate(rate)
    gaps = [gap for one in taken for gap in one.gaps]
    return {
        "seconds": time.monotonic() - begin,
        "ended": len(taken),
        "failed": failed[:3],
        "first": [round(one.first, 4) for one in taken],
        "gaps": [round(percentile(gaps, percent), 4) for percent in range(101)],
    }


class Servers:
    """The servers of all systems, and how each system is asked."""

    def __init__(self, args: argparse.Namespace, stack: contextlib.ExitStack, asker: Asker) -> None:
        self._asker, self._turn = asker, 0
        shop = ServerSettings(ensure_model(MODEL), LONGEST, args.chunk, args.kv_gib, args.logs)
        discovery = free_ports()
        pooled = [name for name in args.systems if name not in ("plain", "direct", "fixed")]
        # One discovery port at several addresses of loopback, so that each instance pings all proxies.
        hosts = [f"127.0.0.{2 + number}" for number in range(len(pooled))]
        self.plain = (
            [shop.server(f"pool-plain-{n}") for n in range(args.engines)] if "plain" in args.systems else []
        )
        self.pool: list[VllmServer] = []
        if set(args.systems) != {"plain"}:
            more: dict[str, Any] = {"proxy": (",".join(hosts or [LOOPBACK]), discovery)}
            self.pool = [
                replace(shop, chunk=chunk).server(f"pool-both-{n}", role="both", **more)
                for n, chunk in enumerate(args.pool_chunks or [args.chunk] * args.engines)
            ]
        self.proxies: dict[str, ProxyServer] = {}
        for name, host in zip(pooled, hosts, strict=True):
            placement, _, weight = name.partition(":")
            options = ["--placement", placement, "--discovery", f"{host}:{discovery}"]
            options += ["--pause-weight", weight] if weight else []
            self.proxies[name] = ProxyServer(prefill=args.engines, extra_args=options)
        if "fixed" in args.systems:
            listed = []
            for number, each in enumerate(self.pool):
                role = "--prefill" if number < args.engines // 2 else "--decode"
                listed += [role, f"{_http(each)}={each.zmq_address}"]
            self.proxies["fixed"] = ProxyServer(extra_args=listed)
        for each in (*self.plain, *self.pool):
            stack.enter_context(each)
        for each in (*self.plain, *self.pool):
            each.wait_ready(300.0)
        for proxy in self.proxies.values():
            stack.enter_context(proxy).wait_ready(60.0)
        print(f"servers take {memory_gib([*self.plain, *self.pool]):.1f} GiB", flush=True)

    async def ask(self, system: str, one: Asking) -> Taken:
        if system in ("plain", "direct"):
            self._turn += 1
            servers = self.plain if system == "plain" else self.pool
            return await self._asker.single(servers[self._turn % len(servers)].base_url, one)
        return await self._asker.single(self.proxies[system].base_url, one)

    def learned(self, system: str) -> dict[str, Any]:
        """What --placement auto shows of itself; nothing for others."""
        if not system.startswith("auto"):
            return {}
        found: dict[str, Any] = json.loads(client.get(f"{self.proxies[system].base_url}/status"))
        return dict(found["placement"])


def _http(server: VllmServer) -> str:
    return re.sub("^http://", "", server.base_url)


def measure(args: argparse.Namespace, rows: list[Row], save: Callable[[], None]) -> None:
    done: set[Key] = {(row["mix"], row["load"], row["system"], row["round"]) for row in rows}
    wanted = [
        key
        for number in range(args.rounds)
        for mix in args.only
        for load in args.loads
        for system in _turned(args.systems, number)
        if (key := (mix, load, system, number)) not in done and (load == CLOSED or system != "fixed")
    ]
    if not wanted:
        return
    with contextlib.ExitStack() as stack, asyncio.Runner() as runner:
        asker = runner.run(_entered())
        servers = Servers(args, stack, asker)
        for system in args.systems:  # links, caches and what is learned
            runner.run(loop(partial(servers.ask, system), "mixed", 99, args.warm, clients=args.clients))
        for mix, load, system, number in wanted:
            seconds = max(args.seconds, 2 * SWITCH_SECONDS if mix == "changes" else 0.0)
            how = {"clients": args.clients} if load == CLOSED else {"rate": float(load) * capacity(rows, mix)}
            row = {"mix": mix, "load": load, "system": system, "round": number, **how}
            row |= runner.run(loop(partial(servers.ask, system), mix, number, seconds, **how))
            row["learned"] = {name: servers.learned(system).get(name) for name in ("median_error", "ways")}
            rows.append(row)
            save()
            print(_said(row), flush=True)
            time.sleep(args.settle)
        runner.run(asker.__aexit__())


def capacity(rows: Sequence[Row], mix: str) -> float:
    """Requests a second of the plain servers in their closed loops. Raises SystemExit without one."""
    closed = [row for row in rows if (row["mix"], row["load"], row["system"]) == (mix, CLOSED, "plain")]
    if not closed:
        sys.exit(
            f"an open loop of {mix} needs a closed one of `plain` before: add both to --loads, --systems"
        )
    return sum(row["ended"] for row in closed) / sum(row["seconds"] for row in closed)


def _said(row: Row) -> str:
    figures = " ".join(f"{name} {of(row):.3f}," for name, of in FIGURES.items())
    what = f"{row['mix']:14} {row['load']:6} {row['system']:9} {row['round']}"
    return f"{what}: {figures} {row['learned']} {row['failed'] or ''}"


async def _entered() -> Asker:
    return await Asker().__aenter__()


def _turned(names: Sequence[str], number: int) -> list[str]:
    at = number % len(names)
    return [*names[at:], *names[:at]]


def report(about: dict[str, Any], rows: Sequence[Row]) -> Iterator[str]:
    yield "# One pool, P's and D's, and plain servers in turn"
    yield ""
    yield f"{about['date']}; {about['cpu']}, {about['cores']} cores; {about['versions']}; {MODEL_SAID}."
    yield ""
    yield f"`{about['command']}`"
    yield ""
    yield "Medians of the rounds; behind them, the geometric mean of the ratios to `plain` in the same round"
    yield "and its 95% interval. Seconds, but for requests a second."
    for mix in dict.fromkeys(row["mix"] for row in rows):
        yield ""
        yield f"## {mix[0].upper()}{mix[1:]}"
        yield ""
        yield "| load | system | " + " | ".join(FIGURES) + " | error of predictions |"
        yield "|---|---|" + "---:|" * (len(FIGURES) + 1)
        for load, system, pairs in _pairs(rows, mix):
            cells = [_cell(of, pairs) for of in FIGURES.values()]
            errors = [row["learned"].get("median_error") for row, _ in pairs]
            known = [error for error in errors if error is not None]
            said = f"{percentile(known, 50.0):.0%}" if known else "-"
            yield f"| {load} | {system} | " + " | ".join(cells) + f" | {said} |"


def _pairs(rows: Sequence[Row], mix: str) -> Iterator[tuple[str, str, list[tuple[Row, Row | None]]]]:
    """Of each load and system the rounds, each with that of the plain servers."""
    by = {(row["load"], row["system"], row["round"]): row for row in rows if row["mix"] == mix}
    for load, system in dict.fromkeys((load, system) for load, system, _ in by):
        found = [(row, by.get((load, "plain", n))) for (*key, n), row in by.items() if key == [load, system]]
        yield load, system, found


def _cell(
    of: Callable[[dict[str, Any]], float], pairs: Sequence[tuple[dict[str, Any], dict[str, Any] | None]]
) -> str:
    value = percentile([of(row) for row, _ in pairs], 50.0)
    both = [(of(row), of(plain)) for row, plain in pairs if plain not in (None, row)]
    ratio = f" ({paired_ratio(*zip(*both, strict=True))})" if both else ""
    return f"{value:.3f}{ratio}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MIXES, default=list(MIXES), help="mixes")
    parser.add_argument("--systems", nargs="+", default=["plain", "fixed", "auto"])
    parser.add_argument("--loads", nargs="+", default=[CLOSED, "0.5", "0.8", "0.95"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each loop, at least")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of each system's first loop")
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds between two loops: servers spin on"
    )
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--pool-chunks", type=int, nargs="+", help="the same, of each engine of the pool")
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep the rounds that are measured already")
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="pool")
    args = parser.parse_args()
    file = args.out / f"{args.name}.json"
    about, rows = description(), list[Row]()
    if args.resume and file.exists():
        rows = json.loads(file.read_text())["rows"]

    def save() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"about": about, "rows": rows}, separators=(",", ":")) + "\n")
        (args.out / f"{args.name}.md").write_text("\n".join(report(about, rows)) + "\n")

    with ending_on_signals():
        measure(args, rows, save)
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
