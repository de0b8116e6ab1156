"""NCCL through nccl4py, NVIDIA's own binding: non-blocking, so that a communicator can always be aborted.

Only its low-level module is used: `nccl.core` would need cuda-bindings and its own buffer objects.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
from collections.abc import Callable
from typing import Any

from p2pkv.links.nccl_api import UINT8, UNIQUE_ID_BYTES, Nccl, NcclError, NcclMissing

MOST_CTAS = 32
"""NCCL's own bound on a communicator's channels."""

NEEDED = (
    "Config", "NCCLError", "UniqueId", "comm_abort", "comm_destroy", "comm_get_async_error",
    "comm_init_rank_config", "get_unique_id", "get_version", "group_end", "group_start", "recv", "send",
)  # fmt: skip


def make(channels: int) -> Nccl4pyNccl:
    """Load nccl4py. Raises NcclMissing with a sentence."""
    try:
        nccl = importlib.import_module("nccl.bindings.nccl")
        version = importlib.metadata.version("nccl4py")
    except Exception as error:  # its loader raises its own for a missing library
        raise NcclMissing(f"nccl4py cannot be imported ({error})") from None
    missing = [name for name in NEEDED if not hasattr(nccl, name)]
    if missing:
        raise NcclMissing(f"nccl4py {version} lacks {', '.join(missing)}; p2pkv is written for nccl4py 0.6")
    try:
        nccl.get_version()
    except Exception as error:  # the library is loaded at the first call
        raise NcclMissing(f"nccl4py {version} finds no NCCL library ({error})") from None
    return Nccl4pyNccl(nccl, f"nccl4py {version}", channels)


class Nccl4pyNccl(Nccl):
    """The calls of `nccl.bindings.nccl`, nccl4py 0.6."""

    blocking = False

    def __init__(self, nccl: Any, binding: str, channels: int) -> None:
        self.binding = binding
        self._nccl = nccl
        self._channels = min(channels, MOST_CTAS)
        self._numbers = itertools.count(1)
        self._comms: dict[int, Any] = {}

    def version(self) -> int:
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        return bytes(self._call("get_unique_id"))

    def init(self, ranks: int, unique_id: bytes, rank: int) -> int:
        """Begins it; the binding takes NCCL's "in progress" for success, here and in all calls."""
        assert len(unique_id) == UNIQUE_ID_BYTES
        config = self._nccl.Config()
        config.blocking = 0
        config.max_ctas = self._channels
        name = self._nccl.UniqueId.from_buffer(unique_id)
        comm = self._call("comm_init_rank_config", ranks, name, rank, config)
        number = next(self._numbers)
        self._comms[number] = comm
        return number

    def send(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        self._call("send", ptr, nbytes, UINT8, peer, self._comms[comm], stream)

    def recv(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        self._call("recv", ptr, nbytes, UINT8, peer, self._comms[comm], stream)

    def group_start(self) -> None:
        self._call("group_start")

    def group_end(self) -> None:
        self._call("group_end")

    def async_error(self, comm: int) -> int:
        return int(self._call("comm_get_async_error", self._comms[comm]))

    def abort(self, comm: int) -> None:
        self._call("comm_abort", self._comms[comm])
        del self._comms[comm]

    def destroy(self, comm: int) -> None:
        self._call("comm_destroy", self._comms[comm])
        del self._comms[comm]

    def _call(self, name: str, *arguments: object) -> Any:
        call: Callable[..., Any] = getattr(self._nccl, name)
        try:
            return call(*arguments)
        except self._nccl.NCCLError as error:
            raise NcclError(name, int(error.status), str(error)) from None
