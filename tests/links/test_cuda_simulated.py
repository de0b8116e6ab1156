"""The simulated CUDA device refuses what a real one refuses, or crashes for; and nothing else."""

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


def test_what_has_ended_is_not_used(cuda: SimulatedCuda) -> None:
    """A stream does what it holds, all the same."""
    driver, event, done = cuda.driver, ctypes.c_void_p(), list[int]()
    stream = ctypes.c_void_p(a_stream(cuda))
    driver.queue(stream.value or 0, "a kernel", [], lambda: done.append(1))
    behind = CudaEvent(0, stream.value or 0)
    driver.cuEventCreate(ctypes.byref(event), 2)
    assert driver.cuStreamDestroy_v2(stream) == driver.cuEventDestroy_v2(event) == 0
    behind.wait()
    assert done == [1]
    with pytest.raises(RuntimeError, match=f"cuEventRecord failed with result {INVALID_HANDLE}"):
        CudaEvent(0, stream.value or 0)
    refused(cuda, "an event was recorded on a stream that has ended")
    for call, what in (
        (lambda: driver.cuStreamDestroy_v2(stream), "a stream that has ended was destroyed"),
        (lambda: driver.queue(stream.value or 0, "x", []), "x was queued on a stream that has ended"),
        (lambda: driver.cuEventRecord(event, ctypes.c_void_p(0)), "an event that has ended was recorded"),
        (lambda: driver.cuEventQuery(event), "an event that has ended was asked for"),
        (lambda: driver.cuEventSynchronize(event), "an event that has ended was waited for"),
        (lambda: driver.cuEventDestroy_v2(event), "an event that has ended was destroyed"),
    ):
        call()
        refused(cuda, what)


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
