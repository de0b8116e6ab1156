"""Room for KV that comes ahead of its request."""

from __future__ import annotations

import pytest
import torch

from p2pkv.engine.shelves import Shelves

CPU = torch.device("cpu")


@pytest.mark.parametrize("room", [0, 63, 64, 100, 200])
def test_what_was_given_is_not_exceeded(room: int) -> None:
    """Slots come in steps of 64 bytes, and the room that somebody asks for need not."""
    shelves, whole = Shelves(room, CPU), room // 64 * 64
    assert shelves.take(whole + 1, 0.0) is None
    shelf = shelves.take(whole, 0.0)
    assert (shelf is not None) == (whole > 0)
    if shelf is not None:
        assert shelves.take(1, 0.0) is None
        shelves.give(shelf)
    assert shelves.used == 0
