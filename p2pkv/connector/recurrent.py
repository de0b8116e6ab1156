"""The states of recurrent layers (Mamba, gated delta net, linear attention, short convolution) as KV groups.

A request has one page in each recurrent layer. vLLM registers the pages as bytes, [B, 1, 1, C]: first the
window of the layer's convolution, then its recurrent state, each as much as this rank holds, and perhaps
padding between one page and the next. A page is described here as KV groups with one row for a whole request:

- **The recurrent state** is divided by its heads: one group, a row for each head.
- **The convolution's window** is the last `width - 1` inputs of all channels; what is behind them, with
  speculative decoding, holds nothing after a prefill and never travels. The channels are a concatenation of
  segments (x, B and C of Mamba-2; q, k and v of a gated delta net), and vLLM divides each by itself: so each
  is a group of its own, and its heads are what it is divided by.

**Each time step of the window is a layer of its group**, with a row for the channels of each head. So the
rows are the same for both layouts that vLLM has: SD, [steps, channels], where a row lies together, and DS,
[channels, steps], where the rows are columns, which `ColumnCopier` copies a whole window at a time.

What is not certain is refused, with the layer's name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, lcm, prod
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from p2pkv.config import ConfigError
from p2pkv.connector.stage_layers import Layer, LocalGroup, local_group
from p2pkv.kv.cache import PagedCache
from p2pkv.kv.copiers import ColumnCopier, copier_of
from p2pkv.kv.layouts import LayerPages
from p2pkv.page_packings import DENSE

KEY_FIRST = "state:kv"
"""The codec of a gated delta net's state in vLLM's CPU kernels, [head, k, v]. In others it is [h, v, k]."""

_SIZES = lcm(*range(1, 17), 128)
"""Multiple of every supported tensor-parallel size. Channels without heads are divided into the largest
number of equal heads that divides it, so that P and D have the same heads whatever their sizes."""


def is_recurrent(spec: Any) -> bool:
    return isinstance(spec, MambaSpec)


def conv_dim_first() -> bool:
    """Whether this vLLM keeps windows as DS, [channels, steps]; else SD, [steps, channels]."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def state_groups(layers: Sequence[Layer], *, tp: int, dim_first: bool) -> list[LocalGroup]:
    """The KV groups of these recurrent layers: of equal ones one for each segment, then one for the state.

    P and D make the same groups in the same order from the same model, whatever their tensor-parallel sizes
    and layouts are. `layers`: in the order of their numbers; `dim_first`: see `conv_dim_first`. Raises
    ConfigError with a sentence that names the layer, for a state that cannot be described.
    """
    parts: dict[_StatePart, list[tuple[Layer, int]]] = {}
    for layer in layers:
        form = form_of(layer.name, layer.spec, layer.module, tp=tp, dim_first=dim_first)
        _check_pages(layer)
        for part, offset in _parts(form, layer.spec, layer.tensor.device.type == "cpu", tp, dim_first):
            parts.setdefault(part, []).append((layer, offset))
    return [_group(part, parts_of_layers, tp) for part, parts_of_layers in parts.items()]


def state_entry(spec: Any, tokens: int) -> int:
    """Which entry of the layer's block table holds the state after the first `tokens` of a prompt, 1 or more.

    Of a ring, and without prefix caching (mamba_cache_mode "none"), that is the first. With it ("align") a
    table has an entry for every block of tokens, of which the one of the last token holds the state. What is
    behind it is for speculative tokens.
    """
    assert tokens > 0
    per_block = getattr(spec, "mamba_cache_mode", "none") != "none"
    return (tokens - 1) // int(spec.block_size) if per_block else 0


# What a layer keeps, and how vLLM divides it. These are facts of the layers of vLLM 0.32 and 0.33.


@dataclass(frozen=True)
class Axis:
    """What is divided over the ranks: `heads` of the whole model, each of `size` elements.

    `shared`: with more ranks than heads, each rank has a copy of one.
    """

    heads: int
    size: int
    shared: bool = False

    def held(self, tp: int) -> int:
        """Heads on a rank."""
        return max(1, self.heads // tp)

    def whole(self) -> "Axis":
        """The same, undivided: every rank has all of it."""
        return Axis(1, self.heads * self.size, shared=True)


@dataclass(frozen=True)
class Form:
    """What a recurrent layer keeps for a request, of the whole model."""

    steps: int
    """Time steps of the convolution's window that hold something after a prefill; 0: no convolution."""
    segments: tuple[tuple[str, Axis], ...]
    """Its channels, by name, in the order of memory; `size` is channels of a head."""
    state: Axis | None
    """The recurrent state; None: there is none. `size` is elements of a head."""
    room: int = 0
    """Time steps that the window has room for."""


def form_of(name: str, spec: Any, module: Any, *, tp: int, dim_first: bool) -> Form:
    """What the layer `name` keeps. Raises ConfigError for a kind of state that this version does not move,
    and unless its spec and its sizes agree. It needs no registered tensors."""
    form = _check_kind(name, spec)(Sizes(name, module))
    if spec.tp_replicated:
        segments = tuple((segment, axis.whole()) for segment, axis in form.segments)
        form = replace(form, segments=segments, state=form.state and form.state.whole())
    for what, axis in [*form.segments, ("state", form.state)]:
        # vLLM divides it as `Ownership.evenly` does, or all ranks have the one head.
        if axis is not None and axis.heads % tp and not (axis.shared and axis.heads == 1):
            raise ConfigError(
                f"{name} divides {what} of its state into {axis.heads} heads, and --tensor-parallel-size is "
                f"{tp}: p2pkv expected a size that divides them; choose another"
            )
    return _fitted(name, form, spec, tp, dim_first)


def _fitted(name: str, form: Form, spec: Any, tp: int, dim_first: bool) -> Form:
    """The form with the room of its window. Raises ConfigError unless the spec's shapes are the form's."""
    shapes = [tuple(shape) for shape in spec.shapes]
    expected = int(bool(form.segments)) + int(form.state is not None)
    if len(shapes) != expected or len(spec.dtypes) != expected:
        raise ConfigError(
            f"{name} keeps {len(shapes)} states for a request, and p2pkv expected {expected}: {_BESIDE}"
        )
    room = 0
    if form.segments:
        channels = sum(axis.held(tp) * axis.size for _, axis in form.segments)
        room, held = shapes[0][::-1] if dim_first else shapes[0]
        if held != channels or room < form.steps:
            layout = "[channels, steps]" if dim_first else "[steps, channels]"
            raise ConfigError(
                f"{name} keeps a convolution window of {list(shapes[0])} on a rank of {tp}, and p2pkv "
                f"expected {channels} channels and at least {form.steps} steps, as {layout}: it does not "
                "know how this layer divides its channels"
            )
    if form.state is not None and prod(shapes[-1]) != form.state.held(tp) * form.state.size:
        raise ConfigError(
            f"{name} keeps a recurrent state of {list(shapes[-1])} on a rank of {tp}, and p2pkv expected "
            f"{form.state.held(tp)} heads of {form.state.size} elements: it does not know how this layer "
            "divides its state"
        )
    return replace(form, room=room)


@dataclass(frozen=True)
class Sizes:
    """The sizes that a layer of vLLM has as attributes."""

    name: str
    module: Any

    def has(self, *names: str) -> bool:
        return all(hasattr(self.module, each) for each in names)

    def __getitem__(self, path: str) -> int:
        value = self.module
        for attribute in path.split("."):
            value = getattr(value, attribute, None)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{self.name} is a {type(self.module).__name__} with {path} = {value!r}: p2pkv expected a "
                "number, and without it does not know how this layer divides its state; use vLLM's own layers"
            )
        return value


def _equal_parts(channels: int, size: int = 1) -> Axis:
    """Channels that belong to no head, in equal parts of which any rank has a whole number."""
    heads = gcd(channels, _SIZES)
    return Axis(heads, channels // heads * size)


def _mamba1(sizes: Sizes) -> Form:
    channels = sizes["intermediate_size"]
    x, state = _equal_parts(channels), _equal_parts(channels, sizes["ssm_state_size"])
    return Form(sizes["conv_kernel_size"] - 1, (("x", x),), state)


def _mamba2(sizes: Sizes) -> Form:
    heads, size, state = sizes["num_heads"], sizes["head_dim"], sizes["ssm_state_size"]
    if sizes["intermediate_size"] != heads * size:
        raise ConfigError(
            f"{sizes.name} has {sizes['intermediate_size']} channels in {heads} heads of {size}: p2pkv "
            "expected the heads to make up the channels, and does not know how this layer divides them"
        )
    # The layer's own number counts the copies, its norm's does not. vLLM copies one group, and no more.
    groups = Axis(sizes["norm.n_groups"], state, shared=True)
    segments = ("x", Axis(heads, size)), ("B", groups), ("C", groups)
    return Form(sizes["conv_kernel_size"] - 1, segments, Axis(heads, size * state))


def _delta_net(sizes: Sizes) -> Form:
    if sizes.has("num_k_heads", "num_v_heads"):  # Qwen3-Next, Qwen3.5, OLMo
        keys = Axis(sizes["num_k_heads"], sizes["head_k_dim"])
        values = Axis(sizes["num_v_heads"], sizes["head_v_dim"])
        steps = sizes["conv_kernel_size"] - 1
    else:  # Kimi's delta attention: as many keys as values
        keys = values = Axis(sizes["num_heads"], sizes["head_dim"])
        steps = sizes["conv_size"] - 1
    segments = ("q", keys), ("k", keys), ("v", values)
    return Form(steps, segments, Axis(values.heads, values.size * keys.size))


def _linear(sizes: Sizes) -> Form:
    return Form(0, (), Axis(sizes["num_heads"], sizes["head_dim"] ** 2))


def _short_conv(sizes: Sizes) -> Form:
    if sizes.has("conv_state_len"):  # Qwen4's, dilated, the same on every rank
        return Form(sizes["conv_state_len"], (("x", _equal_parts(sizes["hc_hidden_size"])),), None)
    return Form(sizes["L_cache"] - 1, (("x", _equal_parts(sizes["conv_dim"])),), None)


STATE_KINDS: dict[str, Callable[[Sizes], Form]] = {
    "MAMBA1": _mamba1,
    "MAMBA2": _mamba2,
    "GDN_ATTN": _delta_net,
    "LINEAR": _linear,
    "SHORT_CONV": _short_conv,
}

_BESIDE = "p2pkv does not move what vLLM keeps beside a state; leave out --use-replayssm and its like"


def _check_kind(name: str, spec: Any) -> Callable[[Sizes], Form]:
    kind = str(spec.mamba_type.name)
    if kind not in STATE_KINDS:
        raise ConfigError(
            f"{name} is a recurrent layer of kind {kind}: this version of p2pkv moves "
            f"{', '.join(STATE_KINDS)}"
        )
    if spec.mamba_cache_mode not in ("none", "align"):
        raise ConfigError(
            f"{name} keeps its state in mamba_cache_mode {spec.mamba_cache_mode!r}: this version of p2pkv "
            "knows 'none' and 'align'; set --mamba-cache-mode to one of them"
        )
    return STATE_KINDS[kind]


@dataclass(frozen=True)
class _StatePart:
    """What makes one KV group of all layers that have it.

    Layers differ in it on P if they do on D: `form` has what lies around it, which decides on the strides."""

    kind: str
    """The recurrent layer's kind."""
    name: str
    """The segment's name, or "state"."""
    form: Form
    """The layer's form."""
    axis: Axis
    steps: int
    """Time steps of this part; a state is one."""
    dtype: torch.dtype
    codec: str
    step: int
    """Bytes between two elements of a row: more than an element's where the rows are columns."""
    stride: int
    """Bytes between two time steps."""


def _parts(form: Form, spec: Any, on_cpu: bool, tp: int, dim_first: bool) -> Iterator[tuple[_StatePart, int]]:
    """Every part of a layer's page, and where it begins in the page, in bytes."""
    kind = str(spec.mamba_type.name)
    if form.segments:
        dtype = spec.dtypes[0]
        held = [axis.held(tp) * axis.size for _, axis in form.segments]
        # Of the next channel, and of the next time step.
        step = form.room * dtype.itemsize if dim_first else dtype.itemsize
        stride = dtype.itemsize if dim_first else sum(held) * dtype.itemsize
        for (name, axis), first in zip(form.segments, accumulate([0, *held[:-1]]), strict=True):
            part = _StatePart(kind, name, form, axis, form.steps, dtype, DENSE, step, stride)
            yield part, first * step
    if form.state is not None:
        dtype = spec.dtypes[-1]
        codec = KEY_FIRST if on_cpu and kind == "GDN_ATTN" else DENSE
        part = _StatePart(kind, "state", form, form.state, 1, dtype, codec, dtype.itemsize, 0)
        yield part, sum(_state_bytes(spec)[:-1])


def _state_bytes(spec: Any) -> list[int]:
    """Bytes of each state on this rank."""
    return [prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]


def _check_pages(layer: Layer) -> None:
    """Raises ConfigError unless the registered tensor holds the spec's states, one after the other."""
    nbytes, pages = sum(_state_bytes(layer.spec)), layer.tensor
    shape, strides = list(pages.shape), list(pages.stride())
    if pages.element_size() != 1 or shape[1:] != [1, 1, nbytes] or (nbytes > 1 and strides[-1] != 1):
        raise ConfigError(
            f"{layer.name} is registered as {pages.dtype} {shape} with strides {strides}: p2pkv expected "
            f"bytes, [blocks, 1, 1, {nbytes}], as vLLM 0.33 registers a recurrent layer"
        )


def _group(part: _StatePart, parts_of_layers: Sequence[tuple[Layer, int]], tp: int) -> LocalGroup:
    """The KV group of a part; `parts_of_layers`: its layers, and where it begins in their pages."""
    pages, tensors, numbers = [], [], []
    for layer, offset in parts_of_layers:
        tensor, block = layer.tensor, layer.tensor.stride(0)
        for step in range(part.steps):
            pages.append(
                LayerPages(
                    storage=tensor.untyped_storage().data_ptr(),
                    table=layer.table,
                    blocks=tensor.shape[0],
                    ratio=1,
                    units=1,
                    block_stride=block,
                    unit_stride=block,
                    head_stride=part.axis.size * part.step,
                    offset=int(tensor.storage_offset()) + offset + step * part.stride,
                )
            )
            tensors.append(tensor)
            numbers.append(layer.number)
    size = part.dtype.itemsize
    together = part.step == size
    cache = PagedCache(
        pages,
        copier_of(pages, tensors) if together else ColumnCopier(pages, tensors, size, part.step),
        heads=part.axis.held(tp),
        block_size=1,
        unit_tokens=1,
        row_bytes=part.axis.size * size,
        element_bytes=size,
        codec=part.codec,
        device=tensors[0].device,
    )
    names, dtype = (layer.name for layer, _ in parts_of_layers), str(part.dtype).removeprefix("torch.")
    return local_group(
        cache, numbers, names, repr(part), part.name, heads=part.axis.heads, dtype=dtype, once=True
    )
