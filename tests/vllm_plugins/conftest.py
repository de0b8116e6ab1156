"""What the tests of all plug-ins need."""

from __future__ import annotations

import pytest
from vllm_support import needs_cpu_build


@pytest.fixture(scope="module", autouse=True)
def cpu_build() -> None:
    """Comes before the fixtures that start processes."""
    needs_cpu_build()
