"""Dialed lines: shut when the other side is none of ours, dialed again when told to."""

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import zmq

from p2pkv.control import endpoint as module
from p2pkv.control.endpoint import Connection, ConnectionFailure, Endpoint
from p2pkv.control.security import Members
from p2pkv.demo.processes import free_ports
from p2pkv.pairing import Address
from support.hostile import HUGE_FRAME, NULL_READY, RAW, ZMTP_3_NULL, Canary

DEADLINE = 10.0


@contextlib.contextmanager
def opened(*more: Any, place: Address | None = None, **options: Any) -> Iterator[Endpoint]:
    made = Endpoint(place or Address("127.0.0.1", free_ports()), *more, **options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with opened() as made:
        yield made


def shut(endpoint: Endpoint, connection: Connection) -> list[ConnectionFailure]:
    end, said = time.monotonic() + DEADLINE, []
    while not connection.shut:
        assert time.monotonic() < end, "the line is still open"
        endpoint.wait(0.05)
        said += endpoint.failures()
    return said


def reach(endpoint: Endpoint, connection: Connection, place: Address) -> None:
    """Listen there until something has come over the connection, and no longer."""
    with opened(place=place) as other:
        reached(endpoint, connection, other)


def reached(endpoint: Endpoint, connection: Connection, other: Endpoint) -> None:
    end = time.monotonic() + DEADLINE
    while not list(other.receive()):
        assert time.monotonic() < end
        connection.send(b"hello")
        endpoint.wait(0.02)
        other.wait(0.02)


@pytest.mark.parametrize("kind", ["http", "TLS", "zeros"])
def test_what_speaks_another_protocol_is_said_and_left_alone(kind: str) -> None:
    with opened(Members(b"a secret of the tests")) as member, Canary(RAW[kind]) as canary:
        connection = member.dial(canary.address)
        (failure,) = shut(member, connection)
        assert (
            failure.connection is connection and f"{canary.address} refused the handshake" in failure.reason
        )
        assert not connection.send(b"x")
        member.redial(connection)
        assert not connection.shut
        shut(member, connection)
        assert len(canary.heard) == 2


def test_a_wait_below_a_millisecond_is_no_longer(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poller counts in milliseconds, and would sleep ten times as long."""
    waited: list[float] = []
    asked: list[int] = []
    monkeypatch.setattr(module.ShortWait, "wait", lambda short, seconds: waited.append(seconds))
    monkeypatch.setattr(zmq.Poller, "poll", lambda poller, timeout: asked.append(timeout) or [])
    for seconds in (0.0, 0.0001, 0.001, 0.25):
        endpoint.wait(seconds)
    assert (waited, asked) == ([0.0001], [0, 0, 0, 1, 250])


def joined(first: Endpoint, second: Endpoint) -> Connection:
    connection = second.dial(first._address)
    reached(second, connection, first)
    return connection


def test_a_message_ends_a_short_wait(endpoint: Endpoint) -> None:
    with opened() as other:
        connection = joined(endpoint, other)
        for number in range(50):
            assert connection.send(b"%d" % number)
            assert heard(endpoint, 1, 0.0009) == [b"%d" % number]


def test_messages_that_are_held_go_out_together_and_in_order(endpoint: Endpoint) -> None:
    with opened() as other:
        connection = joined(endpoint, other)
        assert connection.hold(b"at once")
        assert heard(endpoint, 1) == [b"at once"]
        connection.takes_several(True)
        assert connection.hold(b"1") and connection.hold(b"2")
        endpoint.wait(0.05)
        assert list(endpoint.receive()) == []
        assert connection.send(b"3") and connection.flush()
        endpoint.wait(DEADLINE)
        assert [data for _, data in endpoint.receive()] == [b"1", b"2", b"3"], "they came together"
        many = [b"%d" % number for number in range(3 * module.MAX_TOGETHER)]
        held = [connection.hold(each) for each in many]
        assert all(held) and connection.flush()
        assert heard(endpoint, len(many)) == many
        assert connection.hold(b"lost")
        other.hang_up(connection)
        assert connection.flush() and not connection.hold(b"x") and not connection.send(b"x")


def heard(endpoint: Endpoint, count: int, pause: float = 0.05) -> list[bytes]:
    found, end = list[bytes](), time.monotonic() + DEADLINE
    while len(found) < count:
        assert time.monotonic() < end, f"only {len(found)} of {count} messages came"
        endpoint.wait(pause)
        found += [data for _, data in endpoint.receive()]
    return found


def test_a_connection_that_breaks_the_protocol_later_can_be_dialed_again(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq itself would never come back to it."""
    monkeypatch.setattr(module, "LASTING", math.inf)
    with Canary(ZMTP_3_NULL + NULL_READY, after=HUGE_FRAME) as canary:
        connection = endpoint.dial(canary.address)
        assert shut(endpoint, connection) == []  # an end like any other, and too soon to dial again at once
        endpoint.redial(connection)
        shut(endpoint, connection)
        assert len(canary.heard) == 2


def test_a_connection_that_lasted_is_dialed_anew(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LASTING", 0.0)
    with Canary(ZMTP_3_NULL + NULL_READY, after=HUGE_FRAME) as canary:
        connection, end = endpoint.dial(canary.address), time.monotonic() + DEADLINE
        while len(canary.heard) < 3:
            assert time.monotonic() < end and list(endpoint.failures()) == []
            endpoint.wait(0.05)
        endpoint.hang_up(connection)
        assert connection.shut


@pytest.mark.parametrize("long_ago", [False, True])
def test_a_peer_that_closes_connections_while_it_restarts_is_not_given_up(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch, long_ago: bool
) -> None:
    if long_ago:
        monkeypatch.setattr(module, "RESTARTING", -1.0)
    place = Address("127.0.0.1", free_ports())
    connection = endpoint.dial(place)
    reach(endpoint, connection, place)
    shut(endpoint, connection)
    with socket.create_server((place.host, place.port)) as dying:
        for _ in range(3):
            endpoint.redial(connection)
            endpoint.wait(0.0)
            dying.accept()[0].close()
            failures = shut(endpoint, connection)
            assert len(failures) == long_ago
    endpoint.redial(connection)
    reach(endpoint, connection, place)


def test_who_answers_late_is_not_refused_and_can_be_dialed_again() -> None:
    with opened(patience=0.3) as made, Canary() as silent:
        connection = made.dial(silent.address)
        for number in (1, 2):
            (failure,) = shut(made, connection)
            assert failure.late and failure.connection is connection
            assert f"{silent.address} did not answer in time" in failure.reason
            assert len(silent.heard) == number
            made.redial(connection)


def test_who_waits_for_its_own_thread_and_then_closes_has_not_refused() -> None:
    """A busy peer whose lease is shorter than ours."""
    with opened(patience=1.0) as made, socket.create_server(("127.0.0.1", 0)) as busy:
        connection = made.dial(Address("127.0.0.1", busy.getsockname()[1]))
        accepted, _ = busy.accept()
        end = time.monotonic() + 0.7
        while time.monotonic() < end or not connection.reached:
            made.wait(0.05)
        accepted.close()
        (failure,) = shut(made, connection)
        assert failure.late and "did not answer in time" in failure.reason


def test_a_stranger_that_closes_a_connection_is_given_up(endpoint: Endpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        connection = endpoint.dial(Address("127.0.0.1", stranger.getsockname()[1]))
        stranger.accept()[0].close()
        (failure,) = shut(endpoint, connection)
        assert "closed the connection in the handshake" in failure.reason


def test_a_host_that_vanishes_is_noticed_by_the_kernel(endpoint: Endpoint) -> None:
    """It probes an idle connection from both ends, and the first time after a minute, not two hours."""
    place = Address("127.0.0.1", free_ports())
    connection = endpoint.dial(place)
    with opened(place=place) as other:
        reached(endpoint, connection, other)
        ends = [
            each.fd
            for each in psutil.Process().net_connections("tcp")
            if each.status == psutil.CONN_ESTABLISHED and place.port in (each.laddr.port, each.raddr.port)
        ]
        assert len(ends) == 2
        for fd in ends:
            with socket.socket(fileno=os.dup(fd)) as seen:
                assert seen.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert seen.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


def test_a_host_that_drops_packets_is_dialed_anew() -> None:
    """Linux doubles the pause between two SYNs up to a minute, for which a host that is back would wait."""
    with opened(patience=0.3) as made, socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(full.getsockname()):  # there is no room for another
            made.dial(Address(*full.getsockname()))
            asked, end = set[int](), time.monotonic() + DEADLINE
            while len(asked) < 2:
                assert time.monotonic() < end
                made.wait(0.05)
                ends = psutil.Process().net_connections("tcp")
                asked |= {each.laddr.port for each in ends if each.status == psutil.CONN_SYN_SENT}


def test_lines_that_are_lost_together_do_not_come_back_together(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], zmq.Socket.connect

    def connect(socket: zmq.Socket[bytes], address: str) -> None:
        made.append((socket.getsockopt(zmq.RECONNECT_IVL), socket.getsockopt(zmq.RECONNECT_IVL_MAX)))
        real(socket, address)

    monkeypatch.setattr(zmq.Socket, "connect", connect)
    for _ in range(12):
        endpoint.dial(Address("127.0.0.1", 9))
    pauses = [(first, last) for first, last in made if last]
    assert len(set(pauses)) > 6
    assert all(0 < first <= 30 and 500 < last <= 1000 for first, last in pauses)


def test_a_slow_name_server_holds_up_no_numeric_address(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq looks a name up in the thread that serves the connection."""
    threads, real = dict[str, int](), zmq.Socket.connect

    def connect(socket: zmq.Socket[bytes], address: str) -> None:
        threads[address] = socket.getsockopt(zmq.AFFINITY)
        real(socket, address)

    monkeypatch.setattr(zmq.Socket, "connect", connect)
    for host in ("127.0.0.1", "::1", "localhost.invalid"):
        endpoint.dial(Address(host, 9))
    assert threads["tcp://127.0.0.1:9"] == threads["tcp://[::1]:9"] == 1
    assert threads["tcp://localhost.invalid:9"] & 1 == 0 < threads["tcp://localhost.invalid:9"]


@pytest.mark.parametrize(("failure", "six"), [(None, 0), (socket.EAI_NONAME, 1), (socket.EAI_AGAIN, 0)])
def test_a_proxys_name_is_looked_up_as_ipv6_where_it_has_no_ipv4_address(
    monkeypatch: pytest.MonkeyPatch, failure: int | None, six: int
) -> None:
    """And a host that has vanished is given up while the new one behind its name is needed."""
    found = Mock(side_effect=[["an address"] if failure is None else socket.gaierror(failure, "none")])
    monkeypatch.setattr(module, "getaddrinfo", found)
    with opened(dials="proxy") as endpoint:
        dialed = endpoint.dial(Address(f"proxy-{six}{failure or ''}", 9))
        assert dialed._socket is not None and dialed._socket.getsockopt(zmq.IPV6) == six
        assert 0 < dialed._socket.getsockopt(zmq.TCP_MAXRT) <= 10_000
