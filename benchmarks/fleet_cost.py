"""What a request costs the proxy with a few instances and with a thousand.

For each tree and each size of the fleet a proxy runs in a process of its own. They get the same requests in
turns, and the processor time of each process is read before and after. All instances are data-parallel ranks
of one fake P and one fake D, which answer at once; they ping between the rounds, not within.

    python benchmarks/fleet_cost.py --sizes 10,1000 --rounds 10 [--tree OTHER_CHECKOUT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import zmq
from aiohttp import web

from p2pkv import __version__
from p2pkv.control.discovery import PING_INTERVAL, Ping, encode_ping

ROOT = Path(__file__).parents[1]
EVENT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
BODY = {"model": "m", "prompt": "hi " * 40, "max_tokens": 8, "stream": True}
DEADLINE = 60.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "m"}]})


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if not body.get("stream"):
        return web.json_response({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(8):
        await response.write(EVENT)
    await response.write(b"data: [DONE]\n\n")
    return response


@asynccontextmanager
async def server() -> AsyncIterator[int]:
    app = web.Application()
    app.add_routes(
        [web.get("/health", health), web.get("/v1/models", models), web.post("/v1/completions", answer)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


@dataclass
class Candidate:
    """One proxy, with so many instances.

    Attributes:
        name: of another checkout; "" for this one.
        costs: microseconds of processor time per request, of each round.
        rest: seconds of processor time in a second without requests.
    """

    name: str
    size: int
    url: str
    process: subprocess.Popen[bytes]
    pings: list[bytes]
    pinger: zmq.Socket[bytes]
    costs: list[float] = field(default_factory=list)
    rest: float = 0.0

    def ping(self) -> None:
        for each in self.pings:
            self.pinger.send(each)

    async def at_rest(self) -> None:
        """All ping, evenly, each every 3 s, and nobody asks."""
        before, begin = self.cpu(), time.monotonic()
        for number, each in enumerate(self.pings * 3):
            await asyncio.sleep(begin + number * PING_INTERVAL / len(self.pings) - time.monotonic())
            self.pinger.send(each)
        self.rest = (self.cpu() - before) / (time.monotonic() - begin)

    def cpu(self) -> float:
        """Seconds of processor time of the process so far."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def started(cleanup: AsyncExitStack, tree: Path, size: int, ports: tuple[int, int]) -> Candidate:
    """With half of the instances P's, and half D's."""
    port, discovery = free_port(), free_port()
    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))
    (folder / "p2pkv_proxy").symlink_to(tree / "proxy")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "p2pkv_proxy", "--port", str(port)),
            *("--discovery", f"127.0.0.1:{discovery}", "--log-level", "WARNING"),
        ],
        env=os.environ | {"PYTHONPATH": f"{folder}:{tree}"},
        cwd=folder,
    )
    cleanup.callback(process.wait)
    cleanup.callback(process.terminate)
    pings = [
        encode_ping(
            Ping(
                type=role,
                http_address=f"127.0.0.1:{http}",
                zmq_address=f"127.0.0.1:{20000 + rank}",
                version=1,
                incarnation="first",
                model="m",
                dp_rank=rank,
                dp_size=size // 2,
            )
        )
        for role, http in (("P", ports[0]), ("D", ports[1]))
        for rank in range(size // 2)
    ]
    pinger = cleanup.enter_context(zmq.Context.instance().socket(zmq.DEALER))
    pinger.setsockopt(zmq.LINGER, 0)
    pinger.setsockopt(zmq.SNDHWM, 0)
    pinger.connect(f"tcp://127.0.0.1:{discovery}")
    name = "" if tree == ROOT else f"{tree.name}, "
    return Candidate(name, size, f"http://127.0.0.1:{port}", process, pings, pinger)


async def ready(client: aiohttp.ClientSession, candidate: Candidate) -> None:
    half = candidate.size // 2
    async with asyncio.timeout(DEADLINE):
        while True:
            candidate.ping()
            try:
                async with client.get(f"{candidate.url}/health?prefill={half}&decode={half}") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(1.0)


async def asked(client: aiohttp.ClientSession, candidate: Candidate, requests: int, at_once: int) -> None:
    left = iter(range(requests))

    async def some() -> None:
        for _ in left:
            async with client.post(f"{candidate.url}/v1/completions", json=BODY) as response:
                assert response.status == 200, await response.text()
                await response.read()

    await asyncio.gather(*(some() for _ in range(at_once)))


async def measured(args: argparse.Namespace) -> list[Candidate]:
    async with AsyncExitStack() as cleanup:
        ports = (await cleanup.enter_async_context(server()), await cleanup.enter_async_context(server()))
        client = await cleanup.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        trees = [ROOT, *args.tree]
        candidates = [await started(cleanup, tree, size, ports) for tree in trees for size in args.sizes]
        for each in candidates:
            await ready(client, each)
        for turn in range(args.rounds + 1):
            for each in random.sample(candidates, len(candidates)):
                for other in candidates:
                    other.ping()
                await asyncio.sleep(1.5)
                await asked(client, each, 8, 4)
                before = each.cpu()
                await asked(client, each, args.requests, 4)
                if turn:  # the first one warms up
                    each.costs.append((each.cpu() - before) / args.requests * 1e6)
        for each in candidates:
            await each.at_rest()
        return candidates


def interval(ratios: list[float], draws: int = 4000) -> tuple[float, float]:
    """95% of the geometric means of samples with replacement."""
    dice = random.Random(1)
    means = sorted(statistics.geometric_mean(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def page(candidates: list[Candidate], about: str) -> Iterator[str]:
    yield "# What a request costs the proxy, by the size of its fleet"
    yield ""
    yield f"{about}. What is measured: fleet_cost.py. Medians [lowest - highest] of the rounds."
    yield ""
    yield "| instances | us of CPU a request | times the first | of a core, at rest |"
    yield "|---:|---:|---:|---:|"
    first = candidates[0]
    for each in candidates:
        ratios = [mine / its for mine, its in zip(each.costs, first.costs, strict=True)]
        low, high = interval(ratios)
        times = (
            f"{statistics.geometric_mean(ratios):.2f} ({low:.2f} to {high:.2f})" if each is not first else ""
        )
        cost = f"{statistics.median(each.costs):.0f} [{min(each.costs):.0f} - {max(each.costs):.0f}]"
        yield f"| {each.name}{each.size:,} | {cost} | {times} | {each.rest:.1%} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--sizes", type=lambda text: [int(each) for each in text.split(",")], default=[10, 1000]
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=300, help="in a round")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args, load = parser.parse_args(), os.getloadavg()[0]
    candidates = asyncio.run(measured(args))
    about = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M}, `python benchmarks/fleet_cost.py {' '.join(sys.argv[1:])}`, "
        f"{os.cpu_count()} cores, load average before: {load:.2f}, p2pkv {__version__}"
    )
    figures = [{"tree": each.name, "instances": each.size, "us": each.costs, "rest": each.rest}
               for each in candidates]  # fmt: skip
    text = "\n".join(page(candidates, about)) + "\n"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "fleet_cost.json").write_text(
        json.dumps({"about": about, "figures": figures}, indent=1) + "\n"
    )
    (args.out / "fleet_cost.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
