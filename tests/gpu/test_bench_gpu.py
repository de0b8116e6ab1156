"""What `p2pkv bench --link nccl` alone does on a GPU: a fan-out, and the memory of communicators."""

from __future__ import annotations

import pytest

from p2pkv.bench import fanout
from p2pkv.bench.fanout import fan_out

TOTAL = 32 << 20

DEVICES = [
    pytest.param(["cuda:0"], id="one-gpu", marks=pytest.mark.gpu),
    pytest.param(["cuda:0", "cuda:1"], id="two-gpus", marks=pytest.mark.two_gpus),
]


@pytest.mark.parametrize("devices", [pytest.param(["cpu"], id="cpu"), *DEVICES])
def test_ranks_that_share_the_heads_get_what_p_computed(devices: list[str]) -> None:
    """Ranks of D look at samples, and count bytes. Several of them on a CPU: tests/cli/test_bench.py."""
    link, wide = ("host", (1,)) if devices == ["cpu"] else ("nccl", (1, 2, 4))
    with fan_out(link, devices, wide, TOTAL, 1 << 20) as fans:
        rows = fanout.rows_of(fans, wide, 2)
    assert all(min(row["push"]) > 0 for row in rows)


@pytest.mark.parametrize("devices", DEVICES)
def test_communicators_take_device_memory(devices: list[str]) -> None:  # needs a GPU
    costs = fanout.measure_communicators("nccl", (devices[0], devices[-1]))
    assert len(costs["links"]) == fanout.LINKS and sum(costs["links"]) > 0
