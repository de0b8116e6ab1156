"""Who may import whom: downwards only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pkv

ROOT = Path(p2pkv.__file__).parents[1]

# Each room, and the rooms that it may import besides itself.
BELOW: dict[str, set[str]] = {
    "sharding": set(),
    "pairing": set(),
    "config": {"pairing"},
    "plan": {"sharding"},
    "protocol": {"plan", "sharding", "pairing"},
    "pages": {"protocol", "plan", "sharding"},
    "links": {"protocol"},
    "control": {"protocol", "pairing", "config"},
    "engine": {"links", "pages", "control", "protocol", "plan", "sharding", "pairing", "config"},
    "connector": {"engine", "links", "pages", "control", "protocol", "plan", "sharding", "pairing", "config"},
    "plugin": set(),
    "cli": {
        "plugin",
        "engine",
        "links",
        "pages",
        "control",
        "protocol",
        "plan",
        "sharding",
        "pairing",
        "config",
    },
}

# Foreign packages that a room must not import; the clock is handed to the pure ones as an argument.
PURE = {"torch", "zmq", "vllm", "cupy", "time"}
FORBIDDEN: dict[str, set[str]] = {
    **dict.fromkeys(("sharding", "plan", "pairing", "config", "protocol"), PURE),
    "pages": {"vllm", "zmq"},
    "links": {"vllm"},
    "control": {"vllm", "torch"},
    "engine": {"vllm"},
    "plugin": {"torch", "zmq", "cupy"},
    "cli": {"vllm"},
}


def rooms() -> list[str]:
    """The packages and modules right below `p2pkv`."""
    inside = (path for path in (ROOT / "p2pkv").iterdir() if path.suffix == ".py" or any(path.glob("*.py")))
    return sorted({path.stem for path in inside} - {"__init__", "__pycache__"})


def files(room: str) -> list[Path]:
    folder = ROOT / "p2pkv" / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imports(path: Path) -> Iterator[str]:
    """The full names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module
            yield node.module
            if node.module == "p2pkv":
                yield from (f"p2pkv.{alias.name}" for alias in node.names)


def test_the_map_has_every_room() -> None:
    assert set(rooms()) <= set(BELOW)


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    allowed = BELOW[room] | {room}
    for path in files(room):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("p2pkv.")}
        assert ours - {"__version__"} <= allowed, f"{path} imports {sorted(ours - allowed)}"


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_no_foreign_package_that_is_not_for_it(room: str) -> None:
    for path in files(room):
        # What is imported by name for its types alone is not there when the program runs.
        foreign = {name.split(".")[0] for name in imports(path)}
        assert not foreign & FORBIDDEN.get(room, set()), path


def test_the_proxy_needs_addresses_and_pings_alone() -> None:
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        names = list(imports(path))
        ours = {name for name in names if name.startswith("p2pkv.")}
        assert ours <= {"p2pkv.pairing", "p2pkv.control.discovery"}, path
        assert not {name.split(".")[0] for name in names} & {"torch", "vllm", "cupy"}, path


def test_nothing_unpickles() -> None:
    sources = [*(ROOT / "p2pkv").rglob("*.py"), *(ROOT / "proxy").rglob("*.py")]
    assert len(sources) > 20
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for path in sources:
        assert not {name.split(".")[0] for name in imports(path)} & banned, path


@pytest.mark.parametrize("module", ["p2pkv.cli", "p2pkv.plugin", "p2pkv_proxy.cli"])
def test_it_is_light_to_import(module: str) -> None:
    import subprocess

    code = f"import sys, {module}; print(*sorted({{'torch', 'vllm', 'cupy'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.split() == []
