"""Fails a dry run that has not gone through each line of tests/gpu that needs no GPU, and lists these lines.

A plugin of pytest, `-p gpu.lines`. Lines that need a GPU are the bodies of tests marked `gpu` or `two_gpus`,
the bodies of all functions of a file whose `pytestmark` is one of these, and statements whose first line ends
with `# needs a GPU`. Processes of pytest that the tests start are followed, others are not.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
VARIABLE = "P2PKV_LINES"
"""Names the file to which processes that the tests start append the lines that they reached."""

GPU_MARKS = {"pytest.mark.gpu", "pytest.mark.two_gpus"}
NEEDS_GPU = "# needs a GPU"

REACHED: dict[str, set[int]] = {
    str(path): set() for path in HERE.glob("*.py") if path != Path(__file__).resolve()
}


def executable(source: str) -> set[int]:
    left: list[CodeType] = [compile(source, "", "exec", dont_inherit=True)]
    lines: set[int] = set()
    while left:
        code = left.pop()
        lines.update(line for _, _, line in code.co_lines() if line)
        left += [each for each in code.co_consts if isinstance(each, CodeType)]
    return lines


def excused(source: str) -> set[int]:
    """The lines that need a GPU, and those that only a failed assertion reaches."""
    text, tree = source.splitlines(), ast.parse(source)
    all_of_them = any(isinstance(each, ast.Assign) and _marked(each.value) for each in tree.body)
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and text[node.lineno - 1].endswith(NEEDS_GPU):
            lines.update(_lines(node))
        elif isinstance(node, ast.FunctionDef) and (all_of_them or any(map(_marked, node.decorator_list))):
            for each in node.body:
                lines.update(_lines(each))
        elif isinstance(node, ast.Assert) and node.msg is not None:
            lines.update(set(_lines(node.msg)) - set(_lines(node.test)))
    return lines


def _marked(node: ast.expr) -> bool:
    return ast.unparse(node) in GPU_MARKS


def _lines(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def not_reached() -> Iterator[str]:
    """Each of these lines as `file:line: text`."""
    for path, reached in sorted(REACHED.items()):
        source = Path(path).read_text(encoding="utf-8")
        text = source.splitlines()
        for line in sorted(executable(source) - excused(source) - reached):
            yield f"{Path(path).name}:{line}: {text[line - 1].strip()}"


@cache
def _reached(name: str) -> set[int] | None:
    """The set of the file that Python calls this name; None for files elsewhere."""
    return REACHED.get(os.path.normpath(name))


def _call(frame: FrameType, event: str, argument: Any) -> Any:
    return None if _reached(frame.f_code.co_filename) is None else _line(frame, event, argument)


def _line(frame: FrameType, event: str, argument: Any) -> Any:
    reached = _reached(frame.f_code.co_filename)
    assert reached is not None
    reached.add(frame.f_lineno)
    return _line


class Child:
    """A process that a test started: it leaves the lines that it reached to its parent."""

    def pytest_sessionfinish(self) -> None:
        with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({path: sorted(lines) for path, lines in REACHED.items()}) + "\n")


class Parent:
    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="p2pkv-lines-")
        os.close(descriptor)
        self._file = Path(name)
        os.environ[VARIABLE] = name
        os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} -p gpu.lines".strip()
        self._missed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for said in self._file.read_text(encoding="utf-8").splitlines():
            for path, lines in json.loads(said).items():
                REACHED[path].update(lines)
        self._file.unlink()
        self._missed = list(not_reached())
        if self._missed and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("lines of tests/gpu")
        for missed in self._missed:
            terminalreporter.line(missed)
        terminalreporter.line(f"{len(self._missed)} lines that need no GPU were not reached")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Child() if VARIABLE in os.environ else Parent())


def pytest_unconfigure() -> None:
    threading.settrace(None)  # type: ignore[arg-type]
    sys.settrace(None)


threading.settrace(_call)
sys.settrace(_call)
