"""What the peers of both sides have in common: the table of them, and when a link is too much or stands
still.

`to_decode` has the ranks of D that have sent Hello to a rank of P, `from_prefill` the ranks of P that a
rank of D has dialed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from p2pkv.engine.context import log
from p2pkv.protocol.handshake import RowFormat
from p2pkv.protocol.messages import Hello

_Key = TypeVar("_Key")


class Keyed(Protocol):
    """A peer that can be found by its key."""

    @property
    def key(self) -> Any: ...


_Keyed = TypeVar("_Keyed", bound=Keyed)
_Peer = TypeVar("_Peer")

IDLE_BEATS = 2
"""Heartbeats without a transfer after which P may close a link. D waits for one more, since P decides by D's
heartbeats."""

IDLE_REASON = "it is idle, and there are more than max_links links; the next request builds it again"


class Peers(Generic[_Key, _Keyed]):
    """All peers of one kind, by their `key`, and the active ones, which every turn looks at.

    The engine thread writes both tables, by the methods of this class only; any thread may read.
    """

    def __init__(self) -> None:
        self._all: dict[_Key, _Keyed] = {}
        self._active: dict[_Keyed, None] = {}

    def add(self, peer: _Keyed) -> None:
        """From now on `peer` is the one of its key."""
        self._all[peer.key] = peer

    def remove(self, peer: _Keyed) -> None:
        """Forget this peer, unless another is the one of its key by now."""
        if peer in self:
            del self._all[peer.key]

    def get(self, key: _Key) -> _Keyed | None:
        return self._all.get(key)

    def __contains__(self, peer: _Keyed) -> bool:
        """Whether `peer` is still the one of its key: it was neither removed nor replaced."""
        return self._all.get(peer.key) is peer

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[_Keyed]:
        """The peers of now, whatever is added or removed meanwhile."""
        return iter(tuple(self._all.values()))

    def activate(self, peer: _Keyed) -> None:
        """Let every turn look at this peer, until `deactivate`."""
        self._active[peer] = None

    def deactivate(self, peer: _Keyed) -> None:
        self._active.pop(peer, None)

    @property
    def active(self) -> list[_Keyed]:
        """The peers that this turn looks at."""
        for peer in [peer for peer in self._active if peer not in self]:
            del self._active[peer]
        return list(self._active)


def log_connected(hello: Hello, formats: Sequence[RowFormat], verify: bool) -> None:
    """Log that this rank is connected, and the form in which rows travel to it or from it."""
    sums = ", with checksums" if verify else ""
    travels = "; ".join(dict.fromkeys(map(str, formats)))
    rank = f"{hello.role} rank {hello.rank} at {hello.address}"
    log.info("%s is connected; what travels: %s%s", rank, travels, sums)


class Overdue:
    """Whether a link stands still: whether one message has been its next one for too long.

    A slow link does not stand still: the messages behind the next one wait longer than that.
    """

    def __init__(self) -> None:
        self._next: object = None
        self._since = 0.0

    def clear(self) -> None:
        """The link is gone: let go of its message, which may hold memory of it."""
        self._next = None

    def check(self, next_one: object, now: float, seconds: float) -> bool:
        """Whether `next_one` (None: nothing is under way) has been the next for longer; to be asked often."""
        if next_one is not self._next:
            self._next, self._since = next_one, now
        return next_one is not None and now - self._since > seconds


def surplus(
    excess: int, idle: Iterable[_Peer], used: Callable[[_Peer], float | tuple[bool, float]]
) -> list[_Peer]:
    """The peers whose links to close, where there are so many too many: idle ones, the longest unused first,
    and before them those that no request has used.

    A peer that is not idle keeps its link, so too many may be left under load.
    """
    return sorted(idle, key=used)[:excess] if excess > 0 else []
