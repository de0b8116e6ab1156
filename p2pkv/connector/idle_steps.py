"""Steps in which vLLM computes nothing: how long they wait for news, and how vLLM's processes wait meanwhile.

While requests wait for KV, or blocks wait for D, vLLM steps an engine that has nothing to compute over and
over: the engine core schedules nothing, the workers run nothing, and between two messages each of them spins.
Two things end that:

- `IdlePace`, in the engine core, says how long the workers may wait in such a step. They wait with the
  interpreter's lock released and return as soon as there is news (`Worker.results`).
- `SPINNING`, one in each process, makes the wait for the next message of vLLM's other process a nap while
  steps are idle, and in a worker also once no step has come for a while. It is as vLLM made it as soon as
  there is something to compute.

docs/design.md, "Idle steps", has the figures, and what we propose to vLLM.
"""

from __future__ import annotations

import inspect
import logging
import time
from functools import wraps
from typing import Any

from p2pkv.plugin import doubt, vllm_version

log = logging.getLogger("p2pkv")

FIRST_WAIT = 0.001
"""Seconds that the first idle step may wait. Each further one may wait twice as long, up to the bound."""

LONGEST_NAP_MS = 4
"""Milliseconds after which a napping process looks by itself, since vLLM's wake-ups can be lost."""

STEPLESS_MS = 8
"""A worker that has waited so long for a step has nothing to compute. Between two steps of a busy engine it
waits for less; should it be longer all the same, a nap is at most an eighth of it."""


class IdlePace:
    """How long the workers may wait for news in a step without tokens. For the engine core; no clock.

    Args:
        bound: seconds that a request which arrives in such steps may wait for them; 0: never wait.
        batches: the most steps that vLLM has under way at once (`max_concurrent_batches`).
    """

    def __init__(self, bound: float, batches: int) -> None:
        self._batches = batches
        self._longest = bound / batches
        self._empty = 0
        self._next = FIRST_WAIT

    def step(self, *, tokens: bool, awaited: bool, changed: bool) -> float:
        """Seconds for the step that is scheduled now; 0: it must not wait.

        Args:
            tokens: it computes something.
            awaited: the workers may have news of a transfer, now or later.
            changed: the workers hear of something new in this step, or have just had news.

        vLLM takes the outputs of steps in their order. So once as many steps without tokens have been
        scheduled as there may be under way, no earlier step with tokens is still out.
        """
        self._empty = 0 if tokens else self._empty + 1
        if tokens or changed:
            self._next = FIRST_WAIT
        if self._empty < self._batches or not awaited:
            return 0.0
        wait = min(self._next, self._longest)
        self._next = min(2 * self._next, self._longest)
        return wait


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
        installed = vllm_version() or "of unknown version"
        if doubt(installed):
            return f"p2pkv lets them nap in a vLLM that it is tested with, and this one is {installed}"
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
