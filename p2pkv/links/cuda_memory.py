"""Device memory that another process of this host can map: CUDA's virtual memory management (cuMem).

One process creates the memory and exports it as a file descriptor; another one imports that and maps the same
memory for its own device. The driver frees it when the last mapping and the last descriptor are gone, so a
process that is killed leaves its peer no dangling address.
"""

import contextlib
import ctypes
import logging
import struct
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from p2pkv.device import driver as cuda_driver

logger = logging.getLogger(__name__)

UUID_BYTES = 16
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_ENDED = 4  # CUDA_ERROR_DEINITIALIZED: the process is about to end
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_EXPORTABLE = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


class CudaError(RuntimeError):
    """A call to CUDA's driver failed, with this `result`."""

    def __init__(self, call: str, result: int, name: str) -> None:
        super().__init__(f"CUDA's {call} failed with {name}")
        self.result = result


@dataclass
class ExportedBlock:
    """Memory that other processes can map. `nbytes`: of the whole; `tensor` has what was asked for."""

    tensor: torch.Tensor
    fd: int
    nbytes: int


def allocate(driver: "CudaMemory", nbytes: int) -> ExportedBlock:
    """New memory of the device. Raises MemoryError if the device is full, CudaError."""
    step = driver.granularity()
    whole = -(-nbytes // step) * step
    try:
        handle = driver.create(whole)
    except CudaError as error:
        if error.result == _OUT_OF_MEMORY:
            raise MemoryError(str(error)) from None
        raise
    try:
        tensor = _mapped(driver, handle, whole)
        return ExportedBlock(tensor[:nbytes], driver.export_fd(handle), whole)
    finally:
        driver.drop(handle)


def open_block(driver: "CudaMemory", fd: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes]: all memory of another process, while a tensor of it exists. Raises CudaError."""
    handle = driver.import_fd(fd)
    try:
        return _mapped(driver, handle, nbytes)
    finally:
        driver.drop(handle)


def _mapped(driver: "CudaMemory", handle: int, nbytes: int) -> torch.Tensor:
    with contextlib.ExitStack() as undo:
        address = driver.reserve(nbytes)
        undo.callback(driver.free, address, nbytes)
        driver.map(address, nbytes, handle)
        undo.callback(driver.unmap, address, nbytes)
        driver.allow(address, nbytes)
        unmap = undo.pop_all()
    return driver.tensor(address, nbytes, unmap.close)


class Location(Structure):
    """CUmemLocation: a device's number."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(Structure):
    """CUmemAllocationProp's `allocFlags`."""

    _fields_ = (
        ("compressionType", c_ubyte),
        ("gpuDirectRDMACapable", c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProp(Structure):
    """CUmemAllocationProp: what memory to create, and how it may be exported."""

    _fields_ = (
        ("type", c_int),
        ("requestedHandleTypes", c_int),
        ("location", Location),
        ("win32HandleMetaData", c_void_p),
        ("allocFlags", AllocationFlags),
    )


class AccessDesc(Structure):
    """CUmemAccessDesc: who may do what with a range of addresses."""

    _fields_ = (("location", Location), ("flags", c_int))


CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetUuid_v2": (POINTER(c_ubyte * UUID_BYTES), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProp), c_int),
    "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(AllocationProp), c_ulonglong),
    "cuMemExportToShareableHandle": (c_void_p, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_ulonglong), c_void_p, c_int),
    "cuMemRelease": (c_ulonglong,),
    "cuMemAddressReserve": (POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemSetAccess": (c_ulonglong, c_size_t, POINTER(AccessDesc), c_size_t),
}
"""The driver's functions that are called here, and their arguments; each returns a CUresult (int)."""


class CudaMemory:
    """The calls to CUDA's driver that shared memory needs, for one device, through ctypes. Each may raise
    CudaError. Sizes are multiples of `granularity`."""

    def __init__(self, index: int) -> None:
        self._call("cuInit", 0)  # once more does no harm
        self._index = index
        self._device = self._number(index)

    def uuid(self) -> bytes:
        """The device's UUID, the same in each process: 16 bytes."""
        return self._uuid(self._device)

    def exportable(self) -> bool:
        """Whether memory of this device can be exported as a file descriptor."""
        return bool(self._get(c_int, "cuDeviceGetAttribute", _EXPORTABLE, self._device))

    def reaches(self, uuid: bytes) -> bool | None:
        """Whether this device can access the memory of the one with this UUID. None: this process does not
        see that device (CUDA_VISIBLE_DEVICES), so only an attempt shows it."""
        for device in map(self._number, range(self._get(c_int, "cuDeviceGetCount"))):
            if self._uuid(device) == uuid:
                if device == self._device:
                    return True
                return bool(self._get(c_int, "cuDeviceCanAccessPeer", self._device, device))
        return None

    def granularity(self) -> int:
        """Bytes in whose multiples memory is created and mapped."""
        return self._get(c_size_t, "cuMemGetAllocationGranularity", ctypes.byref(self._prop()), _MINIMUM)

    def create(self, nbytes: int) -> int:
        """The handle of new memory on the device. It holds the memory until `drop`."""
        return self._get(c_ulonglong, "cuMemCreate", nbytes, ctypes.byref(self._prop()), 0)

    def export_fd(self, handle: int) -> int:
        """A file descriptor that stands for the memory; the caller closes it."""
        return self._get(c_int, "cuMemExportToShareableHandle", handle, _FILE_DESCRIPTOR, 0)

    def import_fd(self, fd: int) -> int:
        """The handle of the memory that a descriptor of another process stands for."""
        return self._get(c_ulonglong, "cuMemImportFromShareableHandle", c_void_p(fd), _FILE_DESCRIPTOR)

    def drop(self, handle: int) -> None:
        """The handle is not needed any more. Mappings of its memory stay."""
        self._call("cuMemRelease", handle)

    def reserve(self, nbytes: int) -> int:
        """A range of addresses with nothing behind it."""
        return self._get(c_ulonglong, "cuMemAddressReserve", nbytes, 0, 0, 0)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put the memory behind the addresses."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write there."""
        access = AccessDesc(Location(_ON_DEVICE, self._device), _READ_WRITE)
        self._call("cuMemSetAccess", address, nbytes, ctypes.byref(access), 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Take the memory away from the addresses. May wait for the device."""
        self._call("cuMemUnmap", address, nbytes)

    def free(self, address: int, nbytes: int) -> None:
        """Give the addresses back; nothing is mapped there."""
        self._call("cuMemAddressFree", address, nbytes)

    def tensor(self, address: int, nbytes: int, gone: Callable[[], None]) -> torch.Tensor:
        """uint8 [nbytes] at an address. `gone` is called when neither it nor a view of it exists any more.

        It is on this process's device, even if the memory is another device's, which it may not even see.
        """
        return tensor_at(address, nbytes, _CUDA, self._index, gone)

    def _prop(self) -> AllocationProp:
        return AllocationProp(_PINNED, _FILE_DESCRIPTOR, Location(_ON_DEVICE, self._device))

    def _number(self, index: int) -> int:
        return self._get(c_int, "cuDeviceGet", index)

    def _uuid(self, device: int) -> bytes:
        uuid = (c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        return bytes(uuid)

    def _get(self, kind: Callable[[], Any], name: str, *arguments: object) -> int:
        """The number that this call writes to where its first argument points."""
        number = kind()
        self._call(name, ctypes.byref(number), *arguments)
        return int(number.value)

    def _call(self, name: str, *arguments: object) -> None:
        result = _function(name)(*arguments)
        if result != 0:
            text = c_char_p()
            _function("cuGetErrorName")(result, ctypes.byref(text))
            raise CudaError(name, result, (text.value or b"result %d" % result).decode())


def _function(name: str) -> Any:
    function = getattr(cuda_driver(), name)
    function.argtypes = CALLS[name]
    return function


# A tensor at an address, by DLPack: torch takes the device as it is given, and asks CUDA nothing.

_CPU, _CUDA = 1, 2  # kDLCPU, kDLCUDA
_UNSIGNED = 1  # kDLUInt
_MANAGED = struct.Struct("@PiiiBBHPPQPP")
"""DLManagedTensor: data, device_type, device_id, ndim; code, bits and lanes of an element; shape, strides,
byte_offset; manager_ctx, deleter."""

_alive: dict[int, tuple[Any, Callable[[], None]]] = {}
"""By the address of a DLManagedTensor: what it consists of, and what to call when its tensor is gone."""


def _delete(managed: int) -> None:
    _, gone = _alive.pop(managed)
    try:
        gone()
    except CudaError as error:
        if error.result != _ENDED:
            logger.warning("device memory stays mapped: %s", error)


_deleter = ctypes.CFUNCTYPE(None, c_void_p)(_delete)


def tensor_at(
    address: int, nbytes: int, device_type: int, device: int, gone: Callable[[], None]
) -> torch.Tensor:
    """See CudaMemory.tensor. `device_type`: DLPack's."""
    shape, deleter = (ctypes.c_int64 * 1)(nbytes), ctypes.cast(_deleter, c_void_p).value
    packed = _MANAGED.pack(
        address, device_type, device, 1, _UNSIGNED, 8, 1, ctypes.addressof(shape), 0, 0, 0, deleter
    )
    managed = ctypes.create_string_buffer(packed, _MANAGED.size)
    place = ctypes.addressof(managed)
    _alive[place] = (managed, shape), gone
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(new_capsule(place, b"dltensor", None))
    return tensor
