"""How the elements of a row of KV are arranged, by codec.

"dense": a row is the K and V of one (token, head). "page:<isa>": a kernel of CPU attention packs the tokens
of a (block, head) together: first all K, then all V, in an order of the ISA's own. A `Packing` undoes that,
so that rows travel dense. A new one is an entry in `PACKINGS`: the handshake and `p2pkv/kv` read it
there. Pages of a codec that is not there travel whole, between equal caches.

Packing only moves elements, so here they are bits of some width, and each direction is one assignment.

Shape legend: N tokens in a page, D elements of K (and of V), C = 2 * D.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DENSE = "dense"
PAGE_PREFIX = "page:"

Elements = NDArray[Any]
Pairs = tuple[tuple[Elements, Elements], ...]
"""Views (dense, packed) of equal shapes, where equal places hold equal elements."""


def cpu_codec(isa: str) -> str:
    """The codec of vLLM's CPU attention with this ISA ("vec", "vec16", "amx", "neon", ...)."""
    return PAGE_PREFIX + isa


def is_paged(codec: str) -> bool:
    """Whether the tokens of a page are packed together."""
    return codec.startswith(PAGE_PREFIX)


@dataclass(frozen=True)
class Packing:
    """How pages of one codec are undone.

    Attributes:
        dtypes: element types with which vLLM uses this order; it packs fp8 in another.
        keys: views of K, from [..., N, D] dense and [..., N * D] packed; see `Pairs`.
        values: views of V, likewise.
        misfit: what is wrong with pages of N tokens, C elements and so many bytes in an element; "": nothing.
    """

    codec: str
    dtypes: tuple[str, ...]
    keys: Callable[[Elements, Elements], tuple[Elements, Elements]]
    values: Callable[[Elements, Elements], tuple[Elements, Elements]]
    misfit: Callable[[int, int, int], str] = lambda tokens, content, element_bytes: ""

    def check(self, tokens: int, content: int, element_bytes: int) -> None:
        """Raises ValueError unless pages of N = `tokens`, C = `content` can be packed and unpacked."""
        if content % 2:
            raise ValueError(f"rows of {content} elements do not hold a K and a V of one size")
        if reason := self.misfit(tokens, content, element_bytes):
            raise ValueError(f"{self.codec} {reason}")

    def views(self, dense: Elements, packed: Elements) -> Pairs:
        """Of K and V. `dense`: [..., N, C], any strides but along C; `packed`: [..., N * C], contiguous."""
        tokens, content = dense.shape[-2:]
        size, half = content // 2, tokens * content // 2
        keys = self.keys(dense[..., :size], packed[..., :half])
        return keys, self.values(dense[..., size:], packed[..., half:])

    def unpack(self, dense: Elements, packed: Elements) -> None:
        """Undo the packing of many pages at once: `dense` is written."""
        for plain, kernel in self.views(dense, packed):
            plain[...] = kernel

    def pack(self, packed: Elements, dense: Elements) -> None:
        """The reverse of `unpack`; `packed` is written."""
        for plain, kernel in self.views(dense, packed):
            kernel[...] = plain


def packing_of(codec: str) -> Packing:
    """Raises ValueError for a codec that cannot be undone."""
    if codec not in PACKINGS:
        raise ValueError(f"codec {codec!r} cannot be undone; known are {', '.join(PACKINGS)}")
    return PACKINGS[codec]


# vLLM's CPU attention.


def _transposed(dense: Elements, packed: Elements) -> tuple[Elements, Elements]:
    """[D, N]."""
    *outer, tokens, size = dense.shape
    return dense, packed.reshape(*outer, size, tokens).swapaxes(-1, -2)


def _as_it_is(dense: Elements, packed: Elements) -> tuple[Elements, Elements]:
    """[N, D]."""
    return dense, packed.reshape(dense.shape)


def _amx_keys(dense: Elements, packed: Elements) -> tuple[Elements, Elements]:
    """[N / 16, D / 2, 16, 2]: K goes by pairs of elements, which move as one of twice the width."""
    *outer, tokens, size = dense.shape
    pairs, packed_pairs = dense.view(np.uint32), packed.view(np.uint32)
    packed_pairs = packed_pairs.reshape(*outer, tokens // 16, size // 2, 16).swapaxes(-1, -2)
    return pairs.reshape(*outer, tokens // 16, 16, size // 2), packed_pairs


def _amx_values(dense: Elements, packed: Elements) -> tuple[Elements, Elements]:
    """[D / 16, N / 2, 16, 2]."""
    *outer, tokens, size = dense.shape
    rows = packed.reshape(*outer, size // 16, tokens // 2, 16, 2)
    return dense.reshape(*outer, tokens // 2, 2, size // 16, 16), np.moveaxis(rows, (-3, -1), (-4, -3))


def _amx_misfit(tokens: int, content: int, element_bytes: int) -> str:
    if element_bytes == 2 and tokens % 32 == 0 and content % 64 == 0:
        return ""
    return (
        "holds 2-byte elements, with tokens and head_dim in multiples of 32, "
        f"not {element_bytes}-byte elements of {tokens} tokens and head_dim {content // 2}"
    )


PACKINGS = {
    packing.codec: packing
    for packing in (
        Packing("page:vec", ("bfloat16", "float16", "float32"), _transposed, _as_it_is),
        Packing("page:vec16", ("bfloat16", "float16", "float32"), _transposed, _as_it_is),
        Packing("page:amx", ("bfloat16",), _amx_keys, _amx_values, _amx_misfit),
    )
}
"""All packings that can be undone, by codec."""
