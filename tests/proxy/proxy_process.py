"""The real command in a process of its own, with its log gathered."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Command:
    """`python -m proxy` with its log gathered."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            # The development mode tells of what was not closed.
            [sys.executable, "-X", "dev", "-m", "proxy", *arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

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
def running(*arguments: str) -> Iterator[Command]:
    command = Command(*arguments)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
        command.end()
