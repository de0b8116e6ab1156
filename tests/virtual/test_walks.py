"""Hypothesis moves real cores: requests, faults and time, in any order, and cuts a failing walk down to its
core.

What holds at any time is checked by the run as it goes (bytes, blocks, bounds, one outcome each); at the end
of each walk everything heals, ends, works and is at rest.
"""

import os
import random
from collections.abc import Iterator

import pytest
from chaos.model import ONE_GROUP, draw_hybrid
from chaos.schedule import LEASE
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from virtual.faults import WEIGHTS
from virtual.test_virtual import quiet
from virtual.world import World

from p2pkv.protocol import messages, sender

__all__ = ["quiet"]

FAULTS = {fault.__name__: fault for fault in WEIGHTS}
CHUNKS = (1024, 4096)
"""Bytes of a message: of the smallest, most hold one KV group."""

LONGEST = 48
"""Tokens of a prompt."""


@pytest.fixture(autouse=True)
def few_announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So few that small prompts reach the bound."""
    monkeypatch.setattr(sender, "MAX_ANNOUNCED", 3)
    monkeypatch.setattr(messages, "MAX_CUT", 2)
    yield


class Walk(RuleBasedStateMachine):
    world: World

    @initialize(
        seed=st.integers(0, 1 << 20),
        hybrid=st.booleans(),
        tps=st.sampled_from([(1,), (1, 2), (2, 4)]),
        faults=st.integers(0, 4),
    )
    def begin(self, seed: int, hybrid: bool, tps: tuple[int, ...], faults: int) -> None:
        """One P and one D, of one or two pipeline stages each."""
        model = draw_hybrid(random.Random(seed)) if hybrid else ONE_GROUP
        self.world = World(
            f"walk {seed}", prefills=1, decodes=1, model=model, tps=tps, stages=True, chunks=CHUNKS
        )
        self.faults = faults

    @rule(many=st.integers(1, 3), plain=st.booleans(), fresh=st.booleans())
    def ask(self, many: int, plain: bool, fresh: bool) -> None:
        """`plain`: no client leaves, and P preempts nothing; `fresh`: D has no prefix."""
        p, d = self.world.machines.values()
        for _ in range(many):
            self.world.jobs.ask(p, d, plain=plain, fresh=fresh, longest=LONGEST)

    @rule(seconds=st.sampled_from([0.001, 0.004, 0.02, 0.1, 0.5, 0.6 * LEASE]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(moves=st.integers(1, 40))
    def move(self, moves: int) -> None:
        for _ in range(moves):
            self.world.clock.step()

    @precondition(lambda self: self.faults > 0)
    @rule(what=st.sampled_from(sorted(FAULTS)), on_d=st.booleans())
    def fault(self, what: str, on_d: bool) -> None:
        machine = list(self.world.machines.values())[on_d]
        if machine.life is not None:
            self.faults -= 1
            self.world.strike(FAULTS[what], machine)

    @invariant()
    def bounds(self) -> None:
        for machine in self.world.machines.values() if hasattr(self, "world") else ():
            machine.check_bounds()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


Walk.TestCase.settings = settings(
    deadline=None,
    max_examples=int(os.environ.get("P2PKV_EXAMPLES", "20")),
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
TestWalk = pytest.mark.timeout(600)(Walk.TestCase)
