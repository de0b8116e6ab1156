"""Steps in which vLLM computes nothing: how long they wait for events of transfers, and how vLLM's
processes wait meanwhile.

docs/design.md, "Idle steps", has the whole.
"""

from __future__ import annotations

import contextlib
import socket

FIRST_WAIT = 0.001
"""Seconds that the workers of the first idle step may wait. Each further step may wait twice as long."""

IDLE_SLEEP = 0.03
"""Seconds after which a sleeping engine core steps all the same. Requests and events wake it before."""

PREFETCHED_WAIT = 0.002
"""Seconds that a step may wait that computes nothing and loads KV that is on D already: another step would
take about as long."""

MAX_SLEEP_MS = 4
"""Milliseconds after which a sleeping process looks by itself, since vLLM's wake-ups can be lost."""

STEPLESS_MS = 8
"""A worker that has waited so long for a step has nothing to compute. Between two steps of a busy engine it
waits for less; should it be longer all the same, a sleep is at most an eighth of it."""


class IdleBackoff:
    """How long the pause of a step without tokens may be. For the engine core; no clock."""

    def __init__(self, batches: int) -> None:
        """`batches`: the most steps that vLLM has under way at once (`max_concurrent_batches`)."""
        self._batches = batches
        self._empty = 0
        self._last = 0.0

    @property
    def no_tokens_in_flight(self) -> bool:
        """Whether no step with tokens is out, the latest included."""
        return self._empty >= self._batches

    def step(
        self, first: float, longest: float, *, tokens: bool, awaited: bool, changed: bool, woken: bool = False
    ) -> float:
        """Seconds for the step that is scheduled now; 0: no pause.

        Args:
            first: seconds of the first pause; each further one is twice as long as the one before it.
            longest: seconds that no pause exceeds; 0: there is no pause at all.
            tokens: it computes something.
            awaited: the workers may have an event of a transfer, now or later.
            changed: this step brings the workers something new, or they have just had an event.
            woken: a worker has an event, which one of the steps that may be under way will bring.

        vLLM takes the outputs of steps in their order. So once as many steps without tokens have been
        scheduled as there may be under way, no earlier step with tokens is still out.
        """
        self._empty = 0 if tokens else 1 if woken else self._empty + 1
        if tokens or changed or woken:
            self._last = 0.0
        if self._empty < self._batches or not awaited:
            return 0.0
        self._last = min(2 * self._last or first, longest)
        return self._last


class WakeupSender:
    """A worker's end of what wakes the sleeping engine core. For any thread."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = ""
        """Where the engine core listens (`vllm_patches.EngineCore.address`); "" while it does not sleep."""

    def send(self) -> None:
        """Does not wait. A failure is no error: the engine core wakes by itself after IDLE_SLEEP."""
        if self.address:
            with contextlib.suppress(OSError):
                self._socket.sendto(b"!", self.address)

    def close(self) -> None:
        self._socket.close()
