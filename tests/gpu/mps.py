"""CUDA MPS for the time of a run: standard library only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

DAEMON = "nvidia-cuda-mps-control"
PLACES = "/usr/local/nvidia/bin"
"""Where it lies in containers, besides PATH."""

VARIABLES = {"CUDA_MPS_PIPE_DIRECTORY": "pipes", "CUDA_MPS_LOG_DIRECTORY": "log"}


@contextlib.contextmanager
def started(wanted: bool, places: str = PLACES) -> Iterator[str]:
    """Start its daemon, for the processes that are started meanwhile, and end it. Gives a sentence about what
    came of that; "" if it was not wanted."""
    if not wanted:
        yield ""
        return
    program = shutil.which(DAEMON, path=os.pathsep.join([os.environ.get("PATH", ""), places]))
    if program is None:
        yield f"{DAEMON} is not installed here, so processes on one card take turns"
        return
    before = {name: os.environ.get(name) for name in VARIABLES}
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        for name, below in VARIABLES.items():
            Path(folder, below).mkdir()
            os.environ[name] = str(Path(folder, below))
        try:
            done = subprocess.run([program, "-d"], capture_output=True, text=True, check=False, timeout=30)
            said = (done.stdout + done.stderr).strip()
            yield (
                f"{program} -d: {said or 'started'}"
                if done.returncode == 0
                else f"{program} -d failed: {said}"
            )
        finally:
            subprocess.run([program], input="quit\n", capture_output=True, text=True, check=False, timeout=30)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def runs() -> bool | None:
    """See p2pkv.links.mps_check.mps_runs, which is asked if it can be imported; None else."""
    try:
        from p2pkv.links.mps_check import mps_runs, pipe_directory
    except ImportError:  # torch is missing
        return None
    return mps_runs(pipe_directory())
