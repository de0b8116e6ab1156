"""One end of an NCCL link: its operations, from being asked for to being polled as done."""

from __future__ import annotations

from collections import deque

import torch

from p2pkv.links.base import LinkError
from p2pkv.links.guard import Guard
from p2pkv.links.nccl_api import IN_PROGRESS, SUCCESS, NcclError
from p2pkv.links.nccl_device import Mark
from p2pkv.links.nccl_opening import Opening, Shared, wait_out
from p2pkv.links.slots import aligned

ABORT_SECONDS = 10.0
"""An abort that takes longer counts as stuck; the slots that it holds stay lost until it comes back."""

MOST_BUSY = 16
"""Ends of one device that have operations under way at once: each may hold SMs while it waits. A guess."""

_SIZE_BITS = 41
_SEQUENCES = 1 << 21


def to_landing(sequence: int, nbytes: int) -> int:
    """The landing of message number `sequence`: which message it is, and how long."""
    return sequence % _SEQUENCES << _SIZE_BITS | nbytes


class Operation:
    """One send or receive: asked for, wanted, launched by NCCL, marked in the stream, finished."""

    __slots__ = ("after", "buffer", "finished", "mark", "nbytes", "offset", "released", "wanted")

    def __init__(self, offset: int, buffer: torch.Tensor) -> None:
        self.offset = offset
        self.buffer = buffer
        self.nbytes = buffer.numel()
        self.after: Mark | None = None
        self.mark: Mark | None = None
        self.wanted = False
        self.finished = False
        self.released = False


class End:
    """What both ends have in common. `rank` 0 is P and sends, 1 is D and receives.

    Streams: NCCL's kernels of an end run on a stream of its own, never on one of the engine's. What the
    owner thread has queued on its *current* stream is done before NCCL reads a send (if it was queued
    before `commit`) or writes a receive (before `post`). A receive is done only when its bytes are there,
    so what is queued afterwards, on any stream, reads them.
    """

    def __init__(self, shared: Shared, what: str, unique_id: bytes, rank: int) -> None:
        self.guard = Guard(what)
        self.shared = shared
        self.sequence = 0
        self.operations: set[Operation] = set()
        """Those that hold a slot."""
        self._rank = rank
        self._held = 0
        self.closed = False
        shared.device.enter()
        self._stream = shared.device.stream()
        self._queue: deque[Operation] = deque()  # in order, not launched
        self._launching: Operation | None = None  # called for, and NCCL is at it
        self._flying: deque[Operation] = deque()  # launched and marked
        self._opening = Opening(shared, unique_id, rank, self._stream)

    def ready(self) -> bool:
        """Whether the communicator is up and has carried a message. Raises LinkError if it never will be."""
        self.check()
        return self._comm() is not None

    @property
    def used(self) -> int:
        """Bytes that this end's operations hold."""
        return self._held

    def poll(self) -> None:
        """Launch what can be, and see what the device has finished. Raises LinkError."""
        self.check()
        comm = self._comm()
        if comm is None or not (self._queue or self._launching or self._flying):
            return
        try:
            self._advance(comm)
        except NcclError as error:
            raise self.guard.fail(str(error)) from None
        if not (self._queue or self._launching or self._flying):
            self.shared.busy.discard(self)

    def abort(self) -> None:
        """End the communicator, on a helper thread; nothing of this end completes any more. Idempotent."""
        self.shared.owner.owned()
        self.guard.owned()
        self.close("aborted on this side")

    def close(self, reason: str) -> None:
        """`abort` for the factory, whose thread may be another one."""
        if self.closed:
            return
        self.closed = True
        self.guard.fail(reason)
        comm = self._opening.give_up()
        under_way = [*self._flying] + ([self._launching] if self._launching else [])
        for operation in self.operations.difference(under_way):
            self.shared.pool.give(operation.offset)
        self.operations.clear()
        self._queue.clear()
        self._flying.clear()
        self._launching, self._held = None, 0
        self.shared.busy.discard(self)
        if comm is not None:
            offsets = [operation.offset for operation in under_way]
            name = f"p2pkv-nccl-abort-{'PD'[self._rank]}"
            self.shared.aborts.run(name, ABORT_SECONDS, lambda: self._end(comm, offsets))

    def check(self) -> None:
        """Raises RuntimeError if a second thread calls, LinkError if this end no longer works."""
        self.shared.owner.owned()
        self.guard.check()

    # For the two kinds of ends.

    def admitted(self) -> bool:
        """Whether this end may have operations under way, as few enough others have."""
        return self in self.shared.busy or len(self.shared.busy) < MOST_BUSY

    def enqueue(self, operation: Operation) -> None:
        """The next operation in order; it begins once it is wanted."""
        self.sequence += 1
        self.operations.add(operation)
        self._held += aligned(operation.nbytes)
        self._queue.append(operation)
        self.shared.busy.add(self)

    def want(self, operation: Operation) -> None:
        """It may begin, as soon as what is queued on the current stream now is done."""
        operation.after = self.shared.device.here()
        operation.wanted = True
        self.poll()

    def free(self, operation: Operation) -> None:
        """Its slot may be used again."""
        self.operations.discard(operation)
        self._held -= aligned(operation.nbytes)
        self.shared.pool.give(operation.offset)

    def finished(self, operation: Operation) -> None:
        """The device has done it."""
        raise NotImplementedError

    # Inside.

    def _comm(self) -> int | None:
        try:
            return self._opening.comm()
        except LinkError as error:
            raise self.guard.fail(str(error)) from None

    def _advance(self, comm: int) -> None:
        state = self.shared.nccl.async_error(comm)
        if state not in (SUCCESS, IN_PROGRESS):
            raise self.guard.fail(f"NCCL reports error {state}; NCCL_DEBUG=INFO shows more")
        if state == SUCCESS:
            if self._launching is not None:
                self._mark(self._launching)
                self._launching = None
            self._launch(comm)
        while self._flying and self._passed(self._flying[0]):
            operation = self._flying.popleft()
            operation.finished = True
            self.finished(operation)

    def _launch(self, comm: int) -> None:
        """In order; with a binding that does not block, one, because NCCL must be asked in between."""
        nccl = self.shared.nccl
        call, peer = (nccl.send, 1) if self._rank == 0 else (nccl.recv, 0)
        while self._queue and self._queue[0].wanted and self._launching is None:
            operation = self._queue.popleft()
            self._launching = operation  # from here on the device may touch its slot
            if operation.after is not None:
                self._stream.follow(operation.after)
            call(operation.buffer.data_ptr(), operation.nbytes, peer, comm, self._stream.number)
            if nccl.blocking:
                self._mark(operation)
                self._launching = None

    def _mark(self, operation: Operation) -> None:
        # Only now: a mark made before NCCL has launched would lie before its kernel.
        operation.mark = self._stream.mark()
        self._flying.append(operation)

    def _passed(self, operation: Operation) -> bool:
        assert operation.mark is not None
        try:
            return operation.mark.ready()
        except RuntimeError as error:
            raise self.guard.fail(f"the device has failed: {error}") from None

    def _end(self, comm: int, offsets: list[int]) -> None:
        """On a helper thread: slots return when the device can no longer touch them."""
        self.shared.device.enter()
        self.shared.nccl.abort(comm)
        wait_out(self._stream.mark())
        self._stream.close()
        for offset in offsets:
            self.shared.pool.give(offset)
