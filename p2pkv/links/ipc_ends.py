"""The two ends of a CUDA IPC link: P gathers straight into D's slot, and announces it over a unix socket.

No kernel waits for the other process. P asks its own event whether the gather is done, and then notifies
D, whose later work on any stream reads what was written.
"""

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import torch

from p2pkv.device import CudaEvent
from p2pkv.links import ipc_socket
from p2pkv.links.base import NONCE_BYTES, Guard, Inbound, LinkError, Outbound
from p2pkv.links.cuda_memory import CudaMemory, ExportedBlock, open_block
from p2pkv.links.gpu import CudaDevice, DevicePool, HelperThreads, PollTimer, SlotTensors, wait_out
from p2pkv.links.listener import HandshakeListener
from p2pkv.links.shared_memory import from_remote_slot, to_remote_slot
from p2pkv.links.staging import StagingBudget, StagingShare, aligned

OPEN_SECONDS = 10.0
"""Mapping a peer's memory takes milliseconds; a call that takes longer counts as stuck."""

ABORT_SECONDS = 10.0
"""Slots into which P may write stay taken until it answers or ends; an abort that takes longer is stuck."""

ORPHAN_SECONDS = 5.0
"""How long the slots stay taken into which a P was writing that has ended without GOODBYE: when a process is
killed, its sockets may be closed a moment before the driver stops its kernels."""


@dataclass
class IpcContext:
    """What all CUDA IPC links of one rank share. `pool`, `block`: this rank's memory, into which its peers
    write; None if it does not receive. `mapped`: all memory of each peer while a link uses it, by its random
    name. `openings`, `aborts`: threads that map a peer's memory, and that wait for a link's writes."""

    device: CudaDevice
    driver: CudaMemory
    staging: StagingBudget
    pool: DevicePool | None
    block: ExportedBlock | None
    mapped: WeakValueDictionary[bytes, SlotTensors] = field(default_factory=WeakValueDictionary)
    openings: HelperThreads = field(default_factory=HelperThreads)
    aborts: HelperThreads = field(default_factory=HelperThreads)
    _read: deque[tuple[CudaEvent, int]] = field(default_factory=deque)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def give_when_read(self, offset: int) -> None:
        """The slot is free when what the current stream holds now is done. It counts as staging no more, as
        the link to which it belonged may be idle until then, and not be polled."""
        assert self.pool is not None
        self.pool.leave(offset)
        with self._reading:
            self._read.append((self.device.record_event(), offset))
        self.reap()

    def reap(self) -> None:
        """Give back the slots that have been read. Raises LinkError if the device has failed."""
        with self._reading:
            try:
                while self._read and self._read[0][0].ready():
                    assert self.pool is not None
                    self.pool.give(self._read.popleft()[1])
            except RuntimeError as error:
                raise LinkError(f"the device has failed: {error}") from None


@dataclass(eq=False, slots=True)
class IpcReceive:
    """One posted receive: a slot that P fills."""

    _link: "IpcInbound"
    offset: int
    remote_slot: int
    buffer: torch.Tensor
    arrived: bool = False
    released: bool = False

    def done(self) -> bool:
        """Whether P has announced that all bytes are there, as of the last `poll`."""
        self._link.guard.check()
        return self.arrived

    def release(self) -> None:
        self._link.release(self)


class IpcInbound(Inbound):
    """D's end. Its window bounds what it may hold of the memory that all links of the rank share."""

    def __init__(self, shared: IpcContext, nonce: bytes, window: int) -> None:
        """`nonce`: of P's invitation. Raises LinkError."""
        assert shared.pool is not None
        self.guard = Guard("the CUDA IPC link from a peer")
        self.share = StagingShare(shared.staging, window=aligned(window))
        self._shared = shared
        self._pool = shared.pool
        self._sequence = 0
        self._arrived = 0
        self._posted: deque[IpcReceive] = deque()  # P has not filled them yet
        self._held: set[IpcReceive] = set()  # filled, and not released
        self._line: ipc_socket.RecordSocket | None = None
        self._left = False
        self._timer = PollTimer()
        self._announced = 0
        """How many of `_posted` P has announced."""
        self.name = secrets.token_bytes(NONCE_BYTES)
        """Where P finds this end."""
        try:
            self._door = HandshakeListener(ipc_socket.listen(self.name), nonce, trusts=ipc_socket.same_user)
        except OSError as error:
            raise LinkError(f"no unix socket for a CUDA IPC link: {error}") from None

    def post(self, nbytes: int) -> IpcReceive | None:
        self.guard.check()
        self._shared.reap()
        offset = self._pool.take(nbytes, self.share)
        if offset is None:
            return None
        slot = to_remote_slot(offset, self._sequence)
        receive = IpcReceive(self, offset, slot, self._pool.tensor(offset, nbytes))
        self._sequence += 1
        self._posted.append(receive)
        return receive

    def poll(self) -> None:
        """Let P in, and see which receives it has filled. Raises LinkError."""
        self.guard.check()
        self._shared.reap()
        try:
            if self._line is None:
                if (caller := self._door.admit()) is not None:
                    assert self._shared.block is not None
                    self._line = ipc_socket.RecordSocket(caller)
                    self._line.send_fd(self._shared.block.fd)
                return
            self._line.flush()
            for record in self._line.records():
                self._read(record)
        except ipc_socket.Closed as end:
            raise self.guard.fail(str(end)) from None

    def launch(self, count: int = 1) -> None:
        if self._announced == 0 and self._posted:
            self._timer.begin(self._posted[0].buffer.numel())
        self._announced += count

    def pause(self) -> float:
        return self._timer.pause() if self.up else 0.0

    def release(self, receive: IpcReceive) -> None:
        """A receive's bytes have been read, by what the current stream holds now."""
        self.guard.owned()
        if receive.released:
            return
        receive.released = True
        if receive in self._held:
            self._held.discard(receive)
            self._shared.give_when_read(receive.offset)

    def _free(self) -> None:
        self._door.close()
        offsets = [receive.offset for receive in (*self._posted, *self._held)]
        awaited = self._line if self._posted and not self._left else None
        self._posted.clear()
        self._held.clear()
        read = self._shared.device.record_event()
        if self._line is not None:
            self._line.hang_up()
            if awaited is None:
                self._line.close()
        if awaited is not None or offsets:
            give_back = partial(self._give_back, read, offsets, awaited)
            self._shared.aborts.run("p2pkv-ipc-abort-D", ABORT_SECONDS, give_back)

    def _read(self, record: ipc_socket.Record) -> None:
        if record.what == ipc_socket.MAPPED:
            self.up = True
        elif record.what == ipc_socket.COMMITTED:
            self._fill(record)
        elif record.what == ipc_socket.GOODBYE:
            self._left = True
            raise ipc_socket.Closed("closed by the peer")
        else:
            raise self.guard.fail(f"the peer sent a record of kind {record.what}, which P does not send")

    def _fill(self, record: ipc_socket.Record) -> None:
        if not self._posted or record.sequence != self._arrived:
            raise self.guard.fail(
                f"the peer has sent message {record.sequence} where message {self._arrived} was next"
            )
        receive = self._posted[0]
        if record.nbytes != receive.buffer.numel():
            raise self.guard.fail(
                f"the peer sent {record.nbytes} bytes where {receive.buffer.numel()} were granted"
            )
        self._posted.popleft()
        self._arrived += 1
        self._timer.end()
        self._announced = max(0, self._announced - 1)
        if self._announced and self._posted:
            self._timer.begin(self._posted[0].buffer.numel())
        receive.arrived = True
        assert self._line is not None
        if receive.released:
            self._shared.give_when_read(receive.offset)
        else:
            self._held.add(receive)
        self._line.send(ipc_socket.TAKEN, record.sequence)

    def _give_back(self, read: CudaEvent, offsets: list[int], line: ipc_socket.RecordSocket | None) -> None:
        """On a helper thread: the slots are free when neither side reads or writes them any more."""
        self._shared.device.enter()
        if line is not None:
            if not line.wait_for_end():
                time.sleep(ORPHAN_SECONDS)
            line.close()
        wait_out(read)
        for offset in offsets:
            self._pool.give(offset)


@dataclass(eq=False, slots=True)
class IpcSend:
    """One send; its buffer is D's slot."""

    _link: "IpcOutbound"
    sequence: int
    buffer: torch.Tensor
    written: CudaEvent | None = None
    finished: bool = False

    def commit(self) -> None:
        """The buffer is full when what the current stream holds now is done; then D is notified."""
        self._link.commit(self)

    def done(self) -> bool:
        """Whether D has seen that the bytes are there, as of the last `poll`."""
        self._link.guard.check()
        return self.finished


class IpcOutbound(Outbound):
    """P's end. It needs no memory of this rank."""

    def __init__(self, shared: IpcContext, line: ipc_socket.RecordSocket, name: bytes, nbytes: int) -> None:
        self.guard = Guard("the CUDA IPC link to a peer")
        self._shared = shared
        self._line = line
        self._name = name
        self._nbytes = nbytes
        self._asked = False
        self._failure = ""
        self._opened: SlotTensors | None = None
        self._block: SlotTensors | None = None
        self._next = 0
        self._unannounced: deque[IpcSend] = deque()
        self._unfinished: deque[IpcSend] = deque()
        self._timer = PollTimer()

    def reserve(self, nbytes: int, remote_slot: int) -> IpcSend | None:
        """D's slot, or None while its memory is not mapped. Raises LinkError for a slot of another grant."""
        if not self.ready() or self._block is None:
            return None
        if nbytes < 1:
            raise ValueError(f"a message of {nbytes} bytes cannot be sent; it needs at least 1 byte")
        offset = from_remote_slot(remote_slot, self._next, self.guard)
        if offset + nbytes > self._nbytes:
            raise self.guard.fail(f"remote slot {remote_slot} lies outside D's {self._nbytes} bytes")
        send = IpcSend(self, self._next, self._block.tensor(offset, nbytes))
        self._next += 1
        self._unannounced.append(send)
        return send

    def commit(self, send: IpcSend) -> None:
        self.guard.check()
        send.written = self._shared.device.record_event()
        if send is self._unannounced[0]:
            self._timer.begin(send.buffer.numel())
        self.poll()

    def pause(self) -> float:
        return self._timer.pause() if self.up else 0.0

    @property
    def used(self) -> int:
        return sum(send.buffer.numel() for send in (*self._unannounced, *self._unfinished))

    def poll(self) -> None:
        """Map D's memory, announce what is written, and see what D has taken. Raises LinkError."""
        self.guard.check()
        try:
            if self._block is None:
                self._map()
                return
            for record in self._line.records():
                self._read(record)
            self._announce()
            self._line.flush()
        except ipc_socket.Closed as end:
            raise self.guard.fail(str(end)) from None
        except RuntimeError as error:
            raise self.guard.fail(f"the device has failed: {error}") from None

    def _free(self) -> None:
        """Leave D's memory, once no work of this process writes there."""
        written, mapped = self._shared.device.record_event(), [self._block]
        self._block = self._opened = None
        self._unannounced.clear()
        self._unfinished.clear()
        self._shared.aborts.run("p2pkv-ipc-abort-P", ABORT_SECONDS, lambda: self._leave(written, mapped))

    def _leave(self, written: CudaEvent, mapped: list[SlotTensors | None]) -> None:
        """On a helper thread, as it may wait for the device."""
        self._shared.device.enter()
        wait_out(written)
        mapped.clear()  # unmaps it, if no other link and no tensor of the engine holds it
        with contextlib.suppress(ipc_socket.Closed):
            self._line.send(ipc_socket.GOODBYE)
        self._line.close()

    def _map(self) -> None:
        if not self._asked:
            fd = self._line.receive_fd()
            if fd is None:
                return
            self._asked = True
            self._shared.openings.run("p2pkv-ipc-open", OPEN_SECONDS, lambda: self._open(fd))
        if self._failure:
            raise self.guard.fail(self._failure)
        if self._opened is not None:
            self._block, self._opened, self.up = self._opened, None, True
            self._line.send(ipc_socket.MAPPED)

    def _open(self, fd: int) -> None:
        """On a helper thread: map D's memory, unless another link to it has."""
        try:
            self._shared.device.enter()
            block = self._shared.mapped.get(self._name)
            if block is None:
                block = SlotTensors(open_block(self._shared.driver, fd, self._nbytes))
                self._shared.mapped[self._name] = block
            self._opened = block
            if self.closed:  # meanwhile, and nobody will look
                self._opened = None
        except RuntimeError as error:
            self._failure = (
                f"D's device memory cannot be mapped here ({error}): both ranks must have one GPU, or GPUs "
                "that reach each other by NVLink or PCIe peer access, and no MIG instances. Use link=nccl on "
                "both sides"
            )
        finally:
            os.close(fd)

    def _read(self, record: ipc_socket.Record) -> None:
        oldest = self._unfinished[0].sequence if self._unfinished else None
        if record.what != ipc_socket.TAKEN or record.sequence != oldest:
            raise self.guard.fail(
                f"the peer sent a record of kind {record.what} about message {record.sequence}, which is "
                "not what D has to send next"
            )
        self._unfinished.popleft().finished = True

    def _announce(self) -> None:
        while self._unannounced:
            send = self._unannounced[0]
            if send.written is None or not send.written.ready():
                return
            self._unfinished.append(self._unannounced.popleft())
            self._timer.end()
            if self._unannounced and self._unannounced[0].written is not None:
                self._timer.begin(self._unannounced[0].buffer.numel())
            self._line.send(ipc_socket.COMMITTED, send.sequence, send.buffer.numel())
