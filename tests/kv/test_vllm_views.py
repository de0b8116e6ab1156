"""Layers as vLLM's own allocation code makes them, in each of its layouts."""

import importlib.util

import pytest
import torch

from p2pkv.kv import PagedCache

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM, whose views are the reference"
    ),
]

LAYERS, BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM = 3, 5, 2, 32, 16


@pytest.mark.parametrize(
    ("layout", "kernel_block"),
    [
        *[(name, 32) for name in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")],
        ("LBHNC", 16),
        ("LBNHC", 16),
    ],
)
def test_gather_from_vllms_views(layout: str, kernel_block: int) -> None:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16
    )
    strides = compute_layout_strides(spec, BLOCKS, LAYERS, KVCacheLayout[layout])
    size = LAYERS * BLOCKS * spec.page_size_bytes
    placement = KVCacheTensor(
        size=size,
        layers=[f"layer.{i}" for i in range(LAYERS)],
        layer_stride=strides[0],
        block_stride=strides[1],
        offset=64,
    )
    raw = torch.randint(-128, 128, (64 + size,), dtype=torch.int8)
    views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[layout], placement, kernel_block)

    cache = PagedCache.from_tensors(views, block_size=BLOCK_SIZE)
    assert (cache.layers, cache.heads, cache.blocks) == (LAYERS, HEADS, BLOCKS)
    table, tokens = [4, 0, 2], (3, 81)
    out = torch.empty(cache.nbytes(LAYERS, *tokens, HEADS), dtype=torch.uint8)
    cache.gather(out, (0, LAYERS), tokens, (0, HEADS), [table])

    ratio = BLOCK_SIZE // kernel_block
    kernel = [block * ratio + i for block in table for i in range(ratio)]
    by_token = torch.stack(views)[:, kernel].transpose(2, 3).flatten(1, 2)[:, slice(*tokens)]
    assert torch.equal(out.view(torch.int16), by_token.reshape(-1).view(torch.int16))
