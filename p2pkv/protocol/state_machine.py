"""States that move by a table, and what they want done. Every legal move is written down as data.

What we did wrong and what a peer did wrong are two errors: a LocalProtocolError is a bug of ours, a
RemoteProtocolError ends the peer's transfer and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Generic, TypeVar

from msgspec import Struct

from p2pkv.protocol.messages import AnyMessage, Chunk, Grant, Piece


class ProtocolError(Exception):
    """A move that the table does not allow."""


class LocalProtocolError(ProtocolError):
    """This side asked for an illegal move."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what it may not send in this state, or something that makes no sense."""


State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=str)

Table = Mapping[State, Mapping[Event, State]]
"""For each state, the events that are legal in it and the states that they lead to."""


class Machine(Generic[State, Event]):
    """One state and the table by which it moves."""

    __slots__ = ("ended", "name", "state", "table")

    def __init__(self, name: str, table: Table[State, Event], start: State) -> None:
        self.name = name
        self.table = table
        self.state = start
        self.ended = not table[start]
        """Whether no move leads out of this state."""

    def remote(self, event: Event) -> None:
        """Move by something that the peer did. Raises RemoteProtocolError."""
        self.local(event, RemoteProtocolError)

    def local(self, event: Event, error: type[ProtocolError] = LocalProtocolError) -> None:
        """Move by something that this side does. Raises LocalProtocolError."""
        to = self.table[self.state].get(event)
        if to is None:
            raise error(f"{self.name}: {event} in state {self.state.name}")
        self.state = to
        self.ended = not self.table[to]


@dataclass(frozen=True)
class Terms:
    """What holds for every transfer of a rank.

    `lease`: seconds without an answer after which a load ends, and P frees the blocks; a paused P also frees
    those of which D takes nothing for so long. `wait`: seconds that D waits for P to begin, and again for
    blocks, and P for a D that claims a prompt and takes nothing. `stall`: seconds without a byte after which
    a load ends. `chunk_bytes`: bytes of a full message of P's.
    """

    lease: float
    wait: float = inf
    stall: float = inf
    chunk_bytes: int = 0


class Decision(Struct, frozen=True):
    """What a machine wants done. The machines only decide; an engine does. Ranks are the peer's."""


class SendTo(Decision, frozen=True):
    rank: int
    message: AnyMessage


class Transmit(Decision, frozen=True):
    """P: this chunk has been granted. Gather it into the link's next send and commit, in this order. Without
    pieces it is filler: the grant must be obeyed, but its bytes will be dropped."""

    rank: int
    grant: Grant
    pieces: tuple[Piece, ...]


class Post(Decision, frozen=True):
    """D: post a receive for this chunk as soon as its link has room, then call `posted`."""

    rank: int
    chunk: Chunk


class Offered(Decision, frozen=True):
    """D: all ranks with a part of the prompt have begun it. `generation`: P's weights; None: no such rank."""

    generation: str | None = ""


class Finished(Decision, frozen=True):
    """The one outcome of a transfer; `reason`: "" if it succeeded. P: no gather will read the blocks."""

    ok: bool
    reason: str = ""
