"""A P and a D on two networks with a cable between them, which loses packets, or is slow.

Real ranks with a secret, over TCP, in processes of their own. Each side has its clock only: while the cable
is cut nobody tells it anything.
"""

from collections.abc import Callable, Iterator

import pytest
from chaos.live_run import LiveRun
from chaos.model import ONE_GROUP
from chaos.namespaces import Cable, Dweller, laid
from chaos.schedule import LEASE

pytestmark = pytest.mark.slow

BACK_SECONDS = 20.0
"""In which a transfer works again: a peer that did not answer is left alone for some seconds, and the kernel
sends again what was lost after pauses as long as the partition was."""

TOKENS = 600
NBYTES = ONE_GROUP.nbytes(0, TOKENS)


cable = pytest.fixture(scope="module")(laid)


@pytest.fixture(scope="module")
def engines(cable: Cable) -> Iterator[LiveRun]:
    with LiveRun(1, [Dweller("P0", cable), Dweller("D0", cable)]) as live:
        yield live
        live.stop_all()
        assert live.violations == []


@pytest.fixture
def live(engines: LiveRun) -> Iterator[LiveRun]:
    """Both engines have worked; after the test they work again, and hold nothing."""
    engines.recover("P0", "D0", BACK_SECONDS)
    yield engines
    engines.work_again("P0", "D0", BACK_SECONDS)


@pytest.mark.parametrize(
    ("sides", "seconds"), [("PD", 0.4 * LEASE), *((sides, 2.5 * LEASE) for sides in ("P", "D", "PD"))]
)
def test_packets_are_lost_under_load_and_then_arrive_again(
    cable: Cable, live: LiveRun, sides: str, seconds: float
) -> None:
    live.load(1.0)
    for side in sides:
        cable.lose(side)
    live.nothing_comes_through(seconds)
    for side in sides:
        cable.find(side)
    assert live.violations == []


@pytest.mark.parametrize("side", ["P", "D"])
def test_one_side_has_no_way_to_the_other(cable: Cable, live: LiveRun, side: str) -> None:
    live.load(1.0)
    cable.blackhole(side)
    live.nothing_comes_through(2 * LEASE)
    cable.open(side)
    assert live.violations == []


@pytest.fixture
def narrow(cable: Cable) -> Iterator[Callable[[str], None]]:
    yield cable.narrow
    cable.widen()


def test_a_cut_in_the_middle_of_a_transfer_ends_it_on_both_sides_while_it_lasts(
    cable: Cable, live: LiveRun, narrow: Callable[[str], None]
) -> None:
    narrow("1mbit")
    loaded, failed, sent = *map(live.jobs.outcomes.__getitem__, ("loaded", "failed")), cable.sent("P")
    live.jobs.ask(*live.machines.values(), plain=True, longest=TOKENS, shortest=TOKENS, fresh=True)
    live.turn_until(lambda: cable.sent("P") > sent + NBYTES // 3, 3 * LEASE, "a third of the bytes")
    for side in "PD":
        cable.lose(side)
    live.turn_until(lambda: not live.jobs.open, 2 * LEASE, "the end of the request on both sides")
    assert (live.jobs.outcomes["loaded"], live.jobs.outcomes["failed"]) == (loaded, failed + 1)
    for side in "PD":
        cable.find(side)


def test_a_transfer_may_take_longer_than_the_lease_as_long_as_it_moves(
    live: LiveRun, narrow: Callable[[str], None]
) -> None:
    """Chunks that wait behind others on a slow line are not late."""
    narrow("1mbit")
    before = live.jobs.outcomes["loaded"]
    live.jobs.ask(*live.machines.values(), must=True, longest=TOKENS, shortest=TOKENS, fresh=True)
    live.turn_until(lambda: not live.jobs.open, 15 * LEASE, "the end of a slow transfer")
    assert live.jobs.outcomes["loaded"] == before + 1
