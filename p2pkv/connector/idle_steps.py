"""Steps in which vLLM computes nothing: how long they, and vLLM's processes, wait for transfers.

docs/design.md, "Idle steps", has the whole.
"""

import contextlib
import os
import socket
import time

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, encode

from p2pkv.connector.core_beats import receive_from
from p2pkv.engine.commands import Event, Loaded, PrefetchComplete

FIRST_WAIT = 0.001
"""Seconds that the workers of the first idle step may wait. Each further step may wait twice as long."""

IDLE_SLEEP = 0.03
"""Seconds after which a sleeping engine core steps all the same. Requests and events wake it before."""

VLLM_IDLE_SLEEP = 0.001
"""Seconds for which vLLM's engine core sleeps after each step that computes nothing."""

MAX_SLEEP_MS = 4
"""Milliseconds after which a sleeping process looks by itself, since vLLM's wake-ups can be lost."""

STEPLESS_MS = 8
"""A worker that has waited so long for a step has nothing to compute. Between two steps of a busy engine it
waits for less; should it be longer all the same, a sleep is at most an eighth of it."""

NAP_SECONDS = 0.00002
"""Between two looks for a message where vLLM's processes shall not spin (`spin`). Linux adds up to 50 us."""


class IdleBackoff:
    """How long the pause of a step without tokens may be. For the engine core; no clock."""

    def __init__(self, batches: int) -> None:
        """`batches`: the most steps that vLLM has under way at once (`max_concurrent_batches`)."""
        self._batches = batches
        self._empty = 0
        self._last = 0.0

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


MAX_WAKEUP = 1024
"""Bytes of a message."""


class WakeupMessage(Struct, frozen=True, array_like=True):
    """What a wake-up may carry: this rank has all KV of the load to which the engine core has given that
    `number`; 0: of a prompt that waits here for its request (`commands.PrefetchComplete`)."""

    rank: int
    ranks: int
    number: int
    key: str
    tokens: int = 0
    digest: bytes = b""


_decoder = Decoder(WakeupMessage)


def receive_wakeup(wakeups: socket.socket) -> WakeupMessage | None:
    """Wait for a wake-up of a process of our user; what it carries, if anything."""
    while (received := receive_from(wakeups, MAX_WAKEUP))[2] != os.getuid():
        time.sleep(VLLM_IDLE_SLEEP)  # strangers could keep the interpreter's lock busy
    try:
        return _decoder.decode(received[0])
    except MsgspecError:
        return None


class WakeupSender:
    """A worker's end of what wakes the sleeping engine core. Any thread may send.

    A wake-up also tells of a load that has ended, so that the engine core need not learn of it by a step. The
    step's result reports it all the same, as a wake-up may be lost.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self.needed = True
        """Whether the engine core may sleep, so that any event has to wake it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = ""
        """Where the engine core listens (`vllm_patches.EngineCore.address`); "" while it does not sleep."""

    def send(self, event: Event) -> None:
        """Does not wait. A failure is no error: the engine core wakes by itself after IDLE_SLEEP."""
        message = b""
        if isinstance(event, Loaded) and event.number:
            message = encode(WakeupMessage(self._rank, self._ranks, event.number, ""))
        elif isinstance(event, PrefetchComplete):
            message = encode(WakeupMessage(self._rank, self._ranks, 0, event.key, event.tokens, event.digest))
        if self.address and (message or self.needed) and len(message) <= MAX_WAKEUP:
            with contextlib.suppress(OSError):
                self._socket.sendto(message, self.address)

    def close(self) -> None:
        self._socket.close()
