"""Made-up caches like DeepSeek V4's, in the memory of `p2pkv.bench.memory`.

Their rows stand for several tokens, lie in planes, or belong to a window. As vLLM lays them out, a block has
all layers of a cache side by side, and a window has blocks for what is in it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from p2pkv.bench.memory import CELL, CLEARED, LAYERS, Memory, value_of
from p2pkv.kv import DENSE, PagedCache, RankCache
from p2pkv.kv.layouts import plane_of
from p2pkv.protocol.handshake import RowFormat
from p2pkv.protocol.messages import Cache, KvGroup

ALIGNMENT = 576
"""What vLLM rounds a page of this model up to, in bytes."""


@dataclass(frozen=True)
class LatentGroup:
    """The caches of one kind, which have one block table.

    Attributes:
        layers: numbers of the layers that have one.
        widths: bytes of a row in each plane.
        tokens: that a row stands for.
        block: tokens in a block.
        window: tokens that a layer looks at; 0: all.
    """

    layers: range
    widths: tuple[int, ...]
    tokens: int
    block: int
    window: int = 0

    @property
    def rows(self) -> int:
        """Of one layer in a block."""
        return self.block // self.tokens

    @property
    def page(self) -> int:
        """Bytes of one layer in a block: vLLM pads them."""
        return -(-self.rows * sum(self.widths) // ALIGNMENT) * ALIGNMENT

    def blocks(self, capacity: int) -> int:
        """In a cache for a prompt of `capacity` tokens; number 0 stands for what has left the window."""
        tokens = min(capacity, self.window + 2 * self.block) if self.window else capacity
        return -(-tokens // self.block) + 1

    def needed(self, tokens: int) -> tuple[int, int]:
        """The tokens that are pushed of such a prompt."""
        row = RowFormat(DENSE, self.tokens, 1, False, self.window, self.block if self.window else 1)
        return row.needed(0, tokens - 1)


_QUARTER, _RARE, _ALL = range(0, LAYERS, 2), range(1, LAYERS, 2), range(LAYERS)
_LATENT = (576, 8)
PARTS = (
    LatentGroup(_QUARTER, _LATENT, tokens=4, block=256),
    LatentGroup(_RARE, _LATENT, tokens=128, block=256),
    LatentGroup(_QUARTER, (128, 4), tokens=4, block=256),  # keys of the indexer
    LatentGroup(_ALL, _LATENT, tokens=1, block=64, window=128),
    LatentGroup(_QUARTER, (8192,), tokens=1, block=4, window=8),  # states of compressors and indexers
    LatentGroup(_QUARTER, (2048,), tokens=1, block=4, window=8),
    LatentGroup(_RARE, (4096,), tokens=1, block=8, window=128),
)


class Latents:
    """How these caches lie in a side's memory; the methods are those of `p2pkv.bench.memory.Layout`."""

    name = "planes"

    @cached_property
    def _planes(self) -> list[tuple[int, int, int]]:
        """Of each KV group: the number of its part, bytes of a row before its plane, and in it."""
        return [
            (number, before, width)
            for number, part in enumerate(PARTS)
            for before, width in zip(accumulate([0, *part.widths[:-1]]), part.widths, strict=True)
        ]

    def rank_cache(self, memory: Memory) -> RankCache:
        """All KV groups, a plane of a part each."""
        bases, groups = self._bases(memory), []
        for number, before, width in self._planes:
            part, row = PARTS[number], sum(PARTS[number].widths)
            stride = len(part.layers) * part.page
            shape = part.blocks(memory.capacity), 1, part.rows, row
            views = [
                memory.flat.as_strided(shape, (stride, row, row, 1), bases[number] + layer * part.page)
                for layer in range(len(part.layers))
            ]
            groups.append(
                PagedCache.from_tensors(
                    [plane_of(view, before, width) for view in views],
                    block_size=part.block,
                    tables=[number] * len(views),
                    tokens_per_row=part.tokens,
                )
            )
        return RankCache(groups, [PARTS[number].layers for number, *_ in self._planes])

    def described(self, cache: RankCache, tp: int = 1) -> Cache:
        """How a Hello describes it."""
        parts = [(PARTS[number], before) for number, before, _ in self._planes]
        groups = (
            KvGroup(
                (group.layers,), 1, group.row_bytes, part.tokens, "uint8", DENSE, f"{self.name} {number}",
                window=part.window, block=part.block if part.window else 1,
            )
            for number, (group, (part, _)) in enumerate(zip(cache.groups, parts, strict=True))
        )  # fmt: skip
        return Cache(tp, tuple(groups))

    def tables(self, tokens: int, capacity: int, side: str) -> tuple[list[int], ...]:
        """The block tables of a prompt, scattered over a cache of `capacity` tokens; others on each side."""
        return tuple(self._table(number, tokens, capacity, side) for number in range(len(PARTS)))

    def nbytes(self, tokens: int) -> int:
        """Bytes of such a prompt that are pushed."""
        spans = [(part, part.needed(tokens)) for part in PARTS]
        return sum(
            (stop - start) // part.tokens * sum(part.widths) * len(part.layers)
            for part, (start, stop) in spans
        )

    def clear(self, memory: Memory, tokens: int) -> None:
        """D: forget the rows that `wrong` looks at."""
        for _, mine, _ in self._sampled(memory, tokens):
            mine.fill_(CLEARED)

    def wrong(self, memory: Memory, tokens: int) -> list[tuple[int, int, int]]:
        """D: sampled (KV group, layer, row) that do not hold what P computed."""
        return [
            place for place, mine, theirs in self._sampled(memory, tokens) if not torch.equal(mine, theirs)
        ]

    def _bases(self, memory: Memory) -> list[int]:
        """Where each part begins."""
        sizes = [part.blocks(memory.capacity) * len(part.layers) * part.page for part in PARTS]
        assert sum(sizes) <= memory.flat.numel(), "these caches are smaller than dense ones of as many tokens"
        return [0, *accumulate(sizes[:-1])]

    def _table(self, number: int, tokens: int, capacity: int, side: str) -> list[int]:
        part = PARTS[number]
        gone, last = part.needed(tokens)[0] // part.block, -(-tokens // part.block)
        blocks = list(range(1, part.blocks(capacity)))
        random.Random(f"{self.name} {number} {side}").shuffle(blocks)
        return [0] * gone + blocks[: last - gone]

    def _sampled(
        self, memory: Memory, tokens: int
    ) -> Iterator[tuple[tuple[int, int, int], torch.Tensor, torch.Tensor]]:
        """(KV group, layer, row) at the ends of what travels, what this side has there, and what P has."""
        bases = self._bases(memory)
        for group, (number, before, width) in enumerate(self._planes):
            part = PARTS[number]
            start, stop = (token // part.tokens for token in part.needed(tokens))
            tables = [self._table(number, tokens, memory.capacity, side) for side in (memory.side, "P")]
            for row in sorted({start, stop - 1}) if stop > start else ():
                block, slot = divmod(row, part.rows)
                for layer in (0, len(part.layers) - 1):
                    inside = layer * part.page + part.rows * before + slot * width
                    mine, theirs = (
                        bases[number] + table[block] * len(part.layers) * part.page + inside
                        for table in tables
                    )
                    yield (group, layer, row), memory.numbers(mine, width), _of_p(memory, theirs, width)


def _of_p(memory: Memory, first: int, nbytes: int) -> torch.Tensor:
    """What P has in these bytes."""
    cells = [divmod(at // (2 * CELL), memory.cells.shape[1]) for at in range(first, first + nbytes, 2)]
    return torch.tensor([value_of(*cell) for cell in cells], dtype=torch.int16)


LATENTS = Latents()
