"""Engines within this process: over links of its memory or, for the tests about NCCL, over simulated NCCL."""

from collections.abc import Iterator

import pytest

from support.engine.engines import Engine, Geometry, Make, engine_maker, make_engine, plain_links
from support.links.pairs import nccl_links
from support.nccl import simulated as nccl_simulated


@pytest.fixture
def make_memory() -> Iterator[Make]:
    with engine_maker(plain_links("memory")) as make:
        yield make


@pytest.fixture
def make_nccl() -> Iterator[Make]:
    """Makes engines of one rank on simulated devices, with NCCL of a `version`; stops them at the end."""
    made: list[Engine] = []

    def make(role: str, *, version: int = 22809, **options: object) -> Engine:
        links = nccl_links(version=version, staging=1 << 20)
        made.append(make_engine(role, Geometry(), lambda rank: links, **{"lease_seconds": 4.0, **options}))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()
    nccl_simulated.let_go()
