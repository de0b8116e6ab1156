"""What a P and a D cost beside plain vLLM servers, in one run on one machine without a GPU.

The systems: one plain server; two of them in turn (under load only); p2pkv with P and D asked at once, with P
first, and through p2pkv-proxy. A model with tiny weights and 128 KiB of KV a token, as Llama-8B has; in
float32 where the CPU does not compute in bfloat16. Every server has one OpenMP thread, bound to no core, and
no prefix cache. All clients are in this process.

single: one request at a time, of each of --lengths tokens; the systems take turns. "Expected" is the plain
    server's first token and one of its decode steps, since D computes the prompt's last token once more.
load: a closed loop of --clients with prompts of mixed lengths (clients.MIX), the same for each system.

Writes pair.md and pair.json to --out. How much later the first token comes with a model that costs next to
nothing is first_token.py's affair.

    python benchmarks/bench_pair.py [--lengths 64 256 2000] [--rounds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_servers import MODEL, MODEL_SAID, NAME, ServerSettings, pair_headers
from clients import (
    MIX,
    Asker,
    Asking,
    Taken,
    asking,
    closed_loop,
    description,
    milliseconds,
    mixed,
    paired_ratio,
    percentile,
    within,
)

from p2pkv.demo.processes import ending_on_signals
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model

STEPS = 9
"""Tokens that a plain server is asked for, which gives its decode step, too."""
SYSTEMS = {
    "plain": "one plain server",
    "two plain": "two plain servers, in turn",
    "at once": "P and D asked at once",
    "P first": "P asked first",
    "proxy": "through p2pkv-proxy",
}
Ways = dict[str, Callable[[Asker, Asking], Awaitable[Taken]]]
Record = dict[str, Any]


def ways(plain: Sequence[VllmServer], pair: Sequence[VllmServer], proxy: ProxyServer) -> Ways:
    """How each system is asked."""
    p, d = pair
    turn = [0]

    async def one(asker: Asker, what: Asking) -> Taken:
        return await asker.single(plain[0].base_url, what)

    async def two(asker: Asker, what: Asking) -> Taken:
        turn[0] += 1
        return await asker.single(plain[turn[0] % len(plain)].base_url, what)

    async def at_once(asker: Asker, what: Asking) -> Taken:
        what.headers = pair_headers(p, d)
        return await asker.at_once(p.base_url, d.base_url, what)

    async def first(asker: Asker, what: Asking) -> Taken:
        what.headers = pair_headers(p, d)
        return await asker.in_turn(p.base_url, d.base_url, what)

    async def routed(asker: Asker, what: Asking) -> Taken:
        return await asker.single(proxy.base_url, what)

    return dict(zip(SYSTEMS, (one, two, at_once, first, routed), strict=True))


async def single(asker: Asker, asked: Ways, args: argparse.Namespace) -> list[Record]:
    """The systems take turns; the first round warms up."""
    records = []
    for number in range(args.rounds + 1):
        for tokens in args.lengths:
            for name in _turned(list(asked), number):
                answer = STEPS if name == "plain" else 1
                what = asking(tokens, MODEL.vocab, NAME, answer=answer)
                taken = await within(args.deadline, asked[name](asker, what))
                await asyncio.sleep(args.settle)
                if number:
                    records.append({"system": name, "tokens": tokens, "round": number, **asdict(taken)})
        print(f"round {number} of {args.rounds}", flush=True)
    return records


async def load(asker: Asker, asked: Ways, args: argparse.Namespace) -> list[Record]:
    records = []
    for number in range(args.load_rounds):
        for name in _turned(list(asked), number):
            way, requests = asked[name], mixed(args.requests, MODEL.vocab, NAME, args.answer, seed=number)
            loaded = await closed_loop(lambda one, way=way: way(asker, one), requests, args.clients, 300.0)
            records.append(
                {
                    "system": name,
                    "round": number,
                    "seconds": loaded.seconds,
                    "failed": loaded.failed,
                    "first": [one.first for one in loaded.taken],
                    "gaps": [gap for one in loaded.taken for gap in one.gaps],
                }
            )
            print(f"load, {name}: {len(loaded.taken)} in {loaded.seconds:.0f} s", flush=True)
            await asyncio.sleep(args.settle)
    return records


def _turned(names: list[str], number: int) -> list[str]:
    at = number % len(names)
    return [*names[at:], *names[:at]]


async def measured(args: argparse.Namespace, asked: Ways) -> dict[str, list[Record]]:
    async with Asker() as asker:
        alone = {name: way for name, way in asked.items() if name != "two plain"}
        return {"single": await single(asker, alone, args), "load": await load(asker, asked, args)}


def run(args: argparse.Namespace) -> dict[str, list[Record]]:
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-pair-")))
        settings = ServerSettings(ensure_model(MODEL), max(args.lengths) + 64, args.chunk, args.kv_gib, logs)
        proxy = stack.enter_context(ProxyServer(log_path=logs / "proxy.log"))
        pair = [settings.server(role, role=role, proxy=proxy.discovery) for role in ("P", "D")]
        plain = [settings.server(f"plain-{n}") for n in range(2 if args.load_rounds else 1)]
        for some in (pair, plain):  # two at a time: two cores start no more in good time
            for server in some:
                stack.enter_context(server)
            for server in some:
                server.wait_ready(600.0)
        proxy.wait_ready(240.0)  # P and D warm up first
        return asyncio.run(measured(args, ways(plain, pair, proxy)))


# The page.


def expected(records: Sequence[Record], tokens: int) -> dict[int, float]:
    """Seconds by round: the plain server's first token and the median of its decode steps."""
    plain = [row for row in records if (row["system"], row["tokens"]) == ("plain", tokens)]
    step = statistics.median(gap for row in plain for gap in row["gaps"])
    return {row["round"]: row["first"] + step for row in plain}


def page(about: dict[str, Any], found: dict[str, list[Record]], args: argparse.Namespace) -> Iterator[str]:
    yield f"# A pair beside plain servers ({about['cpu']}, {about['cores']} cores)"
    yield ""
    yield (
        f"{about['date']}, `{about['command']}`; {about['versions']}; {MODEL_SAID}; load average before: "
        f"{about['load_average']:.2f}. What is measured: bench_pair.py. First tokens of one request at a "
        f"time, ms, median (lowest to highest) of {args.rounds} rounds; behind them, the geometric mean of "
        "the ratios to what is expected in the same round, and its 95% interval."
    )
    yield ""
    yield "| tokens | system | first token | / expected | D's first token after P's answer |"
    yield "|---:|---|---:|---:|---:|"
    for tokens in args.lengths:
        base = expected(found["single"], tokens)
        for name, said in SYSTEMS.items():
            mine = [row for row in found["single"] if (row["system"], row["tokens"]) == (name, tokens)]
            if not mine:
                continue
            ratio = paired_ratio([row["first"] for row in mine], [base[row["round"]] for row in mine])
            after = [row["after"] for row in mine if row["after"] is not None]
            cells = [f"{tokens:,}", said, milliseconds([row["first"] for row in mine]), str(ratio)]
            yield f"| {' | '.join([*cells, milliseconds(after) if after else '-'])} |"
    if found["load"]:
        mix = ", ".join(f"{share:.0%} of {tokens:,}" for tokens, share in MIX.items())
        yield ""
        yield f"A closed loop of {args.clients}; prompts of mixed lengths ({mix} tokens), ms:"
        yield ""
        yield "| system | requests a second | first token p50, p99 | between tokens p50, p99 | failed |"
        yield "|---|---:|---:|---:|---:|"
    for name, said in SYSTEMS.items():
        mine = [row for row in found["load"] if row["system"] == name]
        if not mine:
            continue
        rate = sum(len(row["first"]) for row in mine) / sum(row["seconds"] for row in mine)
        times = (_percentiles([each for row in mine for each in row[what]]) for what in ("first", "gaps"))
        yield f"| {said} | {rate:.2f} | {' | '.join(times)} | {sum(len(row['failed']) for row in mine)} |"


def _percentiles(values: Sequence[float]) -> str:
    return ", ".join(f"{percentile(values, q) * 1e3:,.0f}" for q in (50, 99)) if values else "-"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 2000], help="tokens of prompts")
    parser.add_argument("--rounds", type=int, default=10, help="of one request at a time")
    parser.add_argument("--load-rounds", type=int, default=1, help="0: no load")
    parser.add_argument("--clients", type=int, default=16, help="of the load")
    parser.add_argument("--requests", type=int, default=48, help="of a load")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer under load")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens that a server computes in a step")
    parser.add_argument("--kv-gib", type=int, default=1, help="memory of each server's KV cache")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds for one request")
    parser.add_argument("--settle", type=float, default=1.1, help="seconds between two: servers spin on")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="a folder")
    return parser.parse_args(given)


def main() -> int:
    args, about, began = arguments(), description(), time.monotonic()
    with ending_on_signals():
        found = run(args)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "pair.json").write_text(json.dumps({"about": about, **found}) + "\n")
    text = "\n".join(page(about, found, args)) + "\n"
    (args.out / "pair.md").write_text(text)
    print(f"{text}\n{(time.monotonic() - began) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
