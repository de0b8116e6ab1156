"""`p2pkv bench --link nccl`, or ipc: the same bytes in messages of several sizes, at every level.

Gather and scatter beside a plain copy on the device; p2pkv's bare link beside NCCL's own send and receive; a
whole push beside the bare link. Prints a table, writes JSON and, with matplotlib, a plot.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from p2pkv.bench import fanout
from p2pkv.bench.harness import (
    HOST,
    LAYOUT,
    STAGING_BYTES,
    BenchError,
    RawNccl,
    Strip,
    bare_link,
    decode_process,
    devices,
    environment,
    environment_of_child,
    forget,
    hold,
    make_rank,
    measuring,
    new_name,
    ratio_of,
    seconds_over,
)
from p2pkv.bench.memory import TOKEN_BYTES, Memory, capacity_for
from p2pkv.bench.prefill import Hook
from p2pkv.demo.processes import free_ports
from p2pkv.engine.thread import Rank
from p2pkv.links import make_factory
from p2pkv.links.base import Outbound
from p2pkv.links.nccl import NcclLinks
from p2pkv.pairing import Address

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]

TOTAL = 64 << 20
"""Bytes of each push, and of each series of messages."""

DEVICE_KINDS = ("copy", "gather", "scatter")
LINK_KINDS = ("raw", "link", "push")
Rows = list[dict[str, Any]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rates in bytes per second, by size of message and by fan-out; with NCCL bytes of each communicator.

    Raises BenchError without a device, or, with NCCL, without CuPy.
    """
    chosen, by_nccl = devices(args.link), args.link == "nccl"
    # First: see there.
    communicators = fanout.measure_communicators("nccl", chosen) if by_nccl else None
    try:
        with messages(args.link, chosen, SIZES, TOTAL) as both:
            rows = rows_of(both, SIZES, args.repeat, raw=by_nccl)
    except ImportError as error:
        raise BenchError(
            f"--link nccl compares with NCCL's own calls, made through CuPy ({error}): install cupy-cuda12x "
            "or cupy-cuda13x, for the CUDA in torch.version.cuda"
        ) from None
    every = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    fan_outs = args.fan_out or fanout.FAN_OUTS
    names = sorted({torch.cuda.get_device_name(device) for device in chosen})
    return {
        "link": args.link,
        "devices": list(chosen),
        "cards": names,
        "total": TOTAL,
        "rows": rows,
        "fan_out": fanout.measure(args.link, every, fan_outs, args.chunk_bytes, args.repeat),
        "communicators": communicators,
    }


def rows_of(both: "Messages", sizes: Sequence[int], repeat: int, *, raw: bool = True) -> Rows:
    """One row a size; what is compared is measured in turn. `raw`: whether NCCL itself is measured too."""
    on_device = both.on_device(sizes)
    rows: Rows = []
    for size in sizes:
        kinds = {"raw": both.raw, "link": both.link, "push": both.push}
        if not raw:
            del kinds["raw"]
        row: dict[str, Any] = {"bytes": size, **on_device[size], **{kind: [] for kind in kinds}}
        for turn in range(repeat + 1):
            for kind, once in kinds.items():
                rate = once(size)
                if turn:  # the first one only warms up
                    row[kind].append(rate)
        if both.times:
            row["parts"] = parts_of(both.times)
            both.times.clear()
        rows.append(row)
    return rows


def show(about: dict[str, Any], results: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        table(results["rows"]),
        parts_table(results["rows"]),
        fanout.table(results["fan_out"]),
    ]
    if results["communicators"]:
        parts.append(fanout.communicators_table(results["communicators"]))
    return "\n".join([*_head(about, results), *(line for part in parts for line in ("", *part))])


def _head(about: dict[str, Any], results: dict[str, Any]) -> Iterator[str]:
    yield f"{', '.join(results['cards'])}; torch {about['torch']}, CUDA {torch.version.cuda}"
    if len(set(results["devices"])) == 1 and results["link"] == "nccl":
        yield (
            "P and D share one device: the rates of NCCL, link and push are no measure of a wire. Without "
            "CUDA MPS both processes take turns there (see `p2pkv doctor`)"
        )
    moved = results["total"] >> 20
    compared = "NCCL, link and push" if results["link"] == "nccl" else "link and push"
    yield f"Llama-8B's KV, blocks of 16 tokens; {compared} move {moved} MiB in such messages"


def table(rows: Rows) -> Iterator[str]:
    """GB/s by size of message: medians, and the ratios that matter."""
    yield (
        f"{'message':>10} {'copy':>8} {'gather':>8} {'/ copy':>7} {'scatter':>8} {'/ copy':>7}  "
        f"{'NCCL':>8} {'link':>8} {'/ NCCL':>7} {'push':>8} {'/ link':>7}   GB/s"
    )
    for row in rows:
        copy, gather, scatter = (row[kind] for kind in DEVICE_KINDS)
        yield (
            f"{row['bytes'] >> 10:>6} KiB {_rate([copy])} {_rate([gather])} {gather / copy:>7.2f} "
            f"{_rate([scatter])} {scatter / copy:>7.2f}  "
            f"{_rate(row.get('raw', []))} {_rate(row['link'])} {_ratio(row, 'link', 'raw')} "
            f"{_rate(row['push'])} {_ratio(row, 'push', 'link')}"
        )


PARTS = ("copy", "call", "NCCL", "wire")
"""Of a message over the bare link, on P: until its copy is done and it is its turn; Python and NCCL's call;
until NCCL's thread has launched it; until D has taken it."""


def parts_table(rows: Rows) -> Iterator[str]:
    """Where the time of a message goes: medians, in microseconds. Polls of the engine lie in between."""
    if not any(row.get("parts") for row in rows):
        return
    yield f"{'message':>10} {'copy, queue':>12} {'call':>8} {'NCCL':>8} {'wire':>8}   µs a message, on P"
    for row in rows:
        copy, call, nccl, wire = (row["parts"][name] * 1e6 for name in PARTS)
        yield f"{row['bytes'] >> 10:>6} KiB {copy:>12.0f} {call:>8.0f} {nccl:>8.0f} {wire:>8.0f}"


def parts_of(times: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Medians, in seconds, of what a message waited for."""
    steps = [[after - before for before, after in pairwise(each)] for each in times]
    return {name: statistics.median(step[index] for step in steps) for index, name in enumerate(PARTS)}


def _rate(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates) / 1e9:>8.2f}" if rates else f"{'-':>8}"


def _ratio(row: dict[str, Any], this: str, that: str) -> str:
    return f"{ratio_of(row[this], row[that]):>7.2f}" if row.get(that) else f"{'-':>7}"


def plot(rows: Rows, path: Path) -> None:
    """Curves of all rates by size of message. Raises BenchError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(f"--plot needs matplotlib ({error}): install it, or use --json") from None
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for kind in (*DEVICE_KINDS, *LINK_KINDS):
        if kind not in rows[0]:
            continue
        values = [row[kind] if kind in DEVICE_KINDS else statistics.median(row[kind]) for row in rows]
        axes.plot([row["bytes"] / (1 << 20) for row in rows], [v / 1e9 for v in values], "o-", label=kind)
    axes.set(xscale="log", yscale="log", xlabel="MiB a message", ylabel="GB/s")
    axes.legend()
    figure.savefig(path)


# P, and D's process.


class Messages:
    """P's memory, ranks and links, and D's process.

    Attributes:
        decoder: D's process.
        total: bytes that each measurement of a link or a push moves.
        times: of the messages over the bare link, see links.nccl_communicator.NcclContext; of NCCL only.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        link: str,
        devices: tuple[str, str],
        sizes: Sequence[int],
        total: int,
        lease_seconds: float = 30.0,
        verify: bool = False,
        **nccl: int,
    ) -> None:
        """`stack`: of what has to end. `total`: a multiple of every size and of a token's bytes. `verify`:
        with checksums. `nccl`: options of that name."""
        self.total = total
        self.device, self._decode_device = devices
        self._lease_seconds = lease_seconds
        self._verify = verify
        self._nccl = nccl
        self._shared = devices[0] == devices[1] != "cpu"
        self._link = link
        self._staging = max(4 * max(sizes), STAGING_BYTES)
        self._tokens = total // TOKEN_BYTES + 1
        self._stack = stack
        self._keys = 0
        self.times: list[tuple[float, ...]] = []
        os.environ.update(environment(self._shared))
        self.memory = Memory(capacity_for(self._tokens), "P", self.device)
        self._outbound: Outbound | None = None
        self._raw: RawNccl | None = None
        self._start_decode()
        self._ranks = {size: self._start_rank(size) for size in sizes}

    def on_device(self, sizes: Sequence[int]) -> dict[int, dict[str, float]]:
        """By size, bytes per second of a plain copy, a gather and a scatter."""
        strip = Strip(self.memory, max(sizes), self.device)
        return {size: strip.rates(size) for size in sizes}

    def push(self, size: int) -> float:
        """Bytes per second of a prompt that is all computed when D asks, with this chunk_bytes."""
        rank, key = self.rank(size), self.hold(size)
        self.ask(size, key)
        times = self.pipe.expect("loaded")
        if times["scattered"] != self.total:
            raise BenchError(f"D wrote {times['scattered']} bytes instead of {self.total}")
        forget(rank, key)
        return self.total / (float(times["loaded"]) - float(times["asked"]))

    def hold(self, size: int, share: float = 1.0) -> str:
        """P has computed so much of a prompt for D, in the rank with this chunk_bytes; its key."""
        _, rank = self._ranks[size]
        self._keys += 1
        key = f"messages-{self._keys}"
        blocks = LAYOUT.tables(self._tokens, self.memory.capacity, "P")
        hold(rank, key, self._decode, self._tokens, blocks)
        Hook(rank, ((key, int(share * self._tokens)),), 1, self.device).end()
        return key

    def ask(self, size: int, key: str) -> None:
        """D asks for what P holds under this key."""
        address, _ = self._ranks[size]
        self.pipe.send(order="load", layout=LAYOUT.name, key=key, prefill=str(address), tokens=self._tokens)
        self.pipe.expect("expecting")

    def restart_decode(self) -> None:
        """Kill D's process, without a goodbye, and start another at another address."""
        self.decoder.kill()
        self.decoder.wait(10.0)
        self._outbound = self._raw = None
        self._start_decode()

    def rank(self, size: int) -> Rank:
        """P's rank with this chunk_bytes."""
        return self._ranks[size][1]

    def link(self, size: int) -> float:
        """Bytes per second over the bare link, each message filled by one plain copy."""
        self._outbound = self._outbound or self._start_link()
        sizes = [size] * (self.total // size)
        return self.total / seconds_over(self._outbound, self.pipe, self.memory.flat, sizes)

    def raw(self, size: int) -> float:
        """Bytes per second of NCCL's own send and receive. Raises ImportError without CuPy."""
        name = new_name() if self._raw is None else ""
        sizes = [size] * (self.total // size)
        self.pipe.send(order="raw", name=name, sizes=sizes)
        if self._raw is None:
            self._raw = RawNccl(bytes.fromhex(name), rank=0)
            self._stack.callback(self._raw.close)
        self.pipe.expect("ready")
        begin = time.monotonic()
        self._raw.send(self.memory.flat, sizes)
        return self.total / (float(self.pipe.expect("received")["received"]) - begin)

    # Inside.

    def _start_decode(self) -> None:
        settings = {
            "capacity": self.memory.capacity,
            "link": self._link,
            "ports": {LAYOUT.name: free_ports()},
            "device": self._decode_device,
            "staging_bytes": self._staging,
            "lease_seconds": self._lease_seconds,
            "nccl": self._nccl,
        }
        process = decode_process(settings, environment_of_child(self._shared))
        self.decoder, self.pipe = self._stack.enter_context(process)
        self._decode = Address.parse(self.pipe.expect("addresses")["addresses"][LAYOUT.name])

    def _start_rank(self, size: int) -> tuple[Address, Rank]:
        address, rank = make_rank(
            "P", LAYOUT, self.memory, free_ports(), link=self._link,
            staging_bytes=self._staging, chunk_bytes=size, lease_seconds=self._lease_seconds,
            verify=self._verify, **self._nccl,
        )  # fmt: skip
        self._stack.callback(rank.stop)
        return address, rank

    def _start_link(self) -> Outbound:
        links = make_factory(self._link, host=HOST, staging_bytes=self._staging, receives=False)
        self._stack.callback(links.close)
        if isinstance(links, NcclLinks):
            links.shared.times = self.times
        return bare_link(links, self.pipe, self._staging // 2)


messages = partial(measuring, Messages)
"""A Messages, ended on the way out."""
