"""A worker announces its instance to the proxies, by a child process (`announcer_child`).

While a worker compiles or collects garbage, one thread may hold the interpreter's lock for many seconds, and
no other thread of the worker runs. Pings from a thread would stop, and the proxy would forget an instance in
good health. So they come from a process of its own, which imports neither torch nor vLLM.

The child's stdin and stdout are one socket, which keeps messages apart. The worker sends what to announce, a
beat (`EngineHealth`) twice a second, and `STOP` at a clean end. When the worker is silent, the child goes on
as before for `stall_seconds`, and then sends no ping until the worker beats again. When the worker dies, the
socket ends, and so does the child. Both are in one process group: a signal that freezes or kills the whole
instance reaches the child, too.

What the proxies answer to a D, its partners, the child passes on; the worker looks at each beat.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from p2pkv.control import discovery
from p2pkv.control.pinger import Addresses, OnPartners
from p2pkv.control.warm_up_prompts import WarmUp

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
"""Between two beats of the worker. The child looks as often whether the worker is still its parent."""

STOP_SECONDS = 2.0
"""How long a clean end may take, with the goodbye."""

STOP = b"stop"
"""Sent in place of the last beat, at a clean end."""


class EngineHealth(msgspec.Struct, frozen=True):
    """Whether requests may come to the instance, as its worker sees it."""

    trouble: str = ""
    """Why the instance is not to be announced, in words; "" if it is."""
    paused: bool = False
    """The engine takes no new requests: vLLM's /pause was called, and /resume was not, or it is stopping."""
    workload: discovery.Workload | None = None
    """The work of its scheduler; None if that is not known."""
    at: float = 0.0
    """When `workload` was so, by this host's monotonic clock."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """The child's task."""

    proxies: tuple[str, ...]
    """host:port of the discovery socket of each proxy that is pinged."""
    ping: discovery.Ping
    interval: float = discovery.PING_INTERVAL
    """Seconds between two pings."""
    stall_seconds: float = 120.0
    """Seconds that the child goes on with pings for a silent worker."""
    secret: bytes | None = None
    """With it the child pings as a member; None to ping in the clear."""
    warm_up: WarmUp | None = None
    """What is done before the first ping; None: nothing."""
    log_level: int = logging.INFO
    """The level of the child's log, which goes to the worker's stderr."""
    parent: int = 0
    """The worker's process id."""


class Announcer:
    """The worker's side: starts the child, beats, and starts it again should it end by itself.

    A thread of it calls `on_partners` with the partners that proxies have named, each time they change, and
    `health` before each beat.
    """

    def __init__(
        self, announcement: Announcement, on_partners: OnPartners, health: Callable[[], EngineHealth]
    ) -> None:
        self._announcement = announcement
        self._on_partners = on_partners
        self._engine_health = health
        self._trouble = ""
        self._partners: Addresses | None = None
        self._stopping = threading.Event()
        self._child, self._line = _spawn(announcement)
        self._thread = threading.Thread(target=self._beat, name="p2pkv-announcer", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Have the child send the goodbye and end, within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(timeout)
        _send(self._line, STOP)
        self._line.shutdown(socket.SHUT_WR)
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            log.warning("the process that pings the proxies did not end in %g s; it is killed", timeout)
            self._child.kill()
            self._child.wait()
        self._line.close()

    def _take_partners(self) -> None:
        """Take the partners that proxies have named to the child since the last beat."""
        try:
            while data := self._line.recv(discovery.MAX_PARTNERS_BYTES, socket.MSG_DONTWAIT):
                partners = discovery.decode_partners(data)
                if partners != self._partners:
                    self._partners = partners
                    self._on_partners(partners)
        except BlockingIOError:
            return  # no more of them
        except (OSError, discovery.BadPartners) as error:
            log.debug("partners that a proxy has named could not be read: %s", error)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            self._take_partners()
            if (status := self._child.poll()) is None:
                _send(self._line, self._next_beat())
                continue
            log.warning("the process that pings proxies ended with status %d; it is started again", status)
            with contextlib.suppress(OSError):
                # The instance is warm by now, or the child has waited for as long as it may.
                child, line = _spawn(msgspec.structs.replace(self._announcement, warm_up=None))
                self._line.close()
                self._child, self._line = child, line

    def _next_beat(self) -> bytes:
        now = self._engine_health()
        if now.trouble and not self._trouble:
            log.warning("this instance is not announced any more: %s", now.trouble)
        elif self._trouble and not now.trouble:
            log.warning("this instance is announced again")
        self._trouble = now.trouble
        return msgspec.json.encode(now)


def _spawn(announcement: Announcement) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a child; the socket to it. Raises OSError if there can be no process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            # -P: a file of the working directory must not stand in for a module. Its stdout is not the
            # worker's: what a worker writes there may be read by a program.
            command = [sys.executable, "-P", "-m", "p2pkv.control.announcer_child"]
            child = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        except OSError:
            ours.close()
            raise
    _send(ours, msgspec.json.encode(msgspec.structs.replace(announcement, parent=os.getpid())))
    return child, ours


def _send(line: socket.socket, message: bytes) -> None:
    """Does not wait. The child may have ended, which the next beat finds out; or it is frozen."""
    with contextlib.suppress(OSError):
        line.send(message, socket.MSG_DONTWAIT)
