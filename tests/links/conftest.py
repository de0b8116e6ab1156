from collections.abc import Iterator

import pytest

from p2pkv.links.base import LinkFactory
from p2pkv.links.host import HostLinks
from support.cuda import ipc as ipc_simulated
from support.links.pairs import HOST_WINDOW, KINDS, make_factories
from support.nccl import simulated as nccl_simulated


@pytest.fixture(params=KINDS)
def factories(request: pytest.FixtureRequest) -> Iterator[tuple[LinkFactory, LinkFactory]]:
    pair = make_factories(request.param)
    yield pair
    for factory in pair:
        factory.close()


@pytest.fixture
def shm() -> Iterator[HostLinks]:
    yield from _host_links(True)


@pytest.fixture
def tcp() -> Iterator[HostLinks]:
    yield from _host_links(False)


def _host_links(shared: bool) -> Iterator[HostLinks]:
    links = HostLinks("127.0.0.1", HOST_WINDOW, shared)
    yield links
    links.close()


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    """No test may break a rule of NCCL's or CUDA's, whatever else it shows."""
    yield
    ipc_simulated.let_go()
    nccl_simulated.let_go()
