"""What every test finds as it should be."""

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from p2pkv.demo.processes import free_ports
from p2pkv.log import Throttle
from support.skips import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]

# The process takes its block of ports now, and not while a test counts descriptors.
free_ports()

# The same examples in every run, so that a red run is the change's; `make explore` looks for others.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("exploring", deadline=None, print_blob=True)
settings.load_profile("steady")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Any process takes the next test, but all of tests/vllm are one's: they share real servers."""
    from xdist.scheduler import LoadScopeScheduling

    class ServersInOne(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "servers" if nodeid.startswith("tests/vllm/") else nodeid

    return ServersInOne(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several processes one is busy with tests/vllm for most of the run: it begins with them."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith("tests/vllm/"))


@pytest.fixture(autouse=True, scope="session")
def the_collector() -> None:
    """Python's collector need not look at all of torch and vLLM each time that it runs. Once: to ask whether
    something is frozen takes 60 ms, as all of it is counted."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # at the end of the process all goes


@pytest.fixture(autouse=True)
def the_log() -> Iterator[None]:
    """A connector sends p2pkv's messages where vLLM's go; other tests want to read them."""
    logger = logging.getLogger("p2pkv")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    for each in logging.getLogger("p2pkv.engine").filters:
        if isinstance(each, Throttle):
            each._limit._windows.clear()
    yield


OURS = ("NCCL_", "P2PKV_", "CUDA_", "VLLM_API_KEY")


@pytest.fixture(autouse=True)
def the_environment() -> Iterator[None]:
    """p2pkv tells NCCL through it that two ranks may share a GPU; nobody else is to find that there."""
    before = _environment()
    yield
    after = _environment()
    for name in {*before, *after}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert after == before, "the test has left the environment changed; let monkeypatch set it"


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(OURS)}
