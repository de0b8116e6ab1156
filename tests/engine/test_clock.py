"""The wall clock jumps by hours and years, both ways: nothing happens early, late, or twice. Nobody looks."""

import re
from pathlib import Path

import p2pkv

ROOT = Path(p2pkv.__file__).parents[1]
CLOCK = r"(?:time|time_ns|localtime|gmtime|ctime|asctime|now|utcnow|today)\b"
WALL = re.compile(rf"\b(?:time|datetime|date)\.{CLOCK}|^\s*from (?:time|datetime) import .*\b{CLOCK}", re.M)
"""Reads the wall clock."""

LOOKS = "time.time", "from time import time", "datetime.datetime.now()", "datetime.now(UTC)"


def test_no_module_reads_the_wall_clock() -> None:
    """Times are monotonic, and durations on the wire. Who writes a time for people goes into this list."""
    assert all(map(WALL.search, LOOKS))
    for_people: set[str] = set()
    sources = [*sorted((ROOT / "p2pkv").rglob("*.py")), *sorted((ROOT / "proxy").rglob("*.py"))]
    assert len(sources) > 60
    found = {str(path.relative_to(ROOT)) for path in sources if WALL.search(path.read_text())}
    assert found == for_people
