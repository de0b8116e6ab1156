"""What is asked of nccl4py, and how it is refused where it is missing."""

import importlib
import importlib.metadata
import inspect
import os
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from p2pkv import device
from p2pkv.links import gpu, make_factory, nccl_bindings
from p2pkv.links.nccl_bindings import (
    IN_PROGRESS,
    NcclError,
    NcclMissing,
    library_paths,
    load_nccl,
    version_name,
)
from support.cuda.device import MOST_URGENT, SimulatedCuda
from support.nccl.fakes import UNIQUE_ID, Asked, FakeNcclError, fake_cupy, fake_nccl4py, install

NOBODY = {"nccl": None, "nccl__bindings": None, "nccl__bindings__nccl": None}


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """nccl4py is not installed, and no number of channels is set."""
    install(monkeypatch, **NOBODY)
    for name in (nccl_bindings.MAX_CTAS, nccl_bindings.SHARED_GPU):
        monkeypatch.setenv(name, "8")
        monkeypatch.delenv(name)
    return monkeypatch


def give_nccl4py(patch: pytest.MonkeyPatch) -> tuple[ModuleType, Asked]:
    module, asked = fake_nccl4py()
    install(patch, nccl__bindings__nccl=module)
    true = importlib.metadata.version
    patch.setattr(importlib.metadata, "version", lambda name: "0.6.0" if name == "nccl4py" else true(name))
    return module, asked


def test_the_calls_that_reach_it(patch: pytest.MonkeyPatch) -> None:
    asked = give_nccl4py(patch)[1]
    nccl = load_nccl(64)
    assert (nccl.binding, nccl.version(), nccl.unique_id()) == ("nccl4py 0.6.0", 23203, UNIQUE_ID)
    comm = nccl.init(2, UNIQUE_ID, 1)
    nccl.send(1000, 64, 1, comm, 7)
    with nccl.group():
        nccl.recv(2000, 65, 0, comm, 8)
    assert nccl.async_error(comm) == IN_PROGRESS
    nccl.abort(comm)
    assert [call for call in asked.calls if call[0] != "get_version"] == [
        ("get_unique_id",),
        ("init", 2, UNIQUE_ID, 1, 0, 32, 1),  # does not block; NCCL takes no more than 32
        ("send", 1000, 64, 1, 1, comm, 7),
        ("group_start",),
        ("recv", 2000, 65, 1, 0, comm, 8),
        ("group_end",),
        ("comm_get_async_error", comm),
        ("comm_abort", comm),
    ]


def test_errors_become_sentences(patch: pytest.MonkeyPatch) -> None:
    asked = give_nccl4py(patch)[1]
    nccl = load_nccl()
    asked.fail["init"] = FakeNcclError(2)
    with pytest.raises(NcclError, match=r"failed with result 2: fake error 2") as caught:
        nccl.init(2, UNIQUE_ID, 0)
    assert caught.value.status == 2
    comm = nccl.init(2, UNIQUE_ID, 0)
    asked.fail["send"] = FakeNcclError(5)
    with pytest.raises(NcclError, match="send failed with result 5"):
        nccl.send(1, 1, 1, comm, 1)


def test_a_group_ends_when_a_call_within_it_fails(patch: pytest.MonkeyPatch) -> None:
    """Else what the thread calls next, for any communicator, would be launched never."""
    asked = give_nccl4py(patch)[1]
    nccl = load_nccl()
    comm = nccl.init(2, UNIQUE_ID, 0)
    asked.fail["send"] = FakeNcclError(5)
    with pytest.raises(NcclError, match="send failed with result 5"), nccl.group():
        nccl.send(1, 1, 1, comm, 1)
    assert [name for name, *_ in asked.calls[-3:]] == ["group_start", "send", "group_end"]
    asked.fail["group_end"] = FakeNcclError(1)
    with pytest.raises(NcclError, match="group_end failed with result 1"), nccl.group():
        nccl.send(1, 1, 1, comm, 1)


def test_what_is_missing_is_a_sentence(patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NcclMissing, match=r"nccl4py cannot be imported \(.*cuda12 or cuda13 \(ROCm has none"):
        load_nccl()
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: Mock(multi_processor_count=132))
    for kind in ("auto", "nccl"):
        with pytest.raises(ValueError, match="nccl4py cannot be imported"):
            make_factory(kind, host="127.0.0.1", staging_bytes=1 << 20)
    module, asked = give_nccl4py(patch)
    asked.fail["get_version"] = OSError("no libnccl.so.2")
    with pytest.raises(NcclMissing, match=r"nccl4py 0\.6\.0 finds no NCCL library \(no lib.*nvidia-nccl"):
        load_nccl()
    del module.comm_init_rank_config
    with pytest.raises(NcclMissing, match=r"0\.6\.0 lacks comm_init_rank_config; .* nccl4py 0\.6"):
        load_nccl()


@pytest.mark.parametrize(
    ("asked", "variable", "counted"),
    [(8, "", 8), (12, "", 16), (64, "", 32), (8, "16", 16), (8, "2", 2), (8, "x", 8)],
)
def test_channels_count_as_nccl_would_use_them(
    patch: pytest.MonkeyPatch, asked: int, variable: str, counted: int
) -> None:
    """Powers of two for sends and receives; the environment's number comes before the configuration's."""
    give_nccl4py(patch)
    if variable:
        patch.setenv(nccl_bindings.MAX_CTAS, variable)
    assert load_nccl(asked).channels == counted


@pytest.mark.parametrize(("version", "before", "after"), [
    (23000, None, "1"), (22907, None, None), (23000, "0", "0"),
])  # fmt: skip
def test_two_ranks_may_be_on_one_gpu_where_nccl_knows_how(
    patch: pytest.MonkeyPatch, version: int, before: str | None, after: str | None
) -> None:
    give_nccl4py(patch)
    patch.setattr(nccl_bindings.Nccl, "version", lambda self: version)
    if before is not None:
        patch.setenv(nccl_bindings.SHARED_GPU, before)
    nccl_bindings.allow_shared_gpus(load_nccl())
    assert os.environ.get(nccl_bindings.SHARED_GPU) == after
    patch.delenv(nccl_bindings.SHARED_GPU, raising=False)


@pytest.mark.parametrize(
    ("version", "way"),
    [(23203, "set NCCL_MULTI_RANK_GPU_ENABLE=1"), (22809, "set NCCL_HOSTID to another value")],
)
def test_a_refusal_of_two_ranks_says_what_to_do_about_one_gpu(version: int, way: str) -> None:
    said = nccl_bindings.advice(NcclError("init", nccl_bindings.INVALID_USAGE, "invalid usage"), version)
    assert "if P and D share a GPU" in said and way in said
    assert nccl_bindings.advice(NcclError("init", 2, "system error"), version) == ""


@pytest.mark.parametrize(
    ("name", "value", "warning"),
    [
        ("NCCL_CUMEM_ENABLE", "0", "NCCL_CUMEM_ENABLE is 0"),
        ("NCCL_CUMEM_ENABLE", "1", ""),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "NCCL_LAUNCH_ORDER_IMPLICIT is 1"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "0", ""),
    ],
)
def test_settings_of_nccl_that_harm_links_are_warned_of(
    patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str, warning: str
) -> None:
    """The device is full behind it: only what comes before is looked at."""
    give_nccl4py(patch)
    patch.setattr(nccl_bindings.Nccl, "version", lambda self: 22809)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: Mock(multi_processor_count=132))
    patch.setattr(gpu, "take_memory", Mock(side_effect=MemoryError("the device is full")))
    patch.setenv(name, value)
    with pytest.raises(ValueError, match="the device is full"):
        make_factory("nccl", host="127.0.0.1", staging_bytes=1 << 20)
    warned = [message.partition(",")[0] for message in caplog.messages if message.startswith("NCCL_")]
    assert warned == [warning] * bool(warning)


def test_each_stream_is_its_own_and_waits_for_no_default_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link's comes before the model's; the engine's does not."""
    driver = SimulatedCuda(monkeypatch).driver
    streams = [gpu.CudaStream(0) for _ in range(2)]
    assert driver.created == [(1, MOST_URGENT)] * 2
    numbers = {streams[0].number, streams[1].number, device.take_stream(0)}
    assert driver.created[2:] == [(1, 0)] and len(numbers) == 3
    streams[0].close()
    assert gpu.CudaStream(1).number not in numbers, "one device's own"
    assert gpu.CudaStream(0).number == streams[0].number
    monkeypatch.setattr(driver, "cuStreamCreateWithPriority", lambda *_: 201)
    with pytest.raises(RuntimeError, match="cuStreamCreateWithPriority returned 201"):
        gpu.CudaStream(0)


def test_names_of_versions_and_libraries() -> None:
    assert [version_name(number) for number in (23203, 22809, 22005)] == ["2.32.3", "2.28.9", "2.20.5"]
    assert library_paths() and all("libnccl.so" in path or "library" in path for path in library_paths())


# The real modules, where they are installed.


def parameters(call: Callable[..., object], doc: str | None) -> list[str]:
    """Names of the parameters: compiled functions say them in their docstring's first line only."""
    try:
        names = list(inspect.signature(call).parameters)
    except ValueError:
        found = re.match(r"[\w.]+\(([^)]*)\)", doc or "")
        assert found, f"no signature in {doc!r}"
        names = [part.split("=")[0].split()[-1] for part in found[1].split(",") if part.strip()]
    return [name for name in names if name != "self"]


def real(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name} cannot be imported here: {error}")


def test_cupy_is_as_the_fake_says() -> None:
    """What `p2pkv bench` compares a link with."""
    module = real("cupy.cuda.nccl")
    fake = fake_cupy("14.2.0")[1]
    for name in ("send", "recv", "abort"):
        true, ours = getattr(module.NcclCommunicator, name), getattr(fake.NcclCommunicator, name)
        assert parameters(true, true.__doc__) == parameters(ours, None), name
    init = parameters(module.NcclCommunicator, module.NcclCommunicator.__doc__)
    assert init == parameters(fake.NcclCommunicator, None)
    assert callable(module.get_unique_id)


def test_nccl4py_is_as_the_fake_says() -> None:
    module = real("nccl.bindings.nccl")
    fake, _ = fake_nccl4py()
    for name in nccl_bindings.NEEDED:
        true, ours = getattr(module, name), getattr(fake, name)
        if not isinstance(ours, type):
            assert parameters(true, true.__doc__) == parameters(ours, None), name
    config = module.Config()
    config.blocking, config.max_ctas = 0, 8
    config.nvls_ctas = 1
    assert (config.blocking, config.max_ctas, config.nvls_ctas) == (0, 8, 1)
    assert int(module.DataType.Uint8) == 1 and int(module.Result.InProgress) == IN_PROGRESS
    name = bytes(module.UniqueId.from_buffer(UNIQUE_ID))
    assert name == UNIQUE_ID


def test_the_real_binding_refuses_politely_without_a_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    try:
        nccl = load_nccl()
    except NcclMissing as missing:
        pytest.skip(str(missing))
    assert "libnccl" in nccl.describe()
    with pytest.raises(NcclError, match="failed with result 1"):
        nccl.init(2, nccl.unique_id(), 0)
