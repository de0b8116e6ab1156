"""The states of recurrent layers from any P to any D: the plan, gather and scatter are the real ones.

The shapes are vLLM's own. How vLLM divides a state over its ranks is written down in support/`states`, as the
elements of one global state that each rank holds.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pkv.config import ConfigError
from p2pkv.connector.describe import Layers, refuse_what_cannot_move
from p2pkv.connector.recurrent import conv_dim_first, state_groups
from p2pkv.connector.stage_layers import Layer
from p2pkv.plan import make_plan
from p2pkv.protocol.handshake import GroupAssignment, row_formats, shapes
from p2pkv.protocol.pieces import Coverage, Cutter, Extents
from support.connector.instances import kv_groups
from support.connector.states import (
    LAYERS,
    MODELS,
    TOKENS,
    DeltaNet,
    Dilated,
    Held,
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

pytestmark = pytest.mark.vllm

# From P to D.


def move(sources: list[Held], targets: list[Held], chunk: int, seed: int) -> int:
    """Carry out the plan of these ranks; how many bytes travelled."""
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


@st.composite
def sides(draw: st.DrawFn, model: Model) -> Side:
    return Side(
        draw(st.sampled_from([tp for tp in range(1, 9) if model.fits(tp)])),
        draw(st.sampled_from(["SD", "DS"])),
        0 if isinstance(model, Mamba1 | Linear) else draw(st.sampled_from([0, 0, 2])),
        draw(st.sampled_from([0, 64, 208])),
        draw(st.booleans()),
        tuple(draw(st.lists(st.integers(0, 2), min_size=LAYERS, max_size=LAYERS))),
        draw(st.integers(0, 99)),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, Side, Side, tuple[torch.dtype, ...], int, int]:
    model = draw(st.sampled_from(MODELS))
    kinds = [(torch.bfloat16, torch.float32), (torch.float16, torch.float16), (torch.float32, torch.float32)]
    chunk = draw(st.sampled_from([64, 1000, 1 << 20]))
    return (
        model,
        draw(sides(model)),
        draw(sides(model)),
        draw(st.sampled_from(kinds)),
        chunk,
        draw(st.integers(0, 99)),
    )


@pytest.mark.slow
@given(case=cases())
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_every_rank_of_d_holds_its_slice_of_the_global_state(
    case: tuple[Model, Side, Side, tuple[torch.dtype, ...], int, int],
) -> None:
    model, p, d, dtypes, chunk, seed = case
    truth = Truth.of(model, dtypes, seed)
    sources = [Held(model, p, dtypes, rank) for rank in range(p.tp)]
    targets = [Held(model, d, dtypes, rank) for rank in range(d.tp)]
    for held in sources:
        held.put(truth)
    before = [held.memory.clone() for held in targets]

    moved = move(sources, targets, chunk, seed)

    needed = 0
    for held, noise in zip(targets, before, strict=True):
        found = held.memory.clone()
        held.memory.copy_(noise)
        held.put(truth)
        assert torch.equal(found, held.memory), f"rank {held.rank} of D"
        channels, elements = model.held(d.tp, held.rank)
        needed += len(channels) * model.steps * dtypes[0].itemsize + len(elements) * dtypes[-1].itemsize
    assert moved == LAYERS * needed, "each byte that a rank of D needs travels once, and no padding does"


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("layouts", [("SD", "DS"), ("DS", "SD"), ("DS", "DS")], ids="-".join)
def test_any_tensor_parallel_size_on_either_side(model: Model, layouts: tuple[str, str]) -> None:
    """Every pair of sizes, once; what else there is to draw the test above draws."""
    dtypes = (torch.bfloat16, torch.float32)
    truth = Truth.of(model, dtypes, 1)
    sizes = [tp for tp in range(1, 9) if model.fits(tp)]
    ranks = {}
    for name in set(layouts):
        for tp in sizes:
            side = Side(tp, name, 0, 16, False, (0, 0, 1), 7)
            ranks[name, tp] = [Held(model, side, dtypes, rank) for rank in range(tp)]
    for p in sizes:
        for d in sizes:
            sources, targets = ranks[layouts[0], p], ranks[layouts[1], d]
            if sources is targets:
                continue
            for held in sources:
                held.put(truth)
            for held in targets:
                held.memory.zero_()
            move(sources, targets, 1 << 20, 0)
            for held in targets:
                found = held.memory.clone()
                held.memory.zero_()
                held.put(truth)
                assert torch.equal(found, held.memory), f"{p} -> {d}, rank {held.rank}"


# What is said of them.


def one_layer(model: Model, tp: int = 1, **spec: Any) -> Layer:
    side = Side(tp, "SD", 0, 0, False, (0, 0, 0), 0)
    layer = Held(model, side, (torch.float32, torch.float32), 0).layers[0]
    return replace(layer, spec=replace(layer.spec, **spec))


def test_the_groups_of_a_gated_delta_net() -> None:
    held = Held(
        DeltaNet(8, 16, 4, 6), Side(2, "SD", 0, 0, False, (0, 0, 0), 0), (torch.bfloat16, torch.float32), 1
    )
    q, k, v, state = held.shapes
    assert all(one.once for one in held.shapes)
    assert [(one.layers, one.heads, one.row_bytes) for one in (q, k, v)] == [
        ((9,), 8, 8),
        ((9,), 8, 8),
        ((9,), 16, 12),
    ]
    assert (state.layers, state.heads, state.row_bytes, state.dtype) == ((3,), 16, 4 * 6 * 4, "float32")
    assert len({one.layer_names for one in held.shapes}) == 4
    numbers = held.cache.layers
    assert numbers[0] == (0, 0, 0, 2, 2, 2, 4, 4, 4) and numbers[3] == (0, 2, 4)


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


def test_layers_are_found_with_their_block_tables() -> None:
    model = ShortConv(8)
    spec = spec_of(model, 1, (torch.float32, torch.float32))
    other = replace(spec, block_size=32)
    kv_config = kv_groups(
        (["a.0"], SimpleNamespace()),
        (["b.1"], spec),
        (["b.2"], SimpleNamespace(kv_cache_specs={"b.2": other})),
    )
    found = Layers({name: torch.zeros(1) for name in ("a.0", "b.1", "b.2")}, kv_config).all
    assert [(one.name, one.spec, one.table, one.number) for one in found[1:]] == [
        ("b.1", spec, 1, 1),
        ("b.2", other, 2, 2),
    ]


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
        "keeps 5 states for a request, and p2pkv expected at most 2.*--use-replayssm",
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
