"""The chaos run: `make chaos SECONDS=300 SEED=1`, or `PYTHONPATH=.:tests python -m chaos --help`.

It has parts of a minute or more, each with engines of its own and a model, mostly a hybrid one.
"""

import argparse
import random
import sys
from dataclasses import dataclass

from chaos.jobs import GRACE
from chaos.live_run import LiveRun, draw_machines
from chaos.model import ONE_GROUP, Model, draw_hybrid
from chaos.schedule import LEASE, Fault, schedule

from p2pkv.protocol.handshake import REFUSED_FOR

PART_SECONDS = 60.0
"""Of the shortest part of a run that is not shorter itself."""

PLAIN = 3
"""Every so many parts one has a model of one KV group."""


@dataclass(frozen=True)
class Part:
    """A part of a run, with a schedule and a load of its own. `seed`: of both."""

    seed: str
    seconds: float
    model: Model

    @property
    def faults(self) -> list[Fault]:
        return schedule(self.seed, self.seconds)


def parts(seed: int, seconds: float) -> list[Part]:
    """The parts of a run of so many seconds: a pure function of the seed."""
    many, out = max(1, int(seconds // PART_SECONDS)), []
    for number in range(many):
        name = f"{seed}/{number}"
        plain = (seed + number) % PLAIN == PLAIN - 1
        model = ONE_GROUP if plain else draw_hybrid(random.Random(f"model {name}"))
        out.append(Part(name, seconds / many, model))
    return out


def afterwards(live: LiveRun) -> None:
    """The faults are over: everything ends, everybody is at the baseline, and every pair transfers."""
    live.turn_until(lambda: not live.jobs.open, 2 * (LEASE + GRACE) + 1, "the end of every request")
    quiet = live.now + REFUSED_FOR + 1  # a P that failed a handshake is left alone for so long
    live.turn_until(lambda: live.now >= quiet, REFUSED_FOR + 5, "silence")
    live.rest()
    live.ask_all()
    live.rest()
    live.stop_all()


def main() -> int:
    """Exit code: 0 if no invariant was broken."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="how long faults happen (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (default 1)")
    parser.add_argument("--plan", action="store_true", help="print the schedule and end")
    args = parser.parse_args()
    planned, violations = parts(args.seed, args.seconds), 0
    for part in planned:
        if args.plan:
            print(f"part {part.seed}: {part.model}", *part.faults, sep="\n")
            continue
        with LiveRun(part.seed, draw_machines(part.seed, part.model)) as live:
            live.run(part.faults, part.seconds)
            afterwards(live)
        live.report(part.seed)
        print(f"{len(live.violations)} violations", *live.violations, sep="\n  ")
        violations += len(live.violations)
    if not args.plan:
        print("FAIL" if violations else "PASS")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
