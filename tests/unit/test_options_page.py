"""docs/options.md has every option of p2pkv with its default; pages name real options only."""

from __future__ import annotations

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
OPTIONS = sorted({*config._READERS, "kv_port"})
NOT_OURS = {"kv_load_failure_policy"}


def options(**given: object) -> Options:
    extra = {"secret_file": None, **given}
    return Options.from_extra(
        extra, role="kv_consumer", kv_port=None, default_host="127.0.0.1", has_gpu=False, environ={}
    )


def test_the_page_has_all_options_and_no_others() -> None:
    assert sorted(ROWS) == sorted({*OPTIONS, *config._OLD, *NOT_OURS})


def written(name: str) -> str:
    """What the page should say of a default, to begin with."""
    value = getattr(options(), name)
    if value is None:
        return "any" if name == "allowed_peers" else "none"
    if isinstance(value, bool):
        return str(value).lower()
    if name in ("host", "discovery", "staging_bytes"):
        # They depend on the machine or on another option.
        return {"host": "what vLLM", "discovery": "`curve` with", "staging_bytes": "1/128 of"}[name]
    if value == "":
        return "none"
    if isinstance(value, str):
        return f"`{value}`"
    return f"{value // MIB} MiB" if value and value % MIB == 0 else f"{value:g}"


@pytest.mark.parametrize("name", OPTIONS)
def test_each_default_is_the_codes(name: str) -> None:
    default, unit, same, meaning = ROWS[name]
    assert default.startswith(written(name)), f"{name} is {default} on the page"
    assert unit and same and len(meaning) > 20


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
    known = {*OPTIONS, *config._OLD} - {"kv_port"}
    for shown in re.findall(
        r'"kv_connector_extra_config":\s*\{(.*?)\}', (ROOT / page).read_text(), re.DOTALL
    ):
        assert set(re.findall(r'"(\w+)":', shown)) <= known
