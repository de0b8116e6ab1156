"""The table of refused shapes on docs/compatibility.md against the code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import p2pkv

PRODUCT = Path(p2pkv.__file__).parent
FILES = [
    *(f"connector/{name}.py" for name in ("connector", "describe", "planes", "recurrent", "stage_layers")),
    "protocol/handshake.py",
    "plan.py",
]
ERRORS = {"ConfigError", "Refused", "PlanError"}
OTHER = {"negotiate", "_check_places", "_known", "make_plan", "_check_same"}
"""Two instances that are not of one model, are configured differently, or describe themselves wrongly."""


def refusals(tree: ast.AST, within: tuple[str, ...] = ()) -> Iterator[str]:
    """The function of each `raise` of such an error, with its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from refusals(node, (*within, node.name))
            continue
        error = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(error, ast.Call) and isinstance(error.func, ast.Name) and error.func.id in ERRORS:
            yield ".".join(within)
        yield from refusals(node, within)


def test_each_refusal_of_a_shape_is_a_line_with_its_reason() -> None:
    found = Counter(
        f"{file}:{function}"
        for file in FILES
        for function in refusals(ast.parse((PRODUCT / file).read_text()))
        if function not in OTHER
    )
    page = (PRODUCT.parent / "docs" / "compatibility.md").read_text()
    lines = page.partition("### Shapes that are refused")[2].partition("\n### ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][
        1:
    ]
    assert all(len(row) == 3 and all(row) for row in rows), "what, where, why"
    listed: Counter[str] = Counter()
    for _, where, _ in rows:
        for name, number in re.findall(r"`([^`]+)`(?: \((\d+)\))?", where):
            listed[name] += int(number or 1)
    assert listed == found
