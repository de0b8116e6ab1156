"""A core may have both roles. Its Hello still names one: that an instance is both is for later."""

from __future__ import annotations

import pytest
from virtual.moves import LEASE, half_a_push, nothing_was_lost, value
from virtual.pair import VirtualPair


@pytest.fixture
def pair() -> VirtualPair:
    return VirtualPair(roles="PD", lease_seconds=LEASE)


def test_ranks_with_both_roles_push_and_load(pair: VirtualPair) -> None:
    half_a_push(pair)
    assert [value(each, "peers") for each in (pair.p, pair.d)] == [1, 1]
    assert [value(each, "links") for each in (pair.p, pair.d)] == [1, 1]
    for engine in (pair.p, pair.d):
        core = engine.rank.core
        assert core.prefill is not None and core.decode is not None
        assert len(core.prefill.peers) + len(core.decode.peers) == 1
    nothing_was_lost(pair)
