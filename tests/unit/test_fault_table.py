"""Pages name tests: each name there is a test's, and no fault of docs/operations.md is without one."""

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


MATRIX = (ROOT / "docs" / "compatibility.md").read_text()
CLAIMED = sorted(set(re.findall(r"`((?:tests/\S*|test_\w+\.py)(?:::\w+)?)`", MATRIX)))


@pytest.mark.parametrize("name", CLAIMED)
def test_what_the_compatibility_page_names_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    files = [ROOT / path] if "/" in path else sorted((ROOT / "tests").rglob(path))
    assert files and all(file.exists() for file in files)
    assert not function or any(f"def {function}(" in file.read_text() for file in files)


def test_no_request_is_ticked_without_a_test() -> None:
    rows = MATRIX.split("## Requests")[1].split("## ")[0].splitlines()
    ticked = [row for row in rows if row.startswith("| ") and "✓" in row]
    assert len(ticked) > 10
    assert [row for row in ticked if "`test_" not in row and "`tests/" not in row] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][2:50])
def test_each_fault_has_a_test(row: list[str]) -> None:
    fault, tests, seen = row
    assert "`test" in tests or "`make chaos" in tests, fault
    assert seen.strip(" |"), f"what the user sees of {fault}"
