"""The ends of a link as the engines see them: late words, and slow links."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pkv.engine.context import Counters
from p2pkv.engine.from_prefill import InboundLink, PostedReceive
from p2pkv.engine.to_decode import OutboundLink, PendingSend
from p2pkv.links.base import LinkError
from p2pkv.protocol.messages import LinkAccept
from support.links.memory import MemoryNetwork

WINDOW = 4096


def test_an_answer_to_an_invitation_that_was_given_up_comes_too_late() -> None:
    """D was frozen. A link that only P had would keep the next one, which D needs, from coming up."""
    network = MemoryNetwork()
    p, d = network.rank(), network.rank()
    context: Any = SimpleNamespace(links=p, counters=Counters())
    link = OutboundLink(context)

    given_up = link.invite(now=0.0)
    assert given_up is not None
    _, late = d.accept(given_up.blob, WINDOW)
    link.park(now=2.0)
    link.accept(LinkAccept(given_up.link, WINDOW, late))
    assert not link.poll() and not link.linked
    assert link.invite(now=2.5) is None, "it is parked"

    link.parked = False
    invited = link.invite(now=3.0)
    assert invited is not None and invited.link != given_up.link
    inbound, blob = d.accept(invited.blob, WINDOW)
    link.accept(LinkAccept(invited.link, WINDOW, blob))
    assert link.poll() and link.linked and inbound.ready()


@pytest.mark.parametrize("side", ["P", "D"])
def test_what_waits_behind_others_on_a_slow_link_is_not_overdue(side: str) -> None:
    """One send after the other is taken, or one receive after the other arrives."""
    unused: Any = None
    end: Any = OutboundLink(unused) if side == "P" else InboundLink(unused)
    under_way = end.flights if side == "P" else end.posted

    def begin(count: int) -> None:
        for _ in range(count):
            send = PendingSend(unused, "k", unused, True, None, True)
            under_way.append(send if side == "P" else PostedReceive(unused, "k", unused))

    begin(3)
    for second in range(3):
        assert not end.overdue(second * 1.5, lease=2.0)
        under_way.popleft()
    assert not end.overdue(9.0, lease=2.0)
    begin(1)
    assert not end.overdue(10.0, lease=2.0)
    assert not end.overdue(12.0, lease=2.0)
    assert end.overdue(12.1, lease=2.0)


class Landed:
    """A receive whose bytes are here, or whose link is broken."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def done(self) -> bool:
        if self._broken:
            raise LinkError("broken for the test")
        return True


def test_a_receive_that_has_arrived_is_not_overdue_and_a_broken_link_is_left_to_the_next_poll() -> None:
    """It may wait for a long step of D's own."""
    unused: Any = None
    sent: Any = object()
    inlet = InboundLink(unused)
    here, broken = (PostedReceive(Landed(each), "k", unused, sent) for each in (False, True))  # type: ignore[arg-type]
    inlet.posted.append(here)
    assert not inlet.overdue(0.0, lease=2.0) and not inlet.overdue(9.0, lease=2.0)
    inlet.posted[0] = broken
    assert not inlet.overdue(10.0, lease=2.0)
    assert inlet.overdue(12.1, lease=2.0)
