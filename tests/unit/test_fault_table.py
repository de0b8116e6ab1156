"""Each fault of faults.md has tests that are there; and the tests that pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TABLE = (ROOT / "tests" / "faults.md").read_text().splitlines()
FAULTS = {
    fault: (seen, tests.split())
    for fault, seen, tests in (row.strip("| ").split(" | ") for row in TABLE if row.startswith("| "))
    if fault != "fault"
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_a_test(fault: str) -> None:
    seen, tests = FAULTS[fault]
    assert seen and tests
    assert [name for name in tests if not (ROOT / "tests" / name).is_file()] == []


MATRIX = (ROOT / "docs" / "compatibility.md").read_text()
INTERFACE = (ROOT / "tests" / "connector" / "vllm_interface.md").read_text()
CLAIMED = sorted(set(re.findall(r"`((?:tests/\S*|test_\w+\.py)(?:::\w+)?)`", MATRIX + INTERFACE)))


@pytest.mark.parametrize("name", CLAIMED)
def test_what_the_tables_name_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    files = [ROOT / path] if "/" in path else sorted((ROOT / "tests").rglob(path))
    assert files and all(file.exists() for file in files)
    assert not function or any(f"def {function}(" in file.read_text() for file in files)


def test_no_request_is_ticked_without_a_test() -> None:
    rows = MATRIX.split("## Requests")[1].split("## ")[0].splitlines()
    ticked = [row for row in rows if row.startswith("| ") and "✓" in row]
    assert len(ticked) > 10
    assert [row for row in ticked if "`test_" not in row and "`tests/" not in row] == []
