"""What links between GPUs stand on: a device and its streams, slots in its memory, and helper threads for the
calls that may wait for a peer or for the device: the engine's thread must not wait with them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from math import inf

import torch

from p2pkv.device import CudaEvent, current_stream, give_stream, ignore_captures, take_memory, take_stream
from p2pkv.links.staging import Slots

logger = logging.getLogger(__name__)

_PAUSE = 0.001

LEAST_PACED = 1 << 20
"""Bytes that an operation must have for its time to show how fast the wire is."""

PACED = 32
"""Latest operations of a link that are kept: the fastest of them shows how fast the wire is."""

EARLY, LATE, MARGIN = 0.5, 0.9, 2.5e-4
"""An operation is looked at MARGIN seconds before it is thought to end, at the latest after LATE of the time
that it is thought to take, never before EARLY of it. A core that has slept for long wakes up late."""

MAX_PAUSE = 0.001
"""Seconds that a pause lasts at most: an operation may have become much faster."""

MAX_TENSORS = 256
"""Slots of which the tensor is kept."""

Allocate = Callable[[int], torch.Tensor]
"""Makes uint8 [nbytes], or raises MemoryError."""


class CudaStream:
    """One link end's own stream; see `device.take_stream`. `number`: the raw handle that NCCL takes."""

    def __init__(self, device: int) -> None:
        """On the calling thread's current device, which is this one. Raises RuntimeError."""
        self._device = device
        self.number = take_stream(device, first=True)

    def record(self) -> CudaEvent:
        return CudaEvent(self._device, self.number)

    def follow(self, event: CudaEvent) -> None:
        """What is queued from now on begins when `event` is passed. Raises RuntimeError."""
        event.hold_up(self.number)

    def close(self) -> None:
        """Give it back: nothing is on it any more, and nothing will be."""
        give_stream(self._device, self.number, first=True)


class CudaDevice:
    """One CUDA device of this process, where a factory's links live. `processors`: multiprocessors (SMs)."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda" and device.index is not None
        self._device = device
        self._index = device.index
        self.name = str(device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count

    def enter(self) -> None:
        """Make this the current device of the calling thread; helper threads begin with it."""
        torch.cuda.set_device(self._device)
        # A thread has no context until its first call to the runtime, and `set_device` may make none.
        torch.cuda.mem_get_info(self._device)
        ignore_captures()

    def memory(self, nbytes: int, allocate: Allocate | None = None) -> torch.Tensor:
        return take_memory(nbytes, self._device, "staging_bytes", allocate)

    def free_bytes(self) -> int:
        """Free device memory, to see what a communicator takes."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def stream(self) -> CudaStream:
        return CudaStream(self._index)

    def record_event(self) -> CudaEvent:
        """Record an event at this point of the calling thread's current stream."""
        return CudaEvent(self._index, current_stream(self._index))


class PollTimer:
    """When a link's oldest operation may be done, by how long those before it took: to look earlier is of no
    use, and takes the interpreter's lock from the model."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=PACED)
        """Seconds for a byte. The shortest counts: others have waited for the peer, or were seen late."""
        self._nbytes = 0
        """Of the oldest operation under way; 0: none is."""
        self._began = 0.0

    def begin(self, nbytes: int) -> None:
        """An operation of so many bytes is the oldest under way from now on."""
        self._nbytes, self._began = nbytes, time.monotonic()

    def end(self) -> None:
        if self._nbytes >= LEAST_PACED:
            self._took.append((time.monotonic() - self._began) / self._nbytes)
        self._nbytes = 0

    def pause(self) -> float:
        """Seconds until it may be done; at most 0 if that is not known, inf if none is under way."""
        if not self._nbytes:
            return inf
        takes = self._nbytes * min(self._took, default=0.0)
        first = max(EARLY * takes, min(LATE * takes, takes - MARGIN))
        return self._began + first - time.monotonic()


def pause_of(pauses: Iterable[float], least: float) -> float:
    """The pause until the first of several operations may be done."""
    return min(max(min(pauses, default=least), least), MAX_PAUSE)


class SlotTensors:
    """The tensors of one block's slots. Slots come again, so they are kept: torch takes long for one."""

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over a slot."""
        place = offset, nbytes
        if (tensor := self._tensors.get(place)) is None:
            if len(self._tensors) >= MAX_TENSORS:
                self._tensors.clear()
            tensor = self._tensors[place] = self._block[offset : offset + nbytes]
        return tensor


class DevicePool(Slots):
    """Slots in one block of device memory, taken once and for all: a full device fails at the start.
    `beside`: uint8 [beside] in the same block, which no slot ever takes."""

    def __init__(self, allocate: Allocate, nbytes: int, beside: int = 0) -> None:
        """Raises ValueError if `nbytes` is not positive."""
        super().__init__(nbytes)
        block = allocate(self.capacity + beside)
        self.scratch = block[self.capacity :]
        self.tensor = SlotTensors(block).tensor


class HelperThreads:
    """Runs work on daemon threads of its own. One that outlives its time is left behind, and counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, float] = {}

    def run(self, name: str, seconds: float, work: Callable[[], None]) -> None:
        """Begin `work`; it counts as stuck once it has taken longer than `seconds`."""

        def main() -> None:
            try:
                work()
            except Exception:
                logger.exception("an error in the helper thread %s", name)
            finally:
                with self._lock:
                    late = time.monotonic() > self._running.pop(thread)
                if late:
                    logger.info("the helper thread %s, which had been given up, has returned", name)

        thread = threading.Thread(target=main, name=name, daemon=True)
        with self._lock:
            thread.start()  # which fails where there may be no more threads
            self._running[thread] = time.monotonic() + seconds

    @property
    def busy(self) -> int:
        """Threads that have not returned."""
        with self._lock:
            return len(self._running)

    @property
    def stuck(self) -> int:
        """Threads among them whose time is over."""
        now = time.monotonic()
        with self._lock:
            return sum(1 for end in self._running.values() if now > end)

    def join(self, seconds: float) -> None:
        """Wait for all threads, `seconds` at most."""
        end = time.monotonic() + seconds
        with self._lock:
            threads = list(self._running)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def wait_out(event: CudaEvent) -> None:
    """Wait, on a helper thread, until the device has passed `event`; for ever if it never does."""
    while not event.ready():
        time.sleep(_PAUSE)
