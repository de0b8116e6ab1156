"""A link breaks: what it carried fails, and what waits for its turn goes over the next one. Idle ones are
closed. And the ends of a link as the engines see them: late words, and slow links."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from virtual.pair import HALF, LEASE, VirtualPair, value

from p2pkv.engine import commands as do
from p2pkv.engine.context import Counters
from p2pkv.engine.from_prefill import IDLE_SECONDS, InboundLink, PostedReceive
from p2pkv.engine.to_decode import FORGOTTEN_SECONDS, OutboundLink, PendingSend
from p2pkv.links.base import LinkError
from p2pkv.protocol import messages as m
from support.engine.engines import prefill, step
from support.engine.transfers import BLOCKS, TOKENS, arrives, begin, expect, load, push
from support.links.faulty import Faults
from support.links.memory import MemoryNetwork

OTHERS = list(range(10, 16))
WINDOW = 4096


@pytest.mark.parametrize("side", ["P", "D"])
@pytest.mark.parametrize("begun", [True, False], ids=["P has computed", "P has not begun"])
def test_only_what_it_carried_fails(side: str, begun: bool) -> None:
    pair = VirtualPair(lease_seconds=60.0)
    p, d = pair.p, pair.d
    expect(p, d, "carried", "queued")
    p.do(do.HoldPrompt("queued", d.address))
    p.do(do.OfferPrompt("carried", d.address, TOKENS, b"digest"))
    load(d, "carried")
    step(p, "carried", BLOCKS, 0, HALF)
    pair.until(lambda: value(d, "bytes_scattered"))
    if begun:
        prefill(p, "queued", d.address, TOKENS, OTHERS, chunk=HALF)
        d.wait(do.Begun("queued"))
    (p if side == "P" else d).rank.wires.change(break_at=-1)
    pair.until(lambda: d.failures)
    p.wait(do.BlocksFree("carried"))
    if not begun:
        prefill(p, "queued", d.address, TOKENS, OTHERS, chunk=HALF)
        d.wait(do.Begun("queued"))
    d.do(do.Load("queued", 0, TOKENS - 1, (OTHERS,)))
    arrives(d, "queued", blocks=OTHERS)
    assert [event.key for event in d.failures] == ["carried"]  # type: ignore[attr-defined]
    pair.rest("carried", "queued")


def test_a_p_that_can_make_no_link_says_why_and_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    """As with NCCL_SOCKET_IFNAME set wrongly, which NCCL says when it is asked for a new name."""
    pair = VirtualPair()
    pair.p.rank.wires.faults = Faults(refuse_invite=True)
    begin(pair.p, pair.d)
    load(pair.d)
    pair.fails("no interface of this name")
    pair.rest("k")
    pair.p.rank.wires.faults = Faults()
    push(pair.p, pair.d, "next")
    assert not [record for record in caplog.records if record.exc_info]


# When a link is closed, and built again.


@pytest.mark.parametrize(("side", "most"), [("P", 2), ("D", 1)])
def test_idle_links_beyond_max_links_are_closed_and_built_again(side: str, most: int) -> None:
    pair = VirtualPair(lease_seconds=LEASE)
    one = pair.more(side, max_links=most)
    others = [pair.more("D" if side == "P" else "P") for _ in range(most + 2)]
    for turn in range(2):
        for number, other in enumerate(others):
            p, d = (one, other) if side == "P" else (other, one)
            push(p, d, f"{turn}-{number}", salt=4 * turn + number)
            pair.clock.pass_by(LEASE)
        assert value(one, "links") == most
        assert [value(each, "links") for each in others] == [0] * 2 + [1] * most, "not the longest unused"
    assert value(one, "links_aborted") >= 4 and value(one, "transfers_failed") == 0


def test_p_forgets_a_d_that_has_long_hung_up() -> None:
    pair = VirtualPair(lease_seconds=LEASE)
    push(pair.p, pair.d, "k", salt=1)
    pair.clock.pass_by(IDLE_SECONDS + 2.0)
    assert value(pair.d, "links") == 0 and value(pair.p, "links") == 1, "nobody tells P"
    pair.clock.pass_by(FORGOTTEN_SECONDS)
    assert value(pair.p, "links") == value(pair.p, "peers") == 0
    push(pair.p, pair.d, "again", salt=2)
    pair.d.rank.stand_still(2 * FORGOTTEN_SECONDS)
    pair.clock.pass_by(2 * FORGOTTEN_SECONDS)
    assert value(pair.p, "peers") == 0
    push(pair.p, pair.d, "after it was frozen", salt=3)


def test_a_link_with_a_transfer_is_never_closed_as_idle() -> None:
    pair = VirtualPair(lease_seconds=LEASE, max_links=1)
    other = pair.more("D")
    pair.half_a_push()
    push(pair.p, other, "other", salt=9, blocks=OTHERS)
    pair.clock.pass_by(LEASE / 2)
    assert (value(pair.d, "links"), value(other, "links")) == (1, 0)
    step(pair.p, "k", BLOCKS, HALF, TOKENS)
    arrives(pair.d)
    assert value(pair.d, "links_aborted") == 0


def test_a_frozen_d_is_not_invited_for_ever() -> None:
    pair = VirtualPair(lease_seconds=LEASE)
    push(pair.p, pair.d, "before", salt=1)
    (peer,) = pair.p.rank.core.prefill.peers
    pair.expect()
    pair.p.do(do.OfferPrompt("k", pair.d.address, TOKENS, b"digest"))
    pair.d.wait(do.Begun("k"))
    pair.d.rank.stand_still(4 * LEASE)
    pair.p.wait(do.BlocksFree("k"))
    pair.p.rank.wires.change(break_at=-1)
    pair.clock.pass_by(LEASE)
    assert peer.link.parked
    pair.clock.pass_by(2 * LEASE)
    pair.rest("k")
    push(pair.p, pair.d, "after", salt=2)


# The ends as the engines see them.


def test_an_answer_to_an_invitation_that_was_given_up_comes_too_late() -> None:
    """D was frozen. A link that only P had would keep the next one, which D needs, from coming up. So may D's
    grant be on its way while P gives a link up."""
    network = MemoryNetwork()
    p, d = network.rank(), network.rank()
    context: Any = SimpleNamespace(links=p, counters=Counters())
    link = OutboundLink(context)

    given_up = link.invite(now=0.0)
    _, late = d.accept(given_up.blob, WINDOW)
    link.abort(now=2.0)
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


def test_a_receive_that_has_arrived_is_not_overdue_and_a_broken_link_is_left_to_the_next_poll() -> None:
    """It may wait for a long step of D's own."""
    unused: Any = None
    sent: Any = object()
    inlet = InboundLink(unused)
    receives = Mock(), Mock(done=Mock(side_effect=LinkError("broken for the test")))
    here, broken = (PostedReceive(each, "k", unused, sent) for each in receives)
    inlet.posted.append(here)
    assert not inlet.overdue(0.0, lease=2.0) and not inlet.overdue(9.0, lease=2.0)
    inlet.posted[0] = broken
    assert not inlet.overdue(10.0, lease=2.0)
    assert inlet.overdue(12.1, lease=2.0)
