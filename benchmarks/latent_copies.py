"""How much a byte of DeepSeek V4's KV costs to copy beside one of a dense cache, without p2pkv.

A loop of memcpy in C copies the runs of memory that a push of `p2pkv bench` gathers and scatters, between the
cache and a buffer of one message: what the memory itself takes, whatever p2pkv's own copies add. The two
caches are copied in turns, and other memory is written before each turn. Needs gcc.

    python benchmarks/latent_copies.py [--tokens 2048 8192 32768] [--repeat 40]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2pkv.bench.latents import LATENTS, PARTS
from p2pkv.bench.memory import CELL, LAYERS, LAYOUTS, TOKEN_BYTES, Memory, capacity_for

MESSAGE = 8 << 20
SOURCE = """
#include <string.h>
void gather(char *dense, char *cache, const long *at, const long *size, long count) {
    for (long i = 0; i < count; dense += size[i++]) memcpy(dense, cache + at[i], size[i]);
}
void scatter(char *dense, char *cache, const long *at, const long *size, long count) {
    for (long i = 0; i < count; dense += size[i++]) memcpy(cache + at[i], dense, size[i]);
}
"""

Runs = NDArray[np.int64]
"""[2, run]: where each begins, and its bytes, in the order of the wire."""


def latent_runs(memory: Memory, tokens: int) -> Runs:
    bases, found = LATENTS._bases(memory), []
    for number, before, width in LATENTS._planes:
        part, table = PARTS[number], LATENTS.tables(tokens, memory.capacity, "P")[number]
        first, stop = (token // part.tokens for token in part.needed(tokens))
        for layer in range(len(part.layers)):
            row = first
            while row < stop:
                block, slot = divmod(row, part.rows)
                until = min(stop, (block + 1) * part.rows)
                page = table[block] * len(part.layers) + layer
                inside = part.rows * before + slot * width
                found.append((bases[number] + page * part.page + inside, (until - row) * width))
                row = until
    return np.array(found).T.copy()


def dense_runs(memory: Memory, nbytes: int) -> Runs:
    """Of a prompt with about as many bytes."""
    layout, left = LAYOUTS["dense"], round(nbytes / TOKEN_BYTES)
    table = layout.table(left, memory.capacity, "P")
    layer_bytes, row = 2 * CELL * memory.cells.shape[1], TOKEN_BYTES // LAYERS
    sizes = [min(layout.block, left - layout.block * at) * row for at in range(len(table))]
    begins = [(layer * layer_bytes + block * 2 * CELL) for layer in range(LAYERS) for block in table]
    return np.array([begins, sizes * LAYERS])


def messages(runs: Runs) -> Iterator[Runs]:
    ends = np.cumsum(runs[1])
    start = 0
    while start < len(ends):
        done = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, done + MESSAGE, "right")))
        yield np.ascontiguousarray(runs[:, start:stop])
        start = stop


def seconds(copy: ctypes._NamedFuncPointer, dense: int, cache: int, parts: list[Runs]) -> float:
    begin = time.perf_counter()
    for part in parts:
        at, size = part[0].ctypes.data, part[1].ctypes.data
        copy(*map(ctypes.c_void_p, (dense, cache, at, size)), ctypes.c_long(part.shape[1]))
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--repeat", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "copies.so")
        command = ["gcc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)]
        subprocess.run(command, input=SOURCE.encode(), check=True)
        copies = ctypes.CDLL(str(built))
    memory = Memory(capacity_for(max(args.tokens)), "D")
    cache, other = memory.flat.numpy().ctypes.data, np.ones(64 << 20, np.uint8)
    buffer = np.ones(MESSAGE, np.uint8)
    print("| tokens, MiB | runs | copy | planes, ms | dense, ms | a byte of planes / of dense, quartiles |")
    print("|---|---:|---|---:|---:|---:|")
    for tokens in args.tokens:
        nbytes = LATENTS.nbytes(tokens)
        both = [latent_runs(memory, tokens), dense_runs(memory, nbytes)]
        assert both[0][1].sum() == nbytes
        scale = both[1][1].sum() / nbytes
        parts = [list(messages(runs)) for runs in both]
        for name in ("gather", "scatter"):
            took: list[list[float]] = []
            for number in range(args.repeat):
                turn = []
                for each in parts:
                    other[:] = number
                    turn.append(seconds(getattr(copies, name), buffer.ctypes.data, cache, each))
                took.append(turn)
            planes, dense = (statistics.median(side) * 1e3 for side in zip(*took, strict=True))
            low, middle, high = statistics.quantiles([one / two * scale for one, two in took], n=4)
            print(
                f"| {tokens:,}, {nbytes / (1 << 20):.0f} | {both[0].shape[1]:,} | {name} | {planes:.2f} | "
                f"{dense:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
