"""A byte that changes between P's slot and D's pages: with checksums its request fails, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from p2pkv.control.endpoint import Connection
from p2pkv.engine import commands as do
from p2pkv.kv import PagedCache
from p2pkv.kv.checksum import FOLD, XXH3
from p2pkv.protocol.messages import Sent, decode, encode
from support.engine.engines import (
    Engine,
    Geometry,
    make_engine,
    on_engine_thread,
    plain_links,
    step,
    wrong_cells,
)
from support.engine.fake_device import DeviceCache
from support.engine.transfers import TOKENS, ask, begin, ends, load, rest, value
from support.links.faulty import Faults, FaultyLinks
from support.links.pairs import nccl_links
from support.nccl import simulated as nccl_simulated
from support.waiting import wait_for

ONE = Geometry()
CHUNKS = 6
"""Messages of a prompt with chunks of 4 KiB."""

PACKED = Geometry(codec="page:vec", kv_heads=2, content=32, block=32)


class Pair:
    """A P and a D over links that flip a bit when they are told to."""

    def __init__(self, p: Engine, d: Engine, links: dict[str, FaultyLinks]) -> None:
        self.p, self.d, self._links = p, d, links
        self._number = 0

    def flip(self, side: str, operation: int = 0, place: float = 0.5, bit: int = 0) -> None:
        """In the link that there is, a bit of a coming message changes: in P's slot, or in D's."""
        faults = {"flip_at": operation, "flip_place": place, "flip_bit": bit}
        on_engine_thread(self.of(side).ranks[0].rank, lambda: self._links[side].change(**faults))

    def transfer(self) -> tuple[str, list[tuple[int, ...]]]:
        """One prompt; why it failed, and which cells of its pages are not what P had computed."""
        self._number += 1
        key, salt, blocks = f"k{self._number}", self._number, list(range(20, 26))
        for page in self.d.ranks[0].pages:
            page.fill_(-1.0)
        begin(self.p, self.d, key, salt=salt)
        load(self.d, key, blocks=blocks)
        reason = self.outcome(key)
        wrong = wrong_cells(self.d.ranks[0], blocks, 0, TOKENS - 1, salt)
        ends(self.p, self.d, key)
        rest(self.p, self.d)
        return reason, wrong

    def outcome(self, key: str) -> str:
        found: list[str] = []

        def ended() -> bool:
            loaded = self.d.ranks[0].heard(do.Loaded(key))
            found[:] = [each.reason for each in self.d.ranks[0].events(do.LoadFailed) if each.key == key]
            assert not (loaded and found), "a load has one outcome"
            return loaded or bool(found)

        wait_for(ended, what=f"the outcome of {key}")
        return found[0] if found else ""

    def written(self, wrong: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those of these cells that do not hold what lay there before."""
        pages = self.d.ranks[0].pages
        return [
            (layer, token, head)
            for layer, token, head in wrong
            if not (pages[layer][20 + token // 16, head, token % 16] == -1.0).all()
        ]

    def of(self, side: str) -> Engine:
        return self.p if side == "P" else self.d


def sums(reason: str) -> list[str]:
    """The checksums that a sentence names."""
    return re.findall(r"\b[0-9a-f]{16}\b", reason)


@pytest.fixture(params=["memory", "shared-memory", "tcp", "nccl"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


memory_only = pytest.mark.parametrize("kind", ["memory"], indirect=True)


@pytest.fixture
def start(kind: str) -> Iterator[Callable[..., Pair]]:
    """Starts a Pair: `start(verify=...)`, or with options of each side; stopped at the end."""
    plain, links, made = plain_links(kind), dict[str, FaultyLinks](), list[Engine]()

    def link(side: str) -> FaultyLinks:
        inner = nccl_links(staging=1 << 20) if kind == "nccl" else plain(side, 0)
        links[side] = FaultyLinks(inner, Faults())
        return links[side]

    def make(
        on_p: Geometry = ONE, on_d: Geometry = ONE, p: Any = None, d: Any = None, **both: object
    ) -> Pair:
        for side, geometry, own in (("P", on_p, p), ("D", on_d, d)):
            made.append(make_engine(side, geometry, lambda rank, side=side: link(side), **both | (own or {})))
        return Pair(*made[-2:], links)

    yield make
    for engine in reversed(made):
        engine.stop()
    nccl_simulated.let_go()


@pytest.mark.parametrize("side", ["P", "D"])
def test_a_flipped_byte_fails_its_load_and_the_next_one_is_right(start, side):
    pair = start(verify=True)
    assert pair.transfer() == ("", [])
    pair.flip(side, operation=2)
    reason, wrong = pair.transfer()
    ours, theirs = sums(reason)
    assert ours != theirs and f"chunk 2 from {pair.p.address}" in reason
    assert wrong and pair.written(wrong) == [], "what had changed was not written"
    assert value(pair.d, "links_aborted") == 1
    wait_for(lambda: value(pair.p, "links_aborted") == 1, what="P's end of the link to be given up")
    assert value(pair.d, "chunks_corrupt") == value(pair.d, "transfers_failed") == 1
    assert pair.transfer() == ("", [])
    assert value(pair.d, "chunks_corrupt") == 1


def test_p_hears_of_it_and_sends_no_more_of_that_prompt(start, caplog):
    """The prefill is still under way: P has half of the prompt left."""
    pair = start(verify=True, chunk_bytes=4096)
    assert pair.transfer() == ("", [])
    pair.flip("D", operation=1)
    ask(pair.p, pair.d, blocks=list(range(20, 26)))
    step(pair.p, "k", list(range(6)), 0, 48)
    assert "its bytes changed on the way" in pair.outcome("k")
    pair.p.wait(do.BlocksFree("k"))
    wait_for(lambda: "transfer k was not sent: " in caplog.text, what="the end on P")
    assert "transfer k was not sent: D cancelled: chunk 1 from " in caplog.text
    sent = value(pair.p, "bytes_sent")
    step(pair.p, "k", list(range(6)), 48, TOKENS)
    for engine in (pair.p, pair.d):
        engine.do(do.Forget("k"))
    assert pair.transfer() == ("", [])
    assert value(pair.p, "bytes_sent") == sent + (TOKENS - 1) * 4 * 2 * 8 * 4
    assert value(pair.p, "transfers_failed") == 1


@pytest.mark.parametrize("side", ["P", "D"])
def test_without_checksums_the_same_fault_goes_unseen(start, side):
    pair = start()
    assert pair.transfer() == ("", [])
    pair.flip(side, operation=2)
    reason, wrong = pair.transfer()
    assert reason == "" and len(wrong) == 1 == len(pair.written(wrong))
    assert value(pair.d, "chunks_corrupt") == value(pair.d, "links_aborted") == 0


@memory_only
@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@given(
    side=st.sampled_from("PD"),
    operation=st.integers(0, CHUNKS - 1),
    place=st.floats(0, 1),
    bit=st.integers(0, 7),
)
@example(side="D", operation=CHUNKS - 1, place=1.0, bit=7)
@example(side="P", operation=0, place=0.0, bit=0)
def test_no_bit_of_any_message_changes_unseen(start, side, operation, place, bit):
    if not hasattr(start, "pair"):
        start.pair = start(verify=True, chunk_bytes=4096)
        assert start.pair.transfer() == ("", [])
        assert value(start.pair.d, "chunks_scattered") >= CHUNKS
    pair, before = start.pair, value(start.pair.d, "chunks_corrupt")
    pair.flip(side, operation, place, bit)
    reason, wrong = pair.transfer()
    assert len(set(sums(reason))) == 2 and pair.written(wrong) == []
    assert value(pair.d, "chunks_corrupt") == before + 1
    assert pair.transfer() == ("", [])


@memory_only
def test_what_the_link_carries_beside_it_fails_too_and_is_right_when_asked_again(start):
    """Two prompts under way on one link: neither gets a wrong byte."""
    pair = start(verify=True)
    assert pair.transfer() == ("", [])
    pair.flip("D", operation=1)
    keys = {"a": list(range(6)), "b": list(range(6, 12))}
    for key, blocks in keys.items():
        begin(pair.p, pair.d, key, blocks=blocks)
        pair.d.wait(do.Begun(key))
    for key, blocks in keys.items():
        pair.d.do(do.Load(key, 0, TOKENS - 1, (blocks,)))
    reasons = {key: pair.outcome(key) for key in keys}
    assert sum(1 for reason in reasons.values() if "its bytes changed on the way" in reason) >= 1
    for key, blocks in keys.items():
        assert reasons[key] or wrong_cells(pair.d.ranks[0], blocks, 0, TOKENS - 1) == []
        ends(pair.p, pair.d, key)
    assert pair.transfer() == ("", [])


@memory_only
def test_a_p_that_leaves_the_checksum_out_is_not_believed(start, monkeypatch):
    pair = start(verify=True)
    assert pair.transfer() == ("", [])
    real = Connection.hold

    def silent(connection, data):
        message = decode(data)
        if isinstance(message, Sent):
            data = encode(Sent(message.key, message.attempt, message.chunk, message.link, message.filler))
        return real(connection, data)

    monkeypatch.setattr(Connection, "hold", silent)
    reason, wrong = pair.transfer()
    assert "and none there" in reason and pair.written(wrong) == []
    monkeypatch.undo()
    assert pair.transfer() == ("", [])


@memory_only
def test_packed_pages_are_checked_too(start):
    pair = start(PACKED, PACKED, verify=True)
    assert pair.transfer()[0] == ""
    pair.flip("P", operation=1, place=1.0, bit=7)
    assert len(sums(pair.transfer()[0])) == 2
    assert pair.transfer()[0] == ""


@memory_only
@pytest.mark.parametrize("asks", ["P", "D"])
@pytest.mark.parametrize("flips", ["P", "D"])
def test_it_is_enough_that_one_side_asks(start, asks, flips):
    pair = start(p={"verify": asks == "P"}, d={"verify": asks == "D"})
    assert pair.transfer() == ("", [])
    pair.flip(flips, operation=1)
    assert len(sums(pair.transfer()[0])) == 2
    assert pair.transfer() == ("", [])


def fold_instead(cache: PagedCache) -> PagedCache:
    cache.digest_name = FOLD
    return cache


@memory_only
@pytest.mark.parametrize("asks", ["P", "D", ""])
def test_ranks_whose_devices_compute_other_checksums_refuse_each_other_if_one_asks(start, asks):
    pair = start(p={"verify": asks == "P"}, d={"verify": asks == "D", "device": fold_instead})
    if not asks:
        assert pair.transfer() == ("", [])
        return
    pair.d.do(do.Expect("k", pair.p.address, TOKENS, b"digest"))
    reason = pair.outcome("k")
    assert f"{XXH3} at {pair.p.address}" in reason and f"{FOLD} at {pair.d.address}" in reason


@memory_only
def test_nothing_is_computed_when_nobody_asks(start, monkeypatch):
    never = Mock(side_effect=AssertionError("a checksum that nobody wants"))
    monkeypatch.setattr(PagedCache, "digest", never)
    monkeypatch.setattr(DeviceCache, "digest", never)
    pair = start()
    assert pair.transfer() == ("", [])
