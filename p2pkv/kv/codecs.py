"""How the bytes of a row are arranged, by name, and how to do and undo what CPU attention does to a page.

"dense": a row is the K and V of one (token, head). "page:<isa>": a kernel packs the tokens of a
(block, head) together: first all K, then all V, in an order of the ISA's own. Packing only moves
elements, so here they are bits of some width, and both directions are one assignment between views.

Shape legend: H heads, N tokens in a page, D elements of K (and of V), C = 2 * D.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

DENSE = "dense"
PAGE_PREFIX = "page:"
UNDONE = ("page:vec", "page:vec16", "page:amx")

Elements = NDArray[Any]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cpu_codec(isa: str) -> str:
    """The codec of vLLM's CPU attention with this ISA ("vec", "vec16", "amx", "neon", ...)."""
    if not isa.isidentifier():
        raise ValueError(f"{isa!r} is not the name of a CPU attention ISA; expected one like 'vec' or 'amx'")
    return PAGE_PREFIX + isa


def is_paged(codec: str) -> bool:
    """Whether the tokens of a page are packed together. Raises ValueError for a name that is no codec."""
    if codec == DENSE:
        return False
    if codec.startswith(PAGE_PREFIX) and len(codec) > len(PAGE_PREFIX):
        return True
    raise ValueError(f"{codec!r} is not a codec; expected {DENSE!r} or '{PAGE_PREFIX}<isa>'")


def check_page(codec: str, tokens: int, content: int, element_bytes: int) -> None:
    """Raises ValueError unless pages of N = `tokens`, C = `content` can be packed and unpacked."""
    if codec not in UNDONE:
        raise ValueError(f"codec {codec!r} cannot be undone; known are page:vec, page:vec16 and page:amx")
    if content % 2:
        raise ValueError(f"rows of {content} elements do not hold a K and a V of one size")
    if codec == "page:amx" and (element_bytes != 2 or tokens % 32 or content % 64):
        raise ValueError(
            "page:amx holds 2-byte elements, with tokens and head_dim in multiples of 32, "
            f"not {element_bytes}-byte elements of {tokens} tokens and head_dim {content // 2}"
        )


def unpack_into(dense: Elements, packed: Elements, codec: str) -> None:
    """Undo the packing of many pages at once.

    Args:
        dense: [..., N, C], any strides but along C; written.
        packed: [..., N * C], contiguous, elements of the same width.
        codec: one that `check_page` accepts for these pages.
    """
    for plain, kernel in _matched(dense, packed, codec):
        plain[...] = kernel


def pack_into(packed: Elements, dense: Elements, codec: str) -> None:
    """The reverse of `unpack_into`; `packed` is written."""
    for plain, kernel in _matched(dense, packed, codec):
        kernel[...] = plain


def _matched(dense: Elements, packed: Elements, codec: str) -> tuple[tuple[Elements, Elements], ...]:
    """Views of K and of V: (dense, packed), of equal shapes, where equal places hold equal elements."""
    outer, (tokens, content) = dense.shape[:-2], dense.shape[-2:]
    size = content // 2
    plain_k, plain_v = dense[..., :size], dense[..., size:]
    k, v = packed[..., : tokens * size], packed[..., tokens * size :]
    if codec != "page:amx":
        return (
            (plain_k, k.reshape(*outer, size, tokens).swapaxes(-1, -2)),
            (plain_v, v.reshape(*outer, tokens, size)),
        )
    # K goes by pairs of elements, which move as one of twice the width.
    pairs, packed_pairs = plain_k.view(np.uint32), k.view(np.uint32)
    rows = v.reshape(*outer, size // 16, tokens // 2, 16, 2)
    return (
        (
            pairs.reshape(*outer, tokens // 16, 16, size // 2),
            packed_pairs.reshape(*outer, tokens // 16, size // 2, 16).swapaxes(-1, -2),
        ),
        (plain_v.reshape(*outer, tokens // 2, 2, size // 16, 16), np.moveaxis(rows, (-3, -1), (-4, -3))),
    )


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
    check_page(codec, tokens, content, page.element_size())
    bits = _BITS[page.element_size()]
    source, target = page.view(bits).numpy(), out.view(bits).numpy()
    if to_pages:
        pack_into(target.reshape(heads, -1), source, codec)
    else:
        unpack_into(target, source.reshape(heads, -1), codec)
    return out
