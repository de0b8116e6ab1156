"""Asking a running rank what it holds now."""

from __future__ import annotations

import time

import zmq

from p2pkv.control.members import Members
from p2pkv.control.watch import Watch, no_answer
from p2pkv.pairing import Address
from p2pkv.protocol.messages import MAX_MESSAGE_BYTES, AnyMessage, Inspect, Report, decode, encode


def inspect(
    address: Address, seconds: float = 2.0, members: Members | None = None
) -> dict[str, int | float | str]:
    """Counters and gauges of the rank that listens at `address`; `members` if it has a secret.

    Raises TimeoutError with a sentence if no rank of p2pkv answers in time or the secrets differ,
    BadMessage if what answers is something else.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        if members is not None:
            members.join(socket, "rank")
        watch = Watch(socket, dials=True)
        try:
            answer = _ask(socket, watch, address, seconds, members is not None)
        finally:
            watch.close()
    if not isinstance(answer, Report):
        raise TimeoutError(f"{address} answered {type(answer).__name__}, which is no report")
    return answer.values


def _ask(
    socket: zmq.Socket[bytes], watch: Watch, address: Address, seconds: float, secret: bool
) -> AnyMessage:
    socket.connect(f"tcp://{address}")
    socket.send(encode(Inspect()))
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(watch.socket, zmq.POLLIN)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready = dict(poller.poll(int(left * 1000) + 1))
        if socket in ready:
            return decode(socket.recv())
        for failure in watch.failures():
            raise TimeoutError(no_answer(address, failure, secret))
    raise TimeoutError(
        f"nothing at {address} answered in {seconds:g} s: is an instance running there, with this kv_port "
        "plus the rank?"
    )
