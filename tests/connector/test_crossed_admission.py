"""P full of what D cannot admit, D full of what P cannot begin: all complete, whatever the orders."""

import random
from typing import Any

import pytest

from support.connector.instances import tokens
from support.connector.real_ranks import Engine, ask, finish, preempt_all, run

LENGTH = 80
COUNT = 6
TIGHT = {"blocks": 10, "budget": 48}
"""Blocks of which vLLM keeps one for itself: room for one prompt, and not for two."""
STALLING = {"stall_seconds": 2.0, "policy": "recompute"}


def at_p(p: Engine, d: Engine, index: int, most: int = 1) -> None:
    ask(p, p, d, index, tokens(LENGTH, index), most)


def at_d(p: Engine, d: Engine, index: int) -> None:
    ask(d, p, d, index, tokens(LENGTH, index), 4)


@pytest.mark.parametrize(("tp_p", "tp_d", "lead"), [(1, 1, 0), (2, 1, 0), (2, 2, 0), (1, 1, 10)])
@pytest.mark.parametrize("order", ["opposite", "alike", "shuffled"])
def test_many_prompts(engines: Any, order: str, tp_p: int, tp_d: int, lead: int) -> None:
    """`lead`: steps after which P is full, and cannot begin the rest, when D hears of them."""
    p, d = engines(tp_p, tp_d, **TIGHT)
    numbers = list(range(COUNT))
    for index in numbers:
        at_p(p, d, index)
    p.step(lead)
    if order == "opposite":
        numbers.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(numbers)
    for index in numbers:
        at_d(p, d, index)
    finish(p, d)
    assert list(d.ended.values()) == ["length"] * COUNT
    assert sum(d.computed.values()) == 4 * COUNT, "D computed one token of each prompt"


def test_a_lock_of_pages_on_p_and_pages_on_d_ends_when_the_load_has_stalled(engines: Any) -> None:
    """P has computed one and begun another; D has room for one of them, and was asked for the other first.

    P preempts that one, for want of the pages that it keeps for the one: those are free when D has taken
    them, for which D has no room until the other has come. vLLM's P does so only if it begins prompts that
    do not fit.
    """
    p, d = engines(1, 1, reserve=False, **TIGHT, **STALLING)
    for index in (0, 1):
        at_p(p, d, index)
    for index in (1, 0):
        at_d(p, d, index)
    begun = d.scheduler.connector.consumer.pending_loads
    d.admits(False)
    run([p, d], lambda: [pending.begun for pending in begun.values()] == [[""], [""]])
    d.admits(True)
    finish(p, d)
    assert list(d.ended.values()) == ["length"] * 2
    assert d.count("transfers_failed") == 1


@pytest.mark.parametrize("seed", range(4))
def test_with_preemptions_on_p_in_between(engines: Any, seed: int) -> None:
    draw = random.Random(seed)
    reserve = draw.random() < 0.5
    p, d = engines(1, draw.choice([1, 2]), reserve=reserve, **TIGHT, **STALLING)
    of_p, of_d = list(range(COUNT)), list(range(COUNT))
    draw.shuffle(of_d)
    while of_p or of_d:
        if of_p and (not of_d or draw.random() < 0.5):
            at_p(p, d, of_p.pop(0), draw.choice([1, 12]))
        else:
            at_d(p, d, of_d.pop(0))
        for _ in range(draw.randrange(4)):
            draw.choice([p, d]).step()
        if draw.random() < 0.4:
            preempt_all(p)
    finish(p, d)
    assert list(d.ended.values()) == ["length"] * COUNT
