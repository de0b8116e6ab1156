"""Two engines as a pool of both roles behind p2pkv-proxy, beside the same two as plain servers in turn.

The systems, each with two engines of side_by_side.py's model, one OpenMP thread each, and steps of --chunk
tokens:

plain: two servers without a connector, asked in turn.
direct: the two engines of the pool asked in turn, each request whole: what the connector costs, and no proxy.
fixed: P and D: the two engines of the pool, listed at a proxy that gives each one role.
pair: the pool with --placement pair: each prompt at another engine than its answer, unless it is far busier.
auto: the pool with --placement auto. `auto:N` has --pause-weight N.

A closed loop of --clients, for --seconds, of the same requests for each system; rounds are interleaved. The
mixes are those of one_pool_simulation.py. Writes one_pool.json and one_pool.md to --out. With --resume the
rounds that are in one_pool.json are kept, and only what is missing is measured; --only takes some mixes.

    python benchmarks/one_pool.py [--only mixed] [--rounds 5] [--systems plain fixed pair auto] [--resume]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import side_by_side_systems as systems
from decode_leg_report import description
from one_pool_simulation import MIXES, mix_at
from side_by_side_load import Asker, Asking, Failed, Taken, asking, paired_ratio, percentile, within
from side_by_side_systems import MODEL, MODEL_SAID, NAME, Workshop

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
Key = tuple[str, str, int]


def requests(mix: str, number: int, since: float) -> Iterator[Asking]:
    """The same for each system in a round, but for what a mix that changes asks for at that time."""
    draw = random.Random(number)
    while True:
        tokens, answer = mix_at(mix, time.monotonic() - since).draw(draw)
        yield asking(tokens, MODEL.vocab, NAME, answer=answer, draw=draw)


async def closed_loop(ask: Ask, mix: str, number: int, clients: int, seconds: float) -> dict[str, Any]:
    """Each client asks again when it has its answer, until `seconds` are over; then they end what is under
    way."""
    begin, taken, failed = time.monotonic(), list[Taken](), list[str]()
    left = requests(mix, number, begin)

    async def one_client() -> None:
        while time.monotonic() - begin < seconds:
            try:
                taken.append(await within(60.0, ask(next(left))))
            except Failed as error:
                failed.append(str(error))
                await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one_client())
    return {
        "seconds": time.monotonic() - begin,
        "ended": len(taken),
        "failed": failed[:3],
        "first": [round(one.first, 4) for one in taken],
        "gaps": [round(gap, 4) for one in taken for gap in one.gaps],
    }


class Servers:
    """The servers of all systems, and how each system is asked."""

    def __init__(self, args: argparse.Namespace, stack: contextlib.ExitStack, asker: Asker) -> None:
        self._asker, self._turn = asker, 0
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="one-pool-")))
        none = systems.environment(scratch, [])
        shop = Workshop(ensure_model(MODEL), LONGEST, args.kv_gib, 32, args.chunk, none, scratch, args.logs)
        discovery = free_ports()
        pooled = [name for name in args.systems if name not in ("plain", "direct", "fixed")]
        # One discovery port at several addresses of loopback, so that each instance pings all proxies.
        hosts = [f"127.0.0.{2 + number}" for number in range(len(pooled))]
        self.plain = [shop.server(f"pool-plain-{n}") for n in range(2)] if "plain" in args.systems else []
        self.pool: list[VllmServer] = []
        if set(args.systems) != {"plain"}:
            more: dict[str, Any] = {"proxy": (",".join(hosts or [LOOPBACK]), discovery)}
            self.pool = [
                replace(shop, chunk=chunk).server(f"pool-both-{n}", role="both", **more)
                for n, chunk in enumerate(args.pool_chunks or [args.chunk] * 2)
            ]
        self.proxies: dict[str, ProxyServer] = {}
        for name, host in zip(pooled, hosts, strict=True):
            placement, _, weight = name.partition(":")
            options = ["--placement", placement, "--discovery", f"{host}:{discovery}"]
            options += ["--pause-weight", weight] if weight else []
            self.proxies[name] = ProxyServer(prefill=2, extra_args=options)
        if "fixed" in args.systems:
            p, d = self.pool
            listed = ["--prefill", f"{_http(p)}={p.zmq_address}", "--decode", f"{_http(d)}={d.zmq_address}"]
            self.proxies["fixed"] = ProxyServer(extra_args=listed)
        for each in (*self.plain, *self.pool):
            stack.enter_context(each)
        for each in (*self.plain, *self.pool):
            each.wait_ready(300.0)
        for proxy in self.proxies.values():
            stack.enter_context(proxy).wait_ready(60.0)
        print(f"servers take {systems.memory_gib([*self.plain, *self.pool]):.1f} GiB", flush=True)

    async def ask(self, system: str, one: Asking) -> Taken:
        if system in ("plain", "direct"):
            self._turn += 1
            servers = self.plain if system == "plain" else self.pool
            return await self._asker.single(servers[self._turn % 2].base_url, one)
        return await self._asker.single(self.proxies[system].base_url, one)

    def learned(self, system: str) -> dict[str, Any]:
        """What --placement auto shows of itself; nothing for others."""
        if not system.startswith("auto"):
            return {}
        found: dict[str, Any] = json.loads(client.get(f"{self.proxies[system].base_url}/status"))
        return dict(found["placement"])


def _http(server: VllmServer) -> str:
    return re.sub("^http://", "", server.base_url)


def measure(args: argparse.Namespace, rows: list[dict[str, Any]], save: Callable[[], None]) -> None:
    done: set[Key] = {(row["mix"], row["system"], row["round"]) for row in rows}
    wanted = [
        (mix, system, number)
        for number in range(args.rounds)
        for mix in args.only
        for system in _turned(args.systems, number)
        if (mix, system, number) not in done
    ]
    if not wanted:
        return
    with contextlib.ExitStack() as stack, asyncio.Runner() as runner:
        asker = runner.run(_entered())
        servers = Servers(args, stack, asker)
        for system in args.systems:  # links, caches and what is learned
            runner.run(closed_loop(partial(servers.ask, system), "mixed", 99, args.clients, args.warm))
        for mix, system, number in wanted:
            loop = closed_loop(
                partial(servers.ask, system),
                *(mix, number, args.clients, args.seconds),
            )
            row = {"mix": mix, "system": system, "round": number, "clients": args.clients, **runner.run(loop)}
            row["learned"] = servers.learned(system)
            rows.append(row)
            save()
            print(_said(row), flush=True)
            time.sleep(args.settle)
        runner.run(asker.__aexit__())


def _said(row: dict[str, Any]) -> str:
    figures = " ".join(f"{name} {of(row):.3f}," for name, of in FIGURES.items())
    learned = {name: row["learned"].get(name) for name in ("median_error", "ways")} if row["learned"] else ""
    return f"{row['mix']:14} {row['system']:9} {row['round']}: {figures} {learned} {row['failed'] or ''}"


async def _entered() -> Asker:
    return await Asker().__aenter__()


def _turned(names: Sequence[str], number: int) -> list[str]:
    at = number % len(names)
    return [*names[at:], *names[:at]]


def report(about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Two engines: one pool, P and D, and plain servers in turn"
    yield ""
    yield f"{about['date']}; {about['cpu']}, {about['cores']} cores; {about['versions']}; {MODEL_SAID}."
    yield ""
    yield f"`{about['command']}`"
    yield ""
    yield "Medians of the rounds; behind them, the geometric mean of the ratios to `plain` in the same round."
    for mix in dict.fromkeys(row["mix"] for row in rows):
        yield ""
        yield f"## {mix[0].upper()}{mix[1:]}"
        yield ""
        yield "| system | " + " | ".join(FIGURES) + " | error of predictions |"
        yield "|---|" + "---:|" * (len(FIGURES) + 1)
        by = {(row["system"], row["round"]): row for row in rows if row["mix"] == mix}
        for system in dict.fromkeys(name for name, _ in by):
            pairs = [(row, by.get(("plain", n))) for (name, n), row in by.items() if name == system]
            cells = [_cell(of, pairs) for of in FIGURES.values()]
            errors = [row["learned"].get("median_error") for row, _ in pairs if row["learned"]]
            said = f"{percentile([e for e in errors if e is not None], 50.0):.0%}" if any(errors) else "-"
            yield f"| {system} | " + " | ".join(cells) + f" | {said} |"


def _cell(
    of: Callable[[dict[str, Any]], float], pairs: Sequence[tuple[dict[str, Any], dict[str, Any] | None]]
) -> str:
    value = percentile([of(row) for row, _ in pairs], 50.0)
    both = [(of(row), of(plain)) for row, plain in pairs if plain is not None]
    ratio = f" ({paired_ratio(*zip(*both, strict=True))})" if both else ""
    return f"{value:.3f}{ratio}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MIXES, default=list(MIXES), help="mixes")
    parser.add_argument("--systems", nargs="+", default=["plain", "fixed", "pair", "auto"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each loop")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of each system's first loop")
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds between two loops: servers spin on"
    )
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step")
    parser.add_argument("--pool-chunks", type=int, nargs=2, help="the same, of each engine of the pool")
    parser.add_argument("--kv-gib", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="keep the rounds that are measured already")
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.tokens = []
    file = args.out / "one_pool.json"
    about, rows = description(args), list[dict[str, Any]]()
    if args.resume and file.exists():
        rows = json.loads(file.read_text())["rows"]

    def save() -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"about": about, "rows": rows}, separators=(",", ":")) + "\n")
        (args.out / "one_pool.md").write_text("\n".join(report(about, rows)) + "\n")

    with ending_on_signals():
        measure(args, rows, save)
    save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
