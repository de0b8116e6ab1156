"""Engines over simulated NCCL, for the tests that are about NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import nccl_simulated
import pytest
from engine_support import Engine, Geometry, Make, make_engine
from links_support import NCCL_KINDS, nccl_links


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
