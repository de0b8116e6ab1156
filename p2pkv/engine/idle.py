"""Peers with nothing under way: how often they are looked at, and which links to close.

When there are more than `max_links`, idle ones are closed, the longest unused first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

_Peer = TypeVar("_Peer")

IDLE_BEATS = 2
"""Beats without a transfer after which P may close a link; D, whose word P goes by, waits one more."""

LOOK_SECONDS = 0.25
"""Between two looks at all peers; in the turns between only those are looked at that have something to do."""

FORGOTTEN_SECONDS = 180.0
"""After so long without a transfer D has hung up, which nobody tells P: it closes its end too."""

REASON = "it is idle, and there are more than max_links links; the next request builds it again"


def surplus(
    linked: Iterable[_Peer], most: int, idle: Callable[[_Peer], bool], used: Callable[[_Peer], float]
) -> list[_Peer]:
    """Those of `linked` beyond `most` that are idle; `used` says when each was last wanted.

    Who is not idle keeps its link, so there may be more than `most` of them under load.
    """
    peers = list(linked)
    excess = len(peers) - most
    if excess <= 0:
        return []
    return sorted(filter(idle, peers), key=used)[:excess]
