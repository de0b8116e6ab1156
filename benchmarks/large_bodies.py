"""What a large body costs the other clients of p2pkv-proxy: how late their events are meanwhile.

One p2pkv-proxy in front of a P and a D: stubs that send an event every --pace milliseconds, or with --vllm
real vLLM servers with a tiny model. In a process of their own, --streams clients read streams, and one asks
for /health every 10 ms. Another process sends bodies, one after the other, --repeat of each kind:

lists, objects: "prompt": [[],[],...] and "messages": [{},{},...]
token ids:      "prompt": [12345,12345,...]
words, escapes: one prompt of English words, and one of Chinese characters as \\uXXXX
picture:        a message with a picture in base64

Figures for each kind: the statuses of the answers; the longest time that /health took; by how much the
longest gap between two events of a stream exceeds the median gap; CPU time of the proxy for each body,
streams and /health included; and by how much the proxy's memory grew at most, in sizes of the body. The first
row is without bodies. Writes large_bodies.md and .json to --out.

    python benchmarks/large_bodies.py [--repeat 3] [--vllm]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from decode_leg_report import description
from proxy_side_by_side import ANSWER, EVENT, HERE, LOOPBACK, Pinger, ending_on_signals, free_ports, pings

from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import TinyLlama, ensure_model

MB = 1_000_000
HEALTH_SECONDS = 0.01
QUIET_SECONDS = 3.0


def listed(field: str, item: bytes, size: int) -> bytes:
    items = b",".join([item] * (size // (len(item) + 1)))
    return b'{"model":"tiny","max_tokens":1,"%s":[' % field.encode() + items + b"]}"


def picture(size: int) -> bytes:
    data = base64.b64encode(random.Random(1).randbytes(size * 3 // 4))
    part = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,' + data + b'"}}'
    return b'{"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":[' + part + b"]}]}"


def text(word: bytes, size: int) -> bytes:
    return b'{"model":"tiny","max_tokens":1,"prompt":"' + word * (size // len(word)) + b'"}'


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "60 MB picture": (CHAT, lambda: picture(60 * MB)),
    "60 MB of lists": (COMPLETIONS, lambda: listed("prompt", b"[]", 60 * MB)),
    "60 MB of objects": (CHAT, lambda: listed("messages", b"{}", 60 * MB)),
    "6 MB picture": (CHAT, lambda: picture(6 * MB)),
    "6 MB of lists": (COMPLETIONS, lambda: listed("prompt", b"[]", 6 * MB)),
    "6 MB of objects": (CHAT, lambda: listed("messages", b"{}", 6 * MB)),
    "6 MB of token ids": (COMPLETIONS, lambda: listed("prompt", b"12345", 6 * MB)),
    "6 MB of words": (COMPLETIONS, lambda: text(b"one two, three. ", 6 * MB)),
    "6 MB of escapes": (COMPLETIONS, lambda: text(b"\\u4e2d", 6 * MB)),
}


# The stub instances.


class Stub(asyncio.Protocol):
    """Discards bodies and answers at once, or streams until the client leaves."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._head, self._left, self._streams = b"", 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        if not self._left:
            head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                self._head = head
                return
            self._head = b""
            length = re.search(rb"(?i)content-length: (\d+)", head)
            self._left = int(length[1]) if length else 0
            self._streams = b'"stream":true' in data[:1000]
        self._left -= len(data)
        if self._left <= 0:
            self._left = 0
            self._answer()

    def _answer(self) -> None:
        if not self._streams:
            head = (
                f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(ANSWER)}\r\n\r\n"
            )
            self._transport.write(head.encode() + ANSWER)
            return
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(head.encode())
        self._event()

    def _event(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            asyncio.get_running_loop().call_later(self._pace, self._event)


def serve_stub(port: int, pace: float) -> None:
    async def serve() -> None:
        await asyncio.get_running_loop().create_server(lambda: Stub(pace), LOOPBACK, port)
        await asyncio.Event().wait()

    asyncio.run(serve())


# Those who wait, and the one who sends.


@dataclass
class Waited:
    """The longest times of one kind of body, in ms."""

    health: float
    event: float


async def watch_health(session: aiohttp.ClientSession, url: str, done: asyncio.Event) -> float:
    longest = 0.0
    while not done.is_set():
        began = time.perf_counter()
        async with session.get(f"{url}/health") as response:
            await response.read()
        longest = max(longest, time.perf_counter() - began)
        await asyncio.sleep(HEALTH_SECONDS)
    return longest * 1e3


async def watch_stream(session: aiohttp.ClientSession, url: str, done: asyncio.Event) -> float:
    """The longest gap between two events, less the median one. A stream that ends is followed by another."""
    gaps: list[float] = []
    while not done.is_set():
        body = b'{"model":"tiny","prompt":"one two three","max_tokens":200,"ignore_eos":true,"stream":true}'
        async with session.post(f"{url}{COMPLETIONS}", data=body) as response:
            if response.status != 200:
                raise RuntimeError(f"a stream was answered {response.status}: {await response.text()}")
            last = None
            async for _ in response.content.iter_any():
                now = time.perf_counter()
                gaps += [now - last] if last is not None else []
                last = now
                if done.is_set():
                    break
    return (max(gaps) - statistics.median(gaps)) * 1e3


def watch(url: str, streams: int, end: Connection) -> None:
    """One `Waited` for each message, which ends the time that it is about."""

    async def one() -> Waited:
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(end.fileno(), done.set)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            health = asyncio.create_task(watch_health(session, url, done))
            events = await asyncio.gather(*(watch_stream(session, url, done) for _ in range(streams)))
            loop.remove_reader(end.fileno())
            return Waited(await health, max(events))

    while True:
        end.send("ready")
        found = asyncio.run(one())
        more = end.recv()
        end.send(found)
        if not more:
            return


def send(url: str, kind: str, repeat: int) -> list[int]:
    """The statuses of the answers."""
    path, make = BODIES[kind]
    body = make()

    async def post() -> list[int]:
        statuses = []
        async with aiohttp.ClientSession() as session:
            for _ in range(repeat):
                payload = aiohttp.BytesIOPayload(io.BytesIO(body))
                async with session.post(f"{url}{path}", data=payload) as response:
                    await response.read()
                    statuses.append(response.status)
        return statuses

    return asyncio.run(post())


# The run.


@contextlib.contextmanager
def instances(args: argparse.Namespace, proxy: ProxyServer) -> Iterator[None]:
    """A P and a D that ping the proxy."""
    with contextlib.ExitStack() as stack:
        if args.vllm:
            model = ensure_model(TinyLlama())
            discovery = (LOOPBACK, proxy.discovery_port)
            options: dict[str, Any] = {"proxy": discovery, "extra_args": ("--served-model-name", "tiny")}
            servers = [VllmServer(model, role=role, **options) for role in ("P", "D")]
            for server in servers:
                stack.enter_context(server)
            for server in servers:
                server.wait_ready(300.0)
        else:
            ports = free_ports(), free_ports()
            context = multiprocessing.get_context("spawn")
            for port in ports:
                child = context.Process(target=serve_stub, args=(port, args.pace / 1e3), daemon=True)
                child.start()
                stack.callback(child.terminate)
            pinger: Pinger
            for pinger in pings(_Pinged(proxy.discovery_port), ports):  # type: ignore[arg-type]
                pinger.start()
                stack.callback(pinger.stop)
        yield


@dataclass
class _Pinged:
    discovery: int


def forget_peak(process: psutil.Process) -> None:
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def peak(process: psutil.Process) -> int:
    """Bytes: the most memory that it has had since `forget_peak`."""
    lines = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", lines)[0]) << 10


def measured(args: argparse.Namespace, proxy: ProxyServer) -> dict[str, Any]:
    """By kind of body."""
    context = multiprocessing.get_context("spawn")
    process, (here, there) = psutil.Process(proxy.pid), context.Pipe()
    watcher = context.Process(target=watch, args=(proxy.base_url, args.streams, there), daemon=True)
    watcher.start()
    found: dict[str, Any] = {}
    kinds = ["none", *(args.kinds or BODIES)]
    with context.Pool(1) as pool:
        for kind in kinds:
            assert here.recv() == "ready"
            time.sleep(1.0)  # for the streams to begin
            forget_peak(process)
            memory, cpu = process.memory_info().rss, process.cpu_times()
            if kind == "none":
                statuses, size = [], 0
                time.sleep(QUIET_SECONDS)
            else:
                statuses = pool.apply(send, (proxy.base_url, kind, args.repeat))
                size = len(BODIES[kind][1]())
            spent = process.cpu_times()
            here.send(kind != kinds[-1])
            waited: Waited = here.recv()
            grown = (peak(process) - memory) / size if size else 0.0
            used = (spent.user + spent.system - cpu.user - cpu.system) * 1e3 / len(statuses) if size else 0.0
            found[kind] = asdict(waited) | {"statuses": sorted(set(statuses)), "cpu": used, "memory": grown}
            print(kind, json.dumps(found[kind]), flush=True)
    watcher.join(10)
    return found


def page(about: dict[str, Any], found: dict[str, Any]) -> str:
    lines = [
        f"# Large bodies through p2pkv-proxy ({about['cpu']}, {about['cores']} cores, {about['versions']})",
        "",
        f"{about['date']}, `{about['command']}`; load average before: {about['load_average']:.2f}. "
        f"{about['streams']} streams run meanwhile; {about['repeat']} bodies of each kind. What is measured: "
        "large_bodies.py.",
        "",
        "| bodies | status | longest /health, ms | latest event, ms | CPU per body, ms | memory, sizes |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for kind, figures in found.items():
        statuses = ", ".join(map(str, figures["statuses"]))
        cells = [f"{figures[name]:.0f}" for name in ("health", "event", "cpu")]
        lines.append(f"| {kind} | {statuses} | {' | '.join(cells)} | {figures['memory']:.2f} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="bodies of each kind")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--pace", type=float, default=10.0, help="ms between two events of a stub's stream")
    parser.add_argument("--vllm", action="store_true", help="real vLLM servers")
    parser.add_argument("--kinds", nargs="*", choices=list(BODIES), help="only these")
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"), help="where logs go")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where results go")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    args.tokens = 0
    settings = {name: getattr(args, name) for name in ("streams", "repeat", "pace", "vllm")}
    about = description(args) | settings | {"load_average": os.getloadavg()[0]}
    proxy = ProxyServer(log_path=args.logs / "large-bodies-proxy.log")
    with ending_on_signals(), proxy, instances(args, proxy):
        proxy.wait_ready(60.0)
        found = measured(args, proxy)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "large_bodies.json").write_text(json.dumps({"about": about, "found": found}, indent=1) + "\n")
    (args.out / "large_bodies.md").write_text(page(about, found))
    print(page(about, found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
