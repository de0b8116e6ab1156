"""bench_pair.py from its options to its page, with servers that compute nothing in place of vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import bench_pair
import bench_servers
import pytest

from p2pkv.demo.servers import ProxyServer, VllmServer

FAKE = str(Path(__file__).with_name("fake_vllm.py"))
FEW = [
    *("--lengths", "16", "32", "--rounds", "2", "--clients", "2", "--requests", "4"),
    *("--settle", "0.01", "--deadline", "20"),
]


class FakeServer(VllmServer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command = [sys.executable, FAKE, str(self.http_port)]


class FakeProxy(ProxyServer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.command = [sys.executable, FAKE, str(self.http_port)]


def test_each_system_has_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_servers, "VllmServer", FakeServer)
    monkeypatch.setattr(bench_pair, "ProxyServer", FakeProxy)
    monkeypatch.setattr(bench_pair, "ensure_model", lambda _model: tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_pair.py", "--out", str(tmp_path), *FEW])
    assert bench_pair.main() == 0
    found = json.loads((tmp_path / "pair.json").read_text())
    asked = [(row["system"], row["tokens"], row["round"]) for row in found["single"]]
    alone = ("plain", "at once", "P first", "proxy")
    assert sorted(asked) == sorted((name, n, k) for name in alone for n in (16, 32) for k in (1, 2))
    assert {row["system"]: len(row["first"]) for row in found["load"]} == dict.fromkeys(bench_pair.SYSTEMS, 4)
    rows = [line for line in (tmp_path / "pair.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * 4 + 1 + 5 and all(row.endswith("| 0 |") for row in rows[-5:])


def test_expected_is_the_first_token_and_a_step() -> None:
    plain = {"system": "plain", "tokens": 16, "gaps": [0.25, 0.5, 0.25]}
    records = [{**plain, "round": 1, "first": 2.0}, {**plain, "round": 2, "first": 3.0}]
    assert bench_pair.expected(records, 16) == {1: 2.25, 2: 3.25}
