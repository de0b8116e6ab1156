"""Virtual environments with few packages, made without a network."""

import importlib.metadata
import os
import re
import subprocess
import venv
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(*requirements: str) -> dict[str, Distribution]:
    """These packages and all that they need, by name, as far as they are installed here."""
    found: dict[str, Distribution] = {}
    left = [Requirement(each) for each in requirements]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop().name).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needed = [Requirement(line) for line in found[name].requires or []]
        left += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def with_only(folder: Path, *requirements: str) -> Path:
    """Make an environment of links to what these packages have installed; its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Several packages may share a folder, as NVIDIA's do.
    packages = closure(*requirements).values()
    tops = {file.parts[0]: package for package in packages for file in package.files or []}
    for top in tops.keys() - {"..", "__pycache__"}:
        (site / top).symlink_to(Path(str(tops[top].locate_file(top))))
    return folder / "bin" / "python"


def run_clean(
    *command: str | Path, cwd: Path, seconds: float = 500.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """With nothing of this process's Python, pytest or make in the environment."""
    ours = ("PYTHON", "PYTEST", "MAKE", "MFLAGS", "ARGS", "GPU_PYTHON", "DIST", "P2PKV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | environ
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )
