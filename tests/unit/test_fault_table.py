"""docs/operations.md links faults to tests: each name there is a test's, and no fault is without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
NAMES = sorted(set(re.findall(r"`((?:tests/|test_)[^`]+)`", PAGE)))
ROWS = [
    line.split(" | ") for line in PAGE.split("## Faults, tests")[1].splitlines() if line.startswith("| ")
][1:]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_a_tests(name: str) -> None:
    file, _, function = name.rpartition("::") if "::" in name else (name, "", "")
    if file.startswith("tests/"):
        assert (ROOT / file).is_file()
        assert not function or f"def {function}(" in (ROOT / file).read_text()
    else:
        beginning = name.removesuffix("...")
        assert f"def {beginning}" + ("" if name.endswith("...") else "(") in TESTS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][2:50])
def test_each_fault_has_a_test(row: list[str]) -> None:
    fault, tests, seen = row
    assert "`test" in tests or "`make chaos" in tests, fault
    assert seen.strip(" |"), f"what the user sees of {fault}"
