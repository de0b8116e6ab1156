"""`make dist`, and what a stranger has who installs the wheel and not the repository."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from environments import environment

import p2pkv
from p2pkv.demo import client
from p2pkv.demo.processes import answers_ok
from p2pkv.demo.servers import ProxyServer
from support.bare import closure, run_clean, with_only
from support.waiting import wait_for

ROOT = Path(p2pkv.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_THE_PROXY = PROJECT["dependencies"] + EXTRAS["proxy"]
NAME = f"p2pkv-{p2pkv.__version__}"
PROXY_BYTES = 40e6
"""Unpacked; pip downloads a third of it."""


def dist(folder: Path, umask: int) -> Path:
    """What `make dist` makes; its checks (twine, check-wheel-contents) have passed."""
    before = os.umask(umask)
    try:
        # The environment is there already: this Python.
        stamps = [argument for kind in ("cpu", "cuda") for argument in ("-o", f".venv/.installed-{kind}")]
        made = run_clean(
            *("make", "dist", *stamps, f"PY={sys.executable}", f"DIST={folder}"),
            cwd=ROOT,
            SOURCE_DATE_EPOCH="1700000000",
        )
    finally:
        os.umask(before)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dist(tmp_path_factory.mktemp("dist") / "one", 0o022)


def install(wheel: Path, python: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    done = run_clean(
        *pip, "install", "-q", "--no-deps", "--no-index", "--no-compile", str(wheel), cwd=wheel.parent
    )
    assert done.returncode == 0, done.stderr
    checked = run_clean(*pip, "check", cwd=wheel.parent)
    assert checked.returncode == 0, checked.stdout


def test_the_same_tree_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    start = time.time()
    while int(time.time()) // 2 == int(start) // 2:  # zip's clock has steps of two seconds
        time.sleep(0.1)
    again = dist(tmp_path / "two", 0o077)
    hashes = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (built, again)
    ]
    assert hashes[0] == hashes[1]
    assert hashes[0].keys() == {f"{NAME}-py3-none-any.whl", f"{NAME}.tar.gz"}


def test_the_packages_are_there_and_nothing_else(built: Path) -> None:
    names = {"p2pkv": "p2pkv", "proxy": "p2pkv_proxy"}
    sources = {
        path.relative_to(ROOT).as_posix()
        for room in names
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built / f"{NAME}-py3-none-any.whl") as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {f"{names[each.split('/')[0]]}/{each.split('/', 1)[1]}" for each in sources}
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        files = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    beside = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}
    assert {each for each in files if ".egg-info/" not in each} == sources | beside


@pytest.fixture(scope="module")
def alone(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment of the wheel, what it needs, and what the extra `proxy` needs."""
    python = with_only(tmp_path_factory.mktemp("alone"), *FOR_THE_PROXY)
    install(built / f"{NAME}-py3-none-any.whl", python)
    return python.parent


def test_the_proxy_alone_is_small() -> None:
    files = [
        Path(str(package.locate_file(file)))
        for package in closure(*FOR_THE_PROXY).values()
        for file in package.files or []
        if file.suffix != ".pyc"
    ]
    assert sum(path.stat().st_size for path in files) < PROXY_BYTES
    assert not closure(*FOR_THE_PROXY).keys() & {"torch", "numpy", "vllm"}


def test_the_proxy_alone_starts(alone: Path, tmp_path: Path) -> None:
    log = tmp_path / "proxy.log"
    proxy = ProxyServer(env={"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}, log_path=log)
    proxy.command[:3] = [str(alone / "p2pkv-proxy")]
    with proxy:
        metrics = f"{proxy.base_url}/metrics"
        wait_for(lambda: not proxy.running() or answers_ok(metrics), 30.0, "the proxy")
        assert f'version="{p2pkv.__version__}"' in client.get(metrics), log.read_text()


def test_doctor_without_vllm_names_what_is_missing(alone: Path, tmp_path: Path) -> None:
    done = run_clean(alone / "p2pkv", "doctor", cwd=tmp_path)
    assert done.returncode == 1
    wrong = re.findall(r"^\[!!\] (.*?): ", done.stdout, re.M)
    assert wrong == ["torch", "vLLM", "packages"], done.stdout + done.stderr
    assert "[ok] proxy:     p2pkv-proxy can run here" in done.stdout


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.servers
@pytest.mark.timeout(600)
def test_doctor_and_demo_of_the_wheel(built: Path, tmp_path: Path) -> None:
    """Beside vLLM, which is seen from beneath."""
    wheel = built / f"{NAME}-py3-none-any.whl"
    home = environment(
        tmp_path / "home", "--no-deps", "--no-index", "--ignore-installed", str(wheel), ours=True
    )
    alone = {"PYTHONSAFEPATH": "1"}
    where = run_clean(
        home / "bin" / "python", "-c", "import p2pkv; print(p2pkv.__file__)", cwd=tmp_path, **alone
    )
    assert Path(where.stdout.strip()).is_relative_to(home), where.stderr
    doctor = run_clean(home / "bin" / "p2pkv", "doctor", cwd=tmp_path, **alone)
    assert doctor.returncode == 0, doctor.stdout
    demo = run_clean(home / "bin" / "p2pkv", "demo", cwd=tmp_path, **alone)
    assert demo.returncode == 0 and "PASS: " in demo.stdout, demo.stdout + demo.stderr


_TABLE = (ROOT / "THIRD_PARTY.md").read_text().split("|---|---|\n")[1]
LICENCES = dict(re.findall(r"(?m)^\| (\S+) \| ([^|]+) \|$", _TABLE))


def test_the_licences_of_dependencies_are_listed() -> None:
    needed = closure(*FOR_THE_PROXY, *EXTRAS["traces"], *EXTRAS["cuda12"])
    assert LICENCES.keys() == needed.keys(), "THIRD_PARTY.md lists what the extras bring, and no more"
    for name, package in needed.items():
        expression = package.metadata.get("License-Expression")
        assert expression in (None, LICENCES[name]), name
