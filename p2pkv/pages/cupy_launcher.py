"""CuPy as the launcher of the kernels. Imported only where a CUDA cache is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from p2pkv.pages.kernels import names, source

log = logging.getLogger("p2pkv")

BLOCKS_PER_PROCESSOR = 8
"""Enough to fill a multiprocessor with blocks of 256 threads; a larger grid gains nothing."""


class _Borrowed:
    """A stream of somebody else, by the protocol that CUDA's Python packages share."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class CupyLauncher:
    """Launches on torch's current stream of one CUDA device; all kernels are compiled when it is made.

    Raises ImportError without CuPy, and what CuPy raises where it cannot compile.
    """

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._cupy = cupy
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        module = cupy.RawModule(code=source())
        with cupy.cuda.Device(self._index):
            self._functions = {name: module.get_function(name) for name in names()}
        self._streams: dict[int, Any] = {}
        count = torch.cuda.get_device_properties(self._index).multi_processor_count
        self.most_blocks = BLOCKS_PER_PROCESSOR * count

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        """Queue one kernel."""
        with self._cupy.cuda.Device(self._index), self._stream():
            self._functions[name]((blocks,), threads, tuple(map(np.int64, args)))

    def _stream(self) -> Any:
        """Torch's current stream, as CuPy knows it."""
        pointer = torch.cuda.current_stream(self._index).cuda_stream
        if pointer not in self._streams:
            cuda = self._cupy.cuda
            # CuPy 14 has a new way to take a stream over, and warns of the old one.
            new = getattr(cuda.Stream, "from_external", None)
            self._streams[pointer] = new(_Borrowed(pointer)) if new else cuda.ExternalStream(pointer)
        return self._streams[pointer]


def cupy_launcher(device: torch.device) -> CupyLauncher | None:
    """The launcher for this CUDA device, or None, with a line in the log, where CuPy cannot be used."""
    try:
        return CupyLauncher(device)
    except ImportError as error:
        reason, advice = f"CuPy cannot be imported ({error})", "install cupy-cuda12x or cupy-cuda13x"
    except Exception as error:  # its compiler or CUDA's headers are missing, its cache cannot be written, ...
        reason = f"CuPy cannot compile p2pkv's kernels ({type(error).__name__}: {error})"
        advice = (
            "install NVRTC and the CUDA runtime's headers beside CuPy, or set CUPY_CACHE_DIR to a folder "
            "that can be written"
        )
    log.warning(
        "%s: KV is gathered and scattered by torch's index kernels, which are slower; %s", reason, advice
    )
    return None
