"""The process that starts several workers on one port, and keeps them running. It takes no requests.

Each worker is a proxy of its own and listens at the port by itself, so that the kernel spreads new
connections over those that are there. This process keeps the port for them, listens for pings and repeats
them to all workers, see worker.py, and starts a worker that ends again.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import msgspec

from p2pkv.control.discovery import Ping, are_alike

from .app import end
from .limits import Limits
from .membership.instance import PingSource
from .membership.registry import MAX_INSTANCES
from .siblings import NoAnswer, ask
from .worker import Drains, RepeatedPing, Update, WorkerConfig, WorkerReport

logger = logging.getLogger(__name__)

# Between two updates of a worker; and until one answers that has just been started.
_UPDATE_SECONDS, _START_SECONDS = 1.0, 0.1
# How many updates in a row a frozen worker has not answered: with the time for each, that is 15 s.
_MOST_SILENT = 5
# A worker that dies soon after its start is started again after a pause, which doubles up to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_LIVED_SECONDS = 60.0
# After all that `--drain-seconds` allows: for a worker's own end.
_END_SECONDS = 10.0


class WorkerFailed(OSError):
    """A worker has ended before all of them served; see its log lines."""


def share_of(limits: Limits, workers: int) -> Limits:
    """Each worker's part of the limits that all of them have together."""
    return replace(
        limits,
        max_requests=max(1, limits.max_requests // workers),
        max_waiting=limits.max_waiting // workers,
        max_held=max(1, limits.max_held // workers),
        resume_bytes=limits.resume_bytes // workers,
        max_connections=max(1, limits.max_connections // workers),
    )


# The port.


def reserved(host: str, port: int) -> list[socket.socket]:
    """A socket at each address of `host`, all at one port, which workers share: none listens. Raises
    OSError."""
    made: list[socket.socket] = []
    wanted = port
    try:
        for family, (name, _, *scope) in _addresses(host):
            try:
                # Another program that shares its port, too, would be given half of the connections.
                _bound(family, (name, port, *scope), shared=False).close()
            except OSError as error:
                # `localhost` may name an address of IPv6 where that is off.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                continue
            made.append(_bound(family, (name, port, *scope)))
            port = made[-1].getsockname()[1]
        if not made:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except OSError as error:
        for each in made:
            each.close()
        raise OSError(error.errno, f"cannot serve on {host}:{wanted}: {error.strerror}") from None
    return made


def bound(config: WorkerConfig) -> list[socket.socket]:
    """A worker's own sockets at these addresses. Raises OSError."""
    return [_bound(family, address) for family, address in config.addresses]


def _addresses(host: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Those of this name; an empty one means all interfaces, as in one process."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound(family: socket.AddressFamily, address: tuple[Any, ...], *, shared: bool = True) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        if family == socket.AF_INET6:
            # Else `::` takes the addresses of IPv4, which have a socket of their own, too.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


# They are for the process that starts the workers, which decides when to stop.
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """They would kill a process that has yet to call `ignore_signals`, and Ctrl-C goes to all processes of a
    terminal."""
    # Where this process is not there yet `start` would start it, and let the signals in.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """For a worker, once it runs."""
    for signum in _STOPPING_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING_SIGNALS)


# Pings.


class Pings:
    """What has come at the discovery address; `changed` is called when there is a new instance, or one that
    leaves."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._serials = itertools.count(1)
        self._latest: dict[tuple[PingSource, str, str, int], RepeatedPing] = {}
        """By connection and instance."""
        self._numbers: dict[PingSource, int] = {}

    def take(self, ping: Ping, source: PingSource) -> None:
        key = source, ping.type, ping.http_address, ping.dp_rank
        before = self._latest.get(key)
        if before is None and len(self._latest) >= MAX_INSTANCES:
            return
        serial = next(self._serials)
        number = self._numbers.setdefault(source, serial)
        self._latest[key] = RepeatedPing(number, source.member, serial, ping, time.monotonic())
        if before is None or before.ping.paused != ping.paused or not are_alike(before.ping, ping):
            self._changed()

    def answer(self, number: int, frame: bytes) -> None:
        """What a worker answers to a ping on this connection."""
        for source in [source for source, each in self._numbers.items() if each == number]:
            source.answer(frame)

    def all(self) -> list[RepeatedPing]:
        """The latest of each instance, on connections that stand. A goodbye is one of them: it changes
        nothing for a worker that has had it, or does not know the instance."""
        self._numbers = {source: each for source, each in self._numbers.items() if source.stands()}
        self._latest = {key: each for key, each in self._latest.items() if key[0] in self._numbers}
        return list(self._latest.values())


# The workers.


@dataclass(eq=False)
class _Child:
    """One worker, through all the processes that it has been.

    Attributes:
        served: one of them has served.
        process: the present one; None while there is none.
        serving: it takes requests.
        silent: how many updates in a row it has not answered since.
    """

    config: WorkerConfig
    served: asyncio.Event = field(default_factory=asyncio.Event)
    process: SpawnProcess | None = None
    serving: bool = False
    silent: int = 0


class Supervisor:
    """Starts the workers, and keeps them running.

    Args:
        port: the sockets that keep it.
        folder: where workers find each other.
        begin: what a process does: takes `arguments`, and a WorkerConfig.
    """

    def __init__(
        self,
        workers: int,
        port: Sequence[socket.socket],
        folder: Path,
        begin: Callable[..., None],
        *arguments: Any,
    ) -> None:
        addresses = tuple((each.family, each.getsockname()) for each in port)
        configs = [WorkerConfig(number, workers, addresses, folder) for number in range(1, workers + 1)]
        self.workers = [_Child(config) for config in configs]
        self._port = port
        self._begin = begin
        self._arguments = arguments
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._hurry = False
        self._drains: Drains = []
        self._news = asyncio.Event()
        self.pings = Pings(self._news.set)

    async def start(self, stop: asyncio.Event) -> None:
        """Until all workers serve, or are to `stop`. Raises WorkerFailed."""
        keeping = [asyncio.create_task(self._keep(each)) for each in self.workers]
        self._tasks = [*keeping, asyncio.create_task(self._update_all())]
        all_serve = asyncio.gather(*(each.served.wait() for each in self.workers))
        waits: list[asyncio.Future[Any]] = [all_serve, asyncio.create_task(stop.wait())]
        try:
            await asyncio.wait([*waits, *keeping], return_when=asyncio.FIRST_COMPLETED)
            for each in keeping:
                if each.done() and not stop.is_set():
                    each.result()
        finally:
            await end(waits)

    async def _keep(self, worker: _Child) -> None:
        """Starts a worker again and again. Raises WorkerFailed if it has never served."""
        pause, number = _FIRST_PAUSE, worker.config.number
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                why = await self._live(worker)
            except Exception as error:  # such as no memory, or no descriptors, for now
                why = f"could not be started ({error!r})"
            if self._stopping.is_set():
                return
            if not worker.served.is_set():
                raise WorkerFailed(f"worker {number} {why} before it served")
            pause = _FIRST_PAUSE if time.monotonic() - began > _LIVED_SECONDS else pause
            logger.error("worker %d %s: its requests are lost; another starts in %g s", number, why, pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _live(self, worker: _Child) -> str:
        """One process of a worker, from its start to its end; how it ended."""
        process = multiprocessing.get_context("spawn").Process(
            target=self._begin,
            args=(*self._arguments, worker.config),
            name=f"worker {worker.config.number}",
            daemon=True,
        )
        with _signals_held_back():
            process.start()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(process.sentinel, ended.set)
        worker.process, worker.serving, worker.silent = process, False, 0
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
        worker.process = None
        process.join()
        code = process.exitcode or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    async def _update_all(self) -> None:
        """Until cancelled."""
        while True:
            self._news.clear()
            there = [each for each in self.workers if each.process is not None]
            try:
                update = Update(self.pings.all(), self._drains, self._stopping.is_set(), self._hurry)
                await asyncio.gather(*(self._update(each, update) for each in there))
            except Exception:  # without updates workers lose all instances
                logger.exception("a round of updates failed; the next one comes")
            pause = _UPDATE_SECONDS if all(each.serving for each in there) else _START_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()

    async def _update(self, worker: _Child, update: Update) -> None:
        """One update of one worker, which is killed if it is frozen: what connects to it would wait for ever.
        Silence is measured by questions, not by the clock, since this process may have stood still, too."""
        process, number = worker.process, worker.config.number
        try:
            report = msgspec.convert(await ask(worker.config.socket, "update", update), WorkerReport)
        except NoAnswer:
            worker.silent += worker.serving
            if worker.silent >= _MOST_SILENT and process is not None and process is worker.process:
                logger.error("worker %d has not answered %d times: it is killed", number, worker.silent)
                process.kill()
            return
        worker.silent = 0
        if report.serving:
            self._drains = report.drains
            if not worker.serving:
                logger.info("worker %d serves", number)
            worker.serving = True
            worker.served.set()
        if worker is self.workers[0]:  # the others answer the same
            for connection, frame in report.answers:
                self.pings.answer(connection, frame)

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Has all workers end what they do, within `seconds`, or at once when there is a `hurry`."""
        self._stopping.set()
        for each in self._port:
            each.close()
        self._news.set()
        keeping = self._tasks[: len(self.workers)]
        ending: asyncio.Future[Any] = asyncio.gather(*keeping, return_exceptions=True)
        hurrying: asyncio.Future[Any] = asyncio.create_task(hurry.wait())
        await asyncio.wait([ending, hurrying], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._hurry = True
        self._news.set()
        await asyncio.wait([ending], timeout=_END_SECONDS)
        for worker in self.workers:
            if worker.process is not None and worker.process.is_alive():
                worker.process.kill()
        await end([ending, hurrying, *self._tasks])
