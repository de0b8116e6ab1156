"""The model of a link's throughput: it is about the code as it is, and the rule for chunks is good enough."""

from __future__ import annotations

import pytest

from benchmarks.link_model import MIB, SOURCES, US, Inputs, chunk_of, seconds_per_message, share_of_wire
from p2pkv.config import default_staging
from p2pkv.links import nccl, nccl_ends


@pytest.mark.parametrize("memory", [80, 94, 141, 192])
def test_chunks_by_the_rule_fill_most_of_a_fast_wire(memory: int) -> None:
    chunk = chunk_of(default_staging(memory << 30))
    assert share_of_wire(chunk, Inputs()) >= 0.8
    assert share_of_wire(8 * MIB, Inputs()) < 0.6, "which is why the rule is there"


def test_the_model_has_the_links_own_numbers() -> None:
    assert Inputs().poll == pytest.approx(nccl.POLL_SECONDS)
    assert (nccl_ends.ON_DEVICE, nccl_ends.ANNOUNCED) == (1, 2)
    assert set(SOURCES) == set(vars(Inputs()))


def test_a_message_costs_its_bytes_and_a_gap() -> None:
    given = Inputs(wire=1e9, efficiency=1.0)
    one, two = (seconds_per_message(size * MIB, given) for size in (1, 2))
    assert two - one == pytest.approx(MIB / 1e9)
    assert one - MIB / 1e9 == pytest.approx(155 * US)
    assert seconds_per_message(MIB, given, on_device=2) == pytest.approx(MIB / 1e9)
