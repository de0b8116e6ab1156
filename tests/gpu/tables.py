"""Tables of the page of `make gpu-first-day` that have a shape of their own: pushes, first tokens, pauses."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.page import Block, Heading, Table, Text

SINGLE = "single"


def push_blocks(measured: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Of what `push_table.py` wrote, once for each link: GB/s, a column for each size of message."""
    rows: list[list[str]] = []
    head = [""]
    short = []
    for each in measured:
        times = (f"{_size(int(size))} {_ms(statistics.median(took))}" for size, took in each["short"].items())
        short.append(f"{each['link']}: {', '.join(times)}")
        head = ["", *(_size(row["bytes"]) for row in each["rows"])]
        rates = {
            kind: [_rate(row[kind]) for row in each["rows"]] for kind in ("copy", "gather", "raw", "push")
        }
        if not rows:
            rows += [["a plain copy", *map(_shown, rates["copy"])], ["gather", *map(_shown, rates["gather"])]]
        name = f"push, {each['link']}"
        if any(rates["raw"]):
            rows.append([RAW, *map(_shown, rates["raw"])])
        rows.append([name, *map(_shown, rates["push"])])
        if any(rates["raw"]):
            rows.append([f"{name}, over {RAW}", *map(_ratio, rates["push"], rates["raw"])])
    if not rows:
        return []
    total = measured[0]["total"] >> 20
    about = f"GB/s of a prompt of {total} MiB, medians. Raw NCCL: between the processes of P and D."
    of_one = f"A prompt of one message, ms from D's question until it is loaded, medians: {'; '.join(short)}."
    return [Heading("Pushes"), Text(about), Table(head, rows), Text(of_one)]


RAW = "raw NCCL"


def token_blocks(measured: Mapping[str, Any] | None) -> list[Block]:
    """Of what `first_tokens.py` wrote: ms by length of the prompt, and the pauses between tokens."""
    if measured is None:
        return []
    step = measured["itl"][f"{SINGLE} quiet"][0]
    pairs = [name.removesuffix(" quiet") for name in measured["itl"] if name.endswith(" quiet")][1:]
    rows = []
    for length, times in measured["ttft"].items():
        median = {name: statistics.median(each) for name, each in times.items()}
        late = [median[pair] - median[SINGLE] - step for pair in pairs]
        seconds = [median[f"{name}_2nd"] for name in (SINGLE, *pairs)]
        cells = [*(median[name] for name in (SINGLE, *pairs)), *late]
        rows.append([length, *map(_ms, cells), ", ".join(map(_ms, seconds))])
    head = ["tokens", "one server", *(f"pair, {name}" for name in pairs)]
    head += [*(f"{name}: over one server and a step" for name in pairs), "from first to second token"]
    wrong, total = measured["wrong"]
    about = (
        f"ms, medians. A step takes {_ms(step)}. Answers that equal the single server's: {total - wrong} of "
        f"{total}. Transfers loaded and failed: {measured['transfers']}."
    )
    gaps = [[name, *map(_ms, each)] for name, each in measured["itl"].items()]
    return [
        *(Heading("First tokens"), Text(about), Table(head, rows)),
        *(Heading("Pauses between tokens"), Text("ms, of one answer. Loaded: while long prompts come in.")),
        Table(["", "median", "95%", "longest"], gaps),
    ]


def mps_phrase(mps: bool | None, said: str = "") -> str:
    """For the head of the page. `mps`: as shared_card.mps_runs has it; `said`: what starting it said."""
    names = {
        True: "under CUDA MPS",
        False: "without CUDA MPS",
        None: "perhaps under CUDA MPS (its daemon is not seen)",
    }
    return names[mps] + (f" ({said})" if said else "")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _rate(value: float | Sequence[float]) -> float:
    """GB/s; 0 if nothing was measured."""
    if isinstance(value, int | float):
        return value / 1e9
    return statistics.median(value) / 1e9 if value else 0.0


def _shown(rate: float) -> str:
    return f"{rate:.3g}" if rate else "-"


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "-"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
