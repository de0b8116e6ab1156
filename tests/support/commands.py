"""Programs that a test runs to their end."""

import subprocess
from pathlib import Path
from typing import Any


def run(
    *command: str | Path, seconds: float = 60.0, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """With what it has written."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=check, **options)
