"""The made-up model's KV, and the paged memory of one engine that holds it.

KV is a pure function of (prompt, layer, token, head, channel), so every byte can be checked anywhere.
"""

from __future__ import annotations

import torch
from engine_support import Geometry

SHAPE = Geometry(layers=(4,), kv_heads=2, content=32, blocks=640)
LAYERS = sum(SHAPE.layers)
CANARY = 0x5AFE5AFE
"""What free blocks hold: who finds something else has found a write into a block that nobody had."""


def kv(prompt: int, layer: int, start: int, stop: int) -> torch.Tensor:
    """[token, head, channel], int32: what a forward computes for tokens [start, stop)."""
    token = torch.arange(start, stop, dtype=torch.int64)[:, None, None]
    head = torch.arange(SHAPE.kv_heads)[None, :, None]
    channel = torch.arange(SHAPE.content)[None, None, :]
    mixed = ((prompt * 31 + layer) * 4096 + token) * 128 + head * SHAPE.content + channel
    return ((mixed * 0x9E3779B1 >> 7) & 0x7FFFFFFF).to(torch.int32)


class Violation(Exception):
    """An invariant does not hold; the text says which."""


class Memory:
    """The pages of an engine, [layer][block, head, token, channel] of float32, and who has which block."""

    def __init__(self, pages: list[torch.Tensor]) -> None:
        self._pages = [page.view(torch.int32) for page in pages]
        self._free = list(range(SHAPE.blocks))
        self._poison(self._free)

    @property
    def free(self) -> int:
        """How many blocks nobody has."""
        return len(self._free)

    def take(self, tokens: int) -> list[int] | None:
        """Blocks for so many tokens; None if there are too few. Raises Violation if one was written to."""
        count = -(-tokens // SHAPE.block)
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        for page in self._pages:
            if taken and not bool((page[taken] == CANARY).all()):
                raise Violation("a block was written to after it had been given back")
        return taken

    def clean(self) -> bool:
        """Whether nobody has written to a block that nobody has."""
        return all(bool((page[self._free] == CANARY).all()) for page in self._pages)

    def give_back(self, blocks: list[int]) -> None:
        """Nobody reads or writes them any more."""
        self._poison(blocks)
        self._free += blocks

    def compute(self, prompt: int, layer: int, blocks: list[int], start: int, stop: int) -> None:
        """A forward's one layer."""
        block, place = self._slots(blocks, start, stop)
        self._pages[layer][block, :, place] = kv(prompt, layer, start, stop)

    def wrong(self, prompt: int, blocks: list[int], stop: int) -> int:
        """How many values of tokens [0, stop) are not those of this prompt."""
        block, place = self._slots(blocks, 0, stop)
        right = (kv(prompt, layer, 0, stop) for layer in range(LAYERS))
        return sum(
            int((page[block, :, place] != values).sum())
            for page, values in zip(self._pages, right, strict=True)
        )

    def _slots(self, blocks: list[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.arange(start, stop)
        return torch.tensor(blocks, dtype=torch.int64)[token // SHAPE.block], token % SHAPE.block

    def _poison(self, blocks: list[int]) -> None:
        for page in self._pages:
            page[blocks] = CANARY
