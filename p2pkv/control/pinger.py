"""The pings by which a proxy learns of an instance, to one proxy, from a thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from p2pkv.control.discovery import (
    MAX_PARTNERS_BYTES,
    PING_INTERVAL,
    BadPartners,
    Ping,
    decode_partners,
    encode_ping,
    goodbye,
)
from p2pkv.control.endpoint import Connection, Endpoint
from p2pkv.control.security import Members
from p2pkv.log import RateLimit
from p2pkv.pairing import Address

log = logging.getLogger("p2pkv.control.announcer")
"""Of the process that announces the instance."""

Addresses = tuple[str, ...]
OnPartners = Callable[[Addresses], None]
"""Takes the partners that a proxy has named."""

_LOOK_SECONDS = 0.25
"""Between two looks whether a proxy that was away takes the ping that is due."""

_REDIAL_SECONDS = 2.0
"""Between two tries after a handshake that failed: the proxy may be another one by now."""

_LOG_SECONDS = 60.0  # between two lines about one proxy


class Pinger:
    """Sends `ping` to the proxy's discovery socket every `interval` seconds, from a daemon thread.

    The proxy may be absent, come late, go and come back: nothing is queued for it meanwhile. Nothing
    is expected in return, and nothing is looked at unless the ping asks for partners.

    Before each ping the thread calls `vouched_for`, and sends none where that is False, and `paused`, for the
    ping's field of that name; `on_partners` takes the partners that the proxy names. `members`: of the secret
    with which the pings are encrypted; None: they are sent in the clear. Raises ValueError for a malformed
    address of the discovery socket, or an interval that is not positive.
    """

    def __init__(
        self,
        proxy_address: str,
        ping: Ping,
        interval: float = PING_INTERVAL,
        members: Members | None = None,
        vouched_for: Callable[[], bool] = lambda: True,
        paused: Callable[[], bool] = lambda: False,
        on_partners: OnPartners = lambda addresses: None,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"the ping interval must be more than 0 seconds, not {interval}")
        self._proxy = Address.parse(proxy_address)
        self._frame = encode_ping(ping)
        self._paused_frame = encode_ping(msgspec.structs.replace(ping, paused=True))
        self._goodbye = encode_ping(goodbye(ping))
        self._interval = interval
        self._vouched_for = vouched_for
        self._paused = paused
        self._asks = ping.partners > 0
        self._on_partners = on_partners
        self._log_limit = RateLimit(seconds=_LOG_SECONDS)
        self._due = 0.0
        self._hurried, self._stopping = threading.Event(), threading.Event()
        most = MAX_PARTNERS_BYTES if self._asks else 1024
        self._endpoint = Endpoint(None, members, dials="proxy", most=most, queue=4)
        self._thread = threading.Thread(target=self._run, name="p2pkv-pinger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Pings at once, not only when the next ping is due. For any thread."""
        self._hurried.set()
        self._endpoint.wake()

    def stop(self, timeout: float = 2.0) -> None:
        """Sends a goodbye to a connected proxy, and ends the thread within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._endpoint.wake()
        if self._thread.ident is None:  # it was not started
            self._endpoint.close()
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            log.warning("the discovery pinger did not end within %.1f s; it dies with the process", timeout)

    def _run(self) -> None:
        endpoint, redial = self._endpoint, 0.0
        connection = endpoint.dial(self._proxy)
        try:
            while not self._stopping.is_set():
                if connection.shut and time.monotonic() >= redial:
                    endpoint.redial(connection)
                self._ping(connection)
                left = self._due - time.monotonic()
                endpoint.wait(left if left > 0 else _LOOK_SECONDS)
                for _, frame in endpoint.receive():
                    self._read(frame)
                for failure in endpoint.failures():
                    redial = time.monotonic() + _REDIAL_SECONDS
                    if self._log_limit.admits():
                        log.warning("not registered: %s", failure.reason)
            connection.send(self._goodbye)
        finally:
            endpoint.close()

    def _ping(self, connection: Connection) -> None:
        """Pings if a ping is due, and the proxy takes it."""
        now = time.monotonic()
        if self._hurried.is_set():
            self._hurried.clear()  # before the look at the state: what changes later hurries again
        elif now < self._due:
            return
        frame = self._paused_frame if self._paused() else self._frame
        if not self._vouched_for() or connection.send(frame):
            self._due = now + self._interval

    def _read(self, frame: bytes) -> None:
        """One message of the proxy's. Empty ones only show whether the connection stands."""
        if not frame or not self._asks:
            return
        try:
            self._on_partners(decode_partners(frame))
        except BadPartners as error:
            log.debug("the proxy at %s: %s", self._proxy, error)
