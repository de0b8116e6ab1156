"""The states of recurrent layers from any P to any D: the plan, gather and scatter are the real ones.

How vLLM divides a state over its ranks is written down in support/`states`, as the elements of one global
state that each rank holds, and compared with vLLM's own layers.
"""

import itertools
import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
from vllm.model_executor.layers.mamba.short_conv import ShortConv as ShortConvLayer
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from p2pkv.config import ConfigError
from p2pkv.connector.describe import refuse_what_cannot_move
from p2pkv.connector.recurrent import conv_dim_first, form_of, state_entry, state_groups
from p2pkv.connector.stage_layers import Layer
from p2pkv.plan import make_plan
from p2pkv.protocol.extents import Coverage, Cutter, Extents
from p2pkv.protocol.handshake import GroupAssignment, row_formats, shapes
from support.connector.instances import BLOCK, FULL, kv_groups, make_request, tokens, vllm_config
from support.connector.states import (
    LAYERS,
    MODELS,
    TOKENS,
    WIDTH,
    DeltaNet,
    Dilated,
    Held,
    KimiDeltaNet,
    Linear,
    Mamba1,
    Mamba2,
    Model,
    ShortConv,
    Side,
    Truth,
    conv_layout,
    spec_of,
)
from support.kv.shapes import cut, rectangle

# From P to D.


def move(sources: list[Held], targets: list[Held], chunk: int, seed: int) -> int:
    prefill, decode = sources[0].said, targets[0].said
    assert all(held.said == prefill for held in sources) and all(held.said == decode for held in targets)
    wires = row_formats(prefill, decode)
    codecs = [wire.codec for wire in wires]
    sent = []
    for edge in make_plan(shapes(prefill), shapes(decode)).edges:
        debt = GroupAssignment(edge, wires[edge.group])
        extents = Extents({edge.group: debt.extent(0, TOKENS)})
        cutter, coverage = Cutter(extents), Coverage(extents)
        assert cut(cutter, {edge.group: [TOKENS - 1] * len(edge.layers)}, chunk) == ()
        while pieces := cut(cutter, {edge.group: [TOKENS] * len(edge.layers)}, chunk):
            coverage.filled(coverage.reserve(pieces))
            for piece in pieces:
                data = torch.empty(extents.size(piece), dtype=torch.uint8)
                held = sources[edge.source]
                pages = held.cache.seen_as(codecs)[edge.group]
                pages.gather(data, *rectangle(edge, piece, True), held.blocks)
                sent.append((edge, piece, data))
        assert not cutter.left and not coverage.left
    random.Random(seed).shuffle(sent)
    for edge, piece, data in sent:
        held = targets[edge.target]
        pages = held.cache.seen_as(codecs)[edge.group]
        pages.scatter(data, *rectangle(edge, piece, False), held.blocks)
    return sum(data.numel() for _, _, data in sent)


def ranks_of(
    model: Model, tp: int, layout: str, dtypes: tuple[torch.dtype, ...], draw: random.Random
) -> list[Held]:
    """All ranks of an engine, which may have any speculation, padding and order of its pages."""
    speculative = 0 if isinstance(model, Mamba1 | Linear) else draw.choice([0, 2])
    tables = tuple(draw.randrange(3) for _ in range(LAYERS))
    padding, interleaved = draw.choice([0, 64, 208]), draw.random() < 0.5
    side = Side(tp, layout, speculative, padding, interleaved, tables, draw.randrange(99))
    return [Held(model, side, dtypes, rank) for rank in range(tp)]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("layouts", [*product(["SD", "DS"], repeat=2)], ids="-".join)
def test_any_tensor_parallel_size_on_either_side(model: Model, layouts: tuple[str, str]) -> None:
    """Of every pair of sizes each rank of D holds its slice of the global state, and nothing else changed."""
    draw = random.Random(f"{model} {layouts}")
    dtypes = draw.choice([(torch.bfloat16, torch.float32), (torch.float16,) * 2, (torch.float32,) * 2])
    truth = Truth.of(model, dtypes, 1)
    sizes = [tp for tp in range(1, 9) if model.fits(tp)]
    prefill, decode = ([ranks_of(model, tp, name, dtypes, draw) for tp in sizes] for name in layouts)
    for sources, targets in product(prefill, decode):
        before = []
        for held in sources:
            held.put(truth)
        for held in targets:
            held.memory.random_()
            before.append(held.memory.clone())
        moved, needed = move(sources, targets, draw.choice([64, 1000, 1 << 20]), draw.randrange(99)), 0
        for held, noise in zip(targets, before, strict=True):
            found = held.memory.clone()
            held.memory.copy_(noise)
            held.put(truth)
            assert torch.equal(found, held.memory), f"{len(sources)} -> {len(targets)}, rank {held.rank}"
            channels, elements = model.held(len(targets), held.rank)
            needed += len(channels) * model.steps * dtypes[0].itemsize + len(elements) * dtypes[-1].itemsize
        assert moved == LAYERS * needed, "each byte that a rank of D needs travels once, and no padding does"


# What is said of them.


def one_layer(model: Model, tp: int = 1, **spec: Any) -> Layer:
    side = Side(tp, "SD", 0, 0, False, (0, 0, 0), 0)
    layer = Held(model, side, (torch.float32, torch.float32), 0).layers[0]
    return replace(layer, spec=replace(layer.spec, **spec))


def test_a_cpu_s_delta_net_meets_only_another_one() -> None:
    """vLLM's CPU kernels keep its state transposed."""
    found = state_groups([one_layer(DeltaNet(8, 16, 4, 4))], tp=1, dim_first=False)
    assert [one.described.shape.codec for one in found] == ["dense", "dense", "dense", "state:kv"]
    found = state_groups([one_layer(Mamba2(4, 4, 1, 4))], tp=1, dim_first=False)
    assert {one.described.shape.codec for one in found} == {"dense"}


def test_layers_of_two_kinds_make_groups_of_their_own() -> None:
    layers = [one_layer(DeltaNet(8, 16, 4, 4)), one_layer(Dilated(20)), one_layer(DeltaNet(8, 16, 4, 4))]
    found = state_groups(layers, tp=1, dim_first=False)
    assert [one.cache.layers for one in found] == [6, 6, 6, 2, 6]


def configured(modules: dict[str, Any], tp: int = 1, pp: int = 1) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=modules),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
    )


def test_the_layout_of_the_window_is_vllm_s() -> None:
    with conv_layout("DS"):
        assert conv_dim_first()
    with conv_layout("SD"):
        assert not conv_dim_first()


# What is refused, before any memory is there, and by whom.

STRANGE = [
    (
        Mamba2(16, 4, 8, 2),
        {"shapes": ((3, 96), (16, 4, 2), (16, 5, 4), (16, 5), (8, 5, 2)), "dtypes": (torch.float32,) * 5},
        {},
        1,
        "keeps 5 states for a request, and p2pkv expected 2.*--use-replayssm",
    ),
    (ShortConv(8), {"mamba_cache_mode": "all"}, {}, 1, "mamba_cache_mode 'all'.*knows 'none' and 'align'"),
    (ShortConv(8), {"mamba_type": SimpleNamespace(name="NEW")}, {}, 1, "of kind NEW"),
    (Mamba2(16, 4, 8, 2), {}, {"head_dim": 5}, 1, "64 channels in 16 heads of 5"),
    (Mamba2(16, 4, 8, 2), {}, {"norm": None}, 1, r"norm.n_groups = None.*vLLM's own layers"),
    (
        Mamba2(16, 4, 2, 2),
        {"shapes": ((3, 24), (4, 4, 2))},
        {},
        4,
        "divides B of its state into 2 heads, and --tensor-parallel-size is 4",
    ),
    (ShortConv(8), {}, {"conv_dim": 16}, 1, r"window of \[3, 8\] on a rank of 1.*expected 16 channels"),
    (ShortConv(8), {}, {"L_cache": 6}, 1, "at least 5 steps"),
    (Linear(4, 4), {}, {"head_dim": 8}, 1, r"state of \[4, 4, 4\] on a rank of 1.*4 heads of 64 elements"),
    (ShortConv(17), {}, {}, 1, None),
    (ShortConv(17), {"shapes": ((3, 1),)}, {}, 17, "divides x of its state into 1 heads.* is 17"),
]


@pytest.mark.parametrize(("model", "spec", "module", "tp", "said"), STRANGE)
def test_what_cannot_be_described_is_refused_with_the_layer_s_name(
    model: Model, spec: dict[str, Any], module: dict[str, Any], tp: int, said: str | None
) -> None:
    layer = one_layer(model)
    attributes = SimpleNamespace(**vars(model.module(tp)) | module)
    layer = replace(layer, spec=replace(layer.spec, **spec), module=attributes)
    kv_config = kv_groups(([layer.name], layer.spec))
    for refuse in (
        lambda: state_groups([layer], tp=tp, dim_first=False),
        lambda: refuse_what_cannot_move(configured({layer.name: attributes}, tp), kv_config),
    ):
        if said is None:
            refuse()
            continue
        with pytest.raises(ConfigError, match=f"^model.layers.0.mixer .*{said}"):
            refuse()


def test_pages_that_are_not_registered_as_vllm_does_are_refused() -> None:
    layer = one_layer(ShortConv(8))
    for pages in (layer.tensor.view(torch.float32), layer.tensor[..., :-4], layer.tensor[:, 0]):
        with pytest.raises(
            ConfigError, match=r"^model.layers.0.mixer is registered as .*\[blocks, 1, 1, 96\]"
        ):
            state_groups([replace(layer, tensor=pages)], tp=1, dim_first=False)


# vLLM's own layers, as they are on one rank of several, say how the channels of a state are divided. Their
# convolution has a weight for each channel: loaded from numbered channels, a rank's weights are the numbers
# of the channels in its part of the window, in their order.


HIDDEN = 64
OF_VLLM: list[Model] = [
    Mamba1(48, 3),
    Mamba2(16, 4, 1, 6),
    Mamba2(16, 4, 8, 6),
    DeltaNet(4, 8, 6, 4),
    KimiDeltaNet(8, 4),
    ShortConv(48),
]
RANKS = [(1, 0), (2, 0), (2, 1), (4, 1), (4, 3)]


def layer_of(model: Model, config: VllmConfig, name: str) -> tuple[MambaBase, torch.nn.Parameter, list[int]]:
    """vLLM's layer, the weights of its convolution, and the sizes of the parts they are loaded in."""
    caches = {"model_config": config.model_config, "cache_config": config.cache_config}
    some = SimpleNamespace(hidden_size=HIDDEN, hidden_act="silu", rms_norm_eps=1e-6)
    whole = [model.sizes[0]]
    layer: Any
    match model:
        case Mamba1():
            layer = MambaMixer(
                hidden_size=HIDDEN,
                ssm_state_size=model.state,
                conv_kernel_size=WIDTH,
                intermediate_size=model.channels,
                time_step_rank=4,
                use_conv_bias=True,
                use_bias=False,
                use_rms_norm=False,
                prefix=name,
                **caches,
            )
        case Mamba2():
            layer = MambaMixer2(
                hidden_size=HIDDEN,
                ssm_state_size=model.state,
                conv_kernel_size=WIDTH,
                intermediate_size=model.inner,
                use_conv_bias=True,
                use_bias=False,
                n_groups=model.groups,
                num_heads=model.heads,
                head_dim=model.size,
                prefix=name,
                **caches,
            )
        case DeltaNet():
            some.linear_num_key_heads, some.linear_num_value_heads = model.keys, model.values
            some.linear_key_head_dim, some.linear_value_head_dim = model.key, model.value
            some.linear_conv_kernel_dim = WIDTH
            layer = QwenGatedDeltaNetAttention(some, config, prefix=name)
        case KimiDeltaNet():
            some.linear_attn_config = {
                "head_dim": model.size,
                "num_heads": model.heads,
                "short_conv_kernel_size": WIDTH,
            }
            layer = KimiGatedDeltaNetAttention(some, config, prefix=name)
            whole = [model.heads * model.size] * 3
        case ShortConv():
            short = SimpleNamespace(conv_L_cache=WIDTH, conv_bias=False)
            layer = ShortConvLayer(short, model.channels, 0, prefix=name, **caches)
            return layer, layer.conv.weight, whole
    return layer, layer.conv1d.weight, whole


def numbered(weight: Any, parts: list[int]) -> list[int]:
    """Load the weights of channels 0, 1, 2, ...; what the rank then has."""
    channels = torch.arange(sum(parts), dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, WIDTH)
    for number, part in enumerate(channels.split(parts)):
        weight.weight_loader(weight, part.contiguous(), *([number] if len(parts) > 1 else []))
    assert torch.equal(weight.data[:, 0, 0], weight.data[:, 0, -1])
    return [int(channel) for channel in weight.data[:, 0, 0]]


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    made = vllm_config("P")
    made.cache_config.mamba_block_size = 16
    return made


_names = itertools.count()


@pytest.mark.parametrize(("tp", "rank"), RANKS)
@pytest.mark.parametrize("model", OF_VLLM, ids=str)
def test_a_rank_of_vllm_holds_the_channels_that_we_think(
    model: Model, tp: int, rank: int, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=tp, rank_in_group=rank))
    name = f"model.layers.{next(_names)}.mixer"
    with set_current_vllm_config(config):
        layer, weight, parts = layer_of(model, config, name)
        channels, elements = model.held(tp, rank)
        assert numbered(weight, parts) == channels.tolist()
        for layout in ("SD", "DS"):
            with conv_layout(layout):
                spec: Any = layer.get_kv_cache_spec(config)
                assert spec.shapes == model.shapes(tp, 0) and spec.mamba_type is model.kind
            form = form_of(name, spec, layer, tp=tp, dim_first=layout == "DS")
            assert form == form_of(name, spec, model.module(tp), tp=tp, dim_first=layout == "DS")
            pages = torch.zeros(2, 1, 1, spec.page_size_bytes, dtype=torch.int8)
            groups = state_groups([Layer(name, spec, pages, 0, 0, layer)], tp=tp, dim_first=layout == "DS")
            rows = sum(one.cache.layers * one.cache.heads * one.cache.row_bytes for one in groups)
            assert rows == spec.page_size_bytes
    if elements.size and isinstance(model, Mamba2 | DeltaNet):
        # One number for each head of the state.
        heads: Any = layer.dt_bias  # type: ignore[attr-defined]
        count = model.heads if isinstance(model, Mamba2) else model.values
        heads.weight_loader(heads, torch.arange(count, dtype=torch.float32))
        first = int(elements[0]) * count // model.sizes[1]
        assert heads.data.tolist() == [*range(first, first + count // tp)]


BLOCKS = 4


@pytest.mark.parametrize("padding", [0, 192], ids=["packed", "padded"])
@pytest.mark.parametrize("conv", ["SD", "DS"])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
def test_we_read_what_vllm_s_layers_see_in_its_pages(
    layout: str, conv: str, padding: int, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages as vLLM lays them out and registers them; a layer of its own finds its states in them."""
    model, tp, rank, block = Mamba2(16, 4, 1, 6), 4, 3, 2
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=tp, rank_in_group=rank))
    names = [f"model.layers.{next(_names)}.mixer" for _ in range(LAYERS)]
    with set_current_vllm_config(config), conv_layout(conv):
        layers: list[Any] = [layer_of(model, config, name)[0] for name in names]
        spec: Any = layers[0].get_kv_cache_spec(config)
        spec = replace(spec, page_size_padded=spec.page_size_bytes + padding)
        strides = compute_layout_strides(spec, BLOCKS, LAYERS, KVCacheLayout[layout])
        size = LAYERS * BLOCKS * spec.page_size_bytes
        raw = torch.randint(-128, 128, (64 + size,), dtype=torch.int8)
        placement = KVCacheTensor(size, names, strides[0], strides[1], 64)
        views = create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[layout], placement, spec.block_size)
        for layer, view in zip(layers, views, strict=True):
            layer.bind_kv_cache(view)
    recurrent = [
        Layer(name, spec, view, 0, number, layer)
        for number, (name, layer, view) in enumerate(zip(names, layers, views, strict=True))
    ]
    x, b, c, state = state_groups(recurrent, tp=tp, dim_first=conv == "DS")

    windows = torch.stack([layer.kv_cache[0][block] for layer in layers])
    windows = windows if conv == "SD" else windows.transpose(1, 2)  # [layer, step, channel]
    segments = windows.split([16, 6, 6], dim=2)
    states = torch.stack([layer.kv_cache[1][block] for layer in layers])
    for group, expected in zip((x, b, c, state), (*segments, states), strict=True):
        cache = group.cache
        assert expected.dtype == torch.float32
        out = torch.empty(cache.nbytes(cache.layers, 0, 1, cache.heads), dtype=torch.uint8)
        cache.gather(out, (0, cache.layers), (0, 1), (0, cache.heads), [[block]])
        assert torch.equal(out, expected.contiguous().view(torch.uint8).reshape(-1))


def test_a_prefill_leaves_its_window_at_the_first_steps() -> None:
    """Behind them is room for speculative tokens, which is why only they travel."""
    window = torch.full((3, 5, WIDTH - 1 + 2), 7.0)
    inputs = torch.randn(5, 9)
    causal_conv1d_fn_cpu(
        inputs,
        torch.randn(5, WIDTH),
        None,
        window,
        torch.tensor([0, 9]),
        cache_indices=torch.tensor([2]),
        has_initial_state=torch.tensor([False]),
    )
    assert torch.equal(window[2, :, : WIDTH - 1], inputs[:, 1 - WIDTH :])
    window[2, :, : WIDTH - 1] = 7.0
    assert torch.equal(window, torch.full_like(window, 7.0))


@pytest.mark.parametrize("speculative", [0, 2])
@pytest.mark.parametrize(("mode", "block"), [("none", 512), ("align", BLOCK), ("align", 2 * BLOCK)])
def test_the_entry_of_the_block_table_that_holds_the_state(mode: str, block: int, speculative: int) -> None:
    """On P, which computes all but the last token of a prompt, in chunks, and on D, which gets as much."""
    dtypes = (torch.float32, torch.float32)
    spec = replace(spec_of(ShortConv(8), 1, dtypes, speculative, mamba_cache_mode=mode), block_size=block)
    kv_config = kv_groups((["a"], FULL), (["b"], spec), blocks=200)
    for count in (1, 15, 16, 17, 31, 32, 33, 64, 65):
        manager = KVCacheManager(
            kv_config,
            max_model_len=512,
            scheduler_block_size=max(block, BLOCK),
            hash_block_size=BLOCK,
            enable_caching=mode == "align",
        )
        entry = state_entry(spec, count)
        decode = make_request("d", tokens(count + 1))
        assert manager.allocate_slots(decode, 0, num_external_computed_tokens=count, delay_cache_blocks=True)
        check_table(manager, decode, entry, speculative)
        prefill = make_request("p", tokens(count, seed=1), max_tokens=1)
        while prefill.num_computed_tokens < count:
            step = min(2 * BLOCK, count - prefill.num_computed_tokens)
            assert manager.allocate_slots(prefill, step)
            prefill.num_computed_tokens += step
            check_table(manager, prefill, state_entry(spec, prefill.num_computed_tokens), speculative)


def check_table(manager: KVCacheManager, request: Request, entry: int, speculative: int) -> None:
    """The entry has a block, and nothing but room for speculative tokens follows."""
    table = manager.get_blocks(request.request_id).blocks[1]
    assert not table[entry].is_null
    # Blocks that were for speculative tokens may be ahead of the state, in later chunks, or gone.
    assert entry + 1 <= len(table) <= entry + 1 + speculative
