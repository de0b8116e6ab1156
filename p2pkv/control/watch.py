"""Failed handshakes, which libzmq keeps to itself unless a socket is watched."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

HANDSHAKE_SECONDS = 10.0
"""A connection to a proxy that has not shaken hands after so long is closed; ranks wait for a lease."""

_LONGEST_HANDSHAKE = 86_400.0

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_COURSE = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_numbers = itertools.count()


class Failure(NamedTuple):
    """One handshake that failed, or, of a socket that dials, one connection that has ended."""

    detail: str
    spoke: bool = True
    """Whether the other side has said something wrong, and not just gone."""
    refused: bool = False
    """By the gate of a listening socket, ours or theirs."""
    lost: bool = False
    """The handshake had succeeded; the connection has ended since."""
    late: bool = False
    """The other side has not finished the handshake in time: nothing is known of it."""

    @property
    def gone(self) -> bool:
        """Nobody has said anything."""
        return not (self.spoke or self.refused)


class Watch:
    """Reports the failed handshakes of one socket, and with `dials` the end of its one connection.

    Close it before the socket.

    Attributes:
        connected: when the other side's kernel has let the socket in that dials; None before.
        proven: its handshake has succeeded.
    """

    def __init__(self, watched: zmq.Socket[Any], *, dials: bool = False) -> None:
        place = f"inproc://p2pkv-watch-{next(_numbers)}"
        self._watched = watched
        self.connected: float | None = None
        self.proven = False
        watched.monitor(place, _FAILED | _COURSE if dials else _FAILED)
        self.socket: zmq.Socket[Any] = watched.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Without a limit: libzmq's IO thread would wait for room, and the close for the IO thread.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(place)

    def failures(self) -> Iterator[Failure]:
        """Those since the last call, without waiting."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event, value = event_of(frames)
            if event == zmq.EVENT_CONNECTED:
                self.connected = time.monotonic()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.proven = True
            elif event == zmq.EVENT_DISCONNECTED:
                # Some kinds of garbage end a connection without any other event.
                yield Failure("it does not speak this protocol", lost=self.proven)
            else:
                yield failure_of(event, value)

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        self.socket.close(0)


def event_of(frames: list[bytes]) -> tuple[int, int]:
    """What libzmq says of a watched socket: an event and its value."""
    said = parse_monitor_message(frames)
    return int(said["event"]), int(said["value"])


def failure_of(event: int, value: int) -> Failure:
    """What a failed handshake failed of."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure("not admitted", refused=True)
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        if value == zmq.EAGAIN:
            return Failure("the handshake took too long", spoke=False, late=True)
        return Failure("the other side closed the connection in the handshake", spoke=False)
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Failure("one side has a secret and the other has none")
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return Failure("the two secrets differ")
    return Failure("it does not speak this protocol")


def limit_handshake(socket: zmq.Socket[Any], seconds: float | None = None) -> None:
    """Before it binds or connects: no handshake on `socket` takes longer, by default HANDSHAKE_SECONDS."""
    limit = min(HANDSHAKE_SECONDS if seconds is None else seconds, _LONGEST_HANDSHAKE)
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(limit * 1000)))


def no_answer(address: object, failure: Failure, secret: bool) -> str:
    """The sentence for whoever has dialed `address` in vain, with a secret or without."""
    if failure.refused:
        return f"{address} refused us: is this address in its allowed_peers, and the secret the same?"
    if failure.late:
        return f"{address} did not answer in time: {failure.detail}; is its process frozen or overloaded?"
    same = "has it the same secret" if secret else "does it need a secret"
    return f"{address} refused the handshake ({failure.detail}): is p2pkv up there, and {same}?"
