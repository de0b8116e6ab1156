"""`p2pkv bench --link nccl` without a device: it refuses; and its machinery, run on CPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from p2pkv.bench import nccl
from p2pkv.bench.harness import BLOCK_BYTES, BenchError, Strip, environment, environment_of_child
from p2pkv.bench.memory import TOKEN_BYTES, Memory
from p2pkv.bench.nccl import SIZES, messages
from p2pkv.cli import main

SMALL = [64 << 10, 1 << 20]


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


def test_the_page_of_a_link_without_communicators() -> None:
    row = {"bytes": 1 << 20, "copy": 3e9, "gather": 2e9, "scatter": 2e9, "link": [1e9], "push": [1e9]}
    fans = {"devices": ["cuda:0"], "total": 1 << 20, "rows": [{"fan_out": 1, "push": [1e9]}]}
    about = {"torch": "2.13.0"}
    results = {"link": "ipc", "devices": ["cuda:0"] * 2, "cards": ["H100"], "total": 1 << 20, "rows": [row],
               "fan_out": fans, "communicators": None}  # fmt: skip
    page = nccl.show(about, results)
    assert "link and push move 1 MiB" in page and "communicator" not in page and "sockets" not in page


def test_the_sizes_can_be_measured() -> None:
    for size in SIZES:
        assert nccl.TOTAL % size == 0 and size % BLOCK_BYTES == 0
    assert nccl.TOTAL % TOKEN_BYTES == 0


def test_a_strip_moves_as_many_bytes_as_it_says() -> None:
    """The cache refuses a buffer of another size, so rates that come back are of these bytes."""
    strip = Strip(Memory(1024, "P"), 4 << 20, "cpu")
    for nbytes in (BLOCK_BYTES, 256 << 10, 4 << 20):
        assert set(strip.rates(nbytes)) == {"copy", "gather", "scatter"}


def test_a_plot_needs_matplotlib_or_draws(tmp_path: Path) -> None:
    row = {"bytes": 1 << 20, "copy": 3e9, "gather": 2e9, "scatter": 2e9, "raw": [1e9], "link": [1e9]}
    path = tmp_path / "curves.png"
    try:
        nccl.plot([{**row, "push": [1e9]}], path)
    except BenchError as error:
        assert "install it, or use --json" in str(error)
    else:
        assert path.stat().st_size > 1000


def test_two_ranks_on_one_device_claim_hosts_of_their_own() -> None:
    assert environment("P", shared=False) == {}
    assert environment("P", shared=True)["NCCL_HOSTID"] != environment("D", shared=True)["NCCL_HOSTID"]
    assert environment_of_child("D", shared=False) == dict(os.environ)
