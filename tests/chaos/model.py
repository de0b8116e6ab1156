"""The made-up models of the run: their KV groups, and the paged memory of one engine that holds their KV.

KV is a pure function of (prompt, group, layer, token, head, channel), so every byte can be checked anywhere.
A state after `n` tokens is what a row of token `n` would be.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import lcm

import torch

from p2pkv.config import Options
from p2pkv.kv.cache import PagedCache, RankCache
from p2pkv.kv.layouts import plane_of
from p2pkv.protocol.messages import Cache, Hello, KvGroup
from p2pkv.sharding import Shape
from support.engine import engines as engine_support

CANARY = 0x5AFE5AFE
"""What free blocks hold: who finds something else has found a write into a block that nobody had."""

NULL = 0
"""The block of what a request need not keep, as vLLM's null block; nobody may write to it."""

Tables = tuple[list[int], ...]
"""A request's block tables."""


@dataclass(frozen=True)
class Group:
    """One KV group, with a block table of its own unless it shares one.

    Attributes:
        layers: the numbers of its layers among all layers.
        heads: KV heads of the whole model.
        content: int32s in a row.
        table: the number of its block table.
        block: tokens in a block.
        window: tokens that attention looks at from each token on, itself counted; 0: all before it.
        once: a row is a state, after all tokens that were computed.
        moves: with each chunk the state is written to another block, as in vLLM's `align` mode.
        tokens: that a row stands for; it is computed with the last of them.
        plane: where each row is in several planes: the int32s of a row in planes before this one, and in
            all. The groups of one row's planes follow one another, and differ in nothing else but `content`.
    """

    layers: tuple[int, ...]
    heads: int
    content: int
    table: int = 0
    block: int = 16
    window: int = 0
    once: bool = False
    moves: bool = False
    tokens: int = 1
    plane: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        return 1 if self.once else self.block // self.tokens

    def numbers(self, start: int, stop: int) -> range:
        """The rows that are complete with one of these tokens."""
        return range(start // self.tokens, stop // self.tokens)

    def on_rank(self, rank: int, tp: int) -> range:
        held = Shape((1,), self.heads, tp).rank_heads.ranks[rank]
        return range(held.start, held.stop)

    def first(self, stop: int) -> int:
        """The first token whose row is needed to compute token `stop`."""
        return max(0, stop - self.window + 1) if self.window else 0


@dataclass(frozen=True)
class Model:
    """Groups of one table have blocks of one size, and either windows of one size or none."""

    groups: tuple[Group, ...]
    blocks: int = 640

    @property
    def layers(self) -> int:
        return 1 + max(layer for group in self.groups for layer in group.layers)

    @property
    def tables(self) -> tuple[Group, ...]:
        """A group of each block table."""
        first = {group.table: group for group in reversed(self.groups)}
        return tuple(first[table] for table in sorted(first))

    @property
    def cuts(self) -> list[int]:
        """Where it can be cut into two pipeline stages: each must have layers of each group."""
        return [
            cut
            for cut in range(1, self.layers)
            if all(group.layers[0] < cut <= group.layers[-1] for group in self.groups)
        ]

    @property
    def hybrid(self) -> bool:
        """Whether P leaves the last token of a prompt to D: see `computes_last_token` in p2pkv."""
        return any(group.once or group.window for group in self.groups)

    @property
    def step(self) -> int:
        """A prefix on D is a multiple of so many tokens."""
        return lcm(*(group.block for group in self.groups if not group.once))

    def nbytes(self, start: int, stop: int) -> int:
        """Of a D's pages that a load of these tokens fills, each head counted once."""
        return sum(
            len(group.layers)
            * (1 if group.once else len(group.numbers(max(start, group.first(stop)), stop)))
            * group.heads
            * group.content
            * 4
            for group in self.groups
        )

    def __str__(self) -> str:
        return " and ".join(
            f"{len(group.layers)} layers of {group.heads} heads of {4 * group.content} bytes"
            + (f", window {group.window}" if group.window else "")
            + (f", a row for {group.tokens} tokens" if group.tokens > 1 else "")
            + (" in a plane" if group.plane else "")
            + (", a state" if group.once else "")
            + (" in a block that moves" if group.moves else "")
            for group in self.groups
        )


ONE_GROUP = Model((Group((0, 1, 2, 3), heads=2, content=32),))
"""All layers alike, as in most models."""


def draw_model(draw: random.Random, hybrid: float = 0.7) -> Model:
    """With this probability a hybrid one, else that of one group."""
    return draw_hybrid(draw) if draw.random() < hybrid else ONE_GROUP


def draw_hybrid(draw: random.Random) -> Model:
    """Attention, and beside it a sliding window, a recurrent layer's states, or both; their layers mixed. The
    attention's rows may be for several tokens, and in two planes."""
    window, state = draw.choice([(True, False), (False, True), (True, True)])
    numbers = [0, 1, 2, 3, 4]
    draw.shuffle(numbers)
    table, some = count(), iter(numbers)

    def layers(many: int) -> tuple[int, ...]:
        return tuple(sorted(next(some) for _ in range(many)))

    alone = 5 - 2 * window - (1 + (not window)) * state
    attention = Group(
        layers(alone), draw.choice([2, 4]), draw.choice([8, 32]), next(table), draw.choice([16, 32])
    )
    groups = [attention]
    if draw.random() < 0.4:
        row = replace(attention, heads=1, tokens=draw.choice([1, 4, 16]))
        groups = [replace(row, content=6, plane=(0, 7)), replace(row, content=1, plane=(6, 7))]
    if window:
        groups.append(
            Group(
                layers(2),
                draw.choice([1, 2, 4]),
                draw.choice([10, 16]),
                next(table),
                draw.choice([8, 16]),
                window=draw.choice([2, 17, 48, 128]),
            )
        )
    if state:
        # As a recurrent layer has it: a part of its convolution, and its state, in one block.
        recurrent, its, moves = layers(1 + (not window)), next(table), draw.random() < 0.5
        groups.append(Group(recurrent, draw.choice([1, 2]), 6, its, once=True, moves=moves))
        other = Group(recurrent, draw.choice([2, 4]), 22, its, once=True, moves=moves)
        groups.append(other if moves else replace(other, window=8))  # a ring, which stays where it is
    return Model(tuple(groups))


def kv(
    prompt: int, group: int, layer: int, start: int, stop: int, heads: range, content: int
) -> torch.Tensor:
    """[token, head, channel], int32: what a forward computes for tokens [start, stop)."""
    token = torch.arange(start, stop, dtype=torch.int64)[:, None, None]
    head = torch.arange(heads.start, heads.stop)[None, :, None]
    channel = torch.arange(content)[None, None, :]
    mixed = (((prompt * 8 + group) * 8 + layer) * 4096 + token) * 128 + head * 32 + channel
    return ((mixed * 0x9E3779B1 >> 7) & 0x7FFFFFFF).to(torch.int32)


# One rank.


@dataclass
class RankPages:
    """What one rank holds: its groups' layers, [block, head, token, channel] of float32 each. `cut`: the
    first layer of the second pipeline stage; 0: there is one stage. `layers`: those of its stage, by their
    numbers in the model."""

    rank: int
    tp: int
    cut: int
    layers: range
    groups: list[list[torch.Tensor]]
    cache: RankCache

    def of(self, group: Group) -> list[int]:
        return [layer for layer in group.layers if layer in self.layers]


def make_rank_pages(model: Model, rank: int, tp: int, cut: int = 0) -> RankPages:
    layers = range(model.layers) if not cut else range(cut) if rank < tp else range(cut, model.layers)
    pages: list[list[torch.Tensor]] = []
    caches: list[PagedCache] = []
    numbers: list[list[int]] = []
    for group in model.groups:
        numbers.append([layer - layers.start for layer in group.layers if layer in layers])
        before, content = group.plane or (0, group.content)
        if not before:
            shape = (model.blocks, len(group.on_rank(rank % tp, tp)), group.rows, content)
            whole = [torch.zeros(shape) for _ in numbers[-1]]
        pages.append([plane_of(each, before, group.content) if group.plane else each for each in whole])
        caches.append(
            PagedCache.from_tensors(
                pages[-1],
                block_size=group.rows * group.tokens,
                tables=[group.table] * len(numbers[-1]),
                tokens_per_row=group.tokens,
            )
        )
    return RankPages(rank, tp, cut, layers, pages, RankCache(caches, numbers))


def hello_of(options: Options, model: Model, pages: RankPages, link: str, incarnation: str = "") -> Hello:
    def stages(group: Group) -> tuple[int, ...]:
        first = sum(layer < pages.cut for layer in group.layers)
        return (first, len(group.layers) - first) if pages.cut else (len(group.layers),)

    groups = tuple(
        KvGroup(
            stages(group), group.heads, cache.row_bytes, group.tokens, "float32", cache.codec, "x",
            once=group.once, window=group.window,
        )
        for group, cache in zip(model.groups, pages.cache.groups, strict=True)
    )  # fmt: skip
    world, cache = pages.tp * (2 if pages.cut else 1), Cache(pages.tp, groups)
    name = pages.cache.digest_name
    return engine_support.hello_of(options, pages.rank, world, cache, name, link, incarnation)


# All ranks of an engine.


class Violation(Exception):
    """An invariant does not hold; the text says which."""


class Memory:
    """The pages of all ranks of an engine, and who has which block. A block is a block of all groups."""

    def __init__(self, model: Model, ranks: list[RankPages]) -> None:
        self.model = model
        self._ranks = ranks
        self._free = list(range(1, model.blocks))
        self._poison([NULL, *self._free])

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return self.model.blocks - 1 - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """So many blocks; None if there are too few. Raises Violation if one was written to."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        if taken and not self._untouched([NULL, *taken]):
            raise Violation("a block was written to after it had been given back")
        return taken

    def clean(self) -> bool:
        return self._untouched([NULL, *self._free])

    def give_back(self, *tables: list[int]) -> None:
        """Nobody reads or writes their blocks any more. Null blocks are nobody's."""
        blocks = [block for table in tables for block in table if block != NULL]
        self._poison(blocks)
        self._free += blocks

    def compute(self, prompt: int, layer: int, tables: Tables, start: int, stop: int) -> None:
        """A forward's one layer, on all ranks. What would lie in a null block is computed and not kept."""
        for number, group, page, heads in self._pages(layer):
            if group.once:
                page[tables[group.table][0], :, 0] = kv(
                    prompt, number, layer, stop, stop + 1, heads, group.content
                )[0]
                continue
            first = max(start, group.block * _leading_nulls(tables[group.table]))
            if rows := group.numbers(first, stop):
                block, place = _slots(tables[group.table], group.rows, rows)
                page[block, :, place] = kv(prompt, number, layer, rows.start, rows.stop, heads, group.content)

    def wrong(self, prompt: int, tables: Tables, stop: int) -> int:
        """How many values that are needed to compute token `stop` are not those of this prompt."""
        wrong = 0
        for layer in range(self.model.layers):
            for number, group, page, heads in self._pages(layer):
                if group.once:
                    right = kv(prompt, number, layer, stop, stop + 1, heads, group.content)
                    wrong += int((page[tables[group.table][0], :, 0] != right[0]).sum())
                    continue
                rows = group.numbers(group.first(stop), stop)
                block, place = _slots(tables[group.table], group.rows, rows)
                right = kv(prompt, number, layer, rows.start, rows.stop, heads, group.content)
                wrong += int((page[block, :, place] != right).sum())
        return wrong

    def _pages(self, layer: int) -> Iterator[tuple[int, Group, torch.Tensor, range]]:
        """The groups that have this layer, and its pages as int32, on each rank."""
        for rank in self._ranks:
            for number, group in enumerate(self.model.groups):
                if layer in (some := rank.of(group)):
                    page = rank.groups[number][some.index(layer)]
                    yield number, group, page.view(torch.int32), group.on_rank(rank.rank % rank.tp, rank.tp)

    def _all(self) -> Iterator[torch.Tensor]:
        for rank in self._ranks:
            for pages in rank.groups:
                for page in pages:
                    yield page.view(torch.int32)

    def _untouched(self, blocks: list[int]) -> bool:
        return all(bool((page[blocks] == CANARY).all()) for page in self._all())

    def _poison(self, blocks: list[int]) -> None:
        for page in self._all():
            page[blocks] = CANARY


def _leading_nulls(table: list[int]) -> int:
    return next((index for index, block in enumerate(table) if block != NULL), len(table))


def _slots(table: list[int], size: int, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and place of each row; `size`: rows of a block."""
    row = torch.arange(rows.start, rows.stop)
    return torch.tensor(table, dtype=torch.int64)[row // size], row % size
