"""Engines within this process: over links of its memory or, for the tests about NCCL, over simulated NCCL."""

from collections.abc import Iterator

import pytest

from support.engine.engines import Make, engine_maker, plain_links
from support.links.pairs import nccl_links
from support.nccl import simulated as nccl_simulated


@pytest.fixture
def make_memory() -> Iterator[Make]:
    with engine_maker(plain_links("memory")) as make:
        yield make


@pytest.fixture
def make_nccl() -> Iterator[Make]:
    """Makes engines of one rank on simulated devices; stops them at the end."""
    with engine_maker(lambda side, rank: nccl_links(staging=1 << 20), lease_seconds=4.0) as make:
        yield make
    nccl_simulated.let_go()
