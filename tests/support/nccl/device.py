"""The device beside a simulated NCCL: a CPU with streams on which events can be recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from p2pkv.links.gpu import Allocate
from support.nccl.simulated import Op, SimulatedNccl


class SimulatedEvent:
    def __init__(self, op: Op | None, ended: Callable[[], bool]) -> None:
        self._op = op
        self._ended = ended

    def ready(self) -> bool:
        return self._op is None or self._op.done or self._ended()


class SimulatedStream:
    _numbers = itertools.count(1000)

    def __init__(self, nccl: SimulatedNccl) -> None:
        self.number = next(self._numbers)
        self._nccl = nccl

    def record(self) -> SimulatedEvent:
        """It covers what NCCL has launched, and not what it is about to."""
        nccl, number = self._nccl, self.number
        return SimulatedEvent(nccl.last.get(number), lambda: nccl.stream_ended(number))

    def follow(self, event: SimulatedEvent) -> None:
        assert event.ready(), "an operation would wait in its stream"

    def close(self) -> None:
        if not self.record().ready():
            self._nccl.violations.append("a stream was closed with something on it")


class SimulatedDevice:
    """A CPU that looks like a device of its own to NCCL links."""

    def __init__(self, nccl: SimulatedNccl, name: str = "simulated:0", processors: int = 512) -> None:
        self.name = name
        self.processors = processors
        self._nccl = nccl

    def enter(self) -> None:
        pass

    def memory(self, nbytes: int, allocate: Allocate | None = None) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8) if allocate is None else allocate(nbytes)

    def free_bytes(self) -> int:
        return 0

    def stream(self) -> SimulatedStream:
        return SimulatedStream(self._nccl)

    def here(self) -> SimulatedEvent:
        return SimulatedEvent(None, lambda: True)
