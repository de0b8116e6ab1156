"""Both roles at once, several ranks each, under every fault that a seed can think of."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from protocol.conversation import Conversation, outcomes
from protocol.walks import walk
from protocol.wires import Violation
from protocol.world import BEAT, World

from p2pkv.protocol import sender
from p2pkv.sharding import Shape


@pytest.fixture(autouse=True)
def few_announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So few that small prompts reach the bound."""
    monkeypatch.setattr(sender, "MAX_ANNOUNCED", 3)
    yield


def test_a_chunk_that_changes_on_the_way_fails_its_load_and_the_next_one_is_right() -> None:
    world = _spoilt(verify=True)
    world.settle()
    assert world.corrupt == 1
    world.give_up_failed()
    world.drain()
    assert world.has_failed(world.d[0], "spoilt")
    world.add("next", (10,))
    world.arrive_at_p("next")
    world.arrive_at_d("next")
    world.drain()
    assert world.corrupt == 1 and not world.has_failed(world.d[0], "next")
    world.requests["spoilt"].disturbed = True
    outcomes(world)


def test_without_checksums_that_chunk_is_written() -> None:
    world = _spoilt(verify=False)
    with pytest.raises(Violation, match=r"writes .*garbage"):
        world.settle()


def _spoilt(verify: bool) -> World:
    """D has just said what it wants, and something of the first chunk will change on its way."""
    shape = Shape((2,), 1, 1)
    world = World(shape, shape, unit=1, chunk_bytes=64, window=64, verify=verify)
    world.add("spoilt", (10,))
    world.arrive_at_p("spoilt")
    world.arrive_at_d("spoilt")
    world.settle()
    world.p[0].step("spoilt", 2)
    world.advance(BEAT)
    world.settle()
    (link,) = world.links.values()
    link.spoil = 2
    world.admit("spoilt", 0, 9)
    return world


@pytest.mark.parametrize("seed", range(int(os.environ.get("P2PKV_WALKS", "120"))))
def test_a_long_walk(seed: int) -> None:
    walk(seed)


Conversation.TestCase.settings = settings(
    deadline=None,
    max_examples=int(os.environ.get("P2PKV_EXAMPLES", "60")),
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
TestConversation = Conversation.TestCase
