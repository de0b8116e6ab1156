"""How much later the pair's first token comes than one server's, and the second after it.

    python benchmarks/first_token.py OUT.json [--rounds 25] [--lengths 16,64,512] [--stamps FOLDER]
                                     [--load SECONDS] [--pool] [--geometry-8b] [--nap] [--behind]

A P, a D, a single server with the demo's tiny Llama on this machine, and two proxies. Each round asks, in an
order of its own, the single server; the pair, where P's token goes to the client; and the pair by the proxy
with `--first-token decode`. With `--stamps` all of them make the stamps of `p2pkv waterfall`, which take some
of the time. With `--load` follow closed loops at both proxies by turns, and the CPU time of each process.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import bench_servers
import psutil

from p2pkv.demo import client
from p2pkv.demo.processes import ServerProcess, free_ports
from p2pkv.demo.servers import ProxyServer, Role, VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model
from p2pkv.stamps import VARIABLE

ANSWER = 12
STEPS = "vllm:iteration_tokens_total_count"
WAYS = ("single", "from_p", "from_d")
ARGS = ("--served-model-name", "tiny", "--max-model-len", "2048", "--block-size", "32",
        "--max-num-batched-tokens", "2048", "--no-enable-prefix-caching")  # fmt: skip


def ask(url: str, prompt: list[int]) -> list[float]:
    """Milliseconds from the question to each token of the answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.connect()
    began, times = time.perf_counter(), []
    headers = {"Content-Type": "application/json", "X-Request-Id": uuid.uuid4().hex}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    ended = False
    while line := response.readline():
        if b'"text":' in line:
            times.append((time.perf_counter() - began) * 1e3)
            ended |= b'"finish_reason":"length"' in line
    connection.close()
    assert ended, "an answer without its end"
    return times  # under load an event may have several tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--lengths", default="16,64,512")
    parser.add_argument("--stamps", type=Path)
    parser.add_argument("--load", type=float, default=0.0, help="seconds of each of five closed loops a way")
    parser.add_argument("--pool", action="store_true", help="both engines have both roles, --placement auto")
    parser.add_argument("--geometry-8b", action="store_true", help="128 KiB of KV a token, as Llama-8B has")
    parser.add_argument("--nap", action="store_true", help="P and D with `spin: false`")
    parser.add_argument("--behind", action="store_true", help="D has room, and is asked behind P")
    args = parser.parse_args()
    stamps: Path | None = args.stamps
    lengths = [int(each) for each in args.lengths.split(",")]
    spec, room_mib = (bench_servers.MODEL, 512) if args.geometry_8b else (TinyLlama(), 64)
    model = ensure_model(spec)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def env(who: str) -> dict[str, str]:
            if stamps is None:
                return {}
            stamps.mkdir(parents=True, exist_ok=True)
            return {VARIABLE: f"{who}:{stamps}"}

        # One discovery port at two addresses of loopback: each instance pings both proxies.
        port, placed = free_ports(), ["--placement", "auto"] if args.pool else []
        proxies = [
            ProxyServer(
                log_path=logs / f"{first}.log",
                extra_args=[*placed, "--first-token", first, "--discovery", f"{host}:{port}"],
                dispatch="sequential" if args.behind else "concurrent",
                env=env(f"proxy-{first}"),
            )
            for first, host in (("prefill", "127.0.0.2"), ("decode", "127.0.0.3"))
        ]
        extra = {"prefetch_bytes": room_mib << 20 if args.behind else 0, "spin": not args.nap}
        room = {"extra_config": extra, "load_failure_policy": "recompute"}

        def server(name: str, **more: Any) -> VllmServer:
            more |= {"extra_args": (*ARGS, "--dtype", spec.dtype), "env": env(name)}
            more |= {"log_path": logs / f"{name}.log"}
            return VllmServer(model, name=name, **more)

        pair = {"proxy": ("127.0.0.2,127.0.0.3", port)}
        roles: tuple[Role, Role] = ("both", "both") if args.pool else ("P", "D")
        servers = [server(name, role=role, **pair, **room) for name, role in zip("PD", roles, strict=True)]
        servers.append(server("single"))
        running: list[ServerProcess] = [*proxies, *servers]
        for each in running:
            stack.enter_context(each)
        for each in [*servers, *proxies]:
            each.wait_ready(180.0)
        ways = dict(zip(WAYS, (servers[2].base_url, *(each.base_url for each in proxies)), strict=True))
        draw = random.Random(41)
        times: dict[str, dict[int, list[list[float]]]] = {way: defaultdict(list) for way in ways}
        for number in range(args.rounds + 3):
            for length in lengths:
                for way in draw.sample(WAYS, len(WAYS)):
                    got = ask(ways[way], [draw.randrange(300, spec.vocab) for _ in range(length)])
                    if number >= 3:
                        times[way][length].append(got)
        rates: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
        spent: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS[1:]}
        if args.load:
            servers[2].stop()
        for _ in range(5 if args.load else 0):
            for way in rates:
                before = cpu_of(running)
                count, seconds = closed_loop(ways[way], draw.randrange(1 << 30), args.load)
                rates[way].append(count / seconds)
                after = cpu_of(running)
                spent[way].append({name: (after[name] - before[name]) / count for name in after})
                print(f"{way}: {rates[way][-1]:.1f} requests a second {placement(ways[way])}", flush=True)
    made = {"rounds": args.rounds, "milliseconds": times, "requests_a_second": rates, "cpu": spent}
    args.out.write_text(json.dumps(made) + "\n")
    print("\n".join(report(times) if args.rounds else []))
    for way, several in rates.items() if args.load else ():
        print(f"{way}: median {statistics.median(several):.1f} requests a second, of")
        print(
            "  each, CPU ms:",
            {n: round(statistics.median(e[n] for e in spent[way]), 2) for n in spent[way][0]},
        )


def cpu_of(servers: list[ServerProcess]) -> dict[str, float]:
    """CPU milliseconds so far, of each server's processes and of this one, with all clients; and steps."""
    made = defaultdict[str, float](float, clients=time.process_time() * 1e3)
    for server in filter(ServerProcess.running, servers):
        top = psutil.Process(server.pid)
        for each in (top, *top.children(recursive=True)):
            title, times = " ".join(each.cmdline()), each.cpu_times()
            what = next((f" {name}" for name in ("EngineCore", "Worker", "announcer") if name in title), "")
            made[server.name + what] += (times.user + times.system) * 1e3
        if isinstance(server, VllmServer):
            made[f"{server.name} steps"] = client.metrics(server.base_url)[STEPS]
    return made


def closed_loop(url: str, seed: int, seconds: float) -> tuple[int, float]:
    """Requests of 16 clients, each of which asks again when it has its answer, and the seconds they took."""
    until = time.monotonic() + seconds

    def one(number: int) -> int:
        draw, count = random.Random(seed + number), 0
        while time.monotonic() < until:
            ask(url, [draw.randrange(300, TinyLlama.vocab) for _ in range(64)])
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(one, range(16))), time.monotonic() - began


def placement(url: str) -> dict[str, Any]:
    """Which ways were taken so far with --pool, and how far off the first tokens were that were predicted."""
    known = json.loads(client.get(f"{url}/status"))["placement"]
    return {name: known[name] for name in ("ways", "median_error") if name in known}


def report(times: dict[str, dict[int, list[list[float]]]]) -> list[str]:
    made = [
        "| tokens | way | first token, ms | after one server's | first gap | later gaps |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for length in times["single"]:
        alone = statistics.median(each[0] for each in times["single"][length])
        for way in times:
            several = times[way][length]
            first = statistics.median(each[0] for each in several)
            gap = statistics.median(each[1] - each[0] for each in several)
            later = statistics.median(b - a for each in several for a, b in itertools.pairwise(each[1:]))
            made.append(
                f"| {length} | {way} | {first:.1f} | {first - alone:+.1f} | {gap:.1f} | {later:.1f} |"
            )
    return made


if __name__ == "__main__":
    main()
