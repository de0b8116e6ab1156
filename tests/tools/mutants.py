"""`make mutants`: changes that tests must notice. Each is made in a copy of the tree; its tests run there.

The first table changes the product; the second takes a fault away that a test says it injects, so that the
test must say that nothing was broken. A mutant that survives, or whose text is not exactly once in its place,
makes the exit status 1. So does a test of the tables that fails on the tree as it is.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where this is run by itself

from tools import mutants_table

ROOT = Path(__file__).parents[2]
COPIED = ("p2pkv", "proxy", "tests", "examples", "docs", "pyproject.toml", "README.md")
SECONDS = 300.0
"""For the tests of one mutant. One that hangs until then is killed, too."""


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`; then one of `tests`, as pytest names them, must fail. `where`: a file, or a file
    and a class or function in it ("p2pkv/links/staging.py:StagingShare.grants"); there `old` must stand
    exactly once."""

    what: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.where.partition(":")[0]

    def applied(self, text: str) -> str:
        """The text of the file with the change in it. Raises Stale if its place is not there."""
        start, stop = _span(text, self.where.partition(":")[2])
        found = text.count(self.old, start, stop)
        if found != 1:
            raise Stale(f"{self.where} has {found} times {self.old!r}")
        at = text.index(self.old, start, stop)
        return text[:at] + self.new + text[at + len(self.old) :]


class Stale(Exception):
    """The place of a mutant is not in the tree any more."""


def _span(text: str, name: str) -> tuple[int, int]:
    """Where the class or function of this qualified name begins and ends; all of the text without a name."""
    if not name:
        return 0, len(text)
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        inner = [each for each in ast.walk(node) if isinstance(each, DEFINITIONS) and each.name == part]
        if not inner:
            raise Stale(f"there is no {name}")
        node = inner[0]
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def mutants_of(table: str) -> tuple[Mutant, ...]:
    """Those of a text in the form that mutants_table.py describes."""
    file, tests, before = "", list[str](), ""
    found: list[tuple[str, str, list[str], list[str], tuple[str, ...]]] = []
    for line in table.strip().splitlines():
        kind = line[:1]
        if kind == "=":
            file, _, named = line[3:].partition(" > ")
            tests = named.split() or tests
        elif kind == ">":
            tests = [*(tests if before == ">" else ()), *line[1:].split()]
        elif kind == "~":
            old, _, new = f"{line[2:]} ".partition(" => ")
            found[-1][2].append(old)
            found[-1][3].append(new[:-1])
        elif kind in "-+":
            found[-1]["-+".index(kind) + 2].append(line[2:])
        else:
            function, _, what = line.partition(": ")
            found.append((what, f"{file}:{function}".rstrip(":"), [], [], tuple(tests)))
        before = kind
    return tuple(
        Mutant(what, where, "\n".join(old), "\n".join(new), tests) for what, where, old, new, tests in found
    )


PRODUCT, FAULTS = mutants_of(mutants_table.PRODUCT), mutants_of(mutants_table.FAULTS)


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """The parts that tests need, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="p2pkv-mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, copy / name)
        # p2pkv_proxy is installed from proxy/, under another name.
        (copy / "p2pkv_proxy").symlink_to("proxy")
        yield copy


def run_tests(copy: Path, tests: Iterable[str], seconds: float = SECONDS) -> tuple[str, str]:
    """Run tests of the copy: "passed", "failed", "hung" or "did not run", and what pytest said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=copy, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            said = child.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            return "hung", child.communicate()[0]
    last = said.strip().splitlines()[-1:] or [""]
    passed = child.returncode == 0 and " passed" in last[0]
    return ("passed" if passed else "failed" if child.returncode == 1 else "did not run"), said


def foreign_imports(copy: Path) -> str:
    """Where p2pkv or p2pkv_proxy would come from if not from the copy; "" if all is well."""
    say = "import p2pkv, p2pkv_proxy; print(p2pkv.__file__, p2pkv_proxy.__file__)"
    env = os.environ | {"PYTHONPATH": str(copy)}
    where = subprocess.run(
        [sys.executable, "-c", say], cwd=copy, env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    return "" if all(Path(each).is_relative_to(copy) for each in where) else " and ".join(where)


def verdict(copy: Path, mutant: Mutant) -> str:
    """ "killed", or what is wrong."""
    path = copy / mutant.file
    before = path.read_text() if path.exists() else ""
    try:
        path.write_text(mutant.applied(before))
    except Stale as stale:
        return f"STALE: {stale}; mend tests/tools/mutants_table.py"
    try:
        result, said = run_tests(copy, mutant.tests)
    finally:
        path.write_text(before)
    if result == "passed":
        return f"SURVIVED {' '.join(mutant.tests)}"
    if result == "did not run":
        return f"ITS TESTS DID NOT RUN:\n{said}"
    return "killed" if result == "failed" else "killed (its tests hung)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants with this text in their name or place")
    parser.add_argument("--list", action="store_true", help="say which there are, and run nothing")
    chosen = parser.parse_args()
    mutants = [each for each in (*PRODUCT, *FAULTS) if chosen.only in f"{each.what} {each.where}"]
    if chosen.list or not mutants:
        print(
            "\n".join(f"{each.where}: {each.what}" for each in mutants) or f"none has {chosen.only!r} in it"
        )
        return 0 if mutants else 1
    bad = 0
    with copy_of_the_tree() as copy:
        if where := foreign_imports(copy):
            print(f"the tests would not run against the copy, but against {where}")
            return 1
        tests = sorted({test for each in mutants for test in each.tests})
        result, said = run_tests(copy, tests, 6 * SECONDS)
        if result != "passed":
            print(f"{said}\nthe tests do not pass on the tree as it is ({result}), so they show nothing")
            return 1
        for each in mutants:
            began = time.monotonic()
            found = verdict(copy, each)
            bad += not found.startswith("killed")
            print(f"{each.where}: {each.what}: {found} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants were killed")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
