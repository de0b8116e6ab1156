"""Fan-out and the cost of communicators, as `p2pkv bench --link nccl` finds them, run on CPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from p2pkv.bench import fanout, nccl
from p2pkv.bench.fanout import FAN_OUTS, FanOut, device_of, fan_out
from p2pkv.bench.harness import BenchError
from p2pkv.bench.memory import HEADS, TOKEN_BYTES
from p2pkv.cli import main

TOTAL, TOKENS = 2 << 20, 17
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
    with pytest.raises(BenchError, match="D does not hold P's KV"):
        fans.push(2)


def test_the_host_link_is_measured_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    few = ["--tokens", "17", "--repeat", "1", "--layer-ms", "0.1", "--whole-request"]
    assert main(["bench", *few, "--fan-out", "1", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["fan_out"]["rows"]
    assert [(row["fan_out"], len(row["push"])) for row in rows] == [(1, 1), (2, 1)]
    assert "P on cpu, D's ranks on cpu" in capsys.readouterr().out


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


def test_the_fan_outs_can_be_measured() -> None:
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
    ]  # fmt: skip


def test_the_report_has_all_three_tables() -> None:
    row = {"bytes": 1 << 20, "copy": 3e9, "gather": 2e9, "scatter": 2e9, "raw": [1e9], "link": [1e9]}
    results = {
        "link": "nccl",
        "devices": ["cuda:0", "cuda:0"],
        "cards": ["a card"],
        "total": 64 << 20,
        "rows": [{**row, "push": [1e9]}],
        "fan_out": {"devices": ["cuda:0"], "total": 256 << 20, "rows": [{"fan_out": 1, "push": [7e9]}]},
        "communicators": {"ends": 2, "staging_bytes": 64 << 20, "slots": 64 << 20, "links": [5 << 20]},
    }
    text = nccl.show({"torch": torch.__version__}, results)
    assert "1024 KiB" in text and "ranks of D" in text and "both ends" in text
    assert "7.00" in text and "5.0" in text
