"""Steps in which vLLM computes nothing: how long they wait for events of transfers, and how vLLM's
processes wait meanwhile.

docs/design.md, "Idle steps", has the whole.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, encode

from p2pkv.engine.commands import Event, Kept, Loaded

FIRST_WAIT = 0.001
"""Seconds that the workers of the first idle step may wait. Each further step may wait twice as long."""

IDLE_SLEEP = 0.03
"""Seconds after which a sleeping engine core steps all the same. Requests and events wake it before."""

VLLM_REST = 0.001
"""Seconds for which vLLM's engine core sleeps after each step that computes nothing."""

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


MAX_SAID = 1024
"""Bytes."""


class Said(Struct, frozen=True, array_like=True):
    """What a bell may say: this rank has all of the load of that number, which the engine core has given it,
    or (0) of a prompt that waits here for its request: `commands.Kept`."""

    rank: int
    ranks: int
    number: int
    key: str
    tokens: int = 0
    digest: bytes = b""


_said = Decoder(Said)
_CREDENTIALS = struct.Struct("iII")
"""Of the sender, as the kernel fills them in: process, user, group."""


def hears(bells: socket.socket) -> None:
    """Make a socket one for `heard`. Raises OSError."""
    bells.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def heard(bells: socket.socket) -> Said | None:
    """Wait for a bell to ring; what it says, if it says something, and is a process of our user's."""
    data, ancillary, _, _ = bells.recvmsg(MAX_SAID, socket.CMSG_SPACE(_CREDENTIALS.size))
    users = [_CREDENTIALS.unpack(each)[1] for _, kind, each in ancillary if kind == socket.SCM_CREDENTIALS]
    if not data or users != [os.getuid()]:
        return None
    try:
        return _said.decode(data)
    except MsgspecError:
        return None


class WakeupSender:
    """A worker's end of what wakes the resting engine core. Any thread may ring.

    A load that has ended is also said, and the engine core need not learn of it by a step. The step's result
    reports it all the same, as a bell may not be heard.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        self.resting = True
        """Whether the engine core may rest, so that it must be woken for any other news."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = ""
        """Where the engine core listens (`vllm_patches.EngineCore.address`); "" while it does not sleep."""

    def send(self, event: Event) -> None:
        """Does not wait. A failure is no error: the engine core wakes by itself after IDLE_SLEEP."""
        said = b""
        if isinstance(event, Loaded) and event.number:
            said = encode(Said(self._rank, self._ranks, event.number, ""))
        elif isinstance(event, Kept):
            said = encode(Said(self._rank, self._ranks, 0, event.key, event.tokens, event.digest))
        if self.address and (said or self.resting) and len(said) <= MAX_SAID:
            with contextlib.suppress(OSError):
                self._socket.sendto(said, self.address)

    def close(self) -> None:
        self._socket.close()
