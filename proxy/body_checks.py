"""Bodies that a server should not take as they are: with very many values, or in JSON that only Python reads.

Two million empty messages are 6 MB, for which vLLM, which makes objects and errors of them, needs 22 GB. So
values are counted, without making objects of them: the proxy only skips them, in one go, at about 5 ns each.
Token ids and escaped characters, which cost both of them less, have bounds of their own. vLLM's decoder is
Python's: a body that no other one takes is made strict JSON.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Collection, Iterator

import msgspec
from msgspec import Raw

from .http import ProxyError

WITH_TOKEN_IDS = frozenset({"/v1/completions", "/v1/embeddings", "/detokenize"})
"""Where a prompt may be token ids. Elsewhere a number is a value like any other: vLLM writes an error, or
many, for each that should be a message."""

MAX_NUMBERS = 1 << 20
"""Numbers that follow others in lists, as token ids do, in one body."""

MAX_ESCAPES = 1 << 22
"""Backslashes in one body."""

_COUNTED_AT_ONCE = 1 << 20
_READ_AT_ONCE = 1 << 18
_EACH_READ = 256
"""Bytes that could be read in the time that it takes to begin to."""


async def check_values(body: bytearray, most: int, *, token_ids: bool) -> None:
    """Raises ProxyError if a body has too many values. The loop gets its turn again and again."""
    counted = False
    for signs, escapes in _signs_in(body):
        if escapes > MAX_ESCAPES:
            raise ProxyError(413, f"The request body has more than {MAX_ESCAPES} escaped characters.")
        if signs > most and not counted:
            await _check_exactly(body, most, token_ids)
            counted = True
        await asyncio.sleep(0)


async def _check_exactly(body: bytearray, most: int, token_ids: bool) -> None:
    for values, numbers in values_in(body):
        if values + (0 if token_ids else numbers) > most:
            raise ProxyError(
                413,
                f"The request body has more than {most} values, such as messages, their parts and fields; "
                "this proxy takes no more in one request (--max-body-values).",
            )
        if numbers > MAX_NUMBERS:
            what = f"more than {MAX_NUMBERS} numbers, such as token ids"
            raise ProxyError(413, f"The request body has {what}.")
        await asyncio.sleep(0)


def _signs_in(body: bytearray) -> Iterator[tuple[int, int]]:
    """How many bytes so far open or separate values, in texts as well; and how many are backslashes."""
    signs = escapes = 0
    for at in range(0, len(body), _COUNTED_AT_ONCE):
        end = at + _COUNTED_AT_ONCE
        signs += sum(_count(body, sign, at, end) for sign in (b"{", b"[", b","))
        escapes += _count(body, b"\\", at, end)
        yield signs, escapes


def _count(body: bytearray, sign: bytes, at: int, end: int) -> int:
    # To find that there is none, as in a picture, takes a tenth of the time of counting.
    first = body.find(sign, at, end)
    return body.count(sign, first, end) if first >= 0 else 0


_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_BETWEEN_STRINGS = re.compile(rb'[^"]*+')
_DIGITS_ARE_0 = bytes(ord("0") if chr(each).isdigit() else each for each in range(128)) + bytes(
    range(128, 256)
)


def values_in(body: bytearray) -> Iterator[tuple[int, int]]:
    """How many values there have been so far, without what texts hold; and apart from these, how many numbers
    that follow others in a list. Yields after each bounded piece of work."""
    values = numbers = at = work = 0
    in_string = False
    while at < len(body):
        found = (_IN_STRING if in_string else _BETWEEN_STRINGS).match(body, at, at + _READ_AT_ONCE)
        assert found is not None, "both match nothing, too"
        if not in_string:
            plain = found[0].translate(_DIGITS_ARE_0, b" \t\r\n")
            follow = plain.count(b",0")
            numbers += follow
            values += plain.count(b",") - follow + plain.count(b"{") + plain.count(b"[")
        work += _EACH_READ + found.end() - at
        if body[found.end() : found.end() + 1] == b'"':
            values += not in_string
            in_string = not in_string
            at = found.end() + 1
        elif found.end() > at:
            at = found.end()  # within a string perhaps before a backslash, whose character was not read
        else:
            break  # a backslash ends the body: it is no JSON
        if work > _READ_AT_ONCE:
            work = 0
            yield values, numbers
    yield values, numbers


# Python's JSON.

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
