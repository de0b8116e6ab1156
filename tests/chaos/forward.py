"""A made-up forward thread: it tells the ranks of an engine what vLLM would, and judges what it hears back.

It has no clock and never sleeps: whoever runs it, in a process of its own or on a virtual clock, says what
time it is, and lets pass the seconds that its turns yield.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from chaos.crew import Crew
from chaos.model import Memory

LAYER_SECONDS = 0.001
"""What a forward takes for one."""


@dataclass
class Forward(ABC):
    """`say(kind=value, ...)` tells the run what has happened; `broken` that something must not be so."""

    crew: Crew
    memory: Memory
    say: Callable[..., None]
    broken: Callable[[str], None]

    @abstractmethod
    def order(self, order: dict[str, Any], now: float) -> None:
        """What a P or a D is told to do."""

    @abstractmethod
    def turn(self, now: float) -> Iterator[float]:
        """One turn; yields seconds that it takes. Raises Violation."""

    @abstractmethod
    def empty(self) -> bool:
        """Give back what is kept for later only; whether every block is free then."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether only an order or an event of a rank gives it something to do."""
