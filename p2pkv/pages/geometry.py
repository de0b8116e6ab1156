"""The KV cache of one rank, as the rest of p2pkv sees it: rectangles of rows in, rectangles out.

A *row* is what moves undivided: the bytes of one (layer, unit, head), where a unit is one token, or,
if a kernel packs tokens together (a page codec), all tokens of one kernel block. A *rectangle* is
[layer, unit, head, row_bytes], dense, uint8, whatever the memory's own layout. dense.py shows packed
pages token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from p2pkv.pages.codecs import DENSE, is_paged
from p2pkv.pages.copy import ArenaCopier, Copier, arena_of
from p2pkv.pages.cupy_launcher import cupy_launcher
from p2pkv.pages.device import Fence, make_recorder
from p2pkv.pages.digest import Digest
from p2pkv.pages.kernels import KernelCopier
from p2pkv.pages.rows import Cut, Index, Interval, LayerPages, Span

BlockTables = Sequence[Sequence[int]]


class PagedCache:
    """The registered layers of one rank; gathers rectangles out of them and scatters them into them.

    Attributes:
        layers: layers on this rank.
        heads: KV heads on this rank.
        blocks: logical blocks of each layer.
        block_size: tokens in a logical block.
        unit_tokens: tokens in a row: 1 if dense, those of a kernel block for a page codec.
        row_bytes: bytes of a row.
        element_bytes: bytes of a number in a row.
        codec: how the bytes of a row are arranged.
        groups: the block table of each layer, by number.
        device: where the layers lie.
        digest_name: the algorithm of `digest`; it depends on the device.

    Calls from several threads are safe as long as their rectangles do not overlap.
    """

    def __init__(
        self,
        pages: list[LayerPages],
        copier: Copier,
        *,
        heads: int,
        block_size: int,
        unit_tokens: int,
        row_bytes: int,
        element_bytes: int,
        codec: str,
        device: torch.device,
    ) -> None:
        self.layers = len(pages)
        self.heads = heads
        self.blocks = min(page.blocks for page in pages)
        self.block_size = block_size
        self.unit_tokens = unit_tokens
        self.row_bytes = row_bytes
        self.element_bytes = element_bytes
        self.codec = codec
        self.groups = tuple(page.group for page in pages)
        self.device = device
        self.digest_name = copier.digest_name
        self._copier = copier
        self._spans = copier.spans
        self._record = make_recorder(device)

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[torch.Tensor],
        *,
        block_size: int,
        codec: str = DENSE,
        groups: Sequence[int] | None = None,
    ) -> PagedCache:
        """The cache whose layer i is `tensors[i]`, of logical shape [B, H, N, C] and any strides.

        B counts kernel blocks of N tokens, H the KV heads of this rank; C is the K and V of one
        (head, token) and lies together in memory. Layers that share KV register one tensor twice:
        pass it once, and map the layers onto it outside.

        Args:
            block_size: tokens in a logical block, a multiple of N.
            codec: "dense" or "page:<isa>".
            groups: each layer's block table, by number; all 0 by default.

        Raises:
            ValueError: with a sentence, for tensors that this class cannot address.
        """
        groups = [0] * len(tensors) if groups is None else groups
        if not tensors or len(groups) != len(tensors):
            raise ValueError(
                f"{len(tensors)} KV layers and {len(groups)} group numbers: expected one each, and layers"
            )
        if min(groups) < 0:
            raise ValueError(f"group number {min(groups)}: block tables are numbered from 0")
        paged = is_paged(codec)
        for number, tensor in enumerate(tensors):
            _check_layer(number, tensor, tensors[0], block_size, paged)
        pages = [_pages_of(t, group, block_size, paged) for t, group in zip(tensors, groups, strict=True)]
        _, heads, tokens, content = tensors[0].shape
        unit_tokens = tokens if paged else 1
        return cls(
            pages,
            _copier_of(pages, tensors),
            heads=heads,
            block_size=block_size,
            unit_tokens=unit_tokens,
            row_bytes=unit_tokens * content * tensors[0].element_size(),
            element_bytes=tensors[0].element_size(),
            codec=codec,
            device=tensors[0].device,
        )

    def nbytes(self, layers: int, start: int, stop: int, heads: int) -> int:
        """Bytes on the wire of `layers` layers x tokens [start, stop) x `heads` heads.

        Raises ValueError if `start` is inside a unit.
        """
        first, last = self._units((start, stop))
        return layers * (last - first) * heads * self.row_bytes

    def gather(
        self, out: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> None:
        """Copy a rectangle from the pages to `out`.

        On CUDA the copy is queued on the current stream; on a CPU it has ended on return, and the
        GIL is free while it runs.

        Args:
            out: uint8 [nbytes], contiguous, on the cache's device.
            layers, tokens, heads: half-open intervals, counted on this rank.
            blocks: per group the request's logical block ids; token t is in blocks[g][t // block_size].

        Raises:
            ValueError: for a rectangle outside the cache, a start inside a unit, a wrong `out`, a
                block table that ends too early or names a block that does not exist.
        """
        for span, cut, part in self._parts(out, layers, tokens, heads, blocks):
            self._copier.take(span, cut, part)

    def scatter(
        self, src: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> None:
        """Copy a rectangle from `src` to the pages; the arguments and errors are gather's.

        Nothing has been written if this raises ValueError.
        """
        for span, cut, part in self._parts(src, layers, tokens, heads, blocks):
            self._copier.put(span, cut, part)

    def digest(self, buffer: torch.Tensor) -> Digest:
        """The checksum of uint8 [n] on the cache's device, as a link's buffer is.

        On CUDA it is queued on the current stream, so that it comes behind a gather and before a scatter
        of the calling thread; on a CPU it is known on return, and the GIL is free while it is computed.
        """
        return self._copier.digest(buffer)

    def fence(self) -> Fence:
        """A fence behind all copies that the calling thread has queued on its current stream."""
        return self._record()

    def warm_up(self) -> None:
        """Compile what gather and scatter run on the device; the first transfer would wait for it else."""
        self._copier.warm_up()

    def check(self, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables) -> None:
        """Raises the ValueError that gather and scatter would, but for that about the buffer."""
        _check_interval("layers", layers, self.layers)
        _check_interval("heads", heads, self.heads)
        units = self._units(tokens)
        for span in self._spans:
            if max(layers[0], span.first) < min(layers[1], span.stop) and units[0] < units[1]:
                self._table(span, units, blocks)

    def _parts(
        self, buffer: torch.Tensor, layers: Interval, tokens: Interval, heads: Interval, blocks: BlockTables
    ) -> list[tuple[Span, Cut, torch.Tensor]]:
        """The rectangle, cut by spans of layers: span, cut, its part of the buffer."""
        _check_interval("layers", layers, self.layers)
        _check_interval("heads", heads, self.heads)
        units = self._units(tokens)
        layer_bytes = (units[1] - units[0]) * (heads[1] - heads[0]) * self.row_bytes
        check_buffer(buffer, (layers[1] - layers[0]) * layer_bytes, self.device)
        if buffer.numel() == 0:
            return []
        parts: list[tuple[Span, Cut, torch.Tensor]] = []
        tables: dict[tuple[int, int, int], Index] = {}  # layers of separate storages mostly share one
        for span in self._spans:
            some = max(layers[0], span.first), min(layers[1], span.stop)
            if some[0] >= some[1]:
                continue
            kind = span.pages.group, span.pages.block_units, span.pages.blocks
            if (table := tables.get(kind)) is None:
                table = tables[kind] = self._table(span, units, blocks)
            cut = Cut(some, units, heads, self.row_bytes, table)
            part = buffer[(some[0] - layers[0]) * layer_bytes : (some[1] - layers[0]) * layer_bytes]
            parts.append((span, cut, part))
        return parts

    def _units(self, tokens: Interval) -> Interval:
        start, stop = tokens
        if not 0 <= start <= stop:
            raise ValueError(f"tokens [{start}, {stop}) are not an interval of a prompt")
        if start % self.unit_tokens:
            raise ValueError(
                f"tokens [{start}, {stop}) start inside a page: codec {self.codec} packs {self.unit_tokens} "
                f"tokens together, so the start must be a multiple of {self.unit_tokens}"
            )
        return start // self.unit_tokens, -(-stop // self.unit_tokens)

    def _table(self, span: Span, units: Interval, blocks: BlockTables) -> Index:
        """The checked block ids that `units` lie in, int64."""
        group, whole = span.pages.group, span.pages.block_units
        if group >= len(blocks):
            raise ValueError(f"{len(blocks)} block tables given, but layer {span.first} uses number {group}")
        first, stop = units[0] // whole, -(-units[1] // whole)
        if len(blocks[group]) < stop:
            raise ValueError(
                f"block table {group} has {len(blocks[group])} blocks of {self.block_size} tokens; "
                f"tokens up to {units[1] * self.unit_tokens} need {stop}"
            )
        table = np.asarray(blocks[group][first:stop], dtype=np.int64)
        if int(table.min()) < 0 or int(table.max()) >= span.pages.blocks:
            wrong = next(int(block) for block in table if not 0 <= block < span.pages.blocks)
            raise ValueError(
                f"block table {group} names block {wrong}; the cache has {span.pages.blocks} blocks"
            )
        return table


def check_buffer(buffer: torch.Tensor, nbytes: int, device: torch.device) -> None:
    """Raises ValueError unless `buffer` can hold a rectangle of so many bytes."""
    fits = buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
    if not fits or buffer.numel() != nbytes or buffer.device != device:
        raise ValueError(
            f"this rectangle needs a contiguous uint8 buffer of [{nbytes}] on {device}, "
            f"got {buffer.dtype} {list(buffer.shape)} on {buffer.device}"
        )


def _check_interval(what: str, interval: Interval, size: int) -> None:
    if not 0 <= interval[0] <= interval[1] <= size:
        raise ValueError(f"{what} [{interval[0]}, {interval[1]}) are not within the cache's [0, {size})")


def _check_layer(
    number: int, tensor: torch.Tensor, first: torch.Tensor, block_size: int, paged: bool
) -> None:
    """Raises ValueError unless layer `number` can be addressed and is like the first one."""
    if tensor.dim() != 4:
        raise ValueError(
            f"KV layer {number} has shape {list(tensor.shape)}; expected [blocks, heads, tokens, content]"
        )
    blocks, heads, tokens, content = tensor.shape
    if min(tensor.shape) < 1 or block_size % tokens or blocks % (block_size // tokens):
        raise ValueError(
            f"KV layer {number} has {blocks} kernel blocks of {tokens} tokens, which do not make up "
            f"whole blocks of {block_size} tokens"
        )
    if (heads, content, tensor.dtype) != (first.shape[1], first.shape[3], first.dtype):
        raise ValueError(
            f"KV layer {number} has {heads} heads of {content} x {tensor.dtype}, layer 0 has "
            f"{first.shape[1]} of {first.shape[3]} x {first.dtype}; models whose layers differ are "
            f"not supported yet"
        )
    if tensor.device != first.device:
        raise ValueError(
            f"KV layer {number} is on {tensor.device}, layer 0 on {first.device}; expected one device"
        )
    if content > 1 and tensor.stride(3) != 1:
        raise ValueError(
            f"KV layer {number} has strides {list(tensor.stride())}; its content must lie together"
        )
    if paged and tokens > 1 and tensor.stride(2) != content:
        raise ValueError(
            f"KV layer {number} has strides {list(tensor.stride())}; with a page codec the tokens of a "
            f"(block, head) must lie together (a head-major layout)"
        )
    if paged and tokens != first.shape[2]:
        raise ValueError(
            f"KV layer {number} packs {tokens} tokens in a page, layer 0 packs {first.shape[2]}; "
            f"models whose layers differ are not supported yet"
        )


def _copier_of(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> Copier:
    """On CUDA the kernels, if CuPy is there to launch them."""
    device = tensors[0].device
    if device.type == "cuda" and (launcher := cupy_launcher(device)) is not None:
        return KernelCopier(pages, tensors, launcher)
    arenas = {page.arena: arena_of(tensor) for page, tensor in zip(pages, tensors, strict=True)}
    return ArenaCopier(pages, arenas)


def _pages_of(tensor: torch.Tensor, group: int, block_size: int, paged: bool) -> LayerPages:
    size = tensor.element_size()
    blocks, _, tokens, _ = tensor.shape
    block_stride, head_stride, token_stride, _ = (stride * size for stride in tensor.stride())
    units, ratio = 1 if paged else tokens, block_size // tokens
    # With one unit in a kernel block, the next unit is the next kernel block.
    unit_stride = block_stride if units == 1 else token_stride
    if block_stride == units * unit_stride:
        units, block_stride, ratio = units * ratio, block_stride * ratio, 1
    return LayerPages(
        arena=tensor.untyped_storage().data_ptr(),
        group=group,
        blocks=blocks * tokens // block_size,
        ratio=ratio,
        units=units,
        block_stride=block_stride,
        unit_stride=unit_stride,
        head_stride=head_stride,
        offset=int(tensor.storage_offset()) * size,
    )
