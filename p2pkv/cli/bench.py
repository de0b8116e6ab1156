"""`p2pkv bench`: what the layer hook costs, and how fast a push is beside a plain copy and the bare link.

A P and a D in two processes, with made-up pages of Llama-8B's KV geometry in place of vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import p2pkv
from p2pkv.cli import bench_fanout, bench_nccl
from p2pkv.cli.bench_pages import LAYOUTS, TOKEN_BYTES, capacity_for
from p2pkv.cli.bench_prefill import Prefill, prefill
from p2pkv.cli.bench_ranks import WINDOW_BYTES, BenchError
from p2pkv.cli.bench_report import Results, show
from p2pkv.cli.processes import ending_on_signals
from p2pkv.links.base import LinkError

TOKENS = [64, 256, 512, 2048, 8192]
SHORT_TOKENS = 1024
"""Prompts up to this length are repeated three times as often: they are over soon, and noisy."""

LAYER_FLOOR_SECONDS, LAYER_TOKEN_SECONDS = 250e-6, 1.2e-6
"""The simulated time of one layer, and what a token adds: about what a large GPU takes for an 8B Llama."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `p2pkv bench`."""
    parser.add_argument(
        "--tokens", type=_positive, nargs="+", default=TOKENS, help="prompt lengths (default: %(default)s)"
    )
    parser.add_argument(
        "--repeat", type=_positive, default=7, help="measurements of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk-bytes", type=_positive, default=8 << 20, help="the option chunk_bytes (default: %(default)s)"
    )
    parser.add_argument(
        "--layer-ms", type=float, help="simulated time of one layer; default: 0.25 + 0.0012 x tokens"
    )
    parser.add_argument(
        "--whole-request",
        action="store_true",
        help="only the baseline: push when the whole prompt is computed, not layer by layer",
    )
    parser.add_argument(
        "--link",
        choices=["host", "nccl"],
        default="host",
        help="nccl measures something else: gather, scatter, link and push by size of message, fan-out "
        "and the memory of communicators, on CUDA devices (default: %(default)s)",
    )
    parser.add_argument(
        "--fan-out",
        type=int,
        nargs="+",
        choices=[1, 2, 4, 8],
        metavar="RANKS",
        help="push to so many ranks of D that share the heads, each a process of its own (1, 2, 4 or 8; "
        "default: 1 2 4 with --link nccl, else none)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --link nccl: draw the curves there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single measurement there")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 unless something went wrong."""
    try:
        if args.link == "nccl":
            return _run_nccl(args)
        _check(args)
        with ending_on_signals():
            print(f"p2pkv {p2pkv.__version__} bench: starting P and D ...", flush=True)
            with prefill(max(args.tokens), args.chunk_bytes, args.link) as both:
                results = measure(args, both)
            if args.fan_out:
                fans = bench_fanout.measure("host", ["cpu"], args.fan_out, args.chunk_bytes, args.repeat)
                results["fan_out"] = fans
    except (BenchError, LinkError, OSError) as error:
        print(f"FAIL: {error}", flush=True)
        return 1
    print(show(results))
    if args.fan_out:
        print("", *bench_fanout.table(results["fan_out"]), sep="\n")
    _write(args, results)
    return 0


def _run_nccl(args: argparse.Namespace) -> int:
    _check_chunk_bytes(args)
    with ending_on_signals():
        print(f"p2pkv {p2pkv.__version__} bench: starting P and D on CUDA ...", flush=True)
        results = bench_nccl.measure(args)
    about = _about(args)
    print(bench_nccl.show(about, results))
    _write(args, {"about": about, **results})
    if args.plot:
        bench_nccl.plot(results["rows"], args.plot)
    return 0


def _write(args: argparse.Namespace, results: Results) -> None:
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"every measurement is in {args.json}")


def measure(args: argparse.Namespace, both: Prefill) -> Results:
    """Every measurement; what is compared is measured in turn, so that a busy machine is so to all."""
    modes = [True] if args.whole_request else [False, True]
    return {
        "about": _about(args),
        "hooks_asleep": both.hooks_asleep(),
        "ready": [_ready(both, tokens, args.repeat) for tokens in args.tokens],
        "layers": [
            _layers(both, tokens, args.repeat, _layer_seconds(args, tokens), modes) for tokens in args.tokens
        ],
    }


def _ready(both: Prefill, tokens: int, repeat: int) -> dict[str, Any]:
    """Everything is computed when D asks; copies and bare link for as many bytes as a dense push has."""
    nbytes = LAYOUTS["dense"].nbytes(tokens)
    pages = LAYOUTS["pages"].nbytes(tokens)
    row: dict[str, Any] = {"tokens": tokens, "bytes": nbytes, "page_bytes": pages}
    kinds: dict[str, Callable[[], float]] = {
        "copy": lambda: both.copy(nbytes),
        "page_copy": lambda: both.copy(pages),
        "raw": lambda: both.raw(nbytes),
        "page_raw": lambda: both.raw(pages),
    }
    row |= {kind: [] for kind in (*kinds, *LAYOUTS, "verified", "claim")}
    for measured in _rounds(tokens, repeat):
        for kind, once in kinds.items():
            seconds = once()
            if measured:
                row[kind].append(seconds)
        for layout in LAYOUTS:
            push = both.push_ready(layout, tokens)
            if measured:
                row[layout].append(push.total)
                row["claim"].append(push.claim)
        verified = both.push_ready("dense", tokens, verify=True)
        if measured:
            row["verified"].append(verified.total)
    return row


def _layers(both: Prefill, tokens: int, repeat: int, seconds: float, modes: list[bool]) -> dict[str, Any]:
    """The forward runs while D waits: layer by layer, as a whole request, and the forward alone."""
    row: dict[str, Any] = {"tokens": tokens, "layer_seconds": seconds, "alone": [], "modes": {}}
    for whole in modes:
        names = ("forward", "tail", "total", "early", "hooks")
        row["modes"]["whole" if whole else "layers"] = {name: [] for name in names}
    for measured in _rounds(tokens, repeat):
        alone = both.forward_alone(seconds)
        if measured:
            row["alone"].append(alone)
        for whole in modes:
            push = both.push_layers("dense", tokens, seconds, whole=whole)
            if measured:
                for name, values in row["modes"]["whole" if whole else "layers"].items():
                    values.append(getattr(push, name))
    return row


def _rounds(tokens: int, repeat: int) -> Iterator[bool]:
    """One turn that only warms up, then those that count."""
    yield False
    for _ in range(3 * repeat if tokens <= SHORT_TOKENS else repeat):
        yield True


def _layer_seconds(args: argparse.Namespace, tokens: int) -> float:
    if args.layer_ms is not None:
        return float(args.layer_ms) / 1000
    return LAYER_FLOOR_SECONDS + tokens * LAYER_TOKEN_SECONDS


def _about(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "p2pkv": p2pkv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "link": args.link,
        "chunk_bytes": args.chunk_bytes,
        "repeat": args.repeat,
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _check(args: argparse.Namespace) -> None:
    """Raises BenchError for options that cannot be measured here."""
    if min(args.tokens) < 2:
        raise BenchError(
            "--tokens 1: D computes the last token of a prompt by itself, so nothing would be pushed"
        )
    _check_chunk_bytes(args)
    need, there = 3 * capacity_for(max(args.tokens)) * TOKEN_BYTES, _available_bytes()
    if need > there:
        raise BenchError(
            f"{max(args.tokens)} tokens need {need >> 20} MiB of memory for P, D and a copy, and "
            f"{there >> 20} MiB are free: choose shorter prompts with --tokens"
        )


def _check_chunk_bytes(args: argparse.Namespace) -> None:
    if not 1024 <= args.chunk_bytes <= WINDOW_BYTES:
        raise BenchError(
            f"--chunk-bytes {args.chunk_bytes}: choose 1024 to {WINDOW_BYTES}, half of what is in flight"
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return number
