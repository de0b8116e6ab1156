"""Values for the fields of vLLM's request classes, by their types: as a client may send them, spelled as
pydantic takes a type, and some that it refuses. A new field of a later vLLM has values by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Fields = dict[str, Any]

_NUMBERS = (0, 1, 2, 100, -1)
_DEEPEST = 3
_MOST = 40
"""Values of one type."""

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TEXT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
# Of types with too many forms to draw, forms that clients send.
EXAMPLES: Mapping[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "hi"}],
        TEXT,
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
    ],
    "input": [
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": []}],
    ],
    "prompt": ["hi", [1, 2, 3], ["a", "b"], [[1], [2]], "", []],
    "tools": [
        [{"type": "function", "function": FUNCTION}],
        [{"type": "function", **FUNCTION, "strict": True}],
        [{"name": "f", "input_schema": {"type": "object"}}],
        [],
    ],
    "tool_choice": [
        "none",
        "auto",
        "required",
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
        {"type": "any"},
    ],
    "response_format": [{"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}],
}


def fields_of(request: type[BaseModel]) -> dict[str, list[Any]]:
    """Each field of a request, with values for it."""
    made = {}
    for name, info in request.model_fields.items():
        values = [*EXAMPLES.get(name, ()), *_values(info.annotation, info.metadata)]
        made[info.alias or name] = _different([*values, None])
    return made


def _different(values: Iterable[Any]) -> list[Any]:
    """1, 1.0 and true are three values here."""
    return list({json.dumps(each): each for each in values}.values())[:_MOST]


def _values(annotation: Any, metadata: Iterable[Any] = (), depth: int = 0) -> list[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _SIMPLE:
        return _simple(annotation, metadata)
    if origin is Annotated:
        return _values(arguments[0], [*metadata, *arguments[1:]], depth)
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if each is not types.NoneType]
        several = [_values(each, metadata, depth) for each in kinds]
        rows = itertools.zip_longest(*several, fillvalue=_NONE)
        return [value for row in rows for value in row if value is not _NONE]
    if origin is Literal:
        return [*arguments, "no such value"]
    if depth > _DEEPEST:
        return []
    if origin is list or annotation is list:
        inner = _values(arguments[0], (), depth + 1) if arguments else [1]
        return [*([each] for each in inner[:8]), inner[:2], []]
    if origin is dict or annotation is dict:
        inner = _values(arguments[1], (), depth + 1) if arguments else [1]
        return [{"5": each} for each in inner[:8]] + [{}]
    if (members := _members(annotation)) is not None:
        return _objects(members, depth)
    return ["x", 1, {"a": [None]}]


_NONE = object()


_SIMPLE = (bool, int, float, str, bytes)


def _simple(kind: type, metadata: Iterable[Any]) -> list[Any]:
    if kind is bool:
        return [True, False, "true", "false", 1, 0, "Yes", "off", 1.0, "0", "x"]
    if kind in (int, float):
        rules = [rule for each in metadata for rule in _rules(each)]
        edges = [edge for each in rules for edge in dataclasses.asdict(each).values()]
        numbers = [*(edge + more for edge in edges for more in (0, 1, -1)), *_NUMBERS]
        if kind is float:
            numbers += [0.5, 0.01]
        spelled = [form for each in (1, 2, 100) for form in (str(each), float(each), f" {each}.0 ")]
        return [*numbers, *spelled, "0", "x", True]
    return ["x", "", "a longer text", "\u00e9\U0001f600", 5]


def _rules(annotation: Any) -> Iterable[Any]:
    if isinstance(annotation, FieldInfo):
        return annotation.metadata
    return [annotation] if isinstance(annotation, Ge | Gt | Le | Lt) else []


def _members(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """By name: the type of a member of an object, and whether the object needs it."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields
        return {
            info.alias or name: (Annotated[info.annotation, info], info.is_required())
            for name, info in fields.items()
        }
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        return {name: (hint, name in kind.__required_keys__) for name, hint in hints.items()}
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {each.name: (hints[each.name], False) for each in dataclasses.fields(kind) if each.init}
    return None


def _objects(members: Mapping[str, tuple[Any, bool]], depth: int) -> list[Any]:
    """With what they need; and with one member more, or another value of one."""
    drawn = {name: _values(annotation, (), depth + 1)[:6] for name, (annotation, _) in members.items()}
    needed = {name: drawn[name][0] for name, (_, required) in members.items() if required and drawn[name]}
    return [needed, *(needed | {name: value} for name, values in drawn.items() for value in values)]
