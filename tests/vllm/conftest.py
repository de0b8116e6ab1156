"""Real vLLM servers for the end-to-end tests: started once, when the first test needs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from vllm_support import MODEL, Fleet, start_fleet

from p2pkv.cli.processes import ServerProcess
from p2pkv.cli.tiny_model import ensure_model

_started: list[ServerProcess] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    # A module that is certainly vLLM's: this very directory could pass for a package called vllm.
    missing = importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm.entrypoints") is None
    for item in mine:
        item.add_marker(pytest.mark.vllm)
        # The first test pays for the start of all servers.
        item.add_marker(pytest.mark.timeout(400))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.extend((server.name, server.log_tail(60)) for server in _started)
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model that all servers serve."""
    return ensure_model(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers write their logs."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def fleet(tiny_model: Path, logs: Path) -> Iterator[Fleet]:
    """P, D, both proxies and the single server; shared by all tests, so leave them as they were."""
    with ExitStack() as stack:
        fleet = start_fleet(tiny_model, logs, stack)
        _started.extend(fleet.servers)
        yield fleet
        _started.clear()


@pytest.fixture
def launch() -> Iterator[Callable[..., None]]:
    """Starts further servers for one test: `launch(server, ...)`, all side by side, then waits for all.

    They are stopped when the test ends, whatever state it left them in.
    """
    with ExitStack() as stack:
        mine: list[ServerProcess] = []

        def start(*servers: ServerProcess) -> None:
            mine.extend(servers)
            _started.extend(servers)
            for server in servers:
                stack.enter_context(server)
            for server in servers:
                server.wait_ready()

        yield start
        for server in mine:
            _started.remove(server)
