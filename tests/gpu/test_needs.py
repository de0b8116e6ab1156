"""What the suite reports where something is missing: needs.py, and the skips and leftovers of conftest.py."""

from __future__ import annotations

import os
import runpy
from types import SimpleNamespace

import pytest
import torch
from gpu import conftest, needs


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """needs.py finds everything but these."""
    monkeypatch.setattr(needs, "present", lambda module: module not in modules)


def test_a_python_without_what_every_file_imports_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "pytest", "numpy")
    assert needs.main() == 1
    assert "lacks pytest, numpy: install them" in capsys.readouterr().out


def test_an_old_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "sys", SimpleNamespace(version_info=(3, 10), version="3.10.1 (main)"))
    assert needs.main() == 1
    assert "Python 3.11 or newer, not 3.10.1" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "devices"), [(0, "no CUDA devices"), (1, "1 CUDA device")])
def test_what_will_be_skipped_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int, devices: str
) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: count > 0, device_count=lambda: count, get_device_name=lambda number: "H100"
    )
    found = SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda="12.9"), cuda=cuda)
    monkeypatch.setattr(needs, "importlib", SimpleNamespace(import_module=lambda name: found))
    without(monkeypatch, "cupy", "msgspec", "zmq")
    assert needs.main() == 0
    said = capsys.readouterr().out
    assert f"torch 2.13.0, CUDA 12.9, devices: {count}" in said and ("H100" in said) == bool(count)
    assert "CuPy is missing" in said and f"{devices}: what needs more will be skipped" in said
    files = "test_push.py, test_bench_gpu.py, test_servers.py, test_models.py, test_first_day_steps"
    assert f"msgspec and pyzmq missing: {files}" in said


def test_needs_is_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(needs.__file__, run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"torch {torch.__version__}")


def test_a_file_whose_imports_are_missing_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    without(monkeypatch, "zmq")
    file = conftest.pytest_pycollect_makemodule(conftest.HERE / "test_push.py", request.session)
    with pytest.raises(pytest.skip.Exception, match=r"test_push\.py needs pyzmq, not installed here"):
        file.collect()
    assert conftest.pytest_pycollect_makemodule(conftest.HERE / "test_kernels.py", request.session) is None


@pytest.mark.parametrize(
    ("marks", "devices", "absent", "reason"),
    [
        (("two_gpus",), 1, "", "needs 2 CUDA devices, and torch finds 1"),
        (("gpu",), 0, "", "needs 1 CUDA device, and torch finds 0"),
        (("gpu",), 1, "cupy", "needs CuPy, which is not installed: cupy-cuda12x or cupy-cuda13x"),
        (("vllm",), 0, "vllm", "needs vLLM, which is not installed"),
        (("gpu", "vllm"), 1, "", ""),
    ],
)
def test_a_test_is_skipped_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, marks: tuple[str, ...], devices: int, absent: str, reason: str
) -> None:
    def find_spec(name: str) -> object:
        return None if name == absent else SimpleNamespace(origin="here")

    for module in (conftest, needs):
        monkeypatch.setattr(module, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=find_spec)))
    cuda = SimpleNamespace(is_available=lambda: devices > 0, device_count=lambda: devices)
    monkeypatch.setattr(conftest, "torch", SimpleNamespace(cuda=cuda))
    item = SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None)
    assert conftest.missing(item) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_test_sets_for_nccl_ends_with_it(turn: int) -> None:
    assert "NCCL_TEST_LEFTOVER" not in os.environ
    os.environ["NCCL_TEST_LEFTOVER"] = "1"
