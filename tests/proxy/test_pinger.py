"""The pinger thread against a real ROUTER, present, absent and late."""

from __future__ import annotations

import contextlib
import socket as socket_module
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from proxy_fakes import pinging

from p2pkv.control.discovery import Ping, decode_ping, encode_partners, encode_ping, goodbye
from p2pkv.control.pinger import Pinger
from support.waiting import wait_for

PING = Ping(type="P", http_address="127.0.0.1:8100", zmq_address="127.0.0.1:21001", incarnation="one")


@contextlib.contextmanager
def router(endpoint: str = "tcp://127.0.0.1:*") -> Iterator[tuple[zmq.Socket[bytes], str]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.bind(endpoint)
        yield socket, socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "p2pkv-pinger"]


def test_what_closes_connections_before_a_proxy_that_was_there_is_not_dialed_without_pause() -> None:
    """As a forwarder does whose proxy is away. Nothing shows that none will come: a second's look."""
    with router() as (socket, address):
        pinger = Pinger(address, PING, 0.05)
        pinger.start()
        assert decode_ping(socket.recv_multipart()[1]) == PING
    host, port = address.split(":")
    try:
        with socket_module.create_server((host, int(port))) as forwarder:
            forwarder.settimeout(5.0)
            forwarder.accept()[0].close()
            came, end = 1, time.monotonic() + 1.0
            while (left := end - time.monotonic()) > 0:
                forwarder.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    forwarder.accept()[0].close()
                    came += 1
    finally:
        pinger.stop()
    assert came < 5


@pytest.mark.parametrize("there", [False, True])
def test_a_stop_while_it_waits_or_before_it_starts_is_quick(there: bool) -> None:
    Pinger("127.0.0.1:9", PING).stop()
    with router() as (socket, address):
        if not there:
            socket.close()
        with pinging(address, PING, 60.0) as pinger:
            if there:
                socket.recv_multipart()
            begin = time.monotonic()
            pinger.stop()
            assert time.monotonic() - begin < 2.0
            assert threads() == []
            pinger.stop()  # again: no harm
            if there:
                assert decode_ping(socket.recv_multipart()[1]) == goodbye(PING)


def test_what_a_proxy_answers_is_ignored() -> None:
    with router() as (socket, address), pinging(address, PING):
        peer, _ = socket.recv_multipart()
        for _ in range(20):
            socket.send_multipart([peer, b"x" * 5000])
            socket.send_multipart([peer, b"hello"])
        # A reply too long costs the connection, so the pings go on under a new identity.
        for _ in range(3):
            assert decode_ping(socket.recv_multipart()[1]) == PING


def test_what_a_proxy_answers_a_d_that_asked() -> None:
    heard: list[tuple[str, ...]] = []
    ping = msgspec.structs.replace(PING, type="D", partners=4)
    with router() as (socket, address), pinging(address, ping, on_partners=heard.append):
        peer, _ = socket.recv_multipart()
        noise = (b"", b"hello", encode_ping(PING))
        for frame in (*noise, encode_partners(["a:1"]), *noise, encode_partners(["a:1", "b:2"])):
            socket.send_multipart([peer, frame])
        socket.send_multipart([peer, encode_partners(["c:3"]), b"and another frame"])
        wait_for(lambda: len(heard) == 3, what="the answers")
        for _ in range(3):
            assert decode_ping(socket.recv_multipart()[1]) == ping
    assert heard == [("a:1",), ("a:1", "b:2"), ("c:3",)]


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "127.0.0.1:x"])
def test_what_cannot_be_pinged_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Pinger(address, PING)
