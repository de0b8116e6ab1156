"""What every test finds as it should be."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from p2pkv.control.throttle import Throttle


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
