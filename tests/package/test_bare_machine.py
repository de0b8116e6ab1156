"""`make gpu-test` where there is nothing but torch, numpy and pytest: no msgspec, no pyzmq, no plug-ins."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
from gpu.needs import FILES, WHEELS

from support.bare import run_clean, with_only

ROOT = Path(__file__).parents[2]

BARE = ("torch", "numpy", "pytest")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_only(tmp_path_factory.mktemp("bare"), *BARE)


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_clean(*command, cwd=ROOT, seconds=110, PYTHONDONTWRITEBYTECODE="1", **environment)


def test_it_is_bare(python: Path) -> None:
    looked_for = ("torch", "msgspec", "zmq", "xxhash", "cupy", "vllm", "hypothesis", "pytest_timeout")
    code = f"import importlib.util as u; print(*[name for name in {looked_for} if u.find_spec(name)])"
    assert run(python, "-c", code).stdout.strip() == "torch"


def test_each_file_runs_or_says_what_it_lacks(python: Path) -> None:
    done = run("make", "gpu-test", f"GPU_PYTHON={python}")
    assert done.returncode == 0, done.stdout + done.stderr
    files = "test_push.py, test_bench_gpu.py, test_servers.py, test_models.py, test_first_day_steps.py"
    assert f"msgspec and pyzmq missing: {files} will be" in done.stdout
    assert "-d wheels msgspec pyzmq\n" in done.stdout
    skipped = re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", done.stdout, re.M)
    for file, modules in FILES.items():
        wheels = f"{file} needs msgspec and pyzmq, not installed here: carry the wheels"
        assert (wheels in skipped) is bool(modules), done.stdout
    assert "needs 1 CUDA device, and torch finds 0" in skipped, "the kernels' file lacks but a GPU"
    assert re.search(r"^=+ \d+ passed, \d+ skipped", done.stdout, re.M), done.stdout


def test_carried_wheels_are_found_by_their_path(python: Path, tmp_path: Path) -> None:
    for module in ("msgspec", "zmq", "xxhash"):
        spec = importlib.util.find_spec(module)
        (tmp_path / module).symlink_to(Path(spec.origin).parent)
    libraries = Path(str(importlib.metadata.distribution("pyzmq").locate_file("pyzmq.libs")))
    (tmp_path / "pyzmq.libs").symlink_to(libraries)
    one = "ARGS=-k test_the_two_ends_compute_the_same_checksums"
    done = run("make", "gpu-test", f"GPU_PYTHON={python}", one, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "carry" not in done.stdout
    assert re.search(r"^=+ 1 passed", done.stdout, re.M), done.stdout


def test_the_list_of_what_a_file_needs_is_right() -> None:
    assert set(FILES) == {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert {module for modules in FILES.values() for module in modules} == set(WHEELS)


def test_the_first_day_does_what_it_can(python: Path, tmp_path: Path) -> None:
    done = run(
        *(python, "tests/gpu/first_day.py", "--out", str(tmp_path), "--only"),
        *("environment", "doctor", "kernels", "bench"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "first_day.json").read_text())["steps"]
    assert [each["outcome"] for each in said] == ["passed", "not run", "not run", "not run"]
    assert said[1]["why"] == "no vLLM server with p2pkv can run here; its lines say why"
    lines = "\n".join(said[1]["output"])
    assert "packages:  msgspec and xxhash are missing; `pip install msgspec xxhash`" in lines
    assert "NCCL link: not usable (No module named 'msgspec')" in lines
