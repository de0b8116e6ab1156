"""Moving rows between an arena and a dense buffer: numpy on a CPU, torch's index kernels elsewhere.

On CUDA with CuPy the kernels of `kernels` do it instead; torch's remain their reference.

Why numpy on a CPU: this runs in a thread beside vLLM's forward. numpy's take and put copy in the
calling thread and let go of the GIL meanwhile, whereas torch's would start a second OpenMP team on
cores that the forward owns, and the number of its threads cannot be set for one thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from p2pkv.pages.digest import FOLD, XXH3, Digest, digest_by_torch, digest_on_host
from p2pkv.pages.rows import Cut, LayerPages, Rows, Span, locate, spans_of


class Copier(Protocol):
    """Moves what lies in one of its spans of layers; how far a span reaches is its own affair.

    Attributes:
        digest_name: the algorithm of `digest`.
    """

    spans: Sequence[Span]
    digest_name: str

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        """Copy the cut, which is not empty, to `out`: uint8, contiguous, same device, exactly as large."""
        ...

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        """Copy `src` (as `out` in take) to the cut."""
        ...

    def digest(self, buffer: torch.Tensor) -> Digest:
        """The checksum of what `out` holds behind a take, or `src` before a put."""
        ...

    def warm_up(self) -> None:
        """Prepare what the first copy would else have to wait for."""
        ...


class Arena(Protocol):
    """One storage that layers lie in, as flat bytes. Keeps the storage alive."""

    def take(self, rows: Rows, out: torch.Tensor) -> None:
        """Copy the rows, in their order, to `out`: uint8, contiguous, same device, exactly as large."""
        ...

    def put(self, rows: Rows, src: torch.Tensor) -> None:
        """Copy `src` (as `out` in take) to the rows, in their order."""
        ...


class ArenaCopier:
    """Lists the rows of a cut on the host, and lets the arena of its storage copy them."""

    def __init__(self, pages: Sequence[LayerPages], arenas: Mapping[int, Arena]) -> None:
        self.spans: Sequence[Span] = spans_of(pages)
        self._arenas = arenas
        on_host = all(isinstance(arena, HostArena) for arena in arenas.values())
        self.digest_name = XXH3 if on_host else FOLD

    def take(self, span: Span, cut: Cut, out: torch.Tensor) -> None:
        self._arenas[span.pages.arena].take(locate(span, cut), out)

    def put(self, span: Span, cut: Cut, src: torch.Tensor) -> None:
        self._arenas[span.pages.arena].put(locate(span, cut), src)

    def digest(self, buffer: torch.Tensor) -> Digest:
        return digest_on_host(buffer) if self.digest_name == XXH3 else digest_by_torch(buffer)

    def warm_up(self) -> None:
        """Nothing: numpy and torch are ready."""


def arena_of(tensor: torch.Tensor) -> Arena:
    """The arena of the storage that `tensor` is a view of."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return HostArena(flat) if tensor.device.type == "cpu" else DeviceArena(flat)


class HostArena:
    """An arena in CPU memory. The copies have ended when the calls return."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat: NDArray[Any] = flat.numpy()

    def take(self, rows: Rows, out: torch.Tensor) -> None:
        # "raise" would copy through a buffer; the index comes from checked block ids.
        np.take(self._grid(rows), rows.index, axis=0, out=out.numpy().reshape(-1, rows.atom), mode="clip")

    def put(self, rows: Rows, src: torch.Tensor) -> None:
        self._grid(rows)[rows.index] = src.numpy().reshape(-1, rows.atom)

    def _grid(self, rows: Rows) -> NDArray[Any]:
        count = (self._flat.size - rows.base) // rows.atom
        return self._flat[rows.base : rows.base + count * rows.atom].reshape(count, rows.atom)


class DeviceArena:
    """An arena on an accelerator. The copies are queued on the current stream when the calls return."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def take(self, rows: Rows, out: torch.Tensor) -> None:
        torch.index_select(self._grid(rows), 0, self._index(rows), out=out.view(-1, rows.atom))

    def put(self, rows: Rows, src: torch.Tensor) -> None:
        self._grid(rows).index_copy_(0, self._index(rows), src.view(-1, rows.atom))

    def _index(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows.index).to(self._flat.device, non_blocking=True)

    def _grid(self, rows: Rows) -> torch.Tensor:
        count = (self._flat.numel() - rows.base) // rows.atom
        return self._flat[rows.base : rows.base + count * rows.atom].view(count, rows.atom)
