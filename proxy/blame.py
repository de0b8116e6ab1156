"""Who is to blame when a call to an instance ends, and what becomes of its request. No IO, no state.

`assign_blame` alone decides this, by these rules:

- A 4xx of D is the client's mistake: D answers the client, so D decides. A request that P refuses and D
  accepts is served without this P. The P is charged if it denies access that D grants (their keys differ),
  or if another P accepts the request (this one lacks an adapter, or has a shorter --max-model-len). If every
  P refuses it, none is charged, or a client could have all of them paused. Then a D whose stream fails before
  a token is charged only if another D answers, as vLLM may report a client's mistake like this.
- P's failure before D's first token ends the attempt. In three cases D goes on and decides: a stopped P tells
  D itself; a silent P may be alive; so may one that no longer pings but whose /health answers.
- D's first token proves that D has its prompt's KV. After it P's failure matters only to further prompts.
- If D reports a failure while P has failed, stopped or fallen silent, P is to blame: D lacked P's KV.
- If D reports one for a request that was sent twice, it may have aborted the first: nobody is to blame.
- What this proxy itself lacks, such as file descriptors, is no instance's failure.
"""

from dataclasses import dataclass
from enum import Enum, auto

from .membership.instance import Role


class CallEnd(Enum):
    """How a call to an instance has ended, or how far it is."""

    NOT_MADE = auto()
    PENDING = auto()
    ACCEPTED = auto()
    """Not ended: the head of a successful answer has come."""
    ANSWERED = auto()
    """A success. Of D: its first token has come."""
    REFUSED = auto()
    """A status of 4xx other than those of DENIED."""
    DENIED = auto()
    """401 or 403: it does not take the client's key."""
    ERROR = auto()
    """Any other status that is no success, or an error in place of the first token."""
    ABORTED = auto()
    """A success, which shows that the instance was stopped before its answer was complete."""
    CLOSED = auto()
    """Its port refused the connection: it has computed nothing."""
    UNREACHABLE = auto()
    """No connection could be made, for another reason, which may have taken seconds."""
    NO_SOCKET = auto()
    """This proxy had no descriptor, no port or no memory for a connection."""
    BROKEN = auto()
    """The connection ended before the answer was complete."""
    LATE = auto()
    """The proxy gave it up at a deadline that the operator has set."""
    GONE = auto()
    """It no longer pings, and its port refuses connections."""
    SILENT = auto()
    """It has neither pinged nor answered /health for a lease."""
    HUNG = auto()
    """It has not pinged for a lease, although it answers /health."""
    STOPPED = auto()
    """It has said goodbye, and its port refuses; or an operator drained it, and its move_after is over."""


class Blame(Enum):
    """Who is at fault."""

    P = "P"
    D = "D"
    PROXY = "proxy"
    CLIENT = "client"
    NONE = "none"


class RetryKind(Enum):
    """What becomes of the request."""

    NO = auto()
    """The attempt is over, and the client gets its answer, whatever that is."""
    ELSEWHERE = auto()
    """The attempt is over; the request may be sent to other instances."""
    ALONE = auto()
    """The attempt is over; the request may be sent to a D alone, which decides, or to other instances."""
    SAME = auto()
    """The attempt is over; the request may be sent to the same instances, under a new id."""
    GOES_ON = auto()
    """The attempt goes on: D decides."""


class Charge(Enum):
    """Whether the breaker of the instance that is to blame counts a failure."""

    NONE = auto()
    NOW = auto()
    IF_D_ACCEPTS = auto()
    """Once a D has answered the request: until then it may be the client's mistake."""
    IF_P_ACCEPTS = auto()
    """Once another P has done its part of the request."""


@dataclass(frozen=True)
class Verdict:
    blame: Blame
    again: RetryKind
    charge: Charge = Charge.NONE


_FINE = frozenset({CallEnd.NOT_MADE, CallEnd.PENDING, CallEnd.ACCEPTED, CallEnd.ANSWERED})
REFUSALS = frozenset({CallEnd.REFUSED, CallEnd.DENIED})
_MAY_BE_ALIVE = frozenset({CallEnd.ABORTED, CallEnd.SILENT, CallEnd.HUNG, CallEnd.STOPPED})
"""After these D learns it from P itself, or by P's silence."""


def assign_blame(
    role: Role,
    end: CallEnd,
    other: CallEnd = CallEnd.NOT_MADE,
    *,
    begun: bool = False,
    one_prompt: bool = True,
    sent_twice: bool = False,
) -> Verdict:
    """What follows when the call to P, or to D, has ended.

    Args:
        other: how far the call to the other instance is. A P whose pings have stopped counts as SILENT, and
            one that has said goodbye as STOPPED, even while its call is open. For a stream that D serves
            alone: REFUSED if a P was asked before and refused it.
        begun: whether bytes of D's answer have gone to the client.
        one_prompt: whether D's first token proves that D has all KV.
        sent_twice: whether the request went over a second connection, as the first closed without an answer.
    """
    if end is CallEnd.ANSWERED:
        return Verdict(Blame.NONE, RetryKind.NO if role == "D" else RetryKind.GOES_ON)
    if end is CallEnd.NO_SOCKET:
        return Verdict(Blame.PROXY, RetryKind.NO)
    return _of_p(end, other, begun, one_prompt) if role == "P" else _of_d(end, other, begun, sent_twice)


def _of_p(end: CallEnd, decode: CallEnd, begun: bool, one_prompt: bool) -> Verdict:
    if end in REFUSALS and decode in REFUSALS:
        return Verdict(Blame.CLIENT, RetryKind.NO)
    accepted = decode in (CallEnd.ACCEPTED, CallEnd.ANSWERED)
    charge = Charge.NOW
    if end is CallEnd.REFUSED:
        charge = Charge.IF_P_ACCEPTS
    elif end is CallEnd.DENIED and not accepted:
        charge = Charge.IF_D_ACCEPTS
    if begun:
        goes_on = one_prompt or end in _MAY_BE_ALIVE
        return Verdict(Blame.P, RetryKind.GOES_ON if goes_on else RetryKind.NO, charge)
    if end in REFUSALS and not accepted:
        return Verdict(Blame.P, RetryKind.ALONE, charge)
    goes_on = decode is not CallEnd.NOT_MADE and end in _MAY_BE_ALIVE
    return Verdict(Blame.P, RetryKind.GOES_ON if goes_on else RetryKind.ELSEWHERE, charge)


def _of_d(end: CallEnd, prefill: CallEnd, begun: bool, sent_twice: bool) -> Verdict:
    if begun:
        return Verdict(Blame.D, RetryKind.NO, Charge.NOW)
    if end in REFUSALS:
        return Verdict(Blame.CLIENT, RetryKind.NO)
    if end is CallEnd.ERROR and sent_twice:
        return Verdict(Blame.NONE, RetryKind.SAME)
    if end in (CallEnd.ERROR, CallEnd.BROKEN) and prefill is CallEnd.REFUSED:
        return Verdict(Blame.D, RetryKind.ELSEWHERE, Charge.IF_D_ACCEPTS)
    if end is CallEnd.ERROR and prefill not in _FINE:
        # P's own call has been charged, or is only silent.
        return Verdict(Blame.P, RetryKind.ELSEWHERE)
    if end is CallEnd.LATE and prefill in (CallEnd.PENDING, CallEnd.ACCEPTED):
        return Verdict(Blame.P, RetryKind.ELSEWHERE, Charge.NOW)
    return Verdict(Blame.D, RetryKind.ELSEWHERE, Charge.NOW)
