"""What p2pkv-proxy costs, beside vllm-router (PyPI) and by the size of its fleet, with stub instances.

The routers, all on loopback in front of the same stub P and stub D, which answer at once and compute nothing:

p2pkv-proxy: as installed, P and D asked at once; and again with each number of --instances, which are
    data-parallel engines of the same stubs and ping every 3 s, as instances do.
vllm-router: in discovery mode: P first, then D.

Rounds are interleaved: each router in turn, the order shifted by one in each round. In a round:

short: --connections connections, each with one short request after the other, for --seconds: requests a
    second, and CPU time of the router's processes per request.
stream: --connections streams at once of --chunks events, one every --pace milliseconds: CPU time per event,
    less that of as many short requests.
paced: --rate short requests a second, whatever the answers do, for --seconds: the 99th percentile of their
    latencies, less the median of the same load straight to D.

Load and stubs share the machine's cores with the router. So CPU time is what to compare; requests a second
are those of this machine with all of it at work. What cannot be installed is a row that says why. Writes
proxy.md and proxy.json to --out.

    python benchmarks/bench_proxy.py [--rounds 5] [--instances 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import zmq
from clients import description
from environments import Unavailable, environment

from p2pkv.control.discovery import PING_INTERVAL, Ping, encode_ping
from p2pkv.control.pinger import Pinger
from p2pkv.demo.processes import ServerProcess, ending_on_signals, free_ports
from p2pkv.demo.servers import LOOPBACK, ProxyServer

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop

HERE = Path(__file__).parent
VLLM_ROUTER = "vllm-router==0.1.17"
PATH = "/v1/completions"
FIGURES = {
    "cpu_request": "CPU per short request, µs",
    "cpu_event": "CPU per event, µs",
    "requests": "requests a second",
    "p99_added": "added latency, p99, ms",
}

# What both ends of a router speak: enough HTTP/1.1 for routers, and cheap.

ANSWER = json.dumps(
    {
        "id": "cmpl-stub",
        "object": "text_completion",
        "created": 1700000000,
        "model": "tiny",
        "choices": [{"index": 0, "text": " hello", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 8, "total_tokens": 9, "completion_tokens": 1},
    }
).encode()
EVENT = (
    b'data: {"id":"cmpl-stub","object":"text_completion","created":1700000000,"model":"tiny","choices":['
    b'{"index":0,"text":" hello","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":null}]}\n\n'
)
"""As vLLM 0.32 writes one."""
EVENT_WITH_IDS = EVENT.replace(b'"token_ids":null', b'"token_ids":[31999]')
FIRST_WITH_IDS = EVENT_WITH_IDS.replace(
    b'"prompt_token_ids":null', b'"prompt_token_ids":[1,603,951,2211,3040]'
)
MODELS = b'{"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "stub"}]}'


class Stub(asyncio.Protocol):
    """An instance that answers at once: a completion, or a stream of as many events as max_tokens says."""

    def __init__(self, pace: float) -> None:
        self._pace = pace
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            head, end, rest = self._data.partition(b"\r\n\r\n")
            length = _length(head)
            if not end or len(rest) < length:
                return
            self._data = rest[length:]
            self._answer(head, rest[:length])

    def _answer(self, head: bytes, body: bytes) -> None:
        if not head.startswith(b"POST"):
            self._whole(MODELS if b" /v1/models" in head else b"{}")
            return
        asked = json.loads(body)
        if asked.get("stream"):
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            ids = bool(asked.get("return_token_ids"))
            self._transport.write(_chunk(FIRST_WITH_IDS if ids else EVENT))
            self._event(asked["max_tokens"] - 1, EVENT_WITH_IDS if ids else EVENT)
        else:
            self._whole(ANSWER)

    def _whole(self, body: bytes) -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def _event(self, left: int, event: bytes) -> None:
        if left == 0:
            self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        elif not self._transport.is_closing():
            self._transport.write(_chunk(event))
            asyncio.get_running_loop().call_later(self._pace, self._event, left - 1, event)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def serve_stubs(ports: Sequence[int], pace: float) -> None:
    """Serve until killed."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for port in ports:
            await loop.create_server(lambda: Stub(pace), LOOPBACK, port)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve())


class Connection:
    """A client's connection that is used for one request after the other."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(LOOPBACK, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def ask(self, request: bytes) -> bytes:
        """The answer's body. Raises RuntimeError unless the status is 200."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a router answered {head.splitlines()[0].decode()}")
        if b"chunked" not in head.lower():
            return await self._reader.readexactly(_length(head))
        parts = []
        while size := int(await self._reader.readline(), 16):
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readline()
        return b"".join(parts)


def request_of(**more: Any) -> bytes:
    """The bytes of one request."""
    body = json.dumps({"model": "tiny", "prompt": "one two three four", "max_tokens": 8, **more}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


# The loads.


async def short(port: int, connections: int, seconds: float) -> int:
    """How many requests were answered."""
    request, end = request_of(), time.perf_counter() + seconds

    async def client() -> int:
        done = 0
        async with Connection(port) as connection:
            while time.perf_counter() < end:
                await connection.ask(request)
                done += 1
        return done

    return sum(await asyncio.gather(*(client() for _ in range(connections))))


async def streams(port: int, connections: int, chunks: int) -> int:
    """How many events came."""
    request = request_of(stream=True, max_tokens=chunks)

    async def client() -> int:
        async with Connection(port) as connection:
            return (await connection.ask(request)).count(b"data: {")

    found = await asyncio.gather(*(client() for _ in range(connections)))
    if set(found) != {chunks}:
        raise RuntimeError(f"streams of {sorted(set(found))} events, expected {chunks} in each")
    return sum(found)


async def paced(port: int, rate: float, seconds: float) -> list[float]:
    """Latencies in ms, from the time at which a request was due."""
    request, idle = request_of(), list[Connection]()
    async with contextlib.AsyncExitStack() as stack:

        async def one(due: float) -> float:
            connection = idle.pop() if idle else await stack.enter_async_context(Connection(port))
            await connection.ask(request)
            idle.append(connection)
            return (time.perf_counter() - due) * 1e3

        idle += [await stack.enter_async_context(Connection(port)) for _ in range(8)]
        began, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(due)))
        return list(await asyncio.gather(*tasks))


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# The routers.


@dataclass
class Router:
    """One router and what was measured of it, a figure a round."""

    name: str
    process: ServerProcess
    port: int
    discovery: int
    size: int = 2
    found: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})

    def cpu(self) -> float:
        """CPU seconds of its processes so far."""
        parent = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (parent, *parent.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def routers(environments: Path, logs: Path, sizes: Sequence[int]) -> tuple[list[Router], dict[str, str]]:
    """Those that can be had, not started yet, and why the others cannot."""
    made = []
    for size in (2, *sizes):
        name = "p2pkv-proxy" if size == 2 else f"p2pkv-proxy, {size:,} instances"
        proxy = ProxyServer(log_path=logs / f"p2pkv-proxy-{size}.log", prefill=size // 2)
        made.append(Router(name, proxy, proxy.http_port, proxy.discovery_port, size))
    try:
        folder = environment(environments, VLLM_ROUTER)
    except Unavailable as error:
        return made, {"vllm-router": str(error)}
    port, discovery, metrics = free_ports(), free_ports(), free_ports()
    command = [str(folder / "bin" / "vllm-router"), "--vllm-pd-disaggregation"]
    command += ["--vllm-discovery-address", f"{LOOPBACK}:{discovery}", "--policy", "round_robin"]
    command += ["--prometheus-port", str(metrics), "--log-level", "warning"]
    process = ServerProcess(
        "vllm-router",
        [*command, "--host", LOOPBACK, "--port", str(port)],
        health_url=f"http://{LOOPBACK}:{port}/health",
        log_path=logs / "vllm-router.log",
        env=dict(os.environ),
    )
    return [*made, Router("vllm-router", process, port, discovery)], {}


@contextlib.contextmanager
def stubs(pace: float) -> Iterator[tuple[int, int]]:
    """The ports of a stub P and a stub D, each in a process of its own."""
    ports = free_ports(), free_ports()
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=serve_stubs, args=([port], pace), daemon=True) for port in ports]
    for child in children:
        child.start()
    try:
        yield ports
    finally:
        for child in children:
            child.terminate()
            child.join()


def pings(router: Router, ports: tuple[int, int]) -> Iterator[Pinger]:
    for role, port in zip(("P", "D"), ports, strict=True):
        http, rank = f"{LOOPBACK}:{port}", f"{LOOPBACK}:{port + 20000}"
        ping = Ping(type=role, http_address=http, zmq_address=rank, version=1, model="tiny")
        yield Pinger(f"{LOOPBACK}:{router.discovery}", ping, 1.0)


class FleetPings(threading.Thread):
    """Pings of a proxy's many instances, half of them P's, each every 3 s and evenly, until stopped."""

    def __init__(self, router: Router, ports: tuple[int, int]) -> None:
        super().__init__(daemon=True)
        self._address, self._end = f"tcp://{LOOPBACK}:{router.discovery}", threading.Event()
        half = router.size // 2
        self._pings = [
            encode_ping(
                Ping(
                    type=role, http_address=f"{LOOPBACK}:{port}", zmq_address=f"{LOOPBACK}:{20000 + rank}",
                    version=1, incarnation="first", model="tiny", dp_rank=rank, dp_size=half,
                )
            )
            for role, port in zip(("P", "D"), ports, strict=True)
            for rank in range(half)
        ]  # fmt: skip

    def run(self) -> None:
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(self._address)
            for ping in itertools.cycle(self._pings):
                socket.send(ping)
                if self._end.wait(PING_INTERVAL / len(self._pings)):
                    return

    def stop(self) -> None:
        self._end.set()
        self.join()


# The run.


async def measured(router: Router, args: argparse.Namespace, d_port: int) -> dict[str, float]:
    """One round of one router: a value for each of FIGURES. Raises RuntimeError if it fails a request."""
    before, began = router.cpu(), time.perf_counter()
    done = await short(router.port, args.connections, args.seconds)
    rate = done / (time.perf_counter() - began)
    per_request = (router.cpu() - before) / done
    before = router.cpu()
    events = await streams(router.port, args.connections, args.chunks)
    spent = router.cpu() - before - per_request * args.connections
    direct = await paced(d_port, args.rate, args.seconds / 2)
    through = await paced(router.port, args.rate, args.seconds)
    added = quantile(through, 0.99) - statistics.median(direct)
    values = (per_request * 1e6, spent / events * 1e6, rate, added)
    return dict(zip(FIGURES, values, strict=True))


async def until_ready(routers: Sequence[Router]) -> None:
    """Each answers; the first requests of each are not counted."""
    for router in routers:
        end = time.monotonic() + 30
        while True:
            try:
                await short(router.port, 4, 0.3)
                break
            except (RuntimeError, OSError, EOFError):
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.2)


def one_round(
    runner: asyncio.Runner, order: Sequence[Router], args: argparse.Namespace, d_port: int, number: int
) -> list[str]:
    """Measure each; a round counts for all or for none. Why it does not count, if so."""
    found = []
    for router in order:
        try:
            found.append(runner.run(measured(router, args, d_port)))
        except (RuntimeError, OSError, EOFError) as error:
            return [f"round {number} does not count: {router.name}: {error}"]
        print(f"round {number}, {router.name}: {json.dumps(found[-1])}", flush=True)
    for router, values in zip(order, found, strict=True):
        for name, value in values.items():
            router.found[name].append(value)
    return []


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All rounds; what the page says."""
    there, missing = routers(args.environments, args.logs, args.instances)
    cut: list[str] = []
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(stubs(args.pace / 1e3))
        for router in there:
            router.process.log_path.unlink(missing_ok=True)
            stack.enter_context(router.process)
            for pinger in pings(router, ports) if router.size == 2 else [FleetPings(router, ports)]:
                pinger.start()
                stack.callback(pinger.stop)
        for router in there:
            router.process.wait_ready(60.0)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(until_ready(there))
            for number in range(args.rounds):
                order = [there[(number + index) % len(there)] for index in range(len(there))]
                cut += one_round(runner, order, args, ports[1], number + 1)
    settings = {name: getattr(args, name) for name in ("connections", "seconds", "chunks", "pace", "rate")}
    return {
        "about": {**description(), **settings, "rounds": args.rounds},
        "note": args.note,
        "missing": missing,
        "cut": cut,
        "routers": {router.name: router.found for router in there},
    }


def page(found: dict[str, Any]) -> str:
    """The result as Markdown."""
    about, measured = found["about"], found["routers"]
    ours = measured["p2pkv-proxy"]
    lines = [
        f"# Routers on loopback ({about['cpu']}, {about['cores']} cores, {about['versions']})",
        "",
        f"{about['date']}, `{about['command']}`. Stub P and D that compute nothing; median [lowest - highest]"
        f" of {about['rounds']} interleaved rounds. Short requests and streams over {about['connections']} "
        f"connections; an event every {about['pace']:g} ms in each stream; added latency at "
        f"{about['rate']:g} requests a second. What is measured and how: bench_proxy.py.",
        "",
    ]
    for sentence in filter(None, [found["note"], *found["cut"]]):
        lines += [sentence, ""]
    lines += [
        f"| router | {' | '.join(FIGURES.values())} | CPU per request, times p2pkv-proxy's |",
        f"|---|{'---:|' * (len(FIGURES) + 1)}",
    ]
    for name, values in measured.items():
        ratios = [other / own for other, own in zip(values["cpu_request"], ours["cpu_request"], strict=True)]
        cells = [spread(values[figure]) for figure in FIGURES] + [spread(ratios, 2)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [f"| {name} | {why} |" + " |" * len(FIGURES) for name, why in found["missing"].items()]
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float], digits: int | None = None) -> str:
    median = statistics.median(values)
    places = digits if digits is not None else (2 if median < 10 else 0)
    low, middle, high = (f"{each:,.{places}f}" for each in (min(values), median, max(values)))
    return f"{middle} [{low} - {high}]"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1.5, help="of the short and of the paced requests")
    parser.add_argument("--chunks", type=int, default=60, help="events of each stream")
    parser.add_argument("--pace", type=float, default=20.0, help="ms between two events of a stream")
    parser.add_argument("--rate", type=float, default=200.0, help="paced requests a second")
    parser.add_argument("--instances", type=int, nargs="+", default=[], help="sizes of larger fleets")
    parser.add_argument("--note", default="", help="a sentence for the page, such as what else was running")
    parser.add_argument("--environments", type=Path, default=Path(".side"), help="where the routers live")
    parser.add_argument("--logs", type=Path, default=Path(".demo", "logs"), help="where logs go")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where results go")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with ending_on_signals():
        found = run(args)
    if not any(figures["requests"] for figures in found["routers"].values()):
        print("no round counts:", *found["cut"], sep="\n")
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "proxy.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "proxy.md").write_text(page(found))
    print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
