"""What the parts of one rank share."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from p2pkv.config import Options
from p2pkv.control.endpoint import Endpoint, Line
from p2pkv.control.throttle import Throttle
from p2pkv.engine.commands import Event
from p2pkv.engine.copies import Copies
from p2pkv.engine.counters import Counters
from p2pkv.engine.steps import Steps
from p2pkv.links.base import LinkFactory
from p2pkv.pages.dense import Rectangles, seen_as
from p2pkv.pages.geometry import PagedCache
from p2pkv.protocol.handshake import Refused
from p2pkv.protocol.messages import AnyMessage, Hello, encode
from p2pkv.protocol.wire import Wire, wire_between

log = logging.getLogger("p2pkv.engine")
log.addFilter(Throttle())

BURST = 4
"""Messages copied for one peer before the others, and the control plane, get their turn. Each turn of the
engine thread may have to wait for the interpreter's lock, so a few copies share one."""


@dataclass
class Context:
    """One rank's belongings. `hello.to` is empty; whoever dials fills it in."""

    hello: Hello
    options: Options
    cache: PagedCache
    links: LinkFactory
    endpoint: Endpoint
    steps: Steps
    emit: Callable[[Event], None]
    counters: Counters = field(default_factory=Counters)
    reading: threading.Lock = field(default_factory=threading.Lock)
    """Held while gathers are launched: who holds it knows that none is being launched."""
    revoked: Counter[str] = field(default_factory=Counter)
    """Prompts whose pages were taken back, until the engine thread has been told; under `reading`."""

    copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        self.copies = Copies(self.cache.fence)
        self.counters.gauges["copies"] = lambda: len(self.copies)

    def tell(self, line: Line, message: AnyMessage) -> bool:
        return line.send(encode(message))

    def form(self, theirs: Hello) -> tuple[Wire, Rectangles]:
        """How rows travel between this rank and a peer that `judge` has accepted, and our cache in that form.

        Raises Refused if our pages cannot be brought into it.
        """
        wire = wire_between(self.hello.cache, theirs.cache)
        assert wire is not None
        try:
            pages = seen_as(self.cache, wire.codec)
        except ValueError as error:
            raise Refused(f"{self.hello.address} and {theirs.address}: {error}") from None
        if (pages.unit_tokens, pages.row_bytes) != (wire.unit, wire.row_bytes):
            raise Refused(
                f"{self.hello.address} holds rows of {pages.row_bytes} bytes for {pages.unit_tokens} tokens, "
                f"which its Hello does not say; {theirs.address} expects {wire.row_bytes} for {wire.unit}"
            )
        return wire, pages

    @property
    def beat(self) -> float:
        """Seconds between two signs of life about a transfer."""
        return min(1.0, self.options.lease_seconds / 6)


class Ends:
    """Keys that have ended, and why, for a while: bounded in number and in time."""

    MOST = 1024

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._reasons: dict[str, tuple[float, str]] = {}
        self._order: deque[tuple[float, str]] = deque()

    def add(self, key: str, reason: str, now: float) -> None:
        self._reasons[key] = now, reason
        self._order.append((now, key))
        self.expire(now)

    def get(self, key: str) -> str | None:
        found = self._reasons.get(key)
        return found[1] if found is not None else None

    def discard(self, key: str) -> None:
        self._reasons.pop(key, None)

    def expire(self, now: float) -> None:
        while self._order and (len(self._order) > self.MOST or now - self._order[0][0] > self.seconds):
            since, key = self._order.popleft()
            if key in self._reasons and self._reasons[key][0] == since:
                del self._reasons[key]

    def __len__(self) -> int:
        return len(self._reasons)
