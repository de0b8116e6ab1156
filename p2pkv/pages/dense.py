"""A cache as the wire sees it: as it lies, or, where pages are packed, token by token.

Only CPU attention packs pages, so the packing is done and undone in CPU memory, with numpy, in the
calling thread (copy.py says why), a batch of layers at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from p2pkv.pages.codecs import DENSE, check_page, pack_into, unpack_into
from p2pkv.pages.geometry import BlockTables, PagedCache, check_buffer
from p2pkv.pages.rows import Interval

BATCH_BYTES = 1 << 20
"""Packed pages that are held beside the cache while they are rearranged: about what a core's cache holds."""

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Rectangles(Protocol):
    """What moves rectangles [layer, unit, head, row_bytes]; PagedCache describes the methods."""

    @property
    def unit_tokens(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def nbytes(self, layers: int, start: int, stop: int, heads: int) -> int: ...

    def gather(
        self, out: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> None: ...

    def scatter(
        self, src: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> None: ...


def seen_as(cache: PagedCache, codec: str) -> Rectangles:
    """The cache with its rows arranged by `codec`: its own, or "dense".

    Raises ValueError, with a sentence, for another codec, or pages that cannot be undone.
    """
    if codec == cache.codec:
        return cache
    if codec != DENSE:
        raise ValueError(f"a cache of codec {cache.codec} can travel as it is or {DENSE}, not as {codec}")
    return DenseView(cache)


@dataclass(frozen=True, eq=False)
class _Part:
    """Some layers and tokens of a rectangle whose packed pages are rearranged together.

    Attributes:
        layers, pages: what to read or write in the cache; `pages` are tokens, in whole pages.
        inside: which tokens of `pages` are meant; fewer than all only where `pages` is one page.
        raw: uint8, room for the packed pages.
        packed: the same memory, elements [L, U, H, N * C].
        wire: the part's elements in the caller's buffer, [L, tokens, H, C].
    """

    layers: Interval
    pages: Interval
    inside: Interval
    raw: torch.Tensor
    packed: NDArray[Any]
    wire: NDArray[Any]

    @property
    def whole(self) -> bool:
        return self.inside[1] - self.inside[0] == self.pages[1] - self.pages[0]

    def by_page(self, page_tokens: int) -> NDArray[Any]:
        """`wire`, if the pages are whole, as [L, U, H, N, C]."""
        layers, tokens, heads, content = self.wire.shape
        return self.wire.reshape(layers, tokens // page_tokens, page_tokens, heads, content).swapaxes(2, 3)


class DenseView:
    """A cache with packed pages, token by token: a row is the K and V of one (layer, token, head).

    Scatter fills a part of a page by reading, changing and writing it, so nobody else may write to the
    pages that its tokens lie in meanwhile. The rest is as in PagedCache.

    Raises ValueError for pages that cannot be undone.
    """

    def __init__(self, cache: PagedCache) -> None:
        if cache.device.type != "cpu":
            raise ValueError(f"pages of codec {cache.codec} are undone on a CPU only, not on {cache.device}")
        self.unit_tokens = 1
        self.row_bytes = cache.row_bytes // cache.unit_tokens
        self._cache = cache
        self._tokens = cache.unit_tokens
        self._content = self.row_bytes // cache.element_bytes
        self._bits = _BITS[cache.element_bytes]
        check_page(cache.codec, self._tokens, self._content, cache.element_bytes)

    def nbytes(self, layers: int, start: int, stop: int, heads: int) -> int:
        """Bytes on the wire of `layers` layers x tokens [start, stop) x `heads` heads."""
        return layers * (stop - start) * heads * self.row_bytes

    def gather(
        self, out: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> None:
        """Copy a rectangle from the pages to `out`; arguments and errors are PagedCache's."""
        codec = self._cache.codec
        for part in self._parts(out, layers, tokens, heads, blocks):
            self._cache.gather(part.raw, part.layers, part.pages, heads, blocks)
            if part.whole:
                unpack_into(part.by_page(self._tokens), part.packed, codec)
            else:
                part.wire[...] = self._unpacked(part)[:, :, slice(*part.inside)].swapaxes(1, 2)

    def scatter(
        self, src: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> None:
        """Copy a rectangle from `src` to the pages; tokens beside it keep what they hold.

        Nothing has been written if this raises ValueError.
        """
        codec = self._cache.codec
        for part in self._parts(src, layers, tokens, heads, blocks):
            if part.whole:
                pack_into(part.packed, part.by_page(self._tokens), codec)
            else:
                self._cache.gather(part.raw, part.layers, part.pages, heads, blocks)
                page = self._unpacked(part)
                page[:, :, slice(*part.inside)] = part.wire.swapaxes(1, 2)
                pack_into(part.packed[:, 0], page, codec)
            self._cache.scatter(part.raw, part.layers, part.pages, heads, blocks)

    def _unpacked(self, part: _Part) -> NDArray[Any]:
        """The tokens of a part that is one page, [L, H, N, C]."""
        layers, _, heads, _ = part.packed.shape
        page = np.empty((layers, heads, self._tokens, self._content), self._bits)
        unpack_into(page, part.packed[:, 0], self._cache.codec)
        return page

    def _parts(
        self, buffer: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> Iterator[_Part]:
        """Everything is checked before the first part comes."""
        if not 0 <= tokens[0] <= tokens[1]:
            raise ValueError(f"tokens [{tokens[0]}, {tokens[1]}) are not an interval of a prompt")
        first = tokens[0] // self._tokens * self._tokens
        self._cache.check(layers, (first, tokens[1] if tokens[0] < tokens[1] else first), heads, blocks)
        count, beside = layers[1] - layers[0], heads[1] - heads[0]
        check_buffer(buffer, self.nbytes(count, *tokens, beside), self._cache.device)
        if buffer.numel() == 0:
            return
        # Rows lie one after the other, but not always at a multiple of an element's size: numpy minds not.
        wire = buffer.numpy().view(self._bits).reshape(count, -1, beside, self._content)
        for start, stop in _cut(tokens, self._tokens):
            pages = start // self._tokens * self._tokens, -(-stop // self._tokens) * self._tokens
            units = (pages[1] - pages[0]) // self._tokens
            step = max(1, BATCH_BYTES // (units * beside * self._cache.row_bytes))
            for layer in range(0, count, step):
                some = min(step, count - layer)
                raw = np.empty(some * units * beside * self._cache.row_bytes, np.uint8)
                yield _Part(
                    (layers[0] + layer, layers[0] + layer + some),
                    pages,
                    (start - pages[0], stop - pages[0]),
                    torch.from_numpy(raw),
                    raw.view(self._bits).reshape(some, units, beside, -1),
                    wire[layer : layer + some, start - tokens[0] : stop - tokens[0]],
                )


def _cut(tokens: Interval, page: int) -> list[Interval]:
    """An interval as the end of a page, whole pages, and the beginning of a page; empty ones left out."""
    start, stop = tokens
    first, last = -(-start // page) * page, stop // page * page
    cuts = [start, first, last, stop] if first <= last else [start, stop]
    return [(one, two) for one, two in pairwise(cuts) if one < two]
