"""`p2pkv doctor`: a rank that runs is asked, with its secret and without; and NCCL and CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from p2pkv.cli import main
from p2pkv.cli.doctor import Finding, examine, ipc_sentence
from p2pkv.trust import SECRET_VARIABLE
from support.cuda.ipc import SimulatedGpu, SimulatedMemory
from support.engine.engines import Geometry, make_engine
from support.links.memory import MemoryNetwork
from support.nccl.fakes import fake_cupy, install

SECRET = "a secret of the tests"


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.mark.parametrize("way", ["file", "environment"])
def test_a_rank_tells_members_what_it_counts(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network = MemoryNetwork()
    engine = make_engine("P", Geometry(), lambda rank: network.rank(), secret=SECRET.encode())
    try:
        ask = ["doctor", "--rank", str(engine.address)]
        assert main(ask) == 1
        assert "does it need a secret" in capsys.readouterr().out
        if way == "file":
            (tmp_path / "secret").write_text(SECRET)
            ask += ["--secret-file", str(tmp_path / "secret")]
        else:
            monkeypatch.setenv(SECRET_VARIABLE, SECRET)
        assert main(ask) == 0
    finally:
        engine.stop()
    said = capsys.readouterr().out
    assert "handshakes_failed    1" in said and SECRET not in said


def test_a_bad_secret_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--rank", "127.0.0.1:9", "--secret-file", "/nonexistent"]) == 1
    assert "[!!] secret_file '/nonexistent' cannot be read" in capsys.readouterr().out


def test_what_the_command_needs_and_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "p2pkv.cli.doctor", None)
    with pytest.raises(SystemExit, match="1"):
        main(["doctor"])
    assert "run it beside vLLM" in capsys.readouterr().err


def test_who_interrupts_it_sees_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("p2pkv.cli.doctor.run", interrupted)
    assert main(["doctor"]) == 130


def test_one_question_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--listen", "127.0.0.1:9", "--connect", "127.0.0.1:10"])
    assert "not allowed with argument --listen" in capsys.readouterr().err


# NCCL and CUDA.


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No binding is installed."""
    nothing = {"cupy": None, "nccl": None, "nccl__bindings": None, "nccl__bindings__nccl": None}
    install(monkeypatch, **nothing)
    for name in ("NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS"):
        monkeypatch.setenv(name, "8")
    return monkeypatch


def about(what: str) -> Finding:
    (found,) = [finding for finding in examine() if finding.about == what]
    return found


def nccl() -> Finding:
    return about("NCCL link")


@pytest.mark.parametrize("device", [False, True])
def test_no_binding_is_a_fault_with_a_device(patch: pytest.MonkeyPatch, device: bool) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: device)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    found = nccl()
    assert found.ok is not device
    said = "extra cuda12 or cuda13" if device else "not usable: no binding to NCCL works here"
    assert said in found.sentence


@pytest.mark.parametrize("device", [True, False])
def test_version_binding_and_library_are_shown(patch: pytest.MonkeyPatch, device: bool) -> None:
    cupy, module, _ = fake_cupy("14.2.0")
    install(patch, cupy=cupy, cupy__cuda__nccl=module)
    patch.setattr(torch.cuda, "is_available", lambda: device)
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    found = nccl()
    assert found.ok and "NCCL 2.32.3 through CuPy 14.2.0 (" in found.sentence
    assert ("torch finds no CUDA device" in found.sentence) is not device


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", None, "the default 8 hardware queues"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", "32 hardware queues (CUDA_DEVICE_MAX_CONNECTIONS);"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "leave it unset, or take up to 32"),
        ("NCCL_CUMEM_ENABLE", None, "cuMem as NCCL chooses"),
        ("NCCL_CUMEM_ENABLE", "0", "NCCL_CUMEM_ENABLE is 0"),
        ("NCCL_LAUNCH_ORDER_IMPLICIT", "1", "NCCL_LAUNCH_ORDER_IMPLICIT is 1: NCCL fails"),
    ],
)
def test_what_a_gpus_server_inherits_is_shown(
    patch: pytest.MonkeyPatch, name: str, value: str | None, words: str
) -> None:
    patch.delenv(name, raising=False)
    if value is not None:
        patch.setenv(name, value)
    found = about("CUDA")
    assert found.ok and words in found.sentence


def test_the_ipc_link_without_a_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: False)
    assert about("IPC link").sentence == "not usable: torch finds no CUDA device"


def test_which_devices_the_ipc_link_joins() -> None:
    first, second, third = (SimulatedMemory(SimulatedGpu(), b"GPU %d..........." % n) for n in range(3))
    first.unreachable.add(third.card)
    second.unreachable.add(third.card)
    assert ipc_sentence([first]) == (
        "usable between processes of one user on one GPU, within one network namespace"
    )
    assert "on one GPU, and between devices 0 and 1, within" in ipc_sentence([first, second, third])
    second.can_export = False
    assert ipc_sentence([first, second]).startswith("not usable on device 1, whose memory")
