"""Steps in which vLLM computes nothing: how long they wait for news, and how vLLM's processes wait meanwhile.

While requests wait for KV, or blocks wait for D, vLLM steps an engine that has nothing to compute over and
over: the engine core schedules nothing, the workers run nothing, and between two messages each of them spins.
Four things end that:

- `IdlePace`, in the engine core, says how long it may be until the next such step.
- `CORE`, in the engine core's process, lets it rest so long. A request ends the rest, and so does a worker
  that has news: it rings a `Bell`.
- Where the engine core cannot rest, the workers wait so long for news in the step itself, with the
  interpreter's lock released (`Worker.results`). A request that comes meanwhile waits for them.
- `SPINNING`, one in each process, makes the wait for the next message of vLLM's other process a nap while
  steps are idle, and in a worker also once no step has come for a while. It is as vLLM made it as soon as
  there is something to compute.

docs/design.md, "Idle steps", has the figures, and what we propose to vLLM.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
import socket
import threading
import time
import uuid
from functools import wraps
from typing import Any

from p2pkv.plugin import doubt, vllm_version

log = logging.getLogger("p2pkv")

FIRST_WAIT = 0.001
"""Seconds that the workers of the first idle step may wait. Each further step may wait twice as long."""

REST = 0.03
"""Seconds after which a resting engine core steps all the same. Requests and news end the rest before."""

LONGEST_NAP_MS = 4
"""Milliseconds after which a napping process looks by itself, since vLLM's wake-ups can be lost."""

STEPLESS_MS = 8
"""A worker that has waited so long for a step has nothing to compute. Between two steps of a busy engine it
waits for less; should it be longer all the same, a nap is at most an eighth of it."""


class IdlePace:
    """How long the pause of a step without tokens may be. For the engine core; no clock.

    Args:
        batches: the most steps that vLLM has under way at once (`max_concurrent_batches`).
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._empty = 0
        self._last = 0.0

    def step(
        self, first: float, longest: float, *, tokens: bool, awaited: bool, changed: bool, rung: bool = False
    ) -> float:
        """Seconds for the step that is scheduled now; 0: no pause.

        Args:
            first: seconds of the first pause; each further one is twice as long as the one before it.
            longest: seconds that no pause exceeds; 0: there is no pause at all.
            tokens: it computes something.
            awaited: the workers may have news of a transfer, now or later.
            changed: the workers hear of something new in this step, or have just had news.
            rung: a worker has news, which one of the steps that may be under way will bring.

        vLLM takes the outputs of steps in their order. So once as many steps without tokens have been
        scheduled as there may be under way, no earlier step with tokens is still out.
        """
        self._empty = 0 if tokens else 1 if rung else self._empty + 1
        if tokens or changed or rung:
            self._last = 0.0
        if self._empty < self._batches or not awaited:
            return 0.0
        self._last = min(2 * self._last or first, longest)
        return self._last


class Bell:
    """A worker's end of what wakes the resting engine core. Any thread may ring."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = ""
        """Where the engine core listens (`CoreRest.address`); "" while nobody may be resting."""

    def ring(self) -> None:
        """Does not wait. A bell that cannot be heard is no error: the engine core looks by itself."""
        if self.address:
            with contextlib.suppress(OSError):
                self._socket.sendto(b"!", self.address)

    def close(self) -> None:
        self._socket.close()


class CoreRest:
    """The engine core's rest between two idle steps, in place of the millisecond that vLLM sleeps.

    vLLM calls `EngineCoreProc._process_input_queue` before each step. For `seconds` that call waits first,
    as vLLM itself does when no request is there at all: for the next item of the input queue. That is a
    request, an abort, vLLM's own wake-up at its shutdown, or the same wake-up because a bell was rung.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """How long to rest before the next step; used up by that rest."""
        self.address = ""
        """Where bells ring: an abstract Unix socket. "" until an engine core of this process can rest."""
        self.core: Any = None
        """vLLM's EngineCoreProc of this process, once its loop runs; None elsewhere."""
        self._bells: socket.socket | None = None
        self._installed = False
        self._rung = False

    def rung(self) -> bool:
        """Whether a bell has ended the rest before this step."""
        rung, self._rung = self._rung, False
        return rung

    def install(self, rests: bool = True) -> None:
        """Know vLLM's engine core, and let it rest if `rests`: once; where it does not fit, only log that."""
        if self._installed:
            return
        try:
            from vllm.v1.engine import EngineCoreRequestType, core

            reason = self._misfit(core, EngineCoreRequestType)
            if rests and not reason:
                bells = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                bells.bind(f"\0p2pkv-{uuid.uuid4().hex}")
                self._bells = bells
        except (ImportError, OSError) as error:
            reason = str(error)
        if reason:
            log.info(
                "vLLM's engine core steps while it has nothing to compute, and its ranks do not learn when "
                "it is paused: %s",
                reason,
            )
            return
        self._installed = True
        self._replace(core, EngineCoreRequestType.WAKEUP)

    def _misfit(self, module: Any, requests: Any) -> str:
        if reason := untested():
            return reason
        take = getattr(getattr(module, "EngineCoreProc", None), "_process_input_queue", None)
        known = {"has_work", "is_running", "input_queue", "_handle_client_request"}
        if not inspect.isfunction(take) or not known <= set(take.__code__.co_names):
            return "this vLLM's engine core takes its requests in a way that p2pkv does not know"
        return "" if hasattr(requests, "WAKEUP") else "this vLLM's engine core cannot be woken"

    def _replace(self, module: Any, wake_up: Any) -> None:
        take = module.EngineCoreProc._process_input_queue

        @wraps(take)
        def rest_and_take(core: Any) -> None:
            self.core = core
            if self._bells is not None and not self.address:
                self._listen(self._bells, core.input_queue, wake_up)
            self._rest(core, wake_up)
            take(core)

        module.EngineCoreProc._process_input_queue = rest_and_take

    def _listen(self, bells: socket.socket, requests: queue.Queue[Any], wake_up: Any) -> None:
        def pass_on() -> None:
            while True:  # also after an empty datagram; it ends with the process
                bells.recv(1)
                requests.put_nowait((wake_up, None))

        threading.Thread(target=pass_on, name="p2pkv-bells", daemon=True).start()
        self.address = bells.getsockname().decode()

    def _rest(self, core: Any, wake_up: Any) -> None:
        seconds, self.seconds = self.seconds, 0.0
        if not seconds or not core.is_running():
            return
        try:
            kind, request = core.input_queue.get(timeout=seconds)
        except queue.Empty:
            return
        self._rung = kind is wake_up
        core._handle_client_request(kind, request)


CORE = CoreRest()
"""Of this process."""


class SpinWait:
    """vLLM's wait for a message between its processes, which is spinning for a second, as a nap while `idle`.

    vLLM calls `SpinCondition.wait` until the message is there. While `idle`, each call sleeps on the socket
    of vLLM's own wake-ups, for LONGEST_NAP_MS at most, instead of yielding the processor.
    """

    def __init__(self) -> None:
        self.idle = False
        """Whether the last step of this process had nothing to compute and might wait."""
        self.worker = False
        """Whether this process waits for steps only, and so has nothing to compute while none comes."""
        self._installed = False

    def install(self) -> None:
        """Put the nap in the place of the spinning, once; only a log line where it does not fit."""
        if self._installed:
            return
        try:
            from vllm.distributed.device_communicators import shm_broadcast
        except ImportError as error:
            log.info("vLLM's processes spin while they have nothing to compute: %s", error)
            return
        if reason := self._misfit(shm_broadcast):
            log.info("vLLM's processes spin while they have nothing to compute: %s", reason)
            return
        self._installed = True
        self._replace(shm_broadcast)

    def _misfit(self, module: Any) -> str:
        """Why this vLLM's wait is left alone; empty if it is the one that we know."""
        if reason := untested():
            return reason
        wait = getattr(getattr(module, "SpinCondition", None), "wait", None)
        known = ["self", "timeout_ms"]
        if not inspect.isfunction(wait) or list(inspect.signature(wait).parameters) != known:
            return "this vLLM has no SpinCondition.wait(timeout_ms)"
        if not {"last_read", "busy_loop_s", "poller"} <= set(wait.__code__.co_names):
            return "this vLLM's SpinCondition.wait waits in a way that p2pkv does not know"
        return ""

    def _replace(self, module: Any) -> None:
        spinning = module.SpinCondition.wait

        @wraps(spinning)
        def wait(condition: Any, timeout_ms: int | None = None) -> None:
            nap = self._nap(time.monotonic() - condition.last_read, condition.busy_loop_s)
            if not nap:
                spinning(condition, timeout_ms)
                return
            busy, condition.busy_loop_s = condition.busy_loop_s, -1.0
            try:
                spinning(condition, nap if timeout_ms is None else min(nap, timeout_ms))
            finally:
                condition.busy_loop_s = busy

        module.SpinCondition.wait = wait
        if getattr(module, "SPINLOOP_EXT_ENABLED", False):
            self._replace_extension(module)

    def _nap(self, waited: float, busy: float) -> int:
        """Milliseconds to sleep after so many seconds; 0: do as vLLM does, which spins for `busy` seconds."""
        if waited > busy:
            return 0
        if self.idle:
            return LONGEST_NAP_MS
        return min(int(waited * 1000) // STEPLESS_MS, LONGEST_NAP_MS) if self.worker else 0

    def _replace_extension(self, module: Any) -> None:
        """vLLM's extension in C spins before `wait` is called at all."""
        spinloop = module.spinloop

        def spin(*args: Any, **kwargs: Any) -> Any:
            return None if self.idle else spinloop(*args, **kwargs)

        module.spinloop = spin


SPINNING = SpinWait()
"""Of this process: vLLM's wait is one per process, whatever the number of connectors in it."""


def untested() -> str:
    """Why nothing of this vLLM is replaced, whatever it looks like; empty if p2pkv is tested with it."""
    installed = vllm_version() or "of unknown version"
    return (
        f"p2pkv changes only a vLLM that it is tested with, and this one is {installed}"
        if doubt(installed)
        else ""
    )
