"""What CuPy and the driver are told, by pretend ones: the real ones need a device."""

import contextlib
import ctypes
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from p2pkv.kv import copiers
from p2pkv.kv.copiers import BLOCKS_PER_PROCESSOR, CupyLauncher, cupy_launcher, kernel_names

STREAM = 4242
HANDLES = 9000


class PretendCupy(types.ModuleType):
    """Compiles each kernel to a number."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.compiled: list[str] = []
        self.inside: list[int] = []
        self.broken: Exception | None = None
        """What compiling raises."""
        self.cuda = types.SimpleNamespace(Device=self._enter)

    def RawModule(self, code: str) -> Any:
        self.compiled.append(code)
        return types.SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Any:
        assert self.inside == [1], "compiled for another device"
        if self.broken is not None:
            raise self.broken
        handle = HANDLES + kernel_names().index(name)
        return types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=handle))

    @contextlib.contextmanager
    def _enter(self, index: int) -> Iterator[None]:
        self.inside.append(index)
        yield
        self.inside.pop()


class PretendDriver:
    """Notes the launches: (kernel, grid, block, shared bytes, stream, arguments)."""

    result = 0

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, function: int, *rest: Any) -> int:
        *sizes, shared, stream, params, extra = rest
        # cuda.h, cuLaunchKernel: 1, the buffer, 2, where its size is, 0.
        buffer, size = extra[1], ctypes.c_size_t.from_address(extra[3]).value
        assert (extra[0], extra[2], extra[4], params) == (1, 2, None, None)
        arguments = list((ctypes.c_longlong * (size // 8)).from_address(buffer))
        name = kernel_names()[function - HANDLES]
        self.launches.append((name, tuple(sizes[:3]), tuple(sizes[3:]), shared, stream, arguments))
        return self.result


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> PretendDriver:
    pretend = PretendDriver()
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(multi_processor_count=7)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: types.SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(copiers, "launch_call", lambda: pretend)
    return pretend


def launcher_on(monkeypatch: pytest.MonkeyPatch) -> CupyLauncher:
    cupy = PretendCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    launcher = cupy_launcher(torch.device("cuda", 1))
    assert launcher is not None and "p2pkv_scatter_##WIDTH" in cupy.compiled[0]
    return launcher


def test_a_kernel_goes_to_torchs_current_stream(
    driver: PretendDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_on(monkeypatch)
    assert launcher.most_blocks == 7 * BLOCKS_PER_PROCESSOR
    launcher.launch("p2pkv_gather_16", 5, (8, 32), [1 << 46, *range(14)])
    launcher.launch("p2pkv_digest", 1, (256, 1), [-1, 0, 2])
    assert driver.launches == [
        ("p2pkv_gather_16", (5, 1, 1), (8, 32, 1), 0, STREAM, [1 << 46, *range(14)]),
        ("p2pkv_digest", (1, 1, 1), (256, 1, 1), 0, STREAM, [-1, 0, 2]),
    ]


def test_threads_do_not_share_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_on(monkeypatch)
    inside, found = threading.Barrier(2), list[list[int]]()

    def submit(function: int, *rest: Any) -> int:
        inside.wait(10)  # both have packed theirs
        found.append(list((ctypes.c_longlong * 3).from_address(rest[-1][1])))
        return 0

    monkeypatch.setattr(launcher, "_submit", submit)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda number: launcher.launch("p2pkv_digest", 1, (1, 1), [number] * 3), range(2)))
    assert sorted(found) == [[0] * 3, [1] * 3]


def test_a_launch_that_the_driver_refuses_is_an_error(
    driver: PretendDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.result = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with result 700 for p2pkv_gather_1"):
        launcher_on(monkeypatch).launch("p2pkv_gather_1", 1, (1, 1), [0] * 15)


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
    cupy = PretendCupy()
    cupy.broken = error
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert cupy_launcher(torch.device("cuda", 1)) is None
    assert str(error) in caplog.text and "torch's index kernels" in caplog.text
