"""How the rows of an attention layer lie in its blocks, as vLLM's kernels write them.

vLLM registers a layer as [blocks, heads, rows, content] and calls a row's content bytes where a kernel gives
them their meaning. A row mostly lies together, as its view shows it. But some kernels write two *planes*: in
front the values of all rows of a block, behind them the scales of all rows. Then the view is only right in
how many bytes a block has. And some have two *slots*, one for K and one for V: a row of a slot has all heads,
or, with NVFP4, each slot has planes of its own.

Each plane of a layer, or of its slots, and each slot without planes, becomes a layer of a KV group of its
own; these groups have the same block table. What is not certain is refused, with the layer's name.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec
from vllm.version import __version_tuple__ as version

from p2pkv.config import ConfigError
from p2pkv.kv.layouts import plane_of
from p2pkv.page_packings import PAGE_PREFIX


class RowForm(NamedTuple):
    """Rows of one layer.

    Attributes:
        tokens: how many a row stands for; it is written when the last of them is computed.
        planes: bytes of a row's values and of its scales, in each slot; () if a row lies together.
        slot_heads: KV heads in each of two slots; 0: there are none, and heads are the view's own.
        mixed: scales of several tokens of a head are mixed, so those of a block travel together.
        by_head: K and V of a head lie together, not all K in front of all V.
    """

    tokens: int
    planes: tuple[int, ...]
    slot_heads: int = 0
    mixed: bool = False
    by_head: bool = False

    def codec(self, plane: str, layers: str) -> str:
        """The codec of this plane; `layers`: that of the layers without planes."""
        return MIXED_SCALES if self.mixed and plane.endswith("scales") else layers


MIXED_SCALES = f"{PAGE_PREFIX}nvfp4_scales"
"""NVFP4's scales as vLLM writes them for compute capability 10: of V, those of four tokens are mixed
(`swizzle_scale_offset` in csrc/nvfp4_kv_cache_kernels.cu), and of K they are or are not, by version."""

LATENT = {584: (576, 8), 528: (512, 16), 288: (256, 32)}
"""Latents, by bytes of a row. DeepSeek V4's `fp8_ds_mla`: 448 numbers of fp8 and 64 of bfloat16, and 7 scales
and a byte of padding; V4.1's: 512 numbers of fp8 and 16 scales; its `nvfp4_ds_mla`: 512 of 4 bits and 32."""

INDEXER = {132: (128, 4), 68: (64, 4)}
"""Keys of the indexers of DeepSeek V3.2 and V4, by bytes of a row: 128 numbers of fp8 and a float32, or 128
of MXFP4 and a scale for each 32 of them."""

NVFP4_BY_HEAD = {"FLASHINFER": False, "MINIMAX_M3_SPARSE": True}
"""See `RowForm`, by the attention backend: `_nvfp4_kv_views` in flashinfer.py has [K | scales | V | scales],
and `nvfp4_kv_cache_views` of MiniMax-M3 has that for each head."""


def row_form(name: str, spec: KVCacheSpec, module: Any) -> RowForm:
    """How the rows of this attention layer lie; `module`: the layer itself, as in vLLM's
    static_forward_context. Raises ConfigError if that is not known."""
    tokens: int | Fraction = getattr(spec, "tokens_per_state", 1)
    if tokens < 1 or int(tokens) != tokens:
        raise ConfigError(
            f"this model's layer {name} keeps {1 / tokens} rows for each token: p2pkv moves layers with "
            "one row for a token, or for several; serve this model without p2pkv"
        )
    if spec.block_size % int(tokens):
        raise ConfigError(
            f"this model's layer {name} has a row for each {tokens} tokens, and blocks of {spec.block_size}: "
            "expected whole rows in a block; choose another --block-size"
        )
    if getattr(spec, "num_head_slots", None) and spec.kv_quant_mode.is_nvfp4:
        return _nvfp4_form(name, spec, module)
    return RowForm(int(tokens), _planes(name, spec), _slot_heads(name, spec))


def _nvfp4_form(name: str, spec: Any, module: Any) -> RowForm:
    """Of K and of V. Raises ConfigError."""
    planes, slots = (spec.head_size // 2, spec.head_size // 16), spec.num_head_slots
    backend = module.get_attn_backend().get_name() if module is not None else "an unknown backend"
    if slots != 2 * spec.num_kv_heads or spec.state_content_size_bytes != sum(planes):
        raise _unknown(name, spec, f"{slots} slots of {spec.state_content_size_bytes} bytes in NVFP4")
    if backend not in NVFP4_BY_HEAD:
        raise _unknown(name, spec, f"NVFP4 numbers of {backend}")
    linear = any(current_platform.is_device_capability_family(family) for family in (80, 90, 120))
    return RowForm(1, planes, spec.num_kv_heads, not linear, NVFP4_BY_HEAD[backend])


def _slot_heads(name: str, spec: Any) -> int:
    """`RowForm.slot_heads` of this layer. Raises ConfigError."""
    slots, heads = getattr(spec, "num_head_slots", None), spec.num_kv_heads
    if slots is None:
        return 0
    if current_platform.is_rocm():
        raise _unknown(name, spec, "slots for K and V, which ROCm's kernels shuffle")
    nbytes = heads * (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
    content = spec.state_content_size_bytes
    if slots != 2 or 2 * content != nbytes:
        raise _unknown(name, spec, f"{slots} slots of {content} bytes for {heads} heads")
    return int(heads)


def _planes(name: str, spec: Any) -> tuple[int, ...]:
    width = getattr(spec, "state_content_bytes", None)
    if getattr(spec, "model_version", None) is not None:
        if width is None:  # numbers of the cache's own type, one row after the other
            return ()
        if spec.model_version != "deepseek_v4" or width not in LATENT:
            raise _unknown(name, spec, f"rows of {width} bytes")
        # Since vLLM 0.33 the scales of V4.1's rows lie behind each row's own values.
        return () if width < 584 and version >= (0, 33) else LATENT[width]
    if spec.kv_quant_mode.is_turboquant and current_platform.is_rocm():
        raise _unknown(name, spec, "scales in a region of each block, as ROCm's kernels write them")
    # An indexer's keys with scales are bytes, without a name for the type of numbers in them. Not all such
    # layers of vLLM have the role of an indexer.
    bare = isinstance(spec, MLAAttentionSpec) and spec.cache_dtype_str is None
    if not bare or spec.dtype != torch.uint8 or width is not None:
        return ()
    if spec.head_size not in INDEXER:
        raise _unknown(name, spec, f"keys of {spec.head_size} bytes")
    if current_platform.is_rocm():
        raise _unknown(name, spec, "keys that ROCm's kernels shuffle")
    return INDEXER[spec.head_size]


def _unknown(name: str, spec: KVCacheSpec, what: str) -> ConfigError:
    return ConfigError(
        f"this model's layer {name} ({type(spec).__name__}) has {what}: p2pkv does not know how they lie "
        "in a block; serve this model without p2pkv"
    )


def plane_views(
    name: str, form: RowForm, tensor: torch.Tensor, module: Any = None
) -> list[tuple[str, torch.Tensor]]:
    """Each plane's name, and the plane as a layer of its own. Raises ConfigError for views of other sizes.

    `module`: the layer itself. Where vLLM packs layers block by block, it registers whole blocks; only the
    layer's own view shows the kernel blocks, each of which has planes of its own.
    """
    if form.slot_heads and form.planes:
        return [
            (f"{slot} {plane}".rstrip(), view)
            for side, slot in enumerate(("keys", "values"))
            for plane, view in _slot_planes(name, form, tensor, side)
        ]
    if form.slot_heads:
        blocks, _, rows, _ = tensor.shape
        halves = (each.view(blocks, rows, form.slot_heads, -1).transpose(1, 2) for each in tensor.unbind(1))
        return list(zip(("keys", "values"), halves, strict=True))
    if not form.planes:
        return [("", tensor)]
    if tensor.element_size() != 1 or tensor.shape[-1] != sum(form.planes):
        raise ConfigError(
            f"{name} is registered as {tensor.dtype} {list(tensor.shape)}: p2pkv expected rows of "
            f"{sum(form.planes)} bytes, as vLLM 0.33 registers this layer"
        )
    values, scales = form.planes
    bound = getattr(module, "kv_cache", None)
    rows = bound.shape[-2] if isinstance(bound, torch.Tensor) and bound.dim() > 2 else 0
    planes = (("values", 0, values), ("scales", values, scales))
    return [(plane, plane_of(tensor, before, width, rows)) for plane, before, width in planes]


def _slot_planes(
    name: str, form: RowForm, tensor: torch.Tensor, side: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The planes of K (`side` 0) or V (1), each of all heads: [blocks, heads, rows, width], with the strides
    of heads and rows in the order of `tensor`'s. Raises ConfigError."""
    blocks, slots, rows, content = tensor.shape
    heads_first = tensor.stride()[1:] == (rows * content, content, 1)
    if not heads_first and (form.by_head or tensor.stride()[1:] != (content, slots * content, 1)):
        raise ConfigError(
            f"{name} is registered as {list(tensor.shape)} with strides {list(tensor.stride())}: p2pkv "
            "expected blocks whose slots and rows lie together, as vLLM 0.33 registers this layer"
        )
    begin, per_head = int(tensor.storage_offset()), rows * content
    begin += side * (per_head if form.by_head else form.slot_heads * per_head)
    for plane, width in zip(("", "scales"), form.planes, strict=True):
        strides = (rows * width, width) if heads_first else (width, form.slot_heads * width)
        if form.by_head:
            strides = (2 * per_head, width)
        size = (blocks, form.slot_heads, rows, width)
        yield plane, tensor.as_strided(size, (tensor.stride(0), *strides, 1), begin)
        begin += rows * width if form.by_head else form.slot_heads * rows * width
