"""P's view of one rank of D: what a late word may not do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pkv.engine.counters import Counters
from p2pkv.engine.outlet import Outlet
from p2pkv.links.memory import MemoryNetwork
from p2pkv.protocol.messages import AnyMessage, LinkAccept, LinkInvite

WINDOW = 4096


def test_an_answer_to_an_invitation_that_was_given_up_comes_too_late() -> None:
    """D was frozen. A link that only P had would keep the next one, which D needs, from coming up."""
    network, told = MemoryNetwork(), list[AnyMessage]()
    p, d = network.rank(), network.rank()
    context: Any = SimpleNamespace(
        links=p, counters=Counters(), tell=lambda _, message: told.append(message) or True
    )
    unused: Any = None
    outlet = Outlet(context, unused, unused, unused, unused, debt=SimpleNamespace())  # type: ignore[arg-type]

    outlet.invite(now=0.0)
    (given_up,) = told
    assert isinstance(given_up, LinkInvite)
    _, late = d.accept(given_up.blob, WINDOW)
    outlet.park(now=2.0, tell="the link did not come up")
    outlet.accept(LinkAccept(given_up.link, WINDOW, late))
    assert not outlet.poll() and not outlet.linked

    outlet.want(now=3.0)
    invited = told[-1]
    assert isinstance(invited, LinkInvite) and invited.link != given_up.link
    inbound, blob = d.accept(invited.blob, WINDOW)
    outlet.accept(LinkAccept(invited.link, WINDOW, blob))
    assert outlet.poll() and outlet.linked and inbound.ready()
