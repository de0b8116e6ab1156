"""Rings as KV groups: vLLM's `CircularBufferSpec`.

A compressor makes one row of several tokens, a pool. What it needs of the pool that is not complete lies in a
ring: one block for each request, token t in slot t % capacity, overwritten in place. It is never in a prefix
cache, and a prefix ends with a whole pool; so D needs the ring as it is when P has computed all tokens before
`stop`, like a recurrent state. It travels whole, one row for each head. Every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from p2pkv.config import ConfigError
from p2pkv.connector.stage_layers import Described, LocalGroup
from p2pkv.kv.cache import PagedCache
from p2pkv.protocol.messages import KvGroup


def is_ring(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import CircularBufferSpec

    return isinstance(spec, CircularBufferSpec)


def ring_groups(
    names: Sequence[str], specs: Sequence[Any], tensors: Sequence[torch.Tensor], tables: Sequence[int]
) -> list[LocalGroup]:
    """A KV group for the rings that are alike, of all layers of this rank. Raises ConfigError."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, (name, spec, tensor) in enumerate(zip(names, specs, tensors, strict=True)):
        if is_ring(spec):
            if tensor.shape[2] != spec.block_size or tensor.stride(2) != tensor.shape[3]:
                raise ConfigError(
                    f"{name} is registered as {list(tensor.shape)} with strides {list(tensor.stride())}: "
                    f"p2pkv expected a ring of {spec.block_size} slots that lie together, as vLLM 0.33 "
                    "registers it"
                )
            alike.setdefault((*tensor.shape[1:], tensor.dtype), []).append(number)
    return [_group(form, numbers, names, tensors, tables) for form, numbers in alike.items()]


def _group(
    form: tuple[object, ...],
    numbers: Sequence[int],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    tables: Sequence[int],
) -> LocalGroup:
    """Each head's slots are one row, and a layer of the group: so a rank's heads are not divided."""
    rows = [(number, head) for number in numbers for head in torch.split(tensors[number], 1, 1)]
    cache = PagedCache.from_tensors(
        [head.flatten(2)[:, :, None] for _, head in rows],
        block_size=1,
        tables=[tables[number] for number, _ in rows],
    )
    shape = KvGroup(
        layers=(len(rows),),
        heads=1,
        row_bytes=cache.row_bytes,
        unit_tokens=1,
        dtype=str(tensors[numbers[0]].dtype).removeprefix("torch."),
        codec=cache.codec,
        layer_names="",
        once=True,
        window=tensors[numbers[0]].shape[2],
    )
    described = Described(f"ring {form}", "ring", shape, tuple(names[number] for number in numbers))
    return LocalGroup(cache, tuple(number for number, _ in rows), described)
