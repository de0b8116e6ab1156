"""A page that is written once and rendered as Markdown and as HTML: standard library only."""

from __future__ import annotations

import html
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

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; } th, td { border: 1px solid #bbb; padding: .2em .6em; text-align: left; }
th { background: #eee; } pre { background: #f6f6f6; padding: 1em; overflow-x: auto; font-size: 13px; }
ul { list-style: none; padding-left: 0; }
"""


def markdown(title: str, blocks: Sequence[Block]) -> str:
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


def page(title: str, blocks: Sequence[Block]) -> str:
    """The page in HTML, complete in itself."""
    name = html.escape(title)
    body = "\n".join(map(_html, blocks))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}\n</body></html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Text(text):
            return f"<p>{html.escape(text)}</p>"
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Table(head, rows):
            names = "".join(f"<th>{html.escape(each)}</th>" for each in head)
            cells = ["".join(f"<td>{html.escape(each)}</td>" for each in row) for row in rows]
            return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        case Boxes(items):
            lines = (f"<li>{'☑' if ticked else '☐'} {html.escape(text)}</li>" for ticked, text in items)
            return f"<ul>{''.join(lines)}</ul>"
        case Output(lines):
            return f"<pre>{html.escape(chr(10).join(lines))}</pre>"
