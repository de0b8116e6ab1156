"""The process that announces an instance: it warms the instance up, and then pings its proxies for it.

It is started by the `Announcer` of a worker, which `announcer` describes, and imports neither torch nor vLLM.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from p2pkv.control.announcer import BEAT_SECONDS, STOP, Orders, Standing
from p2pkv.control.discovery import PING_INTERVAL, Workload, encode_partners
from p2pkv.control.pinger import Addresses, OnPartners, Pinger
from p2pkv.control.security import members_of
from p2pkv.control.warm_up import warm_up

log = logging.getLogger("p2pkv.control.announcer")

_NAMED_SECONDS = 20 * PING_INTERVAL
"""Seconds that partners named by a silent proxy stay valid, while another proxy answers."""

_FORMAT = "(p2pkv-announcer pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class _Worker:
    """The worker that has started this process. Its thread ends the process when the worker is gone."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._rest = b""
        self._parent = os.getppid()
        self._stall = 0.0
        self._beaten = time.monotonic()
        self._silent = False
        self._last = Standing()
        self.changed: Callable[[], None] = lambda: None
        """Called when a beat has other news than the one before."""
        self.announced = False
        self.stopping = threading.Event()

    def read_orders(self) -> Orders | None:
        """The first line; None if the worker has gone before."""
        line = b""
        while b"\n" not in line:
            if not (data := os.read(self._pipe, 65536)):
                return None
            line += data
        line, _, self._rest = line.partition(b"\n")
        orders = msgspec.json.decode(line, type=Orders)
        self._parent, self._stall = orders.parent, orders.announcement.stall_seconds
        self._beaten = time.monotonic()
        return orders

    def follow(self) -> None:
        """Read the worker's beats, until it stops or is gone; for a thread."""
        self._take_beats(b"")
        while not self.stopping.is_set():
            ready, _, _ = select.select([self._pipe], [], [], BEAT_SECONDS)
            # A process that the worker has forked may hold its end of the pipe open.
            gone = os.getppid() != self._parent
            if ready and not gone:
                data = os.read(self._pipe, 65536)
                gone = not data
                self._take_beats(data)
            if gone and not self.stopping.is_set():
                os._exit(0)

    def _take_beats(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not lines:
            return
        self._beaten = time.monotonic()
        if STOP in lines:
            self.stopping.set()
            if not self.announced:
                os._exit(0)
            return
        last, self._last = self._last, msgspec.json.decode(lines[-1], type=Standing)
        if msgspec.structs.replace(self._last, at=last.at) != last:
            self.changed()

    @property
    def paused(self) -> bool:
        return self._last.paused

    @property
    def workload(self) -> Workload | None:
        """What its scheduler has to do, by its last beat."""
        last = self._last
        if last.workload is None:
            return None
        return msgspec.structs.replace(last.workload, age=max(0.0, time.monotonic() - last.at))

    def vouched_for(self) -> bool:
        """Whether the worker has beaten within `stall_seconds`, and its last beat does not forbid a ping."""
        silent = time.monotonic() - self._beaten > self._stall
        if silent and not self._silent:
            log.warning(
                "the worker has been silent for %g s: it is not announced until it is back", self._stall
            )
        elif self._silent and not silent:
            log.warning("the worker is back: it is announced again")
        self._silent = silent
        return not silent and not self._last.trouble


class _Partners:
    """Passes on to the worker the partners that any proxy names. Never waits for the worker."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self._lock = threading.Lock()
        self._named: dict[str, tuple[float, Addresses]] = {}
        """By proxy: the time of its last answer, and the addresses in it."""

    def of(self, proxy: str) -> OnPartners:
        """What takes the answers of this proxy, in the thread of its pinger."""

        def on_partners(partners: Addresses) -> None:
            with self._lock:
                now = time.monotonic()
                self._named[proxy] = now, partners
                valid = [names for when, names in self._named.values() if now - when < _NAMED_SECONDS]
                every = tuple(dict.fromkeys(itertools.chain(*valid)))
                # Without room the worker has not read for long. The proxy sends them again.
                with contextlib.suppress(OSError):
                    self._socket.send(encode_partners(every), socket.MSG_DONTWAIT)

        return on_partners


def main() -> None:
    # A signal to the process group is for the worker: it ends this process, with a goodbye to the proxies or
    # by its own end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker = _Worker(sys.stdin.fileno())
    orders = worker.read_orders()
    if orders is None:
        return
    announcement = orders.announcement
    logging.basicConfig(level=announcement.log_level, format=_FORMAT, datefmt=_DATE_FORMAT)
    threading.Thread(target=worker.follow, name="p2pkv-worker", daemon=True).start()
    if announcement.warm_up is not None:
        warm_up(announcement.warm_up)
    partners, members = _Partners(sys.stdout.fileno()), members_of(announcement.secret)
    pingers = [
        Pinger(
            proxy,
            announcement.ping,
            announcement.interval,
            members,
            vouched_for=worker.vouched_for,
            paused=lambda: worker.paused,
            workload=lambda: worker.workload,
            on_partners=partners.of(proxy),
        )
        for proxy in announcement.proxies
    ]

    def ping_at_once() -> None:
        for pinger in pingers:
            pinger.hurry()

    worker.announced = True
    worker.changed = ping_at_once
    for pinger in pingers:
        pinger.start()
    worker.stopping.wait()
    # All at once: a proxy that does not take its goodbye keeps nothing from the others.
    with ThreadPoolExecutor(len(pingers)) as pool:
        list(pool.map(Pinger.stop, pingers))


if __name__ == "__main__":
    main()
