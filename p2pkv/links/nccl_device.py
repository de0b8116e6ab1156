"""What NCCL links need besides NCCL: memory in slots, a stream for each end, and events."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

from p2pkv.device import end_stream, ignore_captures, make_stream, take_memory
from p2pkv.links.base import LinkError
from p2pkv.links.staging import Slots, StagingShare


class StreamEvent(Protocol):
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

    def record(self) -> StreamEvent:
        """Record an event at this point of the stream."""
        ...

    def follow(self, event: StreamEvent) -> None:
        """What is queued here from now on begins when `event`, of another stream, is ready."""
        ...

    def close(self) -> None:
        """Nothing is on it any more, and nothing will be."""
        ...


class Device(Protocol):
    """Where a factory's links live.

    Attributes:
        name: for people.
        processors: its multiprocessors (SMs).
    """

    name: str
    processors: int

    def enter(self) -> None:
        """Make this the current device of the calling thread; helper threads begin with it."""
        ...

    def memory(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] for staging, whatever it holds. Raises MemoryError with a sentence."""
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody has, to see what a communicator takes."""
        ...

    def stream(self) -> Stream:
        """A new stream, which nothing else of this process ever shares. Raises LinkError."""
        ...

    def here(self) -> StreamEvent:
        """Record an event at this point of the calling thread's current stream."""
        ...


class CudaEvent:
    """A CUDA event, recorded when made."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def ready(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaStream:
    """A stream that nobody else of this process uses; see `device.make_stream`."""

    def __init__(self, device: torch.device) -> None:
        """On the calling thread's current device. Raises LinkError."""
        try:
            self.number = make_stream()
        except RuntimeError as error:
            raise LinkError(str(error)) from None
        self._stream = torch.cuda.ExternalStream(self.number, device)  # type: ignore[no-untyped-call]

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def follow(self, event: StreamEvent) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def close(self) -> None:
        end_stream(self.number)


class CudaDevice:
    """One CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda" and device.index is not None
        self._device = device
        self.name = str(device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        # A thread has no context until its first call to the runtime, and `set_device` may make none.
        torch.cuda.mem_get_info(self._device)
        ignore_captures()

    def memory(self, nbytes: int) -> torch.Tensor:
        return take_memory(nbytes, self._device, "staging_bytes")

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    def here(self) -> CudaEvent:
        return CudaEvent(torch.cuda.current_stream(self._device))


# Device memory: what is being sent, or received, lies in its slots.


class DevicePool:
    """Slots in one block of device memory, taken once and for all: a full device fails at the start.

    The owner thread takes slots; whoever has seen the device finish with them gives them back.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises ValueError if `nbytes` is not positive, MemoryError if the device has no room."""
        self._slots = Slots(nbytes)
        self._bytes = device.memory(self._slots.capacity)
        self._lock = threading.Lock()

    def check(self, nbytes: int) -> None:
        """Raises ValueError if `nbytes` is not positive or could never fit."""
        self._slots.check(nbytes)

    def take(self, nbytes: int, share: StagingShare) -> int | None:
        """The offset of a new slot, or None while there is no room; ValueError if it could never fit."""
        with self._lock:
            return self._slots.take(nbytes, share)

    def give(self, offset: int) -> None:
        """Return the slot at `offset`."""
        with self._lock:
            self._slots.give(offset)

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over the slot."""
        return self._bytes[offset : offset + nbytes]
