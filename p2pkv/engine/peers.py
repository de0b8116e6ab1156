"""What the peers of both sides (`to_decode`, `from_prefill`) have in common: the table of them, and when a
link is too much or stands still."""

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from p2pkv.engine.context import log
from p2pkv.engine.effects import Peer
from p2pkv.protocol.handshake import RowFormat
from p2pkv.protocol.messages import Hello

_Key = TypeVar("_Key")
_Peer = TypeVar("_Peer", bound=Peer)

IDLE_BEATS = 2
"""Heartbeats without a transfer after which P may close a link. D, which sends them, waits for one more."""

IDLE_REASON = "it is idle, and there are more than max_links links; the next request builds it again"


class Peers(Generic[_Key, _Peer]):
    """All peers of one kind, by `key`, and the active ones, which each turn looks at. Any thread may read."""

    def __init__(self) -> None:
        self._all: dict[_Key, _Peer] = {}
        self._active: dict[_Peer, None] = {}

    def add(self, peer: _Peer) -> None:
        """From now on `peer` is the one of its key."""
        self._all[peer.key] = peer

    def remove(self, peer: _Peer) -> None:
        """Forget this peer, unless another is the one of its key by now."""
        if peer in self:
            del self._all[peer.key]

    def get(self, key: _Key) -> _Peer | None:
        return self._all.get(key)

    def __contains__(self, peer: _Peer) -> bool:
        """Whether `peer` is still the one of its key: it was neither removed nor replaced."""
        return self._all.get(peer.key) is peer

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[_Peer]:
        """The peers of now, whatever is added or removed meanwhile."""
        return iter(tuple(self._all.values()))

    def activate(self, peer: _Peer) -> None:
        """Let every turn look at this peer, until one finds nothing to do for it."""
        self._active[peer] = None

    @property
    def active(self) -> list[_Peer]:
        """The peers that this turn looks at."""
        for peer in [peer for peer in self._active if peer not in self]:
            del self._active[peer]
        return list(self._active)


def log_connected(hello: Hello, formats: Sequence[RowFormat], verify: bool) -> None:
    sums = ", with checksums" if verify else ""
    travels = "; ".join(dict.fromkeys(map(str, formats)))
    rank = f"{hello.role} rank {hello.rank} at {hello.address}"
    log.info("%s is connected; what travels: %s%s", rank, travels, sums)


class StallTimer:
    """Whether one message has been a link's next one for too long; those behind it may wait longer."""

    def __init__(self) -> None:
        self._next: object = None
        self._since = 0.0

    def clear(self) -> None:
        """The link is gone: let go of its message, which may hold memory of it."""
        self._next = None

    def check(self, next_one: object, now: float, seconds: float) -> bool:
        """Whether `next_one` (None: nothing is under way) has been next for `seconds`; to be asked often."""
        if next_one is not self._next:
            self._next, self._since = next_one, now
        return next_one is not None and now - self._since > seconds
