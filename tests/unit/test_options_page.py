"""docs/options.md says of every option what its declaration says; pages name real options only."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from p2pkv import config
from p2pkv.config import MIB, Options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "options.md").read_text()
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]]
}
OPTIONS = sorted(config.OPTIONS)
NOT_OURS = {"kv_load_failure_policy"}


def options(**given: object) -> Options:
    extra = {"secret_file": None, **given}
    return Options.from_extra(
        extra, role="kv_consumer", kv_port=None, default_host="127.0.0.1", has_gpu=False, environ={}
    )


def test_the_page_has_all_options_and_no_others() -> None:
    assert sorted(ROWS) == sorted({*OPTIONS, *config.EXTRA, *NOT_OURS})


def written(name: str) -> str:
    """What the page should say of a default, to begin with."""
    value = getattr(options(), name)
    if value is None:
        return "any" if name == "allowed_peers" else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if name in ("host", "discovery", "staging_bytes", "chunk_bytes"):
        # They depend on the machine or on another option.
        return {
            "host": "what vLLM",
            "discovery": "`curve` with",
            "staging_bytes": "1/128 of",
            "chunk_bytes": "1/16 of",
        }[name]
    if value == "":
        return "none"
    if isinstance(value, str):
        return f"`{value}`"
    return f"{value // MIB} MiB" if value and value % MIB == 0 else f"{value:g}"


def declared() -> dict[str, list[str]]:
    """Unit, same and meaning of each field of Options, from the text below it."""
    (made,) = ast.parse(inspect.getsource(Options)).body
    assert isinstance(made, ast.ClassDef)
    return {
        ast.unparse(node.target): ast.literal_eval(after.value).replace("\n    ", " ").split(" | ")
        for node, after in zip(made.body, made.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr)
    }


def test_every_field_says_what_it_is() -> None:
    said = declared()
    assert said.keys() == set(Options.__struct_fields__)
    for name in said.keys() - set(OPTIONS):
        assert said[name][0].startswith("Not an option: ")


@pytest.mark.parametrize("name", OPTIONS)
def test_each_row_is_the_declaration(name: str) -> None:
    default, *about = ROWS[name]
    assert default.startswith(written(name)), f"{name} is {default} on the page"
    assert about == declared()[name], f"the row of {name} should say {' | '.join(declared()[name])}"
    assert len(about) == 3 and all(about)


def test_the_defaults_that_depend_on_something() -> None:
    assert ROWS["staging_bytes"][0] == "1/128 of the GPU's memory, from 64 MiB to 1 GiB; 64 MiB without a GPU"
    gib = 1024 * MIB
    assert [config.default_staging(size * gib) for size in (0, 4, 16, 80, 192)] == [
        *(64 * MIB, 64 * MIB, 128 * MIB, 640 * MIB, 1024 * MIB)
    ]
    assert ROWS["discovery"][0] == "`curve` with a secret, else `plain`"
    assert options().discovery == "plain"


@pytest.mark.parametrize(
    "page",
    ["README.md", "SECURITY.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))],
)
def test_examples_name_options_that_exist(page: str) -> None:
    """In each `kv_connector_extra_config` that a page shows."""
    for shown in re.findall(r'"kv_connector_extra_config":\s*\{([^{}]*)\}', (ROOT / page).read_text()):
        assert set(re.findall(r'"(\w+)":', shown)) <= set(config.EXTRA)


def test_the_readmes_table_names_options_that_exist() -> None:
    rows = (
        (ROOT / "README.md")
        .read_text()
        .partition("| option | meaning |\n|---|---|\n")[2]
        .partition("\n\n")[0]
    )
    named = {name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert {"kv_port", "host", "secret_file"} <= named <= {*OPTIONS, *NOT_OURS}
