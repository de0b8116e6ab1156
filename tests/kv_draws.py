"""Hypothesis as the source of the choices that kv_support makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st


class FromHypothesis:
    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, least: int, most: int) -> int:
        return self._data.draw(st.integers(least, most))

    def one_of(self, options: Sequence[Any]) -> Any:
        return self._data.draw(st.sampled_from(options))
