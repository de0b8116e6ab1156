"""CUDA's shareable device memory on a CPU, for tests: memfds, and events that a test holds back.

It stands in for `links.cuda_memory.CudaMemory` call by call, between processes too. An address that is not
mapped, or not yet allowed, faults as it does on a device. What CUDA leaves undefined is a violation, which
`let_go` reports. The rules, and the function of cuda.h (CUDA 12.9) whose comment has each:

- Sizes are whole granules: cuMemCreate, cuMemMap. Of a reservation cuda.h asks less: cuMemAddressReserve.
- Only a reserved range that is not mapped can be mapped, and only a mapped one be allowed: cuMemMap,
  cuMemSetAccess. It is unmapped as a whole, and is a reservation again: cuMemUnmap. It is freed with the size
  that it was reserved with: cuMemAddressFree.
- Each handle, also an imported one, is released once, and memory lives until its last mapping and handle are
  gone: cuMemRelease.
- A range is not unmapped while a copy may still touch it: cuda.h does not say whether cuMemUnmap waits.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from ctypes import c_int, c_long, c_size_t, c_void_p

import torch

from p2pkv.links.cuda_memory import CudaError, tensor_at
from p2pkv.links.gpu import Allocate

GRANULARITY = 2 << 20
CARD = b"the only card..."
CPU = 1  # DLPack's kDLCPU
INVALID, FULL = (1, "CUDA_ERROR_INVALID_VALUE"), (2, "CUDA_ERROR_OUT_OF_MEMORY")
ALL: "weakref.WeakSet[SimulatedMemory]" = weakref.WeakSet()

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.mprotect.argtypes = (c_void_p, c_size_t, c_int)
_FIXED = 0x10
_NOTHING = 0


def let_go() -> None:
    """AssertionError if one of CUDA's rules was broken."""
    violations = [text for memory in list(ALL) for text in memory.violations]
    ALL.clear()
    assert not violations, "; ".join(violations)


class SimulatedEvent:
    def __init__(self, gpu: "SimulatedGpu") -> None:
        self._gpu = gpu
        self._held = gpu.held

    def ready(self) -> bool:
        if self._gpu.fails:
            raise RuntimeError("CUDA's cuEventQuery failed with result 719")
        self._held = self._held and self._gpu.held
        return not self._held


class SimulatedGpu:
    """Where a rank's KV is. `held`: events that are recorded now are passed only when this is False again:
    copies run; `fails`: the device has failed."""

    processors = 1

    def __init__(self, name: str = "simulated:0") -> None:
        self.name = name
        self.held = self.fails = False

    def enter(self) -> None:
        pass

    def memory(self, nbytes: int, allocate: Allocate | None = None) -> torch.Tensor:
        assert allocate is not None, "the memory must be one that peers can map"
        return allocate(nbytes)

    def free_bytes(self) -> int:
        return 0

    def stream(self) -> None:  # type: ignore[override]
        raise AssertionError("a CUDA IPC link launches nothing, so it needs no stream")

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)


class SimulatedMemory:
    """The driver of one process.

    Attributes:
        card: the device's UUID.
        unreachable: UUIDs of devices that this one sees and cannot access.
        unseen: UUIDs of devices that this process does not see.
        room: bytes that the device has left.
        refuses: the call that fails next time with CUDA_ERROR_INVALID_VALUE.
        mapped: bytes that are mapped now.
    """

    def __init__(self, gpu: SimulatedGpu, card: bytes = CARD, room: int = 1 << 40) -> None:
        self.gpu = gpu
        self.card = card
        self.room = room
        self.unreachable: set[bytes] = set()
        self.unseen: set[bytes] = set()
        self.can_export = True
        self.refuses = ""
        self.mapped = 0
        self.opened = 0
        self.violations: list[str] = []
        self._handles: set[int] = set()
        self._ranges: dict[int, tuple[int, str]] = {}
        ALL.add(self)

    @property
    def baseline(self) -> bool:
        """Whether nothing is held or mapped."""
        return not (self._handles or self._ranges or self.mapped)

    def uuid(self) -> bytes:
        return self.card

    def exportable(self) -> bool:
        return self.can_export

    def reaches(self, uuid: bytes) -> bool | None:
        return None if uuid in self.unseen else uuid not in self.unreachable

    def granularity(self) -> int:
        return GRANULARITY

    def create(self, nbytes: int) -> int:
        self._may("create")
        self._size(nbytes)
        if nbytes > self.room:
            raise CudaError("cuMemCreate", *FULL)
        self.room -= nbytes
        handle = os.memfd_create("p2pkv-simulated-device")
        os.ftruncate(handle, nbytes)
        self._handles.add(handle)
        return handle

    def export_fd(self, handle: int) -> int:
        self._may("export_fd")
        self._rule(handle in self._handles, "a handle was exported after its release")
        return os.dup(handle)

    def import_fd(self, fd: int) -> int:
        self._may("import_fd")
        handle = os.dup(fd)
        self._handles.add(handle)
        self.opened += 1
        return handle

    def drop(self, handle: int) -> None:
        self._rule(handle in self._handles, "a handle was released twice")
        self._handles.discard(handle)
        os.close(handle)

    def reserve(self, nbytes: int) -> int:
        self._may("reserve")
        self._size(nbytes)
        address = _libc.mmap(None, nbytes, _NOTHING, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._ranges[address] = nbytes, "reserved"
        return address

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._may("map")
        self._state(address, nbytes, "reserved", "mapped")
        if os.fstat(handle).st_size != nbytes:
            self._ranges[address] = nbytes, "reserved"
            raise CudaError("cuMemMap", *INVALID)
        got = _libc.mmap(address, nbytes, _NOTHING, mmap.MAP_SHARED | _FIXED, handle, 0)
        assert got == address
        self.mapped += nbytes

    def allow(self, address: int, nbytes: int) -> None:
        self._may("allow")
        self._state(address, nbytes, "mapped", "allowed")
        assert _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, address: int, nbytes: int) -> None:
        self._state(address, nbytes, ("mapped", "allowed"), "reserved")
        self._rule(not self.gpu.held, "memory was unmapped while a copy may still touch it")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        assert _libc.mmap(address, nbytes, _NOTHING, flags, -1, 0) == address
        self.mapped -= nbytes

    def free(self, address: int, nbytes: int) -> None:
        self._state(address, nbytes, "reserved", "free")
        del self._ranges[address]
        assert _libc.munmap(address, nbytes) == 0

    def tensor(self, address: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
        self._state(address, nbytes, "allowed", "allowed")
        return tensor_at(address, nbytes, CPU, 0, gone)

    def _may(self, call: str) -> None:
        if self.refuses == call:
            self.refuses = ""
            raise CudaError(call, *INVALID)

    def _size(self, nbytes: int) -> None:
        self._rule(nbytes > 0 and nbytes % GRANULARITY == 0, f"{nbytes} bytes are not whole granules")

    def _state(self, address: int, nbytes: int, before: str | tuple[str, ...], after: str) -> None:
        size, state = self._ranges.get(address, (0, "free"))
        self._rule(
            size == nbytes and state in ((before,) if isinstance(before, str) else before),
            f"a range that is {state} was to become {after}",
        )
        self._ranges[address] = nbytes, after

    def _rule(self, kept: bool, broken: str) -> None:
        if not kept:
            self.violations.append(broken)
