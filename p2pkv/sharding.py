"""Who owns which interval of an axis, and where two ownerships meet.

A tensor that moves is a product of axes; in a KV group a layer axis, a head axis and a token axis, of which
`interleave.py` is about the last. The ranks of a group own intervals of a global axis: disjoint ones that
cover it (the axis is split), equal ones (it is replicated), or equal ones in groups (split, and every part
replicated). Sizes need not divide each other, and two ownerships of an axis may have nothing in common.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Self

from msgspec import Struct

from p2pkv.interleave import Part

MAX_RANKS = 16384


class ShardingError(ValueError):
    """A way to divide a model that cannot be, and why, in a sentence."""


class Interval(Struct, frozen=True, order=True, array_like=True):
    """The integers from `start` to `stop`, half open; 0 <= start <= stop. An empty one is false."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def intersect(self, other: "Interval") -> "Interval":
        """What both hold; empty, at the later start, if they do not meet."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))


class Ownership(Struct, frozen=True, dict=True):
    """The interval of one global axis that each rank of a group holds.

    Intervals of two ranks are equal or disjoint, and together they cover the axis from 0 without a
    gap; ranks may hold nothing. `ranks[r]` is rank r's."""

    ranks: tuple[Interval, ...]

    @classmethod
    def in_parts(cls, counts: Sequence[int]) -> Self:
        """Rank r holds the `counts[r]` cells after those of the ranks before it."""
        stops = tuple(accumulate(counts))
        return cls(tuple(Interval(stop - count, stop) for count, stop in zip(counts, stops, strict=True)))

    @classmethod
    def evenly(cls, size: int, ranks: int) -> Self:
        """Cells 0 to `size` in `ranks` equal parts, or, if there are more ranks than cells, one cell
        to each group of consecutive ranks. The smaller divides the larger: see `Shape`.
        """
        held = max(1, size // ranks)
        starts = (rank * size // ranks for rank in range(ranks))
        return cls(tuple(Interval(start, start + held) for start in starts))

    @cached_property
    def parts(self) -> tuple[Interval, ...]:
        """The different intervals that some rank holds, in order; empty ones left out."""
        return tuple(sorted({part for part in self.ranks if part}))

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each of `parts`, the ranks that hold it, in order."""
        ranks: dict[Interval, list[int]] = {part: [] for part in self.parts}
        for rank, interval in enumerate(self.ranks):
            if interval:
                ranks[interval].append(rank)
        return tuple(tuple(held) for held in ranks.values())


class Overlap(Struct, frozen=True, array_like=True):
    """Where, on one axis, rank `target` of the target's side meets `part` of the source's `Ownership.parts`.

    `cells`: what both hold, in global coordinates; never empty. `in_source`, `in_target`: where these start
    within the interval that each side holds.
    """

    part: int
    target: int
    cells: Interval
    in_source: int
    in_target: int


def overlaps(source: Ownership, target: Ownership) -> Iterator[Overlap]:
    """Every meeting of two ownerships of one axis, ordered by the target's rank, then by position.

    The overlaps of one target rank cover what it holds exactly once.
    """
    starts = [part.start for part in source.parts]
    for rank, wanted in enumerate(target.ranks):
        if not wanted:
            continue
        for index in range(bisect_right(starts, wanted.start) - 1, bisect_left(starts, wanted.stop)):
            part = source.parts[index]
            cells = part.intersect(wanted)
            yield Overlap(index, rank, cells, cells.start - part.start, cells.start - wanted.start)


class Shape(Struct, frozen=True, array_like=True, dict=True):
    """How one engine divides one KV group. As in vLLM, rank = (stage * pcp + pcp rank) * tp + tp rank.

    Attributes:
        layers: per pipeline stage, in order; their sum is the model's.
        heads: KV heads of the whole model (1 for MLA, whose cache every rank holds).
        tp: tensor-parallel size; with more ranks than KV heads, groups of ranks hold the same head.
        pcp: prefill-context-parallel size: so many times as many ranks. It divides no KV by itself.
        dcp: decode-context-parallel size: over how many of a stage's ranks the tokens are divided. 1 also
            for a group whose tokens every rank has.
        run: with dcp above 1, tokens that follow each other on one rank.

    Raises ShardingError for sizes that vLLM itself would refuse.
    """

    layers: tuple[int, ...]
    heads: int
    tp: int
    pcp: int = 1
    dcp: int = 1
    run: int = 1

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 0 or sum(self.layers) < 1:
            raise ShardingError(f"layers per stage are {self.layers}: expected at least one KV layer in all")
        if min(self.heads, self.tp, self.pcp, self.dcp, self.run) < 1:
            raise ShardingError(
                f"{self.heads} KV heads, tensor-parallel size {self.tp}, prefill-context-parallel size "
                f"{self.pcp}, decode-context-parallel size {self.dcp}, interleave size {self.run}: expected "
                "1 or more"
            )
        if self.world > MAX_RANKS:
            raise ShardingError(f"{self} has {self.world} ranks: p2pkv handles up to {MAX_RANKS}")
        if self.heads % self.tp and self.tp % self.heads:
            raise ShardingError(
                f"{self.heads} KV heads cannot be divided over tensor-parallel size {self.tp}: expected "
                "one to be a multiple of the other; choose another --tensor-parallel-size"
            )
        if self.dcp > 1 and any(
            len({self.part(rank).rank for rank in ranks}) < self.dcp for ranks in self.rank_heads.holders
        ):
            raise ShardingError(
                f"{self} cannot divide the tokens of a KV head over {self.dcp} ranks: expected as many ranks "
                "that hold the same head; choose another --decode-context-parallel-size"
            )

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return self.pcp * self.tp

    @property
    def world(self) -> int:
        return len(self.layers) * self.width

    @cached_property
    def stage_layers(self) -> Ownership:
        """Global KV layers that each stage holds."""
        return Ownership.in_parts(self.layers)

    @cached_property
    def rank_heads(self) -> Ownership:
        """Global KV heads that each rank of a stage holds."""
        return Ownership(Ownership.evenly(self.heads, self.tp).ranks * self.pcp)

    def part(self, rank: int) -> Part:
        """The tokens that a rank of a stage keeps. As in vLLM, ranks that differ in their prefill-context
        rank follow each other in a decode-context-parallel group."""
        if self.dcp == 1:
            return Part(0, 1, 1)
        pcp_rank, tp_rank = divmod(rank, self.tp)
        return Part((tp_rank * self.pcp + pcp_rank) % self.dcp, self.dcp, self.run)

    def __str__(self) -> str:
        context = "".join(
            f" x {name} {size}" for name, size in (("PCP", self.pcp), ("DCP", self.dcp)) if size > 1
        )
        sizes = f"PP {len(self.layers)} x TP {self.tp}{context}"
        return f"{sizes} ({sum(self.layers)} KV layers, {self.heads} KV heads)"
