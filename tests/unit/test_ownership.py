"""Who may write what, what a change may touch: scripts, no style guide, that print what breaks a rule."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2pkv
from p2pkv.protocol import messages
from unit.crossings import crossings

ROOT = Path(__file__).parents[2]
ENGINE = sorted((ROOT / "p2pkv" / "engine").glob("*.py"))
PROXY = sorted((ROOT / "proxy").rglob("*.py"))

MAX_ATTRIBUTES = 15

CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft",
    "remove",
    "setdefault", "update",
}  # fmt: skip
"""Methods that change a collection."""

SHARED = {"effects", "outbox", "idle_work", "counters", "revoked"}
"""What the parts of a rank share: the queue to which each appends, and objects with a method `add`."""


def fields(kind: ast.ClassDef) -> set[str]:
    """What is assigned in the class, or to `self` in one of its methods; constants and properties are not."""
    found = set()
    for node in kind.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and "ClassVar" not in ast.unparse(node.annotation):  # type: ignore[union-attr]
            found.add(target.id)
    for node in ast.walk(kind):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and name_of(node.value) == "self"
        ):
            found.add(node.attr)
    return found


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def written(tree: ast.AST) -> Iterator[ast.expr]:
    """What is assigned, deleted or changed in a name: `a.b = 1`, `a[c] = 1`, `a.b.append(1)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield node.func.value
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node if isinstance(node, ast.Attribute) else node.value


def foreign_writes(source: str) -> list[str]:
    """The places in this source that write a field of another file's object."""
    tree = ast.parse(source)
    own = set[str]().union(*(fields(each) for each in ast.walk(tree) if isinstance(each, ast.ClassDef)))
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in written(tree)
        if isinstance(node, ast.Attribute)
        and name_of(node.value) not in ("self", "cls")
        and node.attr not in own | SHARED
    ]


def state_of_module(source: str) -> list[str]:
    """Names of a module that are assigned anew, or hold a collection that its functions change."""
    tree = ast.parse(source)
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = {
        f"global {name}" for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
    }
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)):
        local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        found |= {name_of(node) for node in written(function)} & (names - local)
    return sorted(found)


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.name)
def test_a_file_of_the_engine_writes_only_fields_of_its_own_classes(path: Path) -> None:
    assert foreign_writes(path.read_text()) == []


AIOHTTP_S = {
    "response.headers",
    "app.cleanup_ctx",
    "app.middlewares",
    "app.on_response_prepare",
    "watch.on_connection_reuseconn",
    "connector._factory",
    "context.trace_request_ctx",
    "request.writer.output_size",
}
COMMON = re.compile(r"(.*\b_?counters|record)\.\w+")


def test_no_file_of_the_proxy_writes_to_anothers_fields() -> None:
    """But for the counters, a filter's log record, and membership's own files, which are one unit."""
    found = [
        f"{path.name}:{each}"
        for path in PROXY
        if path.parent.name != "membership"
        for each in foreign_writes(path.read_text())
        if (name := each.partition(": ")[2]) not in AIOHTTP_S and not COMMON.fullmatch(name)
    ]
    assert found == []


@pytest.mark.parametrize("path", [*ENGINE, *PROXY], ids=lambda path: path.name)
def test_a_module_holds_constants_and_registries_only(path: Path) -> None:
    assert state_of_module(path.read_text()) == []


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: path.name)
def test_no_class_of_the_engine_holds_too_much(path: Path) -> None:
    held = {
        kind.name: fields(kind)
        for kind in ast.walk(ast.parse(path.read_text()))
        if isinstance(kind, ast.ClassDef)
    }
    assert {name: len(some) for name, some in held.items() if len(some) > MAX_ATTRIBUTES} == {}


def test_the_script_finds_what_it_is_for() -> None:
    source = """
class Mine:
    kept: int = 0
    def act(self, peer):
        self.kept = 1
        peer.link = 2
        peer.kept = 3
        peer.orders.append(4)
        self.peer.table["k"] = 5
        del peer.flights[0]
        self._own.append(6)
TABLE = {}
def fill():
    global GONE
    TABLE["k"] = 1
    TABLE.update(other=2)
"""
    assert foreign_writes(source) == [
        "6: peer.link",
        "8: peer.orders",
        "9: self.peer.table",
        "10: peer.flights",
    ]
    assert state_of_module(source) == ["TABLE", "global GONE"]


# A new field of a message is at most three files: where it is declared, set, and read.


FOLDER = Path(p2pkv.__file__).parent
TRANSFER = {
    name
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and messages.TransferMessage in kind.__bases__
}
"""Messages of a transfer."""
SEVERAL = {
    "Chunk": {"protocol/receiver.py", "protocol/sender.py"},  # D cuts a prompt that is computed
    "Failed": {"engine", "protocol/sender.py"},  # P may know of no transfer at all
    "Sent": {"engine", "protocol/sender.py"},  # a chunk of filler, for a transfer that has ended
}
"""Messages that are made in several places, without fields of their own there."""


def made_in(name: str) -> set[str]:
    """The files, or the engine, that make this message."""
    return {
        "engine" if path.parent.name == "engine" else str(path.relative_to(FOLDER))
        for path in FOLDER.rglob("*.py")
        if path.name != "messages.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    }


@pytest.mark.parametrize("name", sorted(TRANSFER))
def test_each_message_of_a_transfer_is_made_in_one_file(name: str) -> None:
    made = made_in(name)
    assert made and (len(made) == 1 or made == SEVERAL.get(name)), f"{name} is made in {sorted(made)}"


# The way of one layer's bytes stays short.


MOST = 73
"""Calls from one file of p2pkv to another in the engines; three more on either forward thread make 79."""

MAX_FILES = 14
"""Of one phase."""


def test_one_layers_bytes_cross_few_files() -> None:
    found = crossings()
    assert sum(way.total() for way, _ in found.values()) <= MOST, found
    assert all(
        len({file for came, to, _ in way for file in (came, to)}) <= MAX_FILES for way, _ in found.values()
    )
