"""What NCCL allocates for a communicator, by its own log, beside what the device has less: a step of `make
gpu-first-day`. docs/decisions/nccl-memory.md has what its source says.

    python tests/gpu/communicator.py --json OUT.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # this is a script

from p2pkv.bench import fanout  # noqa: E402
from p2pkv.links.nccl_memory import GRANULE  # noqa: E402

DEVICE_MEMORY = re.compile(
    r"\((?P<by>\w+)\) (?:Cuda (?:Alloc|Calloc|CallocAsync) Size|Allocated shareable buffer \S+ size) "
    r"(?P<size>\d+)"
)
"""Lines of NCCL's log about device memory; those about memory of the host say "Host"."""

CHANNELS = re.compile(r"(\d+) coll channels, .*?(\d+) p2p channels, (\d+) p2p channels per peer")
WAY = re.compile(r"Channel \d+/\d+ : .* via (\S+)")


def allocations(text: str) -> dict[str, int]:
    """Bytes of device memory by NCCL's function, each allocation in whole granules, as cuMem gives them."""
    found: Counter[str] = Counter()
    for line in DEVICE_MEMORY.finditer(text):
        found[line["by"]] += -(-int(line["size"]) // GRANULE) * GRANULE
    return dict(found)


def read(folder: Path) -> list[dict[str, Any]]:
    """Of each process's log: what it allocated, its communicators' channels, and the ways that they took."""
    found = []
    for path in sorted(folder.iterdir()):
        text = path.read_text(encoding="utf-8", errors="replace")
        channels = [tuple(map(int, each)) for each in CHANNELS.findall(text)]
        found.append(
            {"bytes": allocations(text), "channels": channels, "ways": sorted(set(WAY.findall(text)))}
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--link", default="nccl", choices=["nccl", "host"])
    parser.add_argument("--devices", nargs=2, metavar=("P", "D"), default=["cuda:0", "cuda:0"])
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ALLOC,P2P,NET"}
        os.environ.update(wanted | {"NCCL_DEBUG_FILE": f"{folder}/%p"})
        cpu = args.link == "host"
        free = (lambda device: 0) if cpu else fanout.free_bytes
        devices = ("cpu", "cpu") if cpu else tuple(args.devices)
        costs = fanout.measure_communicators(args.link, devices, free)
        data = {**costs, "log": read(Path(folder))}
    print(json.dumps(data, indent=1), flush=True)
    args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 1 if args.link == "nccl" and not any(each["bytes"] for each in data["log"]) else 0


if __name__ == "__main__":
    sys.exit(main())
