"""A request passes twelve files of the proxy, and docs/design.md names them."""

from __future__ import annotations

import re
from pathlib import Path

from request_way import files_passed

PAGE = (Path(__file__).parents[2] / "docs" / "design.md").read_text()


async def test_a_request_passes_the_twelve_files_that_the_page_names() -> None:
    table = PAGE.partition("**A request** passes twelve files")[2].partition("\nSome requests pass others")[0]
    named = set(re.findall(r"^\| `([^`]+\.py)`", table, re.MULTILINE))
    assert len(named) == 12
    assert set(await files_passed()) == named
