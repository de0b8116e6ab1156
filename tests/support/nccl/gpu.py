"""What streams share on a real GPU: hardware queues and multiprocessors (SMs).

The rules, and where each comes from ("CUDA": CUDA Programming Guide 13; "Guide": NCCL's User Guide 2.30, in
docs/userguide/source of NVIDIA/nccl):

- Streams are mapped onto a few hardware queues, `CUDA_DEVICE_MAX_CONNECTIONS` of them, 8 by default. Work of
  different streams that maps to one queue gets a *false dependency* (CUDA, 5.2.3.2). So no stream is sure to
  progress beside another (NCCL's maintainers in NVIDIA/nccl issues 522 and 783). How CUDA chooses a stream's
  queue is not documented: here it is in turn.
- A queue is first in, first out. Its head leaves it when what its stream holds before it is done, what was
  before it in the queue has left, and there is room for its blocks. Until then everything behind it waits, of
  whatever stream: NVIDIA's webinar "CUDA C/C++ Streams and Concurrency", "Stream Scheduling", of Fermi's
  single queue. Since Kepler there are several (the sample simpleHyperQ in NVIDIA/cuda-samples); that each of
  them works as the single one did is an assumption.
- What has left the queue runs beside others, and so does the record of an event behind it: with one queue
  kernels are scheduled in the order of the calls, and overlap all the same (Megatron-LM,
  core/tensor_parallel/layers.py, `linear_with_grad_accumulation_and_async_allreduce`).
- NCCL's kernel has a CUDA block for each channel (Guide, env, "NCCL_MAX_NCHANNELS"), and spins until the peer
  runs its part (`waitPeer` in device/prims_simple.h, until `checkAbort` sees an abort). That such a block has
  an SM for itself is an assumption: blocks of other kernels may fit beside it.
- A collective needs all ranks' kernels on their devices at once: communicators whose order differs between
  devices may deadlock (Guide, usage/communicators, "Using multiple NCCL communicators concurrently").

Not simulated: a launch queue that is full, in which the host waits, too (NVIDIA/nccl issue 1766).
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

QUEUES = 8
PROCESSORS = 132
"""Of an H100 SXM5."""


@dataclass(eq=False)
class Work:
    """One kernel. `begin` is called when its blocks run; it is done when `SimulatedGpu.finish` is called."""

    stream: int
    processors: int
    begin: "Callable[[Work], None]"
    running: bool = False
    done: bool = False


@dataclass
class SimulatedGpu:
    """One device: streams are given queues in turn as they appear. Safe in threads."""

    queues: int = QUEUES
    processors: int = PROCESSORS
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.processors
        self._changed = threading.Condition(threading.RLock())
        self._lines: list[deque[Work]] = [deque() for _ in range(self.queues)]
        self._numbers: dict[int, int] = {}
        self._streams: dict[int, deque[Work]] = {}
        self._dispatching = False

    @property
    def occupied(self) -> int:
        """Multiprocessors that hold a kernel."""
        return self.processors - self.free

    @property
    def launched(self) -> int:
        with self._changed:
            return sum(map(len, self._streams.values()))

    def submit(self, stream: int, processors: int, begin: Callable[[Work], None]) -> Work:
        work = Work(stream, processors, begin)
        with self._changed:
            line = self._lines[self._numbers.setdefault(stream, len(self._numbers)) % self.queues]
            line.append(work)
            self._streams.setdefault(stream, deque()).append(work)
            self._dispatch()
        return work

    def finish(self, work: Work) -> None:
        with self._changed:
            if work.done:
                return
            work.done = True
            self.free += work.processors if work.running else 0
            self._streams[work.stream].remove(work)
            for line in self._lines:
                if work in line:
                    line.remove(work)
            self._dispatch()
            self._changed.notify_all()

    def clear(self, stream: int) -> None:
        """All of a stream's work ends, as when NCCL's abort flag stops its kernels (`checkAbort`)."""
        with self._changed:
            for work in list(self._streams.get(stream, ())):
                self.finish(work)

    def wait(self, work: Work, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: work.done, seconds)

    def _dispatch(self) -> None:
        if self._dispatching:  # `begin` may finish what it began
            return
        self._dispatching = True
        try:
            while any(self._advance(line) for line in self._lines):
                pass
        finally:
            self._dispatching = False

    def _advance(self, line: deque[Work]) -> bool:
        if not line:
            return False
        head = line[0]
        if self._streams[head.stream][0] is not head or head.processors > self.free:
            return False
        line.popleft()
        head.running = True
        self.free -= head.processors
        head.begin(head)
        return True


class Model:
    """vLLM's work on the devices of one engine: forward kernels, and an all-reduce over its ranks. `step`
    launches one step on each rank, as vLLM does without waiting for the device. How many multiprocessors a
    kernel takes is an assumption."""

    STREAM = 7  # one for each device: the numbers of two devices have nothing to do with each other
    ALL_REDUCE_SMS = 24

    def __init__(self, gpus: list[SimulatedGpu]) -> None:
        self._gpus = gpus
        self._lock = threading.Lock()
        for gpu in gpus:
            gpu.submit(self.STREAM, 1, gpu.finish)

    def step(self) -> list[Work]:
        """A kernel, an all-reduce and a kernel on every rank; the last one of each."""
        met: list[tuple[SimulatedGpu, Work]] = []

        def arrive(gpu: SimulatedGpu, work: Work) -> None:
            with self._lock:
                met.append((gpu, work))
                last = len(met) == len(self._gpus)
            if last:
                # From a thread of its own: two devices' locks are never held together.
                threading.Thread(target=lambda: [each.finish(it) for each, it in met], daemon=True).start()

        ends = []
        for gpu in self._gpus:
            gpu.submit(self.STREAM, gpu.processors // 2, gpu.finish)
            gpu.submit(self.STREAM, self.ALL_REDUCE_SMS, partial(arrive, gpu))
            ends.append(gpu.submit(self.STREAM, gpu.processors // 2, gpu.finish))
        return ends

    def runs(self, seconds: float) -> bool:
        return all(gpu.wait(end, seconds) for gpu, end in zip(self._gpus, self.step(), strict=True))
