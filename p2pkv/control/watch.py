"""Failed handshakes, which libzmq keeps to itself unless a socket is watched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

HANDSHAKE_SECONDS = 10.0
"""A connection that has not shaken hands after so long is closed, on either side."""

_EVENTS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_numbers = itertools.count()


class Failure(NamedTuple):
    """One handshake that failed. `spoke`: the other side said something, and it was wrong."""

    detail: str
    spoke: bool
    refused: bool
    """By the gate of a listening socket, ours or theirs."""


class Watch:
    """Reports the failed handshakes of one socket; close it before the socket."""

    def __init__(self, watched: zmq.Socket[Any]) -> None:
        place = f"inproc://p2pkv-watch-{next(_numbers)}"
        self._watched = watched
        watched.monitor(place, _EVENTS)
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
            yield failure_of(frames)

    def close(self) -> None:
        if not self._watched.closed:
            self._watched.disable_monitor()
        self.socket.close(0)


def failure_of(frames: list[bytes]) -> Failure:
    """What one event of a watched socket says."""
    said = parse_monitor_message(frames)
    event, value = int(said["event"]), int(said["value"])
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure("not admitted", True, True)
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        if value == zmq.EAGAIN:
            return Failure("the handshake took too long", False, False)
        return Failure("the other side closed the connection in the handshake", False, False)
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Failure("one side has a secret and the other has none", True, False)
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return Failure("the two secrets differ", True, False)
    return Failure("it does not speak this protocol", True, False)


def limit_handshake(socket: zmq.Socket[Any]) -> None:
    """Before it binds or connects: no handshake on `socket` takes longer than HANDSHAKE_SECONDS."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))


def no_answer(address: object, failure: Failure, secret: bool) -> str:
    """The sentence for whoever has dialed `address` in vain, with a secret or without."""
    if failure.refused:
        return f"{address} does not admit us: is this address in its allowed_peers, and the secret the same?"
    same = "has it the same secret" if secret else "does it need a secret"
    return f"no answer from {address} ({failure.detail}): is p2pkv up there, and {same}?"
