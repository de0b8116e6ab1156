"""What vLLM takes in other spellings than the usual ones: texts for true, false and numbers, and JSON that
only Python's decoder reads."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from msgspec import Raw

from .errors import ProxyError

Fields = dict[str, Any]
Views = dict[str, Raw]
"""The fields of a JSON object, each a view of its bytes."""
ABSENT = Raw(b"null")

_SMALL = 64
"""Bytes of the longest value that is decoded: numbers, true, false and null are shorter."""
# As vLLM's request classes read a text in place of true or false.
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_MOST_FOR_PYTHON = 4 << 20
"""Bytes of a body that is made into Python objects, at most."""
_HALF = re.compile("[\ud800-\udfff]")
_any = msgspec.json.Decoder(Any)
_views = msgspec.json.Decoder(Views)


def decoded(decoder: msgspec.json.Decoder[Any], raw: Raw, otherwise: Any) -> Any:
    """`otherwise` if it is nothing that the decoder takes."""
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return otherwise


def small(fields: Views, name: str) -> Any:
    """A field's value: None if it is absent, and its bytes if it can be none that matters here."""
    raw = fields.get(name)
    return raw if raw is None or len(raw) > _SMALL else decoded(_any, raw, raw)


def number(value: Any) -> float:
    """As vLLM reads it, which takes a text for a number; 0 for what is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0.0
    except (OverflowError, ValueError):
        return 0.0


def switch(value: Any) -> bool | None:
    """As vLLM reads it, which takes texts and numbers for true and false; absent and null are false. None for
    what is neither."""
    text = str(value).lower() if isinstance(value, str | bool) else None
    if value is None or text in _FALSE or (text is None and value == 0):
        return False
    return True if text in _TRUE or (text is None and value == 1) else None


def plain(fields: Views, switches: Iterable[str], numbers: Iterable[str]) -> Views:
    """Of these fields, those that are spelled otherwise than as true, false or a whole number although vLLM
    takes them for that; spelled so."""
    found: Fields = {name: switch(small(fields, name)) for name in switches if name in fields}
    for name in numbers:
        if isinstance(value := small(fields, name), str | float) and (read := number(value)).is_integer():
            found[name] = int(read)
    found = {name: value for name, value in found.items() if value is not None}
    made = {name: Raw(msgspec.json.encode(value)) for name, value in found.items()}
    return {name: view for name, view in made.items() if view != fields[name] and fields[name] != ABSENT}


def read_by_python(raw: bytes | bytearray, error: Exception, texts: Collection[str]) -> Views:
    """The fields, in ASCII, of a body that is no strict JSON, but that Python's decoder takes, as vLLM does:
    with a byte order mark, in UTF-16, with NaN or half of a surrogate pair. Raises ProxyError with the cause.

    Args:
        error: another decoder's, of the same body.
        texts: the fields that are tokenized, where half of a pair is refused.
    """
    why = str(error)
    try:
        if len(raw) > _MOST_FOR_PYTHON:
            # All but a byte order mark would keep others waiting.
            return _views.decode(
                memoryview(raw)[len(codecs.BOM_UTF8) :] if raw[:3] == codecs.BOM_UTF8 else raw
            )
        found = json.loads(raw)
        if not isinstance(found, dict):
            raise TypeError
        for name, value in found.items():
            where = f"`{name}`" if name in texts else f"A field's name, {name!a},"
            text = json.dumps(value, ensure_ascii=False) if name in texts else name
            if half := _HALF.search(text):
                raise ProxyError(
                    400,
                    f"{where} in the request body has half of a surrogate pair, {half[0]!a}: that is no "
                    "character. Most often a text was cut in the middle of one.",
                )
        return {name: Raw(json.dumps(value).encode()) for name, value in found.items()}
    except UnicodeDecodeError as wrong:
        why = f"{wrong.reason} in {wrong.encoding}, byte {wrong.start}"
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError):
        pass  # the first error says it
    raise ProxyError(400, f"The request body is not a JSON object: {why}.") from None
