"""What p2pkv replaces in vLLM: where, where not, and that the compatibility page lists it."""

import ast
import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import p2pkv
from p2pkv.config import ConfigError, PatchName
from p2pkv.connector.describe import options_of
from p2pkv.connector.vllm_patches import PATCHES, Function, Patch
from p2pkv.plugin import TESTED
from support.connector.instances import vllm_config
from support.connector.vllm_sources import table

ROOT = Path(__file__).parents[2]
LOOKED_AT = [(patch, each) for patch in PATCHES for each in (*patch.replaced, *patch.required)]
LOOKED_AT = [(patch, each) for patch, each in LOOKED_AT if not each.only_if]


def name_of(each: object) -> str:
    return each.name if isinstance(each, Patch | Function) else str(each)


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it is: connectors of other tests in this process have replaced functions already."""
    for _, function in LOOKED_AT:
        holder = function.holder()
        original = inspect.unwrap(getattr(holder, function.last_name))
        monkeypatch.setattr(holder, function.last_name, original)


def current(patch: Patch) -> list[Any]:
    return [getattr(each.holder(), each.last_name) for each in patch.replaced if not each.absent()]


# Where they are installed.


@pytest.mark.parametrize("known", PATCHES, ids=name_of)
def test_each_is_installed_once(known: Patch) -> None:
    before, patch = current(known), type(known)()
    assert patch.install() == "" and patch.installed
    after = current(patch)
    assert [inspect.unwrap(each) for each in after] == before
    assert all(new is not old for new, old in zip(after, before, strict=True))
    assert patch.install() == "" and current(patch) == after


@pytest.mark.parametrize("known", PATCHES, ids=name_of)
def test_the_option_keeps_one_out(known: Patch, caplog: pytest.LogCaptureFixture) -> None:
    options = options_of(vllm_config("P", skip_patches=[known.name]))
    assert "the option skip_patches names" in left_alone(type(known)(), caplog, options.skip_patches)


@pytest.mark.parametrize("version", ["0.31.9", "of unknown version"])
@pytest.mark.parametrize("known", [each for each in PATCHES if not each.any_version], ids=name_of)
def test_a_vllm_that_was_not_tested_is_left_alone(
    known: Patch, version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("p2pkv.connector.vllm_patches.vllm_version", lambda: version)
    assert version in left_alone(type(known)(), caplog)


@pytest.mark.parametrize(("known", "function"), LOOKED_AT, ids=name_of)
def test_so_is_one_with_other_parameters_or_other_code(
    known: Patch, function: Function, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if function.parameters:
        monkeypatch.setattr(function.holder(), function.last_name, lambda self, shards, more: None)
        arguments = ", ".join(function.parameters[1:])
        assert f"no {function.name}({arguments})" in left_alone(type(known)(), caplog)
    if function.mentions:
        arguments = ", ".join(function.parameters or ("self",))
        monkeypatch.setattr(function.holder(), function.last_name, eval(f"lambda {arguments}: None"))
        assert "in a way that p2pkv does not know" in left_alone(type(known)(), caplog)
    monkeypatch.delattr(function.holder(), function.last_name)
    assert f"no {function.name}(" in left_alone(type(known)(), caplog, look=False)


def left_alone(
    patch: Patch, caplog: pytest.LogCaptureFixture, skipped: tuple[str, ...] = (), *, look: bool = True
) -> str:
    """Why it replaces nothing, which is also in the log with what is so without it."""
    before = current(patch) if look else []
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="p2pkv"):
        reason = patch.install(skipped)
    assert reason and not patch.installed and (not look or current(patch) == before)
    assert list(caplog.messages) == [f"{patch.without}: {reason}"] * bool(patch.without)
    return reason


def test_a_name_that_is_no_patch_is_refused() -> None:
    with pytest.raises(ConfigError, match="a list of names out of deferral, early_revocation, engine_core"):
        options_of(vllm_config("P", skip_patches=["wieghts"]))


# That all are known.


def test_the_option_knows_every_patch() -> None:
    assert [each.name for each in PATCHES] == list(get_args(PatchName))


PAGE = ROOT / "docs" / "compatibility.md"


def test_the_page_lists_every_function_that_is_replaced() -> None:
    rows = table(PAGE, "replaced")
    section = PAGE.read_text().split("### What p2pkv replaces in vLLM\n")[1]
    text = " ".join(section.partition("\n|")[0].split())
    anywhere = ", ".join(f"`{patch.name}`" for patch in PATCHES if patch.any_version)
    versions = " and ".join(f"{each}.x" for each in TESTED)
    assert (
        f"those of {anywhere} in all versions that have such a function, the others only in {versions}."
        in text
    )
    assert '`skip_patches: ["NAME"]` leaves the patch NAME out.' in text
    assert sorted(rows) == sorted(each.name for patch in PATCHES for each in patch.replaced)
    for patch in PATCHES:
        for function in patch.replaced:
            name, why, _, test = rows[function.name]
            assert name == f"`{patch.name}`" and why
            named = re.findall(r"`([^`]+)`", test)
            assert named and all((ROOT / "tests" / "connector" / each).is_file() for each in named)


def changes_of(source: str) -> Iterator[str]:
    """Assignments to what is imported from vLLM, and `setattr`s with a name that is computed."""
    tree = ast.parse(source)
    vllms = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] == "vllm"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in vllms:
                yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.unparse(node)


def test_nothing_else_of_vllm_is_replaced() -> None:
    found = {
        path.name: list(changes_of(path.read_text())) for path in Path(p2pkv.__file__).parent.rglob("*.py")
    }
    assert {name: changes for name, changes in found.items() if changes} == {
        "vllm_patches.py": ["setattr(holder, function.last_name, wraps(original)(replacement))"],
        "stamps.py": ["setattr(owner, method, instead)"],  # only where an operator wants them
    }
    assert list(changes_of("from vllm.v1 import core\ncore.EngineCore.sleep = None")) == [
        "core.EngineCore.sleep"
    ]
