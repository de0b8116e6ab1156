"""What CuPy is told, by a pretend CuPy: the real one needs a device for anything worth a test."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from p2pkv.kv.copiers import BLOCKS_PER_PROCESSOR, CupyLauncher, cupy_launcher

STREAM = 4242


class PretendCupy(types.ModuleType):
    """Notes the launches: (device, stream, name, grid, block, arguments)."""

    def __init__(self, new: bool) -> None:
        super().__init__("cupy")
        self.launches: list[tuple[Any, ...]] = []
        self.compiled: list[str] = []
        self.inside: list[Any] = []
        self.broken: Exception | None = None
        """What compiling raises."""
        stream = types.SimpleNamespace()
        if new:
            stream.from_external = lambda source: self._enter(source.__cuda_stream__()[1])
        self.cuda = types.SimpleNamespace(Device=self._enter, Stream=stream, ExternalStream=self._enter)

    def RawModule(self, code: str) -> Any:
        self.compiled.append(code)
        return types.SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Any:
        assert self.inside == [1], "compiled for another device"
        if self.broken is not None:
            raise self.broken
        return lambda *args: self._launch(name, *args)

    def _launch(self, name: str, grid: Any, block: Any, args: Any) -> None:
        self.launches.append((*self.inside, name, grid, block, args))

    def _enter(self, what: int) -> _Entered:
        return _Entered(self.inside, what)


class _Entered:
    """A device or a stream, current while it is entered; a stream is entered at each launch."""

    def __init__(self, inside: list[Any], what: int) -> None:
        self._inside, self._what = inside, what

    def __enter__(self) -> None:
        self._inside.append(self._what)

    def __exit__(self, *_: object) -> None:
        assert self._inside.pop() == self._what


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(multi_processor_count=7)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=STREAM))


@pytest.mark.parametrize("new", [False, True])
def test_a_kernel_goes_to_torchs_current_stream(new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = PretendCupy(new)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launcher = cupy_launcher(torch.device("cuda", 1))
    assert launcher is not None
    assert launcher.most_blocks == 7 * BLOCKS_PER_PROCESSOR
    for _ in range(2):
        launcher.launch("p2pkv_gather_16", 5, (8, 32), [1 << 46, 2])
    arguments = (np.int64(1 << 46), np.int64(2))
    assert cupy.launches == [(1, STREAM, "p2pkv_gather_16", (5,), (8, 32), arguments)] * 2
    assert all(type(each) is np.int64 for each in cupy.launches[0][-1])
    assert len(cupy.compiled) == 1 and "p2pkv_scatter_##WIDTH" in cupy.compiled[0]


def test_without_cupy_torch_does_it_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cupy_launcher(torch.device("cuda", 0)) is None
    assert "install cupy-cuda12x or cupy-cuda13x" in caplog.text
    with pytest.raises(ImportError):
        CupyLauncher(torch.device("cuda", 0))


@pytest.mark.parametrize(
    "error", [PermissionError("/root/.cupy"), RuntimeError("CuPy failed to load libnvrtc")]
)
def test_where_cupy_cannot_compile_torch_does_it_and_the_log_says_why(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cupy = PretendCupy(True)
    cupy.broken = error
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert cupy_launcher(torch.device("cuda", 1)) is None
    assert str(error) in caplog.text and "torch's index kernels" in caplog.text
