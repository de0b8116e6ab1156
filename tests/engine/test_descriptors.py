"""A process that runs out of file descriptors: its ranks go on, and serve again when there are some."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_support import shout

from p2pkv.pairing import Address

PEER = Path(__file__).parents[1] / "descriptors_peer.py"
LIMIT, FLOOD = 128, 140
SECRET = "a secret of the tests"


class Peer:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(LIMIT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.p, self.d = map(Address.parse, self.hear().split())

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"it has ended with status {self.process.wait(10)}"
        return line

    def ask(self, words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()
        return self.hear()

    def used(self, fits: int, *, at_least: bool) -> None:
        """Wait until the process uses at least, or at most, so many descriptors."""
        end = time.monotonic() + 20
        while (used := int(self.ask("open"))) != fits and (used < fits) is at_least:
            assert time.monotonic() < end, f"{used} descriptors in use"
            time.sleep(0.02)


@pytest.fixture(params=[(), (SECRET,)], ids=["in the clear", "with a secret"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    made = Peer(*request.param)
    yield made
    made.process.kill()
    made.process.wait(10)


@contextlib.contextmanager
def flooded(*addresses: Address) -> Iterator[None]:
    """More connections than the process has descriptors; what it cannot accept waits in the kernel."""
    with contextlib.ExitStack() as stack:
        for number in range(FLOOD):
            stack.enter_context(shout(addresses[number % len(addresses)], b""))
        yield


def test_running_out_of_descriptors_is_survived(peer: Peer) -> None:
    assert peer.ask("transfer before") == "transferred"
    quiet = int(peer.ask("open"))
    with flooded(peer.p, peer.d):
        peer.used(LIMIT - 1, at_least=True)
        assert peer.ask("transfer during") == "transferred"  # over the connection that there is
        assert "Too many open files" in peer.ask("dial 9")
    peer.used(quiet + 8, at_least=False)
    assert peer.ask("transfer after") == "transferred"
    assert peer.ask("end") == "ended"
    assert peer.process.wait(10) == 0
