"""`make gpu-first-day` where a machine lacks what a step needs, or a step fails, hangs or comes too late."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from gpu import first_day
from gpu.figures import VARIABLE, figure, figures
from gpu.first_day import Step, blocks, figures_table, limits, run_all, verdict
from gpu.page import Boxes, Output, Table, Text, markdown, page


def step(name: str, code: str, **more: object) -> Step:
    return Step(name, f"what {name} does", (sys.executable, "-c", code), **more)  # type: ignore[arg-type]


def test_each_step_has_its_outcome_and_its_reason() -> None:
    results = run_all(
        [
            step("good", "print('3 passed in 0.1s')"),
            step("bad", "print('it broke'); raise SystemExit(3)"),
            step("slow", "import time; time.sleep(60)", seconds=0.5),
            Step("absent", "a program that is not there", ("/no/such/program",)),
            step("large", "", gpus=2),
            step("refused", "raise SystemExit(1)", one="its lines have the reason"),
            step("carried", "", modules=("no_such_module",)),
        ],
        count=1,
        seconds=60.0,
    )
    assert [(each.step, each.outcome) for each in results] == [
        ("good", "passed"),
        ("bad", "failed"),
        ("slow", "failed"),
        ("absent", "not run"),
        ("large", "not run"),
        ("refused", "not run"),
        ("carried", "not run"),
    ]
    assert [each.why for each in results[1:3]] == ["exit status 3", "it did not end in 0.5 s"]
    assert [each.why for each in results[4:]] == [
        "needs 2 CUDA devices, and torch finds 1",
        "its lines have the reason",
        "needs vLLM, not installed here: carry the wheels",
    ]
    (late,) = run_all([step("late", "")], count=0, seconds=0.0)
    assert (late.outcome, late.why) == ("not run", "the time was over (--minutes)")
    shown = [step("good", "", boxes=("bytes are equal",)), step("bad", "", boxes=("nothing hangs",))]
    said = markdown("a day", blocks(shown, results, "today"))
    assert "- [x] bytes are equal (good)\n- [ ] nothing hangs (bad)" in said
    assert "| bad | what bad does | failed |" in said and "it broke" in said
    assert "today, `make gpu-first-day`: 1 passed, 2 failed, 4 not run." in said


@pytest.mark.parametrize(
    ("status", "said", "outcome"),
    [
        (0, "5 passed in 1.0s", ("passed", "")),
        (0, "4 passed, 1 skipped in 1.0s", ("passed", "")),
        (1, "1 failed in 1.0s", ("failed", "exit status 1")),
        (0, "SKIPPED [2] tests/gpu/a.py:1: needs CuPy\n2 skipped in 0.1s", ("not run", "needs CuPy")),
        (0, "2 skipped, 3 deselected in 0.1s", ("not run", "all of its tests were skipped")),
    ],
)
def test_a_step_whose_tests_are_all_skipped_was_not_run(
    status: int, said: str, outcome: tuple[str, str]
) -> None:
    assert verdict(status, said) == outcome


def run_pytest(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/bare.ini", "-q", *arguments]
    env = {**os.environ, "PYTHONPATH": f"{first_day.ROOT}{os.pathsep}{first_day.ROOT / 'tests'}"}
    return subprocess.run(
        command, cwd=first_day.ROOT, env=env, capture_output=True, text=True, check=False, timeout=seconds
    )


def collected() -> list[str]:
    """The tests of this folder, by id; all that a GPU would run."""
    done = run_pytest("--collect-only", "tests/gpu", seconds=120.0)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_test_for_a_gpu_is_in_a_step_and_every_step_has_some(tmp_path: Path) -> None:
    for package in ("msgspec", "zmq"):
        pytest.importorskip(package, reason=f"without {package} most tests for a GPU cannot be collected")
    ids, seen = collected(), set[str]()
    for each in first_day.steps(tmp_path):
        named = {
            word.removeprefix("tests/gpu/") for word in each.command if word.startswith("tests/gpu/test_")
        }
        if not named:
            continue
        wanted = each.command[each.command.index("-k") + 1] if "-k" in each.command else ""
        chosen = {
            test
            for test in ids
            if any(name in test for name in named)
            and (not wanted or Expression.compile(wanted).evaluate(lambda word, test=test, **_: word in test))
        }
        assert chosen, each.name
        assert each.boxes, f"{each.name} shows nothing"
        seen |= chosen
    assert {test for test in ids if "gpu" in test.partition("[")[2] and "first_day" not in test} <= seen


def test_figures_stand_beside_their_limits() -> None:
    row = {"bytes": 1 << 20, "copy": 2e12, "gather": 1e12, "scatter": 1.5e12}
    row |= {"link": [150e9], "push": [75e9], "raw": []}
    bench = {"rows": [row], "devices": ["cuda:0", "cuda:1"]}
    kept = [{"name": "longest pause", "value": 0.04, "unit": "s", "where": "two-gpus"}]
    table = figures_table(bench, kept, {"NVLink": 300.0, "PCIe": 60.0})
    assert [list(each) for each in table.rows] == [
        ["gather, 1024 KiB", "1000.0 GB/s", "a plain copy, 2000.0 GB/s", "0.50"],
        ["scatter, 1024 KiB", "1500.0 GB/s", "a plain copy, 2000.0 GB/s", "0.75"],
        ["p2pkv's link, 1024 KiB", "150.0 GB/s", "NVLink, 300 GB/s", "0.50"],
        ["a whole push, 1024 KiB", "75.0 GB/s", "NVLink, 300 GB/s", "0.25"],
        ["longest pause (two-gpus)", "0.04 s", "-", "-"],
    ]
    one_card = figures_table(bench | {"devices": ["cuda:0"] * 2}, [], {"NVLink": 300.0})
    assert one_card.rows[2][2:] == ["-", "-"], "within a card: no measure of a wire"
    assert figures_table(None, [], {}).rows == []
    ipc = {"rows": [row], "devices": ["cuda:0"] * 2}
    rows = [list(each) for each in figures_table(None, [], {"NVLink": 300.0}, ipc).rows]
    assert rows[0] == ["p2pkv's link, link: ipc, 1024 KiB", "150.0 GB/s", "a plain copy, 2000 GB/s", "0.07"]
    ipc["devices"] = ["cuda:0", "cuda:1"]
    rows = [list(each) for each in figures_table(None, [], {"NVLink": 300.0}, ipc).rows]
    assert rows[1] == ["a whole push, link: ipc, 1024 KiB", "75.0 GB/s", "NVLink, 300 GB/s", "0.25"]


def test_limits_are_read_from_what_the_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {
        "nvlink": "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n",
        "--query-gpu=pcie.link.gen.max,pcie.link.width.max": "5, 16\n",
    }
    monkeypatch.setattr(first_day, "_asked", lambda *command: said[command[1]])
    found = limits()
    assert found["NVLink"] == pytest.approx(53.124) and found["PCIe"] == pytest.approx(63.0, abs=0.1)
    monkeypatch.setattr(first_day, "_asked", lambda *command: "")
    for port, rate in (("1", "400 Gb/sec (4X NDR)"), ("2", "down")):
        (tmp_path / "mlx5_0" / "ports" / port).mkdir(parents=True)
        (tmp_path / "mlx5_0" / "ports" / port / "rate").write_text(rate)
    monkeypatch.setattr(first_day, "INFINIBAND", tmp_path)
    assert limits() == {"network": 50.0}


def test_figures_are_kept_for_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.jsonl"
    assert figures(path) == []
    monkeypatch.delenv(VARIABLE, raising=False)
    figure("kept by nobody", 1.0, "s", "here")
    monkeypatch.setenv(VARIABLE, str(path))
    figure("longest pause", 0.5, "s", "here")
    assert figures(path) == [{"name": "longest pause", "value": 0.5, "unit": "s", "where": "here"}]


def test_a_page_says_the_same_in_both_forms() -> None:
    boxes, output = Boxes([(True, "one"), (False, "two")]), Output(["```", "<i>"])
    parts = [Text("a < b"), Table(["x"], [["a|b"]]), boxes, output]
    said, html = markdown("A & B", parts), page("A & B", parts)
    assert "| a\\|b |" in said and "- [x] one\n- [ ] two" in said and "````\n```\n<i>\n````" in said
    assert "<h1>A &amp; B</h1>" in html and "<td>a|b</td>" in html and "&lt;i&gt;" in html
    assert "☑ one" in html and "☐ two" in html


@pytest.mark.timeout(300)
def test_each_test_has_a_deadline_without_a_plugin(tmp_path: Path) -> None:
    """The hook of this folder's conftest, in a folder that looks like it."""
    late = "@pytest.mark.timeout(0.5)\ndef test_{}():\n    {}\n"
    tests = late.format("in_time", "pass") + late.format("late", "time.sleep(60)")
    (tmp_path / "test_it.py").write_text(f"import time, pytest\n{tests}")
    (tmp_path / "conftest.py").write_text(
        "import pathlib\nfrom gpu import conftest\nfrom gpu.conftest import pytest_runtest_protocol\n"
        "conftest.HERE = pathlib.Path(__file__).parent\n"
    )
    done = run_pytest("-p", "no:timeout", str(tmp_path), seconds=240.0)
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout
    assert "test_it.py::test_late did not end in 0.5 s" in done.stdout


def test_a_step_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        first_day.main(["--only", "no such step", "--out", str(tmp_path)])
    assert "no step no such step; there are environment, driver" in capsys.readouterr().err


def test_programs_that_tell_of_limits_are_asked() -> None:
    assert first_day._asked(sys.executable, "-c", "print('Link 0: 25 GB/s')") == "Link 0: 25 GB/s\n"
    assert first_day._asked(sys.executable, "-c", "raise SystemExit(9)") == ""
    assert first_day._asked("a program that is not installed") == ""


def test_first_day_is_a_script_that_writes_its_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what the script sets ends with this test
    monkeypatch.setattr(sys, "argv", ["first_day.py", "--only", "environment", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(first_day.__file__, run_name="__main__")
    assert ended.value.code == 0
    (found,) = json.loads((tmp_path / "first_day.json").read_text())["steps"]
    assert found["outcome"] == "passed" and any(line.startswith("torch ") for line in found["output"])
    assert "| environment |" in (tmp_path / "first_day.md").read_text()
    assert "<td>environment</td>" in (tmp_path / "first_day.html").read_text()
