"""Block tables on their way to a device that has other work: no call waits for it, and none is mixed up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from p2pkv.kv.cache import PagedCache
from p2pkv.kv.checksum import digest_by_torch
from p2pkv.kv.copiers import Columns, Copier, KernelCopier, StorageCopier, columns_on_device
from p2pkv.kv.layouts import LayerPages, Rows, pages_of
from p2pkv.kv.uploads import DIGESTS, MAX_RECENT, SEGMENTS, Digests, Ring, Uploads
from support.cuda.kernels import CpuLauncher
from support.engine.fake_device import Device
from support.kv.pages import Memory
from support.waiting import wait_for

CUDA = torch.device("cuda", 0)
BLOCK, HEADS, CONTENT, LAYERS = 16, 2, 32, 4
CUT = (0, LAYERS), (3, 61), (0, HEADS)
POISON = -9
KEPT: list[torch.Tensor] = []
"""Memory that was taken: an address must not be taken for another's."""

MakeCopier = Callable[[list[LayerPages], Sequence[torch.Tensor]], Copier]


class PretendCuda:
    """A device that stands still until the test frees it, and what torch does with it.

    A copy from memory that is not pinned waits for all that its stream holds (CUDA Runtime API, "API
    synchronization behavior").

    Attributes:
        copied: what has been copied to the device.
        calls: those that CUDA may answer only when all that was queued before is done. Each that takes
            memory: CUDA C++ Programming Guide of CUDA 12, 3.2.8.5.4, "Implicit Synchronization" (the edition
            of CUDA 13 has only the NULL stream there), and NCCL's User Guide before 2.26, "Using multiple
            NCCL communicators concurrently" ("any CUDA operation"). Each first launch of a kernel, which
            loads it: CUDA 12's 25.5.1, "Concurrent Execution", and CUDA 13's 4.7.5.1.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        self.copied: list[torch.Tensor] = []
        self.calls: list[str] = []
        self._pinned: set[int] = set()
        self._on_device: set[int] = set()
        self._loaded: set[object] = set()
        self._copy = torch.Tensor.copy_
        for name in ("empty", "zeros", "full"):
            patch.setattr(torch, name, self._maker(name, getattr(torch, name)))
        to = torch.Tensor.to

        def pretend_to(tensor: torch.Tensor, *args: Any, **kind: Any) -> torch.Tensor:
            if args != (CUDA,):
                return to(tensor, *args, **kind)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA).copy_(tensor, **kind)

        def pretend_copy(target: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
            return self._copied(target, *args, **how)

        patch.setattr(torch.Tensor, "to", pretend_to)
        patch.setattr(torch.Tensor, "copy_", pretend_copy)
        patch.setattr("p2pkv.kv.uploads.make_recorder", lambda device: self.device.fence)

    def launch(self, kernel: object) -> None:
        """A kernel of this name, or of torch's, is launched."""
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            self.calls.append(f"load {kernel}")

    def _maker(self, name: str, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def pretend(*args: Any, pin_memory: bool = False, device: Any = None, **kind: Any) -> torch.Tensor:
            made = make(*args, **kind)
            if pin_memory or device == CUDA:
                (self._pinned if pin_memory else self._on_device).add(made.untyped_storage().data_ptr())
                self.calls.append(f"take {'pinned' if pin_memory else 'device'} memory ({name})")
                KEPT.append(made)
            return made

        return pretend

    def _copied(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if target.untyped_storage().data_ptr() not in self._on_device:
            if source.untyped_storage().data_ptr() in self._on_device:
                self.device.queue(lambda: self._copy(target, source))
                return target
            return self._copy(target, source)
        self._copy(target, torch.full_like(target, POISON))
        self.copied.append(target)
        self.device.queue(lambda: self._copy(target, source))
        if source.untyped_storage().data_ptr() not in self._pinned or not non_blocking:
            self.calls.append("wait for the device (a copy from ordinary memory)")
            self.device.free()
        return target

    def stands(self) -> bool:
        """Whether nothing of what has been queued is done."""
        return not self.device.passed(1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendCuda]:
    pretend = PretendCuda(monkeypatch)
    yield pretend
    pretend.device.free()
    KEPT.clear()


class Queued:
    """Launches in the order of the device's work."""

    def __init__(self, inner: CpuLauncher, cuda: PretendCuda) -> None:
        self.most_blocks = inner.most_blocks
        self._inner, self._cuda = inner, cuda

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        self._cuda.launch(name)
        self._cuda.device.queue(lambda: self._inner.launch(name, blocks, threads, args))


def with_kernels(cuda: PretendCuda, launcher: CpuLauncher) -> MakeCopier:
    def make(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> Copier:
        copier = KernelCopier(pages, tensors, Queued(launcher, cuda))
        copier.upload = Uploads(CUDA, torch.int32)
        copier._digests = Digests(CUDA)
        return copier

    return make


def with_torch(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> Copier:
    """The copier without CuPy. Its storages are on a CPU, but the numbers of their rows are uploaded."""
    copier = StorageCopier(pages, tensors)
    copier.uploads = Uploads(CUDA, torch.int64)
    return copier


def memory_of(groups: tuple[int, ...] = (0,) * LAYERS) -> Memory:
    kind = torch.bfloat16
    return Memory("LBHNC", LAYERS, 8, BLOCK, 1, HEADS, CONTENT, kind, "dense", 0, 0, groups, 1)


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
    launcher: CpuLauncher, cuda: PretendCuda
) -> None:
    memory = memory_of()
    cache = cache_of(memory, with_kernels(cuda, launcher))
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
    groups: tuple[int, ...], launcher: CpuLauncher, cuda: PretendCuda
) -> None:
    memory = memory_of(groups)
    cache = cache_of(memory, with_kernels(cuda, launcher))
    tables = memory.tables(64, seed=1)
    out = gathered(cache, tables)
    assert len(cuda.copied) == len(set(groups))
    cuda.device.free()
    assert right(memory, tables, out)
    gathered(cache, tables)
    assert len(cuda.copied) == 2 * len(set(groups)), "equal tables of another call are other tables"


@pytest.mark.parametrize("groups", [(0, 0, 0, 0), (0, 1, 0, 1)])
def test_without_cupy_rows_are_listed_and_uploaded_once_for_layers_that_lie_alike(
    groups: tuple[int, ...], cuda: PretendCuda
) -> None:
    cuda.device.free()
    memory = memory_of(groups)
    cache = cache_of(memory, with_torch, apart=True)
    tables = memory.tables(64, seed=1)
    assert right(memory, tables, gathered(cache, tables))
    assert len(cuda.copied) == len(set(groups))


def test_few_arrays_are_kept(cuda: PretendCuda) -> None:
    cuda.device.free()
    uploads = Uploads(CUDA, torch.int32)
    arrays = [np.array([number]) for number in range(MAX_RECENT + 1)]
    for array in [*arrays, *arrays[1:]]:
        assert uploads(array).tolist() == array.tolist()
    assert len(cuda.copied) == MAX_RECENT + 1
    uploads(arrays[0])
    assert len(cuda.copied) == MAX_RECENT + 2


def test_after_a_warm_up_no_call_takes_memory_loads_a_kernel_or_waits(
    launcher: CpuLauncher, cuda: PretendCuda
) -> None:
    """What may wait for the device may wait for a peer, whose receive runs there."""
    memory = memory_of((0, 1, 0, 1))
    cache = cache_of(memory, with_kernels(cuda, launcher))
    cache.warm_up()
    assert any("pinned" in call for call in cuda.calls) and any("load" in call for call in cuda.calls)
    assert cuda.stands(), "the warm-up itself has waited"
    cuda.calls.clear()
    outs, tables, digests = [], [memory.tables(64, seed) for seed in range(200)], []
    for table in tables:
        outs.append(gathered(cache, table))
        digests.append(cache.digest(outs[-1]))
        cache.scatter(outs[-1], *CUT, table)
    assert cuda.calls == [] and cuda.stands()
    cuda.device.free()
    for table, out, digest in zip(tables, outs, digests, strict=True):
        assert right(memory, table, out)
        assert digest.value() == digest_by_torch(out).value()


def test_a_warm_up_without_cupy_runs_each_of_torchs_kernels(
    cuda: PretendCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of each width, and columns of each: torch loads a kernel when it is first used."""
    cuda.device.free()

    def loads(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def pretend(*args: Any, **how: Any) -> Any:
            tensor = args[0]
            if how.get("non_blocking") is None:
                cuda.launch((name, tensor.dtype, tensor.dim()))
            return call(*args, **how)

        monkeypatch.setattr(owner, name, pretend)

    loads(torch, "index_select")
    loads(torch.Tensor, "index_copy_")
    loads(torch.Tensor, "copy_")
    flat = torch.zeros(1 << 12, dtype=torch.uint8)
    copier = with_torch([pages_of(flat.view(4, 1, 16, 64), 0, 16, paged=False)], [flat])
    copier.warm_up()
    cuda.calls.clear()
    for word in (1, 2, 4, 8):
        dense = torch.zeros(64 * word, dtype=torch.uint8)
        for each in (copier.take_rows, copier.put_rows):
            each(flat, Rows(word, 0, np.arange(64)), dense)
        memory, matrix = columns_on_device(flat, Columns(0, 8, 8, word, 16 * word), dense)
        memory.copy_(matrix)
    assert cuda.calls == []


def test_a_ring_is_used_round_and_round(cuda: PretendCuda) -> None:
    """A part of it is written again only when what was copied out of it has arrived."""
    uploads = Uploads(CUDA, torch.int32)
    ring = uploads._ring = Ring(CUDA, torch.int32, nbytes=4 * SEGMENTS * 4)
    cuda.calls.clear()
    seen = []
    for number in range(SEGMENTS):
        on_device = uploads(np.full(ring.segment, number))
        cuda.device.queue(lambda on_device=on_device: seen.append(on_device.tolist()))  # a kernel's look
    waited = threading.Thread(target=uploads, args=(np.full(ring.segment, -1),))
    waited.start()
    wait_for(lambda: cuda.device.waiting, what="the wait for the ring")
    cuda.device.run(2)
    waited.join(20)
    assert not waited.is_alive() and cuda.calls == []
    cuda.device.free()
    assert seen == [[number] * ring.segment for number in range(SEGMENTS)]


def test_what_a_ring_has_overwritten_is_copied_again(cuda: PretendCuda) -> None:
    cuda.device.free()
    uploads = Uploads(CUDA, torch.int32)
    ring = uploads._ring = Ring(CUDA, torch.int32, nbytes=4 * SEGMENTS * 4)
    first = np.array([7])
    uploads(first)
    for number in range(SEGMENTS):
        uploads(np.full(ring.segment, number))
        assert uploads(first).tolist() == [7]


def test_an_array_larger_than_a_ring_takes_memory_of_its_own(cuda: PretendCuda) -> None:
    cuda.device.free()
    uploads = Uploads(CUDA, torch.int32)
    ring = uploads._ring = Ring(CUDA, torch.int32, nbytes=4 * SEGMENTS * 4)
    large = np.arange(ring.segment + 1)
    assert uploads(large).tolist() == large.tolist()


def test_places_of_checksums_are_free_again_when_nobody_refers_to_them(cuda: PretendCuda) -> None:
    cuda.device.free()
    digests = Digests(CUDA, count=2)
    cuda.calls.clear()

    def add(number: int) -> Callable[[torch.Tensor], None]:
        return lambda total: total.add_(number)  # type: ignore[return-value]

    for number in range(20):
        assert int.from_bytes(digests.compute(add(number)).value(), "big") == number
    assert cuda.calls == []
    held = [digests.compute(add(number)) for number in range(3)]
    assert [int.from_bytes(each.value(), "big") for each in held] == [0, 1, 2]
    assert len(cuda.calls) == 1, "the third found no place, and took memory for itself"
    assert DIGESTS > 100
