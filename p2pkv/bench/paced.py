"""`p2pkv bench --link paced`: pushes between two real engines in two processes, with a clock for the card.

What a message costs besides its bytes, on P and on D, where that time goes, and how near a push comes to a
wire of a given rate. `paced_card` has what stands in for the card. No bytes move, so no content is checked.
"""

import argparse
import contextlib
import itertools
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from p2pkv.bench.harness import (
    DEADLINE_SECONDS,
    HOST,
    Pipe,
    begin_decode,
    decode_process,
    forget,
    hello_of,
    hold,
    measuring,
    ms,
    wait_for,
)
from p2pkv.bench.memory import CONTENT, DTYPE, HEADS, LAYERS, LAYOUTS, TOKEN_BYTES, capacity_for
from p2pkv.bench.paced_card import SOURCES, Card, PacedLauncher, PacedRank
from p2pkv.config import Options, default_chunk
from p2pkv.control.endpoint import Connection
from p2pkv.demo.processes import free_ports
from p2pkv.engine import commands as do
from p2pkv.engine.computed_layers import ComputedLayers
from p2pkv.engine.thread import Rank
from p2pkv.kv import RankCache
from p2pkv.pairing import Address

MIB = 1 << 20
US = 1e-6
OVER = ("nccl", "ipc")
SIZES = [64 << 10, MIB, 4 * MIB, 8 * MIB, 16 * MIB]
WIRES = [50, 75, 370]
"""GB/s: a 400 Gbit/s network, NCCL on one H100, NVLink."""

PROMPTS = [16 * MIB, 512 * MIB]
H100_PROMPT = 64 * MIB
STAGING_BYTES = 1 << 30
"""What it is on a GPU of 80 GB."""

LAYOUT = LAYOUTS["dense"]
SWITCH_SECONDS = 2e-4
"""The connector sets the interpreter's switch interval so."""


class Meter:
    """Where the time of a rank's engine thread goes, in seconds from here on. Wraps what it measures."""

    STATIONS = ("kernels", "events", "NCCL", "messages", "naps", "rest")

    def __init__(self, rank: Rank, spent: dict[str, float]) -> None:
        """`spent`: what the pretend device counts."""
        self._spent = spent
        self._spans = dict.fromkeys(("turns", "naps", "messages"), 0.0)
        self._thread = 0
        core, line = rank.core, rank.context.endpoint
        core.turn = self._in_turns(core.turn)  # type: ignore[method-assign, assignment]
        line.wait = self._timed(line.wait, "naps")  # type: ignore[method-assign]
        line.receive = self._timed_items(line.receive, "messages")  # type: ignore[method-assign]
        Connection.send = self._timed(Connection.send, "messages")  # type: ignore[method-assign]
        Connection.flush = self._timed(Connection.flush, "messages")  # type: ignore[method-assign]

    def read(self) -> dict[str, float]:
        """Seconds so far, by station; `cpu`: the thread's processor time, `turns`: in the engine's turns."""
        read = {**self._spent, **self._spans, "cpu": self._processor_time()}
        read["rest"] = read["turns"] - sum(read[name] for name in ("kernels", "events", "NCCL", "messages"))
        return read

    def _processor_time(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread)) if self._thread else 0.0

    def _timed(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self._spans[what] += time.perf_counter() - begin

        return timed

    def _timed_items(self, call: Callable[[], Iterator[Any]], what: str) -> Callable[[], Iterator[Any]]:
        def timed() -> Iterator[Any]:
            taken = self._timed(partial(next, call(), None), what)
            while (item := taken()) is not None:
                yield item

        return timed

    def _in_turns(self, call: Callable[[float], None]) -> Callable[[float], None]:
        timed = self._timed(call, "turns")

        def turn(now: float) -> None:
            self._thread = self._thread or threading.get_ident()
            timed(now)

        return turn


def let_libzmq_first() -> None:
    """Under a real-time policy (`chrt -r`): let libzmq's threads of this process interrupt its others, as if
    they had a core of their own. With two cores they would wait until one of the two engines rests."""
    policy = os.sched_getscheduler(0)
    if policy not in (os.SCHED_RR, os.SCHED_FIFO):
        return
    above = os.sched_param(os.sched_getparam(0).sched_priority + 1)
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith("ZMQbg"):
            os.sched_setscheduler(int(task.name), policy, above)


class Forward:
    """Stands in for a forward thread of vLLM that launches from Python without a break. Each step launches so
    many kernels as take STEP_SECONDS alone."""

    STEP_SECONDS = 0.02

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch = launch
        self._count = 100
        self._times: list[tuple[float, float]] = []
        """When each step ended, and its seconds."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        for _ in range(5):
            self._count = max(1, int(self._count * self.STEP_SECONDS / self._step()))

    def start(self) -> None:
        self._thread.start()

    @property
    def kernels(self) -> int:
        """Of a step."""
        return self._count

    def stop(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE_SECONDS)

    def between(self, begin: float, end: float) -> list[float]:
        """Seconds of the steps that ran between two times of the monotonic clock."""
        return [took for at, took in tuple(self._times) if begin <= at - took and at <= end]

    def _main(self) -> None:
        while not self._over.is_set():
            took = self._step()
            self._times.append((time.monotonic(), took))

    def _step(self) -> float:
        begin = time.perf_counter()
        for _ in range(self._count):
            self._launch()
        return time.perf_counter() - begin


class EarlyLayers(ComputedLayers):
    """Hands each message's worth of layers to the engine, also where that holds the forward thread up."""

    def _device_waits(self) -> bool:
        return False


STEPS: dict[str, type[ComputedLayers] | None] = {
    "alone": None,
    "at once": EarlyLayers,
    "p2pkv": ComputedLayers,
}
"""What a step of P hands to its engine."""


class PacedSide:
    """One rank of P or D, its meter, and its block table."""

    def __init__(
        self, role: str, over: str, card: Card, nccl: dict[str, Any], prompt: int, chunk: int, port: int
    ) -> None:
        """`nccl`: options of that name. `prompt`: bytes of the longest. `chunk`: the option chunk_bytes; 0:
        the default on a GPU."""
        self.capacity = capacity_for(prompt // TOKEN_BYTES + 1)
        self.side = role
        shape = (LAYERS, self.capacity // LAYOUT.block, LAYOUT.block, HEADS, CONTENT)
        layers = torch.empty(shape, dtype=DTYPE).transpose(2, 3)
        paced = PacedRank(over, card)
        cache = RankCache([paced.cache(layers.unbind(0), LAYOUT.block)])
        settings = Options(
            role=role,  # type: ignore[arg-type]
            host=HOST,
            kv_port=port,
            staging_bytes=STAGING_BYTES,
            chunk_bytes=chunk or default_chunk(STAGING_BYTES, True),
            **nccl,
        )
        links = paced.links(settings)
        self.address = settings.address
        self.record = paced.device.record_event
        self._launcher = PacedLauncher(paced.device, gathers_to_peer=False)
        self._forward: Forward | None = None
        self._kernels = 0
        """Of a layer; 0: not known yet."""
        self.rank = Rank(hello_of(settings, LAYOUT, cache, links.kind), settings, cache, links)
        self.meter = Meter(self.rank, paced.device.clock.spent)
        let_libzmq_first()

    def table(self, tokens: int) -> list[int]:
        return LAYOUT.table(tokens, self.capacity, self.side)

    def start_forward(self) -> None:
        """Let a forward thread launch kernels from here on."""
        self._forward = Forward(self._launch)
        self._forward.start()

    def _launch(self) -> None:
        self._launcher.launch("p2pkv_digest", 1, (1, 1), (0, 0, 0))

    def step(self, layer_seconds: float, computed: Callable[[int], None]) -> float:
        """Launch a step of LAYERS layers, which the device computes in so much time each; seconds that this
        thread took. `computed`: vLLM's hook of a layer."""
        self._kernels = self._kernels or max(1, Forward(self._launch).kernels // LAYERS)
        begin = time.monotonic()
        for layer in range(LAYERS):
            for _ in range(self._kernels):
                self._launch()
            self._launcher.compute(layer_seconds)
            time.sleep(0)  # as kernels of torch do, it lets the interpreter's lock go
            computed(layer)
        return time.monotonic() - begin

    def stop_forward(self, begin: float, end: float) -> list[float]:
        """Seconds of its steps between these times; it has ended."""
        assert self._forward is not None
        self._forward.stop()
        return self._forward.between(begin, end)


class PacedPair:
    """P's rank here, and D's in another process."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        over: str,
        card: Card,
        nccl: dict[str, Any],
        prompt: int,
        chunk: int,
    ) -> None:
        """`stack`: of what has to end. The others: see PacedSide."""
        self._keys = 0
        settings = {
            "over": over,
            "wire": card.wire,
            "nccl": nccl,
            "prompt": prompt,
            "port": free_ports(),
        }
        process = decode_process(settings, module="p2pkv.bench.paced")
        _, self._pipe = stack.enter_context(process)
        self._decode = Address.parse(self._pipe.expect("address")["address"])
        self._side = PacedSide("P", over, card, nccl, prompt, chunk, free_ports())
        stack.callback(self._side.rank.stop)
        while True:  # the first push waits for the link, and for the first of everything
            if self.push(MIB)["seconds"] < 0.1:
                break

    def _offer(self, nbytes: int) -> tuple[str, int]:
        """A prompt of so many bytes: its key, and its tokens. D learns that P computes it."""
        tokens = nbytes // TOKEN_BYTES + 1
        self._keys += 1
        key = f"paced-{self._keys}"
        hold(self._side.rank, key, self._decode, tokens, (self._side.table(tokens),))
        self._pipe.send(key=key, prefill=str(self._side.address), tokens=tokens)
        return key, tokens

    def step(self, nbytes: int, layer_seconds: float, way: str) -> dict[str, float]:
        """A step that computes such a prompt while D waits for it (`STEPS`): seconds that the forward thread
        took, and from its begin until D has loaded."""
        side, kind = self._side, STEPS[way]
        if kind is None:
            took = side.step(layer_seconds, lambda layer: None)
            side.record().wait()  # the next step is not to queue behind this one
            return {"step": took}
        key, tokens = self._offer(nbytes)
        self._pipe.expect("begun")
        self._pipe.send(go=True)
        time.sleep(0.005)  # until P knows what D wants
        layers, begin = kind(LAYERS, side.record), time.monotonic()
        layers.begin(((key, tokens),), side.rank.layers_per_message(tokens))
        took = side.step(layer_seconds, lambda layer: layers.computed(layer, side.rank.do))
        layers.ended()
        layers.end(side.rank.do)
        loaded = self._pipe.expect("loaded")["loaded"] - begin
        forget(side.rank, key)
        return {"step": took, "loaded": loaded}

    def push(self, nbytes: int) -> dict[str, Any]:
        """One prompt, all computed when D asks: seconds until D has it, and what each side's engine spent."""
        rank = self._side.rank
        key, tokens = self._offer(nbytes)
        rank.do(do.Computed(((key, tokens),), 0, LAYERS, self._side.record()))
        rank.do(do.Flush((key,)))
        chunks = rank.counters.values["chunks_sent"]
        self._pipe.expect("begun")
        before = self._side.meter.read()
        self._pipe.send(go=True)
        times = self._pipe.expect("loaded")
        wait_for(rank, do.BlocksFree(key))
        after = self._side.meter.read()
        rank.do(do.Forget(key))
        return {
            "seconds": times["loaded"] - times["asked"],
            "messages": rank.counters.values["chunks_sent"] - chunks,
            "P": {name: after[name] - before[name] for name in after},
            "D": times["spent"],
        }

    def forward(self, side: str, nbytes: int, seconds: float = 1.0) -> dict[str, Any]:
        """Seconds of the steps of a forward thread of P or D: `alone`, and `pushed` while pushes follow each
        other; `rate`: of those pushes."""
        if side == "P":
            self._side.start_forward()
        else:
            self._pipe.send(forward=True)
            self._pipe.expect("started")
        spans, pushes = [time.monotonic()], list[float]()
        time.sleep(seconds)
        spans.append(time.monotonic())
        while time.monotonic() < spans[1] + seconds:
            pushes.append(self.push(nbytes)["seconds"])
        spans.append(time.monotonic())
        steps = []
        for begin, end in pairwise(spans):
            if side == "P":
                steps.append(self._side.stop_forward(begin, end))
            else:
                self._pipe.send(forward=False, begin=begin, end=end)
                steps.append(self._pipe.expect("steps")["steps"])
        return {"alone": steps[0], "pushed": steps[1], "rate": nbytes / statistics.median(pushes)}


def serve(pipe: Pipe, settings: dict[str, Any]) -> None:
    """D's process: load what is ordered until the pipe ends."""
    card = replace(Card(), wire=settings["wire"])
    side = PacedSide("D", settings["over"], card, settings["nccl"], settings["prompt"], 0, settings["port"])
    rank = side.rank
    pipe.send(address=str(side.address))
    try:
        while (order := pipe.receive()) is not None:
            if "forward" in order:
                _obey_forward(side, order, pipe)
                continue
            key, tokens = order["key"], order["tokens"]
            rank.do(do.Expect(key, Address.parse(order["prefill"]), tokens, b"bench"))
            wait_for(rank, do.Begun(key))
            pipe.send(begun=True)
            pipe.expect("go")
            before = side.meter.read()
            asked = time.monotonic()
            rank.do(do.Load(key, 0, tokens - 1, (side.table(tokens),), side.record()))
            loaded = wait_for(rank, do.Loaded(key))
            after = side.meter.read()
            rank.do(do.Forget(key))
            spent = {name: after[name] - before[name] for name in after}
            pipe.send(asked=asked, loaded=loaded, spent=spent)
    finally:
        rank.stop()


def _obey_forward(side: PacedSide, order: dict[str, Any], pipe: Pipe) -> None:
    if order["forward"]:
        side.start_forward()
        pipe.send(started=True)
    else:
        pipe.send(steps=side.stop_forward(order["begin"], order["end"]))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Rows by way, wire and size; each a list of pushes."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    nccl = {"nccl_in_flight": args.in_flight, "nccl_group_bytes": args.group}
    rows = []
    for over in args.over:
        on_one_card = Card() if over == "nccl" else replace(Card(), wire=Card.memory)
        cards = [replace(Card(), wire=wire * 1e9) for wire in args.wire]
        for card in [on_one_card] if args.h100 else cards:
            for prompt in [H100_PROMPT] if args.h100 else args.prompt:
                for chunk in SIZES if args.h100 else args.message:
                    if chunk <= prompt:
                        rows.append(_row(over, card, nccl, prompt, chunk, args))
    return {"rows": rows, "card": SOURCES}


def _row(
    over: str, card: Card, nccl: dict[str, Any], prompt: int, chunk: int, args: argparse.Namespace
) -> dict[str, Any]:
    steps: dict[str, dict[str, list[dict[str, float]]]] = {}
    with measuring(PacedPair, over, card, nccl, prompt, chunk) as pair:
        pair.push(prompt)
        pushes = [pair.push(prompt) for _ in range(args.repeat)]
        forward = {side: pair.forward(side, prompt) for side in "PD"} if args.forward else {}
        for layer_ms in args.step_ms:
            turns = steps[str(layer_ms)] = {way: [] for way in STEPS}
            for _, way in itertools.product(range(1 + args.repeat), STEPS):
                turns[way].append(pair.step(prompt, layer_ms / 1e3, way))
            for measured in turns.values():
                del measured[0]  # which warmed up
    row = {"over": over, "wire": card.wire, "prompt": prompt, "chunk": chunk}
    return row | nccl | {"pushes": pushes, "forward": forward, "steps": steps}


def report(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The tables: medians, with the lowest and the highest rate."""
    yield "A paced push: µs of the engine's turns a message, and its share of a core, on P and on D"
    yield (
        f"{'over':<5} {'wire':>5} {'prompt':>8} {'message':>8} {'GB/s':>20} {'of wire':>8} {'ms beyond':>9}"
        f" {'P µs':>7} {'D µs':>7} {'P core':>7} {'D core':>7}"
    )
    stations = []
    for row in rows:
        rates = sorted(row["prompt"] / push["seconds"] / 1e9 for push in row["pushes"])
        wire = row["wire"] / 1e9
        rate = statistics.median(rates)
        beyond = statistics.median(push["seconds"] for push in row["pushes"]) - row["prompt"] / row["wire"]
        sides = {side: _side(row["pushes"], side) for side in "PD"}
        chunk = statistics.median(row["prompt"] / push["messages"] for push in row["pushes"]) / MIB
        span = f"{rate:.1f} [{rates[0]:.1f} - {rates[-1]:.1f}]"
        what = f"{_pushed(row)} {chunk:>8.2f}"
        both = (f"{sides['P'][name]:.0f} / {sides['D'][name]:.0f}" for name in Meter.STATIONS)
        stations.append(f"{what} " + "".join(f"{each:>15}" for each in both))
        yield (
            f"{what} {span:>20} {rate / wire:>8.2f} {beyond * 1e3:>9.2f}"
            f" {sides['P']['turns']:>7.0f} {sides['D']['turns']:>7.0f}"
            f" {sides['P']['core']:>7.2f} {sides['D']['core']:>7.2f}"
        )
    for row in rows:
        for side, steps in row["forward"].items():
            alone, pushed = (statistics.median(steps[name]) for name in ("alone", "pushed"))
            yield (
                f"{_pushed(row)}: a forward thread on {side} is {pushed / alone:.3f} times slower while "
                f"pushes run at {steps['rate'] / 1e9:.1f} GB/s"
            )
        for layer_ms, turns in row["steps"].items():
            shown = (f"{way} {_medians(turns[way])}" for way in STEPS)
            yield (
                f"{_pushed(row)}, the GPU takes {layer_ms} ms a layer; P's forward thread, and until D has "
                f"loaded, ms: {', '.join(shown)}"
            )
    yield ""
    yield "Where it goes: µs a message, on P / on D"
    yield f"{'over':<5} {'wire':>5} {'prompt':>8} {'message':>8} " + "".join(
        f"{name:>15}" for name in Meter.STATIONS
    )
    yield from stations


def _pushed(row: dict[str, Any]) -> str:
    return f"{row['over']:<5} {row['wire'] / 1e9:>5.0f} {row['prompt'] >> 20:>4} MiB"


def _medians(steps: Sequence[dict[str, float]]) -> str:
    return " and ".join(ms([step[name] for step in steps]) for name in steps[0])


def _side(pushes: Sequence[dict[str, Any]], side: str) -> dict[str, float]:
    """Medians of one side: µs a message by station; `core`: processor time over the push's."""
    names = (*Meter.STATIONS, "turns")
    found = {
        name: statistics.median(push[side][name] / push["messages"] for push in pushes) / US for name in names
    }
    return found | {"core": statistics.median(push[side]["cpu"] / push["seconds"] for push in pushes)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the paced benchmark."""
    paced = parser.add_argument_group("with --link paced")
    paced.add_argument(
        "--over", nargs="+", choices=OVER, default=list(OVER), help="kinds of link (default: %(default)s)"
    )
    paced.add_argument(
        "--wire",
        nargs="+",
        type=_above_zero,
        default=WIRES,
        metavar="GB/S",
        help="GB/s of the wire; with ipc of P's gather, which writes to D's memory (default: %(default)s)",
    )
    paced.add_argument(
        "--prompt", nargs="+", type=_prompt, default=PROMPTS, metavar="MIB", help="KV (default: 16 512)"
    )
    paced.add_argument(
        "--message",
        nargs="+",
        type=_mib,
        default=[0],
        metavar="MIB",
        help="the option chunk_bytes (default: what it is on a GPU, 64 MiB)",
    )
    paced.add_argument(
        "--in-flight",
        type=int,
        choices=range(1, 9),
        default=1,
        metavar="N",
        help="the option nccl_in_flight (default: %(default)s)",
    )
    paced.add_argument(
        "--group",
        type=_mib,
        default=128 << 20,
        metavar="MIB",
        help="the option nccl_group_bytes (default: what it is on a GPU, 128 MiB)",
    )
    paced.add_argument(
        "--forward",
        action="store_true",
        help="also measure how much slower a thread gets that launches kernels from Python all the time, as "
        "vLLM's forward does, while prompts are pushed one after the other",
    )
    paced.add_argument(
        "--step-ms",
        nargs="+",
        type=_above_zero,
        default=[],
        metavar="MS",
        help="also measure how long a step takes P's forward thread, and when D has its KV, if the GPU takes "
        "so many ms for a layer: with no push, with a push of all that is computed, and as p2pkv pushes",
    )
    paced.add_argument(
        "--h100",
        action="store_true",
        help="what the H100 showed on 2026-11-26, P and D on one card: messages of 64 KiB to 16 MiB of a "
        "prompt of 64 MiB",
    )


def _above_zero(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def _prompt(text: str) -> int:
    return int(_above_zero(text) * MIB)


def _mib(text: str) -> int:
    return int(float(text) * MIB)


def main(argv: Sequence[str]) -> int:
    """D's process. `argv`: the socket's file descriptor and the settings as JSON."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
    serve(*begin_decode(argv))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
