"""`p2pkv bench`: what the layer hook costs, and how fast a push is beside a plain copy and the bare link.

A P and a D in two processes, with made-up pages of Llama-8B's KV geometry in place of vLLM.
"""

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import p2pkv
from p2pkv.bench import fanout, nccl, paced
from p2pkv.bench.harness import FORMS, WINDOW_BYTES, BenchError, ms, ratio_of
from p2pkv.bench.memory import HEAD_DIM, HEADS, LAYERS, LAYOUTS, TOKEN_BYTES, capacity_for
from p2pkv.bench.prefill import PrefillSide, prefill
from p2pkv.demo.processes import ending_on_signals
from p2pkv.link_kinds import KINDS
from p2pkv.links.base import LinkError

TOKENS = [64, 256, 512, 2048, 8192]
SHORT_TOKENS = 1024
"""Prompts up to this length are repeated three times as often: they are over soon, and noisy."""

PACED = "paced"

LAYER_FLOOR_SECONDS, LAYER_TOKEN_SECONDS = 250e-6, 1.2e-6
"""The simulated time of one layer, and what a token adds: about what a large GPU takes for an 8B Llama."""

Results = dict[str, Any]

SLOWER = 1.05
"""The most that a push layer by layer may take for short prompts, as a multiple of a push at the end."""


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
        "--layer-ms", type=float, help="simulated ms of one layer (default: 0.25 + 0.0012 x tokens)"
    )
    parser.add_argument(
        "--whole-request",
        action="store_true",
        help="only the baseline: push when the whole prompt is computed, not layer by layer",
    )
    parser.add_argument(
        "--link",
        choices=[*KINDS, PACED],
        default="host",
        help="kind of link. Between GPUs: gather, scatter, link and push by size of message, fan-out and the "
        f"memory of communicators, on CUDA devices; {PACED}: what a message costs on a GPU, with a clock in "
        "place of the GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--fan-out",
        type=int,
        nargs="+",
        choices=[1, 2, 4, 8],
        metavar="RANKS",
        help="push to so many ranks of D that share the heads, each a process of its own (1, 2, 4 or 8; "
        "default: 1 2 4 with a link between GPUs, else none)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="with a link between GPUs: draw the curves into this file"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write each measurement into this file")
    paced.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 unless something went wrong."""
    try:
        _check_output(args)
        if args.link == PACED:
            return _run_paced(args)
        if KINDS[args.link].memory == "cuda":
            return _run_on_gpus(args)
        _check_tokens(args)
        with ending_on_signals():
            print(f"p2pkv {p2pkv.__version__} bench: starting P and D ...", flush=True)
            with prefill(max(args.tokens), args.chunk_bytes, args.link) as both:
                results = measure(args, both)
            if args.fan_out:
                fans = fanout.measure(args.link, ["cpu"], args.fan_out, args.chunk_bytes, args.repeat)
                results["fan_out"] = fans
        print(report(results))
        if args.fan_out:
            print("", *fanout.table(results["fan_out"]), sep="\n")
        _write(args, results)
    except (BenchError, LinkError, OSError) as error:
        print(f"FAIL: {error}", flush=True)
        return 1
    return 0


def _run_on_gpus(args: argparse.Namespace) -> int:
    _check_chunk_bytes(args)
    with ending_on_signals():
        print(f"p2pkv {p2pkv.__version__} bench: starting P and D on CUDA ...", flush=True)
        results = nccl.measure(args)
    about = _about(args)
    print(nccl.show(about, results))
    _write(args, {"about": about, **results})
    if args.plot:
        nccl.plot(results["rows"], args.plot)
    return 0


def _run_paced(args: argparse.Namespace) -> int:
    with ending_on_signals():
        print(f"p2pkv {p2pkv.__version__} bench: starting P and D, with a clock for the card ...", flush=True)
        results = paced.measure(args)
    print(*paced.report(results["rows"]), sep="\n")
    _write(args, {"about": _about(args), **results})
    return 0


def _write(args: argparse.Namespace, results: Results) -> None:
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"every measurement is in {args.json}")


def measure(args: argparse.Namespace, both: PrefillSide) -> Results:
    """Every measurement. What is compared is measured in turn, so a busy machine slows down all of it."""
    modes = [True] if args.whole_request else [False, True]
    return {
        "about": _about(args),
        "hooks_asleep": both.hooks_asleep(),
        "ready": [_measure_ready(both, tokens, args.repeat) for tokens in args.tokens],
        "layers": [
            _measure_layers(both, tokens, args.repeat, _layer_seconds(args, tokens), modes)
            for tokens in args.tokens
        ],
    }


def _measure_ready(both: PrefillSide, tokens: int, repeat: int) -> dict[str, Any]:
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
    row |= {kind: [] for kind in (*kinds, *FORMS, "as_many", "verified", "claim")}
    row["planes_bytes"] = FORMS["planes"].nbytes(tokens)
    as_many = 1 + max(1, round(row["planes_bytes"] / TOKEN_BYTES))
    row["as_many_bytes"] = LAYOUTS["dense"].nbytes(as_many)
    for measured in _rounds(tokens, repeat):
        for kind, once in kinds.items():
            seconds = once()
            if measured:
                row[kind].append(seconds)
        for name, layout, many in (
            *((form, form, tokens) for form in FORMS),
            ("as_many", "dense", as_many),
        ):
            push = both.push_ready(layout, many)
            if measured:
                row[name].append(push.total)
                row["claim"].append(push.claim)
        verified = both.push_ready("dense", tokens, verify=True)
        if measured:
            row["verified"].append(verified.total)
    return row


def _measure_layers(
    both: PrefillSide, tokens: int, repeat: int, seconds: float, modes: list[bool]
) -> dict[str, Any]:
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


def _check_output(args: argparse.Namespace) -> None:
    """Raises BenchError for a file that could not be written after all the measuring."""
    for file in (args.json, args.plot):
        if file is not None and not file.parent.is_dir():
            raise BenchError(f"{file} cannot be written: there is no folder {file.parent}; make it first")
        if file is not None and file.is_dir():
            raise BenchError(f"{file} cannot be written: it is a folder; name a file in it")
    gpus = [name for name, kind in KINDS.items() if kind.memory == "cuda"]
    for option, given, kinds in (("--plot", args.plot, gpus), ("--fan-out", args.fan_out, KINDS)):
        if given and args.link not in kinds:
            raise BenchError(f"{option} is for --link {' or '.join(kinds)}, not {args.link}: leave it out")


def _check_tokens(args: argparse.Namespace) -> None:
    """Raises BenchError for options that cannot be measured here."""
    if args.layer_ms is not None and not 0 <= args.layer_ms < math.inf:
        raise BenchError(f"--layer-ms {args.layer_ms:g}: choose 0 or more milliseconds")
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
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return number


# The report.


def report(results: Results) -> str:
    """The whole report."""
    return "\n".join([*_head(results), "", *_hooks(results), "", *_ready(results), "", *_layers(results)])


def _head(results: Results) -> Iterator[str]:
    about = results["about"]
    yield (
        f"{LAYERS} layers x {HEADS} KV heads x {HEAD_DIM}, bfloat16: {TOKEN_BYTES >> 10} KiB a token; "
        f"link {about['link']}, chunks of {about['chunk_bytes'] / (1 << 20):g} MiB"
    )
    yield (
        f"{about['cpu']}, {about['cores']} cores; Python {about['python']}, torch {about['torch']}, "
        f"numpy {about['numpy']}"
    )
    yield "each figure: median [lowest - highest], milliseconds unless another unit is named"


def _hooks(results: Results) -> Iterator[str]:
    yield "The layer hook, microseconds in the forward's thread"
    yield f"  {'':<52} {'median':>8} {'99%':>8} {'most':>8}"
    yield _hook_line("the call, engine asleep (it wakes the engine)", results["hooks_asleep"])
    for name, title in (("layers", "layer by layer"), ("whole", "whole requests")):
        rows = [row["modes"][name] for row in results["layers"] if name in row["modes"]]
        if rows:
            calls = [call for row in rows for hooks in row["hooks"] for call in hooks]
            if calls:
                yield _hook_line(f"the call, while prompts are pushed, {title}", calls)
            yield _hook_line(
                f"all that a layer takes longer than alone, {title}", list(_added(results, name))
            )


def _added(results: Results, mode: str) -> Iterator[float]:
    """Seconds that the forward took longer with p2pkv, for one layer; by rounds."""
    for row in results["layers"]:
        for alone, forward in zip(row["alone"], row["modes"][mode]["forward"], strict=True):
            yield (forward - alone) / LAYERS


def _hook_line(what: str, seconds: Sequence[float]) -> str:
    values = sorted(value * 1e6 for value in seconds)
    high = values[min(len(values) - 1, len(values) * 99 // 100)]
    return f"  {what:<52} {statistics.median(values):>8.1f} {high:>8.1f} {values[-1]:>8.1f}"


def _ready(results: Results) -> Iterator[str]:
    yield "Push of a prompt that is all computed when D asks, until D has it, beside a plain copy of as many"
    yield "bytes (one thread) and the bare link (messages filled by a copy, nothing gathered or scattered)"
    yield (
        f"  {'tokens':>6} {'layout':<6} {'MiB':>6}  {'copy':>20} {'link':>20} {'push':>22} "
        f"{'GB/s':>5} {'/ copy':>7} {'/ link':>7}"
    )
    for row in results["ready"]:
        for layout, prefix, size in (("dense", "", "bytes"), ("pages", "page_", "page_bytes")):
            copy, raw, push = row[f"{prefix}copy"], row[f"{prefix}raw"], row[layout]
            rate = row[size] / statistics.median(push) / 1e9
            yield (
                f"  {row['tokens']:>6} {layout:<6} {row[size] / (1 << 20):>6.0f}  "
                f"{ms(copy):>20} {ms(raw):>20} {ms(push):>22} "
                f"{rate:>5.1f} {ratio_of(push, copy):>7.2f} {ratio_of(push, raw):>7.2f}"
            )
    parts = (f"{ratio_of(row['dense'], row['verified']):.2f} ({row['tokens']})" for row in results["ready"])
    yield f"  dense with checksums (verify), GB/s against those without, by tokens: {', '.join(parts)}"
    yield from _planes(results)
    claims = [claim for row in results["ready"] for claim in row["claim"]]
    yield f"  before it, from D's scheduler hearing of the request until P has offered it: {ms(claims)}"


def _planes(results: Results) -> Iterator[str]:
    yield "  Caches like DeepSeek V4's (planes, rows for 4 and 128 tokens, windows): time of a byte against"
    yield "  that of a dense prompt with as many bytes"
    for row in results["ready"]:
        scale = row["as_many_bytes"] / row["planes_bytes"]
        ratios = [this / that * scale for this, that in zip(row["planes"], row["as_many"], strict=True)]
        rate = row["planes_bytes"] / statistics.median(row["planes"]) / 1e9
        yield (
            f"  {row['tokens']:>6} planes {row['planes_bytes'] / (1 << 20):>6.0f}  {ms(row['planes']):>22} "
            f"{rate:>5.1f} GB/s, / dense {statistics.median(ratios):.2f} "
            f"[{min(ratios):.2f} - {max(ratios):.2f}]"
        )


def _layers(results: Results) -> Iterator[str]:
    yield "Push while the forward runs (simulated, it sleeps). Tail: from the last layer's end until D has it"
    yield (
        f"  {'tokens':>6} {'a layer':>7} {'forward':>8}  {'tail, layer by layer':>22} "
        f"{'tail, whole request':>22} {'early':>6} {'total, against whole':>21}"
    )
    for row in results["layers"]:
        modes = row["modes"]
        by_layer, whole = modes.get("layers"), modes["whole"]
        forward = statistics.median((by_layer or whole)["forward"])
        line = f"  {row['tokens']:>6} {row['layer_seconds'] * 1e3:>7.2f} {forward * 1e3:>8.1f}  "
        if by_layer is None:
            yield f"{line}{'-':>22} {ms(whole['tail']):>22} {'-':>6} {'-':>21}"
            continue
        ratio, early = ratio_of(by_layer["total"], whole["total"]), statistics.median(by_layer["early"])
        mark = f"({'slower' if ratio > SLOWER else 'within'} {SLOWER:g})" if row["tokens"] <= 256 else ""
        yield (
            f"{line}{ms(by_layer['tail']):>22} {ms(whole['tail']):>22} {early:>6.0%} "
            f"{f'{ratio:.3f} {mark}':>21}"
        )
