"""The log at a bounded rate."""

import logging

import pytest

from p2pkv.log import RateLimit, Throttle


def test_each_kind_has_windows_of_its_own() -> None:
    clock = [100.0]
    limit = RateLimit(2, seconds=10.0, clock=lambda: clock[0])
    assert [limit.admits("a") for _ in range(4)] == [True, True, False, False]
    assert limit.admits("b")
    clock[0] = 109.9
    assert not limit.admits("a")
    clock[0] = 110.0
    assert limit.count("a") == (True, 3)
    assert limit.count("a") == (True, 0)
    assert sum(map(limit.admits, range(3 << 13))) == 3 << 13
    assert len(limit._windows) <= 1 << 13, "addresses, of which there are others every day"


def test_who_has_a_clock_of_its_own_says_what_it_is() -> None:
    limit = RateLimit(seconds=60.0)
    times = (0.0, 59.0, 60.0, 100.0, 120.0)
    assert [now for now in times if limit.admits(now=now)] == [0.0, 60.0, 120.0]


def test_a_log_cannot_be_filled(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    log = logging.getLogger("p2pkv.tests.throttle")
    throttle = Throttle(clock=lambda: clock[0])
    log.addFilter(throttle)
    for clock[0] in (0.0, 9.0, 10.0, 11.0):
        for number in range(100):
            log.warning("line %d", number)
        log.warning("another %s", "line")
    log.removeFilter(throttle)
    lines = [record.getMessage() for record in caplog.records]
    first = [f"line {number}" for number in range(20)]
    again = ["line 0 (180 more lines of this kind were left out)", *first[1:]]
    assert [line for line in lines if not line.startswith("another")] == first + again
    assert lines.count("another line") == 4
