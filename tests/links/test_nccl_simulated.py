"""The simulated NCCL finds what NCCL leaves undefined, so that no other test can rest on it."""

from concurrent.futures import ThreadPoolExecutor

import torch

from p2pkv.links.nccl_bindings import IN_PROGRESS, SUCCESS
from support.nccl.simulated import SimulatedNccl
from support.waiting import wait_for


def raw_pair() -> tuple[SimulatedNccl, int, SimulatedNccl, int]:
    p, d = SimulatedNccl(), SimulatedNccl()
    name = p.unique_id()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(d.init, 2, name, 1)
        return p, p.init(2, name, 0), d, joined.result(10)


def violations(*simulations: SimulatedNccl) -> list[str]:
    """What they have found, once; the fixture would fail the test for it otherwise."""
    found = [each for simulation in simulations for each in simulation.violations]
    for simulation in simulations:
        simulation.violations.clear()
    return found


def test_the_simulation_finds_a_second_thread() -> None:
    p, first, d, _ = raw_pair()
    wait_for(lambda: p.async_error(first) == SUCCESS)
    with ThreadPoolExecutor(1, "owner") as pool:
        pool.submit(p.async_error, first).result(10)
    assert violations(p, d) == []  # handed over, once
    p.async_error(first)
    (found,) = violations(p, d)
    assert "async_error from thread" in found and "not the owner" in found


def test_the_simulation_finds_calls_during_a_launch_and_after_an_abort() -> None:
    p, comm, d, other = raw_pair()
    wait_for(lambda: p.async_error(comm) == SUCCESS and d.async_error(other) == SUCCESS)
    buffer = torch.zeros(64, dtype=torch.uint8)
    p.send(buffer.data_ptr(), 64, 1, comm, 1)
    p.send(buffer.data_ptr(), 64, 1, comm, 1)
    assert violations(p) == ["send before NCCL has launched the last call"]
    d.recv(buffer.data_ptr(), 64, 0, other, 2)
    wait_for(lambda: p.async_error(comm) == SUCCESS)
    p.abort(comm)
    p.abort(comm)
    assert violations(p, d) == ["abort of a communicator that is not there"]


def test_the_simulation_finds_sizes_that_differ() -> None:
    p, comm, d, other = raw_pair()
    wait_for(lambda: p.async_error(comm) != IN_PROGRESS and d.async_error(other) != IN_PROGRESS)
    buffers = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    p.send(buffers[0].data_ptr(), 64, 1, comm, 1)
    d.recv(buffers[1].data_ptr(), 63, 0, other, 2)
    wait_for(lambda: [p.async_error(comm), d.async_error(other)] == [SUCCESS, SUCCESS])
    wait_for(lambda: len(d.violations) == 1)
    assert violations(p, d) == ["64 bytes were sent where 63 were posted"]
