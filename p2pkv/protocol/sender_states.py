"""Where a prompt on a P rank stands, and where its conversation with each D rank does: every legal move.

prompt:  HELD -> OFFERED <-> COMPUTED -> RELEASED        (any) -> ENDED
leg:     CLAIMED -> SENDING -> DRAINED -> DONE           (any) -> ENDED
         CLAIMED -> AHEAD -> SENDING or DONE
"""

from __future__ import annotations

from enum import Enum, auto

from p2pkv.protocol.machine import Table


class Prompt(Enum):
    HELD = auto()  # in P's queue
    OFFERED = auto()  # its prefill has begun
    COMPUTED = auto()  # all its tokens are in the pages
    RELEASED = auto()  # nothing will be read from the pages any more
    ENDED = auto()  # failed, aborted or cancelled


class Of(Enum):
    OFFER = auto()
    COMPLETE = auto()
    REVOKE = auto()
    RELEASE = auto()
    END = auto()


PROMPT: Table[Prompt, Of] = {
    Prompt.HELD: {Of.OFFER: Prompt.OFFERED, Of.REVOKE: Prompt.HELD, Of.END: Prompt.ENDED},
    Prompt.OFFERED: {
        Of.OFFER: Prompt.OFFERED,
        Of.COMPLETE: Prompt.COMPUTED,
        Of.REVOKE: Prompt.OFFERED,
        Of.RELEASE: Prompt.RELEASED,
        Of.END: Prompt.ENDED,
    },
    Prompt.COMPUTED: {
        Of.OFFER: Prompt.COMPUTED,
        Of.REVOKE: Prompt.OFFERED,
        Of.RELEASE: Prompt.RELEASED,
        Of.END: Prompt.ENDED,
    },
    Prompt.RELEASED: {},
    Prompt.ENDED: {},
}


class Leg(Enum):
    CLAIMED = auto()  # D's rank waits for this prompt
    AHEAD = auto()  # it takes all of it, although no request for it has come; the pages stay
    SENDING = auto()  # it said which tokens it wants
    DRAINED = auto()  # all of them have been read from the pages
    DONE = auto()  # and are in D's pages
    ENDED = auto()  # failed or cancelled


class On(Enum):
    AHEAD = auto()
    WANT = auto()
    NOTHING = auto()
    DRAIN = auto()
    DONE = auto()
    END = auto()


LEG: Table[Leg, On] = {
    Leg.CLAIMED: {
        On.AHEAD: Leg.AHEAD,
        On.WANT: Leg.SENDING,
        On.NOTHING: Leg.DONE,
        On.END: Leg.ENDED,
    },
    Leg.AHEAD: {On.WANT: Leg.SENDING, On.NOTHING: Leg.DONE, On.END: Leg.ENDED},
    Leg.SENDING: {On.DRAIN: Leg.DRAINED, On.END: Leg.ENDED},
    Leg.DRAINED: {On.DONE: Leg.DONE, On.END: Leg.ENDED},
    Leg.DONE: {},
    Leg.ENDED: {},
}
