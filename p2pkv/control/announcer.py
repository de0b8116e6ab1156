"""The child process that announces an instance: it warms the instance up, and then pings the proxy for it.

While a worker compiles or collects garbage, one thread may hold the interpreter's lock for many seconds, and
no other thread of the worker runs. Pings from a thread would stop, and the proxy would forget an instance in
good health. So they come from a process of its own, which imports neither torch nor vLLM.

The worker is the child's parent and holds the other end of its stdin: it writes one line that says what to
announce, a beat every second, and `STOP` at a clean end. A worker that is silent is vouched for until
`stall_seconds` have passed; then there are no more pings until it beats again. When the worker dies, the pipe
ends, so does the child, and with it the connection to the proxy. Both are in one process group: a signal that
freezes or kills the whole instance means the child, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time

import msgspec
from msgspec import Struct

from p2pkv.control.discovery import PING_INTERVAL, Ping
from p2pkv.control.members import members_of
from p2pkv.control.pinger import Pinger
from p2pkv.control.warm_up import WarmUp, warm_up
from p2pkv.pairing import Address

logger = logging.getLogger("p2pkv.control.announcer")

BEAT_SECONDS = 1.0
"""Between two beats of the worker, and two looks of the child at who its parent is."""

STOP_SECONDS = 2.0
"""How long a clean end may take, with the goodbye."""

_BEAT, _STOP = b".", b"q"
_FORMAT = "(p2pkv-announcer pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class Announcement(Struct, frozen=True, kw_only=True):
    """What the child is told.

    Attributes:
        proxy: host:port of the proxy's discovery socket.
        interval: seconds between two pings.
        stall_seconds: how long the child vouches for a worker that is silent.
        secret: with it the child pings as a member; None to ping in the clear.
        warm_up: what is done before the first ping, if anything.
        log_level: of the child's log, which goes to the worker's stderr.
    """

    proxy: str
    ping: Ping
    interval: float = PING_INTERVAL
    stall_seconds: float = 120.0
    secret: bytes | None = None
    warm_up: WarmUp | None = None
    log_level: int = logging.INFO


class _Orders(Struct, frozen=True):
    """The first line of the pipe. `parent`: the worker's process id."""

    parent: int
    announcement: Announcement


class Announcer:
    """The worker's side: starts the child, beats, and starts it again should it end by itself.

    Raises ValueError for a malformed address of the proxy.
    """

    def __init__(self, announcement: Announcement) -> None:
        Address.parse(announcement.proxy)
        self._announcement = announcement
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._beat, name="p2pkv-announcer", daemon=True)

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child is not None, "it has not been started"
        return self._child.pid

    def start(self) -> None:
        """Start the child. Raises OSError if there can be no process."""
        self._child = _spawn(self._announcement)
        self._thread.start()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Have the child say goodbye and end, within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._child is None:
            return
        self._thread.join(timeout)
        with contextlib.suppress(OSError):
            _write(self._child, _STOP)
        _close(self._child)
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            logger.warning("the announcing process did not end in %g s; it is killed", timeout)
            self._child.kill()
            self._child.wait()

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            assert self._child is not None
            if self._child.poll() is None:
                with contextlib.suppress(OSError):  # it has ended, or is frozen and reads nothing
                    _write(self._child, _BEAT)
                continue
            logger.warning(
                "the announcing process ended with status %d; it is started again", self._child.returncode
            )
            _close(self._child)
            with contextlib.suppress(OSError):
                # Whoever was announced is warm, or has been waited for as long as is allowed.
                self._child = _spawn(msgspec.structs.replace(self._announcement, warm_up=None))


def _spawn(announcement: Announcement) -> subprocess.Popen[bytes]:
    # -P: a file of the working directory must not stand in for a module. Its stdout is nobody's: what a
    # worker writes there may be read by a program.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which the next beat finds out
        _write(child, msgspec.json.encode(_Orders(os.getpid(), announcement)) + b"\n")
    return child


def _write(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    os.write(child.stdin.fileno(), data)


def _close(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()


# The child.


class _Worker:
    """The worker, as its child knows it. Its thread ends the process when the worker is gone."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._rest = b""
        self._parent = os.getppid()
        self._stall = 0.0
        self._beaten = time.monotonic()
        self._silent = False
        self.announced = False
        self.stopping = threading.Event()

    def orders(self) -> _Orders | None:
        """The first line; None if the worker has gone before."""
        line = b""
        while b"\n" not in line:
            if not (data := os.read(self._pipe, 65536)):
                return None
            line += data
        line, _, self._rest = line.partition(b"\n")
        orders = msgspec.json.decode(line, type=_Orders)
        self._parent, self._stall = orders.parent, orders.announcement.stall_seconds
        self._beaten = time.monotonic()
        return orders

    def follow(self) -> None:
        """Hear the worker's beats, until it stops or is gone; for a thread."""
        self._hear(self._rest)
        while not self.stopping.is_set():
            ready, _, _ = select.select([self._pipe], [], [], BEAT_SECONDS)
            # A process that the worker has forked may hold its end of the pipe open.
            gone = os.getppid() != self._parent
            if ready and not gone:
                data = os.read(self._pipe, 65536)
                gone = not data
                self._hear(data)
            if gone and not self.stopping.is_set():
                os._exit(0)

    def _hear(self, data: bytes) -> None:
        if not data:
            return
        self._beaten = time.monotonic()
        if _STOP in data:
            self.stopping.set()
            if not self.announced:
                os._exit(0)

    def vouched_for(self) -> bool:
        """Whether the worker has beaten within `stall_seconds`."""
        silent = time.monotonic() - self._beaten > self._stall
        if silent and not self._silent:
            logger.warning(
                "the worker has been silent for %g s: it is not announced until it is back", self._stall
            )
        elif self._silent and not silent:
            logger.warning("the worker is back: it is announced again")
        self._silent = silent
        return not silent


def main() -> None:
    # Who signals the whole process group means the worker: it says goodbye through us, or ends, and so do we.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker = _Worker(sys.stdin.fileno())
    orders = worker.orders()
    if orders is None:
        return
    told = orders.announcement
    logging.basicConfig(level=told.log_level, format=_FORMAT, datefmt=_DATE_FORMAT)
    threading.Thread(target=worker.follow, name="p2pkv-worker", daemon=True).start()
    if told.warm_up is not None:
        warm_up(told.warm_up)
    pinger = Pinger(
        told.proxy,
        told.ping,
        told.interval,
        members_of(told.secret),
        worker.vouched_for,
    )
    worker.announced = True
    pinger.start()
    worker.stopping.wait()
    pinger.stop()


if __name__ == "__main__":
    main()
