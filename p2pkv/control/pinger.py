"""The pings by which a proxy learns of an instance, to one proxy, from a thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from p2pkv.control.discovery import (
    MAX_PARTNERS_BYTES,
    PING_INTERVAL,
    BadPartners,
    Ping,
    Workload,
    decode_partners,
    encode_ping,
    goodbye,
)
from p2pkv.control.security import Failure, Members, Watch, no_answer
from p2pkv.log import RateLimit
from p2pkv.pairing import Address

log = logging.getLogger("p2pkv.control.announcer")
"""Of the process that announces the instance."""

Addresses = tuple[str, ...]
OnPartners = Callable[[Addresses], None]
"""Takes the partners that a proxy has named."""


_GOODBYE_LINGER_MS = 500
# ZMQ gives a connection up for good if its other end ever spoke something else than ZMTP.
_PATIENCE_SECONDS = 2.0
# For a handshake that neither succeeds nor fails: the proxy may be busy.
_HANDSHAKE_SECONDS = 30.0
_LOG_SECONDS = 60.0  # between two lines about one proxy


class Pinger:
    """Sends `ping` to the proxy's discovery socket every `interval` seconds, from a daemon thread.

    The proxy may be absent, come late, go and come back: nothing is queued for it meanwhile. Nothing
    is expected in return, and nothing is read unless the ping asks for partners. The thread has a ZMQ context
    of its own and touches no other.

    Args:
        proxy_address: host:port of the proxy's discovery socket.
        interval: seconds between two pings.
        members: of the secret with which the pings are encrypted; None: they are sent in the clear.
        vouched_for: called before each ping, in the pinger's thread; while it returns False none is sent.
        paused, workload: called likewise; the values of these fields of the ping.
        on_partners: takes the partners that the proxy names, in the pinger's thread.

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
        paused: Callable[[], bool] = lambda: False,
        workload: Callable[[], Workload | None] = lambda: None,
        on_partners: OnPartners = lambda addresses: None,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"the ping interval must be more than 0 seconds, not {interval}")
        self._proxy = Address.parse(proxy_address)
        self._ping = ping
        self._goodbye = encode_ping(goodbye(ping))
        self._interval = interval
        self._members = members
        self._vouched_for = vouched_for
        self._paused, self._workload = paused, workload
        self._asks = ping.partners > 0
        self._on_partners = on_partners
        self._log_limit = RateLimit(seconds=_LOG_SECONDS)
        self._stopping = threading.Event()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="p2pkv-pinger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Pings at once, not only when the next ping is due. For any thread."""
        with contextlib.suppress(OSError):  # as many wake-ups wait as fit; or it has stopped
            self._waker.send(b"!")

    def stop(self, timeout: float = 2.0) -> None:
        """Sends a goodbye to a connected proxy, and ends the thread within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._waker.send(b"!")
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("the discovery pinger did not end within %.1f s; it dies with the process", timeout)
            return
        self._waker.close()
        self._wakened.close()

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stopping.is_set():
                self._ping_over_one_socket(context)
        finally:
            context.term()

    def _ping_over_one_socket(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Pings over one socket until it is stopped, or until a new socket may help."""
        dealer = context.socket(zmq.DEALER)
        watch = Watch(dealer, dials=True)
        try:
            if self._members is not None:
                self._members.join(dealer, "proxy")
            _configure(dealer, self._proxy, self._asks)
            while not self._stopping.is_set():
                if not self._ping_once(dealer, watch):
                    break
            self._send_goodbye(dealer)
        except zmq.ZMQError as error:
            log.warning("discovery ping to %s failed, trying again: %s", self._proxy, error)
            self._stopping.wait(self._interval)
        finally:
            watch.close()
            dealer.close()

    def _log_failure(self, failure: Failure) -> None:
        """One line a minute about a proxy that is there and does not take our pings."""
        if not failure.lost and self._log_limit.admits():
            secret = self._members is not None
            log.warning("not registered: %s", no_answer(f"the proxy at {self._proxy}", failure, secret))

    def _ping_once(self, dealer: zmq.Socket[bytes], watch: Watch) -> bool:
        """Pings, and waits until the next ping is due. False if a new socket may help."""
        due = time.monotonic() + self._interval
        if self._connected(dealer, watch):
            if self._vouched_for():
                dealer.send(self._frame(), zmq.NOBLOCK)
            while (left := due - time.monotonic()) > 0 and not self._stopping.is_set():
                ready = self._wait(left, *([(dealer, zmq.POLLIN)] if self._asks else []))
                if dealer in ready:
                    self._read(dealer)
                if self._wakened.fileno() in ready:
                    break
            return True
        return False

    def _frame(self) -> bytes:
        """The ping as it is now."""
        paused, workload = self._paused(), self._workload()
        return encode_ping(msgspec.structs.replace(self._ping, paused=paused, workload=workload))

    def _read(self, dealer: zmq.Socket[bytes]) -> None:
        """One message of the proxy's. Empty ones only show whether the connection stands."""
        frames = dealer.recv_multipart(zmq.NOBLOCK)
        if frames == [b""]:
            return
        try:
            self._on_partners(decode_partners(frames[0] if len(frames) == 1 else b""))
        except BadPartners as error:
            log.debug("the proxy at %s: %s", self._proxy, error)

    def _connected(self, dealer: zmq.Socket[bytes], watch: Watch) -> bool:
        """Waits until the proxy takes a ping, for a while; a stop ends the wait."""
        end = time.monotonic() + _HANDSHAKE_SECONDS
        while (left := end - time.monotonic()) > 0 and not self._stopping.is_set():
            ready = self._wait(left, (dealer, zmq.POLLOUT), (watch.socket, zmq.POLLIN))
            if dealer in ready:
                return True
            for failure in watch.failures():
                self._log_failure(failure)
                end = min(end, time.monotonic() + _PATIENCE_SECONDS)
        return False

    def _wait(self, seconds: float, *sockets: tuple[zmq.Socket[bytes], int]) -> dict[object, int]:
        """Until one of these is ready, the time is over, or we are to stop."""
        poller = zmq.Poller()
        poller.register(self._wakened, zmq.POLLIN)
        for each, events in sockets:
            poller.register(each, events)
        ready = dict(poller.poll(max(0, int(seconds * 1000))))
        if self._wakened.fileno() in ready and not self._stopping.is_set():
            self._wakened.recv(64)
        return ready

    def _send_goodbye(self, dealer: zmq.Socket[bytes]) -> None:
        if self._stopping.is_set() and dealer.poll(0, zmq.POLLOUT):
            dealer.setsockopt(zmq.LINGER, _GOODBYE_LINGER_MS)
            dealer.send(self._goodbye, zmq.NOBLOCK)


def _configure(dealer: zmq.Socket[bytes], proxy: Address, asks: bool) -> None:
    """No identity: an explicit one would lock a restarted instance out while the old one is frozen."""
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.SNDHWM, 4)
    dealer.setsockopt(zmq.RCVHWM, 4 if asks else 1)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PARTNERS_BYTES if asks else 1024)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    # For names this stays off: "localhost" would mean ::1 only, and proxies bind 127.0.0.1.
    dealer.setsockopt(zmq.IPV6, ":" in proxy.host)
    dealer.connect(f"tcp://{proxy}")
