"""The parts of a page, and how they are written in Markdown: standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Table:
    """`head` has one name a column; all cells are plain text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Boxes:
    items: Sequence[tuple[bool, str]]


@dataclass(frozen=True)
class Output:
    lines: Sequence[str]


Block = Text | Heading | Table | Boxes | Output


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """The page in Markdown as GitHub reads it."""
    parts = [f"# {title}", *map(_markdown, blocks)]
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Text(text):
            return text
        case Heading(text):
            return f"## {text}"
        case Table(head, rows):
            lines = [head, ["---"] * len(head), *rows]
            return "\n".join(f"| {' | '.join(_cell(each) for each in line)} |" for line in lines)
        case Boxes(items):
            return "\n".join(f"- [{'x' if ticked else ' '}] {text}" for ticked, text in items)
        case Output(lines):
            fence = "```"
            while any(fence in line for line in lines):
                fence += "`"
            return "\n".join([fence, *lines, fence])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
