"""Links that D builds to the P's that the proxy names, before any request: cores on a virtual clock."""

import logging
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace
from virtual.network import Endpoint
from virtual.pair import LEASE, VirtualEngine, VirtualPair, value

from p2pkv.engine import commands as do
from p2pkv.engine import preconnect
from p2pkv.pairing import Address
from p2pkv.protocol.messages import Partners, encode
from support.engine.engines import Geometry, other_group
from support.engine.transfers import expect, push

SOON = 2.0
"""Seconds in which a link comes up."""

LONG = 200.0
"""Seconds: longer than D waits for a request, and P for a word."""


class Fleet(VirtualPair):
    def silent(self) -> str:
        """An address at which connections are taken, and nothing is ever said."""
        address = Address("127.0.0.1", next(self.ports))
        Endpoint("silent", address, self.network, lambda: None).answers = False
        return str(address)

    def name(self, d: VirtualEngine, *ps: VirtualEngine | str, seconds: float = SOON) -> None:
        """What the proxy says to rank 0 of D; then let time pass."""
        d.rank.do(do.NamePartners(tuple(str(p if isinstance(p, str) else p.address) for p in ps)))
        self.clock.pass_by(seconds)

    def linked(self, *ps: VirtualEngine) -> None:
        self.name(self.d, *ps)
        assert ahead(self.d) == links(self.d) == len(ps)

    def refusals(self, p: VirtualEngine, seconds: float) -> list[float]:
        """When P has refused D meanwhile."""
        times, before = list[float](), value(p, "messages_refused")

        def note() -> bool:
            times.extend([self.clock.now] * (value(p, "messages_refused") - before - len(times)))
            return True

        self.lasts(note, seconds)
        return times


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(lease_seconds=LEASE)


def ahead(d: VirtualEngine) -> int:
    return value(d, "links_preconnected")


def links(engine: VirtualEngine) -> int:
    return value(engine, "links")


def begun(engine: VirtualEngine) -> int:
    return links(engine) + value(engine, "links_aborted")


def is_unfit(p: VirtualEngine) -> Callable[[], None]:
    """From now on P describes itself otherwise; the result mends that."""
    context, mine = p.rank.context, p.rank.hello
    context.hello = replace(mine, cache=other_group(mine.cache, dtype="float16"))
    return lambda: setattr(context, "hello", mine)


def test_the_first_request_builds_no_link(fleet: Fleet) -> None:
    assert begun(fleet.p) == begun(fleet.d) == 0
    fleet.linked(fleet.p)
    push(fleet.p, fleet.d, "first", salt=1)
    assert begun(fleet.p) == begun(fleet.d) == 1
    fleet.nothing_was_lost()


def test_without_the_option_d_waits_for_the_first_request(fleet: Fleet) -> None:
    d = fleet.more("D", preconnect=False)
    fleet.name(d, fleet.p)
    assert begun(d) == value(d, "peers") == 0
    push(fleet.p, d, "first", salt=1)
    assert begun(d) == 1 and ahead(d) == 0


def test_nothing_is_built_ahead_while_d_captures_its_graphs(fleet: Fleet) -> None:
    fleet.d.rank.steps.serving = False
    fleet.name(fleet.d, fleet.p)
    assert value(fleet.d, "peers") == 0
    fleet.d.core()
    fleet.clock.pass_by(SOON)
    assert ahead(fleet.d) == 1


def test_no_more_than_max_links_come_up_ahead_and_a_request_takes_ones_place(fleet: Fleet) -> None:
    d, ps = fleet.more("D", max_links=2), [fleet.more("P") for _ in range(6)]
    fleet.name(d, *ps, seconds=LEASE)
    assert begun(d) == links(d) == 2
    assert [begun(p) for p in ps] == [1, 1, 0, 0, 0, 0], "not those that were named first"
    push(ps[5], d, "third", salt=1)
    fleet.clock.pass_by(LEASE)
    assert begun(d) == 3 and links(d) == 2, "a link was built ahead although there are max_links"
    assert links(ps[5]) == 1, "the link that a request has used went first"
    push(ps[0], d, "one that was named first", salt=2)
    push(ps[5], d, "again", salt=3)
    assert begun(ps[5]) == 1


def test_who_never_answers_holds_up_nobody(fleet: Fleet) -> None:
    p, q, d = fleet.p, fleet.more("P"), fleet.d
    deaf = [fleet.silent() for _ in range(preconnect.AT_ONCE + 1)]
    fleet.name(d, deaf[0], p, *deaf[1:], q, seconds=preconnect.FRESH_SECONDS)
    assert begun(p) == 1 and begun(q) == 0
    push(q, d, "another request", salt=1)
    push(p, d, "first", salt=2)
    assert begun(p) == 1


def test_who_never_answers_gives_its_place_to_the_next(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    d, deaf = fleet.more("D", max_links=1), fleet.silent()
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        fleet.name(d, deaf, fleet.p, seconds=preconnect.PATIENCE_SECONDS)
        assert ahead(d) == 0
        fleet.clock.pass_by(SOON)
        assert ahead(d) == 1
        fleet.clock.pass_by(LONG)
    said = [record for record in caplog.records if f"no link to P at {deaf}" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO], "said once, and nobody is blamed"
    assert "did not answer in time): it is tried again later" in said[0].getMessage()
    assert value(d, "transfers_failed") == 0


def test_requests_are_not_failed_for_a_p_that_has_refused_a_link_ahead(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    mend = is_unfit(fleet.p)
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        fleet.name(fleet.d, fleet.p)
    assert "no link to P at" in caplog.text and "cache element types differ" in caplog.text
    assert ahead(fleet.d) == 0
    mend()
    push(fleet.p, fleet.d, "a request at once", salt=1)


def test_a_link_ahead_takes_no_place_on_p_of_one_in_use(fleet: Fleet) -> None:
    p, first, second = fleet.more("P", max_links=1), fleet.d, fleet.more("D")
    push(p, first, "k", salt=1)
    fleet.name(second, p)
    assert value(second, "peers") == 1 and ahead(second) == 0
    fleet.clock.pass_by(preconnect.PATIENCE_SECONDS)
    assert value(second, "peers") == 0, "its try has an end"
    assert (begun(p), links(first), begun(second)) == (1, 1, 0)
    push(p, second, "a request needs it", salt=2)
    fleet.clock.pass_by(LEASE)
    assert links(p) == links(second) == 1


def test_on_p_a_link_that_no_request_has_used_goes_first(fleet: Fleet) -> None:
    p = fleet.more("P", max_links=2)
    used, new, third = fleet.d, fleet.more("D"), fleet.more("D")
    push(p, used, "k", salt=1)
    fleet.name(new, p)
    assert ahead(new) == 1
    push(p, third, "k3", salt=2)
    fleet.clock.pass_by(LEASE)
    assert (links(p), links(used), links(new), links(third)) == (2, 1, 0, 1)


def test_links_without_requests_last(fleet: Fleet) -> None:
    fleet.linked(fleet.p)
    fleet.clock.pass_by(LONG)
    push(fleet.p, fleet.d, "first", salt=1)
    fleet.clock.pass_by(LONG)
    assert links(fleet.p) == begun(fleet.p) == begun(fleet.d) == 1


def test_a_p_that_restarts_gets_its_link_again(fleet: Fleet) -> None:
    fleet.linked(fleet.p)
    fleet.p.rank.vanish()
    again = fleet.engine("P", fleet.p.address.port)
    fleet.clock.pass_by(preconnect.BEAT_SECONDS + preconnect.FIRST_PAUSE + SOON)
    assert links(again) == links(fleet.d) == 1
    push(again, fleet.d, "first", salt=1)
    assert begun(again) == 1


def test_all_ranks_of_d_hear_of_it_and_link_to_their_ranks_of_p(fleet: Fleet) -> None:
    p, d = (fleet.more(role, Geometry(kv_heads=4, tp=2)) for role in "PD")
    fleet.name(d, p)
    assert [each.rank.counters.values["links_preconnected"] for each in d.ranks] == [1, 1]
    push(p, d, "first", salt=1)
    assert value(p, "links_aborted") == value(d, "links_aborted") == 0
    fleet.name(d, seconds=preconnect.LEFT_SECONDS + SOON)
    assert value(d, "partners") == 0


def test_partners_of_another_engine_are_refused(fleet: Fleet) -> None:
    d, place = fleet.d, str(fleet.p.address)
    stranger = Endpoint("X", Address("127.0.0.1", 6000), fleet.network, lambda: None)
    line = stranger.dial(d.address)
    for engine in (place, str(d.address)):
        fleet.until(lambda engine=engine: line.send(encode(Partners(engine, ("no address", place)))))
        fleet.clock.pass_by(SOON)
        assert (value(d, "messages_refused"), ahead(d)) == (1, engine == str(d.address))


def test_lists_without_end_are_not_kept(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconnect, "AT_ONCE", 0)  # none of them is dialed
    for number in range(9):
        fleet.name(fleet.d, *(f"10.0.{number}.1:{port}" for port in range(1, 1025)), seconds=0.3)
    assert value(fleet.d, "partners") <= 5 * 1024


# Which P's are named no more.


def test_a_partner_is_forgotten_a_while_after_it_was_named_last_however_often_others_are(
    fleet: Fleet,
) -> None:
    p, other, d = fleet.p, fleet.more("P"), fleet.d
    fleet.linked(p)
    fleet.name(d, seconds=preconnect.LEFT_SECONDS - 1)
    fleet.name(d, p, seconds=3 * preconnect.LEFT_SECONDS)
    assert links(d) == begun(p) == 1, "it was named again in time"
    for _ in range(6):
        assert value(d, "links_aborted") == 0
        fleet.name(d, other, seconds=preconnect.LEFT_SECONDS / 6)
    fleet.clock.pass_by(1.0)
    assert (value(d, "links_aborted"), links(d), links(other)) == (1, 1, 1)


def test_a_rank_that_a_request_has_needed_is_not_hung_up_on(fleet: Fleet) -> None:
    p, other, d = fleet.p, fleet.more("P"), fleet.d
    fleet.linked(p, other)
    fleet.name(d, seconds=preconnect.LEFT_SECONDS - 10)
    push(p, d, "k", salt=1)
    fleet.clock.pass_by(15.0)
    assert (begun(d), links(d), value(d, "partners")) == (2, 1, 0)
    fleet.clock.pass_by(preconnect.LEFT_SECONDS)
    assert value(d, "peers") == 0, "how long it lasts is its requests' affair"
    assert begun(p) == 1


def test_one_that_is_named_no_more_is_not_dialed(fleet: Fleet) -> None:
    is_unfit(fleet.p)
    fleet.name(fleet.d, fleet.p)
    fleet.name(fleet.d, seconds=preconnect.LEFT_SECONDS - 1)
    assert value(fleet.p, "messages_refused") == 1, "it was tried again although the proxy names it no more"
    fleet.name(fleet.d, fleet.p)
    assert value(fleet.p, "messages_refused") == 2


# P's of several ranks.


def test_a_p_is_up_only_with_all_of_its_links(fleet: Fleet) -> None:
    p = fleet.more("P", Geometry(layers=(2, 2)))
    p.ranks[1].rank.steps.serving = False
    fleet.name(fleet.d, p)
    assert (ahead(fleet.d), links(fleet.d), value(fleet.d, "peers")) == (0, 1, 2)
    fleet.clock.pass_by(preconnect.PATIENCE_SECONDS - 1)
    assert value(fleet.d, "peers") == 0, "the link that is missing has had its time"


@pytest.mark.parametrize("most", [2, 3])
def test_a_p_of_more_ranks_than_max_links_is_left_alone(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    p, d = fleet.more("P", Geometry(layers=(2, 1, 1))), fleet.more("D", max_links=most)
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        fleet.name(d, p)
    assert value(d, "peers") == links(d) == ahead(d) == (3 if most == 3 else 0)
    assert ("3 of its ranks send to this one, more than max_links" in caplog.text) == (most == 2)


# How often one is tried.


def test_the_pause_between_tries_doubles_up_to_a_bound(fleet: Fleet) -> None:
    is_unfit(fleet.p)
    fleet.name(fleet.d, fleet.p, seconds=0.0)
    pauses = [later - sooner for sooner, later in pairwise(fleet.refusals(fleet.p, 1300.0))]
    right = [
        min(preconnect.FIRST_PAUSE * (1 << number), preconnect.LAST_PAUSE) for number in range(len(pauses))
    ]
    assert pauses == pytest.approx(right, abs=1.0)
    assert right[-2:] == [preconnect.LAST_PAUSE] * 2


def test_once_a_link_was_up_the_pause_is_short_again(fleet: Fleet) -> None:
    mend = is_unfit(fleet.p)
    fleet.name(fleet.d, fleet.p, seconds=7 * preconnect.FIRST_PAUSE + SOON)
    mend()
    fleet.until(lambda: ahead(fleet.d) == 1, 10 * preconnect.FIRST_PAUSE)
    fleet.p.rank.vanish()
    again = fleet.engine("P", fleet.p.address.port)
    is_unfit(again)
    assert len(fleet.refusals(again, preconnect.BEAT_SECONDS + preconnect.FIRST_PAUSE + SOON)) == 1


def test_what_is_wrong_with_a_p_that_requests_need_is_their_affair(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = fleet.p, fleet.d
    is_unfit(p)
    p.rank.stand_still(1.0)
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        fleet.name(d, p, seconds=0.5)
        expect(p, d)
        fleet.until(lambda: d.failures)
        fleet.clock.pass_by(preconnect.PATIENCE_SECONDS + 1)
    assert "no transfers from" in caplog.text and "no link to P" not in caplog.text
