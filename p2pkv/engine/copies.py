"""Copies that the device has been told to make, and what waits for them.

On CUDA a gather or scatter is only queued when the call returns. What may happen only when it is done
waits here: pages given back, a load reported. On a CPU a copy has ended by then, and nothing ever waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2pkv.pages.device import Fence

Action = Callable[[float], None]
"""What to do, told the time."""


@dataclass(eq=False, slots=True)
class _Launch:
    """A copy for one transfer, and what waits for it."""

    fence: Fence
    key: str
    actions: deque[Action] = field(default_factory=deque)


class Copies:
    """Launched copies in their order. They share a stream, so they are done in that order.

    All calls come from the engine thread but `wait`, which is for any.
    """

    def __init__(self, record: Callable[[], Fence]) -> None:
        self._record = record
        self._launches: deque[_Launch] = deque()
        self._last: dict[str, _Launch] = {}

    def launched(self, key: str) -> None:
        """Note that a copy for this transfer has just been queued on the current stream."""
        fence = self._record()
        if not self._launches and fence.ready():
            return
        launch = _Launch(fence, key)
        self._launches.append(launch)
        self._last[key] = launch

    def then(self, key: str, action: Action, now: float) -> None:
        """Do this when all copies launched for this transfer are done: at once, if none is under way."""
        launch = self._last.get(key)
        if launch is None:
            action(now)
        else:
            launch.actions.append(action)

    def poll(self, now: float) -> None:
        """Do what the copies that are done by now were waited for, in order."""
        while self._launches and self._launches[0].fence.ready():
            launch = self._launches[0]
            while launch.actions:
                launch.actions.popleft()(now)
            self._launches.popleft()
            if self._last.get(launch.key) is launch:
                del self._last[launch.key]

    def wait(self, keys: Iterable[str]) -> None:
        """Wait for the device, never for a peer, until all copies launched for these transfers are done."""
        for key in keys:
            if launch := self._last.get(key):
                launch.fence.wait()

    def close(self) -> None:
        """Wait until the device has made all of them; what waits for them will not happen."""
        if self._launches:
            self._launches[-1].fence.wait()
        self._launches.clear()
        self._last.clear()

    def __len__(self) -> int:
        return len(self._launches)
