"""Room for KV that comes ahead of its request."""

from __future__ import annotations

import pytest
import torch

from p2pkv.engine.prefetch import PrefetchBuffers

CPU = torch.device("cpu")


@pytest.mark.parametrize("room", [0, 63, 64, 100, 200])
def test_what_was_given_is_not_exceeded(room: int) -> None:
    """Slots come in steps of 64 bytes, and the room that somebody asks for need not."""
    buffers, whole = PrefetchBuffers(room, CPU), room // 64 * 64
    assert buffers.take(whole + 1, 0.0) is None
    buffer = buffers.take(whole, 0.0)
    assert (buffer is not None) == (whole > 0)
    if buffer is not None:
        assert buffers.take(1, 0.0) is None
        buffers.give(buffer)
    assert buffers.used == 0
