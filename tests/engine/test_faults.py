"""What one engine sees when the other is absent, unfit, gone, or talks nonsense."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import pytest

from p2pkv.control.endpoint import PortTaken
from p2pkv.engine import commands as do
from p2pkv.pairing import Address
from p2pkv.protocol import messages as m
from support.engine.engines import Geometry, on_engine_thread, other_group, prefill, says
from support.engine.transfers import BLOCKS, TOKENS, arrives, begin, ends, expect, failure, half, load, value
from support.waiting import wait_for

ONE = Geometry()
NOWHERE = Address("127.0.0.1", 9)


@pytest.mark.parametrize(("side", "words"), [("P", "out of step"), ("D", "not announced")])
def test_a_word_out_of_turn_ends_the_link_and_not_the_engine(memory_pair, side, words):
    """P says that it has sent what D has not granted, or D grants what P has not announced."""
    p, d = memory_pair
    half(p, d)
    rank = {"P": p, "D": d}[side].ranks[0].rank
    (peer,) = rank.core.roles[0].peers
    number = peer.link.number
    said = m.Sent("k", 1, 99, number, False) if side == "P" else m.Grant("k", 1, 99, 4096, number, 0)
    on_engine_thread(rank, lambda: peer.connection.send(m.encode(said)))
    assert words in failure(d)
    wait_for(lambda: value(p, "links_aborted") == 1, what="the end of the link")
    ends(p, d)
    begin(p, d, "again")
    load(d, "again")
    arrives(d, "again")


def test_a_request_outlives_any_number_of_lost_connections_within_a_lease(make_memory):
    p, d = make_memory("P"), make_memory("D", lease_seconds=30.0)
    peers = d.ranks[0].rank.core.decode.peers
    expect(p, d)
    for _ in range(6):
        wait_for(lambda: [peer for peer in peers if peer.dialing.open], what="a connection")
        (peer,) = peers
        on_engine_thread(
            d.ranks[0].rank, lambda peer=peer: peers.lose(peer, "cut by a test", time.monotonic())
        )
    # A prompt that P has begun would end with the connection on which D has claimed it.
    wait_for(lambda: [peer for peer in peers if peer.dialing.open], what="the last connection")
    prefill(p, "k", d.address, TOKENS, BLOCKS, chunk=TOKENS)
    load(d)
    arrives(d)


def test_a_request_that_p_never_vouches_for_ends_a_lease_after_its_connection_was_lost_first(make_memory):
    p, d = make_memory("P"), make_memory("D", lease_seconds=1.0)
    expect(p, d)
    peers, end = d.ranks[0].rank.core.roles[0].peers, time.monotonic() + 10.0

    def cut() -> None:
        for peer in peers:
            if peer.dialing.open:
                peers.lose(peer, "cut by a test", time.monotonic())

    while not d.ranks[0].events(do.LoadFailed):
        assert time.monotonic() < end, "it is asked for anew without end"
        on_engine_thread(d.ranks[0].rank, cut)


@pytest.mark.parametrize(
    ("geometry", "change", "words"),
    [
        (ONE, {"weights": "other"}, ("weights", "made-up", "other")),
        (dataclasses.replace(ONE, kv_heads=3), {}, ("2", "3")),
    ],
    ids=["weights", "cache"],
)
def test_ranks_that_do_not_fit_refuse_each_other(make_memory, geometry, change, words):
    p, d = make_memory("P"), make_memory("D", geometry)
    says(d, msgspec.structs.replace(d.ranks[0].hello, **change))
    expect(p, d)
    reason = failure(d)
    assert all(word in reason for word in words), reason
    assert reason.startswith(f"{d.address} and {p.address} do not fit: "), reason


PIPELINED = {"layers": (2, 2), "tp": 1}


def test_ranks_of_p_that_describe_their_engine_differently_are_not_believed(make_memory):
    """Each of them fits D by itself; together they would send other rectangles than D has planned."""
    p, d = make_memory("P", Geometry(tp=2), lease_seconds=60.0), make_memory("D", lease_seconds=60.0)
    mine = p.ranks[1].hello
    says(p, msgspec.structs.replace(mine, cache=other_group(mine.cache, **PIPELINED)), 1)
    expect(p, d)
    verdict = f"{p.address.shifted(1)} and {p.address} do not fit: their Hellos describe"
    assert verdict in failure(d)


def test_a_rank_of_p_that_speaks_of_an_engine_of_before_is_asked_anew(make_memory):
    p, d = make_memory("P", Geometry(tp=2), lease_seconds=60.0), make_memory("D", lease_seconds=60.0)
    true = p.ranks[1].hello
    says(p, msgspec.structs.replace(true, cache=other_group(true.cache, **PIPELINED)), 1)
    peers = d.ranks[0].rank.core.decode.peers
    lose = peers.lose

    def mend(peer, reason, now):
        says(p, true, 1)
        table = p.ranks[1].rank.core.roles[0].peers
        on_engine_thread(p.ranks[1].rank, lambda: [table.remove(each) for each in table])
        lose(peer, reason, now)

    peers.lose = mend
    begin(p, d)
    load(d)
    arrives(d)


def test_a_second_instance_on_the_same_port(make_memory):
    p = make_memory("P")
    with pytest.raises(PortTaken, match=r"ports \d+ to \d+ \(kv_port.*kv_port of its own"):
        make_memory("P", kv_port=p.address.port)


def test_a_request_paired_with_another_d(make_memory):
    p, d = make_memory("P"), make_memory("D")
    p.do(do.HoldPrompt("k", NOWHERE))
    wait_for(lambda: value(p, "prompts"))
    expect(p, d)
    assert str(NOWHERE) in failure(d)
