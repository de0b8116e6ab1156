"""One block of CPU attention, packed and unpacked by itself: what p2pkv does to many pages at once.

Shape legend: H heads, N tokens in a page.
"""

import torch

from p2pkv.page_packings import DENSE, packing_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unpack(page: torch.Tensor, codec: str, head_dim: int) -> torch.Tensor:
    """The K and then V of each (head, token) of a block, both [H, N, 2 * head_dim]."""
    return _converted(page, codec, head_dim, to_pages=False)


def pack(dense: torch.Tensor, codec: str, head_dim: int) -> torch.Tensor:
    """The reverse of `unpack`: one block as CPU attention wants it."""
    return _converted(dense, codec, head_dim, to_pages=True)


def _converted(page: torch.Tensor, codec: str, head_dim: int, to_pages: bool) -> torch.Tensor:
    heads, tokens, content = page.shape
    assert content == 2 * head_dim and page.is_contiguous()
    out = page.clone()
    if codec == DENSE:
        return out
    packing, bits = packing_of(codec), _BITS[page.element_size()]
    packing.check(tokens, content, page.element_size())
    source, target = page.view(bits).numpy(), out.view(bits).numpy()
    if to_pages:
        packing.pack(target.reshape(heads, -1), source)
    else:
        packing.unpack(target, source.reshape(heads, -1))
    return out
