"""Virtual environments with few packages, made without a network."""

from __future__ import annotations

import importlib.metadata
import re
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
