"""The simulated fleet: time is virtual, every request ends, and the same seed gives the same figures."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest
from fleet_simulation import FAULTS, OTHERS, simulated

from p2pkv_proxy.routing import POLICIES

SIZE = 20


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of conversations: each turn begins with what was before."""
    dice, path = random.Random(5), tmp_path / "trace.jsonl"
    lines = []
    for talk in range(200):
        at, blocks = dice.uniform(0, 60_000), [talk * 100]
        for turn in range(dice.randrange(1, 6)):
            blocks = [*blocks, *(talk * 100 + 10 * turn + each for each in range(1, 6))]
            length = 512 * len(blocks) - dice.randrange(512)
            lines.append(
                {"timestamp": at, "input_length": length, "output_length": 50, "hash_ids": list(blocks)}
            )
            at += dice.uniform(1000, 20_000)
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def run(trace: Path, policy: str, fault: str | None = None) -> dict[str, Any]:
    args = argparse.Namespace(seconds=20.0, span=60.0, seed=1)
    found = simulated(trace, SIZE, policy, fault, args)
    del found["CPU, us a request"]
    return found


@pytest.mark.parametrize("policy", [*POLICIES, *OTHERS])
def test_every_request_is_answered(trace: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_simulation.POLICIES", POLICIES | OTHERS)
    monkeypatch.setattr("p2pkv_proxy.routing.POLICIES", POLICIES | OTHERS)
    found = run(trace, policy)
    assert found["asked"] > 100 and found["not answered"] == 0 and found["why"] == {}
    assert 0 < found["first token, p50"] <= found["first token, p99"]


def test_the_same_seed_gives_the_same_figures(trace: Path) -> None:
    assert run(trace, "prefix_aware") == run(trace, "prefix_aware")


def test_a_policy_that_knows_prefixes_has_more_hits(trace: Path) -> None:
    assert run(trace, "prefix_aware")["hits"] > 1.5 * run(trace, "round_robin")["hits"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_fault_leaves_is_answered(trace: Path, fault: str) -> None:
    assert run(trace, "least_loaded", fault)["not answered"] == 0
