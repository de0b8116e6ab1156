"""Walks of the protocol alone: `make chaos TIER=1 SECONDS=100000 SEED=1`; seconds are virtual."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
import time

from protocol.walks import walk
from protocol.world import START

from p2pkv.protocol import sender

ANNOUNCED = 3
"""So few chunks that small prompts reach the bound."""


def main() -> int:
    """Exit code: 0 if no invariant was broken."""
    parser = argparse.ArgumentParser(prog="protocol", description=__doc__)
    parser.add_argument("--seconds", type=float, default=100_000.0, help="virtual ones (default 100000)")
    parser.add_argument("--seed", type=int, default=1, help="of everything (default 1)")
    args = parser.parse_args()
    sender.MAX_ANNOUNCED = ANNOUNCED
    began, passed, ends, whole = time.monotonic(), 0.0, 0, hashlib.blake2b(digest_size=16)
    for number in itertools.count():
        if passed >= args.seconds:
            break
        name = f"{args.seed}/{number}"
        try:
            world = walk(name)
        except Exception as error:
            print(f"VIOLATION in walk {name}: {error}\nFAIL")
            return 1
        passed += world.now - START
        ends += len(world.ends)
        whole.update(world.trace.encode())
    real = time.monotonic() - began
    print(f"seed {args.seed}: {number} walks, {ends} outcomes, {passed:.0f} virtual s, {real:.0f} real s")
    print(f"trace {whole.hexdigest()}")
    print("PASS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
