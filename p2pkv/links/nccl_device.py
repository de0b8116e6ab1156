"""What a link needs of a device besides NCCL: memory, a stream of its own, and marks that can be polled."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch

from p2pkv.links.base import LinkError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no order with the default stream


class Mark(Protocol):
    """A point in the order of a stream's work."""

    def ready(self) -> bool:
        """Whether everything queued on the stream before this point is done. Never waits.

        Raises RuntimeError if the device has failed.
        """
        ...


class Stream(Protocol):
    """One link end's own stream.

    Attributes:
        number: the raw handle that NCCL takes.
    """

    number: int

    def mark(self) -> Mark:
        """This point of the stream."""
        ...

    def follow(self, mark: Mark) -> None:
        """What is queued here from now on begins when `mark`, of another stream, is ready."""
        ...

    def close(self) -> None:
        """Nothing is on it any more, and nothing will be."""
        ...


class Device(Protocol):
    """Where a factory's links live.

    Attributes:
        name: for people.
    """

    name: str

    def enter(self) -> None:
        """Make this the current device of the calling thread; helper threads begin with it."""
        ...

    def memory(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of device memory, whatever it holds. Raises MemoryError with a sentence."""
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody has, to see what a communicator takes."""
        ...

    def stream(self) -> Stream:
        """A new stream, which nothing else of this process ever shares. Raises LinkError."""
        ...

    def here(self) -> Mark:
        """This point of the calling thread's current stream."""
        ...


class CudaMark:
    """A CUDA event, recorded when made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def ready(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A stream made by the driver itself.

    torch hands out 32 streams in turn, to vLLM too: on one of those, a receive that waits for its peer
    could stand before another link's, or before a model's work.
    """

    def __init__(self, device: torch.device) -> None:
        """On the calling thread's current device."""
        handle = ctypes.c_void_p()
        result = driver().cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
        if result != 0 or handle.value is None:
            raise LinkError(f"CUDA cannot make a stream for a link: cuStreamCreate says {result}")
        self.number = handle.value
        self._stream = torch.cuda.ExternalStream(self.number, device)  # type: ignore[no-untyped-call]

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)

    def close(self) -> None:
        driver().cuStreamDestroy_v2(ctypes.c_void_p(self.number))


class CudaDevice:
    """One CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda" and device.index is not None
        self._device = device
        self.name = str(device)

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        # A thread has no context until its first call to the runtime, and `set_device` may make none.
        torch.cuda.mem_get_info(self._device)

    def memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(
                f"{self.name} has no {nbytes} bytes left for the slots of p2pkv's links; lower vLLM's "
                f"--gpu-memory-utilization or the option staging_bytes ({error})"
            ) from None

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    def here(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self._device))


def driver() -> Any:
    """CUDA's driver library, which is wherever a CUDA device is."""
    return ctypes.CDLL("libcuda.so.1")
