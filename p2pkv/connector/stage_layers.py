"""The KV groups of all pipeline stages: each rank describes its own layers, and the stages exchange that.

A rank of vLLM knows the layers of its stage only. P and D number their KV groups alike whatever their stages
are, so each rank has to know all groups of the model, and how many of their layers lie on which stage.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from p2pkv.config import ConfigError
from p2pkv.kv.cache import PagedCache, RankCache
from p2pkv.protocol.messages import KvGroup

DRAFTERS = ("draft_model.", "mtp.")
"""What the names of some drafters' layers begin with; others have numbers behind the model's."""


@dataclass(frozen=True)
class Layer:
    """One layer of this rank, as vLLM describes and registers it."""

    name: str
    spec: Any
    """vLLM's description of what it keeps."""
    tensor: torch.Tensor
    table: int
    """Number of its block table."""
    number: int
    """Among all layers of this rank."""
    module: Any = None
    """The layer itself, as in vLLM's static_forward_context, where that is looked at."""


class Described(NamedTuple):
    """A KV group as far as it lies on one rank."""

    kind: str
    """Equal for layers that are one KV group, on whatever stage they lie."""
    word: str
    """What distinguishes groups of the same layers: a plane, or a part of a state."""
    shape: KvGroup
    """Its entry in a Hello, without the names, as if there were no other stage."""
    names: tuple[str, ...]
    """Its layers, in order."""


class LocalGroup(NamedTuple):
    """A KV group of this rank: its memory, the numbers of its layers, and what other stages must know."""

    cache: PagedCache
    numbers: tuple[int, ...]
    described: Described


def local_group(
    cache: PagedCache, numbers: Iterable[int], names: Iterable[str], kind: str, word: str, **form: Any
) -> LocalGroup:
    """A group of this rank. `form`: what else its entry in a Hello has, as the model's heads and dtype."""
    shape = KvGroup(
        layers=(cache.layers,),
        row_bytes=cache.row_bytes,
        unit_tokens=cache.unit_tokens,
        codec=cache.codec,
        layer_names="",
        **form,
    )
    return LocalGroup(cache, tuple(numbers), Described(kind, word, shape, tuple(names)))


def exchange_with_stages(mine: Sequence[Described]) -> list[list[Described]]:
    """What each stage's rank with this rank's place in its stage describes, in the order of the stages. All
    of them call this at the same time, when vLLM registers their KV caches."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    found: list[list[Described]] = [[] for _ in range(group.world_size)]
    torch.distributed.all_gather_object(found, list(mine), group=group.cpu_group)
    return found


def layer_order(names: list[str]) -> list[str]:
    """Layer names in the order in which they are computed: by the numbers in them, and drafters' last."""

    def place(name: str) -> tuple[bool, list[int | str]]:
        parts = re.split(r"(\d+)", name)
        return name.startswith(DRAFTERS), [int(part) if part.isdigit() else part for part in parts]

    return sorted(names, key=place)


def over_stages(
    groups: Sequence[LocalGroup], stages: Sequence[Sequence[Described]], device: torch.device
) -> tuple[RankCache, tuple[KvGroup, ...]]:
    """This rank's cache, with all KV groups of the model, and their entries in the Hello: attention first,
    then states, both in the order of their first layers.

    Raises ConfigError if a model's layers do not follow each other from stage to stage.
    """
    of_kind: dict[str, list[Described | None]] = {}
    for once in (False, True):
        for number, stage in enumerate(stages):
            for described in stage:
                if described.shape.once is once:
                    of_kind.setdefault(described.kind, [None] * len(stages))[number] = described
    here = {group.described.kind: (group.cache, group.numbers) for group in groups}
    shapes = tuple(map(_whole, of_kind.values()))
    caches, numbers = list[PagedCache](), list[Sequence[int]]()
    for kind, shape in zip(of_kind, shapes, strict=True):
        absent = PagedCache.without_layers(shape.unit_tokens, shape.row_bytes, shape.codec, device)
        cache, own = here.get(kind, (absent, ()))
        caches.append(cache)
        numbers.append(own)
    return RankCache(caches, numbers), shapes


def _whole(parts: Sequence[Described | None]) -> KvGroup:
    """The entry of a KV group of which each stage has a part, or None."""
    there = [part for part in parts if part is not None]
    names = [name for part in there for name in part.names]
    ordered = layer_order(names)
    if names != ordered:
        first = next(name for name, other in zip(names, ordered, strict=True) if name != other)
        raise ConfigError(
            f"{first} lies on a pipeline stage that computes it out of the order of the layers' names: p2pkv "
            "does not know how this model spreads its layers; serve it without --pipeline-parallel-size"
        )
    if len({replace(part.shape, layers=(1,)) for part in there}) > 1:
        raise ConfigError(
            f"pipeline stages describe the KV of {names[0]} and {names[-1]} differently: start all ranks "
            "with the same options"
        )
    patterns = sorted({re.sub(r"\d+", "#", name) for name in names})
    words = [*patterns, there[0].word] if there[0].word else patterns
    layers = tuple(0 if part is None else part.shape.layers[0] for part in parts)
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=8).hexdigest()
    return replace(there[0].shape, layers=layers, layer_names=digest)
