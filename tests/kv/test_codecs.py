"""Undoing CPU attention's packing, against vLLM's own operator where vLLM is installed."""

import importlib.util

import numpy as np
import pytest
import torch

from p2pkv.kv import cpu_codec
from p2pkv.page_packings import PACKINGS
from support.gil import lets_others_run
from support.kv.cpu_pages import pack, unpack

HAVE_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.mark.vllm
@pytest.mark.skipif(not HAVE_VLLM, reason="needs vLLM, whose packing operator is the reference")
@pytest.mark.parametrize(
    ("isa", "dtype", "tokens", "head_dim"),
    [
        ("vec", torch.float32, 32, 64),
        ("vec", torch.bfloat16, 128, 128),
        ("vec", torch.float16, 96, 32),
        ("vec16", torch.float32, 48, 80),
        ("vec16", torch.float16, 16, 64),
        ("vec16", torch.bfloat16, 48, 80),
        ("amx", torch.bfloat16, 32, 64),
        ("amx", torch.bfloat16, 96, 128),
        ("amx", torch.bfloat16, 128, 32),
    ],
)
def test_pack_does_what_vllm_does_and_unpack_undoes_it(
    isa: str, dtype: torch.dtype, tokens: int, head_dim: int
) -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM was not built for a CPU")
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX, and vLLM's kernel for it does not run here")
    blocks, heads = 3, 2
    pages = torch.zeros(blocks, heads, tokens, 2 * head_dim, dtype=dtype)
    keys, values = pages.view(blocks, heads, 2 * tokens, head_dim).chunk(2, dim=2)
    new = torch.randn(2, blocks * tokens, heads, head_dim).to(dtype)
    slots = torch.randperm(blocks * tokens)
    ops.cpu_attn_reshape_and_cache(new[0], new[1], keys, values, slots, isa)

    by_slot = torch.cat([new[0], new[1]], dim=2)[slots.argsort()]
    dense = by_slot.view(blocks, tokens, heads, 2 * head_dim).transpose(1, 2)
    for block in range(blocks):
        assert torch.equal(unpack(pages[block], cpu_codec(isa), head_dim), dense[block])
        assert torch.equal(pack(dense[block].contiguous(), cpu_codec(isa), head_dim), pages[block])


@pytest.mark.parametrize("codec", list(PACKINGS))
@pytest.mark.parametrize(("tokens", "head_dim"), [(32, 32), (96, 64), (32, 96)])
def test_a_page_is_the_same_after_both_ways(codec: str, tokens: int, head_dim: int) -> None:
    page = torch.arange(2 * tokens * 2 * head_dim).to(torch.int16).view(2, tokens, 2 * head_dim)
    packed = pack(page, codec, head_dim)
    assert not torch.equal(packed, page)
    assert torch.equal(unpack(packed, codec, head_dim), page)
    assert torch.equal(pack(unpack(page, codec, head_dim), codec, head_dim), page)


@pytest.mark.parametrize("codec", list(PACKINGS))
def test_the_gil_is_free_while_pages_are_packed_and_unpacked(codec: str) -> None:
    dense, packed = np.zeros((64, 2, 128, 256), np.uint16), np.zeros((64, 2, 128 * 256), np.uint16)
    assert lets_others_run(lambda: PACKINGS[codec].unpack(dense, packed)), "unpacking held the GIL"
    assert lets_others_run(lambda: PACKINGS[codec].pack(packed, dense)), "packing held the GIL"
