"""The CUDA kernels on a CPU: their text compiled by gcc as C, and a loop in place of the grid."""

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

from p2pkv.kv import cache, copiers, layouts

BEFORE = """
#include <stddef.h>
#include <stdint.h>
#define __global__
#define __device__
typedef struct { unsigned x, y, z, w; } uint4;
typedef struct { unsigned x, y; } uint2;
static struct { unsigned x, y, z; } blockIdx, threadIdx, blockDim, gridDim;
long long accesses, unaligned;
static void *seen(const void *address, size_t size)
{
    accesses += 1;
    unaligned += (uintptr_t)address % size != 0;
    return (void *)address;
}
#define P2PKV_AT(TYPE, address) (*(TYPE *)seen(address, sizeof(TYPE)))
#define P2PKV_ADD(sum, value) (*(sum) += (value))
"""

AFTER = """
typedef void copy(P2PKV_PARAMETERS);
typedef void digest(p2pkv_int bytes, p2pkv_int size, p2pkv_int sum);
void run(void *kernel, unsigned blocks, unsigned x, unsigned y, const p2pkv_int *a, int count)
{
    gridDim.x = blocks, blockDim.x = x, blockDim.y = y;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.y = 0; threadIdx.y < y; ++threadIdx.y)
            for (threadIdx.x = 0; threadIdx.x < x; ++threadIdx.x)
                if (count == 3)
                    ((digest *)kernel)(a[0], a[1], a[2]);
                else
                    ((copy *)kernel)(a[0], (const p2pkv_int *)a[1], (const int *)a[2], a[3], a[4], a[5],
                                     a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14]);
}
"""

NO_GCC = "" if shutil.which("gcc") else "gcc is not installed, and it compiles the kernels for a CPU"


def compiled(folder: Path) -> ctypes.CDLL:
    """The kernels as a shared library. Raises CalledProcessError if gcc refuses the text."""
    text, library = folder / "kernels.c", folder / "kernels.so"
    text.write_text(BEFORE + copiers.kernel_source() + AFTER)
    flags = ["-O2", "-fno-strict-aliasing", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unused-function"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(text)], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


class CpuLauncher:
    """Runs the kernels in the calling thread. `most_blocks` is small, so that the grid's loop has work."""

    def __init__(self, library: ctypes.CDLL, most_blocks: int = 3) -> None:
        self.most_blocks = most_blocks
        self.launched: list[str] = []
        self._library = library

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        assert 1 <= blocks <= self.most_blocks and threads[0] * threads[1] <= 1024
        assert len(args) == (3 if name == "p2pkv_digest" else 15)
        self.launched.append(name)
        packed = (ctypes.c_longlong * len(args))(*args)
        self._library.run(getattr(self._library, name), blocks, *threads, packed, len(args))

    @property
    def accesses(self) -> int:
        """Loads and stores of rows since the library was loaded."""
        return ctypes.c_longlong.in_dll(self._library, "accesses").value

    @property
    def unaligned(self) -> int:
        """Those of them that a GPU would have refused."""
        return ctypes.c_longlong.in_dll(self._library, "unaligned").value

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Caches that are made meanwhile copy with these kernels."""

        def copier(pages: list[layouts.LayerPages], tensors: Sequence[torch.Tensor]) -> copiers.KernelCopier:
            return copiers.KernelCopier(pages, tensors, self)

        with mock.patch.object(cache, "copier_of", copier):
            yield
