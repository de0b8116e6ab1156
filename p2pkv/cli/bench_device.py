"""What `p2pkv bench --link nccl` needs of a device: which to use, time on it, gather and scatter there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from p2pkv.cli.bench_pages import HEADS, LAYERS, LAYOUTS, TOKEN_BYTES, Memory
from p2pkv.cli.bench_ranks import BenchError
from p2pkv.pages import PagedCache

LAYOUT = LAYOUTS["dense"]
BLOCK_BYTES = LAYOUT.block * TOKEN_BYTES // LAYERS
"""A block of one layer; the smallest message."""

LEAST_SECONDS = 0.02
"""How long each measurement on a device lasts at least, so that its start does not count."""


def devices() -> tuple[str, str]:
    """P's and D's CUDA device, the same one if there is only one. Raises BenchError with a sentence."""
    if not torch.cuda.is_available():
        raise BenchError(
            "--link nccl moves KV between GPUs, and torch finds no CUDA device here: run it on a "
            "machine that has one, or measure the link of this machine with --link host"
        )
    return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


def environment(side: str, shared: bool) -> dict[str, str]:
    """What NCCL needs to be told before its first call in the process of this side.

    NCCL refuses two ranks on one device of one host, so with `shared` each side claims a host of its own,
    and NCCL goes through sockets: right, but slow, and its rates say nothing about a link.
    """
    if not shared:
        return {}
    return {
        "NCCL_HOSTID": f"p2pkv-bench-{side}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    }


def environment_of_child(side: str, shared: bool) -> dict[str, str]:
    """The whole environment of a process of this side."""
    return {**os.environ, **environment(side, shared)}


def seconds(device: str, once: Callable[[], object]) -> float:
    """How long `once` takes, the mean over so many calls in a row that LEAST_SECONDS are filled."""
    once()
    count = 1
    while True:
        took = _run(device, once, count)
        if took >= LEAST_SECONDS:
            return took / count
        count = max(count + 1, int(1.5 * count * LEAST_SECONDS / max(took, 1e-6)))


def _run(device: str, once: Callable[[], object], count: int) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(count):
            once()
        return time.perf_counter() - begin
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        once()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1000


class Strip:
    """Rectangles of Llama-8B's KV, [layer, token, 8 heads], and a dense buffer to move them to and from."""

    def __init__(self, memory: Memory, most: int, device: str) -> None:
        """`most`: bytes of the largest rectangle, a multiple of BLOCK_BYTES."""
        self._device = device
        self._cache: PagedCache = memory.cache(LAYOUT)
        self._cache.warm_up()
        self._flat = memory.flat
        self._dense = torch.empty(most, dtype=torch.uint8, device=device)
        self._table = [LAYOUT.table(memory.capacity, memory.capacity, "P")]

    def rates(self, nbytes: int) -> dict[str, float]:
        """Bytes per second of a plain copy, a gather and a scatter of `nbytes`, multiple of BLOCK_BYTES."""
        part, plain = self._dense[:nbytes], self._flat[:nbytes]
        cut = (*_rectangle(nbytes), (0, HEADS), self._table)
        kinds: dict[str, Callable[[], object]] = {
            "copy": lambda: part.copy_(plain),
            "gather": lambda: self._cache.gather(part, *cut),
            "scatter": lambda: self._cache.scatter(part, *cut),
        }
        return {kind: nbytes / seconds(self._device, once) for kind, once in kinds.items()}


def _rectangle(nbytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Layers and tokens of a rectangle of so many bytes: few tokens of many layers, as chunks are."""
    blocks = nbytes // BLOCK_BYTES
    layers = min(LAYERS, blocks)
    assert nbytes % BLOCK_BYTES == 0 and blocks % layers == 0
    return (0, layers), (0, blocks // layers * LAYOUT.block)
