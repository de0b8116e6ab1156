"""What side_by_side.py has measured, as a page and a plot.

`found` is the JSON that it writes: `records` (one measurement each), `titles` (of the systems that were
asked), `missing` (why a system is not there, or no more) and `cut` (what the time did not allow). Any of it
may be absent: a table has the rows that were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from side_by_side_load import MIX, Ratio, paired_ratio, percentile

Found = dict[str, Any]
Record = dict[str, Any]
STALL_SECONDS = 5.0
"""A hand-over that takes longer is counted as a stall."""

MAX_TOTAL, MAX_OF_EXAMPLE, MAX_SPREAD, MAX_CORES, MAX_DECODE = 1.10, 0.4, 1.5, 0.25, 1.03
PROXY_MORE = 0.02
BUSY_GROUP = 1.5
"""From so many times the plain server's TTFT in the first group on, the page says that a group is slow."""

MAX_SMALL, MAX_LATER = 0.015, 0.007
"""Seconds."""


# Reading records.


def select(found: Found, section: str, **facts: Any) -> list[Record]:
    """The records of a section with these facts, without those of requests that failed."""
    return [
        record
        for record in found["records"]
        if record["section"] == section
        and not (record.get("failed") and "first" not in record)
        and all(record.get(key) == value for key, value in facts.items())
    ]


def names(found: Found, section: str, group: str | None = None) -> list[str]:
    """The systems that a section has records of, as they came first."""
    return list(
        dict.fromkeys(
            record["system"]
            for record in found["records"]
            if record["section"] == section and group in (None, record["group"])
        )
    )


def groups(found: Found, section: str) -> list[str]:
    return list(dict.fromkeys(r["group"] for r in found["records"] if r["section"] == section))


def paired(
    found: Found,
    group: str,
    tokens: int | None,
    these: tuple[str, str],
    those: tuple[str, str],
    section: str = "lengths",
) -> Ratio | None:
    """Ratio of two (system, what) in the rounds of a section that have both; None if none has."""
    facts = {"group": group} | ({} if tokens is None else {"tokens": tokens})

    def by_round(system: str, what: str) -> dict[int, float]:
        records = select(found, section, system=system, **facts)
        return {record["round"]: record[what] for record in records if record.get(what) is not None}

    left, right = by_round(*these), by_round(*those)
    both = sorted(left.keys() & right.keys())
    return paired_ratio([left[n] for n in both], [right[n] for n in both]) if both else None


# The page.


def report(found: Found, picture: bool = False) -> str:
    """The Markdown page."""
    lines: list[str] = [*_head(found, picture)]
    parts: list[tuple[str, Callable[[Found], Iterator[str]]]] = [
        ("Marks", _marks),
        ("Systems", _systems),
        ("Time to first token, one request at a time", _first_tokens),
        ("The same, times the plain server of the group", _first_ratios),
        ("Hand-over: D's first token after P's answer", _hand_over),
        ("P's slowdown: P's answer, times the plain server's", _slowdown),
        ("Closed loop of mixed prompts", _loads),
        ("CPU while KV is waited for, and nothing else runs", _idle),
        ("Raw links", _links),
        ("What was cut", _cut),
    ]
    for title, part in parts:
        body = list(part(found))
        if body:
            lines += ["", f"## {title}", "", *body]
    return "\n".join([*lines, ""])


def _head(found: Found, picture: bool) -> Iterator[str]:
    about = found["about"]
    yield "# Side by side"
    yield ""
    yield f"{about['date']}; {about['cpu']}, {about['cores']} cores; {about['versions']}."
    yield f"The model has {about['model']}."
    yield ""
    yield f"    {about['command']}"
    yield ""
    yield (
        f"One run of {about.get('minutes', 0):.0f} minutes. Every server: OMP_NUM_THREADS=1, "
        "VLLM_CPU_OMP_THREADS_BIND=nobind, no prefix cache; a random Llama with the KV of an 8B model "
        "(128 KiB a token). Milliseconds are medians (lowest to highest), ratios are geometric means of "
        "paired measurements (95% interval). Each system is held against the plain server of its own group. "
        "What is measured, and how, is written at the top of `benchmarks/side_by_side.py`."
    )
    if picture:
        yield ""
        yield "![Time to first token, and under load](side_by_side.svg)"


def _systems(found: Found) -> Iterator[str]:
    yield "| system | what it is | requests | failed | stalls | prompt tokens from P | remark |"
    yield "|---|---|---:|---:|---:|---:|---|"
    rows = dict.fromkeys([*found["titles"], *(n for n in found["missing"] if not n.startswith("link "))])
    for name in rows:
        mine = [r for r in found["records"] if r["system"] == name]
        single = [r for r in mine if r["section"] in ("warm-up", "series", "small", "lengths", "legs")]
        asked = len(single) + sum(r["count"] for r in mine if r["section"] == "load")
        broken = sum(bool(r.get("failed")) for r in single)
        broken += sum(len(r["failed"]) for r in mine if r["section"] == "load")
        waits = [r["after"] for r in single if r.get("after") is not None]
        stalls = [wait for wait in waits if wait > STALL_SECONDS]
        stalled = f"{len(stalls)} (to {max(stalls):.0f} s)" if stalls else "0"
        moved = sum(r["tokens"] for r in mine if r["section"] == "from P")
        remark = found["missing"].get(name) or next((r["failed"] for r in single if r.get("failed")), "")
        yield (
            f"| {name} | {found['titles'].get(name, '')} | {asked} | {broken} | {stalled} | "
            f"{f'{moved:,.0f}' if moved else '-'} | {_cell(remark)} |"
        )
    yield ""
    yield (
        f"A stall is a hand-over of more than {STALL_SECONDS:g} s, of one request at a time. Prompt tokens "
        "from P: by D's own count, of all systems that share the D."
    )


def _lengths(found: Found) -> list[int]:
    return sorted({r["tokens"] for r in found["records"] if r["section"] == "lengths"})


def _by_length(
    found: Found, cell: Callable[[str, str, int], str], only: Callable[[str], bool]
) -> Iterator[str]:
    """A table: a row for each group's systems, a column for each length."""
    columns = _lengths(found)
    if not columns:
        return
    yield f"| group | system | {' | '.join(f'{tokens:,}' for tokens in columns)} |"
    yield f"|---|---|{'---:|' * len(columns)}"
    for group in groups(found, "lengths"):
        for name in names(found, "lengths", group):
            if only(name):
                yield f"| {group} | {name} | {' | '.join(cell(group, name, n) for n in columns)} |"


def _first_tokens(found: Found) -> Iterator[str]:
    def cell(group: str, name: str, tokens: int) -> str:
        return milliseconds(
            [r["first"] for r in select(found, "lengths", group=group, system=name, tokens=tokens)]
        )

    yield from _by_length(found, cell, lambda _name: True)


def _first_ratios(found: Found) -> Iterator[str]:
    def cell(group: str, name: str, tokens: int) -> str:
        return _ratio(paired(found, group, tokens, (name, "first"), ("plain", "first")))

    yield from _by_length(found, cell, lambda name: name != "plain")


def _hand_over(found: Found) -> Iterator[str]:
    def cell(group: str, name: str, tokens: int) -> str:
        records = select(found, "lengths", group=group, system=name, tokens=tokens)
        return milliseconds([r["after"] for r in records if r.get("after") is not None])

    yield from _by_length(found, cell, lambda name: name not in ("plain", "p2pkv proxy"))
    for name in names(found, "legs"):
        if mine := select(found, "legs", system=name):
            legs = [r["d"] for r in mine]
            yield ""
            yield (
                f"D's leg, P first, {mine[0]['tokens']:,} tokens, in turn: {name} {milliseconds(legs)}, p90 "
                f"{percentile(legs, 90) * 1e3:,.0f}, of {len(legs)}."
            )


def _slowdown(found: Found) -> Iterator[str]:
    def cell(group: str, name: str, tokens: int) -> str:
        return _ratio(paired(found, group, tokens, (name, "p"), ("plain", "first")))

    yield from _by_length(found, cell, lambda name: name not in ("plain", "p2pkv proxy"))
    for name in names(found, "series"):
        if (ratio := _series_slowdown(found, name)) is not None:
            tokens = select(found, "series", system=name)[0]["tokens"]
            yield ""
            yield f"In the series of {tokens:,} tokens, by their medians: {name} {ratio}."


def _series_slowdown(found: Found, name: str) -> Ratio | None:
    """P's answer / the plain server's, a pair for each series."""
    pairs = []
    for number in sorted({r["round"] for r in select(found, "series", system=name)}):
        mine = [r["p"] for r in select(found, "series", system=name, round=number) if r["p"] is not None]
        base = [r["first"] for r in select(found, "series", system="plain", round=number)]
        if mine and base:
            pairs.append((statistics.median(mine), statistics.median(base)))
    return paired_ratio(*map(list, zip(*pairs, strict=True))) if pairs else None


def _loads(found: Found) -> Iterator[str]:
    if not groups(found, "load"):
        return
    yield (
        "| clients | group | system | requests a second | times plain | TTFT p50 | p90 | p99 | "
        "between tokens p50 | p90 | p99 | failed |"
    )
    yield "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for clients in sorted({r["clients"] for r in found["records"] if r["section"] == "load"}):
        for group in groups(found, "load"):
            base = _rate(select(found, "load", group=group, system="plain", clients=clients))
            for name in names(found, "load", group):
                mine = select(found, "load", group=group, system=name, clients=clients)
                if not mine:
                    continue
                rate = _rate(mine)
                times = [_percentiles([v for r in mine for v in r[what]]) for what in ("first", "gaps")]
                failed = [sentence for r in mine for sentence in r["failed"]]
                remark = f"{len(failed)}: {_cell(failed[0])}" if failed else "0"
                against = f"{rate / base:.2f}" if base else "-"
                cells = [str(clients), group, name, f"{rate:.2f}", against, *times, remark]
                yield f"| {' | '.join(cells)} |"
    yield ""
    mix = ", ".join(f"{share:.0%} of {tokens:,} tokens" for tokens, share in MIX.items())
    yield f"Prompts: {mix}; the same to each system. Milliseconds. Two servers where plain has one."


def _rate(records: Sequence[Record]) -> float:
    """Requests a second over all rounds; 0 without any."""
    seconds = sum(record["seconds"] for record in records)
    return sum(len(record["first"]) for record in records) / seconds if seconds else 0.0


def _percentiles(values: Sequence[float]) -> str:
    return " | ".join(f"{percentile(values, q) * 1e3:,.0f}" if values else "-" for q in (50, 90, 99))


def _idle(found: Found) -> Iterator[str]:
    rows = select(found, "idle")
    if not rows:
        return
    yield "| system | who waits | worker | engine core | together |"
    yield "|---|---|---:|---:|---:|"
    for row in rows:
        parts = [row["cores"]["worker"], row["cores"]["engine core"]]
        shares = " | ".join(f"{share:.0%}" for share in [*parts, sum(parts)])
        yield f"| {row['system']} | {row['role']} | {shares} |"
    yield ""
    yield "Of one core, over four seconds, from two and a half seconds after the wait began."


def _links(found: Found) -> Iterator[str]:
    rows = select(found, "links")
    broken = {name: why for name, why in found["missing"].items() if name.startswith("link ")}
    if not (rows or broken):
        return
    sizes = sorted({row["MiB"] for row in rows})
    yield f"| GB/s by message size | {' | '.join(f'{size:g} MiB' for size in sizes)} |"
    yield f"|---|{'---:|' * len(sizes)}"
    for name in names(found, "links"):
        cells = []
        for size in sizes:
            values = [v for row in rows if row["system"] == name and row["MiB"] == size for v in row["GB/s"]]
            cells.append(_span(values, "{:.2f}"))
        yield f"| {name} | {' | '.join(cells)} |"
    yield from (f"| {name.removeprefix('link ')} | {_cell(why)} |" for name, why in broken.items())
    yield ""
    yield (
        "NIXL, Mooncake: one message at a time, out of registered memory into another process's. p2pkv: two "
        "messages in flight, gathered into its slots, the best of two passes."
    )


def _cut(found: Found) -> Iterator[str]:
    yield from (f"- {sentence}" for sentence in found["cut"])


# What "Done when" asks for.


def _marks(found: Found) -> Iterator[str]:
    yield from (f"- {'PASS' if ok else 'FAIL'}: {sentence}" for ok, sentence in marks(found))


def marks(found: Found) -> Iterator[tuple[bool, str]]:
    """Each mark that was measured: whether it is reached, and the sentence."""
    yield from _total_marks(found)
    yield from _small_marks(found)
    yield from _leg_marks(found)
    yield from _arrival_marks(found)
    for row in select(found, "idle", system="p2pkv"):
        used = sum(row["cores"].values())
        yield (
            used <= MAX_CORES,
            f"{row['role']}'s worker and engine core take {used:.0%} of a core while KV is waited for, "
            f"at most {MAX_CORES:.0%}",
        )
    if (ratio := decode_ratio(found)) is not None:
        # With an interval that lies below 1.00 altogether, naps make a decode faster: no harm either.
        ok = ratio.low is not None and ratio.high is not None and ratio.low <= 1.0 and ratio.high < MAX_DECODE
        yield (
            ok,
            f"a decode with 16 at once on D, with naps / without: {ratio}; the interval must contain 1.00 or "
            f"less and end below {MAX_DECODE}",
        )
    yield from _ahead_marks(found)


def series_ratios(found: Found, system: str) -> list[float]:
    """By series: the median total / (the plain server's median + its median decode step)."""
    ratios = []
    for number in sorted({r["round"] for r in select(found, "series", system=system)}):
        mine = [r["first"] for r in select(found, "series", system=system, round=number)]
        base = select(found, "series", system="plain", round=number)
        steps = [gap for r in base for gap in r["gaps"]]
        if mine and steps:
            whole = statistics.median(r["first"] for r in base) + statistics.median(steps)
            ratios.append(statistics.median(mine) / whole)
    return ratios


def _total_marks(found: Found) -> Iterator[tuple[bool, str]]:
    at_once = series_ratios(found, "p2pkv")
    for name, title in (
        ("p2pkv", "P and D at once"),
        ("p2pkv proxy", "through the proxy"),
        ("p2pkv P first", "P first"),
    ):
        ratios = series_ratios(found, name)
        if not ratios:
            continue
        bound = MAX_TOTAL + (PROXY_MORE if name == "p2pkv proxy" else 0.0)
        value = statistics.median(ratios)
        tokens = select(found, "series", system=name)[0]["tokens"]
        sentence = (
            f"{title}, {tokens:,} tokens: total / (one plain server + one decode step) is "
            f"{_span(ratios, '{:.3f}')} in {len(ratios)} series, at most {bound:.2f}"
        )
        if name == "p2pkv proxy" and at_once:
            sentence += f"; {value - statistics.median(at_once):+.3f} against no proxy"
        yield value <= bound, sentence


def _small_marks(found: Found) -> Iterator[tuple[bool, str]]:
    base = select(found, "small", system="plain")
    steps = [gap for r in base for gap in r["gaps"]]
    if not steps:
        return
    plain, step = statistics.median(r["first"] for r in base), statistics.median(steps)
    for name, title in (("p2pkv", "P and D at once"), ("p2pkv P first", "P first")):
        totals = [r["first"] for r in select(found, "small", system=name)]
        if totals:
            more = statistics.median(totals) - plain - step
            yield (
                more <= MAX_SMALL,
                f"{title}, {base[0]['tokens']} tokens: {milliseconds(totals)} ms of {len(totals)} prompts, "
                f"{more * 1e3:+.0f} ms against one plain server ({plain * 1e3:.0f}) and one decode step "
                f"({step * 1e3:.0f}), at most +{MAX_SMALL * 1e3:.0f}",
            )


def _arrival_marks(found: Found) -> Iterator[tuple[bool, str]]:
    taken = {
        waits: [first for r in select(found, "arrivals", waits=waits) for first in r["first"]]
        for waits in (False, True)
    }
    if taken[False] and taken[True]:
        later = statistics.median(taken[True]) - statistics.median(taken[False])
        yield (
            later <= MAX_LATER,
            f"a short prompt at a D where a request waits for KV: {later * 1e3:+.1f} ms, median of "
            f"{len(taken[True])} against {len(taken[False])} where none waits, at most "
            f"+{MAX_LATER * 1e3:.0f}",
        )


def _leg_marks(found: Found) -> Iterator[tuple[bool, str]]:
    legs = [r["d"] for r in select(found, "series", system="p2pkv P first")]
    if legs:
        middle, high = statistics.median(legs), percentile(legs, 90)
        yield (
            high <= MAX_SPREAD * middle,
            f"D's leg after P: median {middle * 1e3:.0f} ms, p90 {high * 1e3:.0f} ms of {len(legs)}: "
            f"{high / middle:.2f} times, at most {MAX_SPREAD}",
        )
    for name in ("Example", "Example naps"):
        ratio = paired(found, "files", None, ("p2pkv P first", "d"), (name, "d"), "legs")
        if ratio is not None:
            tokens = select(found, "legs", system=name)[0]["tokens"]
            yield (
                ratio.mean <= MAX_OF_EXAMPLE,
                f"D's leg after P, {tokens:,} tokens: {ratio} times {name}'s, at most {MAX_OF_EXAMPLE}",
            )


def decode_ratio(found: Found) -> Ratio | None:
    """Seconds between tokens with naps / without, by the rounds that have both."""
    by_round = [
        {r["round"]: r["step"] for r in select(found, "decode", system=name) if "step" in r}
        for name in ("p2pkv", "p2pkv no naps")
    ]
    both = sorted(by_round[0].keys() & by_round[1].keys())
    return paired_ratio(*([steps[number] for number in both] for steps in by_round)) if both else None


def _ahead_marks(found: Found) -> Iterator[tuple[bool, str]]:
    """Of every other connector: TTFT by length, and p99 under load."""
    for group in groups(found, "lengths"):
        for name in names(found, "lengths", group):
            if _ours(name):
                continue
            ratios = {
                n: paired(found, group, n, ("p2pkv", "first"), (name, "first")) for n in _lengths(found)
            }
            known = {tokens: ratio for tokens, ratio in ratios.items() if ratio is not None}
            if known:
                text = ", ".join(f"{tokens:,}: {ratio.mean:.2f}" for tokens, ratio in known.items())
                sentence = f"TTFT, p2pkv / {name}, by tokens: {text}{_beside(found, group)}"
                yield all(r.mean < 1.0 for r in known.values()), sentence
    for group in groups(found, "load"):
        for clients in sorted({r["clients"] for r in select(found, "load", group=group)}):
            mine = [
                v
                for r in select(found, "load", group=group, system="p2pkv", clients=clients)
                for v in r["first"]
            ]
            for name in names(found, "load", group):
                them = select(found, "load", group=group, system=name, clients=clients)
                theirs = [v for r in them for v in r["first"]]
                if _ours(name) or not (mine and theirs):
                    continue
                ratio = percentile(mine, 99) / percentile(theirs, 99)
                sentence = (
                    f"p99 of TTFT, {clients} clients: p2pkv / {name} {ratio:.2f}{_beside(found, group)}"
                )
                yield ratio < 1.0, sentence


def _beside(found: Found, group: str) -> str:
    """What to know of a group's ratios: how many rounds there were, and how its systems slow each other."""
    known = [*select(found, "lengths", group=group), *select(found, "load", group=group)]
    rounds = 1 + max(r["round"] for r in known)
    said = f" ({rounds} round{'s' * (rounds > 1)}"
    first = next(iter(groups(found, "lengths")), group)
    slower = [
        statistics.median(r["first"] for r in here) / statistics.median(r["first"] for r in there)
        for tokens in _lengths(found)
        if (here := select(found, "lengths", group=group, system="plain", tokens=tokens))
        and (there := select(found, "lengths", group=first, system="plain", tokens=tokens))
    ]
    if slower and (times := statistics.geometric_mean(slower)) > BUSY_GROUP:
        said += (
            f"; beside this group's systems the plain server takes {times:.1f} times as long as in {first}'s"
        )
    return said + ")"


def _ours(name: str) -> bool:
    return name.startswith("p2pkv") or name in ("plain", "round robin")


# The plot.


def plot(found: Found, path: Path) -> bool:
    """Draw it; False, and nothing is drawn, without matplotlib or without anything to draw."""
    try:
        import matplotlib
    except ImportError:
        return False
    columns = _lengths(found)
    if not columns:
        return False
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "side-by-side"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), width_ratios=[3, 2])
    for name in names(found, "lengths"):
        # A system that is in every group is drawn from all of them.
        points = [
            (tokens, statistics.median(r["first"] for r in mine))
            for tokens in columns
            if (mine := select(found, "lengths", system=name, tokens=tokens))
        ]
        if points:
            style = {"color": "black", "linewidth": 2.0} if name == "plain" else {}
            left.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
    left.set(
        xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds", title="time to first token"
    )
    left.set_xticks(columns, [f"{tokens:,}" for tokens in columns])
    left.minorticks_off()
    left.grid(alpha=0.3)
    left.legend(fontsize=7)
    _plot_after(found, right, max(tokens for tokens in columns if tokens <= max(2000, columns[0])))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _plot_after(found: Found, axes: Any, tokens: int) -> None:
    bars: dict[str, list[float]] = {}
    for name in names(found, "lengths"):
        values = [r["after"] for r in select(found, "lengths", system=name, tokens=tokens) if r.get("after")]
        if values:
            bars[name] = values
    middles = [statistics.median(values) for values in bars.values()]
    spread = [
        [middle - min(values) for middle, values in zip(middles, bars.values(), strict=True)],
        [max(values) - middle for middle, values in zip(middles, bars.values(), strict=True)],
    ]
    axes.barh(list(bars), middles, xerr=spread, color="tab:blue", ecolor="gray", height=0.6)
    axes.invert_yaxis()
    axes.set(xlabel="seconds, median and range", title=f"hand-over of {tokens:,} tokens")
    axes.grid(axis="x", alpha=0.3)


# Cells.


def milliseconds(seconds: Sequence[float]) -> str:
    return _span([value * 1e3 for value in seconds], "{:,.0f}")


def _span(values: Sequence[float], form: str) -> str:
    """Median (lowest to highest), or a dash."""
    if not values:
        return "-"
    middle = form.format(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({form.format(min(values))} to {form.format(max(values))})"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None:
        return f"{ratio.mean:.2f}"
    return f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _cell(text: str) -> str:
    """Fit for a table: no bars, no lines, not too long."""
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= 240 else flat[:237] + "..."
