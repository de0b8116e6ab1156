"""A skip that nobody has allowed fails the run; a mutant whose place is gone shows nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.skips import ALLOWED
from tools.mutants import FAULTS, PRODUCT, ROOT, Mutant

TESTS = Path(__file__).parents[1]
CONFTEST = """
from support import skips
from support.skips import Allowed, pytest_addoption, pytest_configure

skips.ALLOWED = Allowed("way_", "no gcc", ""), Allowed("way_", "no GPU", "", on_ci=True)
"""
BY_TEST = "import pytest\ndef test_it(): pytest.skip({reason!r})\n"
BY_MARK = "import pytest\n@pytest.mark.skip(reason={reason!r})\ndef test_it(): pass\n"
BY_MODULE = "import pytest\npytest.skip({reason!r}, allow_module_level=True)\n"


def run(folder: Path, reason: str, *options: str, fine: str = "def test_fine(): pass\n") -> tuple[int, str]:
    """Exit status and output of a run with three skips for one reason and a test that is not skipped."""
    (folder / "test_fine.py").write_text(fine)
    for way in (BY_TEST, BY_MARK, BY_MODULE):
        inner = folder / f"way_{len(list(folder.iterdir()))}"
        inner.mkdir()
        (inner / "test_it.py").write_text(way.format(reason=reason))
    (folder / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", "-c", os.devnull]
    env = os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*command, "--rootdir", ".", "--import-mode", "importlib", *options, "."],
        cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("reason", "options", "allowed"),
    [
        ("no gcc here", (), True),
        ("no gcc here", ("--ci", "-n", "2"), False),
        ("no GPU here", ("--ci", "-n", "2"), True),
    ],
)
def test_it_fails_unless_the_table_has_it(
    tmp_path: Path, reason: str, options: tuple[str, ...], allowed: bool
) -> None:
    code, said = run(tmp_path, reason, *options)
    assert code == (0 if allowed else 1), said
    assert said.count(f"test_it: {reason}") + said.count(f"test_it.py: {reason}") == (0 if allowed else 3)
    assert "1 passed, 3 skipped" in said


def test_a_failed_test_stays_a_failed_test(tmp_path: Path) -> None:
    code, said = run(tmp_path, "no idea", fine="def test_bad(): assert False\n")
    assert code == 1 and "1 failed" in said and "not in tests/support/skips.py" in said


def test_each_place_of_the_table_is_there() -> None:
    assert [each.where for each in ALLOWED if not (TESTS.parent / each.where).exists()] == []


# The tables of `make mutants` against the tree.


@pytest.mark.parametrize("mutant", [*PRODUCT, *FAULTS], ids=lambda each: each.what)
def test_the_place_of_each_is_in_the_tree_once(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.applied(text) != text
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists()
