"""P's side: how what is computed is cut into chunks, and when they are announced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol.sender_rigs import ROW, TERMS, WHOLE, Rig, chunk, computed

from p2pkv.protocol import sender as module
from p2pkv.protocol.machine import SendTo
from p2pkv.protocol.messages import Chunk, Piece
from p2pkv.protocol.sender import PromptPhase, SendPhase


def test_full_chunks_go_at_once_and_the_rest_when_the_step_is_over() -> None:
    rig = Rig(replace(TERMS, chunk_bytes=4 * ROW))
    rig.offer()
    rig.claim()
    rig.want()
    assert rig.compute(3, (0, 1)) == []
    assert rig.compute(6, (0, 1)) == [SendTo(0, chunk(0, Piece(0, 2, 3, 0, 4)))]
    assert rig.compute(6, (1, 2)) == [
        SendTo(0, chunk(1, Piece(0, 2, 3, 4, 6))),
        SendTo(0, chunk(2, Piece(0, 3, 4, 0, 4))),
    ]
    assert rig.sender.flush() == [SendTo(0, chunk(3, Piece(0, 3, 4, 4, 6)))]
    assert rig.sender.flush() == []


def test_a_chunk_is_no_larger_than_d_takes() -> None:
    rig = computed()
    rig.claim(limit=4 * ROW)
    said = rig.want()
    sizes = [
        each.message.nbytes for each in said if isinstance(each, SendTo) and isinstance(each.message, Chunk)
    ]
    assert max(sizes) == 4 * ROW and sum(sizes) == 18 * ROW


def test_nothing_is_announced_before_it_is_known_how_much_d_takes() -> None:
    rig = computed()
    rig.claim(limit=0)
    assert rig.want() == [] and rig.sender.flush() == []
    assert rig.claim(limit=1 << 20) == [SendTo(0, WHOLE)]
    assert rig.claim(limit=0) == []


def test_announced_chunks_are_bounded_and_go_on_as_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ANNOUNCED", 3)
    rig = Rig(replace(TERMS, chunk_bytes=1))
    rig.offer()
    rig.compute()
    rig.claim()
    said = rig.want()
    assert [each.message.chunk for each in said if isinstance(each, SendTo)] == [0, 1, 2]  # type: ignore[union-attr]
    count = 0
    while said:
        count += len(said)
        assert len(rig.sender.sends[0].announced) <= 3
        after = rig.carry(said)
        said = [each for each in after if isinstance(each, SendTo) and isinstance(each.message, Chunk)]
    assert count == 18 and rig.states == (PromptPhase.RELEASED, [SendPhase.DRAINED])
