"""One engine's ranks as plain memory, in any shape, layout and packing; and what they should hold.

Shape legend: L layers, B kernel blocks, H KV heads of a rank, N tokens in a kernel block, C elements of
the K and V of one head, T tokens of the prompt.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from p2pkv import page_packings, plan, sharding
from p2pkv.kv import DENSE, PagedCache
from p2pkv.protocol.extents import Computed, Cutter
from p2pkv.protocol.messages import KvGroup, Piece
from support.kv.pages import LAYOUTS

BITS = {
    torch.float8_e4m3fn: np.uint8,
    torch.bfloat16: np.uint16,
    torch.float16: np.uint16,
    torch.float32: np.uint32,
}

Elements = NDArray[Any]
Interval = tuple[int, int]


def cut(cutter: Cutter, computed: Computed, limit: int) -> tuple[Piece, ...]:
    """The next chunk; () if nothing is ready."""
    return next(cutter.chunks(computed, limit, flush=True, most=1), (0, ()))[1]


@dataclass(frozen=True)
class Side:
    """How one engine lays a model's cache out. `ratio`: kernel blocks in a block."""

    shape: sharding.Shape
    block: int
    ratio: int
    layout: str
    codec: str
    content: int
    dtype: torch.dtype

    @property
    def kernel(self) -> int:
        return self.block // self.ratio

    @property
    def group(self) -> KvGroup:
        """As in a Hello."""
        unit = 1 if self.codec == DENSE else self.kernel
        row = unit * self.content * self.dtype.itemsize
        kind = str(self.dtype).removeprefix("torch.")
        context = {"dcp": self.shape.dcp, "interleave": self.shape.run}
        return KvGroup(self.shape.layers, self.shape.heads, row, unit, kind, self.codec, "n", **context)

    def slots_of(self, rank: int, start: int, stop: int) -> tuple[Elements, Elements]:
        """Which of the tokens [start, stop) a rank keeps, counted from `start`, and where among its own."""
        shape, tokens = self.shape, np.arange(start, stop)
        pcp_rank, tp_rank = divmod(rank % (shape.pcp * shape.tp), shape.tp)
        turn = tokens // shape.run
        mine = turn % shape.dcp == (tp_rank * shape.pcp + pcp_rank) % shape.dcp
        return np.flatnonzero(mine), (turn // shape.dcp * shape.run + tokens % shape.run)[mine]

    def layers_of(self, rank: int) -> slice:
        stage = rank // (self.shape.pcp * self.shape.tp)
        first = sum(self.shape.layers[:stage])
        return slice(first, first + self.shape.layers[stage])

    def heads_of(self, rank: int) -> slice:
        place, tp, heads = rank % self.shape.tp, self.shape.tp, self.shape.heads
        if tp > heads:
            return slice(place // (tp // heads), place // (tp // heads) + 1)
        return slice(place * heads // tp, (place + 1) * heads // tp)


@dataclass(eq=False)
class Held:
    """One rank's memory, full of noise, with room for `tokens` and a block more."""

    side: Side
    rank: int
    tokens: int
    seed: int
    table: list[int] = field(init=False)
    paged: PagedCache = field(init=False)

    def __post_init__(self) -> None:
        side, chance = self.side, random.Random(self.seed)
        blocks = -(-self.tokens // (side.block * side.shape.dcp)) + 1
        self.table = chance.sample(range(blocks), blocks - 1)
        layers, heads = side.layers_of(self.rank), side.heads_of(self.rank)
        sizes = (
            layers.stop - layers.start,
            blocks * side.ratio,
            heads.stop - heads.start,
            side.kernel,
            side.content,
        )
        order = LAYOUTS[side.layout]
        noise = np.frombuffer(chance.randbytes(int(np.prod(sizes)) * side.dtype.itemsize), BITS[side.dtype])
        memory = noise.copy().reshape([sizes[axis] for axis in order])
        self._pages: Elements = memory.transpose(np.argsort(order))
        tensors = torch.from_numpy(self._pages).view(side.dtype).unbind(0)
        self.paged = PagedCache.from_tensors(tensors, block_size=side.block, codec=side.codec)
        # Kernel blocks of the prompt, in its order.
        kernels = [block * side.ratio + part for block in self.table for part in range(side.ratio)]
        self._kernels = np.array(kernels)

    def dense(self) -> Elements:
        """All of the memory, [L, B, H, N, C], each token's K and V together."""
        plain = np.ascontiguousarray(self._pages)
        if self.side.codec == DENSE:
            return plain.copy() if plain is self._pages else plain
        out = np.empty_like(plain)
        page_packings.packing_of(self.side.codec).unpack(out, plain.reshape(*plain.shape[:3], -1))
        return out

    def put(self, dense: Elements, layers: slice, start: int, stop: int, cells: Elements) -> None:
        """Write tokens [start, stop) of some layers, [L, T, H, C], to an array as `dense` gives it."""
        mine, slots = self.side.slots_of(self.rank, start, stop)
        pages, kernel = dense[layers], self.side.kernel
        # Indices around a slice come first: [T, L, H, C].
        pages[:, self._kernels[slots // kernel], :, slots % kernel] = cells[:, mine].swapaxes(0, 1)

    def compute(self, layers: slice, start: int, stop: int, cells: Elements) -> None:
        """What a forward does: as `put`, into the memory itself."""
        dense = self.dense()
        self.put(dense, layers, start, stop, cells)
        if self.side.codec == DENSE:
            self._pages[...] = dense
            return
        packed = np.empty((*dense.shape[:3], self.side.kernel * self.side.content), dense.dtype)
        page_packings.packing_of(self.side.codec).pack(packed, dense)
        self._pages[...] = packed.reshape(dense.shape)


def rectangle(edge: plan.Edge, piece: Piece, on_source: bool) -> tuple[Interval, Interval, Interval]:
    """Layers, tokens and heads of a piece in the cache of the rank at this end of the edge."""
    first, head = edge.target_layer, edge.target_head
    if on_source:
        first, head = edge.source_layer, edge.source_head
    shift, span = first - edge.layers.start, (piece.start, piece.stop)
    if edge.tokens is not None:
        span = edge.tokens.on_source(*span) if on_source else edge.tokens.on_target(*span)
    return (piece.layer + shift, piece.layer_stop + shift), span, (head, head + len(edge.heads))
