"""CPU time of p2pkv's engine thread, by requests that wait on D and by peers: does it grow with them?

Real cores (p2pkv.engine.core.Core) with real ZMQ endpoints on loopback and "host" links, all driven by this
one thread on a clock that moves only when nobody has anything to do: no vLLM, no forward, no sleep. A turn is
what Rank's thread does: wait for messages (here never longer than 0 s, and only when there are some, or when
the turn is due), then Core.turn. The time is the thread's CPU time (time.thread_time) around each turn of the
one rank that is measured.

    D: one rank of D and as many ranks of P as there are peers, each an engine of its own.
    P: one rank of P and as many ranks of D.

Requests wait on D as with the default router, which asks both sides at once: D expects each of them, P has
each in its queue (Hold), evenly spread over the peers. Then, for each side, number of peers and number of
waiting requests:

    transfer: microseconds for one transfer, back to back: P begins and computes a prompt layer by layer in
        four runs, D loads it in 8 chunks, 64 KiB in all, both let go of it, and a new request begins to wait.
        The clock moves a few milliseconds, so hardly a heartbeat is in it.
    load: microseconds for one transfer at 20 a second, with all that goes by time: ticks and heartbeats.
    idle: milliseconds for one second in which all requests only wait.

All sides and numbers of peers take turns within each round, and every number of requests is measured in each.
The garbage collector runs between two measurements only. Writes push.md and push.json to --out;
--against shows another run's JSON beside it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import os
import platform
import statistics
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from p2pkv.config import Options
from p2pkv.control.endpoint import Endpoint
from p2pkv.demo.processes import free_ports
from p2pkv.device import make_recorder
from p2pkv.engine import commands as do
from p2pkv.engine.core import Core
from p2pkv.kv import DENSE, PagedCache, RankCache
from p2pkv.links import make_factory
from p2pkv.protocol.messages import PROTOCOL_VERSION, Cache, Hello, KvGroup

HOST = "127.0.0.1"
LAYERS, BLOCK, CONTENT, TOKENS = 32, 16, 8, 65
RUNS = 4
"""Runs of layers in which P's forward thread reports its one step."""

CHUNK = 8 << 10
STAGING = 1 << 20
BLOCKS = (list(range(-(-TOKENS // BLOCK))),)
READY = make_recorder(torch.device("cpu"))()

PACE = 0.05
"""Seconds between two transfers of `load`."""

QUIET = 4
"""Looks in a row, NAP apart, that find nothing to do before the clock moves."""

NAP = 0.0002
MAX_LOOKS = 5000
"""For one event, before the benchmark gives up."""

Side = Literal["P", "D"]


class Seat:
    """One core, and the CPU time of its turns."""

    def __init__(self, role: Side, port: int) -> None:
        options = Options(
            role=role, host=HOST, kv_port=port, staging_bytes=STAGING, chunk_bytes=CHUNK, max_links=128
        )
        layers = [torch.zeros(8, 1, BLOCK, CONTENT) for _ in range(LAYERS)]
        cache = PagedCache.from_tensors(layers, block_size=BLOCK, codec=DENSE)
        self.address = options.address
        links = make_factory("host", host=HOST, staging_bytes=STAGING)
        self._endpoint = Endpoint(self.address)
        group = KvGroup((LAYERS,), 1, cache.row_bytes, cache.unit_tokens, "float32", cache.codec, "bench")
        hello = Hello(
            version=PROTOCOL_VERSION,
            incarnation=uuid.uuid4().hex,
            role=role,
            rank=0,
            to="none",
            address=str(self.address),
            addresses=(str(self.address),),
            model="bench",
            weights="none",
            cache=Cache(1, (group,)),
            link=links.kind,
            digest=cache.digest_name,
            verify=False,
        )
        self.core = Core(hello, options, RankCache([cache]), links, self._endpoint)
        self.seen: list[do.Event] = []
        self.due = 0.0
        self.spent = 0.0
        self.turns = 0

    def do(self, command: do.Command) -> None:
        """As the forward thread does."""
        self.core.do(command)
        self._endpoint.wake()

    def turn(self, now: float) -> bool:
        """Whether there was anything to do."""
        if now < self.due and not self._endpoint._poller.poll(0):
            return False
        begin = time.thread_time()
        self._endpoint.wait(0.0)
        self.core.turn(now)
        pause = self.core.pause(now)
        self.spent += time.thread_time() - begin
        self.turns += 1
        self.due = now + pause
        self.seen += self.core.events()
        return True

    def heard(self, event: do.Event) -> bool:
        """Whether this event has come; others before it are forgotten."""
        if event not in self.seen:
            return False
        self.seen.clear()
        return True


@dataclass(frozen=True)
class Cost:
    """Of the measured rank: CPU seconds and turns, each for one transfer or one second."""

    seconds: float
    turns: float


class Star:
    """One rank of `side`, and `peers` ranks of the other side."""

    def __init__(self, side: Side, peers: int) -> None:
        self.side, self.peers = side, peers
        other: Side = "D" if side == "P" else "P"
        self.middle = Seat(side, free_ports())
        self._others = [Seat(other, free_ports()) for _ in range(peers)]
        self._now = 1000.0
        self._keys = itertools.count()
        self._waiting: list[tuple[str, int]] = []
        for peer in range(peers):
            self._add(peer)
        self._run_for(3.0)  # makes all connections
        while self._waiting:
            self._transfer(self._waiting.pop())

    def close(self) -> None:
        for seat in self._seats:
            seat.core.close()

    @property
    def _seats(self) -> list[Seat]:
        return [self.middle, *self._others]

    def _pair(self, peer: int) -> tuple[Seat, Seat]:
        """P and D."""
        other = self._others[peer]
        return (self.middle, other) if self.side == "P" else (other, self.middle)

    # The clock.

    def _settle(self) -> None:
        """Turns until nobody has anything to do now."""
        quiet = 0
        while quiet < QUIET:
            if sum(seat.turn(self._now) for seat in self._seats):  # every one of them
                quiet = 0
            else:
                quiet += 1
                time.sleep(NAP)

    def _run_for(self, seconds: float) -> None:
        end = self._now + seconds
        self._settle()
        while self._now < end:
            self._now = min(end, max(self._now, self.middle.due))  # the others' turns come a little late
            self._settle()

    def _until(self, seat: Seat, event: do.Event) -> None:
        for _ in range(MAX_LOOKS):
            if seat.heard(event):
                return
            self._settle()
            if event not in seat.seen:
                # A rank with more to copy than one turn does goes on a millisecond later.
                self._now = max(self._now + 1e-6, min(each.due for each in self._pair(self._peer)))
        raise SystemExit(f"{event} did not come: {seat.core.counters.snapshot()}")

    # Requests.

    def _add(self, peer: int) -> None:
        """One more request waits."""
        p, d = self._pair(peer)
        key = f"chatcmpl-{uuid.uuid4()}-{next(self._keys)}"
        d.do(do.Expect(key, p.address, TOKENS, b"digest"))
        p.do(do.HoldPrompt(key, d.address))
        self._waiting.append((key, peer))

    def wait_with(self, number: int) -> None:
        """So many requests wait from now on."""
        while len(self._waiting) > number:
            key, peer = self._waiting.pop()
            p, d = self._pair(peer)
            d.do(do.Drop(key, "D's request has ended"))
            d.do(do.Forget(key))
            p.do(do.Abort(key, "P's request has ended"))
            p.do(do.Forget(key))
        while len(self._waiting) < number:
            self._add(len(self._waiting) % self.peers)
        self._run_for(3.0)
        held = self.middle.core.counters.snapshot()["prompts" if self.side == "P" else "requests"]
        assert held == number, f"{held} requests wait, not {number}"

    def _transfer(self, request: tuple[str, int]) -> None:
        key, self._peer = request
        p, d = self._pair(self._peer)
        p.do(do.OfferPrompt(key, d.address, TOKENS, b"digest"))
        p.do(do.PromptBlocks(key, BLOCKS))
        self._until(d, do.Begun(key))
        d.do(do.Load(key, 0, TOKENS - 1, BLOCKS))
        step = LAYERS // RUNS
        for layer in range(0, LAYERS, step):
            p.do(do.Computed(((key, TOKENS),), layer, layer + step, READY))
        p.do(do.Computed(((key, TOKENS),), 0, LAYERS, READY))
        p.do(do.Flush((key,)))
        self._until(d, do.Loaded(key))
        self._until(p, do.BlocksFree(key))
        d.do(do.Forget(key))
        p.do(do.Forget(key))

    def _next(self) -> None:
        """The request that has waited longest is served, and another begins to wait."""
        request = self._waiting.pop(0)
        self._transfer(request)
        self._add(request[1])
        self._settle()

    # What is measured.

    def transfers(self, number: int) -> Cost:
        """Of one transfer, back to back."""
        with self._measured(number) as cost:
            for _ in range(number):
                self._next()
        return cost[0]

    def load(self, number: int) -> Cost:
        """Of one transfer, PACE apart."""
        with self._measured(number) as cost:
            for _ in range(number):
                self._next()
                self._run_for(PACE)
        return cost[0]

    def idle(self, seconds: int) -> Cost:
        """Of one second in which all requests wait."""
        with self._measured(seconds) as cost:
            self._run_for(seconds)
        return cost[0]

    def _measured(self, number: int) -> Measured:
        return Measured(self.middle, number)


class Measured:
    """What a seat spends meanwhile, divided by `number`."""

    def __init__(self, seat: Seat, number: int) -> None:
        self._seat, self._number = seat, number
        self._cost: list[Cost] = []

    def __enter__(self) -> list[Cost]:
        gc.collect()
        gc.disable()
        self._seat.spent, self._seat.turns = 0.0, 0
        return self._cost

    def __exit__(self, *_: object) -> None:
        gc.enable()
        self._cost.append(Cost(self._seat.spent / self._number, self._seat.turns / self._number))


KINDS = ("transfer", "load", "idle")
Row = dict[str, Any]


def measure(sides: Sequence[Side], peers: Sequence[int], waiting: Sequence[int], rounds: int) -> list[Row]:
    """One row for each side, number of peers and number of requests; lists by round."""
    rows: dict[tuple[Side, int, int], Row] = {}
    stars = [Star(side, number) for number in peers for side in sides]
    for turn in range(rounds + 1):
        for star, number in itertools.product(stars, waiting):
            star.wait_with(number)
            costs = (star.transfers(10), star.load(10), star.idle(1))
            name = (star.side, star.peers, number)
            empty = {"side": star.side, "peers": star.peers, "waiting": number}
            row = rows.setdefault(name, empty | {kind: [] for kind in KINDS} | {"turns": []})
            if turn:  # the first one only warms up
                for kind, cost in zip(KINDS, costs, strict=True):
                    row[kind].append(cost.seconds)
                row["turns"].append([cost.turns for cost in costs])
    for star in stars:
        star.close()
    return [rows[name] for name in sorted(rows)]


def spread(values: Sequence[float], unit: float) -> str:
    """Median [lowest - highest]."""
    scaled = [value / unit for value in values]
    return f"{statistics.median(scaled):,.1f} [{min(scaled):,.1f} - {max(scaled):,.1f}]"


def growth(row: Row, rows: Sequence[Row], kind: str) -> str:
    """Times the cost with 16 requests: the median of the rounds' ratios."""
    same = (each for each in rows if (each["side"], each["peers"]) == (row["side"], row["peers"]))
    base = next((each for each in same if each["waiting"] == 16), None)
    if base is None:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(row[kind], base[kind], strict=True)):.2f}"


def table(rows: Sequence[Row], other: Sequence[Row]) -> Iterator[str]:
    """Markdown; `other`: another run's rows, whose medians are shown behind ours."""
    past = {(row["side"], row["peers"], row["waiting"]): row for row in other}
    units = {"transfer": 1e-6, "load": 1e-6, "idle": 1e-3}
    names = {"transfer": "transfer, us", "load": "transfer at 20 a second, us", "idle": "idle second, ms"}
    head = ["rank of", "peers", "waiting"]
    for kind in KINDS:
        head += [names[kind], "/ at 16", *(["the other run"] if other else [])]
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"
    for row in rows:
        cells = [row["side"], str(row["peers"]), f"{row['waiting']:,}"]
        for kind in KINDS:
            cells += [spread(row[kind], units[kind]), growth(row, rows, kind)]
            if other:
                old = past.get((row["side"], row["peers"], row["waiting"]))
                cells.append(f"{statistics.median(old[kind]) / units[kind]:,.1f}" if old else "-")
        yield f"| {' | '.join(cells)} |"


def environment() -> str:
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=("P", "D"), default=["D", "P"])
    parser.add_argument("--peers", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--waiting", nargs="+", type=int, default=[1, 16, 256, 1000])
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--against", type=Path, help="the JSON of another run, to be shown beside this one")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="a folder")
    args = parser.parse_args()
    logging.getLogger("p2pkv").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    rows = measure(args.sides, args.peers, args.waiting, args.rounds)
    other = json.loads(args.against.read_text())["rows"] if args.against else []
    lines = [
        f"# What a push costs: engine thread time ({environment()})",
        "",
        f"CPU time of one rank's engine thread: median [lowest - highest] of {args.rounds} rounds, and times "
        "what it is with 16 requests (median of the rounds). What is measured and how: bench_push.py.",
        "",
        *table(rows, other),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "push.md").write_text("\n".join(lines) + "\n")
    (args.out / "push.json").write_text(
        json.dumps({"environment": environment(), "command": sys.argv[1:], "rows": rows}) + "\n"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
