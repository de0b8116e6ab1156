"""Gather and scatter of random rectangles between random geometries, against rows found one by one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pkv.kv import host
from p2pkv.kv.copiers import StorageCopier
from support.kv.pages import check_exchange

BOUNDS = ("WORTH_BYTES", "WORTH_PUTTING", "LONG_BYTES", "MANY_BLOCKS", "LARGE_BYTES", "BATCH_BYTES")
"""Which decide in which of its ways numpy copies."""


@pytest.mark.parametrize("by", ["numpy", "torch"])
@given(draw=st.randoms())
@settings(deadline=None, max_examples=200)
def test_a_rectangle_travels_between_any_two_layouts(by: str, draw: random.Random) -> None:
    """Rows listed; or blocks one by one, or several at once, of all layers or one by one. torch's index
    kernels, which a CPU also has, mean the same."""
    with pytest.MonkeyPatch.context() as patch:
        for name in BOUNDS:
            patch.setattr(host, name, draw.choice([1, 64, getattr(host, name)]))
        if by == "torch":
            patch.setattr("p2pkv.kv.cache.copier_of", StorageCopier)
        check_exchange(draw, "cpu")
