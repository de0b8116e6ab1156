"""The simulated CUDA device refuses what a real one refuses, or crashes for; and nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from p2pkv.device import CudaEvent, own_stream
from p2pkv.links.cuda_memory import allocate, open_block
from support.cuda.device import CUDA, INVALID_HANDLE, LOOKS, CardMemory, SimulatedCuda, launch_on


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    simulated = SimulatedCuda(monkeypatch)
    yield simulated
    assert simulated.driver.refusals == [], "a refusal that the test has not looked at"


def refused(cuda: SimulatedCuda, why: str) -> None:
    """This was refused, and nothing else."""
    with pytest.raises(AssertionError, match=f"^{why}$"):
        cuda.let_go()


def a_stream(cuda: SimulatedCuda) -> int:
    stream = ctypes.c_void_p()
    assert cuda.driver.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    return stream.value or 0


def test_an_event_is_not_recorded_on_a_stream_that_has_ended(cuda: SimulatedCuda) -> None:
    stream = a_stream(cuda)
    before = CudaEvent(0, stream)
    assert cuda.driver.cuStreamDestroy_v2(ctypes.c_void_p(stream)) == 0
    assert before.ready()
    with pytest.raises(RuntimeError, match=f"cuEventRecord failed with result {INVALID_HANDLE}"):
        CudaEvent(0, stream)
    refused(cuda, "an event was recorded on a stream that has ended")
    cuda.driver.cuStreamDestroy_v2(ctypes.c_void_p(stream))
    refused(cuda, "a stream that has ended was destroyed")
    cuda.driver.queue(stream, "a kernel", [])
    refused(cuda, "a kernel was queued on a stream that has ended")


def test_a_stream_that_has_ended_does_what_it_holds(cuda: SimulatedCuda) -> None:
    stream, done = a_stream(cuda), []
    cuda.driver.queue(stream, "a kernel", [], lambda: done.append(1))
    event = CudaEvent(0, stream)
    cuda.driver.cuStreamDestroy_v2(ctypes.c_void_p(stream))
    event.wait()
    assert done == [1]


def test_an_event_that_has_ended_is_not_used(cuda: SimulatedCuda) -> None:
    event = ctypes.c_void_p()
    cuda.driver.cuEventCreate(ctypes.byref(event), 2)
    assert cuda.driver.cuEventDestroy_v2(event) == 0
    for call, what in (
        (lambda: cuda.driver.cuEventRecord(event, ctypes.c_void_p(0)), "recorded"),
        (lambda: cuda.driver.cuEventQuery(event), "asked for"),
        (lambda: cuda.driver.cuEventSynchronize(event), "waited for"),
    ):
        assert call() == INVALID_HANDLE
        refused(cuda, f"an event that has ended was {what}")
    cuda.driver.cuEventDestroy_v2(event)
    refused(cuda, "an event that has ended was destroyed")


def test_what_is_queued_is_done_when_somebody_looks(cuda: SimulatedCuda) -> None:
    done: list[int] = []
    with own_stream(CUDA):
        for number in range(2):
            cuda.driver.queue(cuda.stream, "a kernel", [], lambda number=number: done.append(number))
        event = CudaEvent(0, cuda.stream)
        for _ in range(LOOKS):
            assert not event.ready() and CudaEvent(0, 0).ready()
        assert done == [0]
    assert done == [0, 1]


def test_memory_that_is_not_mapped_is_not_touched_nor_unmapped_under_a_kernel(cuda: SimulatedCuda) -> None:
    mine, theirs = CardMemory(cuda), CardMemory(cuda)
    block = allocate(mine, 100)
    mapped = open_block(theirs, block.fd, block.nbytes)
    address = mapped.data_ptr()
    launch_on(cuda, "a kernel", address)
    event = CudaEvent(0, 0)
    view = mapped[10:20]
    del mapped
    cuda.let_go()
    del view
    refused(cuda, "mapped memory was unmapped with a kernel under way on it")
    event.wait()
    launch_on(cuda, "a kernel", address)
    refused(cuda, "a kernel touches memory that is not there")
    launch_on(cuda, "a kernel", block.tensor.data_ptr())
    CudaEvent(0, 0).wait()
    del block
    assert mine.baseline and theirs.baseline and cuda.leftovers() == []


def test_device_memory_is_not_freed_under_another_streams_kernel(cuda: SimulatedCuda) -> None:
    taken = torch.empty(100, dtype=torch.uint8, device=CUDA)  # on the default stream
    launch_on(cuda, "a kernel", taken.data_ptr())
    del taken
    cuda.let_go()
    taken = torch.empty(100, dtype=torch.uint8, device=CUDA)
    with own_stream(CUDA):
        launch_on(cuda, "a kernel", taken.data_ptr())
        del taken
    refused(cuda, "torch's device memory was freed with a kernel under way on it")


def test_a_pinned_buffer_is_freed_under_a_copy_that_torch_knows_and_under_nothing_else(
    cuda: SimulatedCuda,
) -> None:
    target = torch.zeros(4, dtype=torch.int32, device=CUDA)
    pinned = torch.empty(4, dtype=torch.int32, pin_memory=True)
    pinned.numpy()[...] = 7
    target.copy_(pinned, non_blocking=True)
    del pinned
    cuda.let_go()
    assert target.tolist() != [7] * 4, "the copy is only queued"
    CudaEvent(0, 0).wait()
    assert target.tolist() == [7] * 4
    pinned = torch.empty(4, dtype=torch.int32, pin_memory=True)
    launch_on(cuda, "a kernel", pinned.data_ptr())
    del pinned
    refused(cuda, "pinned memory was freed with a kernel under way on it")


def test_a_pinned_buffer_is_freed_with_an_event_on_each_stream_that_used_it(cuda: SimulatedCuda) -> None:
    """As ATen's CachingHostAllocator does, whether the streams are there or not."""
    target = torch.empty(4, dtype=torch.int32, device=CUDA)
    pinned = torch.empty(4, dtype=torch.int32, pin_memory=True)
    stream = a_stream(cuda)
    with cuda.on(torch.cuda.ExternalStream(stream, CUDA)):
        target.copy_(pinned, non_blocking=True)
    CudaEvent(0, stream).wait()
    cuda.driver.cuStreamDestroy_v2(ctypes.c_void_p(stream))
    cuda.let_go()
    del pinned
    refused(cuda, "an event was recorded on a stream that has ended")
