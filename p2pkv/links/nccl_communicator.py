"""What a rank's NCCL links share, and NCCL's communicators as they come up, on helper threads."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from p2pkv.device import CudaEvent
from p2pkv.links.base import Guard, LinkError
from p2pkv.links.gpu import CudaDevice, CudaStream, DevicePool, HelperThreads, wait_out
from p2pkv.links.nccl_bindings import IN_PROGRESS, SUCCESS, Comm, Nccl, NcclError, advice
from p2pkv.links.staging import StagingBudget

logger = logging.getLogger(__name__)

FIRST_MESSAGE_BYTES = 64
_PAUSE = 0.001


class BusyEnds:
    """Ends whose kernels may hold multiprocessors, at most so many at once, in the order in which they asked.
    They spin there until the peer has done its part."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._inside: set[object] = set()
        self._waiting: dict[object, None] = {}

    def admits(self, end: object) -> bool:
        """Whether this end is one of the busy ends, or may become one."""
        return end in self._inside or len(self._inside) < self.most

    def turn_of(self, end: object, full: bool = False) -> bool:
        """Like `admits`, but ends that have asked before come first. An end that may not enter yet is
        remembered: it asks until it may, or leaves. `full`: none may enter now."""
        if end in self._inside:
            return True
        free = 0 if full else self.most - len(self._inside)
        if any(end is first for first, _ in zip(self._waiting, range(free), strict=False)):
            return True
        if len(self._waiting) < free:
            return True
        self._waiting[end] = None
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inside)

    @property
    def contended(self) -> bool:
        return bool(self._waiting)

    def others(self, end: object) -> bool:
        """Whether another end is inside, or has asked."""
        return self.contended or len(self._inside) > (end in self._inside)

    def enter(self, end: object) -> bool:
        """This end has something on the device from now on. Always True."""
        self._waiting.pop(end, None)
        self._inside.add(end)
        return True

    def rest(self, end: object) -> None:
        """Nothing of this end is on the device any more."""
        self._inside.discard(end)

    def leave(self, end: object) -> None:
        self._waiting.pop(end, None)
        self.rest(end)


@dataclass
class NcclContext:
    """What all NCCL links of one rank share. `owner` knows the one thread that may call them."""

    nccl: Nccl
    device: CudaDevice
    pool: DevicePool
    staging: StagingBudget
    """The rank's budget; slots of links whose abort has not come back count, too."""
    init_seconds: float
    owner: Guard
    busy: BusyEnds
    """The busy ends that receive, and those that send unless `busy_sends` is another object."""
    in_flight: int = 1
    """Operations of a link that are launched and unfinished, at most; one more is announced. A second one is
    launched only by an end that is busy `alone`: docs/design.md, "The NCCL link", has why."""
    group_bytes: int = 0
    """Bytes of the sends of a link that are launched together, at most; one alone may be larger."""
    times: list[tuple[float, ...]] | None = None
    """Times of each operation that is done, if a benchmark wants them: when it was wanted, was handed to
    NCCL, NCCL's call returned, it was launched, and it was done, as seen by the owner's polls."""
    busy_sends: BusyEnds = field(init=False)
    openings: HelperThreads = field(default_factory=HelperThreads)
    aborts: HelperThreads = field(default_factory=HelperThreads)

    def __post_init__(self) -> None:
        self.busy_sends = self.busy

    def alone(self, end: object) -> bool:
        """Whether no other end has something on the device, or waits to have."""
        return not (self.busy.others(end) or self.busy_sends.others(end))

    def obstructed(self, end: object) -> bool:
        """Whether another end has launched an operation that waits in its stream: what this end launched
        could wait behind it, and so for the other end's peer."""
        return self.in_flight > 1 and any(each.ahead for each in self.busy if each is not end)

    def carry_both_ways(self) -> None:
        """Half of the busy ends send, and half receive. A send that is launched waits for the peer's receive,
        and a receive is launched only when its send is: if sends could take all, two ranks that send to each
        other might wait for ever. So they might if a receive waited behind sends that are launched ahead."""
        self.in_flight = 1
        half = self.busy.most // 2
        self.busy_sends, self.busy = BusyEnds(max(1, half)), BusyEnds(max(1, self.busy.most - half))


class _GivenUp(Exception):
    """This communicator is not wanted any more."""


class Opening:
    """Joins a communicator of two ranks and carries its first message, from P (rank 0) to D (rank 1): NCCL
    then connects the two, which may wait for the peer as `init` does."""

    def __init__(self, shared: NcclContext, unique_id: bytes, rank: int) -> None:
        self._shared = shared
        self._unique_id = unique_id
        self._rank = rank
        self.stream: CudaStream | None = None
        """The communicator's own. There once it is up."""
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._reason = ""
        self._comm: Comm | None = None
        shared.openings.run(f"p2pkv-nccl-init-{'PD'[rank]}", shared.init_seconds, self._main)

    def comm(self) -> Comm | None:
        """The communicator once it is up, else None. Raises LinkError if it failed or took too long."""
        if self._comm is not None:
            return self._comm
        if self._reason:
            raise LinkError(self._reason)
        seconds = self._shared.init_seconds
        if time.monotonic() - self._began > seconds:
            raise LinkError(f"NCCL did not come up in {seconds:g} s: the peer is absent or out of reach")
        return None

    def give_up(self) -> Comm | None:
        """Stop waiting. The caller aborts the communicator, if it is up; else the helper thread does."""
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
            self.queue(comm, [self._shared.pool.scratch[:FIRST_MESSAGE_BYTES]])
            self._settle(comm)
            event = stream.record()
            while not event.ready():
                self._pause()
                self._settle(comm)
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

    def queue(self, comm: Comm, buffers: Sequence[torch.Tensor], after: CudaEvent | None = None) -> None:
        """Have NCCL send these bytes together, or receive them, behind what the stream holds, and this event.
        Raises NcclError, and RuntimeError if the device has failed."""
        assert self.stream is not None
        if after is not None:
            self.stream.follow(after)
        nccl = self._shared.nccl
        call, peer = (nccl.send, 1) if self._rank == 0 else (nccl.recv, 0)
        with nccl.group() if len(buffers) > 1 else nullcontext():
            for buffer in buffers:
                call(buffer.data_ptr(), buffer.numel(), peer, comm, self.stream.number)

    def _settle(self, comm: Comm) -> None:
        while (state := self._shared.nccl.async_error(comm)) == IN_PROGRESS:
            self._pause()
        if state != SUCCESS:
            raise NcclError("init", state, "the communicator has met an error; NCCL_DEBUG=INFO shows more")

    def _pause(self) -> None:
        if self._given_up.wait(_PAUSE):
            raise _GivenUp
