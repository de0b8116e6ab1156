"""Draws the waterfalls of benchmarks/results/first_token.json.

    python benchmarks/first_token_picture.py RESULTS.json PICTURE.svg
    python benchmarks/first_token_picture.py RESULTS.json --add NAME STAMPS STATION

The second adds a waterfall under a name: the medians of those requests with stamps that passed a station.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from p2pkv.cli.waterfall import read, rows

COLOURS = {"proxy": "#4477aa", "P": "#cc6677", "D": "#228833", "single": "#777777"}
LINE, LEFT, WIDTH, TOP = 17, 230, 640, 34


def add(results: Path, name: str, folder: Path, station: str) -> None:
    ways = [way for way in read(folder).values() if any(passed == station for _, passed in way)]
    made = json.loads(results.read_text()) if results.exists() else {}
    table = [[row.who, row.station, round(row.after, 2)] for row in rows(ways)]
    made.setdefault("waterfalls", {})[name] = {"requests": len(ways), "stations": table}
    results.write_text(json.dumps(made, indent=1) + "\n")


def picture(waterfalls: dict[str, Any]) -> str:
    longest = max(at for each in waterfalls.values() for _, _, at in each["stations"])
    scale, y, parts = WIDTH / (5 * (longest // 5 + 1)), 0, []
    for name, each in waterfalls.items():
        y += TOP
        parts.append(
            f'<text x="8" y="{y - 12}" font-weight="bold">{name}, median of {each["requests"]}, ms</text>'
        )
        height = LINE * len(each["stations"])
        for tick in range(0, int(WIDTH / scale) + 1, 5):
            x = LEFT + tick * scale
            parts.append(f'<line x1="{x:.1f}" y1="{y - 6}" x2="{x:.1f}" y2="{y + height}" stroke="#ddd"/>')
            parts.append(f'<text x="{x:.1f}" y="{y - 10}" fill="#888" text-anchor="middle">{tick}</text>')
        before = 0.0
        for who, station, at in each["stations"]:
            x, width = LEFT + before * scale, max(1.0, (at - before) * scale)
            parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{who}: {station}</text>')
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="11" fill="{COLOURS[who]}"/>'
            )
            parts.append(f'<text x="{x + width + 4:.1f}" y="{y + 12}" fill="#555">{at:.1f}</text>')
            before, y = at, y + LINE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 60}" height="{y + 12}" '
    style = 'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
    return head + style + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    results = Path(sys.argv[1])
    if sys.argv[2] == "--add":
        add(results, sys.argv[3], Path(sys.argv[4]), sys.argv[5])
    else:
        Path(sys.argv[2]).write_text(picture(json.loads(results.read_text())["waterfalls"]))


if __name__ == "__main__":
    main()
