"""Gather and scatter of random rectangles between random geometries, against rows found one by one."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from support.kv.pages import check_exchange


@given(draw=st.randoms())
@settings(deadline=None, max_examples=200)
def test_a_rectangle_travels_between_any_two_layouts(draw: random.Random) -> None:
    check_exchange(draw, "cpu")
