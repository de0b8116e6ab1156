"""Waiting for a condition, with a deadline."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

DEADLINE = 10.0


async def eventually(
    condition: Callable[[], bool | Awaitable[Any]], what: str = "", seconds: float = DEADLINE
) -> None:
    """Waits until `condition`, which may be a coroutine function, is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return
        assert time.monotonic() < end, f"{what or condition} did not come true in {seconds:g} s"
        await asyncio.sleep(0.005)


def wait_for(condition: Callable[[], object], seconds: float = 20.0, what: str = "the condition") -> None:
    """`eventually` where there is no event loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true in {seconds:g} s"
        time.sleep(0.0005)
