"""Packed pages seen token by token: what is written, what is left alone, what is refused."""

from __future__ import annotations

import pytest
import torch

from p2pkv.kv import DENSE, PagedCache
from p2pkv.kv import cache as module
from p2pkv.kv.cache import DenseView, seen_as
from p2pkv.packings import PACKINGS
from support.kv.cpu_pages import unpack

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 5, 2, 32, 64
TABLE = [3, 0, 4]


def noise(seed: int = 0) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    return [torch.randint(-999, 999, shape, dtype=torch.int16, generator=chance) for _ in range(LAYERS)]


def view(layers: list[torch.Tensor], codec: str) -> DenseView:
    seen = seen_as(PagedCache.from_tensors(layers, block_size=TOKENS, codec=codec), DENSE)
    assert isinstance(seen, DenseView)
    return seen


def by_token(layers: list[torch.Tensor], codec: str) -> torch.Tensor:
    """All tokens of the request, [L, T, H, C], found page by page with `unpack`."""
    pages = [[unpack(layer[block], codec, CONTENT // 2) for block in TABLE] for layer in layers]
    return torch.stack([torch.cat(each, dim=1) for each in pages]).transpose(1, 2)


@pytest.mark.parametrize("codec", list(PACKINGS))
@pytest.mark.parametrize("tokens", [(0, 96), (32, 64), (5, 6), (5, 32), (31, 33), (40, 90), (64, 96)])
def test_tokens_come_out_and_go_in_and_their_neighbours_stay(
    codec: str, tokens: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many small batches; kv/test_any_shape.py has single ones."""
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    p, d = noise(1), noise(2)
    layers, heads = (1, 3), (1, 2)
    wire = torch.zeros(view(p, codec).nbytes(2, *tokens, 1), dtype=torch.uint8)
    expected = by_token(p, codec)[1:3, slice(*tokens), 1:2]
    view(p, codec).gather(wire, layers, tokens, heads, [TABLE])
    assert torch.equal(wire.view(torch.int16), expected.reshape(-1))

    after = by_token(d, codec)
    after[1:3, slice(*tokens), 1:2] = expected
    others = [layer[[1, 2]].clone() for layer in d]
    view(d, codec).scatter(wire, layers, tokens, heads, [TABLE])
    assert torch.equal(by_token(d, codec), after)
    assert all(torch.equal(layer[[1, 2]], other) for layer, other in zip(d, others, strict=True))


def test_a_buffer_need_not_lie_at_a_multiple_of_an_element() -> None:
    p, d = noise(1), noise(2)
    room = torch.zeros(view(p, "page:amx").nbytes(LAYERS, 3, 70, HEADS) + 1, dtype=torch.uint8)
    view(p, "page:amx").gather(room[1:], (0, LAYERS), (3, 70), (0, HEADS), [TABLE])
    view(d, "page:vec").scatter(room[1:], (0, LAYERS), (3, 70), (0, HEADS), [TABLE])
    assert torch.equal(by_token(d, "page:vec")[:, 3:70], by_token(p, "page:amx")[:, 3:70])


@pytest.mark.parametrize("codec", [DENSE, "page:amx"])
def test_nothing_is_moved_by_an_empty_rectangle(codec: str) -> None:
    layers = noise()
    cache = seen_as(PagedCache.from_tensors(layers, block_size=TOKENS, codec=codec), DENSE)
    assert cache.nbytes(LAYERS, 5, 5, HEADS) == 0
    cache.scatter(torch.empty(0, dtype=torch.uint8), (0, LAYERS), (5, 5), (0, HEADS), [[]])
    assert all(torch.equal(layer, old) for layer, old in zip(layers, noise(), strict=True))


def test_a_cache_travels_as_it_is_or_dense() -> None:
    cache = PagedCache.from_tensors(noise(), block_size=TOKENS, codec="page:vec")
    assert seen_as(cache, "page:vec") is cache
    assert (seen_as(cache, DENSE).unit_tokens, seen_as(cache, DENSE).row_bytes) == (1, CONTENT * 2)
    with pytest.raises(ValueError, match="as it is or dense, not as page:amx"):
        seen_as(cache, "page:amx")


@pytest.mark.parametrize(
    ("codec", "content", "dtype", "sentence"),
    [
        ("page:neon", CONTENT, torch.int16, "'page:neon' cannot be undone"),
        ("page:vec", 3, torch.int16, "rows of 3 elements do not hold a K and a V"),
        ("page:amx", 48, torch.int16, "multiples of 32"),
        ("page:amx", CONTENT, torch.int32, "2-byte elements"),
    ],
)
def test_pages_that_cannot_be_seen_token_by_token(
    codec: str, content: int, dtype: torch.dtype, sentence: str
) -> None:
    layer = torch.zeros(BLOCKS, HEADS, TOKENS, content, dtype=dtype)
    with pytest.raises(ValueError, match=sentence):
        seen_as(PagedCache.from_tensors([layer], block_size=TOKENS, codec=codec), DENSE)


def test_pages_are_undone_on_a_cpu_only() -> None:
    layer = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT, dtype=torch.int16)
    cache = PagedCache.from_tensors([layer], block_size=TOKENS, codec="page:vec")
    cache.device = torch.device("cuda")
    with pytest.raises(ValueError, match="undone on a CPU only, not on cuda"):
        seen_as(cache, DENSE)
