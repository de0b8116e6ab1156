"""A thread that breaks a rank's links when the engine's thread hangs in a call to the device.

A call to CUDA may wait for all that runs on the device, and an operation of a link runs until its peer has
done its part. The thread that would notice that the peer is dead, and abort the link, is the one that waits.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from p2pkv.links.base import LinkFactory

LOOKS = 8
"""Looks in the time that a turn may take."""

CLOSE_SECONDS = 1.0
"""How long `close` waits for the thread."""


class Watchdog:
    """Watches how long the turns of the links' owner take. Close it."""

    def __init__(self, links: LinkFactory, seconds: float) -> None:
        """`seconds`: the longest turn; a lease, after which peers give this rank up anyway."""
        self._links = links
        self._seconds = seconds
        self._began: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="p2pkv-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The owner does one turn inside."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def close(self) -> None:
        """The owner does no more turns: end the thread, unless it is inside a call that does not return."""
        self._over.set()
        self._thread.join(CLOSE_SECONDS)

    def _main(self) -> None:
        look, rescued = self._seconds / LOOKS, (0.0, 0)
        before = time.monotonic()
        while not self._over.wait(look):
            now, began = time.monotonic(), self._began
            late, before = now - before > 2 * look, now
            if began is None or late:  # late: the whole process was held up, and not by the device
                continue
            times = rescued[1] if rescued[0] == began else 0
            if now - began > (times + 1) * self._seconds:
                rescued = began, times + 1
                reason = (
                    f"the engine has been in one turn for {now - began:.1f} s: it hangs in a call to the "
                    "device, which may wait for a peer's kernels"
                )
                self._links.rescue(reason, wherever=times > 0)
