"""The simulated fleet, and the simulated pool."""

from __future__ import annotations

import argparse
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bench_fleet import FAULTS, OTHERS, simulated
from pool_simulation import MIXES
from pool_simulation import simulated as pool_simulated

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
    monkeypatch.setattr("bench_fleet.POLICIES", POLICIES | OTHERS)
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


# The proxy's placement in front of modelled engines, in virtual time: what `auto` is for.


@cache
def figures(system: str, mix: str, weight: float = 0.1, noise: bool = False) -> dict[str, float]:
    return pool_simulated(system, mix, seconds=80.0, weight=weight, noise=noise)[0]


@pytest.mark.parametrize("mix", MIXES)
def test_a_pool_serves_as_many_requests_as_plain_servers_and_more_than_fixed_roles(mix: str) -> None:
    auto, plain, fixed = (figures(system, mix) for system in ("auto", "plain", "fixed"))
    assert auto["rps"] >= 0.97 * plain["rps"] and auto["rps"] > 1.1 * fixed["rps"]
    assert auto["ttft50"] <= 1.25 * plain["ttft50"] and auto["ttft99"] <= 1.1 * plain["ttft99"]


@pytest.mark.parametrize("mix", MIXES)
def test_first_tokens_are_predicted(mix: str) -> None:
    assert figures("auto", mix)["error"] < 0.25


@pytest.mark.parametrize("mix", MIXES)
def test_with_predictions_replaced_by_noise_figures_get_worse(mix: str) -> None:
    auto, noise = figures("auto", mix), figures("auto", mix, noise=True)
    assert noise["rps"] < 0.99 * auto["rps"]
    assert noise["ttft99"] > auto["ttft99"]


def test_a_large_weight_of_pauses_keeps_prompts_and_answers_apart() -> None:
    apart, plain = figures("auto", "mixed", weight=10.0), figures("plain", "mixed")
    assert apart["gap99"] < 0.5 * plain["gap99"]
    assert apart["rps"] >= 0.98 * figures("fixed", "mixed")["rps"]


def test_one_engine_of_short_steps_halves_pauses_at_the_throughput_of_plain_servers() -> None:
    """Of itself, placement by cost has nearly all answers decoded by it, and half of the prompts computed by
    the other one."""
    plain, pool = (
        pool_simulated(system, "mixed", seconds=120.0, chunks=chunks, warm=40.0)[0]
        for system, chunks in (("plain", (256,)), ("auto", (256, 72)))
    )
    assert pool["rps"] >= 0.97 * plain["rps"]
    assert pool["gap99"] <= 0.5 * plain["gap99"]


def test_four_proxies_in_front_of_long_queues_place_better_where_engines_report() -> None:
    one, blind, seeing = (
        pool_simulated(
            "auto", "very long prompts", size=8, rate=4.5, seconds=120.0, warm=30.0, seed=3, **how
        )[0]
        for how in ({}, {"proxies": 4}, {"proxies": 4, "reports": True})
    )
    assert seeing["ttft99"] < 0.85 * blind["ttft99"] and seeing["ttft50"] < 0.9 * blind["ttft50"]
    assert seeing["error"] < 0.8 * blind["error"] and one["ttft99"] < seeing["ttft99"]


def test_runs_repeat() -> None:
    first, again = (pool_simulated("auto", "mixed", seconds=20.0)[0] for _ in range(2))
    assert first == again
