"""A made-up forward thread: it tells the ranks of an engine what vLLM would, and judges what it hears back.

It has no clock and never sleeps: whoever runs it, in a process of its own or on a virtual clock, says what
time it is, and lets pass the seconds that its turns yield.
"""

from collections.abc import Callable
from dataclasses import dataclass

from chaos.crew import Crew
from chaos.model import Memory

LAYER_SECONDS = 0.001
"""What a forward takes for one."""


@dataclass
class Forward:
    """`say(kind=value, ...)` tells the run what has happened; `broken` that something must not be so.

    A P and a D each have `order` (what it is told to do), `turn` (a generator of the seconds that it takes;
    raises Violation), `empty` (gives back what is kept for later only; whether every block is free then) and
    `idle` (whether only an order or an event of a rank gives it something to do).
    """

    crew: Crew
    memory: Memory
    say: Callable[..., None]
    broken: Callable[[str], None]
