"""The real command in a process of its own, with its log gathered."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE = 30.0


# The development mode tells of what was not closed.
PROXY = ("-X", "dev", "-m", "p2pkv_proxy")


class Command:
    """`python -m proxy`, or another `program` that is it, with its log gathered."""

    def __init__(self, *arguments: str, program: Sequence[str] = PROXY) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def says(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + DEADLINE
        while (match := re.search(pattern, self.log)) is None:
            assert time.monotonic() < end, f"no {pattern!r} in:\n{self.log}"
            assert self.process.poll() is None, f"it ended:\n{self.log}"
            time.sleep(0.02)
        return match

    def clean(self) -> bool:
        """Whether its log tells of nothing that was left behind, or not foreseen."""
        return re.search("Traceback|destroyed|never retrieved|Warning|Unclosed|ERROR", self.log) is None

    def end(self) -> int:
        status = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return status


@contextlib.contextmanager
def running(*arguments: str, program: Sequence[str] = PROXY) -> Iterator[Command]:
    command = Command(*arguments, program=program)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.end()
