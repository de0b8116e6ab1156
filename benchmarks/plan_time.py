"""Milliseconds of `make_plan` for engines of 128 ranks each, and of the plan's digest.

A rank makes a plan once for each pair of shapes, when the first peer says Hello. The time grows with the
edges, of which there is at most one for each pair of ranks: all to all is the worst.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from p2pkv.plan import make_plan
from p2pkv.sharding import Shape

PAIRS = (
    (Shape((80,), 128, 128), Shape((80,), 128, 128)),
    (Shape((10,) * 8, 8, 16), Shape((5,) * 16, 8, 8)),
    (Shape((61,), 1, 128), Shape((61,), 1, 128)),  # replicas, one for each rank
    (Shape((128,), 1, 128), Shape((128,), 1, 127)),  # replicas that cut all needs between them
    (Shape((128,), 128, 128), Shape((1,) * 128, 128, 1)),  # all to all
    (Shape((1,) * 128, 1, 1), Shape((128,), 1, 128)),
    (Shape((1,) * 128, 8, 1), Shape((128,), 8, 128)),
    (Shape((1,) * 128, 128, 1), Shape((128,), 128, 128)),
)


def measure(prefill: Shape, decode: Shape, repeat: int) -> dict[str, object]:
    """One row; each plan is made of new shapes, since a shape remembers what it has worked out."""
    plans, digests, edges = [], [], 0
    for _ in range(repeat):
        fresh = [(Shape(each.layers, each.heads, each.tp),) for each in (prefill, decode)]
        start = time.perf_counter()
        plan = make_plan.__wrapped__(*fresh)
        made = time.perf_counter()
        assert plan.digest
        digests.append(1e3 * (time.perf_counter() - made))
        plans.append(1e3 * (made - start))
        edges = len(plan.edges)
    return {"prefill": str(prefill), "decode": str(decode), "edges": edges, "plan": plans, "digest": digests}


def spread(values: Sequence[float]) -> str:
    """Median [lowest - highest]."""
    return f"{statistics.median(values):.1f} [{min(values):.1f} - {max(values):.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15, help="plans of each pair (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    args = parser.parse_args()
    rows = [measure(*pair, args.repeat) for pair in PAIRS]
    if args.json:
        print(json.dumps(rows))
        return
    print("milliseconds: median [lowest - highest]")
    print(f"{'P':<46} {'D':<46} {'edges':>6} {'plan':>22} {'digest':>18}")
    for row in rows:
        print(
            f"{row['prefill']:<46} {row['decode']:<46} {row['edges']:>6} "
            f"{spread(row['plan']):>22} {spread(row['digest']):>18}"
        )


if __name__ == "__main__":
    main()
