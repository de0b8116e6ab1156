"""Two engines whose blocks differ in size or packing: what P computed is what D holds, token by token."""

import pytest
import torch
from msgspec.structs import replace
from virtual.pair import VirtualPair, value

from p2pkv.engine.context import Context
from p2pkv.protocol.handshake import Refused
from support.engine.engines import Geometry, other_group, step
from support.engine.transfers import arrives, ask, begin, load

TOKENS = 300
BF16, F32 = torch.bfloat16, torch.float32


def cpu(isa: str, block: int, tp: int = 1, content: int = 16, dtype: torch.dtype = F32) -> Geometry:
    """Two layers of two KV heads; a GPU's pages with "dense"."""
    codec = "dense" if isa == "dense" else f"page:{isa}"
    return Geometry((2,), 2, tp, block, content, 16 if block > 64 else 32, codec, dtype)


PAIRS = {
    "vec 48 to 32": (cpu("vec16", 48), cpu("vec", 32)),
    "dense 48 to 32, TP 2 to 1": (cpu("dense", 48, 2), cpu("dense", 32)),
    "vec to dense, TP 1 to 2": (cpu("vec", 32), cpu("dense", 16, 2)),
    "dense to amx": (cpu("dense", 16, 1, 64, BF16), cpu("amx", 32, 1, 64, BF16)),
    "amx 32 to amx 96, TP 2 to 1": (cpu("amx", 32, 2, 64, BF16), cpu("amx", 96, 1, 64, BF16)),
    "vec 32 to vec 32, whole pages": (cpu("vec", 32), cpu("vec", 32)),
}


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("prefix", [False, True], ids=["from the start", "after a prefix on D"])
def test_blocks_of_other_sizes_and_packings(form: str, prefix: bool) -> None:
    """P computes in chunks that end inside blocks; D may have its first block already."""
    p_side, d_side = PAIRS[form]
    start = d_side.block if prefix else 0
    p_blocks = list(range(p_side.blocks))[: -(-TOKENS // p_side.block)]
    d_blocks = list(range(d_side.blocks))[::-1][: -(-TOKENS // d_side.block)]
    pair = VirtualPair(p_side, on_d=d_side)
    before = [[page.clone() for page in rank.pages] for rank in pair.d.ranks]
    ask(pair.p, pair.d, tokens=TOKENS, blocks=d_blocks, start=start)
    for first in range(0, TOKENS, 77):
        step(pair.p, "k", p_blocks, first, min(TOKENS, first + 77))
    arrives(pair.d, "k", TOKENS, d_blocks, start)
    for rank, old in zip(pair.d.ranks, before, strict=True) if prefix else ():
        for page, was in zip(rank.pages, old, strict=True):
            assert torch.equal(page[d_blocks[0]], was[d_blocks[0]])
    pair.ends_well("k")
    unit = p_side.block if "whole pages" in form else 1
    tokens = -(-(TOKENS - 1) // unit) * unit - start
    assert value(pair.p, "bytes_sent") == 2 * 2 * tokens * p_side.content * p_side.dtype.itemsize


def test_one_p_serves_ds_of_several_forms_at_once() -> None:
    pair, blocks = VirtualPair(cpu("vec", 32)), list(range(9))
    ds = [pair.d, pair.more("D", cpu("vec", 128)), pair.more("D", cpu("dense", 16))]
    for number, d in enumerate(ds):
        begin(pair.p, d, f"k{number}", 64, [2 * number, 2 * number + 1], salt=number)
        load(d, f"k{number}", 64, blocks)
    for number, d in enumerate(ds):
        arrives(d, f"k{number}", 64, blocks, salt=number)


def test_pages_that_cannot_be_undone_after_all_are_refused_by_their_owner() -> None:
    """An odd number of elements: no K and V of one size, which no Hello says."""
    pair = VirtualPair(cpu("vec", 32, content=15), on_d=cpu("dense", 16, content=15))
    pair.expect(tokens=20)
    pair.fails("rows of 15 elements do not hold a K and a V")
    assert value(pair.p, "messages_refused") == 1


def test_a_hello_that_is_not_true_of_the_pages_is_refused() -> None:
    ctx = VirtualPair(cpu("vec", 32)).p.rank.context
    said = replace(ctx.hello, cache=other_group(ctx.hello.cache, row_bytes=64, unit_tokens=2))
    lying = Context(said, ctx.options, ctx.cache, ctx.links, ctx.endpoint, ctx.steps)
    with pytest.raises(Refused, match=r"holds rows of 2048 bytes for 32 tokens, .* expects 64 for 2"):
        lying.form(said)
    assert ctx.form(ctx.hello)[1] == ctx.cache.groups
