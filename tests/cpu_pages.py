"""One block of CPU attention, packed and unpacked by itself: what p2pkv does to many pages at once.

Shape legend: H heads, N tokens in a page.
"""

from __future__ import annotations

import torch

from p2pkv.packings import DENSE, packing_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unpack(page: torch.Tensor, codec: str, head_dim: int) -> torch.Tensor:
    """The K and V in one block of CPU attention.

    Args:
        page: [H, N, 2 * head_dim], contiguous, as registered, on a CPU.
        codec: "page:vec", "page:vec16" or "page:amx"; "dense" gives a copy.

    Returns:
        [H, N, 2 * head_dim], K and then V of each (head, token).

    Raises ValueError for a codec that this function cannot undo, or a page that does not fit it.
    """
    return _converted(page, codec, head_dim, to_pages=False)


def pack(dense: torch.Tensor, codec: str, head_dim: int) -> torch.Tensor:
    """The reverse of `unpack`, with the same arguments and errors: one block as CPU attention wants it."""
    return _converted(dense, codec, head_dim, to_pages=True)


def _converted(page: torch.Tensor, codec: str, head_dim: int, to_pages: bool) -> torch.Tensor:
    heads, tokens, content = page.shape
    if content != 2 * head_dim or not page.is_contiguous():
        raise ValueError(
            f"a page of shape {list(page.shape)} and strides {list(page.stride())} is not "
            f"contiguous [heads, tokens, 2 * {head_dim}]"
        )
    out = page.clone()
    if codec == DENSE:
        return out
    packing = packing_of(codec)
    packing.check(tokens, content, page.element_size())
    bits = _BITS[page.element_size()]
    source, target = page.view(bits).numpy(), out.view(bits).numpy()
    if to_pages:
        packing.pack(target.reshape(heads, -1), source)
    else:
        packing.unpack(target, source.reshape(heads, -1))
    return out
