"""What these tests need, and which of it is missing here. Nothing but pytest, torch and p2pkv is imported."""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from gpu.needs import FILES, VLLM, lacking, present

HERE = Path(__file__).resolve().parent


class Lacking(pytest.Module):
    """A file that is not imported, since something that it imports is not installed."""

    reason = ""

    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip(f"{self.path.name} {self.reason}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.parent != HERE or not (reason := lacking(FILES[module_path.name])):
        return None
    file: Lacking = Lacking.from_parent(parent, path=module_path)
    file.reason = reason
    return file


@pytest.fixture(autouse=True)
def the_environment() -> Iterator[None]:
    """NCCL is told through it what a test wants: its channels, or a host of its own for each rank."""
    before = dict(os.environ)
    yield
    for name in {name for name in os.environ if name.startswith("NCCL_")} - set(before):
        del os.environ[name]
    os.environ.update(before)


DEADLINE_SECONDS = 120.0
GRACE_SECONDS = 30.0
"""A call to CUDA that hangs never returns to Python, which could raise: then the process ends."""


class Late(Exception):
    """A test has outlived its deadline."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A deadline for each test here, its fixtures included, where pytest-timeout is not installed."""
    if HERE not in item.path.parents or item.config.pluginmanager.hasplugin("timeout"):
        return (yield)
    mark = item.get_closest_marker("timeout")
    seconds = float(mark.args[0]) if mark else DEADLINE_SECONDS

    def late(number: int, frame: object) -> None:
        raise Late(f"{item.nodeid} did not end in {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and (reason := missing(item)):
            item.add_marker(pytest.mark.skip(reason=reason))


def missing(item: pytest.Item) -> str:
    """Why this test cannot run here; empty if it can."""
    needed = 2 if item.get_closest_marker("two_gpus") else 1 if item.get_closest_marker("gpu") else 0
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        return f"needs {needed} CUDA device{'s' * (needed > 1)}, and torch finds {found}"
    if needed and importlib.util.find_spec("cupy") is None:
        return "needs CuPy, which is not installed: cupy-cuda12x or cupy-cuda13x"
    if item.get_closest_marker("vllm") and not present(VLLM):
        return "needs vLLM, which is not installed"
    return ""
