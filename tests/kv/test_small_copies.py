"""Block tables on their way to a device that has other work: no call waits for it, and none is mixed up."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from p2pkv.kv.cache import PagedCache
from p2pkv.kv.checksum import digest_by_torch
from p2pkv.kv.copiers import Columns, Copier, StorageCopier, columns_on_device
from p2pkv.kv.layouts import LayerPages, Rows, pages_of
from p2pkv.kv.small_copies import DIGESTS, MAX_RECENT, SEGMENTS, Digests, Ring, Uploads
from support.cuda.device import CUDA, SimulatedCuda
from support.cuda.kernels import CpuLauncher
from support.kv.pages import Memory

BLOCK, HEADS, CONTENT, LAYERS = 16, 2, 32, 4
CUT = (0, LAYERS), (3, 61), (0, HEADS)
NBYTES = LAYERS * (61 - 3) * HEADS * CONTENT * 2


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    simulated = SimulatedCuda(monkeypatch)
    yield simulated
    simulated.let_go()


def with_torch(pages: list[LayerPages], tensors: Sequence[torch.Tensor]) -> Copier:
    """The copier without CuPy. Its storages are on a CPU, but the numbers of their rows are uploaded."""
    copier = StorageCopier(pages, tensors)
    copier.uploads = Uploads(CUDA, torch.int64)
    return copier


def memory_of(groups: tuple[int, ...] = (0,) * LAYERS) -> Memory:
    kind = torch.bfloat16
    return Memory("LBHNC", LAYERS, 8, BLOCK, 1, HEADS, CONTENT, kind, "dense", 0, 0, groups, 1)


def cache_with_kernels(cuda: SimulatedCuda, launcher: CpuLauncher, memory: Memory) -> PagedCache:
    with cuda.moving(launcher):
        return memory.cache(memory.flat)


def a_buffer() -> torch.Tensor:
    """Where the rectangle CUT will be, on the device."""
    return torch.zeros(NBYTES, dtype=torch.uint8, device=CUDA)


def right(memory: Memory, tables: list[list[int]], out: torch.Tensor) -> bool:
    return torch.equal(out, torch.cat(list(memory.rows(memory.flat, *CUT, tables))))


@pytest.mark.parametrize("groups", [(0, 0, 0, 0), (0, 1, 0, 1), (2, 1, 0, 2)])
def test_a_block_table_is_uploaded_once_for_all_layers_that_share_it(
    groups: tuple[int, ...], launcher: CpuLauncher, cuda: SimulatedCuda
) -> None:
    memory = memory_of(groups)
    cache, tables, out = cache_with_kernels(cuda, launcher, memory), memory.tables(64, seed=1), a_buffer()
    for _ in range(2):  # equal tables of another call are other tables
        before = cuda.copied
        cache.gather(out, *CUT, tables)
        assert cuda.copied - before == len(set(groups))
    cuda.driver.synchronize(cuda.stream)
    assert right(memory, tables, out)


@pytest.mark.parametrize("groups", [(0, 0, 0, 0), (0, 1, 0, 1)])
def test_without_cupy_rows_are_listed_and_uploaded_once_for_layers_that_lie_alike(
    groups: tuple[int, ...], cuda: SimulatedCuda
) -> None:
    """Layers that have a storage each."""
    cuda.driver.at_once = True
    memory = memory_of(groups)
    layers = [layer.clone() for layer in memory.view(memory.flat).unbind(0)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pkv.kv.cache.copier_of", with_torch)
        patch.setattr(memory, "view", lambda flat: SimpleNamespace(unbind=lambda axis: layers))
        cache = memory.cache(memory.flat)
    tables, out = memory.tables(64, seed=1), torch.zeros(NBYTES, dtype=torch.uint8)
    cache.gather(out, *CUT, tables)
    assert cuda.copied == len(set(groups))
    assert right(memory, tables, out)


def test_few_arrays_are_kept(cuda: SimulatedCuda) -> None:
    cuda.driver.at_once = True
    uploads = Uploads(CUDA, torch.int32)
    arrays = [np.array([number]) for number in range(MAX_RECENT + 1)]
    for array in [*arrays, *arrays[1:]]:
        assert uploads(array).tolist() == array.tolist()
    assert cuda.copied == MAX_RECENT + 1
    uploads(arrays[0])
    assert cuda.copied == MAX_RECENT + 2


def test_after_a_warm_up_no_call_takes_memory_loads_a_kernel_or_waits(
    launcher: CpuLauncher, cuda: SimulatedCuda
) -> None:
    """What may wait for the device may wait for a peer, whose receive runs there."""
    memory = memory_of((0, 1, 0, 1))
    cache, done = cache_with_kernels(cuda, launcher, memory), cuda.driver.done
    cache.copier.warm_up()
    assert any("pinned" in call for call in cuda.calls) and any("load" in call for call in cuda.calls)
    assert cuda.driver.done == done, "the warm-up itself has waited"
    tables = [memory.tables(64, seed) for seed in range(200)]
    outs, digests = [a_buffer() for _ in tables], []
    cuda.calls.clear()
    for table, out in zip(tables, outs, strict=True):
        given = [list(group) for group in table]
        cache.gather(out, *CUT, given)
        digests.append(cache.digest(out))
        cache.scatter(out, *CUT, given)
        given[0][:] = [0] * len(given[0])  # the caller's list is the caller's
    assert cuda.calls == [] and cuda.driver.done == done
    cuda.driver.synchronize(cuda.stream)
    for table, out, digest in zip(tables, outs, digests, strict=True):
        assert right(memory, table, out)
        assert digest.value() == digest_by_torch(out).value()


def test_a_warm_up_without_cupy_runs_each_of_torchs_kernels(
    cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of each width, and columns of each: torch loads a kernel when it is first used."""
    cuda.driver.at_once = True

    def loads(owner: object, name: str) -> None:
        call = getattr(owner, name)

        def pretend(*args: Any, **how: Any) -> Any:
            tensor = args[0]
            if how.get("non_blocking") is None:
                cuda.load((name, tensor.dtype, tensor.dim()))
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


def small_ring() -> tuple[Uploads, int]:
    """Uploads whose ring has parts of so many entries."""
    uploads = Uploads(CUDA, torch.int32)
    ring = uploads._ring = Ring(CUDA, torch.int32, nbytes=4 * SEGMENTS * 4)
    return uploads, ring.segment


def test_a_ring_is_used_round_and_round(cuda: SimulatedCuda) -> None:
    """A part of it is written again only when what was copied out of it has arrived."""
    (uploads, segment), seen = small_ring(), list[list[int]]()
    cuda.calls.clear()

    def upload(number: int) -> None:
        on_device = uploads(np.full(segment, number))
        cuda.driver.queue(cuda.stream, "a kernel", [], lambda: seen.append(on_device.tolist()))

    for number in range(SEGMENTS):
        upload(number)
    assert seen == []
    upload(SEGMENTS)
    assert seen == [[0] * segment], "it has waited for the first part, and no longer"
    cuda.driver.synchronize(cuda.stream)
    assert seen == [[number] * segment for number in range(SEGMENTS + 1)] and cuda.calls == []


def test_what_a_ring_has_overwritten_is_copied_again(cuda: SimulatedCuda) -> None:
    cuda.driver.at_once = True
    uploads, segment = small_ring()
    first = np.array([7])
    uploads(first)
    for number in range(SEGMENTS):
        uploads(np.full(segment, number))
        assert uploads(first).tolist() == [7]


def test_an_array_larger_than_a_ring_takes_memory_of_its_own(cuda: SimulatedCuda) -> None:
    cuda.driver.at_once = True
    uploads, segment = small_ring()
    large = np.arange(segment + 1)
    assert uploads(large).tolist() == large.tolist()


def test_places_of_checksums_are_free_again_when_nobody_refers_to_them(cuda: SimulatedCuda) -> None:
    cuda.driver.at_once = True
    digests = Digests(CUDA, count=2)
    cuda.calls.clear()

    def add(number: int) -> Callable[[torch.Tensor], None]:
        return lambda total: total.add_(number)  # type: ignore[return-value]

    for number in range(20):
        assert int.from_bytes(digests.compute(add(number)).value(), "big") == number
    assert cuda.calls == []
    held = [digests.compute(add(number)) for number in range(3)]
    assert [int.from_bytes(each.value(), "big") for each in held] == [0, 1, 2]
    assert cuda.calls[0] == "take device memory", "the third found no place, and took memory for itself"
    assert DIGESTS > 100
