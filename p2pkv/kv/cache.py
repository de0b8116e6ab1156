"""The KV cache of one rank, as the rest of p2pkv sees it: rectangles of rows in, rectangles out.

A cache has one KV group or several; the layers of a group are alike. A group has a row for each unit, or one
for a whole request: then its only unit is number 0, and its block table names the block that holds it.

A *row* is what moves undivided: the bytes of one (layer, unit, head). A unit is one token; or the tokens
that one row stands for, where a model keeps fewer rows than tokens; or, if a kernel packs tokens together (a
page codec), all tokens of one kernel block. A *rectangle* is [layer, unit, head, row_bytes], dense, uint8,
whatever the memory's own layout. `seen_as` shows packed pages token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from p2pkv.device import Fence, make_recorder
from p2pkv.kv import layouts
from p2pkv.kv.checksum import Checksum
from p2pkv.kv.copiers import Copier, copier_of
from p2pkv.kv.layouts import Bounds, Cut, Index, LayerPages, Span, Tokens
from p2pkv.page_packings import DENSE, is_paged, packing_of

BlockTables = Sequence[Sequence[int]]

PlacedCut = tuple[Span, Cut, tuple[int, int]]
"""The layers of a span in a rectangle, and the bytes of the rectangle's buffer that are theirs."""

MAX_KEPT = 64
"""Parts of one request's block tables that are kept as arrays."""

BATCH_BYTES = 1 << 20
"""Packed pages that are held beside the cache while they are rearranged: about what a core's cache holds."""

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class CachedTables(tuple[Sequence[int], ...]):
    """Block tables that do not change any more: what was looked up in them is kept."""

    @cached_property
    def cuts(self) -> dict[tuple[Any, ...], list[PlacedCut]]:
        """What `prepare` has found out about rectangles that are still to be copied."""
        return {}

    @cached_property
    def cached(self) -> dict[tuple[int, int, int, int], Index]:
        """Checked block ids, by number of the table, first and last entry, and blocks of the cache."""
        return {}


@dataclass(eq=False)
class PagedCache:
    """One KV group of one rank; gathers rectangles out of its layers and scatters them into them.

    Attributes:
        layers, heads: of the group, on this rank.
        blocks: logical blocks of each layer, of `block_size` tokens.
        unit_tokens: tokens in a row: if dense, those that it stands for, mostly 1; those of a kernel block
            for a page codec.
        element_bytes: bytes of a number in a row.
        codec: how the bytes of a row are arranged.
        tables: the block table of each layer, by number.
        digest_name: the algorithm of `digest`; it depends on the device.

    Calls from several threads are safe as long as their rectangles do not overlap.
    """

    pages: InitVar[list[LayerPages]]
    copier: Copier
    _: KW_ONLY
    heads: int
    block_size: int
    unit_tokens: int
    row_bytes: int
    element_bytes: int
    codec: str
    device: torch.device

    def __post_init__(self, pages: list[LayerPages]) -> None:
        self.layers = len(pages)
        self.blocks = min((page.blocks for page in pages), default=0)
        self.tables = tuple(page.table for page in pages)
        self.digest_name = self.copier.digest_name
        self._spans = self.copier.spans
        self._record = make_recorder(self.device)

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        *,
        block_size: int,
        codec: str = DENSE,
        tables: Sequence[int] | None = None,
        tokens_per_row: int = 1,
    ) -> PagedCache:
        """The cache whose layer i is `tensors[i]`, of logical shape [B, H, N, C] and any strides.

        B counts kernel blocks of N rows, H the KV heads of this rank; C is one row of one head, mostly the K
        and V of a token, and lies together in memory. Raises ValueError for others.

        Args:
            block_size: tokens in a logical block, a multiple of those of N rows.
            tables: each layer's block table, by number; all 0 by default.
            tokens_per_row: tokens that a row stands for.
        """
        tables = [0] * len(tensors) if tables is None else tables
        if not tensors or len(tables) != len(tensors):
            raise ValueError(
                f"{len(tensors)} KV layers and {len(tables)} block tables: expected layers, each with a table"
            )
        if min(tables) < 0:
            raise ValueError(f"block table number {min(tables)}: block tables are numbered from 0")
        paged = is_paged(codec)
        if tokens_per_row < 1 or block_size % tokens_per_row or (paged and tokens_per_row > 1):
            raise ValueError(
                f"rows of {tokens_per_row} tokens, blocks of {block_size} and codec {codec}: expected dense "
                "rows, and whole rows in each block"
            )
        block_rows = block_size // tokens_per_row
        for number, tensor in enumerate(tensors):
            layouts.check_layer(number, tensor, tensors[0], block_rows, paged)
        layers = zip(tensors, tables, strict=True)
        pages = [layouts.pages_of(tensor, table, block_rows, paged) for tensor, table in layers]
        heads, rows, content = tensors[0].shape[-3:]
        unit_tokens = rows if paged else tokens_per_row
        return cls(
            pages,
            copier_of(pages, tensors),
            heads=heads,
            block_size=block_size,
            unit_tokens=unit_tokens,
            row_bytes=(rows if paged else 1) * content * tensors[0].element_size(),
            element_bytes=tensors[0].element_size(),
            codec=codec,
            device=tensors[0].device,
        )

    @classmethod
    def without_layers(cls, unit_tokens: int, row_bytes: int, codec: str, device: torch.device) -> PagedCache:
        """A KV group of which this rank has no layers: nothing is ever read from it or written to it."""
        return cls(
            [],
            copier_of([], []),
            heads=1,
            block_size=unit_tokens,
            unit_tokens=unit_tokens,
            row_bytes=row_bytes,
            element_bytes=1,
            codec=codec,
            device=device,
        )

    def __str__(self) -> str:
        rows = f"rows of {self.row_bytes} bytes, codec {self.codec}"
        return f"{self.layers} layers, {self.heads} KV heads, {rows}"

    def nbytes(self, layers: int, start: int, stop: int, heads: int) -> int:
        """Bytes on the wire of tokens [start, stop). Raises ValueError if `start` is inside a unit."""
        first, last = self._units((start, stop))
        return layers * (last - first) * heads * self.row_bytes

    def gather(
        self, out: torch.Tensor, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: BlockTables
    ) -> None:
        """Copy a rectangle from the pages to `out`. On CUDA the copy is queued on the current stream; on a
        CPU it has ended on return, and the GIL is free while it runs.

        Args:
            out: uint8 [nbytes], contiguous, on the cache's device.
            layers, tokens, heads: half-open intervals, counted on this rank. Where a row is one token,
                `tokens` may also be the numbers of some tokens, in their order.
            blocks: the request's block tables, logical block ids; token t is in blocks[n][t // block_size].

        Raises ValueError for a rectangle outside the cache, a start inside a unit, a wrong `out`, a block
        table that ends too early or names a block that does not exist.
        """
        for span, cut, part in self.parts(out, layers, tokens, heads, blocks):
            self.copier.take(span, cut, part)

    def scatter(
        self, src: torch.Tensor, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: BlockTables
    ) -> None:
        """The reverse; see `gather`. Nothing has been written if it raises ValueError."""
        for span, cut, part in self.parts(src, layers, tokens, heads, blocks):
            self.copier.put(span, cut, part)

    def digest(self, buffer: torch.Tensor) -> Checksum:
        """The checksum of uint8 [n] on the cache's device: on CUDA queued on the current stream, on a CPU
        known on return, and the GIL is free while it is computed."""
        return self.copier.digest(buffer)

    def fence(self) -> Fence:
        """A fence behind all copies that the calling thread has queued on its current stream."""
        return self._record()

    def prepare(self, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: CachedTables) -> None:
        """A gather or scatter of this rectangle will come: do what needs no buffer. Raises as they do."""
        if isinstance(tokens, tuple):
            cuts = self._cuts(layers, tokens, heads, blocks)
            for span, cut, _ in cuts:
                self.copier.prepare(span, cut)
            if len(blocks.cuts) >= MAX_KEPT:
                blocks.cuts.clear()
            blocks.cuts[id(self), layers, tokens, heads] = cuts

    def parts(
        self, buffer: torch.Tensor, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: BlockTables
    ) -> list[tuple[Span, Cut, torch.Tensor]]:
        """The rectangle, cut by spans of layers: span, cut, its part of the buffer."""
        cuts = None
        if isinstance(blocks, CachedTables) and blocks.cuts and isinstance(tokens, tuple):
            cuts = blocks.cuts.pop((id(self), layers, tokens, heads), None)
        if cuts is None:
            cuts = self._cuts(layers, tokens, heads, blocks)
        check_buffer(buffer, cuts[-1][2][1] if cuts else 0, self.device)
        if len(cuts) == 1:
            span, cut, _ = cuts[0]
            return [(span, cut, buffer)]
        return [(span, cut, buffer[start:stop]) for span, cut, (start, stop) in cuts]

    def _cuts(self, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: BlockTables) -> list[PlacedCut]:
        """The spans of a rectangle's layers, one after the other."""
        _check_interval("layers", layers, self.layers)
        _check_interval("heads", heads, self.heads)
        positions = None
        if not isinstance(tokens, tuple):
            positions, tokens = self._positions(tokens)
        units = self._units(tokens)
        count = units[1] - units[0] if positions is None else len(positions)
        layer_bytes = count * (heads[1] - heads[0]) * self.row_bytes
        if not layer_bytes:
            return []
        if not isinstance(blocks, CachedTables):
            blocks = CachedTables(blocks)  # layers of separate storages mostly share one
        runs = layouts.Runs(positions) if positions is not None else None
        found: list[PlacedCut] = []
        for span in self._spans:
            some = max(layers[0], span.first), min(layers[1], span.stop)
            if some[0] >= some[1]:
                continue
            cut = Cut(some, units, heads, self.row_bytes, self._table(span, units, blocks))
            if runs is not None:
                span, cut = runs.of(span, cut)
            place = (some[0] - layers[0]) * layer_bytes, (some[1] - layers[0]) * layer_bytes
            found.append((span, cut, place))
        return found

    def _positions(self, tokens: Index) -> tuple[Index | None, Bounds]:
        """Tokens that may have gaps, and the interval that their blocks cover; None if they have no gaps."""
        if self.unit_tokens > 1:
            raise ValueError(
                f"rows of {self.unit_tokens} tokens cannot be divided over context-parallel ranks"
            )
        if not len(tokens):
            return None, (0, 0)
        start, stop = int(tokens[0]), int(tokens[-1]) + 1
        return (None, (start, stop)) if stop - start == len(tokens) else (tokens, (0, stop))

    def _units(self, tokens: Bounds) -> Bounds:
        start, stop = tokens
        if not 0 <= start <= stop:
            raise ValueError(f"tokens [{start}, {stop}) are not an interval of a prompt")
        if start % self.unit_tokens:
            raise ValueError(
                f"tokens [{start}, {stop}) start inside a row: a {self.codec} row of this cache holds "
                f"{self.unit_tokens} tokens, so the start must be a multiple of {self.unit_tokens}"
            )
        return start // self.unit_tokens, -(-stop // self.unit_tokens)

    def _table(self, span: Span, units: Bounds, blocks: BlockTables) -> Index:
        """The checked block ids that `units` lie in, int64."""
        pages = span.pages
        number, whole = pages.table, pages.block_units
        first, stop = units[0] // whole, -(-units[1] // whole)
        place = number, first, stop, pages.blocks
        cached = blocks.cached if isinstance(blocks, CachedTables) else {}
        if (known := cached.get(place)) is not None:
            return known
        if number >= len(blocks):
            raise ValueError(f"{len(blocks)} block tables given, but layer {span.first} uses number {number}")
        if len(blocks[number]) < stop:
            raise ValueError(
                f"block table {number} has {len(blocks[number])} blocks of {self.block_size} tokens; "
                f"tokens up to {units[1] * self.unit_tokens} need {stop}"
            )
        table = np.asarray(blocks[number][first:stop], dtype=np.int64)
        if int(table.min()) < 0 or int(table.max()) >= pages.blocks:
            wrong = next(int(block) for block in table if not 0 <= block < pages.blocks)
            raise ValueError(f"block table {number} names block {wrong}; the cache has {pages.blocks} blocks")
        if len(cached) >= MAX_KEPT:
            cached.clear()
        cached[place] = table
        return table


def check_buffer(buffer: torch.Tensor, nbytes: int, device: torch.device) -> None:
    """Raises ValueError unless `buffer` can hold a rectangle of so many bytes."""
    fits = buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
    if not fits or buffer.numel() != nbytes or buffer.device != device:
        raise ValueError(
            f"this rectangle needs a contiguous uint8 buffer of [{nbytes}] on {device}, "
            f"got {buffer.dtype} {list(buffer.shape)} on {buffer.device}"
        )


def _check_interval(what: str, interval: Bounds, size: int) -> None:
    if not 0 <= interval[0] <= interval[1] <= size:
        raise ValueError(f"{what} [{interval[0]}, {interval[1]}) are not within the cache's [0, {size})")


# The cache as the wire sees it: as it lies, or, where pages are packed, token by token. Only CPU attention
# packs pages. So packing is done and undone in CPU memory, with numpy, in the calling thread (`copiers` has
# why), a batch of layers at a time.


def seen_as(cache: PagedCache, codec: str) -> Rectangles:
    """The cache with its rows arranged by `codec`: its own, or "dense"; as it is if it has no layers.

    Raises ValueError, with a sentence, for another codec, or pages that cannot be undone.
    """
    if codec == cache.codec or not cache.layers:
        return cache
    if codec != DENSE:
        raise ValueError(f"a cache of codec {cache.codec} can travel as it is or {DENSE}, not as {codec}")
    return DenseView(cache)


@dataclass(frozen=True, eq=False)
class _Part:
    """Some layers and tokens of a rectangle whose packed pages are rearranged together."""

    layers: Bounds
    pages: Bounds
    """Tokens, in whole pages."""
    inside: Bounds
    """Which tokens of `pages` are meant; fewer than all only where that is one page."""
    raw: torch.Tensor
    """Uint8, room for the packed pages."""
    packed: NDArray[Any]
    """The same memory, elements [L, U, H, N * C]."""
    wire: NDArray[Any]
    """The part's elements in the caller's buffer, [L, tokens, H, C]."""

    @property
    def whole(self) -> bool:
        return self.inside[1] - self.inside[0] == self.pages[1] - self.pages[0]

    def by_page(self, page_tokens: int) -> NDArray[Any]:
        """`wire`, if the pages are whole, as [L, U, H, N, C]."""
        layers, tokens, heads, content = self.wire.shape
        return self.wire.reshape(layers, tokens // page_tokens, page_tokens, heads, content).swapaxes(2, 3)


class DenseView:
    """A cache with packed pages, token by token: a row is one (layer, token, head). See PagedCache.

    Scatter fills a part of a page by reading, changing and writing it, so nothing else may write to the
    pages that its tokens lie in meanwhile. Raises ValueError for pages that cannot be undone.
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
        self._packing = packing_of(cache.codec)
        self._packing.check(self._tokens, self._content, cache.element_bytes)

    def nbytes(self, layers: int, start: int, stop: int, heads: int) -> int:
        return layers * (stop - start) * heads * self.row_bytes

    def gather(
        self, out: torch.Tensor, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: BlockTables
    ) -> None:
        for part in self.parts(out, layers, tokens, heads, blocks):
            self._cache.gather(part.raw, part.layers, part.pages, heads, blocks)
            if part.whole:
                self._packing.unpack(part.by_page(self._tokens), part.packed)
            else:
                part.wire[...] = self._unpacked(part)[:, :, slice(*part.inside)].swapaxes(1, 2)

    def scatter(
        self, src: torch.Tensor, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: BlockTables
    ) -> None:
        """Tokens beside the rectangle keep what they hold."""
        for part in self.parts(src, layers, tokens, heads, blocks):
            if part.whole:
                self._packing.pack(part.packed, part.by_page(self._tokens))
            else:
                self._cache.gather(part.raw, part.layers, part.pages, heads, blocks)
                page = self._unpacked(part)
                page[:, :, slice(*part.inside)] = part.wire.swapaxes(1, 2)
                self._packing.pack(part.packed[:, 0], page)
            self._cache.scatter(part.raw, part.layers, part.pages, heads, blocks)

    def _unpacked(self, part: _Part) -> NDArray[Any]:
        """The tokens of a part that is one page, [L, H, N, C]."""
        layers, _, heads, _ = part.packed.shape
        page = np.empty((layers, heads, self._tokens, self._content), self._bits)
        self._packing.unpack(page, part.packed[:, 0])
        return page

    def parts(
        self, buffer: torch.Tensor, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: BlockTables
    ) -> Iterator[_Part]:
        """Everything is checked before the first part comes."""
        if not isinstance(tokens, tuple):
            raise ValueError("packed pages cannot be divided over context-parallel ranks")
        if not 0 <= tokens[0] <= tokens[1]:
            raise ValueError(f"tokens [{tokens[0]}, {tokens[1]}) are not an interval of a prompt")
        first = tokens[0] // self._tokens * self._tokens
        self._cache._cuts(layers, (first, tokens[1] if tokens[0] < tokens[1] else first), heads, blocks)
        count, beside = layers[1] - layers[0], heads[1] - heads[0]
        check_buffer(buffer, self.nbytes(count, *tokens, beside), self._cache.device)
        if buffer.numel() == 0:
            return
        # Rows lie one after the other, but not always at a multiple of an element's size: numpy minds not.
        wire = buffer.numpy().view(self._bits).reshape(count, -1, beside, self._content)
        for start, stop in layouts.split_at_pages(tokens, self._tokens):
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

    def prepare(self, layers: Bounds, tokens: Tokens, heads: Bounds, blocks: CachedTables) -> None:
        """Does nothing: pages are rearranged only with the buffer."""


Rectangles = PagedCache | DenseView
"""What moves rectangles [layer, unit, head, row_bytes]."""


class RankCache:
    """All KV groups of one rank, in the order in which its Hello names them. All lie on one device.
    What is not described here is PagedCache's.

    Attributes:
        layers: for each group, the numbers of its layers among all layers of this rank, in order. Two groups
            may share a layer, as the two states of a recurrent layer do.
    """

    def __init__(self, groups: Sequence[PagedCache], layers: Sequence[Sequence[int]] | None = None) -> None:
        """`layers`: by default the layers of one group follow those of the group before it.

        Raises ValueError for groups on several devices, or numbers that are not those of the groups' layers.
        """
        if layers is None:
            stops = [0, *accumulate(group.layers for group in groups)]
            layers = [range(start, stop) for start, stop in pairwise(stops)]
        if not groups or [len(numbers) for numbers in layers] != [group.layers for group in groups]:
            raise ValueError(
                f"KV groups of {[group.layers for group in groups]} layers, and numbers for "
                f"{[len(numbers) for numbers in layers]}: expected groups, and a number for each layer"
            )
        if len({group.device for group in groups}) > 1:
            raise ValueError(f"KV groups on {[str(group.device) for group in groups]}: expected one device")
        self.groups = tuple(groups)
        self.layers = tuple(layers)
        self.layer_count = len(set(chain(*self.layers)))
        self.device = groups[0].device
        some = next((group for group in groups if group.layers), groups[0])  # that this rank has layers of
        self.digest_name, self.digest, self.fence = some.digest_name, some.digest, some.fence

    def seen_as(self, codecs: Sequence[str]) -> tuple[Rectangles, ...]:
        """Each group with its rows arranged by the codec of its number. Raises ValueError; see `seen_as`."""
        return tuple(seen_as(group, codec) for group, codec in zip(self.groups, codecs, strict=True))

    def nbytes(self, tokens: int) -> int:
        """Bytes of so many tokens on this rank, as if every window saw all of them."""
        # A row of a whole request is a block of its own.
        units = ((each, 1 if each.block_size == 1 else tokens // each.unit_tokens) for each in self.groups)
        return sum(each.layers * each.heads * each.row_bytes * count for each, count in units)

    def warm_up(self) -> None:
        """Returns when it is done, since the engine's stream has no order with the calling thread's."""
        for group in self.groups:
            group.copier.warm_up()
        self.fence().wait()
