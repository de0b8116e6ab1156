"""The seam to NCCL: a dozen calls that take raw integers, whichever Python binding makes them.

Who calls: one owner thread per device, but for what may block. `init` and the first message wait for as
long as the peer is absent, and `abort` may wait for ever, so they run on helper threads, and never while
another thread is inside a call to the same communicator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

SUCCESS, IN_PROGRESS = 0, 7
"""The two results that are no errors, numbered as NCCL does."""

UNIQUE_ID_BYTES = 128
UINT8 = 1
"""NCCL's number for the type uint8, which every binding takes as it is."""


class NcclError(Exception):
    """NCCL refused a call; the message names the call and the reason, `status` is NCCL's number."""

    def __init__(self, call: str, status: int, reason: str) -> None:
        super().__init__(f"NCCL's {call} failed with result {status}: {reason}")
        self.status = status


class NcclMissing(Exception):
    """NCCL cannot be used here; the message is a sentence that says why and what to do."""


class Nccl(ABC):
    """NCCL through one binding. Pointers, streams and communicators are integers.

    Attributes:
        binding: name and version of the Python package, for people.
        blocking: True if `init` returns a communicator that is complete, and `send` and `recv` return
            when NCCL has launched them. False if they return at once and `async_error` says
            IN_PROGRESS until that is so; until then nothing else may be asked of that communicator.
    """

    binding: str
    blocking: bool

    @abstractmethod
    def version(self) -> int:
        """The loaded library's number, 23203 for 2.32.3."""

    @abstractmethod
    def unique_id(self) -> bytes:
        """A new name for a communicator, bytes [128]; this process listens until all ranks have met."""

    @abstractmethod
    def init(self, ranks: int, unique_id: bytes, rank: int) -> int:
        """Join the communicator of that name on the calling thread's current device. Raises NcclError."""

    @abstractmethod
    def send(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        """Queue a send of device memory on a CUDA stream. Raises NcclError."""

    @abstractmethod
    def recv(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        """Queue a receive into device memory on a CUDA stream. Raises NcclError."""

    @abstractmethod
    def group_start(self) -> None:
        """What follows, up to `group_end`, is launched together. The link itself needs no groups."""

    @abstractmethod
    def group_end(self) -> None:
        """Launch what was called since `group_start`. Raises NcclError."""

    @abstractmethod
    def async_error(self, comm: int) -> int:
        """SUCCESS, IN_PROGRESS, or the number of an error that the communicator met since."""

    @abstractmethod
    def abort(self, comm: int) -> None:
        """End the communicator and all that it has queued; its number means nothing afterwards."""

    @abstractmethod
    def destroy(self, comm: int) -> None:
        """End a communicator of which nothing is under way. It may wait for the peer, so links abort."""

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
    """NCCL through nccl4py where that is installed, else through CuPy.

    nccl4py comes first: it starts communicators without blocking, aborts them cleanly, and bounds
    their channels one by one. `channels` is the most that a communicator may use.
    Raises NcclMissing with what was wrong with each.
    """
    from p2pkv.links import nccl_cupy, nccl_nccl4py

    reasons: list[str] = []
    for make in (nccl_nccl4py.make, nccl_cupy.make):
        try:
            return make(channels)
        except NcclMissing as missing:
            reasons.append(str(missing))
    raise NcclMissing(
        f"no binding to NCCL works here: {'; '.join(reasons)}. Install p2pkv with its extra cuda12 or "
        "cuda13 (CuPy), and nccl4py beside it if you can"
    )
