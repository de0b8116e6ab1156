"""The chaos run: `make chaos SECONDS=300 SEED=1`, or `PYTHONPATH=.:tests python -m chaos --help`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter

from chaos.jobs import GRACE
from chaos.schedule import DECODES, KINDS, LEASE, PREFILLS, Fault, schedule
from chaos.world import World

from p2pkv.protocol.handshake import REFUSED_FOR


def afterwards(world: World) -> None:
    """The faults are over: everything ends, everybody is at the baseline, and every pair transfers."""
    world.turn_until(lambda: not world.jobs.open, 2 * (LEASE + GRACE) + 1, "the end of every request")
    quiet = world.now + REFUSED_FOR + 1  # a P that failed a handshake is left alone for so long
    world.turn_until(lambda: world.now >= quiet, REFUSED_FOR + 5, "silence")
    if not world.turn_until(world.baseline, 10.0, "the baseline after the faults"):
        world.broken(f"still held: {world.held()}")
    for p, d in itertools.product(PREFILLS, DECODES):
        world.ask(p, d)
    world.turn_until(lambda: not world.jobs.open, LEASE + GRACE, "a transfer of every pair")
    if not world.turn_until(world.baseline, 10.0, "the baseline at the end"):
        world.broken(f"still held: {world.held()}")
    world.stop_all()


def report(seed: int, planned: list[Fault], world: World) -> None:
    """What has happened, for a person."""
    due = Counter(fault.kind for fault in planned)
    print(f"seed {seed}: {world.faults.total()} faults in {world.now:.0f} s")
    for kind in KINDS:
        print(f"  {world.faults[kind]:5} of {due[kind]:4} planned  {kind}")
    world.jobs.report()
    print(f"{len(world.violations)} violations")
    for each in world.violations:
        print(f"  {each}")
    print("FAIL" if world.violations else "PASS")


def main() -> int:
    """Exit code: 0 if no invariant was broken."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long faults happen (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (default 1)")
    parser.add_argument("--plan", action="store_true", help="print the schedule and end")
    args = parser.parse_args()
    planned = schedule(args.seed, args.seconds)
    if args.plan:
        print(*planned, sep="\n")
        return 0
    with World(args.seed) as world:
        world.run(planned, args.seconds)
        afterwards(world)
    report(args.seed, planned, world)
    return 1 if world.violations else 0


if __name__ == "__main__":
    sys.exit(main())
