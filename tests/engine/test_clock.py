"""The wall clock jumps by hours and years, both ways: nothing happens early, late, or twice."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path

import pytest

import p2pkv
from p2pkv.engine import commands as do
from support.engine.engines import Geometry, engines, plain_links, prefill, step
from support.engine.transfers import BLOCKS, arrives, ask, rest
from support.waiting import wait_for

ONE = Geometry()
LEASE = 2.0
HOUR, YEAR = 3600.0, 365 * 86400.0
ROOT = Path(p2pkv.__file__).parents[1]
CLOCK = r"(?:time|time_ns|localtime|gmtime|ctime|asctime|now|utcnow|today)\b"
WALL = re.compile(rf"\b(?:time|datetime|date)\.{CLOCK}|^\s*from (?:time|datetime) import .*\b{CLOCK}", re.M)
"""Reads the wall clock."""


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the wall clock sees it somewhere else."""
    right, right_ns = time.time, time.time_ns
    offsets = itertools.cycle([HOUR, -HOUR, YEAR, -YEAR, 30 * YEAR, 0.0])
    monkeypatch.setattr(time, "time", lambda: right() + next(offsets))
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + int(next(offsets) * 1e9))


@pytest.mark.usefixtures("jumps")
def test_a_transfer_arrives_and_leases_keep_their_time() -> None:
    with engines(ONE, ONE, plain_links("shared-memory"), lease_seconds=LEASE) as (p, d):
        assert abs(time.time() - time.time()) >= HOUR, "the clock does not jump"
        ask(p, d)
        step(p, "k", BLOCKS, 0, 48)
        # Longer than a lease, in which both say that they are alive: nobody's ends early.
        end = time.monotonic() + 1.25 * LEASE
        wait_for(lambda: time.monotonic() > end)
        assert not d.ranks[0].events(do.LoadFailed) and not p.ranks[0].events(do.BlocksFree)
        step(p, "k", BLOCKS, 48, 96)
        arrives(d)
        p.wait(do.BlocksFree("k"))
        # And what nobody asks for ends when its lease has passed, neither at once nor much later.
        began = time.monotonic()
        prefill(p, "nobody's", d.address, 32, BLOCKS, chunk=32)
        p.wait(do.BlocksFree("nobody's"), LEASE + 5.0)
        assert time.monotonic() - began >= LEASE * 0.9
        for key in ("k", "nobody's"):
            p.do(do.Forget(key))
        d.do(do.Forget("k"))
        rest(p, d)


def test_no_module_reads_the_wall_clock() -> None:
    """Times are monotonic, and durations on the wire. Who writes a time for people goes into this list."""
    for_people: set[str] = set()
    sources = [*sorted((ROOT / "p2pkv").rglob("*.py")), *sorted((ROOT / "proxy").rglob("*.py"))]
    assert len(sources) > 60
    found = {str(path.relative_to(ROOT)) for path in sources if WALL.search(path.read_text())}
    assert found == for_people


@pytest.mark.parametrize(
    "source",
    ["time.time()", "from time import time", "datetime.datetime.now()", "datetime.now(UTC)", "x = time.time"],
)
def test_every_look_at_the_wall_clock_is_seen(source: str) -> None:
    assert WALL.search(source)
