"""How much one D that admits nothing slows down another D of the same P.

Real vLLM servers with a tiny model: a P with few KV blocks, and two D's. D2 has room for one request, which
decodes for the whole run. In each round --requests prompts go through P to D1, --at-once of them at a time:
once while nothing else waits ("alone"), and once while --stuck prompts for D2 are at P and at D2 ("beside"),
which P computes and D2 does not take. D2's decoding goes on in both, since it takes a part of the cores.

Prints the requests of D1 a second, and the ratio beside / alone of each round. Writes stuck_decode.json and
stuck_decode.md to --out.

    python benchmarks/stuck_decode.py [--rounds 10]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
from decode_leg_report import description
from proxy_side_by_side import HERE

from p2pkv.demo.client import metrics
from p2pkv.demo.servers import VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model
from p2pkv.pairing import Address, mint

TOKENS, LONGEST = 500, 30_000
SETTINGS = (
    *("--served-model-name", "tiny", "--block-size", "32"),
    *("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching"),
)


def prompt() -> list[int]:
    first = uuid4().int
    return [3 + (first + 7 * place) % 400 for place in range(TOKENS)]


async def post(session: aiohttp.ClientSession, server: VllmServer, request_id: str, **body: Any) -> None:
    body = {"model": "tiny", "temperature": 0, **body}
    headers = {"X-Request-Id": request_id}
    async with session.post(f"{server.base_url}/v1/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{server.name}: {response.status} {await response.text()}")
        await response.read()


async def through(session: aiohttp.ClientSession, p: VllmServer, d: VllmServer, tokens: int) -> None:
    """One request: P computes the prompt, and D answers it."""
    name, mine = mint(Address.parse(p.zmq_address), Address.parse(d.zmq_address)), prompt()
    await asyncio.gather(
        post(session, p, name, prompt=mine, max_tokens=1),
        post(session, d, name, prompt=mine, max_tokens=tokens, ignore_eos=True),
    )


@contextlib.asynccontextmanager
async def outstanding(
    session: aiohttp.ClientSession, p: VllmServer, d: VllmServer, count: int
) -> AsyncIterator[None]:
    """Requests that no answer is waited for."""
    tasks = [asyncio.create_task(through(session, p, d, LONGEST)) for _ in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(true: Any, what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(true):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        await asyncio.sleep(0.1)


def gauge(server: VllmServer, name: str) -> float:
    return metrics(server.base_url).get(name, 0.0)


def waiting(server: VllmServer) -> float:
    return gauge(server, "vllm:num_requests_waiting")


async def throughput(
    session: aiohttp.ClientSession, p: VllmServer, d: VllmServer, args: argparse.Namespace
) -> float:
    """Requests of D a second."""
    places = asyncio.Semaphore(args.at_once)

    async def one() -> None:
        async with places:
            await through(session, p, d, 4)

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(args.requests)))
    return float(args.requests / (time.monotonic() - began))


async def rounds(
    p: VllmServer, d: VllmServer, stuck: VllmServer, args: argparse.Namespace
) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    everlasting = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=everlasting, connector=aiohttp.TCPConnector(limit=0)) as session:
        for turn in range(args.rounds + 1):
            figures = {}
            async with outstanding(session, p, stuck, 1):  # what fills D2
                await until(lambda: gauge(stuck, "vllm:num_requests_running") == 1, "D2's own request")
                for kind in ("alone", "beside") if turn % 2 else ("beside", "alone"):
                    async with outstanding(session, p, stuck, args.stuck if kind == "beside" else 0):
                        count = args.stuck if kind == "beside" else 0
                        await until(lambda: waiting(stuck) == count, "D2's queue")  # noqa: B023
                        await until(lambda: gauge(p, "vllm:num_requests_running") == 0, "P's last step")
                        figures[kind] = await throughput(session, p, d, args)
                    await until(lambda: waiting(stuck) == 0, "D2's empty queue")
                    await until(lambda: gauge(p, "vllm:kv_cache_usage_perc") == 0, "P's free blocks")
            if turn:  # the first only warms up
                found.append(figures)
                print(json.dumps(figures), file=sys.stderr, flush=True)
    return found


def page(about: dict[str, Any], found: list[dict[str, float]]) -> str:
    ratios = [each["beside"] / each["alone"] for each in found]
    rows = [(kind, [each[kind] for each in found]) for kind in ("alone", "beside")]
    lines = [
        f"# A D beside one that admits nothing ({about['cpu']}, {about['cores']} cores, {about['versions']})",
        "",
        f"{about['date']}, `{about['command']}`; load average before: {about['load_average']:.2f}. Medians "
        f"[lowest - highest] of {len(found)} rounds. What is measured: stuck_decode.py.",
        "",
        "| | requests of D1 a second |",
        "|---|---:|",
        *(f"| {kind} | {statistics.median(of):.1f} [{min(of):.1f} - {max(of):.1f}] |" for kind, of in rows),
        f"| beside / alone | {statistics.median(ratios):.2f} [{min(ratios):.2f} - {max(ratios):.2f}] |",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=64, help="of D1 in a round")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--stuck", type=int, default=40, help="requests that wait for D2")
    parser.add_argument("--blocks", type=int, default=400, help="P's KV blocks, of 32 tokens each")
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"), help="where logs go")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where results go")
    args = parser.parse_args()
    args.tokens = 0
    about = description(args) | {"load_average": os.getloadavg()[0]}
    model = ensure_model(TinyLlama(max_positions=32_000))

    def server(role: Any, name: str, *more: str) -> VllmServer:
        return VllmServer(
            model,
            role=role,
            name=name,
            extra_args=[*SETTINGS, *more],
            log_path=args.logs / f"stuck-{name}.log",
        )

    servers = (
        server("P", "P", "--max-model-len", "4096", "--num-gpu-blocks-override", str(args.blocks)),
        server("D", "D1", "--max-model-len", "4096"),
        server("D", "D2", "--max-model-len", "32000", "--max-num-seqs", "1"),
    )
    with ExitStack() as stack:
        for each in servers:
            stack.enter_context(each)
        for each in servers:
            each.wait_ready(300.0)
        found = asyncio.run(rounds(*servers, args))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "stuck_decode.json").write_text(
        json.dumps({"about": about, "rounds": found}, indent=1) + "\n"
    )
    (args.out / "stuck_decode.md").write_text(page(about, found))
    print(page(about, found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
