"""`make gpu-first-day` where a machine lacks what a step needs, or a step fails, hangs or comes too late."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gpu import first_day
from gpu.first_day import Step, main, report, run_all, verdict


def step(name: str, code: str, **more: object) -> Step:
    return Step(name, f"what {name} does", (sys.executable, "-c", code), **more)  # type: ignore[arg-type]


def test_each_step_has_its_outcome_and_its_reason() -> None:
    results = run_all(
        [
            step("good", "print('3 passed in 0.1s')"),
            step("bad", "print('it broke'); raise SystemExit(3)"),
            step("slow", "import time; time.sleep(60)", seconds=0.5),
            Step("absent", "a program that is not there", ("/no/such/program",)),
            step("large", "", gpus=2),
        ],
        count=1,
        seconds=60.0,
    )
    assert [(each.step, each.outcome) for each in results] == [
        ("good", "passed"),
        ("bad", "failed"),
        ("slow", "failed"),
        ("absent", "not run"),
        ("large", "not run"),
    ]
    assert [each.why for each in results[1:3]] == ["exit status 3", "it did not end in 0.5 s"]
    assert results[4].why == "needs 2 CUDA devices, and torch finds 1"
    page = report(results, "today")
    assert "| bad | what bad does | failed |" in page and "it broke" in page


def test_when_the_time_is_over_the_rest_is_not_run() -> None:
    (result,) = run_all([step("late", "")], count=0, seconds=0.0)
    assert (result.outcome, result.why) == ("not run", "the time was over (--minutes)")


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (0, "5 passed in 1.0s", ("passed", "")),
        (0, "4 passed, 1 skipped in 1.0s", ("passed", "")),
        (1, "1 failed in 1.0s", ("failed", "exit status 1")),
        (0, "SKIPPED [2] tests/gpu/a.py:1: needs CuPy\n2 skipped in 0.1s", ("not run", "needs CuPy")),
        (0, "2 skipped, 3 deselected in 0.1s", ("not run", "all of its tests were skipped")),
    ],
)
def test_a_step_whose_tests_are_all_skipped_was_not_run(
    status: int, said: str, outcome: tuple[str, str]
) -> None:
    assert verdict(status, said) == outcome


def test_the_command_writes_both_reports(tmp_path: Path) -> None:
    assert main(["--only", "environment", "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "first_day.json").read_text())["steps"]
    assert found["outcome"] == "passed" and any(line.startswith("torch ") for line in found["output"])
    assert "| environment |" in (tmp_path / "first_day.md").read_text()


def test_every_step_names_tests_that_are_there(tmp_path: Path) -> None:
    named = [word for each in first_day.steps(tmp_path) for word in each.command if word.startswith("tests/")]
    assert len(named) > 5
    assert [word for word in named if not (first_day.ROOT / word).exists()] == []
