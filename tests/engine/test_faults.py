"""What one engine sees when the other is absent, unfit, gone, or talks nonsense. Cores on a virtual clock."""

import dataclasses
import re
from typing import Any

import pytest
from msgspec.structs import replace
from virtual.pair import LEASE, VirtualPair, value

from p2pkv.control.endpoint import PortTaken
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from support.engine import transfers
from support.engine.engines import Geometry, Make, other_group, prefill
from support.engine.transfers import BLOCKS, TOKENS, push

ONE, TWO = Geometry(), Geometry(tp=2)
NOWHERE = Address("127.0.0.1", 9)


@pytest.fixture
def pair() -> VirtualPair:
    return VirtualPair(lease_seconds=LEASE)


def cut(pair: VirtualPair) -> None:
    for way in list(pair.network.ways):
        if not way.dead:
            pair.network.cut(way)


@pytest.mark.parametrize(("side", "words"), [("P", "out of step"), ("D", "not announced")])
def test_a_word_out_of_turn_ends_the_link_and_not_the_engine(
    pair: VirtualPair, side: str, words: str
) -> None:
    """P says that it has sent what D has not granted, or D grants what P has not announced."""
    pair.half_a_push()
    peers: Any = (pair.p if side == "P" else pair.d).rank.core.roles[0].peers
    (peer,) = peers
    number = peer.link.number
    said = m.Sent("k", 1, 99, number, False) if side == "P" else m.Grant("k", 1, 99, 4096, number, 0)
    peer.connection.send(m.encode(said))
    pair.fails(words)
    pair.rest("k")
    assert value(pair.p, "links_aborted") == 1
    push(pair.p, pair.d, "again")


def test_a_request_outlives_any_number_of_lost_connections_within_a_lease(pair: VirtualPair) -> None:
    pair.expect()
    for _ in range(6):
        pair.clock.pass_by(0.15 * LEASE)
        assert value(pair.p, "early_claims")
        cut(pair)
    # A prompt that P has begun would end with the connection on which D has claimed it.
    pair.clock.pass_by(0.15 * LEASE)
    pair.computed()
    pair.load()


def test_a_request_that_p_never_vouches_for_ends_a_lease_after_its_connection_was_lost_first(
    pair: VirtualPair,
) -> None:
    pair.expect()
    began = pair.clock.now
    while not pair.d.failures:
        assert pair.clock.now - began < 2 * LEASE, "it is asked for anew without end"
        pair.clock.pass_by(0.05)
        cut(pair)


@pytest.mark.parametrize(
    ("geometry", "change", "words"),
    [
        (ONE, {"weights": "other"}, ("weights", "made-up", "other")),
        (dataclasses.replace(ONE, kv_heads=3), {}, ("2", "3")),
    ],
    ids=["weights", "cache"],
)
def test_ranks_that_do_not_fit_refuse_each_other(
    geometry: Geometry, change: dict[str, str], words: tuple[str, ...]
) -> None:
    pair = VirtualPair(on_d=geometry)
    rank = pair.d.rank
    rank.context.hello = replace(rank.hello, **change)
    pair.expect()
    pair.fails(f"{pair.d.address} and {pair.p.address} do not fit: ")
    (failed,) = pair.d.failures
    assert all(word in failed.reason for word in words)  # type: ignore[attr-defined]


def lies(pair: VirtualPair) -> None:
    """P's rank 1 describes its engine in another way than rank 0, which D's plan would fit, too."""
    mine = pair.p.ranks[1].hello
    other = other_group(mine.cache, tp=1, layers=(2, 2))
    pair.p.ranks[1].rank.context.hello = replace(mine, cache=other)


def test_ranks_of_p_that_describe_their_engine_differently_are_not_believed() -> None:
    """Each of them fits D by itself; together they would send other rectangles than D has planned."""
    pair = VirtualPair(TWO, on_d=ONE, lease_seconds=60.0)
    lies(pair)
    pair.expect()
    place = pair.p.address
    pair.fails(f"{place.shifted(1)} and {place} do not fit: they are ranks of one P")


def test_a_rank_of_p_that_speaks_of_an_engine_of_before_is_asked_anew() -> None:
    pair = VirtualPair(TWO, on_d=ONE, lease_seconds=60.0)
    lies(pair)
    peers: Any = pair.d.rank.core.roles[0].peers
    lose = peers.lose

    def mend(peer: object, reason: str, now: float) -> None:
        liar = pair.p.ranks[1]
        liar.rank.context.hello = liar.hello
        table: Any = liar.rank.core.roles[0].peers
        for each in table:
            table.remove(each)
        lose(peer, reason, now)

    peers.lose = mend
    pair.expect()
    pair.computed()
    pair.load()


def test_a_second_instance_on_the_same_port(make_memory: Make) -> None:
    p = make_memory("P")
    with pytest.raises(PortTaken, match=r"ports \d+ to \d+ \(kv_port.*kv_port of its own"):
        make_memory("P", kv_port=p.address.port)


def test_a_request_paired_with_another_d(pair: VirtualPair) -> None:
    pair.p.do(do.HoldPrompt("k", NOWHERE))
    pair.expect()
    pair.fails(str(NOWHERE))


def test_the_log_names_the_one_that_did_not_answer(
    pair: VirtualPair, caplog: pytest.LogCaptureFixture
) -> None:
    gone = pair.more("P")
    gone.rank.vanish()
    transfers.expect(gone, pair.d)
    prefill(pair.p, "k", NOWHERE, TOKENS, BLOCKS, chunk=TOKENS)
    pair.clock.pass_by(2 * LEASE)
    for failed in (
        rf"transfer k failed: P could not be reached.*\(P is {gone.address}\)",
        rf"transfer k was not sent: D did not answer.*\(D is {NOWHERE}\)",
    ):
        assert re.search(failed, caplog.text)
