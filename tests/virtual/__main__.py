"""A run in one thread on a virtual clock: `make chaos TIER=2 SECONDS=600 SEED=1`; seconds are virtual.

It has parts of about half a minute, each with engines of its own: a model and ranks are drawn for each.
"""

import argparse
import hashlib
import logging
import sys
import time

import torch
from virtual.world import Broken, World

PART_SECONDS = 30.0
"""Virtual ones, of the shortest part of a run that is not shorter itself."""


def main() -> int:
    """Exit code: 0 if no invariant was broken."""
    parser = argparse.ArgumentParser(prog="virtual", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="virtual ones (default 600)")
    parser.add_argument("--seed", type=int, default=1, help="of everything (default 1)")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    args = parser.parse_args()
    logging.getLogger("p2pkv").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    began, broken, lines, whole = time.monotonic(), "", 0, hashlib.blake2b(digest_size=16)
    parts = max(1, int(args.seconds // PART_SECONDS))
    for part in range(parts):
        world = World(f"{args.seed}/{part}", say=args.trace)
        try:
            world.run(args.seconds / parts)
        except Broken as error:
            broken = str(error)
        world.report(f"{args.seed}/{part}")
        whole.update(world.trace.encode())
        lines += world.lines
        if broken:
            break
    print(f"{time.monotonic() - began:.0f} real s")
    print(f"trace {whole.hexdigest()} of {lines} lines")
    print(f"VIOLATION {broken}\nFAIL" if broken else "PASS")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
