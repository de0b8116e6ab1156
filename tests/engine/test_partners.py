"""What D does with the P's that the proxy names, second by second, with ranks of P that a test plays."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from p2pkv.config import Options
from p2pkv.engine.commands import NamePartners
from p2pkv.engine.context import Counters
from p2pkv.engine.preconnect import FIRST_PAUSE, LAST_PAUSE, LEFT_SECONDS, PATIENCE_SECONDS, Preconnect
from p2pkv.pairing import Address

FIRST, SECOND, THIRD = (f"127.0.0.1:{port}" for port in (21001, 21002, 21003))


@dataclass(eq=False)
class PlayedRank:
    """A rank of P that this rank of D has dialed. It answers when a test says so."""

    address: str
    rank: int
    dialing: Any = field(default_factory=lambda: SimpleNamespace(open=False, reason=""))
    hello: object = None
    link: Any = field(default_factory=lambda: SimpleNamespace(linked=False, up=False))
    needed: bool = False
    used: float = 0.0
    engine: tuple[str, ...] = ()

    @property
    def welcomed(self) -> bool:
        return bool(self.dialing.open)

    def ranks(self) -> tuple[dict[int, list[Any]], dict[int, Address]]:
        """Each rank of P sends to this rank of D."""
        return {rank: [] for rank in range(len(self.engine))}, {
            rank: Address.parse(place) for rank, place in enumerate(self.engine)
        }

    def welcomes(self, link: bool = True) -> None:
        self.dialing.open, self.hello = True, object()
        self.link = SimpleNamespace(linked=link, up=link)

    def refuses(self, reason: str) -> None:
        self.dialing.reason = reason


class Rig:
    """One rank of D on a clock of its own; P's ranks live at FIRST, SECOND and THIRD.

    Attributes:
        dialed: when which rank was dialed.
        hung_up: the ranks to which the connection was closed.
    """

    def __init__(self, p_ranks: int = 1, **options: Any) -> None:
        self.now = 0.0
        self.dialed: list[tuple[float, str]] = []
        self.hung_up: list[str] = []
        self.ranks: dict[str, PlayedRank] = {}
        self._addresses = (FIRST, SECOND, THIRD)[:p_ranks]
        self.counters = Counters()
        self.effects: list[object] = []
        context: Any = SimpleNamespace(
            options=Options(role="D", host="127.0.0.1", kv_port=21101, **options),
            hello=SimpleNamespace(addresses=("127.0.0.1:21101",)),
            counters=self.counters,
            effects=self.effects,
            steps=SimpleNamespace(serving=True),
        )
        peers: Any = self
        self.it = Preconnect(context, peers)

    # The table of peers.

    def get(self, address: str) -> PlayedRank | None:
        return self.ranks.get(address)

    def __iter__(self) -> Iterator[PlayedRank]:
        return iter(list(self.ranks.values()))

    def dial(self, address: Address, now: float) -> PlayedRank:
        place = str(address)
        if place not in self.ranks:
            self.dialed.append((now, place))
            number = self._addresses.index(place) if place in self._addresses else 0
            self.ranks[place] = PlayedRank(place, number, engine=self._addresses)
        return self.ranks[place]

    def hang_up(self, peer: Any, reason: str) -> None:
        self.hung_up.append(peer.address)
        del self.ranks[peer.address]

    # What a test does.

    def name(self, *addresses: str) -> None:
        self.it.name(NamePartners(addresses), self.now)

    def look(self, seconds: float = 0.0) -> None:
        """Let time pass in looks a quarter of a second apart, or look once."""
        end = self.now + seconds
        self.it.look(self.now)
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            self.it.look(self.now)

    @property
    def links_preconnected(self) -> int:
        return self.counters.values["links_preconnected"]


def linked(p_ranks: int = 1) -> Rig:
    """The proxy has named FIRST, and D has a link to it."""
    d = Rig(p_ranks)
    d.name(FIRST)
    d.look()
    d.ranks[FIRST].welcomes()
    d.look()
    return d


def test_a_link_comes_up_and_is_kept() -> None:
    d = Rig()
    d.name(FIRST)
    d.look()
    d.ranks[FIRST].welcomes()
    d.look(3 * LEFT_SECONDS)
    assert d.it.keeps(d.ranks[FIRST])  # type: ignore[arg-type]
    assert d.dialed == [(0.0, FIRST)] and not d.hung_up and d.links_preconnected == 1


def test_a_rank_that_a_request_needs_is_not_hung_up_on() -> None:
    d = linked(p_ranks=2)
    d.ranks[SECOND].welcomes()
    d.look()
    d.ranks[FIRST].needed = True
    d.name()
    d.look(LEFT_SECONDS + 1)
    assert d.hung_up == [SECOND], "its P is named no more, and no request has needed this rank"
    assert d.ranks[FIRST].link.linked
    assert not d.it.keeps(d.ranks[FIRST]), "how long it lasts is its requests' affair"  # type: ignore[arg-type]


def test_a_partner_is_forgotten_a_while_after_it_was_named_last_however_often_others_are() -> None:
    d = linked()
    for _ in range(6):
        d.name(SECOND)
        assert FIRST not in d.hung_up
        d.look(LEFT_SECONDS / 6)
    d.look(1.0)
    assert FIRST in d.hung_up


def test_a_partner_that_is_named_again_in_time_stays() -> None:
    d = linked()
    d.name()
    d.look(LEFT_SECONDS - 1)
    d.name(FIRST)
    d.look(3 * LEFT_SECONDS)
    assert not d.hung_up and d.dialed == [(0.0, FIRST)]


def test_one_that_is_named_no_more_is_not_dialed() -> None:
    d = Rig()
    d.name(FIRST)
    d.look()
    d.ranks[FIRST].refuses("another model")
    d.look()
    assert d.hung_up == [FIRST]
    d.name()
    d.look(LEFT_SECONDS - 1)
    assert d.dialed == [(0.0, FIRST)], "it was tried again although the proxy names it no more"
    d.name(FIRST)
    d.look()
    assert len(d.dialed) == 2


def test_a_p_is_up_only_with_all_of_its_links() -> None:
    d = linked(p_ranks=2)
    d.ranks[SECOND].welcomes(link=False)
    d.look(PATIENCE_SECONDS + 1)
    assert d.links_preconnected == 0
    assert sorted(d.hung_up) == [FIRST, SECOND], "the link that is missing has had its time"


@pytest.mark.parametrize("most", [2, 3])
def test_a_p_of_more_ranks_than_max_links_is_left_alone(caplog: pytest.LogCaptureFixture, most: int) -> None:
    d = Rig(p_ranks=3, max_links=most)
    d.name(FIRST)
    d.look()
    d.ranks[FIRST].welcomes(link=False)
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        d.look()
    dialed = [place for _, place in d.dialed]
    if most == 3:
        assert dialed == [FIRST, SECOND, THIRD] and not d.hung_up
    else:
        assert dialed == d.hung_up == [FIRST]
        assert "3 of its ranks send to this one, more than max_links" in caplog.text


def refuse_all(d: Rig, seconds: float) -> list[float]:
    """Refuse every try; the pauses between them."""
    end, before = d.now + seconds, len(d.dialed)
    while d.now < end:
        for rank in list(d.ranks.values()):
            rank.refuses("another model")
        d.look(0.25)
    times = [when for when, _ in d.dialed[before:]]
    return [later - sooner for sooner, later in pairwise(times)]


def test_the_pause_between_tries_doubles_up_to_a_bound() -> None:
    d = Rig()
    d.name(FIRST)
    pauses = refuse_all(d, 1300.0)
    right = [FIRST_PAUSE * (1 << number) for number in range(len(pauses))]
    assert pauses == pytest.approx([min(each, LAST_PAUSE) for each in right], abs=1.0)
    assert pauses[-2:] == pytest.approx([LAST_PAUSE] * 2, abs=1.0)


def test_once_a_link_was_up_the_pause_is_short_again() -> None:
    d = Rig()
    d.name(FIRST)
    refuse_all(d, 7 * FIRST_PAUSE + 2)
    while not d.ranks:
        d.look(0.25)
    d.ranks[FIRST].welcomes()
    d.look()
    assert d.links_preconnected == 1
    d.ranks[FIRST].link.up = False
    ended = d.now
    d.look(0.25)
    assert d.hung_up[-1] == FIRST
    refuse_all(d, 2 * FIRST_PAUSE)
    assert d.dialed[-1][0] - ended == pytest.approx(FIRST_PAUSE, abs=1.0)


def test_what_is_wrong_with_a_p_that_requests_need_is_their_affair(caplog: pytest.LogCaptureFixture) -> None:
    d = Rig()
    d.name(FIRST)
    d.look()
    d.ranks[FIRST].needed = True
    d.ranks[FIRST].refuses("another model")
    with caplog.at_level(logging.INFO, "p2pkv.engine"):
        d.look(PATIENCE_SECONDS + 1)
    assert not d.hung_up and "no link to P" not in caplog.text
    del d.ranks[FIRST]
    d.look()
    assert [place for _, place in d.dialed] == [FIRST, FIRST], "no try has failed, so none is put off"
