"""A seed gives exactly one walk of the protocol: every effect, every message, every moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from protocol.walks import walk

ROOT = Path(__file__).parents[2]
SECONDS = "2000"


def test_a_seed_gives_the_same_walk_twice_and_another_seed_another() -> None:
    traces = [walk(seed).trace for seed in range(6)]
    assert traces == [walk(seed).trace for seed in range(6)]
    assert len(set(traces)) == 6


def test_a_seed_gives_the_same_walks_in_every_process() -> None:
    """Whatever its hashes are, and where its objects lie."""
    said = {run("7", hashes) for hashes in ("1", "2", "random")}
    assert len(said) == 1
    assert run("8", "1") not in said


def run(seed: str, hashes: str) -> str:
    """The trace of `make chaos TIER=1`."""
    done = subprocess.run(
        [sys.executable, "-m", "protocol", "--seconds", SECONDS, "--seed", seed],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "PYTHONHASHSEED": hashes},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "PASS", done.stdout
    return next(line for line in lines if line.startswith("trace "))
