"""What a communicator takes by NCCL's source (docs/decisions/nccl-memory.md); what both ends need alike."""

import re
from pathlib import Path

import pytest

from p2pkv.links.nccl_memory import (
    CONTROL_BYTES,
    GRANULE,
    LL128_BYTES,
    LL_BYTES,
    MIB,
    SAME_ON_BOTH,
    SIMPLE_BYTES,
    Way,
    division,
    end_bytes,
)
from support.links.pairs import nccl_links

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "decisions" / "nccl-memory.md").read_text()


def rows(title: str) -> list[list[str]]:
    lines = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert len(table) > 2, title
    return table[2:]


NAMES = {
    "NVLink (H100, NVSwitch)": Way.NVLINK,
    "PCIe, or one card": Way.PCIE,
    "network, GPUDirect RDMA": Way.NETWORK,
}


def test_the_page_has_what_the_formula_gives() -> None:
    table = rows("One link")
    assert [row[0] for row in table] == list(NAMES)
    for name, *cells in table:
        ends = [[end_bytes(channels, NAMES[name], d) // MIB for d in (False, True)] for channels in (2, 4, 8)]
        assert cells == [f"{p}, {d}" for p, d in ends], name


def test_operations_say_what_a_d_with_64_ps_needs() -> None:
    page = " ".join((DOCS / "operations.md").read_text().split())
    found = re.search(r"links to 64 P's needs ([\d.]+) GiB free \(([\d.]+) with 4 channels\)", page)
    for channels, free in zip((8, 4), found.groups(), strict=True):
        one = end_bytes(channels, Way.NETWORK, True)
        assert float(free) == pytest.approx(64 * one / (1 << 30) + 0.5, abs=0.06), channels


def test_channels_and_granules_are_what_counts() -> None:
    assert (LL_BYTES, LL128_BYTES, SIMPLE_BYTES) == (512 << 10, 4_915_200, 4 << 20)
    assert end_bytes(1, Way.PCIE, False) == (2 + 3 + 1) * GRANULE
    assert end_bytes(1, Way.PCIE, True) - end_bytes(1, Way.PCIE, False) == 4 * GRANULE
    assert CONTROL_BYTES + LL_BYTES + LL128_BYTES + SIMPLE_BYTES < 5 * GRANULE
    both = end_bytes(8, Way.PCIE, False) + end_bytes(8, Way.PCIE, True)
    assert both == 128 * MIB and str(both // MIB) in PAGE


def test_messages_divided_otherwise_are_another_kind_of_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's sender would write past the receiver's buffers, or its receiver read what was not sent: so the
    handshake refuses them, which compares kinds."""
    for name in SAME_ON_BOTH:
        monkeypatch.delenv(name, raising=False)
    plain = nccl_links().kind
    assert re.fullmatch(r"nccl \d+\.\d+\.\d+", plain)
    monkeypatch.setenv("NCCL_P2P_NET_CHUNKSIZE", "524288")
    monkeypatch.setenv("NCCL_BUFFSIZE", "1048576")
    assert nccl_links().kind == f"{plain} NCCL_BUFFSIZE=1048576 NCCL_P2P_NET_CHUNKSIZE=524288"
    assert division(16, {"NCCL_BUFFSIZE": ""}) == "16 channels"
