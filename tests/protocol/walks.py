"""Longer walks than Hypothesis makes, in larger worlds; faults mostly meet chunks that are under way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from random import Random

from protocol.conversation import KEYS, STEPS, Conversation
from protocol.faults import FAULTS
from protocol.world import Beside, World

from p2pkv.sharding import Shape


def walk(seed: int | str, steps: int = 250) -> World:
    chance = Random(seed)
    machine = Conversation()
    layers, heads = chance.randint(1, 4), chance.choice([1, 2, 4])
    prefill, decode = _random_shape(chance, layers, heads), _random_shape(chance, layers, heads)
    beside = _beside(chance, prefill, decode) if chance.random() < 0.6 else ()
    row = max(8 * heads, *(each.heads * each.row for each in beside), 0)
    machine.begin(
        world=World(
            prefill,
            decode,
            unit=chance.choice([1, 1, 1, 3]),
            chunk_bytes=chance.randint(1, 24) * 8,
            window=chance.randint(2, 12) * row,
            beside=beside,
            ahead=chance.random() < 0.5,
            verify=chance.random() < 0.5,
        ),
        chunks=[tuple(accumulate(chance.choices(range(1, 20), k=chance.randint(1, 3)))) for _ in KEYS],
        early=[chance.choice(["both", "both", "both", "p", "d"]) for _ in KEYS],
        faults=chance.choice([0, 0, 1, 2, 3, 6]),
        warm=chance.random() < 0.7,
    )

    def number() -> int:
        return chance.randrange(1000)

    def coin() -> bool:
        return chance.random() < 0.5

    speeds = chance.choices([1, 4, 16], k=len(STEPS))
    acts: dict[Callable[[], object], int] = {
        lambda: machine.compute(number(), number(), chance.randint(1, 3), coin()): 6,
        lambda: machine.preempt(number()): chance.choice([0, 1, 4]),
        lambda: machine.admit(number(), chance.choice([0, 0, 0, 1, 4]), chance.randint(0, 2)): 4,
        lambda: machine.schedule(number(), chance.choice(["p", "d", "failed", "forget"]), number()): 1,
        lambda: machine.schedule(number(), "nothing wanted", 0): chance.choice([0, 0, 0, 1]),
        lambda: machine.step(chance.choices(STEPS, speeds)[0], number(), chance.randint(1, 3)): 12,
        lambda: machine.move(chance.randint(1, 3)): chance.choice([1, 6]),
        lambda: machine.wait(chance.choice([0.1, 1.0])): 2,
        machine.beat: 1,
        machine.restart: 1,
        lambda: machine.fault(chance.choice(sorted(FAULTS)), number(), coin(), coin()): 1,
    }
    for act in chance.choices(list(acts), list(acts.values()), k=steps):
        act()
        machine.bounds()
    machine.teardown()
    return machine.world


def _beside(chance: Random, prefill: Shape, decode: Shape) -> tuple[Beside, ...]:
    """A sliding window, one state or two of the same layers, or all of these."""
    groups: list[Beside] = []
    kinds = chance.choice([("window",), ("state",), ("state", "state"), ("window", "state", "state")])
    for kind in kinds:
        layers = chance.randint(1, 2)
        groups.append(
            Beside(
                _stages(chance, layers, prefill),
                _stages(chance, layers, decode),
                chance.choice([1, 2, 4]),
                chance.choice([8, 24]),
                window=chance.choice([1, 2, 7, 20]) if kind == "window" else 0,
                once=kind == "state",
            )
        )
    return tuple(groups)


def _stages(chance: Random, layers: int, shape: Shape) -> tuple[int, ...]:
    """So many layers over the same stages; some may have none."""
    if len(shape.layers) == 1:
        return (layers,)
    first = chance.randint(0, layers)
    return first, layers - first


def _random_shape(chance: Random, layers: int, heads: int) -> Shape:
    tp = chance.choice([1, 2, 4])
    if layers == 1 or chance.random() < 0.5:
        return Shape((layers,), heads, tp)
    cut = chance.randint(1, layers - 1)
    return Shape((cut, layers - cut), heads, tp)
