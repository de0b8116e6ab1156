"""Whole engines of `ranks_support.Player`s: threads of this process, or a process for each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
from engine_support import Geometry
from ranks_support import DEADLINE, OPTIONS, Crew, Player

from p2pkv.demo.processes import free_ports
from p2pkv.links import make_factory
from p2pkv.links.base import LinkFactory
from p2pkv.pairing import Address

SWITCH_SECONDS = 200e-6


class Threads:
    """An engine whose ranks are threads of this process; see `short_turns`."""

    def __init__(self, role: str, geometry: Geometry, links: Callable[[], LinkFactory]) -> None:
        port = free_ports(geometry.world)
        self.address, self.geometry = Address("127.0.0.1", port), geometry
        self._players = [Player(role, geometry, rank, port, links()) for rank in range(geometry.world)]

    def each(self, method: str, *args: Any) -> list[Any]:
        return [getattr(player, method)(*args) for player in self._players]

    def close(self) -> None:
        self.each("stop")


class Processes:
    """An engine with a process for each rank, over the host link; `close` ends them all."""

    def __init__(self, role: str, geometry: Geometry) -> None:
        port = free_ports(geometry.world)
        self.address, self.geometry = Address("127.0.0.1", port), geometry
        context = _forkserver()
        self._pipes: list[Connection] = []
        self._children = []
        for rank in range(geometry.world):
            ours, theirs = context.Pipe()
            child = context.Process(target=_play, args=(theirs, role, geometry, rank, port), daemon=True)
            child.start()
            theirs.close()
            self._pipes.append(ours)
            self._children.append(child)

    def each(self, method: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # whoever has gone is named when it does not answer
                pipe.send((method, args))
        return [self._hear(rank) for rank in range(len(self._pipes))]

    def close(self) -> None:
        """Ends by itself who can; kills the rest, and says so."""
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            child.join(10.0)
        late = [child for child in self._children if child.is_alive()]
        for child in late:
            child.kill()
            child.join(10.0)
        codes = [child.exitcode for child in self._children]
        assert not any(codes), f"the ranks' processes ended with {codes}"

    def _hear(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        assert pipe.poll(2 * DEADLINE), f"rank {rank} of {self.address} does not answer"
        try:
            error, answer = pipe.recv()
        except (EOFError, OSError):
            self._children[rank].join(10.0)
            code = self._children[rank].exitcode
            raise AssertionError(f"rank {rank} of {self.address} ended with {code}") from None
        assert not error, error
        return answer


def _forkserver() -> Any:
    """A process that has imported torch and has one thread: to fork it is quick, and safe."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "p2pkv.engine.thread", "p2pkv.demo.processes"])
    with patch.dict(os.environ, {"OPENBLAS_NUM_THREADS": "1"}):  # numpy starts threads when imported
        forkserver.ensure_running()
    return context


def _play(pipe: Connection, role: str, geometry: Geometry, rank: int, port: int) -> None:
    """A rank's process: do as the pipe says, until it is closed."""
    torch.set_num_threads(1)
    links = make_factory("host", host="127.0.0.1", staging_bytes=OPTIONS["staging_bytes"])
    player = Player(role, geometry, rank, port, links)
    try:
        while True:
            method, args = pipe.recv()
            try:
                pipe.send(("", getattr(player, method)(*args)))
            except AssertionError:
                pipe.send((traceback.format_exc(), None))
    except (EOFError, OSError):
        player.stop()


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Many engine threads hand on the interpreter's lock sooner, as the connector sees to in vLLM."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def both(make_p: Callable[[], Any], make_d: Callable[[], Any]) -> Iterator[tuple[Crew, Crew]]:
    """A P and a D, ended at the end."""
    with contextlib.closing(make_p()) as p, contextlib.closing(make_d()) as d:
        yield p, d
