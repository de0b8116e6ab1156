"""What the steps of `make gpu-first-day` that measure do, on a CPU; and its page's tables of them."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu import first_day, first_tokens, mps, push_table
from gpu.first_day import Step, blocks, run_all
from gpu.page import Table, markdown
from gpu.tables import mps_phrase, push_blocks, token_blocks

from p2pkv.demo.processes import wait_until

# Steps side by side.


def test_steps_that_need_no_quiet_run_at_the_same_time() -> None:
    """Each of the two waits for the other, by a pipe's two ends; the third is alone."""
    left, right = os.pipe(), os.pipe()
    code = "import os; os.write({}, b'.'); assert os.read({}, 1); print('both')"

    def step(name: str, mine: tuple[int, int], other: tuple[int, int]) -> Step:
        here = f"/proc/{os.getpid()}/fd"  # a step inherits no descriptors: it opens these pipes anew
        ends = f"os.open('{here}/{mine[1]}', 1)", f"os.open('{here}/{other[0]}', 0)"
        return Step(name, "", (sys.executable, "-c", code.format(*ends)), seconds=30, quiet=False)

    alone = Step("alone", "", (sys.executable, "-c", "print('alone')"))
    results = run_all([step("one", left, right), step("other", right, left), alone], 0, 60.0)
    for descriptor in (*left, *right):
        os.close(descriptor)
    assert [(each.step, each.outcome) for each in results] == [
        ("one", "passed"), ("other", "passed"), ("alone", "passed"),
    ]  # fmt: skip
    assert [each.output for each in results] == [["both"], ["both"], ["alone"]]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Where a shell has started pytest in the background, Python ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_who_interrupts_it_interrupts_the_steps() -> None:
    code = "import time; time.sleep(60)"
    pair = [Step(name, "", (sys.executable, "-c", code), quiet=False) for name in ("one", "other")]

    def interrupt() -> None:
        wait_until(lambda: len(first_day.RUNNING) == 2, "two steps")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # as Ctrl-C does

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_all(pair, 0, 60.0)
    thread.join()
    assert not first_day.RUNNING, "a step goes on by itself"


# CUDA MPS.

CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then
    test -d "$CUDA_MPS_LOG_DIRECTORY" || exit 3
    mkfifo "$CUDA_MPS_PIPE_DIRECTORY/control" && echo "$FAKE_SAYS"; exit "$FAKE_STATUS"
fi
cat > "$FAKE_HEARD"
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pretend nvidia-cuda-mps-control in a folder of its own; what it was told goes to `heard` there."""
    program = tmp_path / "bin" / mps.DAEMON
    program.parent.mkdir()
    program.write_text(CONTROL)
    program.chmod(0o755)
    for name, value in {"SAYS": "", "STATUS": "0", "HEARD": str(tmp_path / "heard")}.items():
        monkeypatch.setenv(f"FAKE_{name}", value)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "users"))
    monkeypatch.delenv("CUDA_MPS_LOG_DIRECTORY", raising=False)
    return program.parent


def test_mps_is_started_for_the_steps_and_ended(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    with mps.started(True, str(control)) as said:
        assert said == f"{control / mps.DAEMON} -d: started"
        assert Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control").is_fifo()
        assert mps.runs() is None, "its pipe is there, and no daemon"
    assert (control.parent / "heard").read_text() == "quit\n"
    assert dict(os.environ) == before and mps.runs() is False
    monkeypatch.setenv("FAKE_STATUS", "1")
    monkeypatch.setenv("FAKE_SAYS", "no GPU")
    with mps.started(True, str(control)) as said:
        assert said.endswith("-d failed: no GPU")


def test_without_mps_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with mps.started(True, "/no/such/folder") as said:
        assert said == f"{mps.DAEMON} is not installed here, so processes on one card take turns"
    with mps.started(False) as nothing:
        assert nothing == ""
    assert mps_phrase(True) == "under CUDA MPS"
    assert mps_phrase(False, said).startswith("without CUDA MPS (nvidia-cuda-mps-control is not installed")
    assert "perhaps" in mps_phrase(None)
    shown = markdown("a day", blocks([], [], "today", under="under CUDA MPS"))
    assert "today, `make gpu-first-day`, under CUDA MPS: 0 passed" in shown
    monkeypatch.setitem(sys.modules, "p2pkv.links.mps_check", None)
    assert mps.runs() is None


# The tables.


def test_pushes_stand_beside_nccl_alone() -> None:
    rows = [
        {"bytes": 64 << 10, "copy": 7e9, "gather": 0.5e9, "raw": [3e9], "push": [0.15e9]},
        {"bytes": 8 << 20, "copy": 700e9, "gather": 70e9, "raw": [75e9, 70e9, 80e9], "push": [13e9, 18e9]},
    ]
    ipc = [{**row, "raw": []} for row in rows]
    short = {"short": {str(1 << 20): [0.0012, 0.001, 0.003]}}
    measured = [{"link": "nccl", "total": 512 << 20, "rows": rows} | short]
    measured += [{"link": "ipc", "total": 1, "rows": ipc} | short]
    *_, text, table, of_one = push_blocks(measured)
    assert "medians: nccl: 1 MiB 1.2; ipc: 1 MiB 1.2." in markdown("", [of_one])
    assert "a prompt of 512 MiB" in markdown("", [text])
    assert isinstance(table, Table) and table.head == ["", "64 KiB", "8 MiB"]
    assert [list(row) for row in table.rows] == [
        ["a plain copy", "7", "700"],
        ["gather", "0.5", "70"],
        ["raw NCCL", "3", "75"],
        ["push, nccl", "0.15", "15.5"],
        ["push, nccl, over raw NCCL", "0.05", "0.21"],
        ["push, ipc", "0.15", "15.5"],
    ]
    rows[0]["raw"] = []
    assert push_blocks(measured)[-2].rows[2] == ["raw NCCL", "-", "75"]  # type: ignore[union-attr]
    assert push_blocks([]) == []


FIRST_TOKENS = Path(__file__).parents[2] / "benchmarks" / "results" / "h100_first_tokens.json"


def test_first_tokens_of_the_h100_are_its_pages_table() -> None:
    """The figures that a card has shown, as the page would show them."""
    measured = json.loads(FIRST_TOKENS.read_text()) | {"transfers": {"ipc": [90, 0], "nccl": [90, 0]}}
    *_, about, tokens, _, _, gaps = token_blocks(measured)
    assert "A step takes 2.6. Answers that equal the single server's: 90 of 90." in markdown("", [about])
    assert list(tokens.head)[:5] == ["tokens", "one server", "pair, ipc", "pair, ipcs", "pair, nccl"]
    assert list(tokens.rows[0])[:5] == ["64", "22.6", "36.2", "40.3", "33.8"]
    assert list(tokens.rows[0])[5] == "11.0", "over one server and a step"
    assert ["single loaded", "2.6", "15.8", "85.2"] in [list(row) for row in gaps.rows]
    assert token_blocks(None) == []


# The steps themselves, on a CPU.


def test_the_push_table_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pushes.json"
    given = ["--link", "host", "--devices", "cpu", "cpu", "--sizes-kib", "512", "1024", "--total-mib", "8"]
    given += ["--short-kib", "512"]
    monkeypatch.setattr(sys, "argv", ["push_table.py", *given, "--json", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(push_table.__file__, run_name="__main__")
    assert ended.value.code == 0
    measured = json.loads(out.read_text())
    assert [(row["bytes"], len(row["push"])) for row in measured["rows"]] == [(512 << 10, 1), (1 << 20, 3)]
    assert min(rate for row in measured["rows"] for rate in row["push"]) > 0
    assert len(measured["short"][str(512 << 10)]) == push_table.SHORT_REPEAT
    assert len(push_blocks([measured])) == 4


def test_a_model_of_another_geometry_has_no_weights(tmp_path: Path) -> None:
    tiny, large = tmp_path / "tiny", tmp_path / "large"
    tiny.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        (tiny / name).write_text('{"hidden_size": 64, "vocab_size": 500}')
    first_tokens.enlarged(tiny, large)
    assert sorted(path.name for path in large.iterdir()) == ["config.json", "tokenizer.json"]
    made = json.loads((large / "config.json").read_text())
    assert (made["hidden_size"], made["num_hidden_layers"], made["vocab_size"]) == (3072, 20, 500)


@pytest.mark.parametrize(
    ("wrong", "transfers", "words"),
    [
        ([1, 90], {"nccl": [90, 0]}, ""),
        ([5, 90], {"nccl": [90, 0]}, "5 of 90 answers differ"),
        ([0, 90], {"nccl": [89, 1]}, "transfers failed, or none was loaded: nccl"),
        ([0, 90], {"nccl": [0, 0]}, "none was loaded: nccl"),
    ],
)
def test_figures_that_are_worth_nothing(
    wrong: list[int], transfers: dict[str, list[int]], words: str
) -> None:
    said = first_tokens.complaint({"wrong": wrong, "transfers": transfers})
    assert words in said and bool(said) is bool(words)


def test_a_load_that_is_not_answered_is_an_error() -> None:
    prompts = first_tokens.Prompts(1000)
    nowhere = first_tokens.System("http://127.0.0.1:1")
    load = first_tokens.Load(nowhere, prompts, first_tokens.ON_A_CPU)
    load.answered = -1
    load._prompts = []
    load.at(first_tokens.LOAD_AT)
    with pytest.raises(RuntimeError, match="-1 of 0 long prompts"):
        load.finish(True)


@pytest.mark.vllm
@pytest.mark.servers
@pytest.mark.long
@pytest.mark.timeout(600)
def test_first_tokens_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real servers, a tiny model and link: host: its table has both systems."""
    out = tmp_path / "tokens.json"
    monkeypatch.setattr(sys, "argv", ["first_tokens.py", "--links", "host", "--json", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(first_tokens.__file__, run_name="__main__")
    assert ended.value.code == 0
    measured = json.loads(out.read_text())
    assert measured["wrong"] == [0, 4] and measured["transfers"]["host"][1] == 0
    assert set(measured["itl"]) == {
        f"{name} {how}" for name in ("single", "host") for how in ("quiet", "loaded")
    }
    assert [isinstance(each, Table) for each in token_blocks(measured)].count(True) == 2
