"""All KV groups of a rank together."""

from __future__ import annotations

import torch

from p2pkv.kv import DENSE, PagedCache, RankCache


def group(heads: int, content: int, block: int = 16) -> PagedCache:
    layers = [torch.zeros(3, heads, block, content) for _ in range(2)]
    return PagedCache.from_tensors(layers, block_size=block, codec=DENSE)


def test_the_smallest_layer_says_how_many_fill_a_message() -> None:
    """Of a span of layers that may lie in any group, it is known how many there are at the most."""
    small, large = group(heads=1, content=2), group(heads=4, content=8)
    for groups in ([small, large], [large, small]):
        assert RankCache(groups).layer_bytes(100) == 100 * 1 * 2 * 4
    assert RankCache([large]).layer_bytes(100) == 100 * 4 * 8 * 4
    assert RankCache([small]).layer_bytes(0) == 1
