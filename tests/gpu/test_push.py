"""Engines in two processes: what P computed is what D holds, and what happens when D is killed.

All also runs on a CPU with the host link, so that the tests themselves are tried where no GPU is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from p2pkv.bench.harness import BenchError, wait_for
from p2pkv.bench.nccl import Messages, messages
from p2pkv.engine import commands as do

SIZES = [64 << 10, 1 << 20, 8 << 20]
TOTAL = 32 << 20
LEASE_SECONDS = 3.0

CPU = "host", ("cpu", "cpu")
PLACES = [
    pytest.param(("nccl", ("cuda:0", "cuda:0")), id="nccl-on-one-gpu", marks=pytest.mark.gpu),
    pytest.param(("nccl", ("cuda:0", "cuda:1")), id="nccl-on-two-gpus", marks=pytest.mark.two_gpus),
    pytest.param(("ipc", ("cuda:0", "cuda:0")), id="ipc-on-one-gpu", marks=pytest.mark.gpu),
    pytest.param(("ipc", ("cuda:0", "cuda:1")), id="ipc-on-two-gpus", marks=pytest.mark.two_gpus),
]


@pytest.fixture(params=PLACES)
def both(request: pytest.FixtureRequest) -> Iterator[Messages]:
    link, devices = request.param
    with messages(link, devices, SIZES, TOTAL, lease_seconds=LEASE_SECONDS) as pair:
        yield pair


def until(condition: Callable[[], object], seconds: float = 30.0) -> float:
    """Seconds until `condition()` is true. Raises AssertionError if that takes longer."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, f"not in {seconds:g} s"
        time.sleep(0.002)
    return time.monotonic() - begin


def test_bytes_on_d_equal_bytes_on_p(both: Messages) -> None:
    """D looks at samples of every push, and P at the number of bytes."""
    for size in SIZES:
        for _ in range(3):
            assert both.push(size) > 0
        sent = both.rank(size).counters.values
        assert sent["bytes_sent"] == 3 * both.total and sent["chunks_filler"] == 0


@pytest.mark.parametrize("place", [pytest.param(CPU, id="cpu"), *PLACES])
def test_the_two_ends_compute_the_same_checksums(place: tuple[str, tuple[str, str]]) -> None:
    link, devices = place
    if devices[0] == "cpu":
        pytest.importorskip("xxhash", reason="on a CPU the checksum is xxhash's")
    with messages(link, devices, SIZES, TOTAL, lease_seconds=LEASE_SECONDS, verify=True) as pair:
        for size in SIZES:
            assert pair.push(size) > 0
            (peer,) = pair.rank(size).core.roles[0].peers
            assert peer.verify


def test_the_bare_link_carries_every_size(both: Messages) -> None:
    assert all(both.link(size) > 0 for size in SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize("both", PLACES[:2], indirect=True)
def test_nccl_by_itself(both: Messages) -> None:
    assert all(both.raw(size) > 0 for size in SIZES)


def test_d_is_killed_in_mid_transfer_and_comes_back(both: Messages) -> None:
    """P hears nothing from the link: its own leases end the transfer, and a new D gets a new link."""
    size = SIZES[0]
    rank = both.rank(size)
    both.push(size)
    before = rank.counters.values["bytes_sent"]
    key = both.hold(size, share=0.5)  # so that it cannot end before D does
    both.ask(size, key)
    until(lambda: rank.counters.values["bytes_sent"] > before)
    both.decoder.kill()
    both.decoder.wait(10.0)
    begin = time.monotonic()
    rank.revoke([key])
    assert time.monotonic() - begin < 1.0, "the forward's thread has waited for the network"
    wait_for(rank, do.BlocksFree(key))
    assert time.monotonic() - begin < 3 * LEASE_SECONDS
    rank.do(do.Forget(key))
    both.restart_decode()
    for again in SIZES:
        assert both.push(again) > 0
    gauges = ("prompts", "prompts_held", "copies", "sends_under_way", "staging_bytes")
    until(lambda: not any(rank.counters.snapshot()[name] for name in gauges))


def test_an_aborted_prompt_frees_its_pages_at_once(both: Messages) -> None:
    rank = both.rank(SIZES[0])
    both.push(SIZES[0])
    key = both.hold(SIZES[0])
    begin = time.monotonic()
    rank.do(do.Abort(key, "a test needs it no more"))
    wait_for(rank, do.BlocksFree(key))
    assert time.monotonic() - begin < LEASE_SECONDS, "it has waited for a lease"
    rank.do(do.Forget(key))
    assert both.push(SIZES[0]) > 0


def test_wrong_bytes_would_be_noticed(both: Messages) -> None:
    """What the other tests rest on: D compares what it got with what P should have had."""
    both.memory.cells.fill_(1)
    if both.device != "cpu":
        torch.cuda.synchronize()  # needs a GPU
    with pytest.raises(BenchError, match="D does not hold P's KV"):
        both.push(SIZES[0])


@pytest.mark.parametrize("both", [pytest.param(CPU, id="cpu")], indirect=True)
def test_all_of_it_on_a_cpu(both: Messages) -> None:
    """With one pair of processes: each takes seconds to start."""
    test_bytes_on_d_equal_bytes_on_p(both)
    test_the_bare_link_carries_every_size(both)
    test_d_is_killed_in_mid_transfer_and_comes_back(both)
    test_an_aborted_prompt_frees_its_pages_at_once(both)
    test_wrong_bytes_would_be_noticed(both)
