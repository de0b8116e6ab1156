"""Block tables on their way to a device that has other work: no call waits for it, and none is mixed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import Device
from kernel_support import NO_GCC, CpuLauncher, compiled

from p2pkv.kv.cache import PagedCache
from p2pkv.kv.copiers import (
    MOST_RECENT,
    WARM_UP_POWERS,
    Copier,
    DeviceStorage,
    KernelCopier,
    StorageCopier,
    Uploads,
)
from p2pkv.kv.layouts import LayerPages

CUDA = torch.device("cuda", 0)
BLOCK, HEADS, CONTENT, LAYERS = 16, 2, 32, 4
CUT = (0, LAYERS), (3, 61), (0, HEADS)
POISON = -9

MakeCopier = Callable[[list[LayerPages], Sequence[torch.Tensor]], Copier]


class PretendCuda:
    """A device that stands still until the test frees it, and torch's copies to it.

    As with CUDA, a copy from memory that is not pinned lets the device do all that is queued before it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        self.copied: list[torch.Tensor] = []
        """What is on the device. It is kept, as torch keeps memory that a stream may still use."""
        self._pinned: set[int] = set()
        empty, to = torch.empty, torch.Tensor.to

        def pretend_empty(*args: Any, pin_memory: bool = False, **kind: Any) -> torch.Tensor:
            made = empty(*args, **kind)
            if pin_memory:
                self._pinned.add(made.data_ptr())
            return made

        def pretend_to(tensor: torch.Tensor, *args: Any, **kind: Any) -> torch.Tensor:
            return self._copied(tensor, **kind) if args == (CUDA,) else to(tensor, *args, **kind)

        patch.setattr(torch, "empty", pretend_empty)
        patch.setattr(torch.Tensor, "to", pretend_to)

    def _copied(self, tensor: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        made = torch.full_like(tensor, POISON)
        self.copied.append(made)
        self.device.queue(lambda: made.copy_(tensor))
        if tensor.data_ptr() not in self._pinned or not non_blocking:
            self.device.free()
        return made

    def stands(self) -> bool:
        """Whether nothing of what has been queued is done."""
        return not self.device.passed(1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendCuda]:
    pretend = PretendCuda(monkeypatch)
    yield pretend
    pretend.device.free()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLauncher:
    if NO_GCC:
        pytest.skip(NO_GCC)
    return CpuLauncher(compiled(tmp_path_factory.mktemp("kernels")))


class Queued:
    """Launches in the order of the device's work."""

    def __init__(self, inner: CpuLauncher, device: Device) -> None:
        self.most_blocks = inner.most_blocks
        self._inner, self._device = inner, device

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        self._device.queue(lambda: self._inner.launch(name, blocks, threads, args))


def with_kernels(cuda: PretendCuda, library: CpuLauncher) -> MakeCopier:
    def make(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> Copier:
        copier = KernelCopier(pages, tensors, Queued(library, cuda.device))
        copier.upload = Uploads(CUDA, torch.int32)
        return copier

    return make


def with_torch(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> Copier:
    """The copier without CuPy. Its storages are on a CPU, but the numbers of their rows are uploaded."""
    uploads = Uploads(CUDA, torch.int64)
    flat = [torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in tensors]
    return StorageCopier(
        pages, {page.storage: DeviceStorage(each, uploads) for page, each in zip(pages, flat, strict=True)}
    )


def memory_of(memory_type: Any, groups: tuple[int, ...] = (0,) * LAYERS) -> Any:
    kind = torch.bfloat16
    return memory_type("LBHNC", LAYERS, 8, BLOCK, 1, HEADS, CONTENT, kind, "dense", 0, 0, groups, 1)


def cache_of(memory: Any, make: MakeCopier, apart: bool = False) -> PagedCache:
    """A cache over the memory, or over a copy that has a storage for each layer."""
    layers = [layer.clone() if apart else layer for layer in memory.view(memory.flat).unbind(0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pkv.kv.cache.copier_of", make)
        patch.setattr(memory, "view", lambda flat: SimpleNamespace(unbind=lambda axis: layers))
        cache: PagedCache = memory.cache(memory.flat)
    return cache


def gathered(cache: PagedCache, tables: list[list[int]]) -> torch.Tensor:
    """Where the rectangle CUT will be."""
    out = torch.zeros(cache.nbytes(LAYERS, *CUT[1], HEADS), dtype=torch.uint8)
    cache.gather(out, *CUT, tables)
    return out


def right(memory: Any, tables: list[list[int]], out: torch.Tensor) -> bool:
    return torch.equal(out, torch.cat(list(memory.rows(memory.flat, *CUT, tables))))


def test_gathers_are_queued_behind_unfinished_work_each_with_its_own_block_table(
    memory_type: Any, library: CpuLauncher, cuda: PretendCuda
) -> None:
    memory = memory_of(memory_type)
    cache = cache_of(memory, with_kernels(cuda, library))
    tables = [memory.tables(64, seed) for seed in range(3)]
    outs = []
    for table in tables:
        given = [list(group) for group in table]
        outs.append(gathered(cache, given))
        given[0][:] = [0] * len(given[0])  # the caller's list is the caller's
        assert cuda.stands(), "the call has waited for the device"
    cuda.device.free()
    for table, out in zip(tables, outs, strict=True):
        assert right(memory, table, out)


def test_a_copy_from_memory_that_is_not_pinned_would_be_seen(cuda: PretendCuda) -> None:
    torch.zeros(3, dtype=torch.int32).to(CUDA, non_blocking=True)
    assert not cuda.stands()


@pytest.mark.parametrize("groups", [(0, 0, 0, 0), (0, 1, 0, 1), (2, 1, 0, 2)])
def test_a_block_table_is_uploaded_once_for_all_layers_that_share_it(
    groups: tuple[int, ...], memory_type: Any, library: CpuLauncher, cuda: PretendCuda
) -> None:
    memory = memory_of(memory_type, groups)
    cache = cache_of(memory, with_kernels(cuda, library))
    tables = memory.tables(64, seed=1)
    out = gathered(cache, tables)
    assert len(cuda.copied) == len(set(groups))
    cuda.device.free()
    assert right(memory, tables, out)
    gathered(cache, tables)
    assert len(cuda.copied) == 2 * len(set(groups)), "equal tables of another call are other tables"


@pytest.mark.parametrize("groups", [(0, 0, 0, 0), (0, 1, 0, 1)])
def test_without_cupy_rows_are_listed_and_uploaded_once_for_layers_that_lie_alike(
    groups: tuple[int, ...], memory_type: Any, cuda: PretendCuda
) -> None:
    cuda.device.free()
    memory = memory_of(memory_type, groups)
    cache = cache_of(memory, with_torch, apart=True)
    tables = memory.tables(64, seed=1)
    assert right(memory, tables, gathered(cache, tables))
    assert len(cuda.copied) == len(set(groups))


def test_few_arrays_are_kept(cuda: PretendCuda) -> None:
    cuda.device.free()
    uploads = Uploads(CUDA, torch.int32)
    arrays = [np.array([number]) for number in range(MOST_RECENT + 1)]
    for array in [*arrays, *arrays[1:]]:
        assert uploads(array).tolist() == array.tolist()
    assert len(cuda.copied) == MOST_RECENT + 1
    uploads(arrays[0])
    assert len(cuda.copied) == MOST_RECENT + 2


def test_a_warm_up_takes_pinned_memory_before_it_is_needed(
    memory_type: Any, library: CpuLauncher, cuda: PretendCuda
) -> None:
    cache = cache_of(memory_of(memory_type), with_kernels(cuda, library))
    cache.warm_up()
    assert cuda.stands()
    assert [made.numel() for made in cuda.copied] == [1 << power for power in range(WARM_UP_POWERS)]
