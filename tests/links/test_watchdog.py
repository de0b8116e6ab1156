"""The engine's thread hangs in a call to the device, and its links are broken from outside."""

import threading
import time

import pytest

from p2pkv.links.base import LinkError
from p2pkv.links.nccl import NcclInbound, NcclLinks
from p2pkv.links.watchdog import Watchdog
from support.links.pairs import Pair, connect, nccl_links, simulated
from support.nccl.gpu import SimulatedGpu
from support.waiting import wait_for

WINDOW = 1 << 16
SECONDS = 0.2


def hanging() -> tuple[SimulatedGpu, NcclLinks, Pair]:
    """D with a receive on its device, whose P sends nothing."""
    gpu = SimulatedGpu()
    p, d = nccl_links(), nccl_links(gpu=gpu)
    pair = connect((p, d), WINDOW)
    wait_for(lambda: not gpu.launched)
    assert pair.inbound.post(100) is not None
    wait_for(lambda: pair.inbound.poll() or bool(gpu.launched))
    wait_for(lambda: pair.inbound.poll() or not simulated(d).launching)
    return gpu, d, pair


def synchronised(gpu: SimulatedGpu) -> None:
    """What a call that takes memory may do: wait for all that runs on the device (test_small_copies.py)."""
    wait_for(lambda: not gpu.launched, what="somebody who frees the device")


def test_a_turn_that_hangs_on_the_device_ends_when_its_links_are_broken() -> None:
    gpu, links, pair = hanging()
    watchdog = Watchdog(links, SECONDS)
    with watchdog.turn():
        synchronised(gpu)
    with pytest.raises(LinkError, match="hangs in a call to the device"):
        pair.inbound.poll()
    pair.inbound.abort()
    wait_for(lambda: links.staging.used == 0 and simulated(links).live == 0)
    assert simulated(links).aborted == 1
    watchdog.close()


def test_turns_that_are_short_break_nothing() -> None:
    _, links, pair = hanging()
    seconds = 5 * SECONDS  # a busy machine may take some of them for one turn
    watchdog = Watchdog(links, seconds)
    end = time.monotonic() + 1.5 * seconds
    while time.monotonic() < end:
        with watchdog.turn():
            pair.inbound.poll()
    watchdog.close()
    pair.abort()


@pytest.mark.parametrize("wherever", [False, True])
def test_the_communicator_that_the_owner_is_calling_comes_last(wherever: bool) -> None:
    """With launches that block, the owner is inside the call until the peer sends, or the link is aborted."""
    gpu = SimulatedGpu()
    p, d = nccl_links(), nccl_links(gpu=gpu)
    called, other = connect((p, d), WINDOW), connect((p, d), WINDOW)
    wait_for(lambda: not gpu.launched)
    assert other.inbound.post(100)
    wait_for(lambda: other.inbound.poll() or gpu.launched)
    simulated(d).launches_wait = True
    inside = called.inbound
    assert isinstance(inside, NcclInbound)

    def rescue() -> None:
        wait_for(lambda: gpu.launched == 2)
        d.rescue("a test", wherever)
        wait_for(lambda: simulated(d).live == (0 if wherever else 1))
        if not wherever:
            assert inside._calling.locked(), "it has been left alone"
            d.rescue("a test", True)

    thread = threading.Thread(target=rescue)
    thread.start()
    called.inbound.post(100)
    with pytest.raises(LinkError, match="a test"):
        called.inbound.poll()
    thread.join(20)
    for pair in (called, other):
        with pytest.raises(LinkError, match="a test"):
            pair.inbound.poll()
        pair.abort()
    wait_for(lambda: d.staging.used == 0)
    simulated(d).violations.clear()  # an abort during a call, as the last resort


def test_a_link_that_is_coming_up_is_given_up() -> None:
    links = nccl_links()
    inbound, _ = links.accept(nccl_links().invite(), WINDOW)
    links.rescue("a test", False)
    with pytest.raises(LinkError, match="a test"):
        inbound.poll()
    inbound.abort()
