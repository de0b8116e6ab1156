"""What every test finds as it should be."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

from p2pkv.control.throttle import Throttle

# The same examples in every run, so that a red run is the change's; `make explore` looks for others.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("exploring", deadline=None, print_blob=True)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with real servers come last and in one process: they share servers, and need both cores."""
    for item in items:
        if item.get_closest_marker("servers"):
            item.add_marker(pytest.mark.xdist_group("servers"))
    items.sort(key=lambda item: item.get_closest_marker("servers") is not None)


@pytest.fixture(autouse=True)
def the_log() -> Iterator[None]:
    """A connector sends p2pkv's messages where vLLM's go; other tests want to read them."""
    logger = logging.getLogger("p2pkv")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    for each in logging.getLogger("p2pkv.engine").filters:
        if isinstance(each, Throttle):
            each.forget()
    yield
