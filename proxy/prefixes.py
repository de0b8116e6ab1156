"""What routing knows of prompts, and which instances have lately been given prompts that begin alike. No IO.

vLLM keeps the KV of prompts that it has computed, in blocks, and finds them again by a chain of hashes: each
over a block and the hash before it. The proxy has no tokenizer, so its chain is over pieces of the text, or
of the token ids if the client sends these. Equal chains mean equal beginnings, for the same model. What an
instance still has in its cache the proxy can only guess, from what it has sent there.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import msgspec

CHARACTERS_PER_TOKEN = 4
"""Of English text, about. An estimate too high or too low by half misleads nobody for long."""

PIECE_TOKENS = 64
"""Tokens of one piece of a prompt: a few of vLLM's blocks."""

MOST_PIECES = 512
"""Of one prompt, from its beginning: what two prompts have in common beyond that changes no choice."""

MOST_HOLDERS = 32
"""Instances that are remembered for one piece."""

_LINK_BYTES = 8
_LONGEST_PART = 4096
_DEPTH = 4

Chain = tuple[bytes, ...]
"""A link for each whole piece of a prompt: equal links, equal prompts up to there."""

_LEADING = ("tools", "system", "instructions", "prompt", "messages", "input")
"""The fields of a request that make its prompt, as chat templates order them."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt in a request's fields, as far as one can tell without a tokenizer.

    Attributes:
        fields: the request, a JSON object.
    """

    fields: dict[str, Any]

    @cached_property
    def tokens(self) -> int:
        """How many it has: counted if they are token ids, else estimated."""
        characters, tokens = 0, 0
        for part in self._parts():
            if isinstance(part, str):
                characters += len(part)
            else:
                tokens += len(part)
        return tokens + -(-characters // CHARACTERS_PER_TOKEN)

    @cached_property
    def chain(self) -> Chain:
        """Of its first pieces; of the first prompt, if the request has several."""
        salt = [self.fields.get("model"), self.fields.get("cache_salt")]
        link, links = _encoded(salt), []
        for piece in self._pieces():
            link = hashlib.blake2b(link + piece, digest_size=_LINK_BYTES).digest()
            links.append(link)
        return tuple(links)

    def _pieces(self) -> Iterator[bytes]:
        """The first whole pieces."""
        first = next(self._parts(), "")
        if not isinstance(first, str):
            for start in range(0, min(len(first), MOST_PIECES * PIECE_TOKENS), PIECE_TOKENS):
                if start + PIECE_TOKENS <= len(first):
                    yield _encoded(first[start : start + PIECE_TOKENS])
            return
        size = PIECE_TOKENS * CHARACTERS_PER_TOKEN
        text = self._text(MOST_PIECES * size)
        for start in range(0, len(text) - size + 1, size):
            yield text[start : start + size]

    def _text(self, most: int) -> bytes:
        """The first bytes of its text, at most so many."""
        taken: list[str] = []
        length, several = 0, isinstance(self.fields.get("prompt"), list)
        for part in self._parts():
            if not isinstance(part, str) or length >= most:
                break
            taken.append(part[:most])
            length += len(part)
            if several:
                break
        return "\0".join(taken).encode(errors="replace")[:most]

    def _parts(self) -> Iterator[str | list[int]]:
        for name in _LEADING:
            if (value := self.fields.get(name)) is not None:
                yield from _parts_of(value, _DEPTH)


def _parts_of(value: object, depth: int) -> Iterator[str | list[int]]:
    """The texts and token ids in a part of a request, in order. What lies deeper is left out."""
    ids = isinstance(value, list) and value and type(value[0]) is int
    if isinstance(value, str) or ids:
        yield cast("str | list[int]", value)
    elif isinstance(value, list) and depth:
        for each in value:
            yield from _parts_of(each, depth - 1)
    elif isinstance(value, dict) and depth:
        yield from _parts_of_object(value, depth)


def _parts_of_object(value: dict[str, Any], depth: int) -> Iterator[str | list[int]]:
    """Of a message, or of a part of one. Whatever has no text of its own, such as a tool, counts as its JSON;
    an image, whose JSON is long, as the hash of that."""
    if "content" in value:
        for name in ("role", "content", "tool_calls"):
            yield from _parts_of(value.get(name), depth - 1)
    elif isinstance(text := value.get("text"), str):
        yield text
    else:
        encoded = _encoded(value)
        short = len(encoded) <= _LONGEST_PART
        yield encoded.decode() if short else hashlib.blake2b(encoded, digest_size=16).hexdigest()


def _encoded(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:  # the stack is deeper here than where the body was read
        return b"nested too deeply to be counted"


class PrefixIndex:
    """Who has lately been given which beginnings of prompts.

    What was given longest ago is forgotten first, and of one prompt its end before its beginning: so whatever
    is remembered of a prompt starts where the prompt starts. The same calls give the same answers.

    Args:
        capacity: of links and their holders, counted together.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._links: OrderedDict[bytes, dict[Hashable, None]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        """How much is remembered, of what `capacity` bounds."""
        return self._size

    def held(self, chain: Chain) -> dict[Hashable, int]:
        """How many pieces of a prompt, from its beginning, each holder has been given; who has none is left
        out."""
        found: dict[Hashable, int] = {}
        for depth, link in enumerate(chain):
            deeper = [each for each in self._links.get(link, ()) if found.get(each, 0) == depth]
            if not deeper:
                break
            found.update(dict.fromkeys(deeper, depth + 1))
        return found

    def add(self, chain: Sequence[bytes], holder: Hashable) -> None:
        """`holder` is given a prompt that begins like this."""
        for link in reversed(chain):
            holders = self._links.setdefault(link, {})
            self._links.move_to_end(link)
            self._size += holder not in holders
            holders.pop(holder, None)
            holders[holder] = None
            if len(holders) > MOST_HOLDERS:
                del holders[next(iter(holders))]
                self._size -= 1
        while self._size > self._capacity:
            self._size -= len(self._links.popitem(last=False)[1])
