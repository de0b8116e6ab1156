"""Random paged memory as fixtures; see kv_support."""

from __future__ import annotations

import pytest
from kv_support import Memory


@pytest.fixture(scope="session")
def memory_type() -> type[Memory]:
    return Memory
