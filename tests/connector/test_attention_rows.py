"""How a layer's rows lie in its blocks, by vLLM's own descriptions of layers and for each type of cache."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SparseCacheRole,
    get_kv_quant_mode,
)
from vllm.v1.worker.utils import AttentionGroup
from vllm.version import __version_tuple__ as version

from p2pkv.config import ConfigError
from p2pkv.connector.attention_rows import INDEXER, LATENT, MIXED_SCALES, RowForm, plane_views, row_form
from p2pkv.connector.connector import P2pKvConnector
from p2pkv.connector.describe import Layers, cache_of, make_ready
from p2pkv.kv import DENSE, PagedCache
from p2pkv.protocol.handshake import row_format
from p2pkv.protocol.messages import KvGroup
from support.connector.instances import kv_cache_config, vllm_config

SIZE = 256


def spec_of(make: Callable[[Any], Any]) -> KVCacheSpec:
    config = vllm_config("P")
    config.cache_config.block_size = SIZE
    with set_current_vllm_config(config):
        return make(config.cache_config).get_kv_cache_spec(config)


def swa(cache: Any, dtype: torch.dtype, row: int = 584) -> DeepseekV4SWACache:
    return DeepseekV4SWACache(
        512, 128, dtype, "swa", cache, TritonAttentionBackend, block_size=64, packed_bytes_per_token=row
    )


def packed_swa(cache: Any, row: int = 584) -> DeepseekV4SWACache:
    cache.cache_dtype = "fp8_ds_mla"
    return swa(cache, torch.uint8, row)


LAYERS: dict[str, tuple[Callable[[Any], Any], int, tuple[Any, ...]]] = {
    "V3.2's indexer": (lambda cache: DeepseekV32IndexerCache(132, torch.uint8, "i", cache), 1, INDEXER[132]),
    "V4's indexer": (lambda cache: DeepseekV4IndexerCache(132, torch.uint8, "i", cache, 4), 4, INDEXER[132]),
    "V4's indexer, MXFP4": (
        lambda cache: DeepseekV4IndexerCache(68, torch.uint8, "i", cache, 4),
        4,
        INDEXER[68],
    ),
    "V4's window": (packed_swa, 1, LATENT[584]),
    "V4.1's window": (partial(packed_swa, row=528), 1, LATENT[528] if version < (0, 33) else ()),
    "V4.1's window, NVFP4": (partial(packed_swa, row=288), 1, LATENT[288] if version < (0, 33) else ()),
    "V4's window, bfloat16": (lambda cache: swa(cache, torch.bfloat16), 1, ()),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_rows_of_vllm_s_own_layers(layer: str) -> None:
    make, tokens, planes = LAYERS[layer]
    spec = spec_of(make)
    form = form_of(spec)
    assert (form.tokens, form.planes) == (tokens, planes)
    assert not planes or sum(planes) == spec.state_content_size_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_an_indexer_s_keys_without_scales_lie_together(dtype: torch.dtype) -> None:
    """MiniMax-M3's."""
    role = SparseCacheRole.INDEXER
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=128, dtype=dtype, cache_role=role)
    assert form_of(spec) == RowForm(1, ())


# Types of caches.


class NvFp4:
    """As FlashInfer's backend, which cannot be imported without a GPU."""

    @staticmethod
    def customize_spec(spec: FullAttentionSpec) -> FullAttentionSpec:
        width = nvfp4_kv_cache_full_dim(spec.head_size)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=width)


ROWS, SLOTS = "rows", "K and V in slots of their own"
PLAIN = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")
PER_TOKEN_HEAD = ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")
TURBO = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys((*PLAIN, *PER_TOKEN_HEAD), (TritonAttentionBackend, ROWS)),
    **dict.fromkeys(("fp8_ds_mla", "nvfp4_ds_mla"), (MLACommonBackend, ROWS)),
    # Of the last one its own backend, for ROCm, is derived.
    **dict.fromkeys((*TURBO, "ultraquant_4bit"), (TurboQuantAttentionBackend, ROWS)),
    **dict.fromkeys(("nvfp4", "nvfp4_4over6"), (NvFp4, SLOTS)),
}
"""By --kv-cache-dtype: the backend that divides a block, and how; read in vLLM's kernels."""
if "octave_k3v4" in get_args(CacheDType):  # vLLM 0.33
    from vllm.v1.attention.backends.rocm_octave_attn import RocmOctaveAttentionBackend
    from vllm.v1.attention.ops.rocm_octave import register_rope_dim

    register_rope_dim(128, 128)
    kinds = ("octave_k3v4", "octave_k3v3", "octave_k3v3_compact")
    TYPES |= dict.fromkeys(kinds, (RocmOctaveAttentionBackend, ROWS))
CONTENT = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}


def test_each_type_of_cache_is_listed() -> None:
    assert set(get_args(CacheDType)) == TYPES.keys()


@pytest.mark.parametrize("kind", TYPES)
def test_a_cache_is_moved_as_rows_or_by_planes_of_slots(kind: str) -> None:
    """Scales lie in the row of their token and head; or heads have slots, with planes."""
    backend, how = TYPES[kind]
    latent = kind in CONTENT
    spec: Any = (MLAAttentionSpec if latent else FullAttentionSpec)(
        block_size=64,
        num_kv_heads=1 if latent else 4,
        head_size=576 if latent else 128,
        dtype=torch.bfloat16 if kind == "auto" else kv_cache_dtype_str_to_dtype(kind, None),
        kv_quant_mode=get_kv_quant_mode(kind),
        state_content_bytes=CONTENT.get(kind),
        **({"cache_dtype_str": kind} if latent else {}),
    )
    spec = backend.customize_spec(spec)
    # This machine's device is none of those for which the scales of a token lie together.
    assert form_of(spec) == (RowForm(1, (64, 8), 4, mixed=True) if how == SLOTS else RowForm(1, ()))


def test_scales_that_have_been_loaded_stay() -> None:
    """vLLM's own first forward sets all of a layer's scales to 1."""
    impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
    impl._is_per_token_head_quant = True
    kv_cache = torch.zeros(3, 2, 16, 2 * (8 + 4), dtype=torch.int8)
    make_ready(torch.device("meta"), [SimpleNamespace(impl=impl, kv_cache=kv_cache), SimpleNamespace()])
    kv_cache.fill_(7)
    impl._ensure_scale_caches(kv_cache)
    assert bool((kv_cache == 7).all())


SLOTTED: Any = {"block_size": 16, "num_kv_heads": 4, "head_size": 32, "dtype": torch.bfloat16}
IN_SLOTS = {"num_head_slots": 2, "state_content_bytes": 4 * 32 * 2}


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_a_slot_for_k_and_one_for_v_are_layers_of_all_heads(layout: str) -> None:
    """As b12x's `_kv_cache_views` reads them, which cannot be imported without its kernels."""
    spec = FullAttentionSpec(**SLOTTED, **IN_SLOTS)
    apart = 2 * 16 * 128 * (3 if layout == "BLHNC" else 1)
    memory = torch.arange(5 * apart).to(torch.bfloat16)
    view = memory.as_strided((5, 2, 16, 128), (apart, 16 * 128, 128, 1))
    views = dict(plane_views("layer", form_of(spec), view))
    for name, expected in zip(("keys", "values"), view.unbind(1), strict=True):
        assert torch.equal(views[name], expected.unflatten(-1, (4, 32)).transpose(1, 2))
        assert views[name].untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        cache = PagedCache.from_tensors([views[name]], block_size=16)
        assert (cache.heads, cache.row_bytes, cache.blocks) == (4, 64, 5)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"kv_quant_mode": get_kv_quant_mode("turboquant_4bit_nc")}, "scales in a region of each block"),
        (IN_SLOTS, "slots for K and V, which ROCm's kernels shuffle"),
    ],
    ids=["turboquant", "slots"],
)
def test_what_rocm_lays_out_otherwise_is_refused(
    more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    with pytest.raises(ConfigError, match=why):
        form_of(FullAttentionSpec(**SLOTTED | more))


NVFP4: Any = {"block_size": 16, "num_kv_heads": 4, "head_size": 128, "dtype": torch.uint8}


def layer_of(backend: str = "FLASHINFER") -> Any:
    """As in vLLM's static_forward_context."""
    return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))


def form_of(spec: Any, backend: str = "FLASHINFER") -> RowForm:
    return row_form("layer", spec, layer_of(backend))


def nvfp4_spec(monkeypatch: pytest.MonkeyPatch, capability: int = 90, **changes: Any) -> Any:
    """For GPUs of compute capability 9.0 vLLM chooses FlashInfer's kernels of FA2, for 10.0 trtllm-gen's."""
    monkeypatch.setattr(
        type(current_platform), "is_device_capability_family", lambda self, family: family == capability
    )
    spec = FullAttentionSpec(**NVFP4, kv_quant_mode=get_kv_quant_mode("nvfp4"))
    return replace(NvFp4.customize_spec(spec), **changes)


def test_a_scheduler_without_the_model_starts_with_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks vLLM's layers, which tell the backend, are in the workers only."""
    config = kv_cache_config(spec=nvfp4_spec(monkeypatch))
    connector = P2pKvConnector(vllm_config("P"), KVConnectorRole.SCHEDULER, config)
    assert connector.producer is not None
    with pytest.raises(ConfigError, match="NVFP4 numbers of an unknown backend"):
        P2pKvConnector(vllm_config("P"), KVConnectorRole.WORKER, config)


@pytest.mark.parametrize("heads_first", [True, False])
def test_nvfp4_s_numbers_and_scales_are_layers_of_all_heads(
    heads_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `_nvfp4_kv_views` reads them, which cannot be imported without a GPU: K, its scales, V, its scales,
    each a dense [heads, rows, bytes] or [rows, heads, bytes]."""
    form = form_of(nvfp4_spec(monkeypatch))
    assert (form.planes, form.slot_heads, form.codec("keys scales", DENSE)) == ((64, 8), 4, DENSE)
    memory = torch.randint(256, (5, 9_600), dtype=torch.uint8)  # 384 bytes of padding behind each block
    inner = (16 * 72, 72) if heads_first else (72, 8 * 72)
    view = memory.as_strided((5, 8, 16, 72), (9_600, *inner, 1))
    views = dict(plane_views("layer", form, view))
    begin = 0
    for name, width in (("keys", 64), ("keys scales", 8), ("values", 64), ("values scales", 8)):
        dense = memory[:, begin : begin + 4 * 16 * width]
        expected = dense.view(5, 4, 16, width) if heads_first else dense.view(5, 16, 4, width).transpose(1, 2)
        assert torch.equal(views[name], expected)
        cache = PagedCache.from_tensors([views.pop(name)], block_size=16)
        assert (cache.heads, cache.row_bytes, cache.blocks) == (4, width, 5)
        begin += 4 * 16 * width
    assert not views


def mixed(scales: torch.Tensor) -> torch.Tensor:
    """[..., tokens, scales] as `swizzle_scale_offset` places them, by the formula that stands above it."""
    *outer, tokens, count = scales.shape
    fours = scales.reshape(*outer, tokens // 4, 4, 4, count // 4)
    return fours.permute(*range(len(outer) + 1), -2, -1, -3).reshape(scales.shape)


@pytest.mark.parametrize("backend", ["FLASHINFER", "MINIMAX_M3_SPARSE"])
@pytest.mark.parametrize("stop", [1, 16, 37, 48])
def test_scales_of_which_four_are_mixed_travel_by_blocks(
    monkeypatch: pytest.MonkeyPatch, stop: int, backend: str
) -> None:
    """From one rank of P to the second of two of D: what D's kernel reads of each token is what P's wrote."""
    form = form_of(nvfp4_spec(monkeypatch, capability=100), backend)
    codec = form.codec("values scales", DENSE)
    assert codec == form.codec("keys scales", DENSE) == MIXED_SCALES
    assert form.codec("values", DENSE) == DENSE
    truth = torch.randint(1, 256, (4, 48, 8), dtype=torch.uint8)  # of each head and token
    tables = {4: [3, 0, 4], 2: [1, 4, 2]}
    ranks = {}
    for heads in tables:
        pages = torch.zeros(5, 2 * heads, 16, 72, dtype=torch.uint8)
        scales = dict(plane_views("layer", form._replace(slot_heads=heads), pages))["values scales"]
        cache = PagedCache.from_tensors([scales], block_size=16, codec=codec)
        assert (cache.heads, cache.unit_tokens, cache.row_bytes) == (heads, 16, 16 * 8)
        ranks[heads] = cache, scales
    p, written = ranks[4]
    for place, block in enumerate(tables[4]):
        written[block] = mixed(truth[:, 16 * place : 16 * (place + 1)])
    d, received = ranks[2]
    group = KvGroup((1,), 4, p.row_bytes, 16, "uint8", codec, "")
    row = row_format(group, group)
    span = row.needed(0, stop)
    message = torch.zeros(p.nbytes(1, *span, 2), dtype=torch.uint8)
    p.gather(message, (0, 1), span, (2, 4), (tables[4],))
    d.scatter(message, (0, 1), span, (0, 2), (tables[2],))
    places = mixed(torch.arange(16 * 8).view(16, 8)).flatten().argsort()  # where the kernel looks
    read = torch.cat([received[block].flatten(1)[:, places].view(2, 16, 8) for block in tables[2]], dim=1)
    assert torch.equal(read[:, :stop], truth[2:, :stop])
    assert not received[[0, 3]].any()
    assert (
        row_format(group, msgspec.structs.replace(group, unit_tokens=32, row_bytes=2 * p.row_bytes)) is None
    )
    assert row_format(group, msgspec.structs.replace(group, codec=DENSE, unit_tokens=1, row_bytes=8)) is None


def test_minimax_m3_keeps_k_and_v_of_each_head_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its `nvfp4_kv_cache_views` describes them, whose module cannot be imported without its kernels."""
    form = form_of(nvfp4_spec(monkeypatch, capability=100), "MINIMAX_M3_SPARSE")
    pages = torch.randint(256, (5, 8, 16, 72), dtype=torch.uint8)
    views = dict(plane_views("layer", form, pages))
    for slot, name in enumerate(("keys", "values")):
        both = pages[:, slot::2].flatten(2)
        assert torch.equal(views[name].flatten(2), both[..., : 16 * 64])
        assert torch.equal(views[f"{name} scales"].flatten(2), both[..., 16 * 64 :])


@pytest.mark.parametrize("capability", [90, 100])
def test_a_rank_with_nvfp4_says_four_groups_of_the_model_s_heads(
    monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    spec, config = nvfp4_spec(monkeypatch, capability, num_kv_heads=2, num_head_slots=4), vllm_config("P")
    names = ["l.0", "l.1"]
    config.compilation_config.static_forward_context = dict.fromkeys(names, layer_of())
    caches = {name: torch.zeros(4, 4, 16, 72, dtype=torch.uint8) for name in names}
    _, said = cache_of(config, Layers(caches, kv_cache_config(spec=spec, layers=names)))
    scales = (MIXED_SCALES, 16, 128) if capability == 100 else (DENSE, 1, 8)
    found = [(group.heads, group.codec, group.unit_tokens, group.row_bytes) for group in said.groups]
    assert found == [(2, DENSE, 1, 64), (2, *scales)] * 2


def test_nvfp4_in_other_slots_or_strides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="2 slots of 72 bytes in NVFP4"):
        form_of(nvfp4_spec(monkeypatch, num_head_slots=2))
    with pytest.raises(ConfigError, match="NVFP4 numbers of NEW"):
        form_of(nvfp4_spec(monkeypatch), "NEW")
    spec = nvfp4_spec(monkeypatch)
    apart = torch.zeros(5, 8, 17, 72, dtype=torch.uint8)[:, :, :16]
    with pytest.raises(ConfigError, match="expected blocks whose slots and rows lie together"):
        plane_views("layer", form_of(spec), apart)


# Views.


def test_a_plane_is_found_in_kernel_blocks_of_any_size() -> None:
    """vLLM's indexers have kernel blocks of 64 tokens, whatever --block-size is."""
    spec = MLAAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    pages = torch.arange(8 * 64 * 132).to(torch.uint8).view(8, 1, 64, 132)
    (one, keys), (two, scales) = plane_views("i", form_of(spec), pages)
    assert (one, two) == ("values", "scales")
    flat = pages[5].flatten()
    assert torch.equal(keys[5, 0, 63], flat[63 * 128 : 64 * 128])
    assert torch.equal(scales[5, 0, 63], flat[64 * 128 + 63 * 4 :][:4])


def test_a_plane_is_found_in_kernel_blocks_between_other_layers() -> None:
    """GLM5-Next: vLLM packs its layers, and registers blocks of several of the indexer's kernel blocks."""
    spec = MLAAttentionSpec(
        block_size=2 * SIZE, num_kv_heads=1, head_size=132, dtype=torch.uint8, tokens_per_state=4
    )
    pages = torch.arange(4 * 3 * 128 * 132).bitwise_xor(torch.arange(4 * 3 * 128 * 132) >> 9).to(torch.uint8)
    registered = pages.view(4, 3, 128, 132)[:, 1:2]
    group = AttentionGroup(TritonAttentionBackend, ["i"], spec, 0, kernel_block_size=SIZE)
    bound = group.map_kv_cache_to_kernel_blocks(registered)
    planes = plane_views("i", form_of(spec), registered, SimpleNamespace(kv_cache=bound))
    ids = [number * group.kernel_block_stride + part for number in (3, 1) for part in (0, 1)]
    for (_, plane), before, width in zip(planes, (0, 128), (128, 4), strict=True):
        cache = PagedCache.from_tensors([plane], block_size=2 * SIZE, tokens_per_row=4)
        found = torch.empty(150 * width, dtype=torch.uint8)
        cache.gather(found, (0, 1), (0, 600), (0, 1), [[3, 1]])
        assert torch.equal(
            found, bound[ids].flatten(1)[:, 64 * before :][:, : 64 * width].flatten()[: len(found)]
        )


def test_a_view_of_another_size_is_refused() -> None:
    spec = MLAAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"expected rows of 132 bytes"):
        plane_views("i", form_of(spec), torch.zeros(8, 1, 64, 130, dtype=torch.uint8))
