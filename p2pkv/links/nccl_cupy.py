"""NCCL through CuPy, p2pkv's stated dependency on a GPU: complete, and blocking.

CuPy knows no non-blocking communicators, and destroys one whose object is collected, which may wait
for a dead peer: objects are kept until an abort has come back.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

from p2pkv.links.nccl_api import SUCCESS, UINT8, UNIQUE_ID_BYTES, Nccl, NcclError, NcclMissing

logger = logging.getLogger(__name__)

CHANNEL_VARIABLES = ("NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")


def make(channels: int) -> CupyNccl:
    """Load CuPy's binding. Raises NcclMissing with a sentence.

    CuPy cannot give a communicator its number of channels, so the environment must, before NCCL is
    first used in this process; what the user has set there stays.
    """
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except Exception as error:  # CuPy raises its own for a missing CUDA library
        raise NcclMissing(f"CuPy cannot be imported ({error})") from None
    if not nccl.available:
        raise NcclMissing(f"CuPy {cupy.__version__} finds no NCCL library; install nvidia-nccl-cu12 or -cu13")
    _set_channels(channels)
    return CupyNccl(nccl, f"CuPy {cupy.__version__}")


class CupyNccl(Nccl):
    """The calls of `cupy.cuda.nccl`, CuPy 13 or 14."""

    blocking = True

    def __init__(self, nccl: Any, binding: str) -> None:
        self.binding = binding
        self._nccl = nccl
        self._numbers = itertools.count(1)
        self._comms: dict[int, Any] = {}

    def version(self) -> int:
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        """CuPy 14 gives bytes, CuPy 13 a tuple of signed numbers."""
        name = self._call("get_unique_id", self._nccl.get_unique_id)
        return name if isinstance(name, bytes) else bytes(part & 0xFF for part in name)

    def init(self, ranks: int, unique_id: bytes, rank: int) -> int:
        assert len(unique_id) == UNIQUE_ID_BYTES
        name: object = unique_id
        if int(self.binding.split()[1].split(".")[0]) < 14:
            name = tuple(part - 256 if part > 127 else part for part in unique_id)
        comm = self._call("init", self._nccl.NcclCommunicator, ranks, name, rank)
        number = next(self._numbers)
        self._comms[number] = comm
        return number

    def send(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        self._call("send", self._comms[comm].send, ptr, nbytes, UINT8, peer, stream)

    def recv(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        self._call("recv", self._comms[comm].recv, ptr, nbytes, UINT8, peer, stream)

    def group_start(self) -> None:
        self._call("group_start", self._nccl.groupStart)

    def group_end(self) -> None:
        self._call("group_end", self._nccl.groupEnd)

    def async_error(self, comm: int) -> int:
        try:
            self._call("async_error", self._comms[comm].check_async_error)
        except NcclError as error:
            return error.status
        return SUCCESS

    def abort(self, comm: int) -> None:
        self._call("abort", self._comms[comm].abort)
        del self._comms[comm]

    def destroy(self, comm: int) -> None:
        self._call("destroy", self._comms[comm].destroy)
        del self._comms[comm]

    def _call(self, name: str, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except self._nccl.NcclError as error:
            raise NcclError(name, int(error.status), str(error)) from None
        except KeyError as error:  # CuPy has no name for this result
            raise NcclError(name, int(error.args[0]), "a result that CuPy has no name for") from None


def _set_channels(channels: int) -> None:
    wanted = str(channels)
    for variable in CHANNEL_VARIABLES:
        os.environ.setdefault(variable, wanted)
    different = {name: os.environ[name] for name in CHANNEL_VARIABLES if os.environ[name] != wanted}
    if different:
        logger.warning("nccl_num_channels is %s, but the environment's %s stays", wanted, different)
    elif _nccl_in_use():
        logger.warning(
            "nccl_num_channels=%s may come too late: this process has used NCCL already, which reads its "
            "environment once; set %s before vLLM starts, or install nccl4py",
            wanted,
            " and ".join(f"{name}={wanted}" for name in CHANNEL_VARIABLES),
        )


def _nccl_in_use() -> bool:
    """Whether torch runs collectives over NCCL in this process: the usual other user."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend())
