"""Real vLLM servers for the end-to-end tests: started once, when the first test needs them."""

import importlib.util
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2pkv.demo.processes import ServerProcess, wait_until
from p2pkv.demo.servers import VllmServer
from p2pkv.demo.tiny_model import ensure_model
from support.servers.deployments import Deployment
from support.servers.fleet import (
    FORKED,
    LEASE,
    MODEL,
    Fleet,
    ask_pair,
    assert_at_rest,
    probing_server,
    start_all,
    start_fleet,
    tokens,
)
from support.servers.probes import Compared

_started: list[ServerProcess] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    mine = [item for item in items if here in item.path.parents]
    # A module that is certainly vLLM's: this very directory could pass for a package called vllm.
    missing = importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm.entrypoints") is None
    for item in mine:
        item.add_marker(pytest.mark.vllm)
        item.add_marker(pytest.mark.servers)
        # The first test pays for the start of all servers.
        item.add_marker(pytest.mark.timeout(400))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.extend((server.name, server.log_tail(60)) for server in _started)
    return report


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(MODEL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


class FleetKeeper:
    """Has one fleet running from the first test that needs it to the last, and a new one if a server died."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model = model
        self._logs = logs
        self._stack = ExitStack()
        self._fleet: Fleet | None = None
        self._taker: VllmServer | None = None

    def fleet(self) -> Fleet:
        if self._fleet is None or not all(server.running() for server in self._fleet.servers):
            self.stop()
            self._fleet = start_fleet(self._model, self._logs, self._stack)
            _started.extend(self._fleet.servers)
        return self._fleet

    def taker(self) -> VllmServer:
        """See the fixture; running."""
        fleet = self.fleet()
        if self._taker is None or not self._taker.running():
            self._taker = probing_server(
                self._model,
                "D",
                fleet.probes,
                name="taker",
                plugins=FORKED,
                extra_config={"lease_seconds": LEASE, "prefetch_bytes": 64 << 20, "verify": True},
                load_failure_policy="recompute",
            )
            start_all(self._stack, self._taker)
            # It dials P for its first request; from then on P can push to it.
            ask_pair(fleet.p, self._taker, tokens(9, "acquaint"), at_once=False)
        return self._taker

    def stop(self) -> None:
        self._taker = None
        if self._fleet is not None:
            for server in self._fleet.servers:
                _started.remove(server)
        self._fleet = None
        self._stack.close()


@pytest.fixture(scope="session")
def fleet_keeper(tiny_model: Path, logs: Path) -> Iterator[FleetKeeper]:
    keeper = FleetKeeper(tiny_model, logs)
    try:
        yield keeper
    finally:
        keeper.stop()


@pytest.fixture
def fleet(fleet_keeper: FleetKeeper) -> Fleet:
    """P, D, both proxies and the single server; shared by all tests, so leave them as they were."""
    return fleet_keeper.fleet()


@pytest.fixture
def taker(fleet_keeper: FleetKeeper) -> VllmServer:
    """A second D of the fleet's P: with room for KV that comes ahead and checksums; it recomputes."""
    return fleet_keeper.taker()


@pytest.fixture
def compared(fleet: Fleet) -> Iterator[Compared]:
    """Of the test's transfers: afterwards D's blocks were P's, and neither holds anything any more."""
    made = Compared(fleet.probes)
    yield made
    made.spans()
    assert_at_rest(fleet)


@pytest.fixture
def servers_on_failure() -> Iterator[Callable[..., None]]:
    """Names servers whose logs are shown if the test fails."""
    mine: list[ServerProcess] = []

    def note(*servers: ServerProcess) -> None:
        mine.extend(servers)
        _started.extend(servers)

    yield note
    for server in mine:
        _started.remove(server)


@pytest.fixture
def trio(started: Deployment, servers_on_failure: Callable[..., None]) -> Deployment:
    """What the module's `started` has started, all of it trusted by the proxy."""
    servers_on_failure(*started.servers, started.proxy)
    wait_until(started.trusted, "all engines", 200.0)
    return started


@pytest.fixture
def launch(servers_on_failure: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Starts further servers for one test: `launch(server, ...)`, all side by side, then waits for all. They
    are stopped when the test ends, whatever state it left them in."""
    with ExitStack() as stack:

        def start(*servers: ServerProcess) -> None:
            servers_on_failure(*servers)
            start_all(stack, *servers)

        yield start
