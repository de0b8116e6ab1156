"""Whether other processes compute on a rank's card, and whether CUDA MPS lets them do so at the same time.

Without MPS the processes on a card take turns. Two ranks of a link that share a card then wait for each
other's turn at every message (docs/operations.md, "Two servers on one card").
"""

import ctypes
import logging
import os
from collections.abc import Callable, Collection, Mapping
from ctypes import POINTER, Structure, c_char_p, c_uint, c_ulonglong, c_void_p
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_DIRECTORY = "/tmp/nvidia-mps"
"""Where CUDA looks if the variable is not set."""

DAEMON = "nvidia-cuda-mps-control"
PAGE = 'docs/operations.md, "Two servers on one card"'

MAX_PROCESSES = 256
"""The most that NVML is asked for of one card; a card with more shows none."""


def pipe_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this process looks for MPS when it first uses CUDA."""
    return Path(environ.get(DIRECTORY) or DEFAULT_DIRECTORY)


def program_of(pid: int) -> str:
    """The name of a living process, as the kernel cuts it (15 letters); "" if there is none here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def mps_runs(directory: Path, program: Callable[[int], str] = program_of) -> bool | None:
    """Whether MPS's control daemon serves this directory. None: its pipe is there and the daemon is not seen:
    it has been killed, or it is in another pid namespace (a container)."""
    if not (directory / "control").exists():
        return False
    try:
        pid = int((directory / f"{DAEMON}.pid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return True if program(pid).startswith(DAEMON[:15]) else None


def turns(others: int, mps: bool | None) -> str:
    """What to tell a user about so many other processes on a card, in a sentence; "" if nothing."""
    if others <= 0 or mps is not False:
        return ""
    name, compute = ("processes", "compute") if others > 1 else ("process", "computes")
    return (
        f"{others} other {name} {compute} on this card and CUDA MPS does not run, so they take turns: on an "
        f"H100 NCCL between two of them fell to 2 GB/s and a first token came 0.7 s later. Start "
        f"`{DAEMON} -d` before all servers of the card ({PAGE})"
    )


def doctor_sentence(processes: Mapping[int, int], mps: bool | None, directory: Path) -> str:
    """`p2pkv doctor`'s line. `processes`: by device, how many compute there; 0 where NVML does not tell."""
    if mps:
        return f"its daemon serves {directory}: processes on one card compute at the same time"
    if mps is None:
        return (
            f"{directory} has its pipe, but the daemon is not seen from here: it has ended, or it runs in "
            "another pid namespace"
        )
    for device, count in processes.items():
        if said := turns(count - 1, mps):
            return f"device {device}: {said}"
    return f"does not run: servers with a card each need none, two on one card would take turns ({PAGE})"


def warn_of_turns(device: torch.device) -> None:
    """Log a warning if other processes compute on this rank's card and MPS does not run. Never raises."""
    if device.type != "cuda":
        return
    pids = compute_processes(uuid_of(device.index if device.index is not None else 0))
    # This process has a context there, so it is one of them, under whatever number.
    if said := turns(len(pids) - 1, mps_runs(pipe_directory())):
        logger.warning("%s", said)


def uuid_of(index: int) -> str:
    """NVML's name of CUDA device number `index` of this process; "" if it is not known."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else ""


# NVML, by ctypes: it comes with the driver, and Python packages for it are another dependency.

_OK = 0


class ProcessInfo(Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", c_uint),
        ("usedGpuMemory", c_ulonglong),
        ("gpuInstanceId", c_uint),
        ("computeInstanceId", c_uint),
    )


def compute_processes(uuid: str, library: str = "libnvidia-ml.so.1") -> Collection[int]:
    """Process ids that compute on the card of this name, as far as NVML tells (a container sees its own)."""
    try:
        nvml = ctypes.CDLL(library)
        nvml.nvmlDeviceGetHandleByUUID.argtypes = (c_char_p, POINTER(c_void_p))
        listed = nvml.nvmlDeviceGetComputeRunningProcesses_v3
        listed.argtypes = (c_void_p, POINTER(c_uint), POINTER(ProcessInfo))
        if nvml.nvmlInit_v2() != _OK:
            return ()
    except (OSError, AttributeError):  # no driver, or one without these functions
        return ()
    try:
        card, count = c_void_p(), c_uint(MAX_PROCESSES)
        found = (ProcessInfo * MAX_PROCESSES)()
        if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(card)) != _OK:
            return ()
        if listed(card, ctypes.byref(count), found) != _OK:
            return ()
        return {each.pid for each in found[: count.value]}
    finally:
        nvml.nvmlShutdown()
