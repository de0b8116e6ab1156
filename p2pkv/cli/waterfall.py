"""`p2pkv waterfall`: where requests were at which moment, from the stamps of `p2pkv.stamps`, as a table."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from p2pkv.stamps import FIELDS, VARIABLE, unique_of

Way = dict[tuple[str, str], float]
"""Of one request: seconds of each station, by who and name."""


@dataclass(frozen=True)
class Row:
    """One station: medians over the requests that came by, in milliseconds. `after`: since the first station;
    `step`: since the row before; `of`: how many requests."""

    who: str
    station: str
    after: float
    step: float
    of: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        f"Start proxy, P and D with {VARIABLE}=proxy:FOLDER, P:FOLDER and D:FOLDER, on one host; send "
        "requests, one after the other; then read the folder."
    )
    parser.add_argument("folder", type=Path, help="the folder that P2PKV_STAMPS names")
    parser.add_argument("--request", default="", help="32 hex digits: this request alone, not medians of all")


def run(args: argparse.Namespace) -> int:
    ways = read(args.folder)
    whose = "requests that passed a proxy or a server"
    if args.request and ways:
        whose = f"request {args.request!r}: expected its 32 hex digits, or its whole id"
        ways = {unique: way for unique, way in ways.items() if unique == unique_of(args.request)}
    if not ways:
        print(f"{args.folder} has no stamps of {whose}", file=sys.stderr)
        return 1
    for line in lines(rows(ways.values())):
        print(line)
    return 0


def read(folder: Path) -> dict[str, Way]:
    """The ways of all requests, by their 32 hex digits. Lines that are cut off are left out."""
    ways: defaultdict[str, Way] = defaultdict(dict)
    for file in sorted(folder.glob("*.stamps")):
        for line in file.read_text().splitlines():
            parts = line.split("\t")
            if len(parts) == FIELDS:
                at, who, station, unique = parts
                ways[unique][who, station] = float(at)
    return dict(ways)


def rows(ways: Iterable[Way]) -> list[Row]:
    """The stations in the order of their medians; none that fewer than half of the requests passed."""
    several = list(ways)
    after: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for way in several:
        began = min(way.values())
        for where, at in way.items():
            after[where].append((at - began) * 1e3)
    usual = {where: each for where, each in after.items() if 2 * len(each) >= len(several)}
    made, before = [], 0.0
    for (who, station), each in sorted(usual.items(), key=lambda item: median(item[1])):
        middle = median(each)
        made.append(Row(who, station, middle, middle - before, len(each)))
        before = middle
    return made


def lines(table: Iterable[Row]) -> list[str]:
    return ["   ms    step  who     station"] + [
        f"{row.after:7.2f} {row.step:6.2f}  {row.who:7} {row.station}" for row in table
    ]
