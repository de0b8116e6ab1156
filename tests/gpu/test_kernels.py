"""The kernels on a real device, against rows found one by one and against torch's index kernels."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from p2pkv.bench.memory import HEADS, LAYERS, LAYOUTS, Memory
from p2pkv.device import give_stream, make_recorder, own_stream, take_stream
from p2pkv.kv import PagedCache, checksum, copiers, small_copies
from p2pkv.kv.copiers import KernelCopier
from support.kv.pages import POISON, check_exchange
from support.waiting import wait_for

pytestmark = pytest.mark.gpu

DENSE = LAYOUTS["dense"]
SLEEP_CYCLES = 2_000_000_000
"""About a second of a GPU's clock."""


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("part", range(10))
def test_a_rectangle_travels_between_any_two_layouts(part: int) -> None:
    for seed in range(part * 30, part * 30 + 30):
        check_exchange(random.Random(seed), "cuda")


def test_kernels_and_torch_move_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of Llama-8B, some heads, tokens that begin and end inside blocks."""
    memory = Memory(1024, "P", "cuda")
    by_kernels = memory.cache(DENSE)
    assert isinstance(by_kernels.copier, KernelCopier)
    by_kernels.copier.warm_up()
    with monkeypatch.context() as patch:
        patch.setattr(copiers, "cupy_launcher", lambda device: None)
        by_torch = memory.cache(DENSE)
    cut = (0, LAYERS), (5, 1001), (1, HEADS)
    table = [DENSE.table(1024, 1024, "P")]
    nbytes = by_torch.nbytes(LAYERS, *cut[1], HEADS - 1)
    out = [torch.full((nbytes,), POISON, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for cache, dense in zip((by_kernels, by_torch), out, strict=True):
        cache.gather(dense, *cut, table)
    assert torch.equal(*out)
    left = []
    for cache, dense in ((by_kernels, out[0].flip(0)), (by_torch, out[0].flip(0))):
        cache.gather(out[1], *cut, table)  # what the pages hold before
        cache.scatter(dense, *cut, table)
        left.append(memory.flat.clone())
        cache.scatter(out[1], *cut, table)
    assert torch.equal(*left)


@pytest.mark.parametrize("nbytes", [1, 8, 8191, 1 << 20, (64 << 20) + 3])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_the_checksum_is_the_one_that_torch_computes(
    nbytes: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernel and by torch on the device, against torch on the host; of the bytes and of one bit less."""
    buffer = torch.randint(0, 256, (nbytes + shift,), dtype=torch.uint8, device="cuda")[shift:]
    by_kernel = Memory(64, "P", "cuda").cache(DENSE)
    assert isinstance(by_kernel.copier, KernelCopier)
    with monkeypatch.context() as patch:
        patch.setattr(copiers, "cupy_launcher", lambda device: None)
        by_torch = Memory(64, "P", "cuda").cache(DENSE)
    said = []
    for _ in range(2):
        digests = [cache.digest(buffer) for cache in (by_kernel, by_torch)]
        by_kernel.fence().wait()
        assert not any(digest.known for digest in digests)
        values = {digest.value() for digest in digests} | {checksum.digest_by_torch(buffer.cpu()).value()}
        assert len(values) == 1
        said.append(values.pop())
        buffer[nbytes // 2] ^= 64
    assert said[0] != said[1]


def test_the_engines_stream_does_not_wait_for_the_forwards() -> None:
    """A gather beside a forward that is under way is done before it, and its fence is passed at its end."""
    cache = Memory(1024, "P", "cuda").cache(DENSE)
    cache.copier.warm_up()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    forward = make_recorder(cuda())()
    seen: dict[str, bool] = {}

    def engine() -> None:
        with own_stream(cuda()):
            seen["own"] = torch.cuda.current_stream() != torch.cuda.default_stream()
            first = _gather(cache)
            first.wait()
            seen["beside"] = not forward.ready()
            forward.wait()
            seen["behind"] = forward.ready()

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join(60.0)
    assert seen == {"own": True, "beside": True, "behind": True}


def _gather(cache: PagedCache):
    out = torch.empty(cache.nbytes(LAYERS, 0, 64, HEADS), dtype=torch.uint8, device="cuda")
    cache.gather(out, (0, LAYERS), (0, 64), (0, HEADS), [DENSE.table(64, 1024, "P")])
    return cache.fence()


@pytest.mark.parametrize("behind", [1, 16])
def test_a_link_that_launches_ahead_holds_up_no_other_stream(behind: int) -> None:
    """As `nccl_in_flight` above 1 assumes, of a link that is busy alone."""
    import cupy

    spin = cupy.RawKernel('extern "C" __global__ void spin(volatile int* go) { while (!*go); }', "spin")
    record, cells = make_recorder(cuda()), torch.zeros(2, device="cuda")
    go = torch.zeros(1, dtype=torch.int32).pin_memory()
    for cell in (cells[:1], cells[1:]):
        cell.add_(0)  # CUDA may load a kernel only when nothing runs
    models = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
    handles = [take_stream(cuda().index, first=True) for _ in range(8)]
    for handle, model in itertools.product(handles, models):
        go.zero_()
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)), cupy.cuda.ExternalStream(handle):
            spin((1,), (1,), (np.intp(go.data_ptr()),))
            for _ in range(behind):
                cells[:1].add_(1)
        with torch.cuda.stream(model):
            cells[1:].add_(1)
            passed = record()
        try:
            wait_for(passed.ready)
        finally:
            go.fill_(1)
        torch.cuda.synchronize()
    assert cells.tolist() == [behind * len(handles) * len(models), len(handles) * len(models)]
    for handle in handles:
        give_stream(cuda().index, handle, first=True)


def test_a_fence_is_passed_with_the_stream() -> None:
    record = make_recorder(cuda())
    torch.cuda._sleep(SLEEP_CYCLES)
    fence = record()
    assert not fence.ready()
    fence.wait()
    assert fence.ready()


def test_pinned_buffers_are_freed_after_the_stream_that_used_them_was_given_back() -> None:
    """torch then records an event there. The next rank has the same stream."""
    streams: list[int] = []
    rings: list[small_copies.Ring] = []

    def engine() -> None:
        with own_stream(cuda()):
            streams.append(torch.cuda.current_stream().cuda_stream)
            rings.append(small_copies.Ring(cuda(), torch.int32))
            rings[-1].copy(np.arange(10))

    for _ in range(3):
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join(60.0)
        rings.clear()
    torch.cuda.synchronize()
    assert len(streams) == 3 and len(set(streams)) == 1
