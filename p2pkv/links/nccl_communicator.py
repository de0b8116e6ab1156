"""What NCCL links stand on: a device's memory and streams, and NCCL's communicators as they come up.

NCCL may wait for an absent peer in the calls that bring a communicator up, and in those that end one. The
engine's thread must not wait with it, so these calls are made on helper threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from p2pkv.device import CudaEvent, end_stream, ignore_captures, make_stream, take_memory
from p2pkv.links.base import Guard, LinkError
from p2pkv.links.nccl_bindings import IN_PROGRESS, SUCCESS, Nccl, NcclError, advice
from p2pkv.links.staging import Slots, StagingBudget, StagingShare

logger = logging.getLogger(__name__)

MOST_STUCK = 16
FIRST_MESSAGE_BYTES = 64
_PAUSE = 0.001


# The device.


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
        """Free device memory, to see what a communicator takes."""
        ...

    def stream(self) -> Stream:
        """A new stream, which nothing else of this process ever shares. Raises RuntimeError."""
        ...

    def here(self) -> StreamEvent:
        """Record an event at this point of the calling thread's current stream."""
        ...


class CudaStream:
    """A stream that nothing else in this process uses; see `device.make_stream`."""

    def __init__(self, device: int) -> None:
        """On the calling thread's current device, which is this one. Raises RuntimeError."""
        self._device = device
        self.number = make_stream(first=True)

    def record(self) -> CudaEvent:
        return CudaEvent(self._device, self.number)

    def close(self) -> None:
        end_stream(self.number)


class CudaDevice:
    """One CUDA device of this process."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda" and device.index is not None
        self._device = device
        self._index = device.index
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
        return CudaStream(self._index)

    def here(self) -> CudaEvent:
        return CudaEvent(self._index, torch.cuda.current_stream(self._index).cuda_stream)


# Device memory: what is being sent, or received, lies in its slots.


class DevicePool:
    """Slots in one block of device memory, taken once and for all: a full device fails at the start.

    The owner thread takes slots; the thread that has seen the device finish with them gives them back.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises ValueError if `nbytes` is not positive, MemoryError if the device has no room."""
        self._slots = Slots(nbytes)
        capacity = self._slots.capacity
        self._bytes = device.memory(capacity + FIRST_MESSAGE_BYTES)
        self.first_message = self._bytes[capacity:]
        """What new communicators send first: all of them at once, and it is never read."""
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


# Threads for the calls that may never return.


class Helpers:
    """Runs work on threads of its own. One that outlives its time is left behind, counted, never joined.

    Threads are daemons: a process ends with stuck ones in it.
    """

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
                    logger.info("%s, which had been given up, has returned", name)

        thread = threading.Thread(target=main, name=name, daemon=True)
        with self._lock:
            self._running[thread] = time.monotonic() + seconds
        thread.start()

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


# What a rank's links share, and one communicator.


class BusyEnds:
    """Ends whose kernels may hold multiprocessors, at most so many at once, in the order in which they asked.

    NCCL's kernels spin on their multiprocessors until the peer has done its part.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._inside: set[object] = set()
        self._waiting: dict[object, None] = {}

    def admits(self, end: object) -> bool:
        """Whether this end is one of them, or may be."""
        return end in self._inside or len(self._inside) < self.most

    def turn_of(self, end: object) -> bool:
        """The same, but ends that have asked before come first. An end that may not enter yet is remembered:
        it asks until it may, or leaves."""
        if end in self._inside:
            return True
        free = self.most - len(self._inside)
        if any(end is first for first, _ in zip(self._waiting, range(free), strict=False)):
            return True
        if len(self._waiting) < free:
            return True
        self._waiting[end] = None
        return False

    @property
    def contended(self) -> bool:
        """Whether an end waits."""
        return bool(self._waiting)

    def enter(self, end: object) -> bool:
        """This end has something on the device from now on. Always True."""
        self._waiting.pop(end, None)
        self._inside.add(end)
        return True

    def rest(self, end: object) -> None:
        """Nothing of this end is on the device any more."""
        self._inside.discard(end)

    def leave(self, end: object) -> None:
        """This end has been closed."""
        self._waiting.pop(end, None)
        self._inside.discard(end)


@dataclass
class Shared:
    """What all NCCL links of one rank share. `owner` knows the one thread that may call them."""

    nccl: Nccl
    device: Device
    pool: DevicePool
    staging: StagingBudget
    """Slots of links included whose abort has not come back."""
    init_seconds: float
    owner: Guard
    busy: BusyEnds
    """Of the ends that receive, and of those that send unless `busy_sends` is another."""
    times: list[tuple[float, ...]] | None = None
    """Of each operation that is done, if a benchmark wants them: when it was wanted, was handed to NCCL,
    NCCL's call returned, it was launched, and it was done, as seen by the owner's polls."""
    busy_sends: BusyEnds = field(init=False)
    openings: Helpers = field(default_factory=Helpers)
    aborts: Helpers = field(default_factory=Helpers)

    def __post_init__(self) -> None:
        self.busy_sends = self.busy

    def carry_both_ways(self) -> None:
        """This rank sends and receives: half of the busy ends are for each.

        A send that is launched waits for the peer's receive, and a receive is launched only when its send is.
        So if sends may not take all, two ranks that send to each other do not wait for ever.
        """
        half = self.busy.most // 2
        self.busy_sends, self.busy = BusyEnds(max(1, half)), BusyEnds(max(1, self.busy.most - half))

    @property
    def stuck(self) -> int:
        """Calls to NCCL that have outlived their time, and their threads with them."""
        return self.openings.stuck + self.aborts.stuck

    def check(self) -> None:
        """Raises LinkError if too many threads hang in NCCL to risk another one."""
        if self.stuck >= MOST_STUCK:
            raise LinkError(
                f"{self.stuck} calls to NCCL never returned in this process, for peers that were absent or "
                "died; restart it, and install nccl4py, whose calls can be given up"
            )


class _GivenUp(Exception):
    """This communicator is not wanted any more."""


class Opening:
    """Joins a communicator of two ranks and carries its first message, from P (rank 0) to D (rank 1).

    The first message makes NCCL connect the two, which may wait for the peer as `init` does: so it
    belongs here, and not in a request.
    """

    def __init__(self, shared: Shared, unique_id: bytes, rank: int) -> None:
        self._shared = shared
        self._unique_id = unique_id
        self._rank = rank
        self.stream: Stream | None = None
        """The communicator's own. There once it is up."""
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._reason = ""
        self._comm: int | None = None
        shared.openings.run(f"p2pkv-nccl-init-{'PD'[rank]}", shared.init_seconds, self._main)

    def comm(self) -> int | None:
        """The communicator once it is up, else None. Raises LinkError if it failed or took too long."""
        if self._comm is not None:
            return self._comm
        if self._reason:
            raise LinkError(self._reason)
        seconds = self._shared.init_seconds
        if time.monotonic() - self._began > seconds:
            raise LinkError(f"NCCL did not come up in {seconds:g} s: the peer is absent or out of reach")
        return None

    def give_up(self) -> int | None:
        """Stop waiting. Returns the communicator if it is up, and the caller aborts it.

        If it is not up, returns None, and the helper thread aborts it as soon as NCCL lets it.
        """
        with self._lock:
            self._given_up.set()
            return self._comm

    def _main(self) -> None:
        comm = None
        try:
            self._shared.device.enter()
            free = self._shared.device.free_bytes()
            stream = self.stream = self._shared.device.stream()
            comm = self._shared.nccl.init(2, self._unique_id, self._rank)
            self._settle(comm)
            self._say_something(comm, stream)
            logger.info(
                "an NCCL communicator came up in %.2f s; the device has %.1f MiB less than before",
                time.monotonic() - self._began,
                (free - self._shared.device.free_bytes()) / (1 << 20),
            )
        except _GivenUp:
            pass
        except NcclError as error:
            self._reason = f"{error}{advice(error, self._shared.nccl.version())}"
        except (MemoryError, RuntimeError) as error:  # RuntimeError: the device's own
            self._reason = str(error)
        with self._lock:
            if not self._reason and not self._given_up.is_set():
                self._comm = comm
                return
        if comm is not None:
            self._shared.nccl.abort(comm)
        if self.stream is not None:
            wait_out(self.stream.record())
            self.stream.close()

    def _say_something(self, comm: int, stream: Stream) -> None:
        nccl, buffer = self._shared.nccl, self._shared.pool.first_message
        call, peer = (nccl.send, 1) if self._rank == 0 else (nccl.recv, 0)
        call(buffer.data_ptr(), FIRST_MESSAGE_BYTES, peer, comm, stream.number)
        self._settle(comm)
        event = stream.record()
        while not event.ready():
            self._pause()
            self._settle(comm)

    def _settle(self, comm: int) -> None:
        while (state := self._shared.nccl.async_error(comm)) == IN_PROGRESS:
            self._pause()
        if state != SUCCESS:
            raise NcclError("init", state, "the communicator has met an error; NCCL_DEBUG=INFO shows more")

    def _pause(self) -> None:
        if self._given_up.wait(_PAUSE):
            raise _GivenUp


def wait_out(event: StreamEvent) -> None:
    """Wait, on a helper thread, until the device has passed `event`; for ever if it never does."""
    while not event.ready():
        time.sleep(_PAUSE)
