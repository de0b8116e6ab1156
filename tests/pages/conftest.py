"""Random paged memory, and its reference: every row of a rectangle found by itself, the slow way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import strategies as st

from p2pkv.pages import PagedCache

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
        return (self.layers, self.blocks * self.ratio, self.heads, self.kernel_tokens, self.content)

    @property
    def kernel_tokens(self) -> int:
        return self.block_size // self.ratio

    @property
    def unit_tokens(self) -> int:
        return 1 if self.codec == "dense" else self.kernel_tokens

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """[L, B, H, N, C] of a buffer like `flat`."""
        return torch.as_strided(flat.view(self.dtype), self.shape, self.strides, self.offset)

    def cache(self, flat: torch.Tensor) -> PagedCache:
        return PagedCache.from_tensors(
            self.view(flat).unbind(0), block_size=self.block_size, codec=self.codec, groups=self.groups
        )

    def tables(self, tokens: int, seed: int) -> list[list[int]]:
        """Random block tables of a request of so many tokens, one for each group."""
        order = torch.Generator().manual_seed(seed)
        count = -(-tokens // self.block_size)
        return [
            torch.randperm(self.blocks, generator=order)[:count].tolist() for _ in range(max(self.groups) + 1)
        ]

    def rows(
        self,
        flat: torch.Tensor,
        layers: tuple[int, int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
        tables: list[list[int]],
    ) -> Iterator[torch.Tensor]:
        """The bytes of each row of a rectangle, in the wire's order, as views of `flat`."""
        for layer in range(*layers):
            pages = self.view(flat)[layer]
            for token in range(*tokens, self.unit_tokens):
                block = tables[self.groups[layer]][token // self.block_size]
                kernel = block * self.ratio + token % self.block_size // self.kernel_tokens
                for head in range(*heads):
                    page = pages[kernel, head].view(torch.uint8)
                    yield page if self.codec != "dense" else page[token % self.kernel_tokens]


@st.composite
def _memories(draw: st.DrawFn, like: Memory | None = None) -> Memory:
    """Any memory, or one that can exchange rows with `like`."""
    codec = like.codec if like else draw(st.sampled_from(["dense", "dense", "page:vec"]))
    kernel = draw(st.integers(1, 6))
    if like and codec != "dense":
        kernel = like.unit_tokens
    ratio = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 4))
    paged = codec != "dense" and kernel > 1
    return Memory(
        layout=draw(st.sampled_from(TOKENS_TOGETHER if paged else sorted(LAYOUTS))),
        layers=layers,
        blocks=draw(st.integers(8, 11)),
        block_size=kernel * ratio,
        ratio=ratio,
        heads=draw(st.integers(1, 4)),
        content=like.content if like else draw(st.sampled_from([1, 2, 6, 16])),
        dtype=like.dtype if like else draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float32])),
        codec=codec,
        offset=draw(st.sampled_from([0, 0, 1, 7, 64])),
        padding=draw(st.sampled_from([0, 0, 3, 16])),
        groups=tuple(draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))),
        seed=draw(st.integers(0, 1 << 30)),
    )


@pytest.fixture(scope="session")
def memories() -> Callable[..., st.SearchStrategy[Memory]]:
    return _memories


@pytest.fixture(scope="session")
def memory_type() -> type[Memory]:
    return Memory
