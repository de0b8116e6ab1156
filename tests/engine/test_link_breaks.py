"""A link breaks: what it carried fails, and what waits for its turn goes over the next one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from p2pkv.engine import commands as do
from p2pkv.engine.to_decode import OutboundLink
from p2pkv.protocol import messages as m
from support.engine.engines import Geometry, break_link, engines, plain_links, prefill, step
from support.engine.transfers import BLOCKS, arrives, begin, ends, failure, load, rest, value
from support.links.faulty import Faults, FaultyLinks
from support.waiting import wait_for

ONE = Geometry()
OTHERS = list(range(10, 16))


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


def test_what_d_granted_on_a_link_that_p_has_given_up_is_not_sent_on_the_next():
    """D's grant may be on its way while P gives the link up."""
    outbound = SimpleNamespace(abort=lambda: None)
    links = SimpleNamespace(invite=lambda: b"name", complete=lambda mine, theirs: outbound)
    link = OutboundLink(SimpleNamespace(links=links, counters=SimpleNamespace(add=lambda name: None)))
    for number in (1, 2):
        assert link.invite(0.0) == m.LinkInvite(number, b"name") and not link.carries(number)
        link.accept(m.LinkAccept(number, b"theirs", 4096))
        assert link.carries(number) and not link.carries(number - 1)
        link.abort(-10.0)
        assert not link.carries(number)


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
