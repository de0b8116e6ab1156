"""Two processes on one card without CUDA MPS: when a rank and `p2pkv doctor` say so."""

import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch

from p2pkv.cli import doctor
from p2pkv.cli.doctor import examine
from p2pkv.links import mps_check
from p2pkv.links.mps_check import (
    DAEMON,
    compute_processes,
    doctor_sentence,
    mps_runs,
    pipe_directory,
    program_of,
    turns,
    warn_of_turns,
)
from support.cuda.kernels import NO_GCC

NVML = r"""
#include <string.h>
typedef struct {
    unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
static int open;
int nvmlInit_v2(void) { return open++; }
int nvmlShutdown(void) { open--; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &open;
    return strcmp(uuid, "GPU-1") ? 6 : 0;  /* 6: not found */
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, nvmlProcessInfo_t *infos) {
    if (device != &open || *count < 3) return 7;  /* 7: insufficient size */
    unsigned int pids[] = {4000000000u, 17, 17};  /* one process with two contexts */
    for (int i = 0; i < 3; i++)
        infos[i] = (nvmlProcessInfo_t){pids[i], ~0ull, 0xffffffffu, 0xffffffffu};
    *count = 3;
    return 0;
}
"""
"""As `nvml.h` declares these four."""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    if NO_GCC:
        pytest.skip(NO_GCC)
    folder = tmp_path_factory.mktemp("nvml")
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def test_processes_on_a_card_are_those_that_nvml_lists(nvml: str) -> None:
    assert compute_processes("GPU-1", nvml) == {17, 4_000_000_000}
    assert compute_processes("GPU-1", nvml) == {17, 4_000_000_000}, "NVML was shut down after the first time"
    assert len(compute_processes("GPU-2", nvml)) == 0
    assert len(compute_processes("GPU-1", "libnvidia-ml-that-is-not-there.so")) == 0


def directory(path: Path, pid: int | None) -> Path:
    """As MPS's daemon leaves it there."""
    os.mkfifo(path / "control")
    if pid is not None:
        (path / f"{DAEMON}.pid").write_text(f"{pid}\n")
    return path


def test_mps_runs_where_its_daemon_serves_the_directory(tmp_path: Path) -> None:
    assert mps_runs(tmp_path) is False
    directory(tmp_path, 4711)
    assert mps_runs(tmp_path, {4711: DAEMON[:15]}.__getitem__) is True
    assert mps_runs(tmp_path, {4711: "bash"}.__getitem__) is None, "another process has that number now"
    assert mps_runs(tmp_path, {4711: ""}.__getitem__) is None
    (tmp_path / f"{DAEMON}.pid").unlink()
    assert mps_runs(tmp_path) is None


def test_a_program_is_named_as_the_kernel_names_it() -> None:
    assert program_of(os.getpid()) == Path("/proc/self/comm").read_text().strip()
    assert program_of(1 << 30) == ""


def test_the_directory_is_the_environments_or_cudas() -> None:
    for environ in ({}, {"CUDA_MPS_PIPE_DIRECTORY": ""}):
        assert str(pipe_directory(environ)) == "/tmp/nvidia-mps"
    assert str(pipe_directory({"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})) == "/tmp/mps"


@pytest.mark.parametrize(
    ("others", "mps", "begin"),
    [
        (0, False, ""),
        (-1, False, ""),  # NVML did not tell, not even of this process
        (1, True, ""),
        (1, None, ""),  # perhaps it runs: no false alarm
        (1, False, "1 other process computes on this card and CUDA MPS does not run, so they take turns"),
        (2, False, "2 other processes compute on this card"),
    ],
)
def test_turns_are_worth_a_word_without_mps_only(others: int, mps: bool | None, begin: str) -> None:
    said = turns(others, mps)
    assert said.startswith(begin) and bool(said) is bool(begin)


@pytest.mark.parametrize(
    ("processes", "mps", "words"),
    [
        ({0: 2}, True, "its daemon serves /pipes"),
        ({0: 2}, None, "the daemon is not seen from here"),
        ({0: 1, 1: 0}, False, "does not run: servers with a card each need none"),
        ({0: 0}, False, "does not run: servers with a card each need none"),
        ({0: 1, 1: 3}, False, "device 1: 2 other processes compute on this card"),
    ],
)
def test_the_doctor_names_the_card(processes: dict[int, int], mps: bool | None, words: str) -> None:
    assert words in doctor_sentence(processes, mps, Path("/pipes"))


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvml: str) -> Path:
    """A card on which two processes compute; where MPS would be."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(mps_check, "uuid_of", lambda index: f"GPU-{index}")
    monkeypatch.setattr(mps_check, "compute_processes", lambda uuid: compute_processes(uuid, nvml))
    return tmp_path


def test_a_rank_says_so_at_its_start(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_turns(torch.device("cpu"))
        warn_of_turns(torch.device("cuda", 2))
        assert caplog.text == ""
        warn_of_turns(torch.device("cuda", 1))
    assert "1 other process computes on this card" in caplog.text and f"`{DAEMON} -d`" in caplog.text
    caplog.clear()
    directory(shared, 1 << 30)
    warn_of_turns(torch.device("cuda", 1))
    assert caplog.text == ""


def test_the_doctor_looks_at_each_card(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = [each for each in examine() if each.about == "MPS"]
    assert found.ok and found.sentence.startswith("does not run")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = doctor._mps()
    assert found.ok and found.sentence.startswith("device 1: 1 other process computes")


def test_the_doctor_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (found,) = [each for each in examine() if each.about == "MPS"]
    assert found.sentence == "of no concern: torch finds no CUDA device"
