"""Fences: free on a CPU, an event on CUDA. Streams of the driver, and threads that ignore graph captures."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from p2pkv import device
from p2pkv.device import make_recorder, own_stream
from p2pkv.links import nccl_device


def test_a_cpu_fence_is_one_shared_object_and_ready() -> None:
    record = make_recorder(torch.device("cpu"))
    assert record() is record()
    assert record().ready()


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'meta': only cpu and cuda"):
        make_recorder(torch.device("meta"))


def test_a_cpu_fence_is_passed_when_it_is_made() -> None:
    fence = make_recorder(torch.device("cpu"))()
    fence.wait()
    with own_stream(torch.device("cpu")):
        assert fence.ready()


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


def test_helper_threads_of_nccl_ignore_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(0)
    monkeypatch.setattr(device, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    nccl_device.CudaDevice(torch.device("cuda", 0)).enter()
    assert fake.modes == [1]
