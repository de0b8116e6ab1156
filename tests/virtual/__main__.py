"""A run in one thread on a virtual clock: `make chaos TIER=2 SECONDS=600 SEED=1`; seconds are virtual."""

from __future__ import annotations

import argparse
import logging
import sys
import time

import torch
from virtual.world import Broken, World


def main() -> int:
    """Exit code: 0 if no invariant was broken."""
    parser = argparse.ArgumentParser(prog="virtual", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual ones (default 600)")
    parser.add_argument("--seed", type=int, default=1, help="of everything (default 1)")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    args = parser.parse_args()
    logging.getLogger("p2pkv").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    began = time.monotonic()
    world = World(args.seed, say=args.trace)
    broken = ""
    try:
        world.run(args.seconds)
    except Broken as error:
        broken = str(error)
    real = time.monotonic() - began
    print(f"seed {args.seed}: {world.faults.total()} faults in {world.now:.0f} virtual s, {real:.0f} real s")
    for kind, count in sorted(world.faults.items()):
        print(f"  {count:5} {kind}")
    world.jobs.report()
    print(f"trace {world.trace} of {world.lines} lines")
    print(f"VIOLATION {broken}\nFAIL" if broken else "PASS")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
