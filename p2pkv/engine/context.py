"""What the parts of one rank share: what it was made with, effects, timers, counters, copies under way."""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from p2pkv.config import Options, Role
from p2pkv.control.endpoint import Connection, Endpoint
from p2pkv.device import PASSED, Fence
from p2pkv.engine.core_liveness import Liveness
from p2pkv.engine.effects import Effects, Peer, Timers
from p2pkv.kv.cache import RankCache, Rectangles
from p2pkv.links.base import LinkFactory
from p2pkv.log import Throttle
from p2pkv.protocol.handshake import Refused, RowFormat, row_formats
from p2pkv.protocol.messages import AnyMessage, Hello, encode
from p2pkv.protocol.state_machine import Terms


class Counters:
    """Named numbers of a rank. The engine thread writes, any may read: so a gauge copies a dict's values."""

    NAMES = (
        "bytes_sent",  # KV bytes gathered and handed to a link
        "bytes_before_last_layer",  # of those, taken by D before P had computed the whole prompt
        "bytes_prefetched",  # KV bytes that came to D before the request did
        "bytes_scattered",  # KV bytes received and written to blocks
        "chunks_sent",
        "chunks_filler",  # granted, but sent as filler
        "chunks_scattered",
        "chunks_dropped",  # received for a transfer that had ended
        "chunks_corrupt",  # received with another checksum than P had sent
        "chunks_waited",  # on D announced, on P granted, and no room in the staging at first
        "transfers_sent",
        "transfers_loaded",
        "transfers_failed",
        "messages_bad",  # not messages of this protocol
        "messages_refused",  # messages that the protocol does not allow
        "handshakes_failed",  # connections that did not come about: strangers here, no members there
        "links_aborted",
        "links_preconnected",  # links of D that came up before a request needed them
    )

    def __init__(self) -> None:
        self.values = dict.fromkeys(self.NAMES, 0)
        self.gauges: dict[str, list[Callable[[], int]]] = {}

    def add(self, name: str, value: int = 1) -> None:
        self.values[name] += value

    def add_gauges(self, **gauges: Callable[[], int]) -> None:
        """Gauges of one part of the rank. One of the same name is added up with those of other parts."""
        for name, read in gauges.items():
            self.gauges.setdefault(name, []).append(read)

    def snapshot(self) -> dict[str, int]:
        return self.values | {name: sum(read() for read in parts) for name, parts in self.gauges.items()}


class ExpiringDict:
    """Texts by key. Each stays for `seconds` after it was added; beyond `most` the oldest go first."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._known: dict[str, tuple[float, str]] = {}
        """The oldest first."""

    def add(self, key: str, value: str, now: float) -> None:
        self.discard(key)
        self._known[key] = now, value
        self.expire(now)

    def get(self, key: str) -> str | None:
        """The text as of the last `expire`."""
        found = self._known.get(key)
        return found[1] if found is not None else None

    def discard(self, key: str) -> None:
        self._known.pop(key, None)

    def expire(self, now: float) -> None:
        while self._known:
            key = next(iter(self._known))
            if len(self._known) <= self._most and now - self._known[key][0] <= self._seconds:
                return
            del self._known[key]

    def __len__(self) -> int:
        return len(self._known)


Action = Callable[[float], None]
"""What to do; called with the time."""


@dataclass(eq=False, slots=True)
class _Launch:
    """A copy for one transfer, and what waits for it."""

    fence: Fence
    key: str
    actions: deque[Action] = field(default_factory=deque)


class CopyQueue:
    """Launched copies. They share a stream, so they are done in their order. `wait` is for any thread."""

    def __init__(self, record: Callable[[], Fence] | None) -> None:
        """`record`: makes a fence behind what has been launched; None: all is done when it is launched."""
        self._record = record
        self._launches: deque[_Launch] = deque()
        self._last: dict[str, _Launch] = {}

    def launched(self, key: str) -> bool:
        """A copy for this transfer was queued on the current stream. Whether all of its copies are done."""
        if self._record is not None:
            fence = self._record()
            if self._launches or not fence.ready():
                launch = _Launch(fence, key)
                self._launches.append(launch)
                self._last[key] = launch
        return key not in self._last

    def then(self, key: str, action: Action, now: float) -> None:
        """Do this when all copies launched for this transfer are done: at once, if none is under way."""
        launch = self._last.get(key)
        if launch is None:
            action(now)
        else:
            launch.actions.append(action)

    def poll(self, now: float) -> None:
        """Run, in order, the actions that waited for copies that are done by now."""
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
        """Wait until the device has made all of them. The actions that waited for them are dropped."""
        if self._launches:
            self._launches[-1].fence.wait()
        self._launches.clear()
        self._last.clear()

    def __len__(self) -> int:
        return len(self._launches)


class Revocations:
    """Prompts whose blocks were taken back, and how often, until the engine thread has carried that out.
    `reading` guards `keys`, and is held while gathers are launched."""

    def __init__(self) -> None:
        self.reading = threading.Lock()
        self.keys: Counter[str] = Counter()

    def add(self, keys: Iterable[str]) -> None:
        """The forward thread takes these back; on return no gather for them will be launched."""
        with self.reading:
            self.keys.update(keys)

    def carried_out(self, key: str) -> None:
        with self.reading:
            self.keys.subtract([key])
            self.keys = +self.keys


log = logging.getLogger("p2pkv.engine")
log.addFilter(Throttle())

LOOK_SECONDS = 0.25
"""Seconds between two looks at the engine core and at all peers, also those that have nothing to do."""

MAX_IDLE_WORK = 64
"""Copies that may wait to be prepared; beyond that the oldest are not prepared."""

BURST, MAX_BURST, BURST_BYTES = 4, 32, 4 << 20
"""Messages copied for one peer before the others, and the control plane, get their turn: as many as hold
BURST_BYTES, from BURST to MAX_BURST; on a device, where a copy is only launched, MAX_BURST. Each turn of the
engine thread may have to wait for the interpreter's lock, so a few copies share one."""

LARGE_COPY = 256 << 10
"""Bytes from which on a copy on a CPU takes longer than handing a message to libzmq."""


@dataclass
class Context:
    """What one rank works with. `hello.to` is empty until a peer is dialed.

    Attributes:
        copies_synchronously: a copy has been made when its call returns, as on a CPU.
        outbox: peers whose connections may still hold messages that were handed over.
        idle_work: what can be done ahead of a copy on a device, while the engine waits for a peer; the oldest
            may be left out.
    """

    hello: Hello
    options: Options
    cache: RankCache
    links: LinkFactory
    endpoint: Endpoint
    steps: Liveness
    effects: Effects = field(default_factory=deque)
    outbox: deque[Peer] = field(default_factory=deque)
    idle_work: deque[Callable[[], None]] = field(default_factory=partial(deque, maxlen=MAX_IDLE_WORK))
    timers: Timers = field(default_factory=Timers)
    counters: Counters = field(default_factory=Counters)
    revoked: Revocations = field(default_factory=Revocations)
    copies: CopyQueue = field(init=False)
    terms: Terms = field(init=False)
    copies_synchronously: bool = field(init=False)

    def __post_init__(self) -> None:
        limits = self.options
        seconds = limits.lease_seconds, limits.wait_seconds, limits.stall_seconds
        self.terms = Terms(*seconds, limits.chunk_bytes)
        self.copies_synchronously = self.cache.fence() is PASSED
        self.copies = CopyQueue(None if self.copies_synchronously else self.cache.fence)
        self.counters.add_gauges(copies=lambda: len(self.copies), links_stuck=lambda: self.links.stuck)

    def hello_for(self, role: Role) -> Hello:
        """Our Hello to the other role's ranks. On the wire each connection has one P and one D."""
        if self.hello.role == role:
            return self.hello
        return replace(self.hello, role=role, prefetch=self.hello.prefetch and role == "D")

    def burst(self, nbytes: int) -> int:
        """How many messages of about this size are copied for one peer in a turn."""
        if not self.copies_synchronously:
            return MAX_BURST
        return max(BURST, min(MAX_BURST, BURST_BYTES // max(1, nbytes)))

    def blocks_thread(self, nbytes: int, waits: bool = False) -> bool:
        """Whether a copy of so many bytes takes the engine's thread longer than sending what is held.
        `waits`: the peer waits for what is held, so that goes first on a device, too."""
        return nbytes >= LARGE_COPY if self.copies_synchronously else waits

    def answer(self, connection: Connection, message: AnyMessage) -> bool:
        """Send this at once; False if the connection is gone or its queue is full."""
        return connection.send(encode(message))

    def form(self, theirs: Hello) -> tuple[tuple[RowFormat, ...], tuple[Rectangles, ...]]:
        """How rows of each KV group travel between this rank and a peer that `negotiate` has accepted, and
        our cache in that form. Raises Refused if our blocks cannot be brought into it."""
        wires = row_formats(self.hello.cache, theirs.cache)
        try:
            rows = self.cache.seen_as([wire.codec for wire in wires])
        except ValueError as error:
            raise Refused(f"{self.hello.address} and {theirs.address}: {error}") from None
        for ours, wire in zip(rows, wires, strict=True):
            if (ours.unit_tokens, ours.row_bytes) != (wire.unit, wire.row_bytes):
                raise Refused(
                    f"{self.hello.address} holds rows of {ours.row_bytes} bytes for {ours.unit_tokens} "
                    f"tokens, which is not what its Hello has; {theirs.address} expects {wire.row_bytes} for "
                    f"{wire.unit}"
                )
        return wires, rows

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats."""
        return min(1.0, self.options.lease_seconds / 6)
