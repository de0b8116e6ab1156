"""The process that announces an instance: it warms the instance up, and then pings its proxies for it.

It is started by the `Announcer` of a worker, which `announcer` describes, and imports neither torch nor vLLM.
"""

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from p2pkv.control.announcer import BEAT_SECONDS, STOP, Announcement, EngineHealth
from p2pkv.control.discovery import Ping, encode_partners
from p2pkv.control.pinger import Addresses, Pinger
from p2pkv.control.security import members_of
from p2pkv.control.warm_up_prompts import warm_up

log = logging.getLogger("p2pkv.control.announcer")

_ORDERS_BYTES = 1 << 17
_WORKLOAD_SECONDS = 0.9
"""Between two pings for nothing but a changed workload, at least. Beats come every half a second."""

_FORMAT = "(p2pkv-announcer pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class _Worker:
    """The worker that has started this process. Its thread ends the process when the worker is gone."""

    def __init__(self, line: socket.socket, announcement: Announcement) -> None:
        self._line = line
        self._task = announcement
        self._beaten = time.monotonic()
        self._silent = False
        self._last = self._shown = EngineHealth()
        """The last beat, and the last that was worth a ping of its own."""
        self._shown_at = 0.0
        self.announced = False
        self.stopping = threading.Event()

    def follow(self, changed: Callable[[], None]) -> None:
        """Read the worker's beats, until it stops or is gone; for a thread. `changed`: called when a beat
        reports something else than the one before."""
        while not self.stopping.is_set():
            ready, _, _ = select.select([self._line], [], [], BEAT_SECONDS)
            # A process that the worker has forked may hold its end of the socket open.
            gone = os.getppid() != self._task.parent
            if ready and not gone:
                beat = b""
                with contextlib.suppress(ConnectionError):  # it has died with messages of ours unread
                    beat = self._line.recv(_ORDERS_BYTES)
                gone = not beat
                if beat:
                    self._take(beat, changed)
            if gone and not self.stopping.is_set():
                os._exit(0)

    def _take(self, beat: bytes, changed: Callable[[], None]) -> None:
        self._beaten = time.monotonic()
        if beat == STOP:
            self.stopping.set()
            if not self.announced:
                os._exit(0)
            changed()
            return
        now = self._last = msgspec.json.decode(beat, type=EngineHealth)
        due = self._beaten - self._shown_at >= _WORKLOAD_SECONDS
        if (now.trouble, now.paused) != (self._shown.trouble, self._shown.paused) or (
            due and now.workload != self._shown.workload
        ):
            self._shown, self._shown_at = now, self._beaten
            changed()

    def ping(self) -> Ping | None:
        """The ping that its last beat vouches for; None if that forbids one, or is `stall_seconds` ago."""
        now, last, stall = time.monotonic(), self._last, self._task.stall_seconds
        silent = now - self._beaten > stall
        if silent and not self._silent:
            log.warning("the worker has been silent for %g s: no proxy is pinged until it is back", stall)
        elif self._silent and not silent:
            log.warning("the worker is back: the proxies are pinged again")
        self._silent = silent
        if silent or last.trouble:
            return None
        workload = last.workload
        if workload is not None:
            workload = msgspec.structs.replace(workload, age=max(0.0, now - last.at))
        return msgspec.structs.replace(self._task.ping, paused=last.paused, workload=workload)


def main() -> None:
    # A signal to the process group is for the worker: it ends this process, with a goodbye to the proxies or
    # by its own end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    if not (orders := line.recv(_ORDERS_BYTES)):
        return  # the worker has gone before
    task = msgspec.json.decode(orders, type=Announcement)
    worker, members = _Worker(line, task), members_of(task.secret)
    logging.basicConfig(level=task.log_level, format=_FORMAT, datefmt=_DATE_FORMAT)

    def pass_on(partners: Addresses) -> None:
        # Without room the worker has not read for long. The proxies send them again.
        with contextlib.suppress(OSError):
            line.send(encode_partners(partners), socket.MSG_DONTWAIT)

    pinger = Pinger(task.proxies, task.ping, task.interval, members, worker.ping, pass_on)
    threading.Thread(target=worker.follow, args=(pinger.ping_soon,), name="p2pkv-worker", daemon=True).start()
    if task.warm_up is not None:
        warm_up(task.warm_up)
    worker.announced = True
    pinger.start()
    worker.stopping.wait()
    pinger.stop()


if __name__ == "__main__":
    main()
