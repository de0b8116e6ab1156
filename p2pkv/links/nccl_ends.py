"""The two ends of an NCCL link: the operations of each, from their making until the device has done them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import ClassVar

import torch

from p2pkv.device import CudaEvent
from p2pkv.links.base import Guard, Inbound, LinkEnd, LinkError, Outbound
from p2pkv.links.gpu import PollTimer, wait_out
from p2pkv.links.nccl_bindings import IN_PROGRESS, SUCCESS, Comm, NcclError
from p2pkv.links.nccl_communicator import NcclContext, Opening
from p2pkv.links.staging import StagingShare

ABORT_SECONDS = 10.0
"""An abort that takes longer counts as stuck."""

MOST_TOGETHER = 32
"""Operations that are launched together."""

_SIZE_BITS = 41
_SEQUENCES = 1 << 21


def to_remote_slot(sequence: int, nbytes: int) -> int:
    """The remote slot of message number `sequence`: which message it is, and its size."""
    return sequence % _SEQUENCES << _SIZE_BITS | nbytes


class Operation:
    """One send or receive. In this order it is made, wanted, launched by NCCL, and finished.

    Attributes:
        after: an event of the engine's stream, after which NCCL may begin; None until it is wanted.
        released: its slot is given back once it is finished; of a receive, its bytes have been read.
        times: see NcclContext; empty if they are not wanted.
    """

    __slots__ = ("_link", "after", "buffer", "finished", "offset", "released", "times")

    def __init__(self, link: NcclEnd, offset: int, nbytes: int, released: bool) -> None:
        self._link = link
        self.offset = offset
        self.buffer: torch.Tensor = link.shared.pool.tensor(offset, nbytes)
        self.after: CudaEvent | None = None
        self.finished = False
        self.released = released
        self.times: tuple[float, ...] = ()

    def done(self) -> bool:
        """Whether the device has done it, as of the last `poll`."""
        self._link.check()
        return self.finished


class NcclEnd(LinkEnd):
    """What both ends have in common. `rank`: in the communicator; 0 is P and sends, 1 is D and receives.

    An operation is launched on the end's own stream, and only when nothing on the device is before it: what
    the owner thread had queued on its *current* stream before `commit`, or `post`, is done, and so are the
    end's earlier operations. So none of them waits at the head of a hardware queue. With `in_flight` above 1
    an end that is busy alone may launch with all of that under way: the device keeps the order. A receive is
    done only when its bytes are there, so what is queued afterwards, on any stream, reads them.

    With `announced` an operation is launched only once `launch` was called for it, and several that it was
    called for at once are launched by one group call of NCCL, on both sides, and end together. Only ends with
    something launched, or announced, count as busy then; otherwise all that have an operation.
    """

    rank: ClassVar[int]
    what: ClassVar[str]

    def __init__(self, shared: NcclContext, unique_id: bytes, announced: bool, window: float = inf) -> None:
        self.guard = Guard(self.what)
        self.shared = shared
        self.share = StagingShare(shared.staging, sends=self.rank == 0, window=window)
        self._busy = shared.busy_sends if self.rank == 0 else shared.busy
        self.sequence = 0
        self.operations: set[Operation] = set()
        """The operations that hold a slot."""
        self._announced = announced
        self._launchable: deque[int] = deque()
        """How many operations each call of `launch` was for, of those at the front of the queue."""
        self._due = 0
        """How often `due` has let sends be announced for which `launch` has yet to be called."""
        self._queue: deque[Operation] = deque()  # in order, not launched
        self._ready = 0
        """Of these, how many at the front stand behind nothing any more, as of the last `look`."""
        self._launching: list[Operation] = []  # NCCL has the calls, and has not launched them yet
        self._flying: deque[tuple[CudaEvent, list[Operation]]] = deque()
        """What was launched together, and an event behind NCCL's kernel."""
        self._timer = PollTimer()
        self._calling = threading.Lock()  # held while the owner is inside a call to the communicator
        self._ending = threading.Lock()
        self._ended = False
        self._opening = Opening(shared, unique_id, self.rank)

    def poll(self) -> None:
        """Launch what can be, and see what the device has finished. Raises LinkError."""
        self.check()
        try:
            comm = self._opening.comm()
            self.up = comm is not None
            if comm is None or not (self._queue or self._on_device):
                return
            self._advance(comm)
        except (LinkError, NcclError) as error:
            raise self.guard.fail(str(error)) from None
        except RuntimeError as error:  # of `follow`
            raise self.guard.fail(f"the device has failed: {error}") from None
        announced = self._due or self._launchable
        if not (self._on_device or announced or (self._queue and not self._announced)):
            self._busy.rest(self)

    def abort(self) -> None:
        self.shared.owner.owned()
        super().abort()

    def _free(self) -> None:
        """End the communicator, on a helper thread; nothing of this end completes any more."""
        comm = self._opening.give_up()
        under_way = [*self._launching, *chain.from_iterable(group for _, group in self._flying)]
        for operation in self.operations.difference(under_way):
            self.shared.pool.give(operation.offset)
        self.operations.clear()
        self._queue.clear()
        self._ready = 0
        self._flying.clear()
        self._launching = []
        self._launchable.clear()
        self._busy.leave(self)
        if comm is not None:
            self._abort_communicator(comm, [operation.offset for operation in under_way])

    def rescue(self, reason: str, wherever: bool) -> None:
        """See NcclLinks.rescue. The owner finds a broken link, and closes it, when it comes back."""
        free = self._calling.acquire(blocking=False)
        try:
            if self.closed or not (free or wherever):
                return
            self.guard.fail(reason)
        finally:
            if free:
                self._calling.release()
        comm = self._opening.give_up()
        if comm is not None and not self._ended:
            self._abort_communicator(comm, [])

    def pause(self) -> float:
        """Seconds until a poll may find something."""
        return 0.0 if self._launching else self._timer.pause()

    def check(self) -> None:
        self.shared.owner.owned()
        self.guard.check()

    def admitted(self) -> bool:
        """Whether this end may have another operation; `due` bounds those that are announced."""
        return self._announced or self._busy.admits(self)

    def enqueue(self, operation: Operation) -> None:
        """Append an operation; NCCL gets it in this order, once it is wanted."""
        self.sequence += 1
        self.operations.add(operation)
        self._queue.append(operation)
        if not self._announced:
            self._busy.enter(self)

    def want(self, operation: Operation) -> None:
        """Let `poll` launch it, when the work now on the current stream is done."""
        operation.after = self.shared.device.record_event()
        self._time([operation])

    def committed(self) -> None:
        """An operation is wanted now: unless its launch is announced, it may go at once."""
        if not self._announced:
            self.poll()

    def look(self) -> None:
        """See which operations of the queue have nothing before them on the device any more."""
        while self._ready < len(self._queue) and self._reached(self._queue[self._ready].after):
            self._ready += 1

    def announce(self, count: int) -> None:
        """The next `count` operations may be launched, together."""
        assert self._announced and sum(self._launchable) + count <= len(self._queue), "nothing to launch"
        self._launchable.append(count)

    def free(self, operation: Operation) -> None:
        self.operations.discard(operation)
        self.shared.pool.give(operation.offset)

    @property
    def _on_device(self) -> int:
        """Groups of operations that are on the device."""
        return len(self._flying) + bool(self._launching)

    @property
    def _most(self) -> int:
        """Operations that this end may have on the device now."""
        return self.shared.in_flight if self.shared.in_flight == 1 or self.shared.alone(self) else 1

    @property
    def ahead(self) -> bool:
        """Whether an operation is launched behind an unfinished one."""
        return self._on_device > 1

    @property
    def _turn(self) -> bool:
        """Whether this end may have something on the device now."""
        return self._busy.turn_of(self, full=self.shared.obstructed(self))

    def _advance(self, comm: Comm) -> None:
        """See what is done, and launch what may follow; again while that is launched at once."""
        again = True
        while again:
            with self._calling:
                self.guard.check()
                state = self.shared.nccl.async_error(comm)
            if state not in (SUCCESS, IN_PROGRESS):
                raise self.guard.fail(f"NCCL reports error {state}; NCCL_DEBUG=INFO shows more")
            if state == SUCCESS and self._launching:
                self._record()
            while self._flying and self._reached(self._flying[0][0]):
                _, group = self._flying.popleft()
                self._timer.end()
                if self._flying:
                    self._timer.begin(_nbytes(self._flying[0][1]))
                for operation in group:
                    self._finish(operation)
            self.look()
            again = state == SUCCESS and self._launch(comm)

    def _launch(self, comm: Comm) -> bool:
        """Launch the next operation, or those that go with it, if they may be; whether they were."""
        if not self._queue or self._on_device >= self._most or not (count := self._next_group()):
            return False
        group = self._launching = [self._queue.popleft() for _ in range(count)]
        self._ready = max(0, self._ready - count)
        # From here on the device may touch their slots.
        if self._announced:
            self._launchable.popleft()
        self._time(group)
        with self._calling:
            self.guard.check()
            after = group[-1].after if self._most > 1 else None
            self._opening.queue(comm, [operation.buffer for operation in group], after)
        self._time(group)
        return True

    def _next_group(self) -> int:
        """How many operations may be launched next, together; 0: none."""
        if not self._announced:
            return int(self._ordered(0))
        count = self._launchable[0] if self._launchable else 0
        ready = count and self._ordered(count - 1)
        return count if ready and self._turn and self._busy.enter(self) else 0

    def _ordered(self, number: int) -> bool:
        """Whether this operation of the queue may be launched as far as this device is concerned: it is
        wanted, and what it stands behind is done, or is waited for on the device, where only this device's
        own copies come before it."""
        if self._most == 1:
            return number < self._ready
        return number < len(self._queue) and self._queue[number].after is not None

    def _record(self) -> None:
        """NCCL has launched what it was given."""
        # Not earlier: an event recorded before NCCL has launched would lie before its kernel.
        assert self._opening.stream is not None
        group, self._launching = self._launching, []
        event = self._opening.stream.record()
        self._time(group)
        if not self._flying:
            self._timer.begin(_nbytes(group))
        self._flying.append((event, group))

    def _finish(self, operation: Operation) -> None:
        operation.finished = True
        self._time([operation])
        if self.shared.times is not None:
            self.shared.times.append(operation.times)
        if operation.released:
            self.free(operation)

    def _time(self, operations: Sequence[Operation]) -> None:
        if self.shared.times is not None:
            for operation in operations:
                operation.times = *operation.times, time.monotonic()

    def _reached(self, event: CudaEvent | None) -> bool:
        """Whether what an operation stands behind, or its kernel, is done; None: it is not even queued."""
        try:
            return event is not None and event.ready()
        except RuntimeError as error:
            raise self.guard.fail(f"the device has failed: {error}") from None

    def _abort_communicator(self, comm: Comm, offsets: list[int]) -> None:
        """Begin to; `offsets`: of the slots that the device may touch until then."""
        name = f"p2pkv-nccl-abort-{'PD'[self.rank]}"
        self.shared.aborts.run(name, ABORT_SECONDS, lambda: self._end(comm, offsets))

    def _end(self, comm: Comm, offsets: list[int]) -> None:
        """On a helper thread: abort, and give the slots back when the device can no longer touch them."""
        stream = self._opening.stream
        assert stream is not None
        self.shared.device.enter()
        with self._ending:
            if not self._ended:
                self.shared.nccl.abort(comm)
                wait_out(stream.record())
                stream.close()
                self._ended = True
        for offset in offsets:
            self.shared.pool.give(offset)


class NcclReceive(Operation):
    __slots__ = ("remote_slot",)

    def __init__(self, link: NcclInbound, offset: int, nbytes: int) -> None:
        super().__init__(link, offset, nbytes, released=False)
        self.remote_slot = to_remote_slot(link.sequence, nbytes)

    def release(self) -> None:
        self._link.guard.owned()
        if not self.released:
            self.released = True
            if self.finished and self in self._link.operations:
                self._link.free(self)


class NcclInbound(NcclEnd, Inbound):
    """D's end. `post` launches nothing, `poll` does: a receive that is launched before its grant has gone out
    would wait for ever where launches block (CUDA_LAUNCH_BLOCKING=1, profilers, sanitizers)."""

    rank = 1
    what = "the NCCL link from a peer"

    def post(self, nbytes: int) -> NcclReceive | None:
        """Post the next receive, or None while there is no room for it, or too many links are busy."""
        self.check()
        self.shared.pool.check(nbytes, self.share)
        offset = self.shared.pool.take(nbytes, self.share) if self.admitted() else None
        if offset is None:
            return None
        receive = NcclReceive(self, offset, nbytes)
        self.enqueue(receive)
        self.want(receive)
        return receive

    def launch(self, count: int = 1) -> None:
        self.check()
        self.announce(count)

    @property
    def _turn(self) -> bool:
        """Between two launches others that have asked come first: P may announce its sends without end."""
        if self._busy.contended and not self._on_device:
            self._busy.rest(self)
        return super()._turn


class NcclSend(Operation):
    __slots__ = ()

    def commit(self) -> None:
        """Hand the buffer over; NCCL reads it when the current stream has written it."""
        self._link.check()
        self._link.want(self)
        self._link.committed()


class NcclOutbound(NcclEnd, Outbound):
    rank = 0
    what = "the NCCL link to a peer"

    def reserve(self, nbytes: int, remote_slot: int) -> NcclSend | None:
        """A buffer, or None while the rank's slots are taken. ValueError if it never has room. LinkError if
        the grant is not the next one, or for another size: NCCL would not notice."""
        self.check()
        self.shared.pool.check(nbytes)
        if remote_slot != to_remote_slot(self.sequence, nbytes):
            raise self.guard.fail(
                f"remote slot {remote_slot} is not that of message {self.sequence} with {nbytes} bytes; "
                "grants must be used in order, and filled"
            )
        admitted = self.admitted() and self.share.grants(nbytes)
        offset = self.shared.pool.take(nbytes, self.share) if admitted else None
        if offset is None:
            return None
        send = NcclSend(self, offset, nbytes, released=True)
        self.enqueue(send)
        return send

    def due(self, before: int = 0, most: int = 1) -> int:
        """How many sends may be announced next: they have to be wanted, and not too much may be announced.
        Only an end that is launched already may announce ahead, and none while others wait. An end that
        announces is busy from then on: D launches its receives, so no other peer may have to do something
        before the sends are launched. Else two ranks of P and two of D could wait for each other."""
        self.check()
        first, pending = sum(self._launchable) + before, self._on_device + len(self._launchable) + self._due
        if pending == 0:
            self.look()
        if not self._ordered(first):
            return 0
        if not (self._turn if pending == 0 else pending <= self._most and not self._busy.contended):
            return 0
        self._busy.enter(self)
        self._due += 1
        return self._group_at(first, most)

    def _group_at(self, first: int, most: int) -> int:
        """How many sends of the queue, from this one on, are launched together: at least this one."""
        count, nbytes = 1, self._queue[first].buffer.numel()
        while count < min(most, MOST_TOGETHER) and self._ordered(first + count):
            nbytes += self._queue[first + count].buffer.numel()
            if nbytes > self.shared.group_bytes:
                break
            count += 1
        return count

    def launch(self, count: int = 1) -> None:
        self._due -= 1
        self.announce(count)
        self.poll()


def _nbytes(group: Sequence[Operation]) -> int:
    return sum(operation.buffer.numel() for operation in group)
