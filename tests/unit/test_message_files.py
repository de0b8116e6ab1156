"""A new field of a message is at most three files: where it is declared, set, and read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import p2pkv
from p2pkv.protocol import messages

FOLDER = Path(p2pkv.__file__).parent
TRANSFER = {
    name
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, messages.Message) and "attempt" in kind.__struct_fields__
}
"""Messages of a transfer."""
SEVERAL = {
    "Failed": {"engine", "protocol/sender.py"},  # P may know of no transfer at all
    "Grant": {"engine", "protocol/receiver.py"},  # for bytes that D discards
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
