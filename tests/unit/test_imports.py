"""Who may import whom, read from every module's own source, so that a rule cannot rot unseen."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import p2pkv

ROOT = Path(p2pkv.__file__).parents[1]

# Each part, and those that it may import besides itself; docs/design.md says what is in them.
CORE = {"protocol", "protocol.messages", "plan", "sharding", "interleave", "page_packings"}
CORE |= {"pairing", "trust", "config", "log", "link_kinds"}
SEAMS = {"links", "kv", "control", "device"}
BELOW = {
    "": set(),
    "pairing": set(),
    "trust": set(),
    "link_kinds": set(),
    "config": {"pairing", "trust", "link_kinds"},
    "log": set(),
    "protocol.messages": set(),
    "interleave": set(),
    "sharding": {"interleave"},
    "plan": {"sharding", "interleave"},
    "page_packings": set(),
    "protocol": {"protocol.messages", "plan", "sharding", "interleave", "pairing", "page_packings"},
    "device": set(),
    "links": {"trust", "device", "link_kinds"},
    "kv": {"device", "page_packings"},
    "control": {"protocol.messages", "pairing", "trust", "log"},
    "first_token": set(),
    "stamps": set(),
    "engine": CORE | SEAMS,
    "connector": CORE | SEAMS | {"engine", "plugin", "first_token", "stamps"},
    "plugin": {"stamps"},
    "demo": set(),
    "bench": CORE | SEAMS | {"engine", "demo"},
    "cli": CORE | SEAMS | {"engine", "plugin", "demo", "bench", "stamps"},
}
CLOCKS = {"time", "datetime", "asyncio", "sched"}
HEAVY = {"torch", "zmq", "vllm", "cupy"}
PURE = (
    "interleave",
    "sharding",
    "plan",
    "page_packings",
    "protocol",
    "protocol.messages",
    "pairing",
    "trust",
)
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@dataclass(frozen=True)
class Import:
    """One imported name, absolute; `late` if it is inside a function; where it stands."""

    name: str
    late: bool
    where: str


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, package: bool) -> Iterator[Import]:
    """Every import in `source`, late ones and those for type checkers included. `from a import b` is given as
    a.b, since b may be a module."""
    tree = ast.parse(source)
    inside = {
        child
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            parents = module.split(".") if package else module.split(".")[:-1]
            base = parents[: len(parents) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        for name in names:
            yield Import(name, node in inside, f"{module}:{node.lineno}")


def read_all(folder: str) -> dict[str, list[Import]]:
    return {
        module_name(path): list(imports_of(path.read_text(), module_name(path), path.name == "__init__.py"))
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def part_of(name: str) -> str | None:
    """The part of p2pkv that an absolute name belongs to, the most specific one; None for other packages."""
    words = name.split(".")
    if words[0] != "p2pkv":
        return None
    inner = words[1:]
    while inner and ".".join(inner) not in BELOW:
        inner.pop()
    return ".".join(inner)


def wrong_direction(modules: dict[str, list[Import]]) -> list[str]:
    wrong = []
    for module, imports in modules.items():
        here = part_of(module)
        for each in imports:
            there = part_of(each.name)
            # The package itself holds nothing but its version.
            if there not in (None, "", here) and there not in BELOW[here]:
                wrong.append(f"{each.where} imports {each.name}")
    return wrong


def importing(modules: dict[str, list[Import]], names: set[str]) -> list[Import]:
    return [each for imports in modules.values() for each in imports if each.name.split(".")[0] in names]


def first_circle(modules: dict[str, list[Import]], package: str) -> list[str]:
    """Modules of this package that import each other, late imports and those for type checkers included."""

    def module_of(name: str) -> str | None:
        words = name.split(".")
        return next(
            (".".join(words[:n]) for n in range(len(words), 0, -1) if ".".join(words[:n]) in modules), None
        )

    graph = {
        module: {found for each in imports if (found := module_of(each.name)) not in (None, module, package)}
        for module, imports in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


OURS = read_all("p2pkv")
PROXY = read_all("proxy")


def test_every_module_belongs_to_a_part_that_the_design_names() -> None:
    strays = [name for name in OURS if part_of(name) == "" and name != "p2pkv"]
    assert len(OURS) > 5 and strays == []


def test_imports_go_downwards_only() -> None:
    assert wrong_direction(OURS) == []


def test_no_modules_import_each_other() -> None:
    assert first_circle(OURS, "p2pkv") == []
    assert first_circle(PROXY, "proxy") == []


def test_the_pure_parts_import_nothing_heavy_and_read_no_clock() -> None:
    pure = {name: found for name, found in OURS.items() if part_of(name) in PURE}
    assert len(pure) >= len(PURE) - 1
    assert importing(pure, HEAVY | CLOCKS) == []


def test_only_the_connector_imports_vllm_and_the_plugin_late() -> None:
    outside = {name: found for name, found in OURS.items() if part_of(name) != "connector"}
    late = [each.where.split(":")[0] for each in importing(outside, {"vllm"}) if each.late]
    early = [each for each in importing(outside, {"vllm"}) if not each.late]
    assert early == []
    assert set(late) <= {"p2pkv.plugin"}


def test_membership_needs_no_proxy() -> None:
    """Which instances there are can be known without anything that serves requests."""
    inside = {name: found for name, found in PROXY.items() if name.startswith("proxy.membership")}
    assert len(inside) == 7
    outside = [
        f"{each.where} imports {each.name}"
        for found in inside.values()
        for each in found
        if each.name.startswith("proxy.") and not each.name.startswith("proxy.membership")
    ]
    assert outside == []


def test_nothing_is_pickled() -> None:
    assert importing(OURS | PROXY, PICKLES) == []


def test_the_proxy_imports_only_what_is_light_of_p2pkv() -> None:
    # The endpoint for `inspect`, which asks a running rank what it is.
    control = ("discovery", "endpoint", "security")
    allowed = (
        "__version__",
        "pairing",
        "first_token",
        "stamps",
        "trust",
        "log",
        *(f"control.{name}" for name in control),
    )
    found = importing(PROXY, {"p2pkv"})
    assert [
        each for each in found if not f"{each.name}.".startswith(tuple(f"p2pkv.{a}." for a in allowed))
    ] == []
    assert importing(PROXY, {"torch", "vllm"}) == []


LIGHT = [
    "p2pkv",
    *(f"p2pkv.{name}" for name in ("pairing", "trust", "plan", "config", "link_kinds", "log", "plugin")),
]
WITH_ZMQ = ["p2pkv.control.discovery", "p2pkv.control.announcer_child", "p2pkv.cli", "p2pkv_proxy.cli"]


@pytest.mark.parametrize("module", LIGHT + WITH_ZMQ)
def test_light_modules_load_neither_torch_nor_vllm(module: str) -> None:
    """In a fresh process, so that what they import in turn counts too."""
    heavy = HEAVY - {"zmq"} | {"numpy"} if module in WITH_ZMQ else HEAVY
    code = f"import sys, {module}\nprint(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


# The rules are only as good as what reads the imports.


def test_every_form_of_import_is_seen() -> None:
    source = """
import torch.cuda, os
from . import base
from ..plan import make_plan
from p2pkv import engine
def later():
    import vllm
"""
    early = ("torch.cuda", "os", "p2pkv.links.base", "p2pkv.plan.make_plan", "p2pkv.engine")
    found = {(each.name, each.late) for each in imports_of(source, "p2pkv.links.host", package=False)}
    assert found == {*((name, False) for name in early), ("vllm", True)}
    (of_package,) = imports_of("from .base import Link", "p2pkv.links", package=True)
    assert of_package.name == "p2pkv.links.base.Link"


def test_upwards_and_circles_are_seen() -> None:
    """From below the rule's other end, and from beside it."""
    for module, name in (("p2pkv.plan", "p2pkv.protocol.sender"), ("p2pkv.links.host", "p2pkv.kv.cache")):
        assert wrong_direction({module: [Import(name, False, "here")]}) == [f"here imports {name}"]
    circle = {each: [Import(to, False, "here")] for each, to in (("a", "b.name"), ("b", "a"))}
    assert first_circle(circle, "none") == ["a", "b"]
