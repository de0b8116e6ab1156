"""NCCL on a CPU, for tests: between threads and between processes, over unix sockets.

It applies NCCL's rules as strictly as NCCL may. What NCCL leaves undefined is a violation, which `let_go`
reports. "Guide" is NCCL's User Guide 2.30 (docs/userguide/source in NVIDIA/nccl), by page and section; the
functions are NVIDIA/nccl's and have been read in v2.28.9 and v2.30.7.

- `init` waits for the peer: Guide, api/comms, "ncclCommInitRank". So does the first message, which connects
  the two: `ncclP2PPreconnectFunc` in group.cc calls `ncclTransportP2pSetup` of transport.cc.
- A send ends only when its receive has taken it: Guide, api/p2p, "ncclSend" and "ncclRecv" ("blocking for the
  GPU"), and a maintainer in NVIDIA/nccl issue 783. NCCL may buffer a small message, the simulation never.
- Messages of two ranks match in the order of the calls: `p2pTaskAppend` and `scheduleP2pTasksToPlan` in
  enqueue.cc, a queue for each peer. The Guide promises it within a group only (usage/p2p, "Two-sided
  communication"). Both calls have the same size: Guide, api/p2p; NCCL does not compare them.
- What is queued between ncclGroupStart and ncclGroupEnd is one kernel (Guide, usage/groups, "Aggregated
  Operations"), and both ranks have to group alike: a maintainer in NVIDIA/nccl issue 1279.
- Nothing reports that the other end has died. The Guide promises no such report: some errors, "in particular
  network errors", are reported (usage/communicators, "Asynchronous errors and error handling"), and the
  application decides when to abort ("Fault Tolerance"). An abort frees this end; no other thread may be
  inside a call then, and the abort of a blocking communicator may hang ("Fault Tolerance").
- With `blocking=0` a call may return before its kernel is launched: Guide, usage/groups, "Nonblocking Group
  Operation". No other may come until the state is not ncclInProgress any more: api/comms,
  "ncclCommGetAsyncError".
- One thread at a time calls a communicator, and one the communicators of a device: Guide, usage/threadsafety.
  That it is always the same one is p2pkv's own rule. Milder than the Guide, as p2pkv needs it: another thread
  may bring a communicator up, first message included, while the owner uses others.
- `launches_wait`: launches return when the device is done: CUDA Programming Guide 13, 5.2.3.1,
  "CUDA_LAUNCH_BLOCKING".
"""

import contextlib
import ctypes
import itertools
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from p2pkv.links.gpu import Allocate
from p2pkv.links.nccl_bindings import IN_PROGRESS, SUCCESS, UNIQUE_ID_BYTES, Nccl, NcclError
from support.cuda.ipc import SimulatedGpu
from support.nccl.gpu import SimulatedGpu as GpuQueues
from support.nccl.gpu import Work

TICK = 0.005
LAUNCH_POLLS = 2
HEADER = struct.Struct("<cQHH")
"""b"M", bytes, and of the group the place and the size."""
ALL: "weakref.WeakSet[SimulatedNccl]" = weakref.WeakSet()


def let_go() -> None:
    """Free every thread of every simulation; AssertionError if one of NCCL's rules was broken."""
    violations: list[str] = []
    for simulated in list(ALL):
        simulated.let_go()
        violations += simulated.violations
        ALL.discard(simulated)
    assert not violations, "; ".join(violations)


@dataclass(eq=False)
class Op:
    send: bool
    ptr: int
    nbytes: int
    stream: int
    place: int = 0
    group: int = 1
    done: bool = False
    work: Work | None = None
    """The kernel that ends with it, once it runs; of a simulation with a GPU."""

    @property
    def memory(self) -> memoryview:
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.ptr)).cast("B")


@dataclass(eq=False)
class Comm:
    opener: int
    rank: int
    line: socket.socket | None = None
    gone: threading.Event = field(default_factory=threading.Event)
    met: threading.Event = field(default_factory=threading.Event)
    """Both ends have called their first operation."""
    handed_over: bool = False
    first: bool = True
    launching: list[Op] = field(default_factory=list)
    polls: int = 0
    work: SimpleQueue[Op | None] = field(default_factory=SimpleQueue)
    worker: threading.Thread | None = None
    inside: threading.Lock = field(default_factory=threading.Lock)


class SimulatedNccl(Nccl):
    """The NCCL of one device. Links of one process, and of several, meet through it.

    Attributes:
        fails_with: what `async_error` says of every communicator, if not None.
        abort_hangs: whether `abort` waits until `let_go`.
        launches_wait: whether `send` and `recv` return only when the device has done them, as with
            CUDA_LAUNCH_BLOCKING=1.
        joins: `init` waits until this is set.
        refuses: how many groups it refuses at the second operation.
        gpu: whose queues and multiprocessors the operations take; None: there is room for all of them.
        channels: multiprocessors of an operation.
    """

    def __init__(self, *, version: int = 22809, gpu: GpuQueues | None = None, channels: int = 8) -> None:
        self.gpu = gpu
        self.channels = channels
        self.binding = "a simulation"
        self.violations: list[str] = []
        self.fails_with: int | None = None
        self.abort_hangs = False
        self.launches_wait = False
        self.joins = threading.Event()
        self.joins.set()
        self.refuses = 0
        self.aborted = 0
        self.last: dict[int, Op] = {}  # of each stream
        self._version = version
        self._numbers = itertools.count(1)
        self._comms: dict[int, Comm] = {}
        self._roots: dict[bytes, socket.socket] = {}
        self._streams: dict[int, int] = {}
        self._owner = 0
        self._grouping = threading.local()
        self.groups: list[int] = []
        """How many operations each kernel had."""
        self.over = threading.Event()
        ALL.add(self)

    @property
    def live(self) -> int:
        """Communicators that have not been aborted."""
        return len(self._comms)

    @property
    def launching(self) -> bool:
        """Whether NCCL has a call that it has not launched yet."""
        return any(comm.launching for comm in self._comms.values())

    def stream_ended(self, stream: int) -> bool:
        """Whether the communicator that this stream served has been aborted."""
        return self._streams.get(stream) not in self._comms

    def let_go(self) -> None:
        self.over.set()
        for number in list(self._comms):
            if comm := self._comms.pop(number, None):
                self._end(comm)
        for root in list(self._roots.values()):
            root.close()

    # The seam.

    def version(self) -> int:
        return self._version

    def unique_id(self) -> bytes:
        name = b"p2pkv-nccl-" + secrets.token_hex(16).encode()
        root = socket.socket(socket.AF_UNIX)
        root.bind(b"\0" + name)
        root.listen(1)
        unique_id = name.ljust(UNIQUE_ID_BYTES, b"\0")
        self._roots[unique_id] = root
        return unique_id

    def init(self, ranks: int, unique_id: bytes, rank: int) -> int:
        if ranks != 2:
            raise NcclError("init", 4, "only two ranks are simulated")
        comm = Comm(threading.get_ident(), rank)
        threading.Thread(target=self._join, args=(comm, unique_id), daemon=True).start()
        number = next(self._numbers)
        self._comms[number] = comm
        return number

    def send(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        with self._call("send", comm) as inside:
            self._append(inside, Op(True, ptr, nbytes, stream), comm, peer)

    def recv(self, ptr: int, nbytes: int, peer: int, comm: int, stream: int) -> None:
        with self._call("recv", comm) as inside:
            self._append(inside, Op(False, ptr, nbytes, stream), comm, peer)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        grouped = self._grouping.ops = []
        try:
            yield  # a call that raises has NCCL launch nothing: ncclGroupEndInternal in group.cc
        finally:
            self._grouping.ops = None
        assert len({number for number, _ in grouped}) == 1, "one communicator at a time"
        number, ops = grouped[0][0], [op for _, op in grouped]
        with self._call("group_end", number) as inside:
            self.queue(inside, ops, number)

    def async_error(self, comm: int) -> int:
        with self._call("async_error", comm) as inside:
            if self.fails_with is not None:
                return self.fails_with
            if inside.line is None:
                return IN_PROGRESS
            if inside.launching:
                inside.polls -= 1
                if inside.polls >= 0 or not inside.met.is_set():
                    return IN_PROGRESS
                ops, inside.launching = inside.launching, []
                self._launch(inside, ops)
            return SUCCESS

    def abort(self, comm: int) -> None:
        inside = self._comms.pop(comm, None)
        if inside is None:
            self._violate("abort of a communicator that is not there")
            return
        if not inside.inside.acquire(blocking=False):
            self._violate("abort while another thread is inside a call")
        if self.abort_hangs:
            self.over.wait()
        self._end(inside)
        self.aborted += 1

    # Discipline.

    @contextlib.contextmanager
    def _call(self, name: str, number: int):
        comm = self._comms.get(number)
        if comm is None:
            self._violate(f"{name} on a communicator that has ended")
            raise NcclError(name, 4, "no such communicator")
        if not comm.inside.acquire(blocking=False):
            self._violate(f"{name} while another thread is inside a call")
            raise NcclError(name, 5, "in use")
        try:
            self._whose(name, comm)
            if comm.launching and name != "async_error":
                self._violate(f"{name} before NCCL has launched the last call")
            yield comm
        finally:
            comm.inside.release()

    def _whose(self, name: str, comm: Comm) -> None:
        """Who has opened a communicator may use it until the device's owner does."""
        thread = threading.get_ident()
        if thread == comm.opener and not comm.handed_over and thread != self._owner:
            return
        comm.handed_over = True
        self._owner = self._owner or thread
        if thread != self._owner:
            self._violate(f"{name} from thread {threading.current_thread().name!r}, which is not the owner")

    def _violate(self, what: str) -> None:
        if not self.over.is_set():  # then every call that still comes is late
            self.violations.append(what)

    # What NCCL does behind the calls.

    def _join(self, comm: Comm, unique_id: bytes) -> None:
        root = self._roots.pop(unique_id, None) if comm.rank == 0 else None
        name = b"\0" + unique_id.rstrip(b"\0")
        line = None
        while not (self.joins.wait(TICK) or self._ended(comm)):
            pass
        while line is None and not self._ended(comm):
            line = accept(root) if root is not None else dial(name)
            if line is None:
                comm.gone.wait(TICK)
        if line is not None and self._swap(comm, line, b"H"):
            comm.line = line
        if root is not None:
            root.close()

    def _swap(self, comm: Comm, line: socket.socket, byte: bytes) -> bool:
        """Say a byte and hear the same of the peer; False if this end has been let go meanwhile."""
        line.settimeout(TICK)
        with contextlib.suppress(OSError):
            line.send(byte)
        heard = b""
        while not heard and not self._ended(comm):
            try:
                heard = line.recv(1)
            except TimeoutError:
                continue
            except OSError:
                heard = b""
            if not heard:  # the peer has died, which nobody is told
                comm.gone.wait(TICK)
        return heard == byte

    def _ended(self, comm: Comm) -> bool:
        return self.over.is_set() or comm.gone.is_set()

    def _append(self, comm: Comm, op: Op, number: int, peer: int) -> None:
        if peer != 1 - comm.rank:
            raise NcclError("send", 4, f"no peer {peer}")
        grouped = getattr(self._grouping, "ops", None)
        if grouped and self.refuses > 0:
            self.refuses -= 1
            raise NcclError("send" if op.send else "recv", 3, "internal error")
        if grouped is None:
            self.queue(comm, [op], number)
        else:
            grouped.append((number, op))

    def queue(self, comm: Comm, ops: list[Op], number: int) -> None:
        """Launch them as one kernel."""
        op = ops[-1]
        for place, each in enumerate(ops):
            each.place, each.group = place, len(ops)
        if self._streams.get(op.stream, number) != number and self._streams[op.stream] in self._comms:
            self._violate("one stream for two communicators: the simulation keeps no order between them")
        self._streams[op.stream] = number
        first, comm.first = comm.first, False
        if self.launches_wait:
            self._launch(comm, ops)
            while not op.done and not self._ended(comm):
                comm.gone.wait(TICK)
            return
        comm.launching, comm.polls = ops, LAUNCH_POLLS
        if first:
            threading.Thread(target=self._meet, args=(comm,), daemon=True).start()

    def _meet(self, comm: Comm) -> None:
        if self._swap(comm, comm.line, b"C"):
            comm.line.settimeout(None)
            comm.met.set()

    def _launch(self, comm: Comm, ops: list[Op]) -> None:
        last = ops[-1]
        self.last[last.stream] = last
        self.groups.append(len(ops))
        if comm.worker is None:
            worker = threading.Thread(target=self._work, args=(comm,), daemon=True)
            worker.start()
            comm.worker = worker

        def begin(work: Work | None) -> None:
            last.work = work
            for op in ops:
                comm.work.put(op)

        if self.gpu is None:
            begin(None)
        else:
            self.gpu.submit(last.stream, self.channels, begin)

    def _work(self, comm: Comm) -> None:
        """The device: carries out what was launched, in order."""
        while (op := comm.work.get()) is not None:
            try:
                if op.send:
                    comm.line.sendall(HEADER.pack(b"M", op.nbytes, op.place, op.group))
                    comm.line.sendall(op.memory)
                    fill(comm.line, bytearray(1))  # the word that it was taken
                else:
                    self._recv(comm.line, op)
            except OSError:
                return  # the line is gone, by an abort or a death: silence either way
            op.done = True
            if self.gpu is not None and op.place == op.group - 1:
                self.gpu.finish(op.work)

    def _recv(self, line: socket.socket, op: Op) -> None:
        kind, nbytes, *place = HEADER.unpack(fill(line, bytearray(HEADER.size)))
        if (kind, nbytes) != (b"M", op.nbytes):
            self._violate(f"{nbytes} bytes were sent where {op.nbytes} were posted")
            raise OSError
        if place != [op.place, op.group]:
            self._violate(f"the sends are grouped as {place}, the receives as {[op.place, op.group]}")
        fill(line, op.memory)
        line.sendall(b"A")

    def _end(self, comm: Comm) -> None:
        comm.gone.set()
        comm.work.put(None)
        if self.gpu is not None:
            for stream, number in list(self._streams.items()):
                if number not in self._comms:  # this one's among them: it was taken out before
                    self.gpu.clear(stream)
        if comm.line is not None:
            with contextlib.suppress(OSError):
                comm.line.shutdown(socket.SHUT_RDWR)
        if comm.worker is not None:  # its line is closed with its last user: a number must not be used anew
            comm.worker.join(10)


def accept(root: socket.socket) -> socket.socket | None:
    """A connection, if somebody has dialed."""
    root.setblocking(False)
    try:
        return root.accept()[0]
    except OSError:
        return None


def dial(name: bytes) -> socket.socket | None:
    """A connection, if somebody listens by that name."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(name)
        return line
    except OSError:
        line.close()
        return None


def fill(line: socket.socket, into: bytearray | memoryview) -> bytearray | memoryview:
    """Raises OSError when the line ends before."""
    if line.recv_into(into, 0, socket.MSG_WAITALL) < len(into):
        raise OSError("the peer is gone")
    return into


# The device beside it: a CPU with streams on which events can be recorded.


class SimulatedEvent:
    def __init__(self, op: Op | None, ended: Callable[[], bool]) -> None:
        self._op = op
        self._ended = ended

    def ready(self) -> bool:
        return self._op is None or self._op.done or self._ended()


class SimulatedStream:
    _numbers = itertools.count(1000)

    def __init__(self, nccl: SimulatedNccl) -> None:
        self.number = next(self._numbers)
        self._nccl = nccl

    def record(self) -> SimulatedEvent:
        """It covers what NCCL has launched, and not what it is about to."""
        nccl, number = self._nccl, self.number
        return SimulatedEvent(nccl.last.get(number), lambda: nccl.stream_ended(number))

    def follow(self, event: SimulatedEvent) -> None:
        assert event.ready(), "an operation would wait in its stream"

    def close(self) -> None:
        if not self.record().ready():
            self._nccl.violations.append("a stream was closed with something on it")


class SimulatedDevice(SimulatedGpu):
    """A CPU that looks like a device of its own to NCCL links."""

    def __init__(self, nccl: SimulatedNccl, name: str = "simulated:0", processors: int = 512) -> None:
        super().__init__(name)
        self.processors = processors
        self._nccl = nccl

    def memory(self, nbytes: int, allocate: Allocate | None = None) -> torch.Tensor:
        return torch.full((nbytes,), 0xEE, dtype=torch.uint8) if allocate is None else allocate(nbytes)

    def stream(self) -> SimulatedStream:  # type: ignore[override]
        return SimulatedStream(self._nccl)
