"""Fixtures of the proxy's tests: a running proxy and fake instances that ping it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parent))

from proxy_fakes import Deployment, deployed


@pytest_asyncio.fixture(params=["concurrent", "sequential"])
async def either(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
    """A proxy with one P and one D, once for each way to dispatch."""
    async with deployed(request.param, prefill=1, decode=1) as deployment:
        yield deployment


@pytest_asyncio.fixture
async def concurrent() -> AsyncIterator[Deployment]:
    """A proxy with one P and one D that asks both at once."""
    async with deployed("concurrent", prefill=1, decode=1) as deployment:
        yield deployment


@pytest_asyncio.fixture
async def sequential() -> AsyncIterator[Deployment]:
    """A proxy with one P and one D that asks one after the other."""
    async with deployed("sequential", prefill=1, decode=1) as deployment:
        yield deployment


@pytest_asyncio.fixture
async def lonely() -> AsyncIterator[Deployment]:
    """A proxy that nobody has pinged yet."""
    async with deployed("concurrent") as deployment:
        yield deployment
