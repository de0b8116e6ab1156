"""The way of one layer's bytes stays short."""

from __future__ import annotations

from crossings import crossings

MOST = 64
"""Calls from one file of p2pkv to another in the engines; three more on either forward thread make 70."""

MOST_FILES = 14
"""Of one phase."""


def test_one_layers_bytes_cross_few_files() -> None:
    found = crossings()
    assert sum(way.total() for way, _ in found.values()) <= MOST, found
    assert all(
        len({file for came, to, _ in way for file in (came, to)}) <= MOST_FILES for way, _ in found.values()
    )
