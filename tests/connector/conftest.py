"""Engines that are whole but for the model; and vLLM's sources, which p2pkv's lists are held against."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.connector.vllm_sources import Sources


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture
def engines() -> Iterator[Any]:
    from support.connector.real_ranks import starting

    with starting() as start:
        yield start


GIVEN = os.environ.get("VLLM_SOURCES", "")
"""A checkout or an unpacked wheel of another vLLM, whose sources are read and never run."""


@pytest.fixture(scope="session", params=["installed", *(["VLLM_SOURCES"] if GIVEN else [])])
def sources(request: pytest.FixtureRequest) -> Sources:
    if request.param == "installed":
        vllm = pytest.importorskip("vllm")
        return Sources(Path(vllm.__file__).parent)
    package = next((each for each in (Path(GIVEN), Path(GIVEN) / "vllm") if (each / "v1").is_dir()), None)
    if package is None:
        pytest.fail(f"VLLM_SOURCES is {GIVEN}, which has no vLLM in it: name a checkout or an unpacked wheel")
    return Sources(package)
