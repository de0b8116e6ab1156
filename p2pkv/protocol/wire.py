"""The form in which KV travels between two ranks, and what one owes the other in it.

Both sides compute the form from the same two Hellos. Where the caches are alike, their rows travel as
they lie. Where they are not, a row of the wire is the K and V of one (token, head): a dense cache has
such rows, and a packed one can make them if the packing is known.
"""

from __future__ import annotations

from msgspec import Struct

from p2pkv.plan import Edge
from p2pkv.protocol.messages import Cache
from p2pkv.protocol.pieces import Window

DENSE = "dense"
KNOWN_PACKINGS = {
    "page:vec": ("bfloat16", "float16", "float32"),
    "page:vec16": ("bfloat16", "float16", "float32"),
    "page:amx": ("bfloat16",),
}
"""Codecs that can be undone, and the element types with which vLLM uses them in the order that we know; it
packs fp8 in another."""


class Wire(Struct, frozen=True):
    """How rows are arranged between two ranks.

    Attributes:
        codec: "dense", or the codec of both caches.
        unit: tokens in a row.
        row_bytes: bytes of one (layer, head, unit) row.
    """

    codec: str
    unit: int
    row_bytes: int

    def __str__(self) -> str:
        return f"{self.codec} rows of {self.unit} tokens, {self.row_bytes} bytes for each layer and head"


def wire_between(one: Cache, other: Cache) -> Wire | None:
    """The form in which rows travel between two caches; None if there is none. The order does not matter."""
    mine, theirs = _as_it_lies(one), _as_it_lies(other)
    if one.dtype != other.dtype:
        return None
    if mine == theirs:
        return mine
    if not (_can_be_dense(one) and _can_be_dense(other)):
        return None
    dense = Wire(DENSE, 1, token_bytes(one))
    return dense if dense.row_bytes == token_bytes(other) else None


def token_bytes(cache: Cache) -> int:
    """Bytes of the K and V of one (layer, head, token)."""
    return cache.row_bytes // cache.unit_tokens


def _as_it_lies(cache: Cache) -> Wire:
    return Wire(cache.codec, cache.unit_tokens, cache.row_bytes)


def _can_be_dense(cache: Cache) -> bool:
    known = cache.codec == DENSE or cache.dtype in KNOWN_PACKINGS.get(cache.codec, ())
    return known and cache.row_bytes % cache.unit_tokens == 0


class Debt(Struct, frozen=True):
    """What one rank of P owes one rank of D: a rectangle of the cache, in the form agreed on."""

    edge: Edge
    wire: Wire

    def window(self, start: int, stop: int) -> Window:
        """The part of it that holds tokens [start, stop).

        Raises RemoteProtocolError if `start` is inside a row of the wire.
        """
        layers, row = self.edge.layers, len(self.edge.heads) * self.wire.row_bytes
        return Window(layers.start, layers.stop, start, stop, self.wire.unit, row)
