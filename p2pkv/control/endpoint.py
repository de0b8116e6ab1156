"""The control plane of one process: one socket that listens, one for each peer that it dials.

A Connection is the same whichever side made it. Only `wait` blocks. Received bytes go to the caller as they
are, and nothing that a peer sends makes an endpoint raise. All calls but `wake` come from the thread that
owns the endpoint. `inspect` is for other processes: it asks a running rank what it holds.
"""

import ctypes
import os
import random
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from socket import AF_INET, EAI_AGAIN, gaierror, getaddrinfo
from typing import Any, NamedTuple

import zmq

from p2pkv.control import security
from p2pkv.pairing import Address
from p2pkv.protocol.messages import MAX_MESSAGE_BYTES, Inspect, Report, decode, encode
from p2pkv.trust import Networks

BURST = 256
"""Messages taken from one socket before the others get their turn."""

MAX_TOGETHER = 256
"""Messages that may come together."""

MAX_UNKNOWN_PEERS = 4096
"""Connections that are remembered. Beyond this number, those without a Hello are forgotten."""

MAX_SOCKETS = 16_384
"""A dialed connection takes three: itself and its watch, which has two ends."""

LINGER_MS = 500
"""How long a closing endpoint waits until its last messages are sent; to healthy peers they go at once. A
peer that has dialed us loses what it has not read when the connection ends, so the rank waits before."""

NAME_THREADS = 3
"""libzmq's threads for connections to host names, beside one for all others: it looks a name up in the
connection's thread, which a slow name server may hold up for most of a minute, and again at the next try."""

CONNECT_SECONDS = 30.0
"""How long the other side's kernel may take to answer, at the most."""

FIRST_PAUSE, LAST_PAUSE = (15, 30), (700, 1000)
"""Milliseconds: the first and the longest pause between two tries of libzmq, which doubles it each time. Each
connection draws its own, so that peers which lost one P together do not all come back at once."""

LASTING = 0.5
"""A connection that ends after so many seconds or more is dialed again at once; others wait for `redial`."""

SLOW_SECONDS = 5.0
"""A peer that closes a connection so many seconds into the handshake was busy: a refusal comes at once."""

RESTARTING = 60.0
"""Seconds that a peer has to come back after a connection whose handshake had succeeded. While it restarts,
the dying process or a forwarder in front of it accepts connections and closes them."""

_SET_TIMER_SLACK = 29


class PortTaken(Exception):
    """Another socket listens at this address already."""


class Connection:
    """One connection to a peer. `tag` is the owner's, who finds the peer by it; None: it has no owner.

    A dialed connection, which has an `address`, is shut when its handshake has failed or it has ended
    too soon, until `Endpoint.redial`.
    """

    def __init__(
        self, address: Address | None, socket: zmq.Socket[bytes] | None = None, identity: bytes | None = None
    ) -> None:
        self.address = address
        self.since = 0.0  # when it was dialed last
        self.awaited = 0.0  # until when its other side, which had shaken hands, may be restarting
        self.tag: object = None
        self._socket = socket
        self._identity = identity
        self._watch: security.HandshakeMonitor | None = None
        self._several = False
        self._held: list[bytes] = []

    def assign(self, owner: object) -> None:
        """From now on it belongs to `owner`; None: it has no owner."""
        self.tag = owner

    @property
    def shut(self) -> bool:
        return self._socket is None

    @property
    def reached(self) -> bool:
        """Whether a process listens at the other end of a dialed connection; it may not have answered yet."""
        return self._watch is not None and self._watch.connected is not None

    def takes_several(self, does: bool) -> None:
        """`does`: whether the peer takes several messages that come together; only then `hold` holds them."""
        self._several = does

    def hold(self, data: bytes) -> bool:
        """Hand over one message, which goes out at the next `flush` or `send`, together with others: each
        time that libzmq is handed something it may have to wake its own thread, and the peer's. False if the
        peer is gone or its queue is full."""
        if not self._several or len(self._held) + 1 >= MAX_TOGETHER:
            return self.send(data)
        self._held.append(data)
        return self._socket is not None

    def flush(self) -> bool:
        """Hand over what is held; False if the peer is gone or its queue is full."""
        return not self._held or self._hand_over([])

    def send(self, data: bytes) -> bool:
        """Hand over one message, behind those that are held; False as for `flush`."""
        return self._hand_over([data])

    def _hand_over(self, more: list[bytes]) -> bool:
        frames, self._held = self._held + more, []
        if self._socket is None:
            return False
        if self._identity is not None:
            frames.insert(0, self._identity)
        try:
            if len(frames) == 1:
                self._socket.send(frames[0], zmq.DONTWAIT)
            else:
                self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH, zmq.ETERM, zmq.ENOTSOCK):
                return False
            raise
        return True


class ConnectionFailure(NamedTuple):
    connection: Connection | None
    """The dialed connection, which is shut now; None for one that a peer opened to us."""
    reason: str
    quiet: bool = False
    """The other side only closed: a port scan, a monitor, or a peer that saw first that the two differ."""
    late: bool = False
    """A dialed peer has not answered in time. It may be busy: dial it again while it is needed."""


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ShortWait:
    """Waits for what a poller waits for, by ppoll(2), whose time has nanoseconds. The poller must have found
    nothing just before: what libzmq's descriptors report is what has come since (ZMQ_FD)."""

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._watched: list[Any] = []
        self._fds: Any = None
        self._libc = ctypes.CDLL(None)

    def wait(self, seconds: float) -> None:
        """For so long at most, less than a second, the interpreter's lock released."""
        if self._watched != self._poller.sockets:
            self._watched = list(self._poller.sockets)
            fds = [each if isinstance(each, int) else each.fileno() for each, _ in self._watched]
            self._fds = (_PollFd * len(fds))(*(_PollFd(fd, select.POLLIN, 0) for fd in fds))
        span = _TimeSpec(0, int(seconds * 1e9))
        self._libc.ppoll(self._fds, len(self._watched), ctypes.byref(span), None)


def sleep_precisely() -> None:
    """Linux ends each wait of the calling thread up to 50 us late (prctl(2), PR_SET_TIMERSLACK), which is as
    long as the engine's waits: from now on no later than it must."""
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)


class Endpoint:
    """Listens at `address` at once; None: it only dials. Raises PortTaken with a sentence.

    Args:
        members: only they get through the handshake, in either direction; None for any process.
        allowed: only peers from these networks get through, and no other address is dialed; None for any.
        patience: seconds that a handshake may take. With members or networks the peer's own thread takes
            part in it, and may be busy.
        dials: what it connects to.
        most: bytes of a message.
        queue: messages that may wait in either direction of a connection.
    """

    def __init__(
        self,
        address: Address | None,
        members: security.Members | None = None,
        allowed: Networks | None = None,
        patience: float = security.HANDSHAKE_SECONDS,
        dials: security.Server = "rank",
        most: int = MAX_MESSAGE_BYTES,
        queue: int = 10_000,
    ) -> None:
        self._address = address
        self._members = members
        self._allowed = allowed
        self._patience = patience
        self._dials: security.Server = dials
        self._most = most
        self._queue = queue
        self._context = zmq.Context(1 + NAME_THREADS)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
        self._poller = zmq.Poller()
        self._short_wait = ShortWait(self._poller)
        self._acts: dict[Any, Callable[[], object]] = {}
        """What is done as soon as there is something on one of these sockets."""
        self._watch_for(self._wake, lambda: os.eventfd_read(self._wake))
        self._failures: deque[ConnectionFailure] = deque(maxlen=MAX_UNKNOWN_PEERS)
        self._answered: dict[bytes, Connection] = {}
        self._dialed: dict[zmq.Socket[bytes], Connection] = {}
        self._ready: list[Any] | None = None
        """What the last `wait` has found, until `receive` has read it."""
        self._zap = security.ZapHandler(members, allowed)
        self._asked = self._zap.open(self._context)
        self._watch_for(self._asked, self._admit)
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._watch = security.HandshakeMonitor(self._router)
        self._watch_for(self._watch.socket, self._refused)
        if address is not None:
            self._listen(address)

    def _watch_for(self, socket: zmq.Socket[Any] | int, act: Callable[[], object]) -> None:
        self._acts[socket] = act
        self._poller.register(socket, zmq.POLLIN)

    def _listen(self, address: Address) -> None:
        if self._zap.needed:
            self._zap.guard(self._router)
        if self._members is not None:
            self._members.serve(self._router, "rank")
        try:
            self._router.bind(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise PortTaken(
                f"cannot listen at {address} ({error}): another process uses this port, or the host is "
                "not this machine's"
            ) from None
        self._poller.register(self._router, zmq.POLLIN)

    def dial(self, address: Address) -> Connection:
        """A connection to `address`. It comes up by itself; until then its sends return False."""
        connection = Connection(address)
        self.redial(connection)
        return connection

    def redial(self, connection: Connection) -> None:
        """Try a connection that is shut once more: one connection, if `allowed_peers` admit its address."""
        if connection.address is None or not connection.shut:
            return
        if self._allowed is not None and not self._allowed.admits(connection.address.host):
            self._give_up(
                connection,
                f"{connection.address} could not be reached, since it is not dialed: allowed_peers are "
                f"{self._allowed}, which admit no names; add the network of that instance, or give it "
                "a numeric `host`",
            )
            return
        try:
            self._connect(connection, connection.address)
        except zmq.ZMQError as error:  # no descriptors left
            self._give_up(connection, f"{connection.address} could not be reached: {error}")

    def _connect(self, connection: Connection, address: Address) -> None:
        socket = connection._socket = self._socket(zmq.DEALER)
        self._dialed[socket] = connection
        connection.since = time.monotonic()
        socket.setsockopt(zmq.IMMEDIATE, 1)
        if not (":" in address.host or address.host.rpartition(".")[2].isdigit()):
            socket.setsockopt(zmq.AFFINITY, (1 << NAME_THREADS) - 1 << 1)
        socket.setsockopt(zmq.RECONNECT_IVL, random.randint(*FIRST_PAUSE))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, random.randint(*LAST_PAUSE))
        # A client may have forged the address: a peer that is no member gets no second connection.
        socket.setsockopt(zmq.RECONNECT_STOP, zmq.RECONNECT_STOP_HANDSHAKE_FAILED)
        if self._members is not None:
            self._members.join(socket, self._dials)
        if self._dials == "proxy":
            # With it libzmq takes no IPv4 address of a name that has an IPv6 one, and proxies bind 0.0.0.0.
            socket.setsockopt(zmq.IPV6, not _has_ipv4(address.host))
            # Else the kernel would send pings to a host that has vanished for a quarter of an hour, although
            # another may have its name by then.
            socket.setsockopt(zmq.TCP_MAXRT, 10_000)
        # Else a host that was away and drops packets is tried again up to a minute after it is back.
        socket.setsockopt(zmq.CONNECT_TIMEOUT, int(min(self._patience, CONNECT_SECONDS) * 1000))
        connection._watch = watch = security.HandshakeMonitor(socket, dials=True)
        self._watch_for(watch.socket, lambda: self._look_after(connection, watch))
        socket.connect(f"tcp://{address}")
        self._poller.register(socket, zmq.POLLIN)

    def hang_up(self, connection: Connection) -> None:
        """Forget a connection; a dialed one is closed."""
        if connection._identity is not None:
            self._answered.pop(connection._identity, None)
        else:
            self._shut(connection)

    def failures(self) -> Iterator[ConnectionFailure]:
        """What has gone wrong with connections since the last call."""
        while self._failures:
            yield self._failures.popleft()

    def wait(self, seconds: float) -> None:
        """Sleep until something can be received, `wake` is called, or the time is over."""
        short = 0.0 < seconds < 0.001  # which libzmq's poller cannot wait
        found = self._poller.poll(0 if short else max(0, int(seconds * 1000 + 0.999)))
        if short and not found:
            self._short_wait.wait(seconds)
            found = self._poller.poll(0)
        self._ready = [each for each, _ in found]
        for each in self._ready:
            if act := self._acts.get(each):
                act()

    def receive(self) -> Iterator[tuple[Connection, bytes]]:
        """The messages that have arrived; each frame is one."""
        if self._ready is None:
            self._ready = [each for each, _ in self._poller.poll(0)]
        ready, self._ready = self._ready, None
        for socket in ready:
            if socket is not self._router and socket not in self._dialed:
                continue
            for _ in range(BURST):
                if socket.closed:
                    break
                try:
                    frames = _frames(socket)
                except zmq.Again:
                    break
                answered = socket is self._router
                connection = self._answer(frames.pop(0)) if answered else self._dialed.get(socket)
                if connection is None:
                    continue
                for frame in frames or [b""]:
                    yield connection, frame

    def wake(self) -> None:
        """End the owner's `wait`. From any thread, even after `close`."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        for connection in list(self._dialed.values()):
            self._shut(connection, LINGER_MS)
        self._acts.clear()  # else this object, which they hold, would be left to the garbage collector
        self._watch.close()
        self._router.close(LINGER_MS)
        self._asked.close(0)
        self._context.term()
        with self._waking:
            os.close(self._wake)
            self._wake = -1

    def _answer(self, identity: bytes) -> Connection:
        connection = self._answered.get(identity)
        if connection is None:
            if len(self._answered) >= MAX_UNKNOWN_PEERS:
                # Of connections without a tag: a peer that is still there has to send a Hello.
                self._answered = {key: each for key, each in self._answered.items() if each.tag is not None}
            connection = self._answered[identity] = Connection(None, self._router, identity)
        return connection

    def _admit(self) -> None:
        """Answer libzmq's questions whether a peer may connect."""
        for _ in range(BURST):
            try:
                request = self._asked.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            reply, refusal = self._zap.answer(request)
            if reply:
                self._asked.send_multipart(reply, zmq.DONTWAIT)
            if refusal:
                self._failures.append(ConnectionFailure(None, refusal))

    def _refused(self) -> None:
        """Note failed handshakes with us, but not what the ZAP handler refused: `_admit` has noted that."""
        for failure in islice(self._watch.failures(), BURST):
            if not failure.refused:
                reason = f"a connection to {self._address} was refused: {failure.detail}"
                self._failures.append(ConnectionFailure(None, reason, quiet=not failure.spoke))

    def _look_after(self, connection: Connection, watch: security.HandshakeMonitor) -> None:
        failure, now = next(watch.failures(), None), time.monotonic()
        if failure is None:
            return
        # Whether the peer's own thread was busy, so that it closed the connection, and not to refuse us.
        slow = watch.connected is not None and now - watch.connected > min(SLOW_SECONDS, self._patience / 2)
        failure = failure._replace(late=failure.late or (slow and not failure.spoke))
        restarting = not failure.spoke and now < connection.awaited
        self._shut(connection)
        if failure.lost:
            # libzmq dials again by itself, but not after every kind of end.
            if now - connection.since > LASTING:
                self.redial(connection)
        elif failure.late or not restarting:
            name = f"the proxy at {connection.address}" if self._dials == "proxy" else connection.address
            reason = security.no_answer(name, failure, self._members is not None)
            self._failures.append(ConnectionFailure(connection, reason, late=failure.late))

    def _give_up(self, connection: Connection, reason: str) -> None:
        self._shut(connection)
        self._failures.append(ConnectionFailure(connection, reason))

    def _shut(self, connection: Connection, linger: int = 0) -> None:
        """Close what a dialed connection has open."""
        socket, connection._socket = connection._socket, None
        connection._held.clear()
        connection._several = False
        if socket is None:
            return
        del self._dialed[socket]
        if connection._watch is not None:
            if connection._watch.proven:
                connection.awaited = time.monotonic() + RESTARTING
            self._poller.unregister(connection._watch.socket)
            del self._acts[connection._watch.socket]
            connection._watch.close()
            connection._watch = None
        if socket in self._poller:
            self._poller.unregister(socket)
        socket.close(linger)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        security.limit_handshake(socket, self._patience)
        socket.setsockopt(zmq.AFFINITY, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._most)
        # The kernel answers for a process that is frozen, not for a machine that is gone.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
        socket.setsockopt(zmq.SNDHWM, self._queue)
        socket.setsockopt(zmq.RCVHWM, self._queue)
        return socket


@cache
def _has_ipv4(host: str) -> bool:
    """True also for a name that cannot be looked up now."""
    try:
        return bool(getaddrinfo(host, None, AF_INET))
    except gaierror as error:
        return error.errno == EAI_AGAIN


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """What has come together; of too many frames only the first are kept. Raises zmq.Again for none."""
    frames = [socket.recv(zmq.DONTWAIT)]
    while socket.getsockopt(zmq.RCVMORE):
        frame = socket.recv(zmq.DONTWAIT)
        if len(frames) <= MAX_TOGETHER:
            frames.append(frame)
    return frames


def inspect(
    address: Address, seconds: float = 2.0, members: security.Members | None = None
) -> dict[str, int | float | str]:
    """Counters and gauges of the rank that listens at `address`; `members` if it has a secret.

    Raises TimeoutError with a sentence if no rank of p2pkv answers in time or the secrets differ,
    BadMessage if what answers is something else.
    """
    endpoint = Endpoint(None, members)
    connection, asked = endpoint.dial(address), False
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            endpoint.wait(min(left, 0.05))
            asked = asked or connection.send(encode(Inspect()))
            for _, data in endpoint.receive():
                answer = decode(data)
                if isinstance(answer, Report):
                    return answer.values
                raise TimeoutError(f"{address} answered {type(answer).__name__}, which is no report")
            for failure in endpoint.failures():
                raise TimeoutError(failure.reason)
    finally:
        endpoint.close()
    raise TimeoutError(
        f"nothing at {address} answered in {seconds:g} s: is an instance running there, with this kv_port "
        "plus the rank?"
    )
