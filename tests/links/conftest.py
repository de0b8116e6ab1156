from __future__ import annotations

from collections.abc import Iterator

import nccl_simulated
import pytest
from links_support import KINDS, make_factories

from p2pkv.links.base import LinkFactory


@pytest.fixture(params=KINDS)
def factories(request: pytest.FixtureRequest) -> Iterator[tuple[LinkFactory, LinkFactory]]:
    """P's and D's factories, of each kind in turn."""
    pair = make_factories(request.param)
    yield pair
    for factory in pair:
        factory.close()


@pytest.fixture(autouse=True)
def nccl_rules() -> Iterator[None]:
    """No test may break a rule of NCCL's, whatever else it shows."""
    yield
    nccl_simulated.let_go()
