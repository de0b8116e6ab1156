"""When a link's operations are looked at."""

from math import inf

import pytest

from p2pkv.links import gpu
from p2pkv.links.gpu import LEAST_PACED, MAX_PAUSE, PACED, PollTimer, pause_of

MIB = 1 << 20
LEAST = 20e-6


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gpu, "time", clock)
    return clock


def took(pace: PollTimer, clock: Clock, nbytes: int, seconds: float) -> None:
    pace.begin(nbytes)
    clock.now += seconds
    pace.end()


@pytest.mark.parametrize(
    ("takes", "looked_at"), [(0.0001, 0.00005), (0.0004, 0.0002), (0.0008, 0.00055), (0.004, 0.0036)]
)
def test_an_operation_is_looked_at_when_the_fastest_before_it_would_be_nearly_done(
    clock: Clock, takes: float, looked_at: float
) -> None:
    pace = PollTimer()
    assert pace.pause() == inf
    pace.begin(8 * MIB)
    assert pace.pause() <= 0, "nothing was measured yet"
    clock.now += 2 * takes
    pace.end()
    took(pace, clock, 8 * MIB, 0.08)  # it waited for the peer
    pace.begin(4 * MIB)
    assert pace.pause() == pytest.approx(looked_at)
    clock.now += 0.0003
    assert pace.pause() == pytest.approx(looked_at - 0.0003)


def test_a_wire_that_has_become_slower_is_believed_after_some_operations(clock: Clock) -> None:
    pace = PollTimer()
    took(pace, clock, 8 * MIB, 0.0002)
    for _ in range(PACED):
        took(pace, clock, 8 * MIB, 0.0006)
    pace.begin(8 * MIB)
    assert pace.pause() == pytest.approx(0.00035)


def test_small_operations_say_nothing_about_the_wire(clock: Clock) -> None:
    pace = PollTimer()
    took(pace, clock, LEAST_PACED - 1, 0.5)
    pace.begin(8 * MIB)
    assert pace.pause() <= 0


def test_the_pause_of_several_links_is_that_of_the_first_and_has_bounds() -> None:
    assert pause_of([], LEAST) == LEAST
    assert pause_of([-1.0, 0.0005], LEAST) == LEAST
    assert pause_of([0.0005, 0.0002, inf], LEAST) == 0.0002
    assert pause_of([inf], LEAST) == pause_of([1.0], LEAST) == MAX_PAUSE
