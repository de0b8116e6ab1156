"""The engines' processes as the parent sees them: start, order, freeze, kill."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from chaos.engine import Build, main, shared
from chaos.rough import Manner, Relay

from p2pkv.demo.processes import free_ports
from p2pkv.links.base import LinkFactory
from p2pkv.pairing import Address

# Every engine is forked by one process that has imported torch, so that a restart takes no seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["chaos.engine"])


JOIN_SECONDS = 10.0


class Machine:
    """One engine's process, and the next one under its name and address.

    Attributes:
        build: its model and its ranks.
        named: the addresses by which an id may name it.
        outside, inside: what it advertises, and where it listens; a P has a door between the two.
        up: whether it has said that it is ready, and was not told to end.
        frozen: since a SIGSTOP.
        continued: when it last began to run, on the monotonic clock.
        ended: whether it has said that its rank's thread ended, when it was told to.
    """

    def __init__(
        self, name: str, build: Build, place: Address | None = None, instance: Address | None = None,
        links: Callable[[str], LinkFactory] = shared,
    ) -> None:  # fmt: skip
        """`place`: where it listens, and no door before it. `instance`: where the first engine of its
        data-parallel instance is. `links`: those of a rank on a host."""
        self.name = name
        self.build = build
        self._links = links
        first = place or instance or Address("127.0.0.1", free_ports(build.tp))
        self.named = tuple(first.shifted(each * build.tp) for each in range(build.engines))
        self.inside = self.outside = self.named[build.index]
        self.door: Relay | None = None
        if name.startswith("P") and place is None:
            self.inside = Address("127.0.0.1", free_ports(build.tp))
            self.door = Relay(self.outside, self.inside, Manner(open=False), build.tp)
        self.up = self.frozen = self.ended = False
        self.continued = time.monotonic()
        self._process: Any = None
        self.wire: Connection | None = None

    def start(self) -> None:
        self.ended = False
        self.continued = time.monotonic()
        self.wire, theirs = CONTEXT.Pipe()
        self._process = self._spawn(theirs)
        theirs.close()

    def _spawn(self, wire: Connection) -> Any:
        """A process that has `pid`, `kill` and `join`, at the other end of `wire`."""
        life = self.name, self.outside, self.inside, wire, self.build, self._links
        process = CONTEXT.Process(target=main, args=life, daemon=True)
        process.start()
        return process

    def order(self, word: str, **details: Any) -> bool:
        """Tell it something; False if there is nobody to tell."""
        if self.wire is None or not self.up:
            return False
        try:
            self.wire.send_bytes(json.dumps({"do": word, **details}).encode())
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.order("stop")
        self._leave()

    def freeze(self) -> None:
        self.frozen = True
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)
        self.frozen, self.continued = False, time.monotonic()

    def kill(self) -> None:
        """SIGKILL, which ends a frozen process too. Idempotent."""
        self._leave()
        if self._process is not None:
            self._process.kill()
            self._process.join(JOIN_SECONDS)
        if self.wire is not None:
            self.wire.close()
        self._process, self.wire, self.frozen = None, None, False

    def ready(self) -> None:
        self.up = True
        if self.door is not None:
            self.door.manner.open = True

    def _leave(self) -> None:
        self.up = False
        if self.door is not None:
            self.door.manner.open = False


def hear(machines: list[Machine], seconds: float) -> list[tuple[Machine, dict[str, Any] | None]]:
    """What engines have said; None from one whose process has ended."""
    wires = {machine.wire: machine for machine in machines if machine.wire is not None}
    out: list[tuple[Machine, dict[str, Any] | None]] = []
    for wire in wait(list(wires), seconds):
        machine = wires[wire]  # type: ignore[index]
        try:
            while wire.poll():  # type: ignore[union-attr]
                out.append((machine, json.loads(wire.recv_bytes())))  # type: ignore[union-attr]
        except (EOFError, OSError):
            out.append((machine, None))
    return out
