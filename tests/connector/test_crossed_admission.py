"""P full of what D cannot admit, D full of what P cannot begin: all complete, whatever the orders."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from connector_support import inner_id, pair_id, tokens
from real_ranks_support import Engine, finish, run

pytestmark = pytest.mark.vllm

BLOCKS = 10
"""Of which vLLM keeps one for itself: room for one prompt, and not for two."""

LENGTH = 80
COUNT = 6


class Pair:
    """A P, a D, and the same requests for both."""

    def __init__(self, p: Engine, d: Engine) -> None:
        self.p, self.d = p, d

    def at_p(self, index: int, max_tokens: int = 1) -> None:
        self._ask(self.p, index, max_tokens)

    def at_d(self, index: int) -> None:
        self._ask(self.d, index, 4)

    def _ask(self, engine: Engine, index: int, max_tokens: int) -> None:
        outer = pair_id(index, prefill=self.p.address, decode=self.d.address)
        engine.ask(inner_id(outer), tokens(LENGTH, index), max_tokens=max_tokens)

    def complete(self, count: int = COUNT) -> None:
        finish(self.p, self.d)
        assert list(self.d.ended.values()) == ["length"] * count
        assert sum(self.d.computed.values()) == 4 * count, "D computed one token of each prompt"


@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("order", ["opposite", "alike", "shuffled"])
def test_both_at_once(engines: Any, order: str, tp_p: int, tp_d: int) -> None:
    pair = Pair(*engines(tp_p, tp_d, blocks=BLOCKS, budget=48))
    at_d = list(range(COUNT))
    if order == "opposite":
        at_d.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(at_d)
    for index in range(COUNT):
        pair.at_p(index)
    for index in at_d:
        pair.at_d(index)
    pair.complete()


@pytest.mark.parametrize("reverse", [False, True])
def test_p_first(engines: Any, reverse: bool) -> None:
    """P is full, and cannot begin the rest, when D hears of them."""
    pair = Pair(*engines(1, 1, blocks=BLOCKS, budget=48))
    for index in range(COUNT):
        pair.at_p(index)
    for _ in range(10):
        pair.p.step()
    for index in reversed(range(COUNT)) if reverse else range(COUNT):
        pair.at_d(index)
    pair.complete()


def test_a_lock_of_pages_on_p_and_pages_on_d_ends_when_the_load_has_stalled(engines: Any) -> None:
    """P has computed one and begun another; D has room for one of them, and was asked for the other first.

    P preempts that one, for want of the pages that it keeps for the one: those are free when D has taken
    them, for which D has no room until the other has come. vLLM's P does so only if it begins prompts that
    do not fit.
    """
    options = {"stall_seconds": 2.0, "policy": "recompute"}
    pair = Pair(*engines(1, 1, blocks=BLOCKS, budget=48, reserve=False, **options))
    p, d = pair.p, pair.d
    for index in (0, 1):
        pair.at_p(index)
    for index in (1, 0):
        pair.at_d(index)
    begun = d.scheduler.connector.consuming.asking

    def both_have_begun() -> bool:
        return [asking.begun for asking in begun.values()] == [[""], [""]]

    d.admits(False)
    run(p, d, both_have_begun)
    d.admits(True)
    finish(p, d)
    assert list(d.ended.values()) == ["length"] * 2
    assert d.count("transfers_failed") == 1


@pytest.mark.parametrize("seed", range(4))
def test_with_preemptions_on_p_in_between(engines: Any, seed: int) -> None:
    draw = random.Random(seed)
    options = {"stall_seconds": 2.0, "policy": "recompute", "reserve": draw.random() < 0.5}
    pair = Pair(*engines(1, draw.choice([1, 2]), blocks=BLOCKS, budget=48, **options))
    at_p, at_d = list(range(COUNT)), list(range(COUNT))
    draw.shuffle(at_d)
    while at_p or at_d:
        if at_p and (not at_d or draw.random() < 0.5):
            pair.at_p(at_p.pop(0), max_tokens=draw.choice([1, 12]))
        else:
            pair.at_d(at_d.pop(0))
        for _ in range(draw.randrange(4)):
            draw.choice([pair.p, pair.d]).step()
        if draw.random() < 0.4:
            # vLLM complains if somebody still holds blocks, after it has preempted all that runs.
            with contextlib.suppress(RuntimeError):
                pair.p.scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(pair.p, pair.d)
    assert list(pair.d.ended.values()) == ["length"] * COUNT
