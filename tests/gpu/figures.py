"""Figures that a test measures, for the report of `make gpu-first-day`: standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "P2PKV_FIGURES"
"""Names the file that tests append to; none are kept without it."""


def figure(name: str, value: float, unit: str, where: str) -> None:
    """Keep a figure. `where`: the devices and settings that it was measured with."""
    print(f"{name} ({where}): {value:.4g} {unit}")
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, "value": value, "unit": unit, "where": where}) + "\n")


def figures(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
