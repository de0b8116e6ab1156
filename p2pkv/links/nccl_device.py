"""What a link needs of a device besides NCCL: memory, a stream of its own, and marks that can be polled."""

from __future__ import annotations

from typing import Protocol

import torch


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

    def stream(self) -> Stream:
        """A new stream."""
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
    """A stream that does not wait for the default stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.number = int(self._stream.cuda_stream)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def follow(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)


class CudaDevice:
    """One CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda" and device.index is not None
        self._device = device
        self.name = str(device)

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def memory(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(
                f"{self.name} has no {nbytes} bytes left for the slots of p2pkv's links; lower vLLM's "
                f"--gpu-memory-utilization or the option staging_bytes ({error})"
            ) from None

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    def here(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self._device))
