#!/usr/bin/env python3
"""What the budget of CONTRIBUTING.md weighs: lines of code and words of pages, each beside its limit.

It fails where something weighs more. A limit is only ever lowered. The aims: p2pkv 20,000 lines, proxy 8,000,
tests 48,000, benchmarks 4,500; README.md and docs/ 22,000 words.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
APART = {ROOT / "p2pkv" / "bench", ROOT / "p2pkv" / "demo"}


def lines(folder: str) -> int:
    """Of its Python files, without those of `APART`."""
    files = [path for path in (ROOT / folder).rglob("*.py") if not APART & set(path.parents)]
    return sum(len(path.read_text().splitlines()) for path in files)


def words() -> int:
    """Of README.md and docs/, as `wc -w` counts them."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(path.read_text().split()) for path in pages)


def weighed() -> list[tuple[str, int, int]]:
    """What is weighed, its weight, its limit."""
    return [
        ("lines of p2pkv, without bench and demo", lines("p2pkv"), 21_814),
        ("lines of proxy", lines("proxy"), 9_817),
        ("lines of tests", lines("tests"), 59_490),
        ("lines of benchmarks", lines("benchmarks"), 3_667),
        ("words of README.md and docs/", words(), 21_820),
    ]


def main() -> int:
    """The exit status: 1 if anything is over its limit."""
    status = 0
    for what, weight, limit in weighed():
        over = f"  over by {weight - limit:,}" if weight > limit else ""
        print(f"budget: {what:40} {weight:7,} of {limit:7,}{over}")
        status |= weight > limit
    return status


if __name__ == "__main__":
    sys.exit(main())
