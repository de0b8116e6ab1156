"""Fences: free on a CPU, an event on CUDA. Streams of the driver, and threads that ignore graph captures."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from p2pkv import device
from p2pkv.device import make_recorder, own_stream
from p2pkv.engine.prefetch import PrefetchBuffers
from p2pkv.links import gpu


def test_a_cpu_fence_is_one_shared_object_and_ready() -> None:
    record = make_recorder(torch.device("cpu"))
    assert record() is record()
    record().wait()
    with own_stream(torch.device("cpu")):
        assert record().ready()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'meta': only cpu and cuda"):
        make_recorder(torch.device("meta"))


class FakeDriver:
    """libcuda's call that changes how a thread takes captures of others."""

    def __init__(self, result: int) -> None:
        self.result = result
        self.modes: list[int] = []

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:
        self.modes.append(ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))[0])
        return self.result


@pytest.mark.parametrize("result", [0, 1])
def test_a_thread_ignores_the_captures_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, result: int
) -> None:
    fake = FakeDriver(result)
    monkeypatch.setattr(device, "driver", lambda: fake)
    device.ignore_captures()
    assert fake.modes == [1], "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"
    assert [bool(result)] == ["(result 1): a peer that connects while vLLM captures" in caplog.text]


CARD = torch.device("cuda", 0)


def card(patch: pytest.MonkeyPatch) -> gpu.CudaDevice:
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    return gpu.CudaDevice(CARD)


def test_helper_threads_of_nccl_ignore_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(0)
    monkeypatch.setattr(device, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    card(monkeypatch).enter()
    assert fake.modes == [1]


class FakeEvents:
    """libcuda's calls for events, with the driver's own parameters: one is done when a test says so."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.recorded: list[tuple[int, int]] = []
        self.result = 600

    def cuEventCreate(self, phEvent: object, Flags: int) -> int:
        assert Flags == 2, "CU_EVENT_DISABLE_TIMING"
        self.made.append(0x100 + len(self.made))
        ctypes.cast(phEvent, ctypes.POINTER(ctypes.c_void_p))[0] = self.made[-1]
        return 0

    def cuEventRecord(self, hEvent: ctypes.c_void_p, hStream: ctypes.c_void_p) -> int:
        self.recorded.append((hEvent.value or 0, hStream.value or 0))
        return 0

    def cuEventQuery(self, hEvent: ctypes.c_void_p) -> int:
        return self.result

    def cuEventSynchronize(self, hEvent: ctypes.c_void_p) -> int:
        return self.result


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> FakeEvents:
    fake = FakeEvents()
    monkeypatch.setattr(device, "driver", lambda: fake)
    monkeypatch.setattr(device, "locked_driver", lambda: fake)
    monkeypatch.setattr(device.CudaEvent, "_free", {})
    return fake


def test_events_are_made_at_the_start_and_used_again(events: FakeEvents) -> None:
    device.CudaEvent.prepare(0, 2)
    assert len(events.made) == 2
    for _ in range(5):
        kept = [device.CudaEvent(0, 0x7) for _ in range(2)]
        assert len({event for event, _ in events.recorded[-2:]}) == 2
        assert {stream for _, stream in events.recorded} == {0x7}
        del kept
    assert len(events.made) == 2
    other = device.CudaEvent(1, 0x7)
    assert len(events.made) == 3, "an event belongs to one device"
    del other


def test_an_event_is_passed_when_the_driver_says_so(events: FakeEvents) -> None:
    event = device.CudaEvent(0, 0)  # 0: the default stream
    assert not event.ready()
    events.result = 0
    event.wait()
    assert event.ready()
    events.result = 700
    for call in (event.ready, event.wait):
        with pytest.raises(RuntimeError, match=r"CUDA's cuEvent\w+ failed with result 700"):
            call()


def test_a_fence_is_asked_without_the_interpreters_lock_and_recorded_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ctypes releases the lock for a CDLL, and keeps it for a PyDLL."""
    for call, kind in ((device.driver, "CDLL"), (device.locked_driver, "PyDLL")):
        call.cache_clear()
        monkeypatch.setattr(ctypes, kind, lambda name, kind=kind: (kind, name))
        assert call() == (kind, "libcuda.so.1")
        call.cache_clear()
    asked, told = FakeEvents(), FakeEvents()
    monkeypatch.setattr(device, "driver", lambda: asked)
    monkeypatch.setattr(device, "locked_driver", lambda: told)
    monkeypatch.setattr(device.CudaEvent, "_free", {})
    assert not device.CudaEvent(0, 0x7).ready()
    assert len(told.recorded) == 1 and asked.recorded == []


GIB = 1 << 30


class FakeMemory:
    """A CUDA device of so many bytes, and how much of it is taken."""

    def __init__(self, patch: pytest.MonkeyPatch, total: int, taken: int) -> None:
        self.total, self.taken = total, taken
        self.threads: set[int] = set()
        self._empty = torch.empty
        patch.setattr(torch, "empty", self.empty)
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (self.total - self.taken, self.total))

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert dtype is torch.uint8
        if device.type == "cpu":
            return self._empty(nbytes, dtype=dtype)
        if nbytes > self.total - self.taken:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        self.taken += nbytes
        self.threads.add(threading.get_ident())
        return self._empty(nbytes, dtype=dtype, device="meta")


def test_the_log_says_what_is_taken_of_a_device_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    memory = FakeMemory(monkeypatch, 80 * GIB, 72 * GIB)
    gpu.DevicePool(card(monkeypatch).memory, 640 << 20)
    PrefetchBuffers(2 * GIB, CARD)
    assert caplog.messages == [
        "staging_bytes takes 640 MiB of cuda:0; 7,552 MiB are left",
        "prefetch_bytes takes 2,048 MiB of cuda:0; 5,504 MiB are left",
    ]
    assert memory.taken == 72 * GIB + (640 << 20) + 2 * GIB
    # torch.cuda.use_mem_pool is for one thread, and vLLM's pools keep memory through a sleep.
    assert threading.get_ident() not in memory.threads


def test_what_does_not_fit_a_device_fails_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMemory(monkeypatch, 80 * GIB, 79 * GIB)
    with pytest.raises(
        MemoryError, match=r"^staging_bytes is 2,048 MiB, .* of cuda:0 only 1,024 MiB are free"
    ):
        gpu.DevicePool(card(monkeypatch).memory, 2 * GIB)
    with pytest.raises(MemoryError, match=r"^prefetch_bytes is 2,048 MiB.*only 1,024 MiB") as raised:
        PrefetchBuffers(2 * GIB, CARD)
    for what in ("staging_bytes", "prefetch_bytes", "--gpu-memory-utilization"):
        assert what in str(raised.value)


def test_scant_memory_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    FakeMemory(monkeypatch, 80 * GIB, 79 * GIB)
    device.take_memory(1 << 20, CARD, "staging_bytes")
    assert caplog.messages == []
    device.take_memory(600 << 20, CARD, "staging_bytes")
    (said,) = caplog.messages
    assert "only 423 MiB left" in said and "--gpu-memory-utilization" in said


def test_nothing_is_said_where_nothing_of_a_device_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    FakeMemory(monkeypatch, 80 * GIB, 80 * GIB)
    PrefetchBuffers(0, torch.device("cpu"))
    PrefetchBuffers(1 << 20, torch.device("cpu"))
    assert caplog.messages == []
