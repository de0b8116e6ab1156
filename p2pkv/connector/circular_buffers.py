"""Rings as KV groups: vLLM's `CircularBufferSpec`.

A compressor makes one row of several tokens, a pool. What it needs of the pool that is not complete lies in a
ring: one block for each request, token t in slot t % capacity, overwritten in place. It is never in a prefix
cache, and a prefix ends with a whole pool; so D needs the ring as it is when P has computed all tokens before
`stop`, like a recurrent state. It travels whole, one row for each head. Every rank has all of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec

from p2pkv.config import ConfigError
from p2pkv.connector.stage_layers import Layer, LocalGroup, local_group
from p2pkv.kv.cache import PagedCache


def is_ring(spec: Any) -> bool:
    return isinstance(spec, CircularBufferSpec)


def ring_groups(layers: Sequence[Layer]) -> list[LocalGroup]:
    """A KV group for the rings that are alike, of all layers of this rank. Raises ConfigError."""
    alike: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        if is_ring(layer.spec):
            tensor, slots = layer.tensor, layer.spec.block_size
            if tensor.shape[2] != slots or tensor.stride(2) != tensor.shape[3]:
                raise ConfigError(
                    f"{layer.name} is registered as {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())}: p2pkv expected a ring of {slots} slots that lie together, as "
                    "vLLM 0.33 registers it"
                )
            alike.setdefault((*tensor.shape[1:], tensor.dtype), []).append(layer)
    return [_group(form, rings) for form, rings in alike.items()]


def _group(form: tuple[object, ...], rings: Sequence[Layer]) -> LocalGroup:
    """Each head's slots are one row, and a layer of the group: so a rank's heads are not divided."""
    rows = [(ring, head) for ring in rings for head in torch.split(ring.tensor, 1, 1)]
    tensors, tables = [head.flatten(2)[:, :, None] for _, head in rows], [ring.table for ring, _ in rows]
    cache = PagedCache.from_tensors(tensors, block_size=1, tables=tables)
    numbers, names = (ring.number for ring, _ in rows), (ring.name for ring in rings)
    window, dtype = rings[0].spec.block_size, str(rings[0].tensor.dtype).removeprefix("torch.")
    return local_group(
        cache, numbers, names, f"ring {form}", "ring", heads=1, dtype=dtype, once=True, window=window
    )
