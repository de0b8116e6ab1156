"""Random paged memory, and its reference: every row of a rectangle found by itself, the slow way."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from p2pkv.kv import PagedCache
from p2pkv.kv.layouts import Index, Tokens

# The layouts vLLM knows, as orders of the logical axes [L, B, H, N, C], outermost first.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
TOKENS_TOGETHER = [name for name in LAYOUTS if name.endswith("NC")]

Interval = tuple[int, int]

POISON = 0xA5


@dataclass
class Memory:
    """Registered layers made as views of one flat buffer full of random bytes, as vLLM makes them."""

    layout: str
    layers: int
    blocks: int
    block_size: int
    ratio: int
    heads: int
    content: int
    dtype: torch.dtype
    codec: str
    offset: int  # elements before the first page
    padding: int  # elements after each page of the innermost of L and B
    groups: tuple[int, ...]
    seed: int
    per_row: int = 1  # tokens that a row stands for
    places: tuple[int, ...] = ()  # of the registered layers among those that lie there; (): all
    flat: torch.Tensor = field(init=False)
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        strides, step = [0] * 5, 1
        order = LAYOUTS[self.layout]
        innermost = max(order.index(0), order.index(1))
        for place in reversed(range(5)):
            step += self.padding if place == innermost else 0
            strides[order[place]] = step
            step *= self.shape[order[place]]
        size = torch.empty(0, dtype=self.dtype).element_size()
        noise = torch.Generator().manual_seed(self.seed)
        self.flat = torch.randint(0, 256, ((self.offset + step) * size,), dtype=torch.uint8, generator=noise)
        self.strides = tuple(strides)

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.kernel_tokens // self.per_row
        there = max(self.places, default=self.layers - 1) + 1
        return (there, self.blocks * self.ratio, self.heads, rows, self.content)

    @property
    def kernel_tokens(self) -> int:
        return self.block_size // self.ratio

    @property
    def unit_tokens(self) -> int:
        return self.per_row if self.codec == "dense" else self.kernel_tokens

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """[L, B, H, N, C] of a buffer like `flat`."""
        return torch.as_strided(flat.view(self.dtype), self.shape, self.strides, self.offset)

    def registered(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """[B, H, N, C] of each registered layer."""
        there = self.view(flat).unbind(0)
        return [there[place] for place in self.places or range(self.layers)]

    def cache(self, flat: torch.Tensor) -> PagedCache:
        return PagedCache.from_tensors(
            self.registered(flat),
            block_size=self.block_size,
            codec=self.codec,
            tables=self.groups,
            tokens_per_row=self.per_row,
        )

    def tables(self, tokens: int, seed: int) -> list[list[int]]:
        order = torch.Generator().manual_seed(seed)
        count = -(-tokens // self.block_size)
        return [
            torch.randperm(self.blocks, generator=order)[:count].tolist() for _ in range(max(self.groups) + 1)
        ]

    def rows(
        self,
        flat: torch.Tensor,
        layers: tuple[int, int],
        tokens: Tokens,
        heads: tuple[int, int],
        tables: list[list[int]],
    ) -> Iterator[torch.Tensor]:
        """The bytes of each row of a rectangle, in the wire's order, as views of `flat`."""
        numbers = range(*tokens, self.unit_tokens) if isinstance(tokens, tuple) else tokens.tolist()
        for layer in range(*layers):
            pages = self.registered(flat)[layer]
            for token in numbers:
                block = tables[self.groups[layer]][token // self.block_size]
                kernel = block * self.ratio + token % self.block_size // self.kernel_tokens
                for head in range(*heads):
                    page = pages[kernel, head].view(torch.uint8)
                    row = token % self.kernel_tokens // self.per_row
                    yield page if self.codec != "dense" else page[row]


def a_memory(draw: random.Random, like: Memory | None = None) -> Memory:
    """Any memory, or one that can exchange rows with `like`."""
    codec = like.codec if like else draw.choice(["dense", "dense", "page:vec"])
    kernel = draw.randint(1, 6)
    if like and codec != "dense":
        kernel = like.unit_tokens
    ratio = draw.randint(1, 3)
    layers = draw.randint(1, 4)
    per_row = draw.choice([1, 1, 4, 7]) if codec == "dense" else 1
    if like:
        per_row = like.per_row
    paged = codec != "dense" and kernel > 1
    return Memory(
        layout=draw.choice(TOKENS_TOGETHER if paged else sorted(LAYOUTS)),
        layers=layers,
        blocks=draw.randint(8, 11),
        block_size=kernel * ratio * per_row,
        ratio=ratio,
        heads=draw.randint(1, 4),
        content=like.content if like else draw.choice([1, 2, 6, 16]),
        dtype=like.dtype if like else draw.choice([torch.int8, torch.bfloat16, torch.float32]),
        codec=codec,
        offset=draw.choice([0, 0, 1, 7, 64]),
        padding=draw.choice([0, 0, 3, 16]),
        groups=tuple(draw.randint(0, 1) for _ in range(layers)),
        seed=draw.randint(0, 1 << 30),
        per_row=per_row,
        places=tuple(sorted(draw.sample(range(layers + 2), layers))),
    )


def an_interval(draw: random.Random, size: int, length: int | None = None) -> Interval:
    """A non-empty interval of [0, size), of a given length if there is one."""
    if length is None:
        length = draw.randint(1, size)
    start = draw.randint(0, size - length)
    return start, start + length


def a_token_interval(draw: random.Random, unit: int, most: int) -> Interval:
    """Tokens that start at a unit and end anywhere in one."""
    start, stop = an_interval(draw, most // unit)
    return start * unit, stop * unit - draw.randint(0, unit - 1)


def some_tokens(draw: random.Random, most: int) -> Index:
    """Some of the first tokens: runs of one length with gaps of one length, or without."""
    run, gap, first = draw.randint(1, 6), draw.randint(0, 6), draw.choice([0, draw.randint(0, most - 1)])
    tokens = np.arange(first, most, dtype=np.int64)
    return tokens[(tokens - first) % (run + gap) < run]


def check_exchange(draw: random.Random, device: str) -> None:
    """Two rectangles of some heads go from P's random memory to D's, to other places in another layout."""
    p = a_memory(draw)
    d = a_memory(draw, like=p)
    p_flat, d_flat = p.flat.clone().to(device), d.flat.clone().to(device)
    p_cache, d_cache = p.cache(p_flat), d.cache(d_flat)
    expected, most = d.flat.clone(), 8 * min(p.block_size, d.block_size)
    heads, before = draw.randint(1, min(p.heads, d.heads)), draw.choice([0, 1, 2, 4, 8, 64])
    p_heads, d_heads = an_interval(draw, p.heads, heads), an_interval(draw, d.heads, heads)
    for _ in range(2):
        tokens = a_token_interval(draw, p.unit_tokens, most)
        layers = draw.randint(1, min(p.layers, d.layers))
        on_p: Tokens = tokens
        on_d: Tokens = tokens
        if p.codec == "dense" and p.unit_tokens == d.unit_tokens == 1 and draw.choice([True, False]):
            on_p, on_d = some_tokens(draw, tokens[1]), some_tokens(draw, tokens[1])
            on_p, on_d = (each[: min(len(on_p), len(on_d))] for each in (on_p, on_d))
            tokens = 0, len(on_p)
        p_cut = an_interval(draw, p.layers, layers), on_p, p_heads
        d_cut = an_interval(draw, d.layers, layers), on_d, d_heads
        p_tables, d_tables = p.tables(most, seed=1), d.tables(most, seed=2)

        sent = torch.cat([row.reshape(-1) for row in p.rows(p.flat, *p_cut, p_tables)])
        targets = list(d.rows(expected, *d_cut, d_tables))
        for row, target in zip(sent.split(targets[0].numel()), targets, strict=True):
            target.copy_(row.view_as(target))

        nbytes = p_cache.nbytes(layers, *tokens, heads)
        around = torch.full((before + nbytes + 32,), POISON, dtype=torch.uint8, device=device)
        wire = around[before : before + nbytes]
        assert wire.numel() == sent.numel() == d_cache.nbytes(layers, *tokens, heads)
        p_cache.gather(wire, *p_cut, p_tables)
        d_cache.scatter(wire, *d_cut, d_tables)
        assert torch.equal(wire.cpu(), sent)
        assert (around[:before] == POISON).all() and (around[before + nbytes :] == POISON).all()
        assert torch.equal(d_flat.cpu(), expected), "bytes are wrong, or changed outside of the rectangle"
        assert torch.equal(p_flat.cpu(), p.flat), "gather changed the source"
