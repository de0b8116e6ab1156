"""The checksums of a buffer: by XXH3, by torch and by the kernel as C, against plain references."""

from collections.abc import Callable

import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pkv.kv import PagedCache
from p2pkv.kv.checksum import FOLD, XXH3, Checksum, digest_by_torch, digest_on_host
from support.cuda.kernels import CpuLauncher
from support.gil import lets_others_run

MASK = (1 << 64) - 1
SIZES = st.one_of(st.integers(1, 40), st.integers(1, 20_000))
ALGORITHMS = ["host", "torch", "kernel"]


def plain_fold(data: bytes) -> bytes:
    """What the fold is: SplitMix64's finalizer of (word ^ place * golden ratio), summed."""
    total = 0
    for place in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * place : 8 * place + 8].ljust(8, b"\0"), "little")
        word ^= (place + 1) * 0x9E3779B97F4A7C15 & MASK
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
        word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
        total += word ^ word >> 31
    return (total & MASK).to_bytes(8, "big")


def noise(size: int, seed: int, shift: int = 0, values: int = 256) -> torch.Tensor:
    """So many bytes, `shift` behind an address that is a multiple of 8."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, values, (size + shift,), dtype=torch.uint8, generator=draw)[shift:]


@pytest.fixture(scope="session")
def digests(request: pytest.FixtureRequest) -> Callable[[str], Callable[[torch.Tensor], Checksum]]:
    def named(name: str) -> Callable[[torch.Tensor], Checksum]:
        if name != "kernel":
            return {"host": digest_on_host, "torch": digest_by_torch}[name]
        with request.getfixturevalue("launcher").moving():
            return PagedCache.from_tensors([torch.zeros(2, 1, 4, 8)], block_size=4).digest

    return named


@given(size=SIZES, seed=st.integers(0, 99), shift=st.integers(0, 8), values=st.sampled_from([1, 256]))
@example(size=0, seed=0, shift=0, values=1)
@example(size=1, seed=0, shift=0, values=1)
@example(size=8, seed=0, shift=1, values=256)
@example(size=3 * 256 * 4 * 8 + 9, seed=0, shift=0, values=256)  # more than one turn of the test's whole grid
@settings(deadline=None, max_examples=150)
def test_the_fold_is_the_same_by_kernel_by_torch_and_by_hand(
    size: int, seed: int, shift: int, values: int, launcher: CpuLauncher, digests: Callable[[str], Callable]
) -> None:
    buffer = noise(size, seed, shift, values)
    before = launcher.unaligned
    said = {name: digests(name)(buffer).value() for name in ("kernel", "torch")}
    assert said["kernel"] == said["torch"] == plain_fold(bytes(buffer.numpy()))
    assert launcher.unaligned == before


@given(size=SIZES, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_a_cpu_takes_xxh3(size: int, seed: int) -> None:
    buffer = noise(size, seed)
    digest = digest_on_host(buffer)
    assert digest.known and digest.value() == xxhash.xxh3_64(bytes(buffer.numpy())).digest()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_bytes_that_have_moved_are_seen(name: str, digests: Callable[[str], Callable]) -> None:
    """Rows swapped, shifted by a word, and repeated: what a wrong copy does."""
    digest, buffer = digests(name), noise(4096, 5)
    rows = buffer.view(16, 256)
    moved = [
        buffer,
        rows.roll(1, 0).flatten(),
        rows[[1, 0, *range(2, 16)]].flatten(),
        buffer.view(torch.int64).roll(1).view(torch.uint8),
        rows[[0, 0, *range(2, 16)]].flatten(),
        torch.zeros_like(buffer),
    ]
    assert len({digest(each).value() for each in moved}) == len(moved)


def test_the_kernel_reads_each_word_once(launcher: CpuLauncher, digests: Callable[[str], Callable]) -> None:
    digest = digests("kernel")
    launcher.launched.clear()
    before = launcher.accesses
    digest(noise(80_000, 1))
    assert launcher.launched == ["p2pkv_digest"] and launcher.accesses - before == 10_000


def test_caches_say_which_checksum_is_theirs(launcher: CpuLauncher) -> None:
    layers, buffer = [torch.zeros(2, 1, 4, 8)], noise(1000, 2)
    on_host = PagedCache.from_tensors(layers, block_size=4)
    with launcher.moving():
        by_kernel = PagedCache.from_tensors(layers, block_size=4)
    assert (on_host.digest_name, by_kernel.digest_name) == (XXH3, FOLD)
    assert on_host.digest(buffer).value() == digest_on_host(buffer).value()
    assert by_kernel.digest(buffer).value() == plain_fold(bytes(buffer.numpy()))
    assert not by_kernel.digest(buffer).known, "a device may still be computing it"


def test_a_large_buffer_lets_other_threads_run() -> None:
    buffer = torch.zeros(128 << 20, dtype=torch.uint8)
    assert lets_others_run(lambda: digest_on_host(buffer) and None)
