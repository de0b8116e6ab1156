"""Kinds of KV groups, as vLLM describes them, also of whole models, and what a made-up model writes."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode, VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.version import __version_tuple__ as version

from p2pkv.demo.tiny_model import TinyFiles
from support.connector.instances import BLOCK, LONGEST, SMALL, vllm_config
from support.connector.states import DeltaNet, Mamba2, put_state, spec_of
from support.models.families import TinyDeepseek, TinyGemma, TinyQwen

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM 0.32 has these functions there
    from vllm.v1.core import kv_cache_utils as planning

HEADS = SMALL.kv_heads
RECURRENT = Mamba2(16, 4, 1, 6)

MakeSpec = Callable[[int, int], KVCacheSpec]
"""A layer's description on a rank, by the tokens of a block and the tensor-parallel size."""


def planned(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    groups = planning.get_kv_cache_groups(config, specs)
    return planning.get_kv_cache_config_from_groups(config, groups, 1 << 30)


@dataclass(frozen=True)
class Kind:
    """A model's KV layers, in their order.

    Attributes:
        caching: vLLM's --enable-prefix-caching.
        layout: vLLM's name of the memory layout.
        block: tokens of a block, vLLM's --block-size; prefixes are found in units of BLOCK.
        model: whose configuration the instances have.
        recurrent: what its recurrent layers are.
        pool: tokens of which a compressor makes one row, from what lies in rings.
        replayed: tokens before a cached prefix's end that vLLM computes again.
    """

    name: str
    layers: tuple[MakeSpec, ...]
    caching: bool = True
    layout: str = "LBNHC"
    block: int = BLOCK
    model: TinyFiles = SMALL
    recurrent: Mamba2 | DeltaNet = RECURRENT
    pool: int = 1
    replayed: int = 0

    def specs(self, tp: int) -> dict[str, KVCacheSpec]:
        made = [make(self.block, tp) for make in self.layers]
        return {
            f"model.layers.{number}.{'mixer' if isinstance(spec, MambaSpec) else 'self_attn.attn'}": spec
            for number, spec in enumerate(made)
        }

    def kv_config(self, config: VllmConfig, blocks: int) -> KVCacheConfig:
        """vLLM's own groups of the layers, and its plan of their memory; `config` is made to fit."""
        cache, tp = config.cache_config, config.parallel_config.tensor_parallel_size
        cache.enable_prefix_caching = self.caching
        config.scheduler_config.enable_chunked_prefill = True  # vLLM's CPU has none for MLA
        cache.kv_cache_layout = self.layout
        cache.block_size, cache.prefix_match_unit = self.block, BLOCK if self.block > BLOCK else None
        specs = self.specs(tp)
        for name, spec in specs.items():
            if isinstance(spec, MambaSpec):
                cache.mamba_cache_mode, cache.mamba_block_size = spec.mamba_cache_mode, spec.block_size
                config.compilation_config.static_forward_context[name] = self.recurrent.module(tp)
        cache.num_gpu_blocks_override = blocks
        return planned(config, specs)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class WholeModel(Kind):
    """The layers of vLLM's own model, and the sizes of blocks that vLLM chooses for them."""

    layers: tuple[MakeSpec, ...] = ()

    def specs(self, tp: int) -> dict[str, KVCacheSpec]:
        config = built(self.model, self.block, tp)
        layers = get_layers_from_vllm_config(config, AttentionLayerBase)
        with set_current_vllm_config(config):
            return {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}

    def kv_config(self, config: VllmConfig, blocks: int) -> KVCacheConfig:
        tp, cache = config.parallel_config.tensor_parallel_size, config.cache_config
        made = built(self.model, self.block, tp)
        for name in ("block_size", "mamba_block_size", "mamba_cache_mode", "mamba_page_size_padded"):
            setattr(cache, name, getattr(made.cache_config, name))
        cache.kv_cache_layout, cache.num_gpu_blocks_override = self.layout, blocks
        config.scheduler_config.enable_chunked_prefill = True
        config.compilation_config.static_forward_context.update(
            made.compilation_config.static_forward_context
        )
        return planned(config, self.specs(tp))


@cache
def built(model: TinyFiles, block: int, tp: int) -> VllmConfig:
    """A configuration with vLLM's own layers of this model, as the first of `tp` ranks has them. `block`:
    --block-size, which vLLM raises for some models."""
    config = vllm_config("P", model=model)
    config.cache_config.block_size = block
    config.parallel_config.tensor_parallel_size = tp
    config.compilation_config.mode = CompilationMode.NONE
    alone: dict[str, Any] = {"world_size": 1, "rank_in_group": 0, "is_first_rank": True, "is_last_rank": True}
    alone["device_group"] = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_PP", "_DP", "_EP", "_PCP", "_DCP"):
            patch.setattr(parallel_state, name, SimpleNamespace(**alone))
        patch.setattr(parallel_state, "_TP", SimpleNamespace(**{**alone, "world_size": tp}))
        initialize_model(config)
        current_platform.update_block_size_for_backend(config)
    return config


def of(kind: type[KVCacheSpec], **more: Any) -> MakeSpec:
    """The same on every rank."""
    return lambda block, tp: kind(block_size=block, **more)


def full(dtype: torch.dtype, kind: type[AttentionSpec] = FullAttentionSpec, **more: int) -> MakeSpec:
    """`kind`: or another attention with KV heads of its own, with what it has besides."""
    return lambda block, tp: kind(
        block_size=block, num_kv_heads=HEADS // tp, head_size=32, dtype=dtype, **more
    )


def window(dtype: torch.dtype, tokens: int) -> MakeSpec:
    return full(dtype, SlidingWindowSpec, sliding_window=tokens)


def chunked(dtype: torch.dtype, tokens: int) -> MakeSpec:
    """Llama 4: a layer sees the tokens from the last multiple of `tokens` on."""
    return full(dtype, ChunkedLocalAttentionSpec, attention_chunk_size=tokens)


def reference(dtype: torch.dtype, tokens: int) -> MakeSpec:
    """Generated tokens see the prompt, and a window of their own."""
    return full(dtype, RSWASpec, rswa_window=tokens)


def latent(dtype: torch.dtype) -> MakeSpec:
    return of(MLAAttentionSpec, num_kv_heads=1, head_size=48, dtype=dtype)


BYTES: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.uint8}


def opaque(row: int) -> MakeSpec:
    """Latents of DeepSeek V3.2, `fp8_ds_mla`: a token's bytes lie together."""
    more = {"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": row, **BYTES}
    return of(MLAAttentionSpec, head_size=576, **more)


def indexer(tokens: int) -> MakeSpec:
    return of(MLAAttentionSpec, head_size=132, tokens_per_state=tokens, **BYTES)


PLANES = {584: 8, 132: 4}
"""Bytes of a row: how many of them are scales, which lie behind the values of all rows of a block."""
if version < (0, 33):
    PLANES |= {528: 16, 288: 32}

V4: dict[str, Any] = {
    "head_size": 512,
    "cache_dtype_str": "fp8_ds_mla",
    "state_content_bytes": 584,
    "model_version": "deepseek_v4",
    **BYTES,
}


def compressed(tokens: int, row: int = 584) -> MakeSpec:
    return of(MLAAttentionSpec, tokens_per_state=tokens, **V4 | {"state_content_bytes": row})


def latent_window(tokens: int, row: int = 584, **others: Any) -> MakeSpec:
    return of(SlidingWindowMLASpec, sliding_window=tokens, **V4 | {"state_content_bytes": row} | others)


def compressor(tokens: int, size: int) -> MakeSpec:
    return of(SlidingWindowMLASpec, num_kv_heads=1, head_size=size, dtype=F32, sliding_window=tokens)


def keys(tokens: int) -> MakeSpec:
    """Qwen4-exp's compressed keys."""
    return of(MLAAttentionSpec, num_kv_heads=1, head_size=24, dtype=BF16, tokens_per_state=tokens)


def ring(slots: int, dtype: torch.dtype, heads: int = 1) -> MakeSpec:
    """What a compressor needs of the last tokens; all of it on every rank."""
    return lambda block, tp: CircularBufferSpec(
        block_size=slots, num_kv_heads=heads, head_size=24, head_size_v=0, dtype=dtype
    )


def state(mode: str, **more: Any) -> MakeSpec:
    """A recurrent layer of two precisions. Without prefix caching one block is the whole request's."""

    def make(block: int, tp: int) -> KVCacheSpec:
        spec = spec_of(RECURRENT, tp, (torch.bfloat16, torch.float32), mamba_cache_mode=mode)
        return replace(spec, block_size=block if mode == "align" else LONGEST, **more)

    return make


F32, BF16 = torch.float32, torch.bfloat16
_INSIDE = state("align", num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
"""As Mamba-2's on GPUs, whose forward also writes the state at a block's end that it passes."""
_ALL = (state("align"), full(BF16), window(F32, 40))

ATTENTION = Kind("attention", (full(F32), full(F32)))
KINDS = (
    ATTENTION,
    Kind("MLA", (latent(BF16), latent(BF16)), model=TinyDeepseek()),
    Kind("windows", (window(F32, 20), full(F32), window(F32, 20), full(F32)), layout="BLHNC"),
    Kind("chunks", (chunked(F32, 32), full(F32), chunked(F32, 32), full(F32)), layout="BLHNC"),
    Kind("reference-windows", (reference(F32, 20), reference(F32, 20))),
    Kind("two-precisions", (full(BF16), window(F32, 20), full(BF16), window(F32, 20))),
    Kind("states", (state("align"), full(BF16), state("align"), full(BF16))),
    Kind("states-uncached", (state("none"), full(BF16), state("none"), full(BF16)), caching=False),
    Kind("states-in-mid-step", (_INSIDE, full(BF16), _INSIDE, full(BF16))),
    Kind("parts-of-blocks", (state("align"), full(BF16), state("align"), full(BF16)), block=2 * BLOCK),
    Kind("M3", (full(BF16), latent(BF16), full(BF16), latent(BF16))),
    Kind("V3.2", (opaque(656), indexer(1), opaque(656), indexer(1)), model=TinyDeepseek()),
    Kind(
        "V4",
        (latent_window(20), compressed(4), indexer(4), compressor(8, 64), compressed(8), compressor(8, 32)),
        layout="BLHNC",
        model=TinyDeepseek(),
    ),
    # DeepSeek V4.1, GLM5-Next and Qwen4-exp, as their GPU code lays them out (deepseek_v41/compressor.py,
    # glm5next/common/attention.py, qwen4_exp/common/qsa_cache.py): every kind of layer, and small ones.
    Kind(
        "V4.1",
        (latent_window(20, 528), compressed(2, 528), indexer(2), ring(8, F32), compressed(2, 288)),
        layout="BLHNC",
        model=TinyDeepseek(),
        pool=2,
    ),
    Kind(
        "GLM5-Next",
        (state("align"), opaque(656), indexer(4), ring(8, BF16, heads=2)),
        layout="BLHNC",
        model=TinyDeepseek(),
        pool=4,
    ),
    Kind("Qwen4-exp", (state("align"), full(BF16), keys(4), ring(4, BF16)), layout="BLNHC", pool=4),
    Kind("all", _ALL),
    Kind("all-packed", _ALL, layout="BLHNC"),
)
"""All but the first five have blocks that vLLM zeroes."""
if version >= (0, 33):
    replayed = latent_window(20, 528, bounded_replay=True)
    (v41,) = (kind for kind in KINDS if kind.name == "V4.1")
    KINDS += (replace(v41, name="V4.1-replay", layers=(replayed, *v41.layers[1:]), replayed=20),)

GEMMA = WholeModel("Gemma-3", layout="LBHNC", block=2 * BLOCK, model=TinyGemma())
QWEN = WholeModel("Qwen3-Next", layout="LBHNC", model=TinyQwen(), recurrent=DeltaNet(2, 4, 128, 128))


class Contents:
    """What a made-up model writes: each number is a hash of all tokens up to its own, and of its place. The
    numbers are whole and at most 128, so that every type of numbers holds them. `tokens`: how many there
    are."""

    def __init__(self, tokens: Sequence[int], weights: int = 0) -> None:
        hashes, last = [], weights
        for token in tokens:
            last = zlib.crc32(token.to_bytes(4, "little"), last)
            hashes.append(last)
        self._hashes = torch.tensor(hashes, dtype=torch.int64)
        self.tokens = len(hashes)

    def rows(self, span: range, layer: int, heads: range, view: torch.Tensor) -> torch.Tensor:
        """[token, head, content] of these tokens; where a row is for several, `span` has the last ones."""
        hashes = self._hashes[span.start : span.stop : span.step, None, None]
        return _values(hashes, layer, _factors(heads, view.shape[-1])).to(view.dtype)

    def put_state(
        self,
        tokens: int,
        layer: int,
        page: torch.Tensor,
        spec: MambaSpec,
        place: Any,
        recurrent: Mamba2 | DeltaNet = RECURRENT,
    ) -> None:
        """The state after so many tokens, to the page of a rank; `place`: see `put_state`."""
        channels, elements = recurrent.sizes
        factors = _factors(range(1), recurrent.steps * channels + elements)[0]
        found = _values(self._hashes[tokens - 1], layer, factors)
        windows, states = found.split([recurrent.steps * channels, elements])
        put_state(page, recurrent, spec, place, "SD", windows.view(recurrent.steps, channels), states)


@cache
def _factors(heads: range, width: int) -> torch.Tensor:
    """[head, content]: one for each place of a row."""
    numbers = torch.tensor(heads)[:, None] * width + torch.arange(width)
    return (2 * numbers + 1) * 2654435761


def _values(hashes: torch.Tensor, layer: int, factors: torch.Tensor) -> torch.Tensor:
    mixed = hashes * factors + layer * 40503
    return (((mixed ^ (mixed >> 15)) >> 13) & 127) + 1


@cache
def _places(rows: int, *widths: int) -> torch.Tensor:
    """[row, byte]: where each lies in a block, whose planes have rows of these widths."""
    row, first, places = torch.arange(rows)[:, None], 0, []
    for width in widths:
        places.append(first * rows + row * width + torch.arange(width))
        first += width
    return torch.cat(places, dim=1)


class Rows:
    """The rows of a layer's blocks, as vLLM's kernels write them. `tokens`: that a row stands for;
    `in_block`: rows of a block."""

    def __init__(self, view: torch.Tensor, spec: AttentionSpec) -> None:
        self._view = view
        self.tokens = int(spec.tokens_per_state)
        self.in_block = spec.block_size // self.tokens
        content = view.shape[-1]
        widths = [content]
        if view.dtype == torch.uint8 and content in PLANES:
            widths = [content - PLANES[content], PLANES[content]]
        self._planes = len(widths) > 1
        if self._planes:
            self._places = _places(self.in_block, *widths)

    def complete(self, span: range) -> range:
        """The last token of each row that is complete with one of these tokens."""
        first = -(-(span.start + 1) // self.tokens) * self.tokens - 1
        return range(first, span.stop, self.tokens)

    def get(self, blocks: Sequence[int]) -> torch.Tensor:
        """[row, head, content] of whole blocks."""
        pages = self._view[list(blocks)]
        if not self._planes:
            return pages.transpose(1, 2).flatten(0, 1)
        return pages.flatten(1)[:, self._places].flatten(0, 1)[:, None]

    def put(self, table: Sequence[int], ends: Sequence[int], rows: torch.Tensor) -> None:
        """`rows`: [row, head, content], which end with the tokens `ends`."""
        numbers = torch.tensor(ends, dtype=torch.int64) // self.tokens
        blocks, slots = torch.tensor(table)[numbers // self.in_block], numbers % self.in_block
        if not self._planes:
            # Indices around a slice come first: [row, head, content].
            self._view[blocks, :, slots] = rows
            return
        for block, slot, row in zip(blocks.tolist(), slots.tolist(), rows, strict=True):
            self._view[block].view(-1)[self._places[slot]] = row[0]


def seen_by(spec: KVCacheSpec, span: range, request: Request) -> list[range]:
    """The tokens whose KV a layer reads to compute those of `span`."""
    first, token, prompt = 0, span.start, request.num_prompt_tokens
    if isinstance(spec, ChunkedLocalAttentionSpec):
        first = token // spec.attention_chunk_size * spec.attention_chunk_size
    elif isinstance(spec, SlidingWindowSpec):
        first = max(0, token - spec.sliding_window + 1)
        if getattr(spec, "prefix_replay_tokens", 0):
            first = max(first, request.replay_start)
    elif isinstance(spec, RSWASpec) and token > prompt:
        return [range(prompt), range(max(prompt, token - spec.rswa_window + 1), span.stop)]
    return [range(first, span.stop)]


def heads_of(spec: AttentionSpec, tp: int, rank: int) -> range:
    shared = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec | CircularBufferSpec)
    first = 0 if shared else rank * spec.num_kv_heads
    return range(first, first + spec.num_kv_heads)
