"""The pings by which proxies learn of an instance, from a thread."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2pkv.control import discovery
from p2pkv.control.endpoint import Connection, Endpoint
from p2pkv.control.security import Members
from p2pkv.log import RateLimit
from p2pkv.pairing import Address

log = logging.getLogger("p2pkv.control.announcer")
"""The log of the process that announces the instance."""

Addresses = tuple[str, ...]
OnPartners = Callable[[Addresses], None]
"""Takes the partners that proxies have named."""

_NAMED_SECONDS = 20 * discovery.PING_INTERVAL
"""Seconds that partners named by a silent proxy stay valid, while another proxy answers."""

_LOOK_SECONDS = 0.25
"""Between two looks whether a proxy that was away takes the ping that is due."""

_REDIAL_SECONDS = 2.0
"""Seconds between two tries: the proxy may be another by now, or a forwarder before it closes connections."""

_UNREACHED_SECONDS = 10.0
_LOG_SECONDS = 60.0  # between two lines about one proxy


@dataclass
class _Proxy:
    due: float = 0.0
    """When it is pinged next."""
    redial: float = 0.0
    """When it is dialed again, should the connection be shut."""
    named: tuple[float, Addresses] = 0.0, ()
    """When it answered last, and the partners in that answer."""
    reached: float = field(default_factory=time.monotonic)
    """When it last took a ping; at first, when it was dialed."""


class Pinger:
    """Sends `ping` to the discovery socket of each proxy every `interval` seconds, from a daemon thread.

    A proxy may be absent, come late, go and come back: nothing is queued for it meanwhile. Nothing is
    expected in return, and nothing is looked at unless the ping asks for partners.

    Before each ping the thread calls `current` for the ping as it is to be sent now, by default `ping`; None:
    none is sent. `on_partners` takes the partners that any of the proxies names. `members`: of the secret
    with which the pings are encrypted; None: they are sent in the clear. Raises ValueError for bad addresses.
    """

    def __init__(
        self,
        proxies: str | Iterable[str],
        ping: discovery.Ping,
        interval: float = discovery.PING_INTERVAL,
        members: Members | None = None,
        current: Callable[[], discovery.Ping | None] | None = None,
        on_partners: OnPartners = lambda addresses: None,
    ) -> None:
        self._addresses = [*map(Address.parse, [proxies] if isinstance(proxies, str) else proxies)]
        self._current = current or (lambda: ping)
        self._goodbye = discovery.encode_ping(discovery.goodbye(ping))
        self._interval = interval
        self._asks = ping.partners > 0
        self._on_partners = on_partners
        self._log_limit = RateLimit(seconds=_LOG_SECONDS)
        self._hurried, self._stopping = threading.Event(), threading.Event()
        most = discovery.MAX_PARTNERS_BYTES if self._asks else 1024
        self._endpoint = Endpoint(None, members, dials="proxy", most=most, queue=4)
        self._proxies: dict[Connection, _Proxy] = {}
        self._thread = threading.Thread(target=self._run, name="p2pkv-pinger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ping_soon(self) -> None:
        """Pings at once, not only when the next ping is due. For any thread."""
        self._hurried.set()
        self._endpoint.wake()

    def stop(self, timeout: float = 2.0) -> None:
        """Sends a goodbye to connected proxies, and ends the thread within `timeout` seconds. Idempotent."""
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
        self._proxies = {self._endpoint.dial(address): _Proxy() for address in self._addresses}
        try:
            while not self._stopping.is_set():
                self._ping_all()
                left = min(proxy.due for proxy in self._proxies.values()) - time.monotonic()
                self._endpoint.wait(left if left > 0 else _LOOK_SECONDS)
                self._take_in()
            for connection in self._proxies:
                connection.send(self._goodbye)
        finally:
            self._endpoint.close()

    def _ping_all(self) -> None:
        """Ping each proxy to which a ping is due, if it takes it."""
        now, hurried = time.monotonic(), self._hurried.is_set()
        if hurried:
            self._hurried.clear()  # before the look at the state: what changes later hurries again
        for connection, proxy in self._proxies.items():
            if connection.shut and now >= proxy.redial:
                proxy.redial = now + _REDIAL_SECONDS
                self._endpoint.redial(connection)
            if hurried or now >= proxy.due:
                ping, unreached = self._current(), proxy.redial < proxy.reached < now - _UNREACHED_SECONDS
                if ping is None or connection.send(discovery.encode_ping(ping)):
                    proxy.due, proxy.reached = now + self._interval, now
                elif unreached and self._log_limit.admits(connection):
                    log.warning(
                        f"not registered: no connection to the proxy at {connection.address}; is it up, do "
                        "proxy_ip and proxy_port name its --discovery address, and can this host reach that?"
                    )

    def _take_in(self) -> None:
        for connection, frame in self._endpoint.receive():
            # Empty messages only show whether the connection stands.
            if frame and self._asks:
                try:
                    self._proxies[connection].named = time.monotonic(), discovery.decode_partners(frame)
                    self._pass_on_partners()
                except discovery.BadPartners as error:
                    log.debug("the proxy at %s: %s", connection.address, error)
        for failure in self._endpoint.failures():
            assert failure.connection is not None
            self._proxies[failure.connection].redial = time.monotonic() + _REDIAL_SECONDS
            if self._log_limit.admits(failure.connection):
                log.warning("not registered: %s", failure.reason)

    def _pass_on_partners(self) -> None:
        oldest = time.monotonic() - _NAMED_SECONDS
        answers = (proxy.named for proxy in self._proxies.values())
        valid = (names for answered, names in answers if answered > oldest)
        self._on_partners(tuple(dict.fromkeys(itertools.chain(*valid))))
