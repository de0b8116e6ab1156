"""A worker announces its instance to the proxies, by a child process (`announcer_child`).

While a worker compiles or collects garbage, one thread may hold the interpreter's lock for many seconds, and
no other thread of the worker runs. Pings from a thread would stop, and the proxy would forget an instance in
good health. So they come from a process of its own, which imports neither torch nor vLLM.

The worker writes to the child's stdin one line with what to announce, a beat twice a second, and `STOP` at a
clean end. A beat is a line with its `Standing`. When the worker is
silent, the child goes on as before for `stall_seconds`, and then sends no ping until the worker beats again.
When the worker dies, the pipe ends, and so does the child. Both are in one process group: a signal that
freezes or kills the whole instance reaches the child, too.

What the proxies answer to a D, its partners, the child passes on through its stdout, a socket that keeps
messages apart; the worker looks there at each beat.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec
from msgspec import Struct

from p2pkv.control.discovery import (
    MAX_PARTNERS_BYTES,
    PING_INTERVAL,
    BadPartners,
    Ping,
    Workload,
    decode_partners,
)
from p2pkv.control.pinger import Addresses, OnPartners
from p2pkv.control.warm_up import WarmUp
from p2pkv.pairing import Address

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
"""Between two beats of the worker. The child looks as often whether the worker is still its parent."""

STOP_SECONDS = 2.0
"""How long a clean end may take, with the goodbye."""

STOP = b"stop"
"""In place of the last beat."""


class Standing(Struct, frozen=True):
    """Whether requests may come to the instance, as its worker sees it.

    Attributes:
        trouble: why it is not to be announced, in words; "" if it is.
        paused: vLLM's /pause has been called, and /resume has not.
        workload: of its scheduler; None if that is not known.
        at: when that was so, by this host's monotonic clock.
    """

    trouble: str = ""
    paused: bool = False
    workload: Workload | None = None
    at: float = 0.0


class Announcement(Struct, frozen=True, kw_only=True):
    """The child's task.

    Attributes:
        proxies: host:port of the discovery socket of each proxy that is pinged.
        interval: seconds between two pings.
        stall_seconds: how long the child pings for a worker that is silent.
        secret: with it the child pings as a member; None to ping in the clear.
        warm_up: what is done before the first ping, if anything.
        log_level: of the child's log, which goes to the worker's stderr.
    """

    proxies: tuple[str, ...]
    ping: Ping
    interval: float = PING_INTERVAL
    stall_seconds: float = 120.0
    secret: bytes | None = None
    warm_up: WarmUp | None = None
    log_level: int = logging.INFO


class Orders(Struct, frozen=True):
    """The first line of the pipe. `parent`: the worker's process id."""

    parent: int
    announcement: Announcement


class Announcer:
    """The worker's side: starts the child, beats, and starts it again should it end by itself.

    Raises ValueError for a malformed address of a proxy.

    Args:
        on_partners: called from a thread of the announcer's with the partners that proxies have named, each
            time they change.
        standing: called from that thread before each beat.
    """

    def __init__(
        self,
        announcement: Announcement,
        on_partners: OnPartners = lambda addresses: None,
        standing: Callable[[], Standing] = Standing,
    ) -> None:
        for proxy in announcement.proxies:
            Address.parse(proxy)
        self._announcement = announcement
        self._on_partners = on_partners
        self._standing = standing
        self._trouble = ""
        self._partners: Addresses | None = None
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: socket.socket | None = None
        """What the child passes on from the proxies."""
        self._thread = threading.Thread(target=self._beat, name="p2pkv-announcer", daemon=True)

    @property
    def pid(self) -> int:
        assert self._child is not None, "it has not been started"
        return self._child.pid

    def start(self) -> None:
        """Start the child. Raises OSError if there can be no process."""
        self._spawn(self._announcement)
        self._thread.start()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Have the child send the goodbye and end, within `timeout` seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._child is None:
            return
        self._thread.join(timeout)
        with contextlib.suppress(OSError):
            _write(self._child, STOP + b"\n")
        _close(self._child)
        try:
            self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            log.warning("the announcing process did not end in %g s; it is killed", timeout)
            self._child.kill()
            self._child.wait()
        if self._answers is not None:
            self._answers.close()

    def _spawn(self, announcement: Announcement) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._child = _spawn(announcement, theirs)
            except OSError:
                ours.close()
                raise
        if self._answers is not None:
            self._answers.close()
        self._answers = ours

    def _take_partners(self) -> None:
        """Take the partners that proxies have named to the child since the last beat."""
        assert self._answers is not None
        try:
            while data := self._answers.recv(MAX_PARTNERS_BYTES, socket.MSG_DONTWAIT):
                partners = decode_partners(data)
                if partners != self._partners:
                    self._partners = partners
                    self._on_partners(partners)
        except BlockingIOError:
            return  # no more of them
        except (OSError, BadPartners) as error:
            log.debug("what the announcing process passed on could not be read: %s", error)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_SECONDS):
            assert self._child is not None
            self._take_partners()
            if self._child.poll() is None:
                beat = self._next_beat()
                with contextlib.suppress(OSError):  # it has ended, or is frozen and reads nothing
                    _write(self._child, beat)
                continue
            log.warning(
                "the announcing process ended with status %d; it is started again", self._child.returncode
            )
            _close(self._child)
            with contextlib.suppress(OSError):
                # The instance is warm by now, or the child has waited for as long as it may.
                self._spawn(msgspec.structs.replace(self._announcement, warm_up=None))

    def _next_beat(self) -> bytes:
        now = self._standing()
        if now.trouble and not self._trouble:
            log.warning("this instance is not announced any more: %s", now.trouble)
        elif self._trouble and not now.trouble:
            log.warning("this instance is announced again")
        self._trouble = now.trouble
        return msgspec.json.encode(now) + b"\n"


def _spawn(announcement: Announcement, answers: socket.socket) -> subprocess.Popen[bytes]:
    # -P: a file of the working directory must not stand in for a module. Its stdout is not the worker's:
    # what a worker writes there may be read by a program.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "p2pkv.control.announcer_child"],
        stdin=subprocess.PIPE,
        stdout=answers.fileno(),
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    with contextlib.suppress(BrokenPipeError):  # it has ended already, which the next beat finds out
        _write(child, msgspec.json.encode(Orders(os.getpid(), announcement)) + b"\n")
    return child


def _write(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    os.write(child.stdin.fileno(), data)


def _close(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
