"""The thread that pings the proxy for as long as its instance lives, and says goodbye at the end."""

from __future__ import annotations

import logging
import socket
import threading
import time

import zmq

from p2pkv.control.discovery import PING_INTERVAL, Ping, encode_ping, goodbye
from p2pkv.control.members import Members
from p2pkv.control.watch import Watch, no_answer
from p2pkv.pairing import Address

logger = logging.getLogger(__name__)

_GOODBYE_LINGER_MS = 500
# ZMQ gives a connection up for good if its other end ever spoke something else than ZMTP.
_PATIENCE_SECONDS = 2.0
_COMPLAIN_SECONDS = 60.0


class Pinger:
    """Sends `ping` to the proxy's discovery socket every `interval` seconds, from a daemon thread.

    The proxy may be absent, come late, go and come back: nothing is queued for it meanwhile. Nothing
    is expected in return. The thread has a ZMQ context of its own and touches no other.

    Args:
        proxy_address: host:port of the proxy's discovery socket.
        interval: seconds between two pings.
        members: show the proxy that we are one of them; None to ping in the clear.

    Raises:
        ValueError: malformed address, or an interval that is not positive.
    """

    def __init__(
        self,
        proxy_address: str,
        ping: Ping,
        interval: float = PING_INTERVAL,
        members: Members | None = None,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"the ping interval must be more than 0 seconds, not {interval}")
        self._proxy = Address.parse(proxy_address)
        self._frame = encode_ping(ping)
        self._goodbye = encode_ping(goodbye(ping))
        self._interval = interval
        self._members = members
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
            connected = time.monotonic()
            while not self._stopping.is_set() and time.monotonic() - connected < _PATIENCE_SECONDS:
                if self._ping_once(dealer):
                    connected = time.monotonic()
                else:
                    self._complain(watch)
            self._say_goodbye(dealer)
        except zmq.ZMQError as error:
            logger.warning("discovery ping to %s failed, trying again: %s", self._proxy, error)
            self._stopping.wait(self._interval)
        finally:
            watch.close()
            dealer.close()

    def _complain(self, watch: Watch) -> None:
        """One line a minute about a proxy that is there and does not take our pings."""
        failures = [failure for failure in watch.failures() if not failure.lost]
        if failures and time.monotonic() >= self._next_complaint:
            self._next_complaint = time.monotonic() + _COMPLAIN_SECONDS
            secret = self._members is not None
            logger.warning(
                "not registered: %s", no_answer(f"the proxy at {self._proxy}", failures[0], secret)
            )

    def _ping_once(self, dealer: zmq.Socket[bytes]) -> bool:
        """Pings, and waits until the next ping is due. False if the proxy is not there."""
        due = time.monotonic() + self._interval
        if not self._wait(dealer, zmq.POLLOUT, _PATIENCE_SECONDS):
            return False
        dealer.send(self._frame, zmq.NOBLOCK)
        self._wait(dealer, 0, due - time.monotonic())
        return True

    def _wait(self, dealer: zmq.Socket[bytes], events: int, seconds: float) -> bool:
        """Whether `events` came within `seconds`; a stop ends the wait."""
        poller = zmq.Poller()
        poller.register(self._wakened, zmq.POLLIN)
        if events:
            poller.register(dealer, events)
        ready = dict(poller.poll(max(0, int(seconds * 1000))))
        return dealer in ready

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
