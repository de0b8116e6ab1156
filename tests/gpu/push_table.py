"""Pushes of one long prompt by size of message, beside a plain copy, a gather and NCCL alone: a step of
`make gpu-first-day`, which shows the rates on its page.

    python tests/gpu/push_table.py --link nccl --json OUT.json

P and D are two processes. NCCL alone is measured between two ranks of this process on P's card.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # this is a script

from p2pkv.bench.harness import RawNccl, environment, new_name, one_torch_thread  # noqa: E402
from p2pkv.bench.nccl import messages  # noqa: E402
from p2pkv.links.shared_gpu import mps_runs, pipe_directory  # noqa: E402

SIZES_KIB = (64, 1024, 4096, 8192, 16384, 65536)
TOTAL_MIB = 512
REPEAT = 3
SHORT_KIB = (1024, 16384)
SHORT_REPEAT = 25
SMALL = 1 << 20
"""A message below it is measured once: a prompt is thousands of them."""


def raw_rates(sizes: Sequence[int], total: int, repeat: int) -> dict[int, list[float]]:
    """Bytes per second of NCCL's own sends and receives, by size of message."""
    flat = [torch.zeros(total, dtype=torch.uint8, device="cuda") for _ in range(2)]  # needs a GPU
    os.environ.update(environment(shared=True))  # needs a GPU
    name = bytes.fromhex(new_name())  # needs a GPU
    ends: list[Any] = in_threads(*(lambda rank=rank: RawNccl(name, rank) for rank in range(2)))  # needs a GPU
    rates: dict[int, list[float]] = {size: [] for size in sizes}  # needs a GPU
    for size in sizes:  # needs a GPU
        cut = [size] * (total // size)
        for turn in range(1 + turns_of(size, repeat)):
            begin = time.perf_counter()
            in_threads(
                lambda cut=cut: ends[0].send(flat[0], cut), lambda cut=cut: ends[1].receive(flat[1], cut)
            )
            if turn:  # the first one only warms up
                rates[size].append(total / (time.perf_counter() - begin))
    for end in ends:  # needs a GPU
        end.close()
    return rates  # needs a GPU


def in_threads(*calls: Any, seconds: float = 60.0) -> list[Any]:
    """What these calls return, made at the same time: each waits for the other inside NCCL. Raises what the
    first of them raised."""
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def main(number: int) -> None:
        try:
            found[number] = calls[number]()
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=main, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    if len(found) < len(calls):
        raise TimeoutError(f"a call did not return in {seconds:g} s")
    return [found[number] for number in range(len(calls))]


def turns_of(size: int, repeat: int) -> int:
    """How often messages of this size are measured."""
    return 1 if size < SMALL else repeat


def push_rows(
    link: str, devices: tuple[str, str], sizes: Sequence[int], total: int, repeat: int, in_flight: int = 1
) -> list[dict[str, Any]]:
    """By size of message: bytes per second of a plain copy, gather, scatter, and of whole pushes."""
    with one_torch_thread(), messages(link, devices, sizes, total, in_flight=in_flight) as both:
        found = both.on_device(sizes)
        rows = []
        for size in sizes:
            pushed = [both.push(size) for _ in range(1 + turns_of(size, repeat))]
            rows.append({"bytes": size, **found[size], "push": pushed[1:]})
        return rows


def short_prompts(
    link: str, devices: tuple[str, str], sizes: Sequence[int], repeat: int, in_flight: int = 1
) -> dict[int, list[float]]:
    """By bytes of a prompt that is one message: seconds from D's question until it is loaded."""
    found = {}
    for size in sizes:
        with messages(link, devices, [size], size, in_flight=in_flight) as both:
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
    args = parser.parse_args(argv)
    sizes, total = [each << 10 for each in args.sizes_kib], args.total_mib << 20
    raw: dict[int, list[float]] = {}
    if args.link == "nccl":
        raw = raw_rates(sizes, total, REPEAT)  # needs a GPU
    rows = push_rows(args.link, tuple(args.devices), sizes, total, REPEAT, args.in_flight)
    for row in rows:
        row["raw"] = raw.get(row["bytes"], [])
        print(row, flush=True)
    data = {"link": args.link, "devices": args.devices, "total": total, "rows": rows}
    short = [each << 10 for each in args.short_kib]
    data["short"] = short_prompts(args.link, tuple(args.devices), short, SHORT_REPEAT, args.in_flight)
    data["in_flight"] = args.in_flight
    data["mps"] = mps_runs(pipe_directory())
    args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
