"""Two instances of both roles, full of prompts held for each other: both go on, whatever came first.

vLLM's own schedulers and our connector; the ranks are made up, and a transfer takes no time. `held_share` is
1, so that only the thirds of an instance of both roles (docs/design.md) keep blocks free.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest

from p2pkv.engine import commands as do
from support.connector.instances import LAYERS, Instance, inner_id, pair_id, tokens

pytestmark = pytest.mark.vllm

BLOCKS = 31
"""Of 16 tokens; vLLM keeps one. A third is 10, which two prompts of 80 tokens take."""

LENGTH, COUNT = 80, 6
MAX_STEPS = 600


class Pool:
    """Two instances, A and B, and what the network would do between their ranks."""

    def __init__(self, ahead: int = 0) -> None:
        """`ahead`: as of an Instance."""
        self.a, self.b = (
            Instance("both", blocks=BLOCKS, budget=48, seqs=8, port=port, held_share=1.0, ahead=ahead)
            for port in (21001, 22001)
        )
        self.most_held = (BLOCKS - 1) // 3
        self._number = 0
        self._prefills: dict[str, Any] = {}
        self._computed: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self.expected: list[tuple[Instance, str]] = []

    def ids(self, count: int) -> list[str]:
        self._number += count
        return [f"{number}" for number in range(self._number - count, self._number)]

    def at_p(self, p: Instance, d: Instance, unique: str) -> None:
        self._ask(p, p, d, unique, 1)

    def at_d(self, p: Instance, d: Instance, unique: str) -> None:
        self._ask(d, p, d, unique, 12)

    def plain(self, instance: Instance, unique: str, length: int, count: int) -> None:
        self.expected.append((instance, unique))
        instance.ask(unique, tokens(length, unique), max_tokens=count)

    def _ask(self, at: Instance, p: Instance, d: Instance, unique: str, count: int) -> None:
        outer = pair_id(unique, prefill=address(p), decode=address(d))
        request_id = inner_id(outer)
        self.expected.append((at, request_id))
        at.ask(request_id, tokens(LENGTH, unique), max_tokens=count)

    def step(self) -> None:
        for instance in (self.a, self.b):
            instance.step()
            self._read(instance)
            connector: Any = instance.scheduler.connector
            assert connector.producer._held.all <= self.most_held
        for p, d in ((self.a, self.b), (self.b, self.a)):
            self._move(p, d)

    def _read(self, instance: Instance) -> None:
        for command in instance.rank.log:
            match command:
                case do.OfferPrompt():
                    self._tokens[command.key] = command.tokens
                case do.Computed() if command.layer_stop == len(LAYERS):
                    self._computed.update(dict(command.prompts))
                case do.Expect():
                    self._prefills[command.key] = command.prefill
        instance.rank.log.clear()

    def _move(self, p: Instance, d: Instance) -> None:
        """What P's rank and D's would have done meanwhile."""
        for key, fact in list(d.rank.facts.items()):
            there = p.rank.facts.get(key)
            if self._prefills.get(key) != address(p) or there is None:
                continue
            if there.over and not fact.over:
                d.rank.fail(key)
            elif fact.over:
                p.rank.free(key)
            elif there.offered and not fact.offered:
                d.rank.begin(key)
            elif fact.asked and self._computed.get(key, 0) >= self._tokens[key]:
                d.rank.load(key)
                p.rank.free(key)

    def finish(self) -> None:
        for _ in range(MAX_STEPS):
            if not (self.a.scheduler.requests or self.b.scheduler.requests):
                break
            self.step()
        left = [name for each in (self.a, self.b) for name in each.scheduler.requests]
        assert not left, f"{len(left)} requests wait for ever"
        assert {each.ended[name] for each, name in self.expected} == {"length"}
        self.expected.clear()
        for _ in range(3):
            self.step()
        for each in (self.a, self.b):
            each.drain()
            assert each.free == each.all_free
            assert not each.rank.facts


def address(instance: Instance) -> Any:
    connector: Any = instance.scheduler.connector
    return connector.options.address


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    yield Pool()


def fill(pool: Pool, order: Sequence[str], steps: int, reverse: bool) -> None:
    """Four kinds of calls, each kind at once, with so many steps between."""
    a, b = pool.a, pool.b
    there, back = pool.ids(COUNT), pool.ids(COUNT)
    back_first = back[::-1] if reverse else back
    calls = {
        "A prefills": lambda: [pool.at_p(a, b, each) for each in there],
        "B decodes": lambda: [pool.at_d(a, b, each) for each in (there[::-1] if reverse else there)],
        "B prefills": lambda: [pool.at_p(b, a, each) for each in back],
        "A decodes": lambda: [pool.at_d(b, a, each) for each in back_first],
    }
    for kind in order:
        calls[kind]()
        for _ in range(steps):
            pool.step()


KINDS = ("A prefills", "B decodes", "B prefills", "A decodes")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [0, 3, 12])
def test_filled_in_every_order(pool: Pool, steps: int, reverse: bool) -> None:
    for order in permutations(KINDS):
        if order.index("A prefills") > order.index("B prefills"):
            continue  # the same with A and B exchanged
        fill(pool, order, steps, reverse)
        pool.finish()


@pytest.mark.parametrize("ahead", [0, 1], ids=["one step", "asynchronous"])
def test_filled_by_single_calls_in_any_order_among_plain_requests(ahead: int) -> None:
    """Plain ones, too, grow until vLLM preempts some."""
    draw, pool = random.Random(1), Pool(ahead)
    a, b = pool.a, pool.b
    for _ in range(12):
        calls = [
            (call, p, d, each)
            for p, d in ((a, b), (b, a))
            for each in pool.ids(COUNT)
            for call in (pool.at_p, pool.at_d)
        ]
        draw.shuffle(calls)
        for call, p, d, each in calls:
            call(p, d, each)
            if draw.random() < 0.3:
                pool.plain(draw.choice([a, b]), f"plain {pool.ids(1)}", draw.randrange(20, 110), 40)
            for _ in range(draw.choice([0, 0, 1, 4])):
                pool.step()
        pool.finish()


def test_a_prompt_too_long_for_a_third_is_computed_where_it_is_decoded() -> None:
    pool = Pool()
    pool.most_held = BLOCKS  # until P has read that it is stale
    outer = pair_id("long", prefill=address(pool.a), decode=address(pool.b))
    for at, count in ((pool.a, 1), (pool.b, 4)):
        at.ask(inner_id(outer), tokens(170, "long"), max_tokens=count)
        pool.expected += [(at, name) for name in at.scheduler.requests]
    pool.finish()
    assert sum(pool.b.computed.values()) == 170 + 3
