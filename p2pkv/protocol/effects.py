"""What a sender or a receiver wants done. The machines only decide; an engine does.

Ranks are those of the peer's engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2pkv.protocol.messages import AnyMessage, Chunk, Grant, Piece


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this message to a rank of the peer."""

    rank: int
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Transmit:
    """P: this chunk has been granted. Gather it into the link's next send and commit, in this order.

    Without pieces it is void: the grant must be obeyed, but its bytes will be dropped.
    """

    rank: int
    grant: Grant
    pieces: tuple[Piece, ...]

    @property
    def void(self) -> bool:
        return not self.pieces


@dataclass(frozen=True, slots=True)
class Post:
    """D: post a receive for this chunk as soon as its link has room, then call `posted`."""

    rank: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Released:
    """P: no gather will read this prompt's pages any more."""


@dataclass(frozen=True, slots=True)
class Offered:
    """D: every rank that holds a part of this prompt has begun its prefill."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The one outcome of a transfer; `reason` is empty when it succeeded."""

    ok: bool
    reason: str = ""


Effect = Tell | Transmit | Post | Released | Offered | Finished
