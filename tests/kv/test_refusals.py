"""What a cache says of itself, and what it refuses: the sentence names what was wrong."""

from typing import Any

import pytest
import torch

from p2pkv.kv import DENSE, PagedCache, cpu_codec
from p2pkv.kv import cache as module
from p2pkv.kv.cache import CachedTables, RankCache, seen_as
from p2pkv.kv.layouts import plane_of

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 8


def a_layer(**other: int) -> torch.Tensor:
    shape = {"blocks": BLOCKS, "heads": HEADS, "tokens": TOKENS, "content": CONTENT} | other
    return torch.zeros(tuple(shape.values()))


@pytest.mark.parametrize(
    ("tensors", "options", "sentence"),
    [
        ([], {}, "0 KV layers"),
        ([a_layer()], {"tables": [0, 1]}, "1 KV layers and 2 block tables"),
        ([a_layer()], {"tables": [-1]}, "block table number -1"),
        ([a_layer()[0]], {}, r"shape \[2, 4, 8\]; expected \[blocks, heads, rows, content\]"),
        ([a_layer()], {"block_size": 6}, "6 kernel blocks of 4 rows, .* whole blocks of 6 rows"),
        ([a_layer()], {"block_size": 16}, "6 kernel blocks of 4 rows, .* whole blocks of 16 rows"),
        ([a_layer(), a_layer(heads=3)], {}, "layer 1 has 3 heads .*one form in a KV group"),
        ([a_layer(), a_layer(content=4)], {}, "layer 1 has 2 heads of 4 x .*one form in a KV group"),
        ([a_layer(), a_layer().int()], {}, "layer 1 has .*int32, layer 0 has .*float32"),
        ([a_layer(), a_layer().to("meta")], {}, "layer 1 is on meta, layer 0 on cpu"),
        ([a_layer(content=16)[..., ::2]], {}, "its content must lie together"),
        ([a_layer().transpose(1, 2)], {"codec": "page:vec", "block_size": 2}, "head-major"),
        (
            [a_layer(), a_layer(tokens=2)],
            {"codec": "page:vec"},
            "layer 1 packs 2 tokens in a page, layer 0 packs 4",
        ),
    ],
)
def test_tensors_that_cannot_be_addressed(
    tensors: list[torch.Tensor], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        PagedCache.from_tensors(tensors, **({"block_size": TOKENS} | options))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": (0, 3)}, r"layers \[0, 3\) are not within the cache's \[0, 2\)"),
        ({"heads": (-1, 2)}, r"heads \[-1, 2\) are not within"),
        ({"tokens": (5, 4)}, r"tokens \[5, 4\) are not an interval"),
        ({"blocks": [[0, 5, 1], [2]]}, r"block table 1 has 1 blocks of 4 tokens; tokens up to 8 need 2"),
        ({"blocks": [[0, 5, 1]]}, "1 block tables given, but layer 1 uses number 1"),
        ({"blocks": [[0, 6], [1, 2]]}, "block table 0 names block 6; the cache has 6 blocks"),
        ({"blocks": [[0, 1], [1, -1]]}, "block table 1 names block -1"),
        ({"buffer": torch.zeros(8)}, "needs a contiguous uint8 buffer of"),
        ({"buffer": torch.zeros(8, dtype=torch.uint8)}, r"needs .* \[1024\] on cpu, got torch.uint8 \[8\]"),
        ({"buffer": torch.zeros(2048, dtype=torch.uint8)[::2]}, "needs a contiguous uint8 buffer of"),
    ],
)
@pytest.mark.parametrize("codec", [DENSE, "page:vec"])
@pytest.mark.parametrize("what", ["gather", "scatter"])
def test_rectangles_outside_the_cache(
    what: str, codec: str, change: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of packed pages that are seen token by token."""
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    layers = [a_layer(), a_layer()]
    packed = PagedCache.from_tensors(layers, block_size=TOKENS, codec=codec, tables=[0, 1])
    cache = seen_as(packed, DENSE)
    buffer = torch.ones(cache.nbytes(2, 0, 8, HEADS), dtype=torch.uint8)
    fine: dict[str, Any] = {
        "layers": (0, 2),
        "tokens": (0, 8),
        "heads": (0, HEADS),
        "blocks": [[0, 5], [3, 1]],
    }
    arguments = {"out" if what == "gather" else "src": change.get("buffer", buffer)} | fine
    arguments |= {name: value for name, value in change.items() if name != "buffer"}
    with pytest.raises(ValueError, match=sentence):
        getattr(cache, what)(**arguments)
    assert not any(layer.any() for layer in layers), "a refused call has written"


def test_a_page_codec_refuses_half_a_page() -> None:
    cache = PagedCache.from_tensors([a_layer()], block_size=TOKENS, codec=cpu_codec("vec"))
    assert (cache.unit_tokens, cache.row_bytes) == (TOKENS, TOKENS * CONTENT * 4)
    assert cache.nbytes(1, 4, 9, 1) == 2 * cache.row_bytes
    with pytest.raises(ValueError, match=r"start inside a row.*multiple of 4"):
        cache.nbytes(1, 3, 8, 1)
    with pytest.raises(ValueError, match="start inside a row"):
        cache.gather(torch.empty(0, dtype=torch.uint8), (0, 1), (3, 8), (0, 1), [[0, 1]])


def test_the_cache_says_what_it_is() -> None:
    cache = PagedCache.from_tensors([a_layer(), a_layer()], block_size=2 * TOKENS, tables=[0, 1])
    assert (cache.layers, cache.heads, cache.blocks, cache.block_size) == (2, HEADS, BLOCKS // 2, 2 * TOKENS)
    assert (cache.unit_tokens, cache.row_bytes, cache.codec) == (1, CONTENT * 4, "dense")
    assert (cache.tables, cache.device) == ((0, 1), torch.device("cpu"))


def test_a_plane_is_of_rows_that_lie_together() -> None:
    pages = torch.zeros(3, 1, 4, 584, dtype=torch.uint8)
    values, scales = plane_of(pages, 0, 576), plane_of(pages, 576, 8)
    assert values.shape == (3, 1, 4, 576) and scales.storage_offset() == 4 * 576
    for wrong in (torch.zeros(3, 2, 4, 584), torch.zeros(3, 1, 4, 600)[..., :584]):
        with pytest.raises(ValueError, match="expected one head whose rows lie together"):
            plane_of(wrong, 0, 576)
    with pytest.raises(ValueError, match=r"elements \[577, 585\)"):
        plane_of(pages, 577, 8)


def test_block_ids_that_one_cache_has_accepted_are_checked_for_a_smaller_one() -> None:
    tables = CachedTables([[3, 1], [0]])
    large, small = (
        PagedCache.from_tensors([torch.zeros(blocks, 1, 4, 8, dtype=torch.uint8)], block_size=4)
        for blocks in (4, 3)
    )
    out = torch.zeros(64, dtype=torch.uint8)
    large.gather(out, (0, 1), (0, 8), (0, 1), tables)
    large.gather(out[:32], (0, 1), (4, 8), (0, 1), tables)
    with pytest.raises(ValueError, match="block table 0 names block 3; the cache has 3 blocks"):
        small.gather(out, (0, 1), (0, 8), (0, 1), tables)
    small.gather(out[:32], (0, 1), (4, 8), (0, 1), tables)
    with pytest.raises(ValueError, match="block table 0 has 2 blocks of 4 tokens"):
        large.gather(torch.zeros(96, dtype=torch.uint8), (0, 1), (0, 12), (0, 1), tables)


def test_the_bytes_of_a_prompt_are_those_of_all_planes_and_of_one_state() -> None:
    """As DeepSeek V3.2's: latents, and indexer keys in two planes; and a recurrent state."""
    latents, keys, scales = (
        PagedCache.from_tensors([torch.zeros(3, 1, 64, width, dtype=torch.uint8)] * 2, block_size=64)
        for width in (656, 128, 4)
    )
    state = PagedCache.from_tensors([torch.zeros(3, 2, 1, 5)], block_size=1)
    cache = RankCache([latents, keys, scales, state], [(0, 2), (1, 3), (1, 3), (4,)])
    assert (cache.layer_count, cache.nbytes(100)) == (5, 2 * 100 * (656 + 128 + 4) + 2 * 5 * 4)


# Packed pages that are seen token by token: test_any_shape.py has what is read and written.


def packed(layer: torch.Tensor, codec: str = "page:vec") -> PagedCache:
    return PagedCache.from_tensors([layer], block_size=32, codec=codec)


def test_a_cache_travels_as_it_is_or_dense() -> None:
    cache = packed(torch.zeros(BLOCKS, HEADS, 32, 64, dtype=torch.int16))
    assert seen_as(cache, "page:vec") is cache
    assert (seen_as(cache, DENSE).unit_tokens, seen_as(cache, DENSE).row_bytes) == (1, 64 * 2)
    with pytest.raises(ValueError, match="as it is or dense, not as page:amx"):
        seen_as(cache, "page:amx")


@pytest.mark.parametrize(
    ("codec", "content", "dtype", "sentence"),
    [
        ("page:neon", 64, torch.int16, "'page:neon' cannot be undone"),
        ("page:vec", 3, torch.int16, "rows of 3 elements do not hold a K and a V"),
        ("page:amx", 48, torch.int16, "multiples of 32"),
        ("page:amx", 64, torch.int32, "2-byte elements"),
    ],
)
def test_pages_that_cannot_be_seen_token_by_token(
    codec: str, content: int, dtype: torch.dtype, sentence: str
) -> None:
    layer = torch.zeros(BLOCKS, HEADS, 32, content, dtype=dtype)
    with pytest.raises(ValueError, match=sentence):
        seen_as(packed(layer, codec), DENSE)


def test_pages_are_undone_on_a_cpu_only() -> None:
    cache = packed(torch.zeros(BLOCKS, HEADS, 32, 64, dtype=torch.int16))
    cache.device = torch.device("cuda")
    with pytest.raises(ValueError, match="undone on a CPU only, not on cuda"):
        seen_as(cache, DENSE)
