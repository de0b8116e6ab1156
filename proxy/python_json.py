"""JSON that only Python's decoder reads, which is vLLM's: a request's body in it is made strict JSON."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection

import msgspec
from msgspec import Raw

from .errors import ProxyError

_Views = dict[str, Raw]
_MAX_FOR_PYTHON = 4 << 20
"""Bytes of a body that is made into Python objects, at most."""
_HALF = re.compile("[\ud800-\udfff]")
_views = msgspec.json.Decoder(_Views)


def read_by_python(raw: bytes | bytearray, error: Exception, texts: Collection[str]) -> _Views:
    """The fields, in ASCII, of a body that is no strict JSON, but that Python's decoder takes, as vLLM does:
    with a byte order mark, in UTF-16, with NaN or half of a surrogate pair. Raises ProxyError with the cause.

    Args:
        error: another decoder's, of the same body.
        texts: the fields that are tokenized, where half of a pair is refused.
    """
    why = str(error)
    try:
        if len(raw) > _MAX_FOR_PYTHON:
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
