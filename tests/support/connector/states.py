"""Recurrent layers of every kind: vLLM's shapes, what each rank holds of one global state, and its memory.

How vLLM divides a state is written down here by hand; tests/connector/test_states.py compares it with
what vLLM's own layers do to their weights.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator, get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from p2pkv.connector.recurrent import state_groups
from p2pkv.connector.stage_layers import Layer, over_stages
from p2pkv.protocol.messages import Cache

WIDTH = 4
"""Of every convolution."""

LAYERS, TOKENS = 3, 40

Numbers = NDArray[Any]


@contextlib.contextmanager
def conv_layout(name: str) -> Iterator[None]:
    """vLLM with this layout of the window: it reads the variable once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", name)
        get_conv_state_layout.cache_clear()
        yield
    get_conv_state_layout.cache_clear()


def share(count: int, tp: int, rank: int, first: int = 0) -> Numbers:
    """An equal share of the indices from `first` on."""
    assert count % tp == 0
    return np.arange(count // tp) + rank * (count // tp) + first


# The kinds of recurrent layers: vLLM's shapes, the attributes of its layers, and what each rank holds.


class Form(NamedTuple):
    """`parts`: channels of the window's; `elements`: of the recurrent state. Every rank has an equal share of
    each, if the tensor-parallel size divides `whole`."""

    parts: tuple[int, ...]
    elements: int
    whole: tuple[int, ...] = ()


class Recurrent:
    """What all kinds have in common; `steps` of their windows."""

    kind: MambaAttentionBackendEnum
    replicated = False
    steps = WIDTH - 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels, and elements of the recurrent state, of the whole model."""
        return sum(self.form.parts), self.form.elements

    def fits(self, tp: int) -> bool:
        return all(each % tp == 0 for each in self.form.whole)

    def held(self, tp: int, rank: int) -> tuple[Numbers, Numbers]:
        """The channels and the elements of the state that a rank holds, in its order."""
        channels, first = [np.arange(0)], 0
        for part in self.form.parts:
            channels.append(share(part, tp, rank, first))
            first += part
        return np.concatenate(channels), share(self.form.elements, tp, rank)


@dataclass(frozen=True)
class Mamba1(Recurrent):
    channels: int
    state: int
    kind = MambaAttentionBackendEnum.MAMBA1

    @property
    def form(self) -> Form:
        return Form((self.channels,), self.channels * self.state, (self.channels,))

    def shapes(self, tp: int, spec: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.mamba1_state_shape(tp, self.channels, self.state, WIDTH)

    def module(self, tp: int) -> Any:
        return SimpleNamespace(
            intermediate_size=self.channels, ssm_state_size=self.state, conv_kernel_size=WIDTH
        )


@dataclass(frozen=True)
class Mamba2(Recurrent):
    heads: int
    size: int
    groups: int
    state: int
    kind = MambaAttentionBackendEnum.MAMBA2

    @property
    def inner(self) -> int:
        return self.heads * self.size

    @property
    def form(self) -> Form:
        return Form((self.inner, self.groups * self.state, self.groups * self.state), self.inner * self.state)

    def fits(self, tp: int) -> bool:
        """As vLLM's mixer asserts."""
        return self.heads % tp == 0 and (self.groups % tp == 0 or self.groups == 1)

    def padded(self, tp: int) -> int:
        """Groups with their copies."""
        return self.groups + MambaStateShapeCalculator.extra_groups_for_head_shards(self.groups, tp)

    def shapes(self, tp: int, spec: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.mamba2_state_shape(
            tp, self.inner, self.padded(tp), self.heads, self.size, self.state, WIDTH, spec
        )

    def module(self, tp: int) -> Any:
        return SimpleNamespace(
            intermediate_size=self.inner,
            num_heads=self.heads,
            head_dim=self.size,
            ssm_state_size=self.state,
            conv_kernel_size=WIDTH,
            n_groups=self.padded(tp),
            norm=SimpleNamespace(n_groups=self.groups),
        )

    def held(self, tp: int, rank: int) -> tuple[Numbers, Numbers]:
        groups = self.groups * self.state
        bc = [
            share(groups, tp, rank, first) if self.groups % tp == 0 else np.arange(groups) + first
            for first in (self.inner, self.inner + groups)
        ]
        return np.concatenate([share(self.inner, tp, rank), *bc]), share(self.sizes[1], tp, rank)


@dataclass(frozen=True)
class DeltaNet(Recurrent):
    keys: int
    values: int
    key: int
    value: int
    kind = MambaAttentionBackendEnum.GDN_ATTN

    @property
    def form(self) -> Form:
        q, v = self.keys * self.key, self.values * self.value
        return Form((q, q, v), v * self.key, (self.keys, self.values))

    def shapes(self, tp: int, spec: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp, self.keys, self.values, self.key, self.value, WIDTH, spec
        )

    def module(self, tp: int) -> Any:
        return SimpleNamespace(
            num_k_heads=self.keys,
            num_v_heads=self.values,
            head_k_dim=self.key,
            head_v_dim=self.value,
            conv_kernel_size=WIDTH,
        )


@dataclass(frozen=True)
class KimiDeltaNet(Recurrent):
    heads: int
    size: int
    kind = MambaAttentionBackendEnum.GDN_ATTN

    @property
    def form(self) -> Form:
        each = self.heads * self.size
        return Form((each, each, each), each * self.size, (self.heads,))

    def shapes(self, tp: int, spec: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.kda_state_shape(
            tp, self.heads, self.size, conv_kernel_size=WIDTH, num_spec=spec
        )

    def module(self, tp: int) -> Any:
        return SimpleNamespace(num_heads=self.heads, head_dim=self.size, conv_size=WIDTH)


@dataclass(frozen=True)
class Linear(Recurrent):
    heads: int
    size: int
    kind = MambaAttentionBackendEnum.LINEAR
    steps = 0

    @property
    def form(self) -> Form:
        return Form((), self.heads * self.size * self.size, (self.heads,))

    def shapes(self, tp: int, spec: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.linear_attention_state_shape(self.heads, tp, self.size)

    def module(self, tp: int) -> Any:
        return SimpleNamespace(num_heads=self.heads, head_dim=self.size)


@dataclass(frozen=True)
class ShortConv(Recurrent):
    channels: int
    kind = MambaAttentionBackendEnum.SHORT_CONV

    @property
    def form(self) -> Form:
        return Form((self.channels,), 0, (self.channels,))

    def shapes(self, tp: int, spec: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.short_conv_state_shape(tp, self.channels, WIDTH, spec)

    def module(self, tp: int) -> Any:
        return SimpleNamespace(conv_dim=self.channels, L_cache=WIDTH)


@dataclass(frozen=True)
class Dilated(Recurrent):
    """Qwen4's short convolution, whose window every rank holds whole."""

    channels: int
    kind = MambaAttentionBackendEnum.SHORT_CONV
    replicated = True
    steps = 2 * (WIDTH - 1)

    @property
    def form(self) -> Form:
        return Form((self.channels,), 0)

    def shapes(self, tp: int, spec: int) -> tuple[tuple[int, ...], ...]:
        return MambaStateShapeCalculator.short_conv_state_shape(1, self.channels, self.steps + 1, spec)

    def module(self, tp: int) -> Any:
        return SimpleNamespace(conv_state_len=self.steps, hc_hidden_size=self.channels)

    def held(self, tp: int, rank: int) -> tuple[Numbers, Numbers]:
        return np.arange(self.channels), np.arange(0)


Model = Mamba1 | Mamba2 | DeltaNet | KimiDeltaNet | Linear | ShortConv | Dilated
MODELS: list[Model] = [
    Mamba1(48, 3),
    Mamba1(120, 2),
    Mamba2(16, 4, 1, 6),
    Mamba2(16, 4, 8, 2),
    Mamba2(12, 3, 2, 5),
    Mamba2(21, 2, 1, 3),
    DeltaNet(8, 16, 4, 6),
    DeltaNet(2, 6, 5, 3),
    DeltaNet(1, 4, 4, 4),
    KimiDeltaNet(24, 3),
    Linear(12, 4),
    ShortConv(64),
    ShortConv(420),
    Dilated(20),
]


def spec_of(
    model: Model, tp: int, dtypes: tuple[torch.dtype, ...], speculative: int = 0, **more: Any
) -> MambaSpec:
    found = model.shapes(tp, speculative)
    return MambaSpec(
        shapes=found,
        dtypes=dtypes[: len(found)] if model.steps else dtypes[-1:],
        block_size=16,
        mamba_type=model.kind,
        tp_replicated=model.replicated,
        num_speculative_blocks=speculative,
        **more,
    )


# One engine's memory.


@dataclass(frozen=True)
class Side:
    """How one engine holds its states.

    Attributes:
        layout: of the window, SD or DS.
        spec: tokens that it speculates on: more room in the window, which holds nothing after a prefill.
        padding: bytes behind each page.
        interleaved: the pages of one block lie together, not those of one layer.
        tables: which block table each layer has.
    """

    tp: int
    layout: str
    spec: int
    padding: int
    interleaved: bool
    tables: tuple[int, ...]
    seed: int


class Held:
    """The states of one rank: noise, until something is put there."""

    def __init__(self, model: Model, side: Side, dtypes: tuple[torch.dtype, ...], rank: int) -> None:
        self.model, self.side, self.rank = model, side, rank
        with conv_layout(side.layout):
            self.spec = spec_of(model, side.tp, dtypes, side.spec)
        chance = random.Random(1000 * side.seed + rank)
        blocks = 4
        self.blocks = [[chance.randrange(1, blocks)] for _ in range(1 + max(side.tables))]
        # vLLM's pages are aligned to their elements.
        page = -(-(self.spec.page_size_bytes + side.padding) // 16) * 16
        begin = 32
        size = begin + LAYERS * blocks * page
        self.memory = torch.frombuffer(bytearray(chance.randbytes(size)), dtype=torch.int8)
        block, layer = (page * LAYERS, page) if side.interleaved else (page, page * blocks)
        shape = (blocks, 1, 1, self.spec.page_size_bytes)
        strides = (block, shape[-1], shape[-1], 1)
        self.layers = [
            Layer(
                f"model.layers.{2 * number}.mixer",
                self.spec,
                self.memory.as_strided(shape, strides, begin + number * layer),
                side.tables[number],
                2 * number,
                model.module(side.tp),
            )
            for number in range(LAYERS)
        ]
        groups = state_groups(self.layers, tp=side.tp, dim_first=side.layout == "DS")
        stage = [group.described for group in groups]
        self.cache, self.shapes = over_stages(groups, [stage], self.memory.device)

    @property
    def said(self) -> Cache:
        return Cache(self.side.tp, self.shapes)

    def page(self, layer: int) -> torch.Tensor:
        return self.layers[layer].tensor[self.blocks[self.side.tables[layer]][0], 0, 0]

    def put(self, truth: "Truth") -> None:
        """What a forward writes: this rank's part of the global states."""
        for number in range(LAYERS):
            page = self.page(number)
            put_state(
                page,
                self.model,
                self.spec,
                (self.side.tp, self.rank),
                self.side.layout,
                truth.windows[number],
                truth.states[number],
            )


def put_state(
    page: torch.Tensor,
    model: Model,
    spec: MambaSpec,
    place: tuple[int, int],
    layout: str,
    window: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Write a rank's part of a global state to its page, as vLLM's kernels address it. `place`:
    tensor-parallel size and rank. `window`: [steps, channels], `state`: its elements, of all ranks."""
    channels, elements = model.held(*place)
    offset = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        nbytes = prod(shape) * dtype.itemsize
        raw = page[offset : offset + nbytes].clone()  # aligned, which the page is not always
        part = raw.view(dtype).view(*shape)
        if offset == 0 and len(channels):
            (part if layout == "SD" else part.T)[: model.steps] = window[:, channels]
        else:
            part.view(-1)[:] = state[elements]
        page[offset : offset + nbytes] = raw
        offset += nbytes


@dataclass
class Truth:
    """The global states of each layer: windows [steps, channels], and the recurrent state's elements."""

    windows: list[torch.Tensor]
    states: list[torch.Tensor]

    @classmethod
    def of(cls, model: Model, dtypes: tuple[torch.dtype, ...], seed: int) -> "Truth":
        noise = torch.Generator().manual_seed(seed)

        def some(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=noise).to(dtype)

        channels, elements = model.sizes
        return cls(
            [some(model.steps, channels, dtype=dtypes[0]) for _ in range(LAYERS)],
            [some(elements, dtype=dtypes[-1]) for _ in range(LAYERS)],
        )
