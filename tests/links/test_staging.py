"""A rank's staging: what a link may have of it, and when its memory goes back to the system."""

import mmap
from types import SimpleNamespace

import pytest

from p2pkv.links import staging
from p2pkv.links.staging import MappedPool, Slots, StagingBudget, StagingShare


def test_a_link_that_holds_something_leaves_as_much_free_as_it_would_then_hold() -> None:
    budget = StagingBudget(1024)
    slots, share = Slots(1024), StagingShare(budget)
    assert share.grants(1024), "the first may be as large as all of it"
    slots.take(256, share)
    assert share.grants(256), "512 held, 512 free"
    assert not share.grants(320), "576 held, 448 free"
    assert not share.grants(256, reserve=64), "512 held, 448 free beside what is reserved"
    other = StagingShare(budget)
    assert other.grants(768), "another link may have all that is left"
    assert not other.grants(832)
    with pytest.raises(ValueError, match="1025 bytes can never fit 1024 bytes of staging"):
        share.grants(1025)


def test_a_rank_that_carries_both_ways_keeps_a_quarter_for_each() -> None:
    """However many links there are: each that holds nothing may have all that is left."""
    budget = StagingBudget(1024)
    budget.carry_both_ways()
    with pytest.raises(ValueError, match="can never fit 768 bytes"):
        StagingShare(budget).grants(769)
    slots = Slots(1024)
    receives = [StagingShare(budget) for _ in range(4)]
    granted = [share for share in receives if share.grants(256) and slots.take(256, share) is not None]
    assert len(granted) == 3
    send = StagingShare(budget, sends=True)
    assert send.grants(256)
    slots.give_all()
    for share in (StagingShare(budget, sends=True) for _ in range(3)):
        slots.take(256, share)
    assert not StagingShare(budget, sends=True).grants(64)
    assert receives[0].grants(256)


@pytest.mark.parametrize("sends", [False, True])
def test_that_quarter_lies_together_whatever_the_other_direction_holds(sends: bool) -> None:
    budget, slots = StagingBudget(1024), Slots(1024)
    budget.carry_both_ways()
    one, other = StagingShare(budget, sends=sends), StagingShare(budget, sends=not sends)
    taken = [slots.take(128, one) for _ in range(6)]
    for offset in (taken[0], taken[2]):
        assert offset is not None
        slots.give(offset)
    slots.take(256, one)
    assert other.grants(256) and slots.take(256, other) is not None


def test_pages_are_given_back_a_minute_after_the_last_use_and_not_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: clock.now))
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = MappedPool(memory, 0, mmap.PAGESIZE, mmap.MADV_DONTNEED)
    share = StagingShare(StagingBudget(mmap.PAGESIZE))

    def use() -> None:
        offset = pool.take(64, share)
        pool.tensor(offset, 64).fill_(7)
        pool.give(offset)

    for clock.now in (0.0, 0.75 * staging.IDLE_SECONDS):
        use()
        pool.tidy()
    clock.now = 1.25 * staging.IDLE_SECONDS
    pool.tidy()
    assert bytes(pool.view(0, 64)) == b"\7" * 64, "it was idle for half a minute"
    clock.now = 1.75 * staging.IDLE_SECONDS
    pool.tidy()
    assert bytes(pool.view(0, 64)) == bytes(64)
