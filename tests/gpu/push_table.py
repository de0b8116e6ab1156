"""Pushes of one long prompt by size of message, beside a plain copy, a gather and NCCL alone: a step of
`make gpu-first-day`, which shows the rates on its page.

    python tests/gpu/push_table.py --link nccl --json OUT.json

P and D are two processes; NCCL alone is measured between the same two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # this is a script

from p2pkv.bench.nccl import messages  # noqa: E402
from p2pkv.links.mps_check import mps_runs, pipe_directory  # noqa: E402

SIZES_KIB = (64, 1024, 4096, 8192, 16384, 65536)
TOTAL_MIB = 512
REPEAT = 3
SHORT_KIB = (1024, 16384)
SHORT_REPEAT = 25
SMALL = 1 << 20
"""A message below it is measured once: a prompt is thousands of them."""


def push_rows(
    link: str, devices: tuple[str, str], sizes: Sequence[int], total: int, repeat: int, **nccl: int
) -> list[dict[str, Any]]:
    """By size of message: bytes per second of a plain copy, gather, scatter, NCCL alone and whole pushes."""
    with messages(link, devices, sizes, total, **nccl) as both:
        found = both.on_device(sizes)
        rows = []
        for size in sizes:
            turns = range(1 + (1 if size < SMALL else repeat))  # the first one only warms up
            row = {"bytes": size, **found[size], "raw": [], "push": [both.push(size) for _ in turns][1:]}
            if link == "nccl":
                row["raw"] = [both.raw(size) for _ in turns][1:]  # needs a GPU
            rows.append(row)
        return rows


def short_prompts(
    link: str, devices: tuple[str, str], sizes: Sequence[int], repeat: int, **nccl: int
) -> dict[int, list[float]]:
    """By bytes of a prompt that is one message: seconds from D's question until it is loaded."""
    found = {}
    for size in sizes:
        with messages(link, devices, [size], size, **nccl) as both:
            both.push(size)
            found[size] = [size / both.push(size) for _ in range(repeat)]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", required=True, choices=["nccl", "ipc", "host"])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--devices", nargs=2, metavar=("P", "D"), default=["cuda:0", "cuda:0"])
    parser.add_argument("--sizes-kib", type=int, nargs="+", default=SIZES_KIB)
    parser.add_argument("--short-kib", type=int, nargs="+", default=SHORT_KIB)
    parser.add_argument("--total-mib", type=int, default=TOTAL_MIB)
    parser.add_argument("--in-flight", type=int, default=1, help="the option nccl_in_flight")
    parser.add_argument("--group-mib", type=int, default=128, help="the option nccl_group_bytes")
    args = parser.parse_args(argv)
    sizes, total = [each << 10 for each in args.sizes_kib], args.total_mib << 20
    nccl = {"nccl_in_flight": args.in_flight, "nccl_group_bytes": args.group_mib << 20}
    rows = push_rows(args.link, tuple(args.devices), sizes, total, REPEAT, **nccl)
    for row in rows:
        print(row, flush=True)
    data = {"link": args.link, "devices": args.devices, "total": total, "rows": rows}
    short = [each << 10 for each in args.short_kib]
    data["short"] = short_prompts(args.link, tuple(args.devices), short, SHORT_REPEAT, **nccl)
    data |= nccl
    data["mps"] = mps_runs(pipe_directory())
    args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
