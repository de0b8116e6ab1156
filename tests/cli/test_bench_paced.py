"""`p2pkv bench --link paced`: what it measures, and that what stands in for the card has the card's calls."""

from __future__ import annotations

import inspect
import json
import time
from pathlib import Path

import pytest

from p2pkv.bench.paced import MIB
from p2pkv.bench.paced_card import (
    SOURCES,
    Card,
    Meeting,
    PacedDevice,
    PacedEvent,
    PacedLauncher,
    PacedMemory,
    PacedNccl,
    PacedStream,
)
from p2pkv.cli import main
from p2pkv.device import CudaEvent
from p2pkv.kv.copiers import CupyLauncher
from p2pkv.links.cuda_memory import CudaMemory
from p2pkv.links.gpu import CudaDevice, CudaStream
from p2pkv.links.nccl_bindings import Nccl4pyNccl
from support.waiting import wait_for


@pytest.mark.parametrize("over", ["nccl", "ipc"])
def test_a_push_takes_no_less_than_the_wire_and_each_station_is_counted(
    over: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "paced.json"
    sizes = ["--prompt", "16", "--message", "4", "--wire", "20", "--repeat", "2"]
    assert main(["bench", "--link", "paced", "--over", over, *sizes, "--json", str(file)]) == 0
    results = json.loads(file.read_text())
    (row,) = results["rows"]
    assert row["prompt"] == 16 * MIB and len(row["pushes"]) == 2
    for push in row["pushes"]:
        assert push["messages"] == 4 and push["seconds"] >= 16 * MIB / 20e9
        for side in "PD":
            spent = push[side]
            assert min(spent[name] for name in ("kernels", "events", "messages", "naps", "rest", "cpu")) > 0
            assert (spent["NCCL"] > 0) == (over == "nccl")
            assert spent["turns"] > spent["kernels"] + spent["events"] + spent["NCCL"] + spent["rest"]
    assert results["card"] == SOURCES
    shown = capsys.readouterr().out
    assert f"{over:<5}    20   16 MiB     4.00" in shown and "Where it goes" in shown


@pytest.mark.parametrize(
    ("paced", "real"),
    [
        (PacedDevice, CudaDevice),
        (PacedStream, CudaStream),
        (PacedEvent, CudaEvent),
        (PacedNccl, Nccl4pyNccl),
        (PacedMemory, CudaMemory),
        (PacedLauncher, CupyLauncher),
    ],
)
def test_the_pretend_card_has_the_calls_of_the_real_one(paced: type, real: type) -> None:
    """But for those that only the real one's own module makes."""
    inside = {"prepare", "hold_up"}
    calls = {name for name, _ in inspect.getmembers(real, callable) if not name.startswith("_")} - inside
    for name in sorted(calls):
        ours, theirs = getattr(paced, name), getattr(real, name)
        assert callable(ours)
        wanted = [each for each in inspect.signature(theirs).parameters if each != "self"]
        found = [each for each in inspect.signature(ours).parameters if each != "self"]
        assert len(found) == len(wanted), f"{paced.__name__}.{name}"


def test_each_figure_of_the_card_has_a_source() -> None:
    assert set(SOURCES) == set(vars(Card()))


def test_an_operation_ends_when_both_sides_have_begun_and_its_bytes_have_passed() -> None:
    device = PacedDevice(Card(wire=1e9, call=0.0, operation=0.0, kernel=0.0))
    nccl = PacedNccl(device)
    name = nccl.unique_id()
    ends = [nccl.init(2, name, rank) for rank in (0, 1)]
    streams = [device.stream() for _ in ends]
    try:
        begin = time.monotonic()
        nccl.send(0, 20_000_000, 1, ends[0], streams[0].number)
        sent = streams[0].record()
        assert not sent.ready() and streams[0].last is not None and streams[0].last.end() is None
        nccl.recv(0, 20_000_000, 0, ends[1], streams[1].number)
        received = streams[1].record()
        assert not received.ready(), "20 ms of wire"
        wait_for(lambda: sent.ready() and received.ready())
        assert time.monotonic() - begin >= 0.02
    finally:
        assert isinstance(ends[0], Meeting)
        nccl.abort(ends[0])
    assert not ends[0].path.exists()


def test_a_stream_follows_an_event_of_another() -> None:
    device = PacedDevice(Card(kernel=0.0))
    first, second = device.stream(), device.stream()
    first.launch(0.02)
    end = first.last.end() if first.last else None
    second.follow(first.record())
    second.launch(0.01)
    assert end is not None and second.last is not None
    assert second.last.end() == pytest.approx(end + 0.01)
