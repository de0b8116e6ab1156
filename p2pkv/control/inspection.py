"""Asking a running rank what it holds now."""

from __future__ import annotations

import zmq

from p2pkv.pairing import Address
from p2pkv.protocol.messages import MAX_MESSAGE_BYTES, Inspect, Report, decode, encode


def inspect(address: Address, seconds: float = 2.0) -> dict[str, int | float | str]:
    """Counters and gauges of the rank that listens at `address`.

    Raises TimeoutError with a sentence if no rank of p2pkv answers in time, BadMessage if what
    answers is something else.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.connect(f"tcp://{address}")
        socket.send(encode(Inspect()))
        if not socket.poll(int(seconds * 1000)):
            raise TimeoutError(
                f"nothing at {address} answered in {seconds:g} s: is an instance running there, with this "
                "kv_port plus the rank?"
            )
        answer = decode(socket.recv())
    if not isinstance(answer, Report):
        raise TimeoutError(f"{address} answered {type(answer).__name__}, which is no report")
    return answer.values
