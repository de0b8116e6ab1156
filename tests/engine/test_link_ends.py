"""A link breaks: what it carried fails, and what waits for its turn goes over the next one. And the ends of a
link as the engines see them: late words, and slow links.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pkv.engine import commands as do
from p2pkv.engine.context import Counters
from p2pkv.engine.from_prefill import InboundLink, PostedReceive
from p2pkv.engine.to_decode import OutboundLink, PendingSend
from p2pkv.links.base import LinkError
from p2pkv.protocol import messages as m
from support.engine.engines import Geometry, break_link, engines, plain_links, prefill, step
from support.engine.transfers import BLOCKS, arrives, begin, ends, failure, load, rest, value
from support.links.faulty import Faults, FaultyLinks
from support.links.memory import MemoryNetwork
from support.waiting import wait_for

ONE = Geometry()
OTHERS = list(range(10, 16))
WINDOW = 4096


@pytest.mark.parametrize("links", ["memory", "shared-memory"], indirect=True)
@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("begun", [True, False], ids=["P has computed", "P has not begun"])
def test_only_what_it_carried_fails(links, side, begun):
    with engines(ONE, ONE, links, lease_seconds=60.0) as (p, d):
        for key in ("carried", "queued"):
            d.do(do.Expect(key, p.address, 96, b"digest"))
            p.do(do.HoldPrompt(key, d.address))
        p.do(do.OfferPrompt("carried", d.address, 96, b"digest"))
        load(d, "carried")
        step(p, "carried", BLOCKS, 0, 48)
        wait_for(lambda: value(d, "bytes_scattered"))
        if begun:
            prefill(p, "queued", d.address, 96, OTHERS, chunk=48)
            d.wait(do.Begun("queued"))
        break_link({"P": p, "D": d}[side])
        wait_for(lambda: d.ranks[0].events(do.LoadFailed))
        p.wait(do.BlocksFree("carried"))
        if not begun:
            prefill(p, "queued", d.address, 96, OTHERS, chunk=48)
            d.wait(do.Begun("queued"))
        d.do(do.Load("queued", 0, 95, (OTHERS,)))
        arrives(d, "queued", blocks=OTHERS)
        assert [event.key for event in d.ranks[0].events(do.LoadFailed)] == ["carried"]
        ends(p, d, "carried", "queued")
        rest(p, d)


def test_a_p_that_can_make_no_link_says_why_and_tries_again(caplog):
    """As with NCCL_SOCKET_IFNAME set wrongly, which NCCL says when it is asked for a new name."""
    plain = plain_links("memory")
    broken = FaultyLinks(plain("P", 0), Faults(refuse_invite=True))
    with engines(ONE, ONE, lambda side, rank: broken if side == "P" else plain(side, rank)) as (p, d):
        begin(p, d, "lost")
        load(d, "lost")
        assert "no interface of this name" in failure(d, "lost")
        p.wait(do.BlocksFree("lost"))
        broken.faults = Faults()
        begin(p, d, "next")
        load(d, "next")
        arrives(d, "next")
    assert not [record for record in caplog.records if record.exc_info]


def test_an_answer_to_an_invitation_that_was_given_up_comes_too_late() -> None:
    """D was frozen. A link that only P had would keep the next one, which D needs, from coming up.

    So may D's grant be on its way while P gives a link up.
    """
    network = MemoryNetwork()
    p, d = network.rank(), network.rank()
    context: Any = SimpleNamespace(links=p, counters=Counters())
    link = OutboundLink(context)

    given_up = link.invite(now=0.0)
    assert given_up is not None
    _, late = d.accept(given_up.blob, WINDOW)
    link.park(now=2.0)
    link.accept(m.LinkAccept(given_up.link, WINDOW, late))
    assert not link.poll() and not link.linked
    assert link.invite(now=2.5) is None, "it is parked"

    link.parked = False
    invited = link.invite(now=3.0)
    assert invited is not None and invited.link != given_up.link
    inbound, blob = d.accept(invited.blob, WINDOW)
    link.accept(m.LinkAccept(invited.link, WINDOW, blob))
    assert link.poll() and link.linked and inbound.ready()

    assert link.carries(invited.link) and not link.carries(given_up.link)
    link.abort(now=-10.0)
    again = link.invite(now=3.5)
    assert again is not None and not link.carries(again.link)
    link.accept(m.LinkAccept(again.link, WINDOW, d.accept(again.blob, WINDOW)[1]))
    assert link.carries(again.link) and not link.carries(invited.link), (
        "what D granted on it is not sent here"
    )


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
