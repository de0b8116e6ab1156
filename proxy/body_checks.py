"""Refuses bodies with so many values that they would harm a server.

Two million empty messages are 6 MB, but vLLM makes objects and errors of them and needs 22 GB. So the proxy
counts values without making objects of them, at about 5 ns each. Token ids and escaped characters, which
cost vLLM and the proxy less, have bounds of their own.
"""

import asyncio
import re
from collections.abc import Iterator

from .http import ProxyError

WITH_TOKEN_IDS = frozenset({"/v1/completions", "/v1/embeddings", "/detokenize"})
"""Where a prompt may be token ids. Elsewhere numbers count as values: vLLM writes errors for each of them."""

MAX_NUMBERS = 1 << 20
"""Numbers that follow others in lists, as token ids do, in one body."""

MAX_ESCAPES = 1 << 22
"""Backslashes in one body."""

_COUNTED_AT_ONCE = 1 << 20
_READ_AT_ONCE = 1 << 18
_EACH_READ = 256
"""Beginning a read costs as much as reading so many bytes."""


async def check_values(body: bytearray, most: int, *, token_ids: bool) -> None:
    """Raises ProxyError if a body has too many values. Lets the event loop go on in between."""
    counted = False
    for signs, escapes in _signs_in(body):
        if escapes > MAX_ESCAPES:
            why = f"The request body has more than {MAX_ESCAPES} escaped characters: send a shorter text."
            raise ProxyError(413, why)
        if signs > most and not counted:
            await _check_exactly(body, most, token_ids)
            counted = True
        await asyncio.sleep(0)


async def _check_exactly(body: bytearray, most: int, token_ids: bool) -> None:
    for values, numbers in values_in(body):
        if values + (0 if token_ids else numbers) > most:
            what = f"more than {most} values, such as messages, their parts and fields"
            why = "this proxy takes no more in one request (--max-body-values)."
            raise ProxyError(413, f"The request body has {what}; {why}")
        if numbers > MAX_NUMBERS:
            why = f"The request body has more than {MAX_NUMBERS} numbers, such as token ids: send fewer."
            raise ProxyError(413, why)
        await asyncio.sleep(0)


def _signs_in(body: bytearray) -> Iterator[tuple[int, int]]:
    """After each piece: how many bytes so far open or separate values, in texts too; how many backslashes."""
    signs = escapes = 0
    for at in range(0, len(body), _COUNTED_AT_ONCE):
        end = at + _COUNTED_AT_ONCE
        signs += sum(_count(body, sign, at, end) for sign in (b"{", b"[", b","))
        escapes += _count(body, b"\\", at, end)
        yield signs, escapes


def _count(body: bytearray, sign: bytes, at: int, end: int) -> int:
    # Finding that there is none, as in a picture, takes a tenth of the time of counting.
    first = body.find(sign, at, end)
    return body.count(sign, first, end) if first >= 0 else 0


_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_BETWEEN_STRINGS = re.compile(rb'[^"]*+')
_DIGITS_ARE_0 = bytes.maketrans(b"123456789", b"000000000")


def values_in(body: bytearray) -> Iterator[tuple[int, int]]:
    """After each bounded piece of work: how many values there have been so far outside of texts; and, not
    among these, how many numbers that follow another value, as in a list."""
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
            at = found.end()  # perhaps before a backslash in a string, whose character was not read
        else:
            break  # a backslash ends the body: it is no JSON
        if work > _READ_AT_ONCE:
            work = 0
            yield values, numbers
    yield values, numbers
