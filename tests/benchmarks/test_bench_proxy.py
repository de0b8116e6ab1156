"""bench_proxy.py from its options to its page, without vllm-router."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_proxy
import pytest
from environments import Unavailable


@pytest.mark.long
def test_from_the_options_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(folder: Path, *requirements: str, ours: bool = False) -> Path:
        raise Unavailable(f"no {requirements[0]} here")

    options = ["--rounds", "2", "--seconds", "0.3", "--chunks", "4", "--pace", "1", "--connections", "4"]
    options += ["--rate", "50", "--instances", "10", "--logs", str(tmp_path / "logs"), "--out", str(tmp_path)]
    monkeypatch.setattr(bench_proxy, "environment", none)
    monkeypatch.setattr(sys, "argv", ["bench_proxy.py", *options, "--note", "Only a test."])
    assert bench_proxy.main() == 0
    found = json.loads((tmp_path / "proxy.json").read_text())
    assert [*found["routers"]] == ["p2pkv-proxy", "p2pkv-proxy, 10 instances"]
    for figures in found["routers"].values():
        assert figures.keys() == bench_proxy.FIGURES.keys()
        assert all(len(values) == 2 for values in figures.values())
        # Of the other figures, a small or even a negative one may come out of so few requests.
        assert min(figures["requests"] + figures["cpu_request"]) > 0
    page = (tmp_path / "proxy.md").read_text()
    assert "Only a test." in page and "no vllm-router==0.1.17 here" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in rows[1:]] == [
        *("| p2pkv-proxy", "| p2pkv-proxy, 10 instances", "| vllm-router")
    ]
    assert len({line.count("|") for line in rows}) == 1
    assert bench_proxy.quantile([3.0, 1.0, 2.0], 0.99) == 3.0
