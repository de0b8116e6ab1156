"""NCCL as p2pkv uses it: a few calls that take raw integers, made by nccl4py, NVIDIA's own Python binding.

One owner thread per device makes these calls, except those that may block. `init` and the first message
wait for as long as the peer is absent, and `abort` may wait for ever. They run on helper threads, and never
while another thread is inside a call to the same communicator.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUCCESS, IN_PROGRESS = 0, 7
"""The two results that are no errors, numbered as NCCL does."""

UNIQUE_ID_BYTES = 128
UINT8 = 1
"""NCCL's number for the type uint8."""

MOST_CTAS = 32
"""The most channels that p2pkv asks for. NCCL's own bound (MAXCHANNELS) is 64 since 2.25, 32 before; that
sends and receives between two ranks use no more than 32 is an assumption."""

MAX_CTAS = "NCCL_MAX_CTAS"
"""NCCL's variable that overrides a communicator's configuration: envConfigOverride in init.cc."""

SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARED_GPU_VERSION = 23000
INVALID_USAGE = 5
"""What NCCL answers to two ranks on one GPU, among others."""

NEEDED = (
    "Config", "NCCLError", "UniqueId", "comm_abort", "comm_get_async_error", "comm_init_rank_config",
    "get_unique_id", "get_version", "group_end", "group_start", "recv", "send",
)  # fmt: skip


class NcclError(Exception):
    """NCCL refused a call; the message names the call and the reason, `status` is NCCL's number."""

    def __init__(self, call: str, status: int, reason: str) -> None:
        super().__init__(f"NCCL's {call} failed with result {status}: {reason}")
        self.status = status


class NcclMissing(Exception):
    """NCCL cannot be used here; the message is why, and what to do."""


Comm = Any
"""A communicator: whatever the binding takes for one."""


def version_name(number: int) -> str:
    """`2.32.3` for 23203."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def library_paths() -> list[str]:
    """Where the NCCL libraries lie that this process has loaded; more than one is worth a look."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return ["path unknown: no /proc here"]
    found = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/libnccl.so" in line}
    return sorted(found) or ["library linked in"]


def allow_shared_gpus(nccl: Nccl) -> None:
    """Let two ranks be on one GPU, which NCCL refuses since 2.30 unless this is set before its first init,
    and refused always before. What the user has set there stays."""
    if nccl.version() >= SHARED_GPU_VERSION:
        os.environ.setdefault(SHARED_GPU, "1")


def advice(error: NcclError, version: int) -> str:
    """What to do about NCCL's refusal to join two ranks, after its sentence; "" if nothing is known."""
    if error.status != INVALID_USAGE:
        return ""
    if version >= SHARED_GPU_VERSION:
        way = f"set {SHARED_GPU}=1 for both servers before they start"
    else:
        way = (
            "set NCCL_HOSTID to another value for each of the two servers before they start (NCCL then goes "
            "through the network, which is slow), or install NCCL 2.30.7 or newer"
        )
    return f"; if P and D share a GPU: {way} (docs/operations.md)"


# nccl4py's communicators do not block, so that one can always be aborted. Only its low-level module is used:
# `nccl.core` would need cuda-bindings and its own buffer objects.


def load_nccl(channels: int = 8) -> Nccl:
    """NCCL through nccl4py. `channels`: the most of a communicator. Raises NcclMissing with a sentence."""
    try:
        nccl = importlib.import_module("nccl.bindings.nccl")
        version = importlib.metadata.version("nccl4py")
    except Exception as error:  # its loader raises its own for a missing library
        raise NcclMissing(
            f"nccl4py cannot be imported ({error}); install p2pkv's extra cuda12 or cuda13 (ROCm has none)"
        ) from None
    missing = [name for name in NEEDED if not hasattr(nccl, name)]
    if missing:
        raise NcclMissing(f"nccl4py {version} lacks {', '.join(missing)}; p2pkv is written for nccl4py 0.6")
    try:
        nccl.get_version()
    except Exception as error:  # the library is loaded at the first call
        raise NcclMissing(
            f"nccl4py {version} finds no NCCL library ({error}); install nvidia-nccl-cu12 or -cu13"
        ) from None
    return Nccl(nccl, f"nccl4py {version}", channels)


class Nccl:
    """The calls of `nccl.bindings.nccl`, nccl4py 0.6. Pointers and streams are integers. No call blocks:
    `init`, `send` and `recv` are complete when `async_error` says IN_PROGRESS no more; until then nothing
    else may be asked of that communicator. All but `version` raise NcclError.

    Attributes:
        binding: name and version of the Python package.
        channels: multiprocessors that a kernel of one communicator may hold.
    """

    def __init__(self, nccl: Any, binding: str, channels: int) -> None:
        self._nccl = nccl
        self._most = min(channels, MOST_CTAS)
        self.binding = binding
        given = os.environ.get(MAX_CTAS, "")
        most = int(given) if given.isdecimal() and int(given) > 0 else self._most  # as NCCL takes it
        # NCCL makes it a power of two, for sends and receives (ncclTopoComputeP2pChannels, paths.cc).
        self.channels = 1 << (most - 1).bit_length()

    def version(self) -> int:
        """The loaded library's number, 23203 for 2.32.3."""
        return int(self._nccl.get_version())

    def describe(self) -> str:
        """Version, binding and library in one phrase."""
        return f"NCCL {version_name(self.version())} through {self.binding} ({', '.join(library_paths())})"

    def unique_id(self) -> bytes:
        """A new name for a communicator, bytes [128]; this process listens until all ranks have met."""
        return bytes(self._call("get_unique_id", self._nccl.get_unique_id))

    def init(self, ranks: int, unique_id: bytes, rank: int) -> Comm:
        """Join the communicator of that name on the calling thread's current device. The binding takes NCCL's
        "in progress" for success, here and in all calls."""
        config = self._nccl.Config()
        config.blocking = 0
        config.max_ctas = self._most
        config.nvls_ctas = 1  # for multicasts, which two ranks never do: less memory, see nccl_memory
        name = self._nccl.UniqueId.from_buffer(unique_id)
        init = self._nccl.comm_init_rank_config
        return self._call("comm_init_rank_config", init, ranks, name, rank, config)

    def send(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        """Queue a send of device memory on a CUDA stream."""
        self._call("send", self._nccl.send, ptr, nbytes, UINT8, peer, comm, stream)

    def recv(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        """Queue a receive into device memory on a CUDA stream."""
        self._call("recv", self._nccl.recv, ptr, nbytes, UINT8, peer, comm, stream)

    def async_error(self, comm: Comm) -> int:
        """SUCCESS, IN_PROGRESS, or the number of an error that the communicator met since."""
        return int(self._call("comm_get_async_error", self._nccl.comm_get_async_error, comm))

    def abort(self, comm: Comm) -> None:
        """End the communicator and all that it has queued; it means nothing afterwards."""
        self._call("comm_abort", self._nccl.comm_abort, comm)

    @contextmanager
    def group(self) -> Iterator[None]:
        """The sends, or the receives, that are queued within are launched together, by one kernel, at the end
        of it; the peer must group its own in the same way (NVIDIA/nccl issue 1279)."""
        self._call("group_start", self._nccl.group_start)
        try:
            yield
        finally:
            self._call("group_end", self._nccl.group_end)

    def _call(self, name: str, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except self._nccl.NCCLError as error:
            raise NcclError(name, int(getattr(error, "status", 0)), str(error)) from None
