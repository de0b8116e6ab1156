"""Context parallelism as vLLM's own functions have it: slots, blocks, ranks, and what a Hello has of them."""

from typing import Any

import pytest
import torch
from vllm.v1.worker import block_table

from p2pkv.interleave import Common, Part
from p2pkv.kv.cache import PagedCache
from p2pkv.sharding import Shape

WHOLE = Part(0, 1, 1)
SIZES = [(2, 1, 16), (2, 16, 16), (4, 4, 16), (3, 2, 8), (8, 1, 32)]
"""Ranks, interleave size, tokens in a rank's block."""


class Pointer:
    """What vLLM's kernel has of a tensor, with the arithmetic of addresses."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)


class Language:
    """As much of Triton's language as vLLM's slot mapping uses, for the program of the first request."""

    int64 = torch.int64
    arange, where = staticmethod(torch.arange), staticmethod(torch.where)
    program_id, num_programs = staticmethod(lambda axis: 0), staticmethod(lambda axis: 2)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: int = 0) -> torch.Tensor:
        index = torch.as_tensor(pointer.offset)
        allowed = torch.ones_like(index, dtype=torch.bool) if mask is None else mask
        return torch.where(allowed, pointer.memory[torch.where(allowed, index, 0)], other)

    @staticmethod
    def store(pointer: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
        pointer.memory[pointer.offset[mask]] = values[mask]


def slots_by_vllm(
    table: list[int],
    tokens: int,
    block: int,
    ranks: int,
    rank: int,
    run: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[int]:
    """The slot of each token, -1 where another rank keeps it: vLLM's kernel, run without Triton."""
    monkeypatch.setattr(block_table, "tl", Language)
    kernel: Any = block_table.ComputeSlotMappingKernel.kernel
    slots = torch.full((tokens,), -2)
    getattr(kernel, "fn", kernel)(
        tokens,
        tokens,
        Pointer(torch.tensor([0, tokens])),
        Pointer(torch.arange(tokens)),
        Pointer(torch.tensor(table)),
        len(table),
        Pointer(slots),
        KV_CACHE_BLOCK_SIZE=block,
        TOTAL_CP_WORLD_SIZE=ranks,
        TOTAL_CP_RANK=rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=run,
        PAD_ID=-1,
        BLOCK_SIZE=1024,
    )
    return slots.tolist()


@pytest.mark.parametrize(("ranks", "run", "block"), SIZES)
def test_tokens_are_read_from_and_written_to_vllms_slots(
    ranks: int, run: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV lies where vLLM's kernel put it: gathered for a rank with all tokens, and scattered back."""
    tokens, heads, content = 5 * ranks * block + 7, 2, 3
    table = torch.randperm(9, generator=torch.Generator().manual_seed(ranks)).tolist()[:6]
    kv = torch.arange(tokens * heads * content, dtype=torch.float32).view(tokens, heads, content)
    for rank in range(ranks):
        pages = torch.zeros(9, heads, block, content)
        slots = torch.tensor(slots_by_vllm(table, tokens, block, ranks, rank, run, monkeypatch))
        here = slots >= 0
        pages[slots[here] // block, :, slots[here] % block] = kv[here]
        empty = torch.zeros_like(pages)
        ours = [PagedCache.from_tensors([each], block_size=block) for each in (pages, empty)]
        part = Part(rank, ranks, run)
        count = Common(part, WHOLE).count(tokens)
        buffer = torch.empty(count * heads * content * 4, dtype=torch.uint8)
        ours[0].gather(buffer, (0, 1), Common(part, WHOLE).on_source(0, count), (0, heads), [table])
        assert torch.equal(buffer.view(torch.float32).view(-1, heads, content), kv[here])
        counts = [Common(part, WHOLE).count(length) for length in range(1, tokens + 1)]
        assert counts == here.cumsum(0).tolist()
        ours[1].scatter(buffer, (0, 1), Common(WHOLE, part).on_target(0, count), (0, heads), [table])
        assert torch.equal(empty, pages)


@pytest.mark.parametrize(
    ("tp", "pcp", "dcp", "heads"), [(4, 1, 2, 2), (4, 1, 4, 1), (2, 2, 2, 2), (2, 2, 4, 1), (1, 4, 4, 1)]
)
def test_ranks_are_numbered_as_in_vllms_groups(tp: int, pcp: int, dcp: int, heads: int) -> None:
    """`initialize_model_parallel` of vLLM: ranks [PP, PCP, TP]; of DCP, the last two transposed."""
    ranks = torch.arange(pcp * tp).view(pcp, tp).transpose(0, 1).reshape(-1, dcp)
    shape = Shape((1,), heads, tp, pcp, dcp, 1)
    for group in ranks.tolist():
        assert [shape.part(rank).rank for rank in group] == list(range(dcp))
        assert len({shape.rank_heads.ranks[rank] for rank in group}) == 1
