"""The states of recurrent layers from any P to any D: the plan, gather and scatter are the real ones.

The shapes are vLLM's own. How vLLM divides a state over its ranks is written down in support/`states`, as the
elements of one global state that each rank holds.
"""

import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2pkv.config import ConfigError
from p2pkv.connector.describe import refuse_what_cannot_move
from p2pkv.connector.recurrent import conv_dim_first, state_groups
from p2pkv.connector.stage_layers import Layer
from p2pkv.plan import make_plan
from p2pkv.protocol.extents import Coverage, Cutter, Extents
from p2pkv.protocol.handshake import GroupAssignment, row_formats, shapes
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
