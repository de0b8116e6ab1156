"""Who is to blame when a call to an instance ends, and what becomes of its request. No IO, no state.

`assign_blame` is the one place in which this is decided. Its rows:

- A client's mistake is a 4xx of D, which answers the client and so decides. What P refuses and D accepts is
  served without this P. The P is charged if it denies access that D grants (it has another key), or if
  another P accepts the request (it lacks an adapter, or has a shorter --max-model-len). If every P refuses
  it, P's part of this request is impossible, and no P is worse for it, or a client could have all paused.
  Nor is a D whose stream then fails before a token, unless another D answers: vLLM may tell of a mistake so.
- P's failure before D's first token ends the attempt. In three cases D goes on, and decides: a stopped P lets
  D know itself; a silent P may be alive; and so may one that pings no more, but whose /health answers.
- D's first token proves that it has the KV of its prompt. Then P's failure matters only to several prompts.
- A D that reports itself that it failed, while P has failed, stopped or fallen silent: it lacked P's KV.
- A D that reports it of a request that was sent twice may have aborted the first one: neither is to blame.
- What this proxy itself lacks, such as descriptors, is no instance's failure.
"""

from dataclasses import dataclass
from enum import Enum, auto

from .membership.instance import Role


class CallEnd(Enum):
    """How a call to an instance has ended, or how far it is."""

    NOT_MADE = auto()
    PENDING = auto()
    ACCEPTED = auto()
    """Not ended: the answer's head, a success, has come."""
    ANSWERED = auto()
    """A success. Of D: its first token has come."""
    REFUSED = auto()
    """A status of 4xx, other than the next."""
    DENIED = auto()
    """401 or 403: it does not take the client's key."""
    ERROR = auto()
    """Any other status that is no success, or an error in place of the first token."""
    ABORTED = auto()
    """A success that shows that the instance was stopped before it was done."""
    CLOSED = auto()
    """Its port refused the connection: it has computed nothing."""
    UNREACHABLE = auto()
    """No connection came about for another reason, perhaps only after seconds."""
    NO_SOCKET = auto()
    """This proxy had no descriptor, no port or no memory for a connection."""
    BROKEN = auto()
    """The connection ended before the answer was complete."""
    LATE = auto()
    """After a deadline that the operator has set."""
    GONE = auto()
    """It pings no more, and its port refuses."""
    SILENT = auto()
    """It has neither pinged nor answered /health for a lease."""
    HUNG = auto()
    """It has not pinged for a lease, although it answers /health."""
    STOPPED = auto()
    """It has sent its goodbye, and its port refuses; or an operator has drained it, and it had its time."""


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
"""After these P itself, or its silence, lets D know."""


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
        other: how far the call to the other one is. A P whose pings have stopped counts as SILENT, and one
            that has sent its goodbye as STOPPED, even while its call is open; of a stream that is left to D
            alone a P that was asked before, if one has refused it.
        begun: bytes of D's answer have gone to the client.
        one_prompt: D's first token proves that it has all KV.
        sent_twice: over another connection, because the first one was closed before an answer.
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
