"""Made-up KV memory of Llama-8B's shape, as a GPU and a CPU lay it out. It needs torch alone.

Both layouts are views of the same memory, in cells of 64 KiB: a dense block of 16 tokens, or the page of 128
tokens of one head. All elements of a cell of P have one value, so D can find out where what it got came from.

Shape legend: L layers, B blocks, H KV heads, N tokens in a block, C elements of K and V of one head.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from p2pkv.kv import DENSE, PagedCache, RankCache, cpu_codec

if TYPE_CHECKING:
    from p2pkv.protocol.messages import Cache

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
DTYPE = torch.bfloat16
CONTENT = 2 * HEAD_DIM
TOKEN_BYTES = LAYERS * HEADS * CONTENT * 2
PAGE_TOKENS = 128
CELL = PAGE_TOKENS * CONTENT
CLEARED = -1
"""What D's memory holds where nothing has come."""


@dataclass(frozen=True)
class Layout:
    """How a cache lies in memory.

    Attributes:
        block: tokens in a block.
        cells: cells in a block.
    """

    name: str
    codec: str
    block: int
    cells: int

    def row(self, block: int, token: int, head: int, heads: int = HEADS) -> int:
        """Which row of C elements holds K and V of (token, head), in a layer with so many heads."""
        inside = token % self.block
        if self.codec == DENSE:
            return (block * self.block + inside) * heads + head
        return (block * heads + head) * self.block + inside

    def rank_cache(self, memory: Memory) -> RankCache:
        """The cache, of one KV group."""
        return RankCache([memory.cache(self)])

    def described(self, cache: RankCache, tp: int = 1) -> Cache:
        """How a Hello describes it, on each of `tp` ranks. Only this needs msgspec."""
        from p2pkv.protocol.messages import Cache, KvGroup

        (only,) = cache.groups
        group = KvGroup(
            layers=(LAYERS,),
            heads=HEADS,
            row_bytes=only.row_bytes,
            unit_tokens=only.unit_tokens,
            dtype=str(DTYPE).removeprefix("torch."),
            codec=only.codec,
            layer_names=self.name,
        )
        return Cache(tp, (group,))

    def clear(self, memory: Memory, tokens: int) -> None:
        """D: forget the rows that `wrong` looks at."""
        memory.clear(self, tokens)

    def wrong(self, memory: Memory, tokens: int) -> list[tuple[int, int, int]]:
        """D: sampled (layer, token, own head) that do not hold what P computed."""
        return memory.wrong(self, tokens)

    def tables(self, tokens: int, capacity: int, side: str) -> tuple[list[int], ...]:
        """The only block table."""
        return (self.table(tokens, capacity, side),)

    def table(self, tokens: int, capacity: int, side: str) -> list[int]:
        """The blocks of a prompt, scattered over a cache of `capacity` tokens; other ones on each side."""
        blocks = list(range(capacity // self.block))
        random.Random(f"{self.name} {side}").shuffle(blocks)
        return blocks[: -(-tokens // self.block)]

    def nbytes(self, tokens: int) -> int:
        """Bytes of such a prompt that are pushed: all tokens but the last, in whole pages where packed."""
        unit = 1 if self.codec == DENSE else self.block
        return -(-(tokens - 1) // unit) * unit * TOKEN_BYTES


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("dense", DENSE, block=16, cells=1),
        Layout("pages", cpu_codec("vec16"), block=PAGE_TOKENS, cells=HEADS),
    )
}


def capacity_for(tokens: int) -> int:
    """Tokens of a cache that holds such a prompt: whole pages, and one to spare."""
    return (-(-tokens // PAGE_TOKENS) + 1) * PAGE_TOKENS


class Memory:
    """One side's KV memory for `capacity` tokens, all of it touched; P's is filled with its values."""

    def __init__(self, capacity: int, side: str, device: str = "cpu", rank: int = 0, tp: int = 1) -> None:
        """`rank` of `tp`: which of the heads it holds; `tp` divides HEADS, and is 1 for P."""
        self.capacity = capacity
        self.side = side
        self.heads = HEADS // tp
        self._first_head = rank * self.heads
        shape = (LAYERS, capacity * self.heads // PAGE_TOKENS, CELL)
        self.cells = torch.empty(shape, dtype=torch.int16, device=device)
        if side == "P":
            for layer in range(LAYERS):
                for cell in range(self.cells.shape[1]):
                    self.cells[layer, cell] = value_of(layer, cell)
        else:
            self.cells.fill_(CLEARED)

    @property
    def flat(self) -> torch.Tensor:
        """uint8, all of it."""
        return self.cells.view(torch.uint8).view(-1)

    def numbers(self, first: int, nbytes: int) -> torch.Tensor:
        """int16: what lies in these bytes."""
        return self.cells.view(-1)[first // 2 : (first + nbytes) // 2]

    def cache(self, layout: Layout) -> PagedCache:
        """The cache of this layout, [B, H, N, C] for each layer."""
        if layout.codec == DENSE:
            shape = (LAYERS, -1, layout.block, self.heads, CONTENT)
            layers = self.cells.view(DTYPE).view(shape).transpose(2, 3)
        else:
            layers = self.cells.view(DTYPE).view(LAYERS, -1, self.heads, layout.block, CONTENT)
        return PagedCache.from_tensors(layers.unbind(0), block_size=layout.block, codec=layout.codec)

    def clear(self, layout: Layout, tokens: int) -> None:
        """D: forget the rows that `wrong` looks at."""
        table = layout.table(tokens, self.capacity, self.side)
        for layer, token, head in _samples(tokens, self.heads):
            self._row(layout, table, layer, token, head).fill_(CLEARED)

    def wrong(self, layout: Layout, tokens: int) -> list[tuple[int, int, int]]:
        """D: sampled (layer, token, own head) that do not hold what P computed."""
        mine = layout.table(tokens, self.capacity, self.side)
        theirs = layout.table(tokens, self.capacity, "P")
        wrong = []
        for layer, token, head in _samples(tokens, self.heads):
            row = layout.row(theirs[token // layout.block], token, self._first_head + head)
            value = value_of(layer, row // PAGE_TOKENS)
            if not bool((self._row(layout, mine, layer, token, head) == value).all()):
                wrong.append((layer, token, head))
        return wrong

    def _row(self, layout: Layout, table: list[int], layer: int, token: int, head: int) -> torch.Tensor:
        row = layout.row(table[token // layout.block], token, head, self.heads)
        return self.cells[layer].view(-1, CONTENT)[row]


def value_of(layer: int, cell: int) -> int:
    """What all elements of a cell of P are."""
    return (layer * 7919 + cell * 31 + 17) % 32000


def _samples(tokens: int, heads: int) -> list[tuple[int, int, int]]:
    """(layer, token, head) at the corners and in the middle of what travels."""
    layers, ends = (0, LAYERS // 2, LAYERS - 1), sorted({0, heads - 1})
    places = sorted({0, (tokens - 1) // 2, tokens - 2})
    return [(layer, token, head) for layer in layers for token in places for head in ends]
