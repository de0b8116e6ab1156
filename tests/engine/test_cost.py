"""What an engine thread looks at does not grow with what waits, and P and D copy at the same time: looks are
counted and orders compared, no time is measured."""

from collections import Counter
from typing import Any

import pytest
from virtual.network import Line
from virtual.pair import VirtualEngine, VirtualPair

from p2pkv.engine import commands as do
from p2pkv.engine import context
from p2pkv.engine.decode import Decode, RequestEntry
from p2pkv.engine.from_prefill import InboundLink, PrefillPeer
from p2pkv.engine.prefill import Prefill, PromptEntry
from p2pkv.engine.to_decode import DecodePeer, OutboundLink
from p2pkv.protocol import messages as m
from support.engine.engines import Geometry, prefill
from support.engine.transfers import ends, expect, load

TOKENS, BLOCKS = 33, [0, 1, 2]
LEASE = 6.0
FEW, MANY = 5, 200
"""Requests that wait."""


class Rig(VirtualPair):
    """Some engines of P and D of one rank each, whose requests wait on both sides."""

    def __init__(self, prefills: int = 1, decodes: int = 1) -> None:
        super().__init__(Geometry(blocks=8), lease_seconds=LEASE)
        self.ps = [self.p, *(self.more("P") for _ in range(1, prefills))]
        self.ds = [self.d, *(self.more("D") for _ in range(1, decodes))]

    def wait_with(self, number: int, p: VirtualEngine, d: VirtualEngine) -> list[str]:
        """So many requests of this pair wait; their keys, when they are connected and their link is up."""
        keys = [f"{p.address}-{d.address}-{each}" for each in range(number)]
        expect(p, d, *keys, tokens=TOKENS)
        for key in keys:
            p.do(do.HoldPrompt(key, d.address))
        self.clock.pass_by(3.0)
        return keys

    def transfer(self, key: str, p: VirtualEngine, d: VirtualEngine) -> None:
        prefill(p, key, d.address, TOKENS, BLOCKS, chunk=TOKENS)
        load(d, key, TOKENS, BLOCKS)
        d.wait(do.Loaded(key))
        ends(p, d, key)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()

    def count(name: str, kind: type) -> None:
        plain = kind.__getattribute__

        def read(self: object, attribute: str) -> Any:
            counted[name] += 1
            return plain(self, attribute)

        monkeypatch.setattr(kind, "__getattribute__", read)

    count("request", RequestEntry)
    count("prompt", PromptEntry)
    return counted


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Counter[object]:
    counted: Counter[object] = Counter()

    def count(kind: type[InboundLink] | type[OutboundLink]) -> None:
        plain = kind.poll

        def poll(self: Any) -> Any:
            counted[self] += 1
            return plain(self)

        monkeypatch.setattr(kind, "poll", poll)

    count(InboundLink)
    count(OutboundLink)
    return counted


def test_a_request_that_waits_is_looked_at_once_a_heartbeat(looks: Counter[str]) -> None:
    rig = Rig()
    rig.wait_with(MANY, rig.p, rig.d)
    looks.clear()
    before = [each.rank.turns for each in (rig.p, rig.d)]
    rig.clock.pass_by(10.0)
    # A heartbeat a second reads a few attributes of each; 50 ticks a second, on both sides, read none.
    assert 0 < looks["request"] < 10 * 10 * MANY
    assert 0 < looks["prompt"] < 10 * 10 * MANY
    # What is due are heartbeats, their answers, and a look at the peers every quarter of a second.
    turns = [each.rank.turns - then for each, then in zip((rig.p, rig.d), before, strict=True)]
    assert max(turns) < 10 * 10


def test_a_transfer_looks_at_no_other_request(looks: Counter[str]) -> None:
    seen = {}
    for number in (FEW, MANY):
        rig = Rig()
        keys = rig.wait_with(number, rig.p, rig.d)
        rig.transfer(keys.pop(), rig.p, rig.d)  # the first one may meet a heartbeat
        looks.clear()
        rig.transfer(keys.pop(), rig.p, rig.d)
        seen[number] = looks.copy()
    for kind in ("request", "prompt"):
        assert 0 < seen[MANY][kind] < seen[FEW][kind] + MANY, kind


def test_requests_for_a_p_that_is_not_there_are_not_tried_one_by_one(looks: Counter[str]) -> None:
    rig = Rig()
    rig.p.rank.endpoint.listens = False
    expect(rig.p, rig.d, *(f"k{number}" for number in range(MANY)))
    rig.clock.pass_by(1.0)
    looks.clear()
    rig.clock.pass_by(1.0)
    assert 0 < looks["request"] < 20 * 50  # of one of them, 50 times
    rig.until(lambda: len(rig.d.failures) == MANY, 3 * LEASE)


def test_links_without_anything_under_way_are_polled_now_and_then(polls: Counter[object]) -> None:
    for prefills, decodes in ((4, 1), (1, 4)):
        rig = Rig(prefills, decodes)
        pairs = [(p, d) for p in rig.ps for d in rig.ds]
        keys = [rig.wait_with(60, *pair) for pair in pairs]
        polls.clear()
        busy, *others = pairs
        begin = rig.clock.now
        for key in keys[0][:50]:
            rig.transfer(key, *busy)
        seconds = rig.clock.now - begin
        one, many = (1, 0) if prefills > 1 else (0, 1)
        (role,) = busy[one].rank.core.roles
        links = {peer.address: peer.link for peer in role.peers}  # type: ignore[attr-defined]
        assert polls[links[str(busy[many].address)]] >= 50
        for pair in others:
            assert polls[links[str(pair[many].address)]] <= 4 * seconds + 4


def push_eight_messages(staging: int) -> None:
    """`staging`: how many of them fit into each side's."""
    rig = VirtualPair(Geometry((8,), blocks=8), chunk_bytes=4096, staging_bytes=staging * 4096)
    prefill(rig.p, "k", rig.d.address, TOKENS, BLOCKS, chunk=TOKENS)
    expect(rig.p, rig.d, "k", tokens=TOKENS)
    load(rig.d, "k", TOKENS, BLOCKS)
    rig.d.wait(do.Loaded("k"))


def test_p_sends_a_message_before_it_gathers_the_next_and_d_grants_before_it_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context, "LARGE_COPY", 1)
    seen: dict[str, list[str]] = {"P": [], "D": []}

    def note(side: str, name: str, kind: type, method: str, message: type = object) -> None:
        plain = getattr(kind, method)

        def noted(self: object, *given: Any) -> Any:
            if any(type(each) is message for each in given) or message is object:
                seen[side].append(name)
            return plain(self, *given)

        monkeypatch.setattr(kind, method, noted)

    note("P", "gather", Prefill, "_gather")
    note("P", "send", DecodePeer, "send", m.Sent)
    note("P", "out", OutboundLink, "launch")
    note("D", "write", Decode, "_scatter")
    note("D", "grant", PrefillPeer, "send", m.Grant)
    plain = PrefillPeer.flush

    def flush(peer: PrefillPeer) -> bool:
        if peer.connection.holding:  # type: ignore[attr-defined]
            seen["D"].append("out")
        return plain(peer)

    monkeypatch.setattr(PrefillPeer, "flush", flush)
    push_eight_messages(staging=4)
    assert seen == {
        "P": 4 * ["gather", "send", "out"],
        # There is room for two at a time.
        "D": [*2 * ["grant", "out"], *2 * ["write", "grant", "out"], "write", "write", "out"],
    }


def test_small_messages_go_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """To hand one to libzmq takes longer than to gather it."""
    flushed: list[int] = []
    real = Line.flush

    def flush(line: Line) -> bool:
        flushed.append(line.holding)
        return real(line)

    monkeypatch.setattr(Line, "flush", flush)
    push_eight_messages(staging=16)
    assert flushed.count(5) == flushed.count(4) == 1, "what is wanted with four grants, and four sends"
