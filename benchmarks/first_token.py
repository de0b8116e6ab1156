"""How much later the pair's first token comes than one server's, and the second after it.

    python benchmarks/first_token.py OUT.json [--rounds 25] [--lengths 16,64,512] [--stamps FOLDER]

A P, a D, a single server with the demo's tiny Llama on this machine, and a proxy. Each round asks, one after
the other, the single server; the pair, where P's token goes to the client; and the pair with a field that the
proxy does not know, so that its rule forbids that. With `--stamps` all of them make the stamps of `p2pkv
waterfall`, which take some of the time.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
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

from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model
from p2pkv.stamps import VARIABLE

ANSWER = 12
FORBIDDEN = {"of_no_vllm": True}
MODEL = TinyLlama()
ARGS = ("--served-model-name", "tiny", "--dtype", MODEL.dtype, "--max-model-len", "2048",
        "--block-size", "32", "--max-num-batched-tokens", "2048", "--no-enable-prefix-caching")  # fmt: skip


def ask(url: str, prompt: list[int], more: dict[str, Any]) -> list[float]:
    """Milliseconds from the question to each token of the answer."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, **more}
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
    args = parser.parse_args()
    stamps: Path | None = args.stamps
    lengths = [int(each) for each in args.lengths.split(",")]
    model = ensure_model(MODEL)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def env(who: str) -> dict[str, str]:
            if stamps is None:
                return {}
            stamps.mkdir(parents=True, exist_ok=True)
            return {VARIABLE: f"{who}:{stamps}"}

        if stamps is not None:
            os.environ.update(env("proxy"))  # the proxy takes this process's
        proxy = ProxyServer(log_path=logs / "proxy.log")
        room = {"extra_config": {"prefetch_bytes": 64 << 20}, "load_failure_policy": "recompute"}

        def server(name: str, **more: Any) -> VllmServer:
            more |= {"extra_args": ARGS, "env": env(name), "log_path": logs / f"{name}.log"}
            return VllmServer(model, name=name, **more)

        pair = {"proxy": proxy.discovery}
        servers = [server("P", role="P", **pair), server("D", role="D", **pair, **room), server("single")]
        for each in (proxy, *servers):
            stack.enter_context(each)
        for each in servers:
            each.wait_ready(180.0)
        single = servers[2].base_url
        wait_until(lambda: "ready" in health(proxy.base_url), "P and D", 120.0)
        ways = {"single": (single, {}), "from_p": (proxy.base_url, {}), "from_d": (proxy.base_url, FORBIDDEN)}
        draw = random.Random(41)
        times: dict[str, dict[int, list[list[float]]]] = {way: defaultdict(list) for way in ways}
        for number in range(args.rounds + 3):
            for length in lengths:
                for way, (url, more) in ways.items():
                    got = ask(url, [draw.randrange(300, MODEL.vocab) for _ in range(length)], more)
                    if number >= 3:
                        times[way][length].append(got)
        rates: dict[str, list[float]] = {way: [] for way in ("from_p", "from_d")}
        for _ in range(5 if args.load else 0):
            for way, several in rates.items():
                several.append(closed_loop(*ways[way], draw.randrange(1 << 30), args.load))
                print(f"{way}: {several[-1]:.1f} requests a second", flush=True)
    made = {"rounds": args.rounds, "milliseconds": times, "requests_a_second": rates}
    args.out.write_text(json.dumps(made) + "\n")
    print("\n".join(report(times)))


def closed_loop(url: str, more: dict[str, Any], seed: int, seconds: float) -> float:
    """Requests a second of 16 clients, each of which asks again when it has its answer."""
    until = time.monotonic() + seconds

    def client(number: int) -> int:
        draw, count = random.Random(seed + number), 0
        while time.monotonic() < until:
            ask(url, [draw.randrange(300, MODEL.vocab) for _ in range(64)], more)
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(client, range(16))) / (time.monotonic() - began)


def health(url: str) -> str:
    """`ready` once the proxy has P and D."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    connection.request("GET", "/health")
    known = json.loads(connection.getresponse().read())
    connection.close()
    return "ready" if known["prefill"] and known["decode"] else "starting"


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
