"""A byte that changes between P's slot and D's pages: with checksums its request fails, and no other."""

import re
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from virtual.network import Line
from virtual.pair import HALF, TOKEN, VirtualPair, value

from p2pkv.engine import commands as do
from p2pkv.kv import PagedCache
from p2pkv.protocol.messages import Sent, decode, encode
from support.engine.engines import Geometry, step, wrong_cells
from support.engine.transfers import BLOCKS, TOKENS, ask, begin, load

ONE, PACKED = Geometry(), Geometry(codec="page:vec", kv_heads=2, content=32, block=32)
CHUNKS = 6
"""Messages that a prompt has at least, with chunks of 4 KiB."""

ON_D = list(range(20, 26))


class Pair(VirtualPair):
    """A P and a D over links that flip a bit when they are told to, once one prompt has gone over them."""

    number = 0

    def __init__(self, geometry: Geometry = ONE, **options: object) -> None:
        super().__init__(geometry, **{"verify": True, "chunk_bytes": 4096} | options)
        assert self.transfer() == ("", [])

    def flip(self, side: str, operation: int = 0, place: float = 0.5, bit: int = 0) -> None:
        """A bit of a coming message changes: in P's slot, or in D's."""
        rank = (self.p if side == "P" else self.d).rank
        rank.wires.change(flip_at=operation, flip_place=place, flip_bit=bit)

    def transfer(self) -> tuple[str, list[tuple[int, ...]]]:
        """One prompt; why it failed, and which cells of its pages are not what P had computed."""
        self.number += 1
        key, salt = f"k{self.number}", self.number
        for page in self.d.ranks[0].pages:
            page.fill_(-1.0)
        begin(self.p, self.d, key, salt=salt)
        load(self.d, key, blocks=ON_D)
        reason = self.outcome(key)
        wrong = wrong_cells(self.d.ranks[0], ON_D, 0, TOKENS - 1, salt)
        self.rest(key)
        return reason, wrong

    def outcome(self, key: str) -> str:
        """Why this load has failed; "" if it has not."""
        rank: Any = self.d.ranks[0]

        def said() -> list[str]:
            failed = [each.reason for each in rank.events(do.LoadFailed) if each.key == key]
            return failed + [""] * rank.heard(do.Loaded(key))

        self.until(said, what=f"the outcome of {key}")
        (reason,) = said()
        return reason

    def written(self, wrong: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Those of these cells that do not hold what lay there before."""
        pages, block = self.d.ranks[0].pages, self.geometry.block
        return [
            (layer, token, head)
            for layer, token, head in wrong
            if not (pages[layer][ON_D[token // block], head, token % block] == -1.0).all()
        ]


def sums(reason: str) -> list[str]:
    """The checksums that a sentence names."""
    return re.findall(r"\b[0-9a-f]{16}\b", reason)


@settings(deadline=None, max_examples=20)
@given(
    geometry=st.sampled_from([ONE, PACKED]),
    side=st.sampled_from("PD"),
    operation=st.integers(0, CHUNKS - 1),
    place=st.floats(0, 1),
    bit=st.integers(0, 7),
)
@example(geometry=ONE, side="D", operation=CHUNKS - 1, place=1.0, bit=7)
@example(geometry=PACKED, side="P", operation=0, place=0.0, bit=0)
def test_a_flipped_bit_fails_its_load_and_the_next_one_is_right(
    geometry: Geometry, side: str, operation: int, place: float, bit: int
) -> None:
    pair = Pair(geometry)
    assert value(pair.d, "chunks_scattered") >= CHUNKS
    pair.flip(side, operation, place, bit)
    reason, wrong = pair.transfer()
    ours, theirs = sums(reason)
    assert ours != theirs and f"chunk {operation} from {pair.p.address}" in reason
    assert wrong and (geometry is PACKED or pair.written(wrong) == []), "what had changed was not written"
    assert value(pair.d, "links_aborted") == value(pair.p, "links_aborted") == 1
    assert value(pair.d, "chunks_corrupt") == value(pair.d, "transfers_failed") == 1
    assert pair.transfer() == ("", [])
    assert value(pair.d, "chunks_corrupt") == 1


def test_p_hears_of_it_and_sends_no_more_of_that_prompt(caplog: pytest.LogCaptureFixture) -> None:
    """The prefill is still under way: P has half of the prompt left."""
    pair = Pair()
    pair.flip("D", operation=1)
    ask(pair.p, pair.d, blocks=ON_D)
    step(pair.p, "k", BLOCKS, 0, HALF)
    assert "its bytes changed on the way" in pair.outcome("k")
    pair.p.wait(do.BlocksFree("k"))
    assert "transfer k was not sent: D cancelled: chunk 1 from " in caplog.text
    sent = value(pair.p, "bytes_sent")
    step(pair.p, "k", BLOCKS, HALF, TOKENS)
    pair.rest("k")
    assert pair.transfer() == ("", [])
    assert value(pair.p, "bytes_sent") == sent + (TOKENS - 1) * TOKEN
    assert value(pair.p, "transfers_failed") == 1


@pytest.mark.parametrize("side", ["P", "D"])
def test_without_checksums_the_same_fault_goes_unseen(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is computed."""
    monkeypatch.setattr(PagedCache, "digest", Mock(side_effect=AssertionError("a checksum nobody wants")))
    pair = Pair(verify=False)
    pair.flip(side, operation=2)
    reason, wrong = pair.transfer()
    assert reason == "" and len(wrong) == 1 == len(pair.written(wrong))
    assert value(pair.d, "chunks_corrupt") == value(pair.d, "links_aborted") == 0


def test_what_the_link_carries_beside_it_fails_too_and_is_right_when_asked_again() -> None:
    """Two prompts under way on one link: neither gets a wrong byte."""
    pair = Pair()
    pair.flip("D", operation=1)
    keys = {"a": list(range(6)), "b": list(range(6, 12))}
    for key, blocks in keys.items():
        begin(pair.p, pair.d, key, blocks=blocks)
        pair.d.wait(do.Begun(key))
    for key, blocks in keys.items():
        pair.d.do(do.Load(key, 0, TOKENS - 1, (blocks,)))
    reasons = {key: pair.outcome(key) for key in keys}
    assert any("its bytes changed on the way" in reason for reason in reasons.values())
    for key, blocks in keys.items():
        assert reasons[key] or wrong_cells(pair.d.ranks[0], blocks, 0, TOKENS - 1) == []
    pair.rest(*keys)
    assert pair.transfer() == ("", [])


def test_a_p_that_leaves_the_checksum_out_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, real = Pair(), Line.hold

    def silent(line: Line, data: bytes) -> bool:
        message = decode(data)
        if isinstance(message, Sent):
            data = encode(Sent(message.key, message.attempt, message.chunk, message.link, message.filler))
        return real(line, data)

    monkeypatch.setattr(Line, "hold", silent)
    reason, wrong = pair.transfer()
    assert "and none there" in reason and pair.written(wrong) == []
    monkeypatch.undo()
    assert pair.transfer() == ("", [])
