"""Two network namespaces with a cable between them, and engines that run inside."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from chaos import engine, machines, rough

from p2pkv.pairing import Address
from support import commands

TESTS = Path(__file__).parents[1]
HOSTS = {"P": "10.77.0.1", "D": "10.77.0.2"}
PORT = 21000
TOOLS = ("unshare", "nsenter", "ip", "tc")
SECONDS = 10.0
"""No command takes so long."""

MAX_SECONDS = 900
"""The namespaces go by themselves after this, whatever becomes of the test."""


class Unavailable(Exception):
    """There are no network namespaces here; the text says why."""


class Cable:
    """Namespaces P and D, joined, while the context lasts. Entering raises Unavailable."""

    def __init__(self) -> None:
        self._keepers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cable":
        for tool in TOOLS:
            if shutil.which(tool) is None:
                raise Unavailable(f"this needs {', '.join(TOOLS)}, and there is no {tool}")
        try:
            self._lay()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.wait(SECONDS)

    def _lay(self) -> None:
        self._keep("P", [], "--user", "--map-root-user", "--net")
        self._keep("D", self._enter("P", "--user"), "--net")
        self.run("P", "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns",
                 str(self._keepers["D"].pid))  # fmt: skip
        for side, host in HOSTS.items():
            self.run(side, "ip", "addr", "add", f"{host}/24", "dev", "cable")
            self.run(side, "ip", "link", "set", "lo", "up")
            self.run(side, "ip", "link", "set", "cable", "up")

    def _keep(self, side: str, before: list[str], *kinds: str) -> None:
        keeper = subprocess.Popen(
            [*before, "unshare", *kinds, "sleep", str(MAX_SECONDS)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._keepers[side] = keeper
        ours, end = _network(os.getpid()), time.monotonic() + SECONDS
        while _network(keeper.pid) in (ours, "", _network(self._keepers["P"].pid) if side == "D" else ""):
            if keeper.poll() is not None or time.monotonic() > end:
                keeper.kill()
                said = keeper.communicate(timeout=SECONDS)[1].decode().strip()
                raise Unavailable(f"no new network namespace: {said or 'it did not come up'}")
            time.sleep(0.01)

    def _enter(self, side: str, *kinds: str) -> list[str]:
        target = str(self._keepers[side].pid)
        return ["nsenter", "--target", target, *kinds, "--preserve-credentials", "--"]

    def keeper(self, side: str) -> int:
        return self._keepers[side].pid

    def inside(self, side: str) -> list[str]:
        """What to put before a command that is to run there."""
        return self._enter(side, "--user", "--net")

    def run(self, side: str, *command: str) -> str:
        """Run a command there; what it says. Raises Unavailable if it fails."""
        done = commands.run(*self.inside(side), *command, seconds=SECONDS)
        if done.returncode != 0:
            raise Unavailable(f"`{' '.join(command)}` failed in a network namespace: {done.stderr.strip()}")
        return done.stdout

    def sent(self, side: str) -> int:
        (link,) = json.loads(self.run(side, "ip", "-json", "-statistics", "link", "show", "dev", "cable"))
        return int(link["stats64"]["tx"]["bytes"])

    # What is wrong with it.

    def lose(self, side: str) -> None:
        """What this side sends goes to a card that is not there; nobody is told."""
        other = HOSTS["D" if side == "P" else "P"]
        self.run(side, "ip", "neigh", "replace", other, "lladdr", "02:00:00:00:00:99", "dev", "cable",
                 "nud", "permanent")  # fmt: skip

    def find(self, side: str) -> None:
        self.run(side, "ip", "neigh", "del", HOSTS["D" if side == "P" else "P"], "dev", "cable")

    def blackhole(self, side: str) -> None:
        """This side's own kernel has no way to the other."""
        self.run(side, "ip", "route", "add", "blackhole", f"{HOSTS['D' if side == 'P' else 'P']}/32")

    def open(self, side: str) -> None:
        self.run(side, "ip", "route", "del", "blackhole", f"{HOSTS['D' if side == 'P' else 'P']}/32")

    def narrow(self, rate: str) -> None:
        """Both ways take so many bits in a second, such as 4mbit."""
        for side in HOSTS:
            self.run(side, "tc", "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate,
                     "burst", "16kb", "latency", "50ms")  # fmt: skip

    def widen(self) -> None:
        for side in HOSTS:
            self.run(side, "tc", "qdisc", "del", "dev", "cable", "root")


def laid() -> Iterator[Cable]:
    """A cable, for a fixture; the test is skipped, with the reason, where there can be none."""
    try:
        made = Cable().__enter__()
    except Unavailable as reason:
        pytest.skip(str(reason))
    try:
        yield made
    finally:
        made.__exit__()


def _network(pid: int) -> str:
    """Which network namespace a process is in; "" if there is no telling."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


class Dweller(machines.Machine):
    """An engine in a namespace, whose links are TCP: memory is shared with nobody there."""

    def __init__(self, name: str, cable: Cable) -> None:
        super().__init__(name, engine.Build(), Address(HOSTS[name[0]], PORT))
        self._cable = cable

    def _spawn(self, wire: Connection) -> Any:
        command = [sys.executable, "-m", "chaos.namespaces", self.name, str(self.outside), str(wire.fileno())]
        paths = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
        return _Process(
            [*self._cable.inside(self.name[0]), *command],
            pass_fds=[wire.fileno()],
            env=os.environ | {"PYTHONPATH": paths},
        )


class _Process(subprocess.Popen[bytes]):
    """As multiprocessing has them."""

    def join(self, seconds: float) -> None:
        self.wait(seconds)


if __name__ == "__main__":  # a Dweller's process
    name, place, descriptor = sys.argv[1:]
    here = Address.parse(place)
    engine.main(name, here, here, Connection(int(descriptor)), links=rough.tcp)
