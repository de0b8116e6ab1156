"""One server process with its children: start it, wait until it serves, stop it, leave nothing behind."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

_POLL_SECONDS = 0.1


class ServerFailed(Exception):
    """A server ended, or did not get healthy in time; the text holds the end of its log."""


class ServerProcess:
    """A program in a process group of its own, so that its children can be reached and ended with it.

    A context manager: entering starts the program (without waiting, so that several can start side by
    side), leaving stops it. All methods are for one thread.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, health_url: str, log_path: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self._health_url = health_url
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the program, which is also the id of its process group."""
        assert self._process is not None, f"{self.name} has not been started"
        return self._process.pid

    def start(self) -> None:
        """Start the program; `wait_ready` waits until it serves. May be called again after a stop."""
        assert self._process is None, f"{self.name} runs already"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                # A group to signal, but no session: Linux schedules sessions as groups of their own
                # (autogroup), and beside vLLM's spinning processes one was seen to wait for seconds.
                process_group=0,
            )
        self._started_at = time.monotonic()

    def wait_ready(self, timeout_seconds: float = 300.0) -> float:
        """Wait until the health page answers 200; returns the seconds since the program was started.

        Raises ServerFailed as soon as the program ends, or `timeout_seconds` after this call.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if not self.running():
                raise ServerFailed(f"{self.name} ended before it served anything.\n{self.log_tail()}")
            if answers_ok(self._health_url):
                return time.monotonic() - self._started_at
            time.sleep(_POLL_SECONDS)
        raise ServerFailed(f"{self.name} did not serve within {timeout_seconds:g} s.\n{self.log_tail()}")

    def running(self) -> bool:
        """Whether the program itself still runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self, grace_seconds: float = 20.0) -> None:
        """End the program and its children: by SIGTERM, and after `grace_seconds` by SIGKILL. Idempotent."""
        if self._process is None:
            return
        try:
            self._signal(signal.SIGCONT)
            self._process.terminate()
            self._wait_empty(grace_seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the program and its children at once (SIGKILL), and wait until all are gone. Idempotent."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        if not self._wait_empty(30.0):
            raise ServerFailed(f"{self.name}: processes {group_members(self.pid)} survive SIGKILL")
        self._process = None

    def freeze(self) -> None:
        """Freeze the program and its children (SIGSTOP); their sockets stay open."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them run on after `freeze`."""
        self._signal(signal.SIGCONT)

    def log_tail(self, lines: int = 40) -> str:
        """The end of the log, under a line that names it."""
        try:
            text = self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            text = "(no log)"
        return f"--- end of {self.log_path}\n" + "\n".join(text.splitlines()[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _wait_empty(self, timeout_seconds: float) -> bool:
        """Reap the program and wait for its children to be gone; False when the time is over."""
        assert self._process is not None
        deadline = time.monotonic() + timeout_seconds
        while True:
            ended = self._process.poll() is not None
            if ended and not group_members(self.pid):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS / 2)


def group_members(group: int) -> list[int]:
    """Ids of the processes in a process group, without those that have ended and only wait to be reaped."""
    members = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        # pid (name, which may hold anything) state ppid pgrp ...
        state, _parent, pgrp = stat[stat.rindex(")") + 2 :].split()[:3]
        if int(pgrp) == group and state not in ("Z", "X"):
            members.append(int(entry.name))
    return members


def answers_ok(url: str, timeout_seconds: float = 2.0) -> bool:
    """Whether a GET of this page, on this machine, ends with status 200."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy says
    try:
        with direct.open(url, timeout=timeout_seconds) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def wait_until(true: Callable[[], bool], what: str, timeout_seconds: float = 30.0) -> None:
    """Poll `true` until it holds. Raises TimeoutError with `what` did not come."""
    deadline = time.monotonic() + timeout_seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)


class Ports:
    """Ports in blocks, one for each process, which holds it by a socket bound to the block's first port."""

    def __init__(self, first: int, blocks: int, block: int) -> None:
        self._first, self._blocks, self._block = first, blocks, block
        self._pid = 0
        self._claim = socket.socket()
        self._mine = range(0)
        self._next = 0

    def take(self, count: int) -> int:
        """The first of `count` consecutive free ports; none twice, until all of the block were given.

        Raises ValueError if the block holds fewer, RuntimeError if other processes hold all blocks, or none
        of this one's is free.
        """
        if not 0 < count < self._block:
            raise ValueError(f"{count} consecutive ports, expected 1 to {self._block - 1}")
        if self._pid != os.getpid():  # after a fork the parent goes on with its own block
            self._take_block()
        for _ in self._mine:
            if self._next + count > len(self._mine):
                self._next = 0
            ports = self._mine[self._next : self._next + count]
            self._next += count
            if all(map(_is_free, ports)):
                return ports[0]
        raise RuntimeError(f"no {count} consecutive free ports from {self._mine[0]} to {self._mine[-1]}")

    def _take_block(self) -> None:
        pid = os.getpid()
        for number in range(self._blocks):
            first = self._first + (pid + number) % self._blocks * self._block
            claim = socket.socket()
            try:
                claim.bind(("", first))
            except OSError:
                claim.close()
                continue
            self._claim.close()
            self._pid, self._claim, self._next = pid, claim, 0
            self._mine = range(first + 1, first + self._block)
            return
        last = self._first + self._blocks * self._block - 1
        raise RuntimeError(f"other processes have taken all ports from {self._first} to {last}: end some")


_ports = Ports(20000, blocks=23, block=512)


def free_ports(count: int = 1) -> int:
    """The first of `count` (at most 511) consecutive TCP ports that no process listens on now.

    Another process that asks here gets others, and this one the same again only after 511 others. They
    lie below the range from which the kernel takes ports for outgoing connections, where another process's
    connection could take one between this call and its use.
    """
    return _ports.take(count)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into an exception, so that servers are stopped on the way out.

    Later ones are ignored, because they would interrupt that very clean-up. For the main thread.
    """
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _frame: object) -> None:
        for each in watched:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = [(number, signal.signal(number, end)) for number in watched]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
