"""Two engines' shapes in, who sends what to whom out.

A plan is pure: P and D compute it alike from the two handshakes, and compare its digest. It holds no
addresses, tokens or leases; those are bound to it later. Each KV group is planned by itself.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property, lru_cache
from heapq import heapreplace
from math import lcm
from operator import attrgetter
from typing import NamedTuple

import msgspec

from p2pkv.interleave import MAX_CYCLE, Common, Part, common
from p2pkv.sharding import Interval, Overlap, Shape, ShardingError, overlaps

MAX_EDGES = 1 << 20
"""An edge is a link between two processes; a plan with more is an error in a configuration."""

_FORMAT = 4
"""Part of every digest. Raise it whenever the same shapes begin to give other edges."""

Shapes = tuple[Shape, ...]
"""How one engine divides its KV groups, in their order; all of them over the same stages and ranks."""


class _Need(NamedTuple):
    """What one rank of D needs. `width`: the weight of one layer."""

    layer: Overlap
    head: Overlap
    tokens: Common | None
    width: int

    @property
    def weight(self) -> int:
        return len(self.layer.cells) * self.width


class Edge(msgspec.Struct, frozen=True, array_like=True):
    """What one P rank sends to one D rank of one KV group: layers and heads, of the tokens that both keep.

    A plan has at most one edge for each (source, target, group). It does not say which tokens D wants.

    Attributes:
        source, target: world rank on P and on D.
        group: number of the KV group.
        layers, heads: global intervals of the group, never empty.
        source_layer, source_head: where the rectangle starts in what the source holds of the group.
        target_layer, target_head: where it starts in what the target holds of it.
        tokens: which tokens both keep, where context parallelism divides them; None: all.
    """

    source: int
    target: int
    group: int
    layers: Interval
    heads: Interval
    source_layer: int
    target_layer: int
    source_head: int
    target_head: int
    tokens: Common | None = None


class Plan(msgspec.Struct, frozen=True, dict=True):
    """Everything that a D engine needs from a P engine: each (group, layer, head, token) cell of each D rank
    once. `edges` are ordered by source, then target, then group."""

    prefill: Shapes
    decode: Shapes
    edges: tuple[Edge, ...]

    def from_source(self, rank: int) -> tuple[Edge, ...]:
        """What P's `rank` sends, ordered by target and group; empty if other ranks send instead."""
        return tuple(self._by_rank[0].get(rank, ()))

    def to_target(self, rank: int) -> tuple[Edge, ...]:
        """What D's `rank` receives, ordered by source and group."""
        return tuple(self._by_rank[1].get(rank, ()))

    @cached_property
    def digest(self) -> str:
        """64 hex digits, equal in every process that computed the same plan from the same shapes."""
        plan = msgspec.msgpack.encode((_FORMAT, self.prefill, self.decode, self.edges))
        return hashlib.sha256(plan).hexdigest()

    @cached_property
    def _by_rank(self) -> tuple[dict[int, list[Edge]], dict[int, list[Edge]]]:
        sources, targets = defaultdict[int, list[Edge]](list), defaultdict[int, list[Edge]](list)
        for edge in self.edges:
            sources[edge.source].append(edge)
            targets[edge.target].append(edge)
        return sources, targets


@lru_cache(maxsize=64)
def make_plan(prefill: Shapes, decode: Shapes) -> Plan:
    """The plan from a P engine of these shapes to a D engine of those; the same object when asked again.

    Raises ShardingError if the two do not hold the same model's cache.
    """
    _check_same("KV groups", len(prefill), len(decode))
    for shapes in (prefill, decode):
        if not shapes or len({(len(shape.layers), shape.tp, shape.pcp) for shape in shapes}) > 1:
            listed = ", ".join(map(str, shapes)) or "(there are none)"
            raise ShardingError(f"the KV groups {listed} of one instance have different stages or ranks")
    edges: list[Edge] = []
    for group, (ours, theirs) in enumerate(zip(prefill, decode, strict=True)):
        of_group = f" in group {group}" if len(prefill) > 1 else ""
        _check_same(f"KV layers{of_group}", sum(ours.layers), sum(theirs.layers))
        _check_same(f"KV heads{of_group}", ours.heads, theirs.heads)
        edges += _edges(group, ours, theirs)
    return Plan(prefill, decode, tuple(sorted(edges, key=attrgetter("source", "target", "group"))))


def _check_same(what: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise ShardingError(
            f"the prefill instance has {ours} {what}, the decode instance {theirs}: "
            "expected the same model on both"
        )


def _edges(group: int, prefill: Shape, decode: Shape) -> Iterator[Edge]:
    """Every rectangle of a group that a D rank needs, from one of the P ranks that hold it."""
    for (layer_part, head_part, token_part), needs in _needs(prefill, decode).items():
        stages = prefill.stage_layers.holders[layer_part]
        ranks = prefill.rank_heads.holders[head_part]
        if prefill.dcp > 1:
            ranks = tuple(rank for rank in ranks if prefill.part(rank).rank == token_part)
        holders = [stage * prefill.width + rank for stage in stages for rank in ranks]
        give = _shared if len(needs) < len(holders) else _dealt
        for source, (layer, head, tokens, _) in give(holders, needs):
            yield Edge(
                source=source,
                target=layer.target * decode.width + head.target,
                group=group,
                layers=layer.cells,
                heads=head.cells,
                source_layer=layer.in_source,
                target_layer=layer.in_target,
                source_head=head.in_source,
                target_head=head.in_target,
                tokens=tokens,
            )


def _needs(prefill: Shape, decode: Shape) -> dict[tuple[int, int, int], list[_Need]]:
    """What D's ranks need, in order of rank, by P's rectangle: part of the layers, the heads, the tokens."""
    layers = tuple(overlaps(prefill.stage_layers, decode.stage_layers))
    heads = tuple(overlaps(prefill.rank_heads, decode.rank_heads))
    if len(layers) * len(heads) * prefill.dcp > MAX_EDGES:
        raise ShardingError(
            f"{prefill} and {decode} would need {len(layers) * len(heads) * prefill.dcp} links between their "
            f"ranks, more than {MAX_EDGES}: choose parallel sizes that are closer to each other"
        )
    if lcm(prefill.part(0).cycle, decode.part(0).cycle) > MAX_CYCLE:
        raise ShardingError(
            f"{prefill} gives its ranks {prefill.run} tokens in turn, {decode} {decode.run}: together these "
            f"patterns repeat only after more than {MAX_CYCLE} tokens; set the same "
            "--cp-kv-cache-interleave-size on both sides"
        )
    parts = [Part(rank, prefill.dcp, prefill.part(0).run) for rank in range(prefill.dcp)]
    shared: list[list[tuple[int, Common | None, int]]] = []
    """By D's rank of a stage: P's part of the tokens, what both keep of them, how many in a cycle."""
    for rank in range(decode.width):
        found = [(part.rank, common(part, decode.part(rank))) for part in parts]
        counted = ((part, both, 1 if both is None else len(both.pattern)) for part, both in found)
        shared.append([each for each in counted if each[2]])
    needs: dict[tuple[int, int, int], list[_Need]] = defaultdict(list)
    for layer in layers:
        for head in heads:
            for part_rank, both, density in shared[head.target]:
                need = _Need(layer, head, both, len(head.cells) * density)
                needs[layer.part, head.part, part_rank].append(need)
    return needs


def _dealt(holders: list[int], needs: list[_Need]) -> Iterator[tuple[int, _Need]]:
    """The largest need first, to the holder that has least so far: so the busiest has at most one need more
    than the mean. Ties go by rank, which also pairs rank r of D and of P when both are divided alike."""
    loads = [(0, holder) for holder in holders]
    weights = [need.weight for need in needs]
    for number in sorted(range(len(needs)), key=weights.__getitem__, reverse=True):
        load, holder = loads[0]
        heapreplace(loads, (load + weights[number], holder))
        yield holder, needs[number]


def _shared(holders: list[int], needs: list[_Need]) -> Iterator[tuple[int, _Need]]:
    """For fewer needs than holders: all needs in a line, cut between layers into one stretch for each holder.
    So the busiest has at most one layer of a need above the mean, and sends a target one run of layers."""
    total, before = sum(need.weight for need in needs), 0
    for need in needs:
        width, layers = need.width, len(need.layer.cells)
        first = 0
        for number, holder in enumerate(holders, start=1):
            # Cells up to the end of this holder's stretch, times the holders; half a layer rounds up.
            end = number * total - before * len(holders)
            last = min(layers, max(0, (2 * end + width * len(holders)) // (2 * width * len(holders))))
            if last > first:
                whole = need.layer
                cells = Interval(whole.cells.start + first, whole.cells.start + last)
                places = whole.in_source + first, whole.in_target + first
                yield holder, need._replace(layer=Overlap(whole.part, whole.target, cells, *places))
                first = last
        before += width * layers
