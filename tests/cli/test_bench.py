"""`p2pkv bench` at its smallest: it runs, measures what it says, and notices KV that is not P's."""

import inspect
import json
import os
import re
import sys
import time
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pkv.bench import fanout, harness, nccl, paced_card
from p2pkv.bench.fanout import FAN_OUTS, FanOut, device_of, fan_out
from p2pkv.bench.latents import LATENTS, PARTS
from p2pkv.bench.memory import CELL, HEADS, LAYERS, LAYOUTS, TOKEN_BYTES, Layout, Memory, capacity_for
from p2pkv.bench.nccl import SIZES, messages
from p2pkv.bench.paced import MIB
from p2pkv.bench.prefill import prefill
from p2pkv.cli import main
from p2pkv.device import CudaEvent
from p2pkv.kv.copiers import CupyLauncher
from p2pkv.links import cuda_memory, gpu, make_factory, nccl_bindings
from support.nccl.fakes import UNIQUE_ID, fake_cupy
from support.waiting import wait_for

TOKENS = 40


def test_it_measures_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--tokens", str(TOKENS), "--repeat", "1", "--layer-ms", "0.1", "--json", str(out)]
    threads = torch.get_num_threads()
    assert main(["bench", *arguments]) == 0
    assert torch.get_num_threads() == threads
    results = json.loads(out.read_text())
    (ready,), (layers,) = results["ready"], results["layers"]
    assert ready["bytes"] == (TOKENS - 1) * TOKEN_BYTES and ready["page_bytes"] == 128 * TOKEN_BYTES
    # Short prompts are measured three times for each --repeat.
    for kind in ("copy", "raw", "page_copy", "page_raw", "dense", "pages", "planes", "as_many", "verified"):
        assert len(ready[kind]) == 3 and min(ready[kind]) > 0
    for mode, called in (("layers", LAYERS), ("whole", 0)):
        measured = layers["modes"][mode]
        assert [len(hooks) for hooks in measured["hooks"]] == [called] * 3
        assert all(0 < tail < total for tail, total in zip(measured["tail"], measured["total"], strict=True))
        assert min(measured["forward"]) >= LAYERS * 0.1e-3
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] == [str(TOKENS)]]
    assert len(rows) == 4, printed
    assert "with checksums (verify)" in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tokens", "1"], "nothing would be pushed"),
        (["--chunk-bytes", "7"], "choose 1024 to"),
        (["--tokens", "100000000"], "choose shorter prompts"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--json", "/tmp"], "name a file in it"),
        (["--json", "/dev/full", "--tokens", "2", "--repeat", "1"], "No space left on device"),
        (["--plot", "/tmp/plot.png"], "--plot is for --link nccl or ipc, not host"),
        (["--fan-out", "2", "--link", "paced"], "not paced: leave it out"),
        (["--layer-ms", "-1"], "choose 0 or more milliseconds"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 1
    assert sentence in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [("--wire", "0"), ("--prompt", "nan"), ("--in-flight", "0"), ("--tokens", "x")]
)
def test_numbers_that_mean_nothing(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--link", "paced", *wrong])
    assert "_positive" not in capsys.readouterr().err


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_kv_of_another_place_is_noticed(layout: Layout, tp: int) -> None:
    """By the last of `tp` ranks of D, which holds its share of the heads."""
    capacity, share = capacity_for(TOKENS), HEADS // tp
    p, d = Memory(capacity, "P"), Memory(capacity, "D", rank=tp - 1, tp=tp)
    buffer = torch.empty(layout.nbytes(TOKENS) // tp, dtype=torch.uint8)
    span = (0, LAYERS), (0, TOKENS - 1)
    p.cache(layout).gather(buffer, *span, (HEADS - share, HEADS), [layout.table(TOKENS, capacity, "P")])
    assert len(d.wrong(layout, TOKENS)) > 10
    for wrong in (False, True):
        put = buffer.roll(2 * CELL) if wrong else buffer
        d.cache(layout).scatter(put, *span, (0, share), [layout.table(TOKENS, capacity, "D")])
        assert bool(d.wrong(layout, TOKENS)) is wrong
        d.clear(layout, TOKENS)


@pytest.mark.parametrize("tokens", [2, 40, 300])
def test_kv_of_another_place_is_noticed_in_planes(tokens: int) -> None:
    capacity = capacity_for(tokens)
    p, d = Memory(capacity, "P"), Memory(capacity, "D")
    caches, tables = (
        [make(side) for side in (p, d)]
        for make in (LATENTS.rank_cache, lambda side: LATENTS.tables(tokens, capacity, side.side))
    )
    pairs = list(zip(*(cache.groups for cache in caches), strict=True))
    for (source, target), (number, *_) in zip(pairs, LATENTS._planes, strict=True):
        span = PARTS[number].needed(tokens)
        buffer = torch.empty(source.nbytes(source.layers, *span, 1), dtype=torch.uint8)
        source.gather(buffer, (0, source.layers), span, (0, 1), tables[0])
        assert not buffer.numel() or LATENTS.wrong(d, tokens)
        target.scatter(buffer, (0, target.layers), span, (0, 1), tables[1])
    assert LATENTS.wrong(d, tokens) == []
    assert LATENTS.nbytes(tokens) == sum(
        one.nbytes(one.layers, *PARTS[number].needed(tokens), 1)
        for (one, _), (number, *_) in zip(pairs, LATENTS._planes, strict=True)
    )
    LATENTS.clear(d, tokens)
    assert LATENTS.wrong(d, tokens)


def test_a_link_may_stage_its_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TCP does: P's end has no room at times, and moves nothing unless it is polled."""
    monkeypatch.setattr("p2pkv.bench.prefill.make_factory", partial(make_factory, shared_memory=False))
    with prefill(capacity_for(TOKENS), 16 << 20, "host") as both:
        assert both.raw(24 << 20) > 0


def test_a_decode_process_that_ends_is_an_error() -> None:
    with prefill(TOKENS, 1 << 20, "host") as both:
        assert both.push_ready("dense", TOKENS).total > 0
        both.pipe.send(order="load", layout="dense", key="k", prefill="nowhere", tokens=TOKENS)
        with pytest.raises(harness.BenchError, match="nowhere"):
            both.raw(1 << 20)


# --link nccl without a device, and its machinery, run on CPUs.


SMALL = [64 << 10, 1 << 20]
ROW = {"bytes": 1 << 20, "copy": 3e9, "gather": 2e9, "scatter": 2e9, "link": [1e9], "push": [1e9]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so nothing is refused")
@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_without_a_device_it_refuses_with_a_sentence(link: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--link", link]) == 1
    why = "and torch finds no CUDA device here: run it on a machine that has one"
    assert f"--link {link} moves KV between GPUs, {why}" in capsys.readouterr().out


def test_messages_of_every_size_at_every_level() -> None:
    """The host link in place of NCCL's; D checks what it got, so a rate is one of a right push."""
    with messages("host", ("cpu", "cpu"), SMALL, 2 << 20) as both:
        rows = nccl.rows_of(both, SMALL, 2, raw=False)
    assert [row["bytes"] for row in rows] == SMALL
    for row in rows:
        assert min(row[kind] for kind in nccl.DEVICE_KINDS) > 0
        assert [len(row[kind]) for kind in ("link", "push")] == [2, 2]
        assert min(row["link"] + row["push"]) > 0
    lines = list(nccl.table(rows))
    assert [line.split()[:2] for line in lines[1:]] == [["64", "KiB"], ["1024", "KiB"]]
    assert all(len(line.split()) == 12 for line in lines[1:])


def test_a_plot_needs_matplotlib_or_draws(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    try:
        nccl.plot([{**ROW, "raw": [1e9]}], path)
    except harness.BenchError as error:
        assert "install it, or use --json" in str(error)
    else:
        assert path.stat().st_size > 1000


def test_nccl_is_told_that_two_ranks_share_a_device() -> None:
    assert harness.environment(shared=False) == {}
    assert harness.environment(shared=True) == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert harness.environment_of_child(shared=False) == dict(os.environ)


# How it calls NCCL by itself, by a pretend CuPy of each age.


SIGNED = tuple(part - 256 if part > 127 else part for part in UNIQUE_ID)


@pytest.mark.parametrize(("version", "given"), [("13.6.0", SIGNED), ("14.2.0", UNIQUE_ID)])
def test_messages_go_one_after_the_other(version: str, given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, module, asked = fake_cupy(version)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nccl=module))
    waited = []
    stream = types.SimpleNamespace(cuda_stream=77, synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)

    assert harness.new_name() == UNIQUE_ID.hex()
    raw = harness.RawNccl(bytes.fromhex(harness.new_name()), rank=0)
    flat = torch.zeros(300, dtype=torch.uint8)
    raw.send(flat, [100, 200])
    raw.receive(flat, [300])
    raw.close()
    start = flat.data_ptr()
    assert [call for call in asked.calls if call[0] != "get_unique_id"] == [
        ("init", 2, given, 0),
        ("send", start, 100, 1, 1, 77),
        ("send", start + 100, 200, 1, 1, 77),
        ("recv", start, 300, 1, 0, 77),
        ("abort",),
    ]
    assert len(waited) == 2


# Fan-out and the cost of communicators.


TOTAL = 2 << 20
FEW = (1, 2)


@pytest.fixture(scope="module")
def fans() -> Iterator[FanOut]:
    with fan_out("host", ["cpu"], FEW, TOTAL, 256 << 10) as all_of_them:
        yield all_of_them


def test_every_rank_of_d_gets_its_share_of_the_heads(fans: FanOut) -> None:
    """Each rank looks at what it got, and its bytes are counted, so a rate is one of a right push."""
    rows = fanout.rows_of(fans, FEW, 2)
    assert [(row["fan_out"], len(row["push"])) for row in rows] == [(1, 2), (2, 2)]
    assert min(rate for row in rows for rate in row["push"]) > 0
    sent = fans.rank.counters.values
    assert sent["bytes_sent"] == 2 * 3 * TOTAL and sent["chunks_filler"] == 0


def test_a_rank_with_wrong_bytes_ends_the_benchmark(fans: FanOut) -> None:
    fans.memory.cells.add_(1)
    with pytest.raises(harness.BenchError, match="D does not hold P's KV"):
        fans.push(2)


def test_the_host_link_and_whole_requests_are_measured_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench.json"
    few = ["--tokens", "17", "--repeat", "1", "--layer-ms", "0.1", "--whole-request"]
    assert main(["bench", *few, "--fan-out", "1", "--json", str(out)]) == 0
    found, said = json.loads(out.read_text()), capsys.readouterr().out
    assert [(row["fan_out"], len(row["push"])) for row in found["fan_out"]["rows"]] == [(1, 1)]
    assert "P on cpu, D's ranks on cpu" in said
    assert [list(row["modes"]) for row in found["layers"]] == [["whole"]] and "whole requests" in said


def test_the_table_has_medians_and_ratios_turn_by_turn() -> None:
    rows = [{"fan_out": 1, "push": [1e9, 2e9, 4e9]}, {"fan_out": 4, "push": [3e9, 3e9, 6e9]}]
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    lines = list(fanout.table({"rows": rows, "total": 256 << 20, "devices": devices}))
    assert "256 MiB" in lines[0]
    assert lines[1] == "P on cuda:0, D's ranks on cuda:1, cuda:2"
    assert [line.split() for line in lines[3:]] == [["1", "2.00", "1.00"], ["4", "3.00", "1.50"]]


def test_ranks_of_d_take_turns_on_the_devices_that_p_has_not() -> None:
    assert [device_of(["cuda:0"], rank) for rank in range(2)] == ["cuda:0", "cuda:0"]
    assert [device_of(["a", "b", "c"], rank) for rank in range(4)] == ["b", "c", "b", "c"]


def test_the_sizes_and_fan_outs_can_be_measured() -> None:
    for size in SIZES:
        assert nccl.TOTAL % size == 0 and size % harness.BLOCK_BYTES == 0
    assert nccl.TOTAL % TOKEN_BYTES == 0
    for number in FAN_OUTS:
        assert HEADS % number == 0
    assert all(total % TOKEN_BYTES == 0 for total in fanout.TOTAL.values())


def test_each_link_costs_what_the_device_has_less_when_it_is_up() -> None:
    """The host link in place of NCCL's, and a device that says what it has left, in turn."""
    left = iter([1000, 900, 850, 820, 790, 760])
    asked: list[str] = []

    def free(device: str) -> int:
        asked.append(device)
        return next(left) << 20

    costs = fanout.measure_communicators("host", ("cpu", "cpu"), free)
    assert asked == ["cpu"] * (2 + fanout.LINKS)
    assert costs["slots"] == 100 << 20 and costs["links"] == [n << 20 for n in (50, 30, 30, 30)]
    lines = list(fanout.communicators_table(costs))
    assert "P's end" in lines[0]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["1", "50.0"], ["2", "30.0"], ["3", "30.0"], ["4", "30.0"], ["slots", "100.0"],
        ["NVLINK", "72.0"], ["PCIE", "56.0"], ["NETWORK", "68.0"],
    ]  # fmt: skip


@pytest.mark.parametrize("link", ["nccl", "ipc"])
def test_the_report_has_all_tables_that_the_link_has(link: str) -> None:
    costs = {"ends": 2, "staging_bytes": 64 << 20, "slots": 64 << 20, "links": [5 << 20]}
    text = nccl.show(
        {"torch": torch.__version__},
        {
            "link": link,
            "devices": ["cuda:0", "cuda:0"],
            "cards": ["a card"],
            "total": 64 << 20,
            "rows": [ROW | ({"raw": [1e9]} if link == "nccl" else {})],
            "fan_out": {"devices": ["cuda:0"], "total": 256 << 20, "rows": [{"fan_out": 1, "push": [7e9]}]},
            "communicators": costs if link == "nccl" else None,
        },
    )
    assert "1024 KiB" in text and "ranks of D" in text and "7.00" in text
    assert ("both ends" in text) == ("5.0" in text) == (link == "nccl")
    assert link == "nccl" or "link and push move 64 MiB" in text
    assert link == "nccl" or not re.search("communicator|MPS", text)


# --link paced: what it measures, and that what stands in for the card has the card's calls.


@pytest.mark.parametrize("over", ["nccl", "ipc"])
def test_a_push_takes_no_less_than_the_wire_and_each_station_is_counted(
    over: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "paced.json"
    sizes = ["--prompt", "16", "--message", "4", "--wire", "20", "--repeat", "2", "--step-ms", "0.1"]
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
    for way, turns in row["steps"]["0.1"].items():
        assert len(turns) == 2 and ("loaded" in turns[0]) == (way != "alone")
        assert all(turn["step"] > 0 and turn.get("loaded", 1) >= 16 * MIB / 20e9 for turn in turns)
    assert results["card"] == paced_card.SOURCES
    shown = capsys.readouterr().out
    assert f"{over:<5}    20   16 MiB     4.00" in shown and "Where it goes" in shown


@pytest.mark.parametrize(
    ("paced", "real"),
    [
        (paced_card.PacedDevice, gpu.CudaDevice),
        (paced_card.PacedStream, gpu.CudaStream),
        (paced_card.PacedEvent, CudaEvent),
        (paced_card.PacedNccl, nccl_bindings.Nccl),
        (paced_card.PacedMemory, cuda_memory.CudaMemory),
        (paced_card.PacedLauncher, CupyLauncher),
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
    assert set(paced_card.SOURCES) == set(vars(paced_card.Card()))


def test_an_operation_ends_when_both_sides_have_begun_and_its_bytes_have_passed() -> None:
    device = paced_card.PacedDevice(paced_card.Card(wire=1e9, call=0.0, operation=0.0, kernel=0.0))
    nccl = paced_card.PacedNccl(device)
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
        nccl.abort(ends[0])
    assert not ends[0].path.exists()


def test_a_stream_follows_an_event_of_another() -> None:
    device = paced_card.PacedDevice(paced_card.Card(kernel=0.0))
    first, second = device.stream(), device.stream()
    first.launch(0.02)
    end = first.last.end() if first.last else None
    second.follow(first.record())
    second.launch(0.01)
    assert second.last.end() == pytest.approx(end + 0.01)
