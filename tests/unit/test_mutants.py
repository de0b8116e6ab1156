"""The tables of `make mutants` against the tree: a change whose place is gone shows nothing."""

from __future__ import annotations

import pytest
from mutants import FAULTS, PRODUCT, ROOT, Mutant, Stale

TEXT = """
class One:
    @property
    def size(self):
        return 1

    def other(self):
        return 1


def size():
    return 1
"""


@pytest.mark.parametrize("mutant", [*PRODUCT, *FAULTS], ids=lambda each: each.what)
def test_the_place_of_each_is_in_the_tree_once(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert mutant.applied(text) != text
    for test in mutant.tests:
        assert (ROOT / test.partition("::")[0]).exists()


@pytest.mark.parametrize(("name", "line"), [("One.size", 4), ("One.other", 7), ("size", 11)])
def test_it_is_looked_for_in_its_function_only(name: str, line: int) -> None:
    changed = Mutant("", f"file.py:{name}", "return 1", "return 2", ()).applied(TEXT)
    pairs = enumerate(zip(TEXT.splitlines(), changed.splitlines(), strict=True))
    assert [number for number, (old, new) in pairs if old != new] == [line]


@pytest.mark.parametrize("where", ["file.py", "file.py:One", "file.py:Two", "file.py:One.size.inner"])
def test_a_place_that_is_not_there_once_is_stale(where: str) -> None:
    with pytest.raises(Stale):
        Mutant("", where, "return 1", "return 2", ()).applied(TEXT)
