"""Random paged memory as fixtures; see pages_support."""

from __future__ import annotations

import pytest
from pages_support import Memory


@pytest.fixture(scope="session")
def memory_type() -> type[Memory]:
    return Memory
