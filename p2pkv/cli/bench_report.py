"""The table of `p2pkv bench`, from its measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from p2pkv.cli.bench_pages import HEAD_DIM, HEADS, LAYERS, TOKEN_BYTES

Results = dict[str, Any]

SLOWER = 1.05
"""What a push layer by layer may take, times that of a whole request, for short prompts."""


def show(results: Results) -> str:
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
            yield _hook_line(f"the call, while prompts are pushed, {title}", calls)
            yield _hook_line(
                f"all that a layer takes longer than alone, {title}", list(_added(results, name))
            )


def _added(results: Results, mode: str) -> Iterator[float]:
    """What the forward took longer with p2pkv, for one layer; by rounds."""
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
                f"{_ms(copy):>20} {_ms(raw):>20} {_ms(push):>22} "
                f"{rate:>5.1f} {_ratio(push, copy):>7.2f} {_ratio(push, raw):>7.2f}"
            )
    parts = (f"{_ratio(row['dense'], row['verified']):.2f} ({row['tokens']})" for row in results["ready"])
    yield f"  dense with checksums (verify), GB/s against those without, by tokens: {', '.join(parts)}"
    claims = [claim for row in results["ready"] for claim in row["claim"]]
    yield f"  before it, from D's scheduler hearing of the request until P has offered it: {_ms(claims)}"


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
            yield f"{line}{'-':>22} {_ms(whole['tail']):>22} {'-':>6} {'-':>21}"
            continue
        ratio, early = _ratio(by_layer["total"], whole["total"]), statistics.median(by_layer["early"])
        mark = f"({'slower' if ratio > SLOWER else 'within'} {SLOWER:g})" if row["tokens"] <= 256 else ""
        yield (
            f"{line}{_ms(by_layer['tail']):>22} {_ms(whole['tail']):>22} {early:>6.0%} "
            f"{f'{ratio:.3f} {mark}':>21}"
        )


def _ms(seconds: Sequence[float]) -> str:
    values = [value * 1e3 for value in seconds]
    return f"{statistics.median(values):.1f} [{min(values):.1f} - {max(values):.1f}]"


def _ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """The median of the ratios of measurements made one after the other."""
    return statistics.median(this / that for this, that in zip(these, those, strict=True))
