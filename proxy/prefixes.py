"""What routing knows of prompts, and which instances have lately been given prompts that begin alike. No IO.

vLLM keeps the KV of prompts that it has computed, in blocks, and finds them again by a chain of hashes: each
over a block and the hash before it. The proxy has no tokenizer, so its chain is over pieces of the text, or
of the token ids if the client sends these. Equal chains mean equal beginnings, for the same model. What an
instance still has in its cache the proxy can only guess, from what it has sent there.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import string
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from msgspec import Raw

BYTES_PER_TOKEN = 4
"""Of a prompt's JSON, about as in English text. An estimate too high or too low by half does not mislead for
long."""

DATA_BYTES_PER_TOKEN = 256
"""Of a picture, or other data in base64. A vision model makes a token of 28 x 28 pixels (Qwen2-VL) or some
more; at two or three bits a pixel, as in a JPEG, these have 260 to 390 bytes in base64."""

PIECE_TOKENS = 64
"""Tokens of one piece of a prompt: a few of vLLM's blocks."""

MOST_PIECES = 512
"""Of one prompt, from its beginning: what two prompts have in common beyond that changes no choice."""

MOST_HOLDERS = 32
"""Instances that are remembered for one piece."""

_LINK_BYTES = 8
_PIECE_BYTES = PIECE_TOKENS * BYTES_PER_TOKEN
_MOST_BYTES = MOST_PIECES * _PIECE_BYTES
_PIECE_OF_DATA = PIECE_TOKENS * DATA_BYTES_PER_TOKEN
# Text is looked at here and there for data: at most so often, and not more often than once in so many bytes.
_MOST_LOOKS, _LOOK_EVERY = 512, 2048
# So many bytes in a row without a sign that base64 does not have are data, since text has spaces.
_LOOK_BYTES = 48
_BASE64 = (string.ascii_letters + string.digits + "+/-_=").encode()
# Token ids are counted exactly in so many bytes.
_COUNTED_BYTES = 1 << 20
_ID_BYTES = 8
"""Of a token id in JSON, at most, as far as pieces of prompts are concerned."""
_IDS_OF_A_PIECE = re.compile(rb"((?:[^,]++,){%d}[^,]++),?" % (PIECE_TOKENS - 1))

Chain = tuple[bytes, ...]
"""A link for each whole piece of a prompt: equal links, equal prompts up to there."""

_LEADING = ("tools", "system", "instructions", "prompt", "messages", "input")
"""The fields of a request that make its prompt, as chat templates order them."""
_SALTS = ("model", "cache_salt")
_LONGEST_SALT = 1024


class _Part(NamedTuple):
    """A field of a prompt.

    Attributes:
        view: its JSON, without the quotes of a text and the brackets of a list.
        ids: it is token ids, or lists of them.
    """

    view: memoryview
    ids: bool

    @classmethod
    def of(cls, value: Raw) -> _Part:
        view = memoryview(value)
        beginning = bytes(view[:_LOOK_BYTES])
        if beginning == b"null":
            return cls(view[:0], ids=False)
        inner = view[1:-1] if beginning[:1] in b'"[' else view
        ids = beginning.startswith(b"[") and beginning.lstrip(b"[ \t\r\n")[:1].isdigit()
        return cls(inner, ids)

    @property
    def tokens(self) -> int:
        if self.ids:
            counted = bytes(self.view[:_COUNTED_BYTES])
            return (counted.count(b",") + 1) * len(self.view) // len(counted)
        data = int(len(self.view) * self._share_of_data())
        return data // DATA_BYTES_PER_TOKEN + -(-(len(self.view) - data) // BYTES_PER_TOKEN)

    def _share_of_data(self) -> float:
        step = max(_LOOK_EVERY, len(self.view) // _MOST_LOOKS)
        looks = range(step, len(self.view), step)
        found = sum(_is_data(bytes(self.view[at : at + _LOOK_BYTES])) for at in looks)
        return found / len(looks) if looks else 0.0

    def append_to(self, text: bytearray) -> None:
        """Appends its beginning. Of data, such as a picture, only the beginning of each piece is taken."""
        at = 0
        while at < len(self.view) and len(text) < _MOST_BYTES:
            piece = bytes(self.view[at : at + _PIECE_BYTES])
            text += piece
            at += len(piece)
            if _is_data(piece[:_LOOK_BYTES]):
                rest = bytes(self.view[at : at + _PIECE_OF_DATA - _PIECE_BYTES])
                end = rest.find(b'"')
                at += len(rest) if end < 0 else end

    def pieces_of_ids(self) -> Iterator[bytes]:
        """The first whole pieces; of the first list, if there are several."""
        most = MOST_PIECES * PIECE_TOKENS
        beginning = bytes(self.view[: most * _ID_BYTES]).lstrip(b"[ \t\r\n").partition(b"]")[0]
        for piece in itertools.islice(_IDS_OF_A_PIECE.finditer(beginning), MOST_PIECES):
            yield piece[1]


def _is_data(look: bytes) -> bool:
    """Whether these bytes are base64, by all appearances, such as a picture's."""
    mixed = look != look.lower() and look != look.upper()
    return mixed and len(look) == _LOOK_BYTES and not look.translate(None, _BASE64)


class Prompt:
    """The prompt in a request's fields, as far as one can tell without a tokenizer, and without reading all
    of it: its length comes from the length of its JSON, and its prefixes are the bytes of that.

    Args:
        fields: the request, a JSON object.

    Attributes:
        tokens: how many it has: counted if they are token ids, else estimated.
    """

    def __init__(self, fields: Mapping[str, Raw]) -> None:
        self._parts = [_Part.of(fields[name]) for name in _LEADING if name in fields]
        self._salt = b"\0".join(bytes(memoryview(fields.get(name, b""))[:_LONGEST_SALT]) for name in _SALTS)
        self.tokens = sum(part.tokens for part in self._parts)

    @cached_property
    def chain(self) -> Chain:
        """Of its first pieces."""
        link, links = self._salt, []
        for piece in self._pieces():
            link = hashlib.blake2b(link + piece, digest_size=_LINK_BYTES).digest()
            links.append(link)
        return tuple(links)

    def let_go(self) -> None:
        """Drops the request's bytes. A chain that was not asked for before is empty afterwards."""
        self._parts = []

    def _pieces(self) -> Iterator[bytes]:
        """The first whole pieces."""
        if len(self._parts) == 1 and self._parts[0].ids:
            yield from self._parts[0].pieces_of_ids()
            return
        text = bytearray()
        for part in self._parts:
            if text:
                text += b"\0"
            part.append_to(text)
        for start in range(0, min(len(text), _MOST_BYTES) - _PIECE_BYTES + 1, _PIECE_BYTES):
            yield bytes(text[start : start + _PIECE_BYTES])


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
