"""`p2pkv bench --link nccl`: measures, prints a table, writes JSON and, with matplotlib, a plot."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from p2pkv.cli import bench_communicators, bench_fanout
from p2pkv.cli.bench_device import devices
from p2pkv.cli.bench_messages import SIZES, Messages, messages
from p2pkv.cli.bench_ranks import BenchError

TOTAL = 64 << 20
"""Bytes of each push, and of each series of messages."""

DEVICE_KINDS = ("copy", "gather", "scatter")
LINK_KINDS = ("raw", "link", "push")
Rows = list[dict[str, Any]]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All rates in bytes per second, by size of message and by fan-out; bytes of each communicator.

    Raises BenchError without a device or CuPy.
    """
    chosen = devices()
    communicators = bench_communicators.measure("nccl", chosen)  # first: see there
    try:
        with messages("nccl", chosen, SIZES, TOTAL) as both:
            rows = rows_of(both, SIZES, args.repeat)
    except ImportError as error:
        raise BenchError(
            f"--link nccl compares with NCCL's own calls, made through CuPy ({error}): install cupy-cuda12x "
            "or cupy-cuda13x, as torch.version.cuda says"
        ) from None
    every = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    fan_outs = args.fan_out or bench_fanout.FAN_OUTS
    names = sorted({torch.cuda.get_device_name(device) for device in chosen})
    return {
        "devices": list(chosen),
        "cards": names,
        "total": TOTAL,
        "rows": rows,
        "fan_out": bench_fanout.measure("nccl", every, fan_outs, args.chunk_bytes, args.repeat),
        "communicators": communicators,
    }


def rows_of(both: Messages, sizes: Sequence[int], repeat: int, *, raw: bool = True) -> Rows:
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
        rows.append(row)
    return rows


def show(about: dict[str, Any], results: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        table(results["rows"]),
        bench_fanout.table(results["fan_out"]),
        bench_communicators.table(results["communicators"]),
    ]
    return "\n".join([*_head(about, results), *(line for part in parts for line in ("", *part))])


def _head(about: dict[str, Any], results: dict[str, Any]) -> Iterator[str]:
    yield f"{', '.join(results['cards'])}; torch {about['torch']}, CUDA {torch.version.cuda}"
    if len(set(results["devices"])) == 1:
        yield (
            "P and D share one device, and NCCL goes through sockets: the rates of NCCL, link and push are "
            "no measure of a link, only their ratios say something"
        )
    moved = results["total"] >> 20
    yield f"Llama-8B's KV, blocks of 16 tokens; NCCL, link and push move {moved} MiB in such messages"


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


def _rate(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates) / 1e9:>8.2f}" if rates else f"{'-':>8}"


def _ratio(row: dict[str, Any], this: str, that: str) -> str:
    """The median of the ratios of measurements made one after the other."""
    if not row.get(that):
        return f"{'-':>7}"
    return f"{statistics.median(a / b for a, b in zip(row[this], row[that], strict=True)):>7.2f}"


def plot(rows: Rows, path: Path) -> None:
    """Curves of all rates by size of message. Raises BenchError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(f"--plot needs matplotlib ({error}): install it, or use --json") from None
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for kind in (*DEVICE_KINDS, *LINK_KINDS):
        values = [row[kind] if kind in DEVICE_KINDS else statistics.median(row[kind]) for row in rows]
        axes.plot([row["bytes"] / (1 << 20) for row in rows], [v / 1e9 for v in values], "o-", label=kind)
    axes.set(xscale="log", yscale="log", xlabel="MiB a message", ylabel="GB/s")
    axes.legend()
    figure.savefig(path)
