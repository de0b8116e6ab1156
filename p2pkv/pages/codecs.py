"""How the bytes of a row are arranged, by name, and how to undo what CPU attention does to a page.

"dense": a row is the K and V of one (token, head). "page:<isa>": a kernel packs the tokens of a
(block, head) together, so only whole pages travel, between equal names.
"""

from __future__ import annotations

import torch

DENSE = "dense"
PAGE_PREFIX = "page:"


def cpu_codec(isa: str) -> str:
    """The codec of vLLM's CPU attention with this ISA ("vec", "vec16", "amx", "neon", ...)."""
    if not isa.isidentifier():
        raise ValueError(f"{isa!r} is not the name of a CPU attention ISA; expected one like 'vec' or 'amx'")
    return PAGE_PREFIX + isa


def is_paged(codec: str) -> bool:
    """Whether only whole pages of this codec travel. Raises ValueError for a name that is no codec."""
    if codec == DENSE:
        return False
    if codec.startswith(PAGE_PREFIX) and len(codec) > len(PAGE_PREFIX):
        return True
    raise ValueError(f"{codec!r} is not a codec; expected {DENSE!r} or '{PAGE_PREFIX}<isa>'")


def unpack(page: torch.Tensor, codec: str, head_dim: int) -> torch.Tensor:
    """The K and V in one block of CPU attention.

    Args:
        page: [H, N, 2 * head_dim], contiguous, as registered.
        codec: "page:vec", "page:vec16" or "page:amx"; "dense" gives a copy.

    Returns:
        [H, N, 2 * head_dim], K and then V of each (head, token).

    Raises ValueError for a codec that this function cannot undo, or a page that does not fit it.
    """
    heads, tokens, content = page.shape
    if content != 2 * head_dim or not page.is_contiguous():
        raise ValueError(
            f"a page of shape {list(page.shape)} and strides {list(page.stride())} is not "
            f"contiguous [heads, tokens, 2 * {head_dim}]"
        )
    if codec == DENSE:
        return page.clone()
    if codec not in ("page:vec", "page:vec16", "page:amx"):
        raise ValueError(f"codec {codec!r} cannot be undone; known are page:vec, page:vec16 and page:amx")
    keys, values = page.view(heads, 2, tokens * head_dim).unbind(1)
    if codec == "page:amx":
        if page.element_size() != 2 or tokens % 32 or head_dim % 32:
            raise ValueError(
                f"page:amx holds 2-byte elements, with tokens and head_dim in multiples of 32, "
                f"not {page.dtype} {list(page.shape)}"
            )
        k = keys.view(heads, tokens // 16, head_dim // 2, 16, 2).permute(0, 1, 3, 2, 4)
        v = values.view(heads, head_dim // 16, tokens // 2, 16, 2).permute(0, 2, 4, 1, 3)
    else:
        k = keys.view(heads, head_dim, tokens).transpose(1, 2)
        v = values.view(heads, tokens, head_dim)
    return torch.cat([k.reshape(heads, tokens, head_dim), v.reshape(heads, tokens, head_dim)], dim=2)
