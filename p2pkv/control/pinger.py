"""The thread that pings the proxy for as long as its instance lives, and says goodbye at the end."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

import zmq

from p2pkv.control.discovery import PING_INTERVAL, Ping, encode_ping, goodbye
from p2pkv.control.members import Members
from p2pkv.control.watch import Failure, Watch, no_answer
from p2pkv.pairing import Address

logger = logging.getLogger(__name__)

_GOODBYE_LINGER_MS = 500
# ZMQ gives a connection up for good if its other end ever spoke something else than ZMTP.
_PATIENCE_SECONDS = 2.0
# Of a handshake of which nothing has been said: the proxy may be busy.
_HANDSHAKE_SECONDS = 30.0
_COMPLAIN_SECONDS = 60.0


class Pinger:
    """Sends `ping` to the proxy's discovery socket every `interval` seconds, from a daemon thread.

    The proxy may be absent, come late, go and come back: nothing is queued for it meanwhile. Nothing
    is expected in return. The thread has a ZMQ context of its own and touches no other.

    Args:
        proxy_address: host:port of the proxy's discovery socket.
        interval: seconds between two pings.
        members: show the proxy that we are one of them; None to ping in the clear.
        vouched_for: asked before each ping, from the thread; while it says False none is sent.

    Raises:
        ValueError: malformed address, or an interval that is not positive.
    """

    def __init__(
        self,
        proxy_address: str,
        ping: Ping,
        interval: float = PING_INTERVAL,
        members: Members | None = None,
        vouched_for: Callable[[], bool] = lambda: True,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"the ping interval must be more than 0 seconds, not {interval}")
        self._proxy = Address.parse(proxy_address)
        self._frame = encode_ping(ping)
        self._goodbye = encode_ping(goodbye(ping))
        self._interval = interval
        self._members = members
        self._vouched_for = vouched_for
        self._next_complaint = 0.0
        self._stopping = threading.Event()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="p2pkv-pinger", daemon=True)

    def start(self) -> None:
        """Begins to ping."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Says goodbye to a proxy that is there, and ends the thread within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._waker.send(b"!")
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning(
                "the discovery pinger did not end within %.1f s; it dies with the process", timeout
            )
            return
        self._waker.close()
        self._wakened.close()

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stopping.is_set():
                self._converse(context)
        finally:
            context.term()

    def _converse(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Pings over one socket until told to stop, or until another socket might do better."""
        dealer = context.socket(zmq.DEALER)
        watch = Watch(dealer, dials=True)
        try:
            if self._members is not None:
                self._members.join(dealer, "proxy")
            _configure(dealer, self._proxy)
            while not self._stopping.is_set():
                if not self._ping_once(dealer, watch):
                    break
            self._say_goodbye(dealer)
        except zmq.ZMQError as error:
            logger.warning("discovery ping to %s failed, trying again: %s", self._proxy, error)
            self._stopping.wait(self._interval)
        finally:
            watch.close()
            dealer.close()

    def _complain(self, failure: Failure) -> None:
        """One line a minute about a proxy that is there and does not take our pings."""
        if not failure.lost and time.monotonic() >= self._next_complaint:
            self._next_complaint = time.monotonic() + _COMPLAIN_SECONDS
            secret = self._members is not None
            logger.warning("not registered: %s", no_answer(f"the proxy at {self._proxy}", failure, secret))

    def _ping_once(self, dealer: zmq.Socket[bytes], watch: Watch) -> bool:
        """Pings, and waits until the next ping is due. False if another socket might do better."""
        due = time.monotonic() + self._interval
        if self._connected(dealer, watch):
            if self._vouched_for():
                dealer.send(self._frame, zmq.NOBLOCK)
            self._wait(due - time.monotonic())
            return True
        return False

    def _connected(self, dealer: zmq.Socket[bytes], watch: Watch) -> bool:
        """Waits until the proxy takes a ping, for a while; a stop ends the wait."""
        end = time.monotonic() + _HANDSHAKE_SECONDS
        while (left := end - time.monotonic()) > 0 and not self._stopping.is_set():
            ready = self._wait(left, (dealer, zmq.POLLOUT), (watch.socket, zmq.POLLIN))
            if dealer in ready:
                return True
            for failure in watch.failures():
                self._complain(failure)
                end = min(end, time.monotonic() + _PATIENCE_SECONDS)
        return False

    def _wait(self, seconds: float, *sockets: tuple[zmq.Socket[bytes], int]) -> dict[object, int]:
        """Until one of these is ready, the time is over, or we are to stop."""
        poller = zmq.Poller()
        poller.register(self._wakened, zmq.POLLIN)
        for each, events in sockets:
            poller.register(each, events)
        return dict(poller.poll(max(0, int(seconds * 1000))))

    def _say_goodbye(self, dealer: zmq.Socket[bytes]) -> None:
        if self._stopping.is_set() and dealer.poll(0, zmq.POLLOUT):
            dealer.setsockopt(zmq.LINGER, _GOODBYE_LINGER_MS)
            dealer.send(self._goodbye, zmq.NOBLOCK)


def _configure(dealer: zmq.Socket[bytes], proxy: Address) -> None:
    """No identity: an explicit one would lock a restarted instance out while the old one is frozen."""
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, 4)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.setsockopt(zmq.MAXMSGSIZE, 1024)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    # For names this stays off: "localhost" would mean ::1 only, and proxies bind 127.0.0.1.
    dealer.setsockopt(zmq.IPV6, ":" in proxy.host)
    dealer.connect(f"tcp://{proxy}")
