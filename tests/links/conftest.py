from __future__ import annotations

from collections.abc import Iterator

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
