"""Where a load on a D rank stands: every legal move.

WAITING -> OFFERED -> LOADING -> DONE         (any) -> ENDED
           OFFERED -> AHEAD -> LOADING or DONE
"""

from __future__ import annotations

from enum import Enum, auto

from p2pkv.protocol.machine import Table


class Load(Enum):
    WAITING = auto()  # P has not begun
    OFFERED = auto()  # every source has begun
    AHEAD = auto()  # P pushes it, although no request for it has come to D
    LOADING = auto()  # D has said what it wants
    DONE = auto()  # all of it is in D's pages
    ENDED = auto()  # failed or cancelled


class On(Enum):
    OFFERED = auto()
    AHEAD = auto()
    WANT = auto()
    NOTHING = auto()
    COMPLETE = auto()
    END = auto()


LOAD: Table[Load, On] = {
    Load.WAITING: {On.OFFERED: Load.OFFERED, On.NOTHING: Load.DONE, On.END: Load.ENDED},
    Load.OFFERED: {
        On.AHEAD: Load.AHEAD,
        On.WANT: Load.LOADING,
        On.NOTHING: Load.DONE,
        On.END: Load.ENDED,
    },
    Load.AHEAD: {On.WANT: Load.LOADING, On.NOTHING: Load.DONE, On.END: Load.ENDED},
    Load.LOADING: {On.COMPLETE: Load.DONE, On.END: Load.ENDED},
    Load.DONE: {},
    Load.ENDED: {},
}
