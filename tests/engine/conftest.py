"""Engines within this process: over links of its memory or, for the tests about NCCL, over simulated NCCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from p2pkv.links.base import LinkFactory
from support.cuda import ipc as ipc_simulated
from support.engine.engines import Engine, Geometry, Make, engine_maker, engines, make_engine, plain_links
from support.links.pairs import NCCL_KINDS, ipc_links, nccl_links
from support.nccl import simulated as nccl_simulated


@pytest.fixture
def links(request: pytest.FixtureRequest) -> Iterator[Callable[[str, int], LinkFactory]]:
    """The links of each rank of a pair, by side and rank; a test names the kind."""
    if request.param in NCCL_KINDS:
        blocking = request.param == "nccl-blocking"
        yield lambda side, rank: nccl_links(blocking=blocking, staging=1 << 20)
    elif request.param == "ipc":
        yield lambda side, rank: ipc_links(1 << 20, receives=side == "D")
    else:
        yield plain_links(request.param)
    ipc_simulated.let_go()
    nccl_simulated.let_go()


@pytest.fixture
def make_memory() -> Iterator[Make]:
    """Makes engines over one network of memory links; stops them at the end."""
    with engine_maker(plain_links("memory")) as make:
        yield make


@pytest.fixture
def memory_pair() -> Iterator[tuple[Engine, Engine]]:
    """A P and a D over memory links."""
    with engines(Geometry(), Geometry(), plain_links("memory")) as made:
        yield made


@pytest.fixture(params=NCCL_KINDS)
def make_nccl(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes engines of one rank on simulated devices, with NCCL of a `version`; stops them at the end."""
    made: list[Engine] = []

    def make(role: str, *, version: int = 22809, **options: object) -> Engine:
        links = nccl_links(version=version, blocking=request.param == "nccl-blocking", staging=1 << 20)
        made.append(make_engine(role, Geometry(), lambda rank: links, **{"lease_seconds": 4.0, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()
    nccl_simulated.let_go()
