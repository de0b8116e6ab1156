"""side_by_side.py from its options to its page, with servers that compute nothing in place of vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import side_by_side
import side_by_side_systems

from p2pkv.demo.servers import ProxyServer, VllmServer

FAKE = str(Path(__file__).with_name("fake_vllm.py"))
FEW = [
    "--lengths", "16", "32", "--series-tokens", "32", "--rounds", "2", "--series", "2",
    "--decode-rounds", "2", "--leg-rounds", "2", "--clients", "2", "--load-requests", "4",
    "--small-rounds", "2", "--arrival-rounds", "1", "--settle", "0.01", "--deadline", "20",
    "--start-seconds", "30",
]  # fmt: skip


class FakeServer(VllmServer):
    """Answers, unless it is one of NIXL's: their D answers with errors, and those of push do not start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        status = ["500"] if self.name.startswith("NIXL-kv_consumer") else []
        broken = ["-c", "raise OSError('no such device')"] if self.name.startswith("NIXL-push") else []
        self.command = [sys.executable, *(broken or [FAKE, str(self.http_port), *status])]


class FakeProxy(ProxyServer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.command = [sys.executable, FAKE, str(self.http_port)]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the results; NIXL is there, Mooncake is not."""
    made = side_by_side_systems.Environment(Path(sys.executable), tmp_path, {"mooncake": "pip is offline"})
    monkeypatch.setattr(side_by_side_systems, "VllmServer", FakeServer)
    monkeypatch.setattr(side_by_side_systems, "environment", lambda *_args: made)
    monkeypatch.setattr(side_by_side, "ProxyServer", FakeProxy)
    monkeypatch.setattr(side_by_side, "ensure_model", lambda _model: tmp_path)
    monkeypatch.setattr(side_by_side, "IDLE_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(side_by_side, "END_SECONDS", 1.0)
    return tmp_path


def run(fakes: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[str, dict[str, Any]]:
    command = ["side_by_side.py", "--out", str(fakes), "--logs", str(fakes / "logs"), *FEW, *options]
    monkeypatch.setattr(sys, "argv", command)
    assert side_by_side.main() == 0
    found: dict[str, Any] = json.loads((fakes / "side_by_side.json").read_text())
    return (fakes / "side_by_side.md").read_text(), found


@pytest.mark.long
def test_a_run_measures_every_section_of_every_group(fakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ["--sections", "series", "small", "lengths", "legs", "decode", "idle", "arrivals", "load"]
    text, found = run(fakes, monkeypatch, "--minutes", "2", *every)
    sections = {(r["group"], r["section"]) for r in found["records"]}
    ours = ("series", "small", "lengths", "decode", "idle", "arrivals", "load")
    assert {("p2pkv", name) for name in ours} <= sections
    assert {("files", "lengths"), ("files", "legs"), ("files", "load"), ("nixl", "lengths")} <= sections
    load = {r["system"] for r in found["records"] if r["section"] == "load" and r["group"] == "p2pkv"}
    assert load == {"plain", "round robin", "p2pkv", "p2pkv proxy", "p2pkv no naps"}
    assert found["missing"]["Mooncake"] == "pip is offline"
    assert "no such device" in found["missing"]["NIXL push"]
    assert "this server only fails" in found["missing"]["NIXL"]
    assert [sentence for sentence in found["cut"] if not sentence.endswith("(--lengths)")] == []
    assert "| 2 | p2pkv | round robin |" in text
    for number in (0, 1):
        these = [r for r in found["records"] if r["section"] == "series" and r["round"] == number]
        counts = {name: sum(r["system"] == name for r in these) for name in side_by_side.SERIES}
        assert counts == side_by_side.SERIES


def test_a_run_ends_when_its_time_is_over_and_says_what_was_cut(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, found = run(fakes, monkeypatch, "--minutes", "0.2", "--sections", "lengths", "--rounds", "1000000")
    assert found["about"]["minutes"] < 1.2
    # On a busy machine the time may be over before anything was asked: then all of it was cut.
    assert any(sentence.startswith(("p2pkv, lengths", "everything")) for sentence in found["cut"])
    assert "## What was cut" in text


def test_what_is_left_out_or_what_a_system_cannot_move_is_not_asked_of_it(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--groups", "files", "--sections", "lengths", "--without", "Example naps"]
    text, found = run(fakes, monkeypatch, "--minutes", "1", *options, "--chunk-tokens", "16")
    assert {r["system"] for r in found["records"]} == {"plain", "p2pkv", "p2pkv P first", "Example"}
    asked = {r["tokens"] for r in found["records"] if r["system"] == "Example" and r["section"] == "lengths"}
    assert asked == {16}
    assert text.count("Example: no prompts of more than 16 tokens") == 1
