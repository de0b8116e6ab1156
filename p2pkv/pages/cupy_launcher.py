"""CuPy as the launcher of the kernels. Imported only where a CUDA cache is made."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from p2pkv.pages.kernels import source

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
    """Launches on torch's current stream of one CUDA device. Raises ImportError without CuPy."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._cupy = cupy
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._module = cupy.RawModule(code=source())
        self._functions: dict[str, Any] = {}
        self._streams: dict[int, Any] = {}
        count = torch.cuda.get_device_properties(self._index).multi_processor_count
        self.most_blocks = BLOCKS_PER_PROCESSOR * count

    def launch(self, name: str, blocks: int, threads: tuple[int, int], args: Sequence[int]) -> None:
        """Queue one kernel; the first of a name compiles it."""
        with self._cupy.cuda.Device(self._index), self._stream():
            self._function(name)((blocks,), threads, tuple(map(np.int64, args)))

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            self._functions[name] = self._module.get_function(name)
        return self._functions[name]

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
    """The launcher for this CUDA device, or None, with a line in the log, where CuPy is missing."""
    try:
        return CupyLauncher(device)
    except ImportError as error:
        log.warning(
            "CuPy cannot be imported (%s): KV is gathered and scattered by torch's index kernels, which are "
            "slower; install cupy-cuda12x or cupy-cuda13x",
            error,
        )
        return None
