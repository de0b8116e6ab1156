"""NCCL as p2pkv uses it: a few calls that take raw integers, and the two Python bindings that make them.

One owner thread per device makes these calls, except those that may block. `init` and the first message
wait for as long as the peer is absent, and `abort` may wait for ever. They run on helper threads, and never
while another thread is inside a call to the same communicator.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SUCCESS, IN_PROGRESS = 0, 7
"""The two results that are no errors, numbered as NCCL does."""

UNIQUE_ID_BYTES = 128
UINT8 = 1
"""NCCL's number for the type uint8, which every binding takes as it is."""

CHANNEL_VARIABLES = ("NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS")

MOST_CTAS = 32
"""The most channels that p2pkv asks for, and what a communicator counts for whose channels it could not set.
NCCL's own bound (MAXCHANNELS) is 64 since 2.25, 32 before; that sends and receives between two ranks use no
more than 32 is an assumption."""

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


class Nccl(ABC):
    """NCCL through one binding: name and version of the Python package. Pointers and streams are integers.

    Attributes:
        blocking: True if `init` returns a communicator that is complete, and `send` and `recv` return
            when NCCL has launched them. False if they return at once and `async_error` says
            IN_PROGRESS until that is so; until then nothing else may be asked of that communicator.
        channels: multiprocessors that a kernel of one communicator may hold.
    """

    binding: str
    blocking: bool
    channels: int
    group_calls: tuple[str, str]
    """The library's names of ncclGroupStart and ncclGroupEnd."""

    def __init__(self, library: Any, error: type[Exception], binding: str, channels: int) -> None:
        """`error`: what the library raises where NCCL refuses a call."""
        self._nccl = library
        self._error = error
        self.binding = binding
        self.channels = channels

    def version(self) -> int:
        """The loaded library's number, 23203 for 2.32.3."""
        return int(self._nccl.get_version())

    @abstractmethod
    def unique_id(self) -> bytes:
        """A new name for a communicator, bytes [128]; this process listens until all ranks have met."""

    @abstractmethod
    def init(self, ranks: int, unique_id: bytes, rank: int) -> Comm:
        """Join the communicator of that name on the calling thread's current device. Raises NcclError."""

    @abstractmethod
    def send(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        """Queue a send of device memory on a CUDA stream. Raises NcclError."""

    @abstractmethod
    def recv(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        """Queue a receive into device memory on a CUDA stream. Raises NcclError."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """The sends, or the receives, that are queued within are launched together, by one kernel, at the end
        of it; the peer must group its own in the same way (NVIDIA/nccl issue 1279). Raises NcclError."""
        start, end = (getattr(self._nccl, name) for name in self.group_calls)
        self._call("group_start", start)
        try:
            yield
        finally:
            self._call("group_end", end)

    @abstractmethod
    def async_error(self, comm: Comm) -> int:
        """SUCCESS, IN_PROGRESS, or the number of an error that the communicator met since."""

    @abstractmethod
    def abort(self, comm: Comm) -> None:
        """End the communicator and all that it has queued; it means nothing afterwards."""

    def _call(self, name: str, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except self._error as error:
            raise NcclError(name, int(getattr(error, "status", 0)), str(error)) from None
        except KeyError as error:  # CuPy has no name for this result
            raise NcclError(name, int(error.args[0]), "a result that CuPy has no name for") from None

    def describe(self) -> str:
        """Version, binding and library in one phrase."""
        return f"NCCL {version_name(self.version())} through {self.binding} ({', '.join(library_paths())})"


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


def load_nccl(channels: int = 8) -> Nccl:
    """NCCL through nccl4py where that is installed, as it starts communicators without blocking, aborts them
    cleanly, and bounds their channels one by one; else through CuPy. `channels`: the most of a communicator.
    Raises NcclMissing with what was wrong with each."""
    reasons: list[str] = []
    for make in (make_nccl4py, make_cupy):
        try:
            return make(channels)
        except NcclMissing as missing:
            reasons.append(str(missing))
    raise NcclMissing(
        f"no binding to NCCL works here: {'; '.join(reasons)}. Install p2pkv with its extra cuda12 or "
        "cuda13 (CuPy), and nccl4py beside it if you can"
    )


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


def _power_of_two(channels: int) -> int:
    """What NCCL makes of so many channels, for sends and receives (ncclTopoComputeP2pChannels, paths.cc)."""
    return int(1 << (channels - 1).bit_length())


def _variable(variable: str) -> int | None:
    """The environment's number of this name; None if there is none that NCCL would take."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


# nccl4py, NVIDIA's own binding: non-blocking, so that a communicator can always be aborted.
# Only its low-level module is used: `nccl.core` would need cuda-bindings and its own buffer objects.


def make_nccl4py(channels: int) -> Nccl4pyNccl:
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
    group_calls = "group_start", "group_end"

    def __init__(self, nccl: Any, binding: str, channels: int) -> None:
        self._channels = min(channels, MOST_CTAS)
        channels = _power_of_two(_variable(MAX_CTAS) or self._channels)
        super().__init__(nccl, nccl.NCCLError, binding, channels)

    def unique_id(self) -> bytes:
        return bytes(self._call("get_unique_id", self._nccl.get_unique_id))

    def init(self, ranks: int, unique_id: bytes, rank: int) -> Comm:
        """Begins it; the binding takes NCCL's "in progress" for success, here and in all calls."""
        config = self._nccl.Config()
        config.blocking = 0
        config.max_ctas = self._channels
        config.nvls_ctas = 1  # for multicasts, which two ranks never do: less memory, see nccl_memory
        name = self._nccl.UniqueId.from_buffer(unique_id)
        init = self._nccl.comm_init_rank_config
        return self._call("comm_init_rank_config", init, ranks, name, rank, config)

    def send(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        self._call("send", self._nccl.send, ptr, nbytes, UINT8, peer, comm, stream)

    def recv(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        self._call("recv", self._nccl.recv, ptr, nbytes, UINT8, peer, comm, stream)

    def async_error(self, comm: Comm) -> int:
        return int(self._call("comm_get_async_error", self._nccl.comm_get_async_error, comm))

    def abort(self, comm: Comm) -> None:
        self._call("comm_abort", self._nccl.comm_abort, comm)


# CuPy, p2pkv's stated dependency on a GPU: complete, and blocking. It knows no non-blocking communicators.
# It destroys one whose object is collected, which may wait for a dead peer: so objects are kept until an
# abort has come back.


def make_cupy(channels: int) -> CupyNccl:
    """Load CuPy's binding. Raises NcclMissing with a sentence. CuPy cannot give a communicator its number of
    channels, so the environment must, before NCCL is first used; what the user has set there stays."""
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except Exception as error:  # CuPy raises its own for a missing CUDA library
        raise NcclMissing(f"CuPy cannot be imported ({error})") from None
    if not nccl.available:
        raise NcclMissing(f"CuPy {cupy.__version__} finds no NCCL library; install nvidia-nccl-cu12 or -cu13")
    return CupyNccl(nccl, f"CuPy {cupy.__version__}", _set_channels(channels))


class CupyNccl(Nccl):
    """The calls of `cupy.cuda.nccl`, CuPy 13 or 14."""

    blocking = True
    group_calls = "groupStart", "groupEnd"

    def __init__(self, nccl: Any, binding: str, channels: int) -> None:
        super().__init__(nccl, nccl.NcclError, binding, channels)
        self._kept: set[Comm] = set()

    def unique_id(self) -> bytes:
        """CuPy 14 gives bytes, CuPy 13 a tuple of signed numbers."""
        name = self._call("get_unique_id", self._nccl.get_unique_id)
        return name if isinstance(name, bytes) else bytes(part & 0xFF for part in name)

    def init(self, ranks: int, unique_id: bytes, rank: int) -> Comm:
        name: object = unique_id
        if int(self.binding.split()[1].split(".")[0]) < 14:
            name = tuple(part - 256 if part > 127 else part for part in unique_id)
        comm = self._call("init", self._nccl.NcclCommunicator, ranks, name, rank)
        self._kept.add(comm)
        return comm

    def send(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        self._call("send", comm.send, ptr, nbytes, UINT8, peer, stream)

    def recv(self, ptr: int, nbytes: int, peer: int, comm: Comm, stream: int) -> None:
        self._call("recv", comm.recv, ptr, nbytes, UINT8, peer, stream)

    def async_error(self, comm: Comm) -> int:
        try:
            self._call("async_error", comm.check_async_error)
        except NcclError as error:
            return error.status
        return SUCCESS

    def abort(self, comm: Comm) -> None:
        self._call("abort", comm.abort)
        self._kept.discard(comm)


def _set_channels(channels: int) -> int:
    """Tell NCCL. Returns what a communicator counts for: all that it may have, where that came too late."""
    wanted = str(channels)
    for variable in CHANNEL_VARIABLES:
        os.environ.setdefault(variable, wanted)
    different = {name: os.environ[name] for name in CHANNEL_VARIABLES if os.environ[name] != wanted}
    if different:
        logger.warning("nccl_num_channels is %s, but the environment's %s stays", wanted, different)
        return _power_of_two(max(_variable(name) or MOST_CTAS for name in CHANNEL_VARIABLES))
    if _nccl_in_use():
        settings = " and ".join(f"{name}={wanted}" for name in CHANNEL_VARIABLES)
        logger.warning(
            f"nccl_num_channels={wanted} comes too late: vLLM has used NCCL already, which reads its "
            f"environment once. Each link counts as {MOST_CTAS} channels, so fewer links may be busy at "
            f"once. Install nccl4py, or set {settings} before vLLM starts"
        )
        return MOST_CTAS
    return _power_of_two(channels)


def _nccl_in_use() -> bool:
    """Whether torch runs collectives over NCCL here. vLLM names the backend in a lone worker, too."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend())):
        return False
    return dist.get_world_size() > 1
