"""NCCL's own send and receive, through CuPy and without p2pkv's link: what `p2pkv bench` compares with."""

from __future__ import annotations

from typing import Any

import torch

UINT8 = 1
"""NCCL's number for the type uint8."""


def new_name() -> str:
    """The name of a new communicator, in hex. Raises ImportError without CuPy."""
    from cupy.cuda import nccl

    name = nccl.get_unique_id()
    return bytes(part & 0xFF for part in name).hex()


def _takes_bytes() -> bool:
    import cupy

    return int(cupy.__version__.split(".")[0]) >= 14


class RawNccl:
    """One of two ranks on torch's current device. Making it waits for the other. Raises ImportError."""

    def __init__(self, name: bytes, rank: int) -> None:
        from cupy.cuda import nccl

        # CuPy 13 takes and gives a tuple of signed numbers, CuPy 14 bytes.
        signed = tuple(part - 256 if part > 127 else part for part in name)
        self._comm: Any = nccl.NcclCommunicator(2, name if _takes_bytes() else signed, rank)
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def send(self, flat: torch.Tensor, sizes: list[int]) -> None:
        """Send messages of these sizes, one after the other out of `flat`, and wait until they are gone."""
        self._each(self._comm.send, flat, sizes, peer=1)

    def receive(self, flat: torch.Tensor, sizes: list[int]) -> None:
        """Receive them into `flat`, and wait until they are there."""
        self._each(self._comm.recv, flat, sizes, peer=0)

    def close(self) -> None:
        """End the communicator. `abort`, since `destroy` may wait for a peer that has gone."""
        self._comm.abort()

    def _each(self, call: Any, flat: torch.Tensor, sizes: list[int], peer: int) -> None:
        offset = 0
        for size in sizes:
            call(flat.data_ptr() + offset, size, UINT8, peer, self._stream.cuda_stream)
            offset += size
        self._stream.synchronize()
