"""Several workers on one port: the process that starts them.

It takes no requests. It binds the port once for each worker, so that the kernel spreads new connections over
them, and keeps those sockets: what connects while a worker is dead waits for its successor. It listens for
pings, tells D's their partners, and hands each ping that its registry takes to all workers; see team.py for
their side. A worker that dies is started again, with what it has to know.
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

from p2pkv.control.discovery import Ping
from p2pkv.control.security import Members

from .admission import Limits
from .app import end
from .instances import at
from .listed import ListedInstance, ListedInstances
from .listener import Listener
from .metrics import Family, growing
from .registry import Instance, ListedSource, PingSource, Registry
from .serving import Proxy
from .team import (
    ANSWER_SECONDS,
    Alive,
    Begin,
    Channel,
    Claims,
    Drained,
    Lost,
    Message,
    Pinged,
    Question,
    Said,
    Serving,
    Stop,
)
from .upstream import Client

logger = logging.getLogger(__name__)

_BACKLOG = 128
_LOOK_SECONDS = 1.0
# A worker that dies soon after its start is started again after a pause, which doubles up to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0
_LIVED_SECONDS = 60.0
# How often a worker is asked whether it is alive, and how many answers in a row a frozen one has not given.
_ALIVE_SECONDS, _MOST_UNANSWERED = 3.0, 5
# After all that `--drain-seconds` allows: for a worker's own end.
_END_SECONDS = 10.0


class WorkerFailed(OSError):
    """A worker has ended before all of them served; it has said why."""


def share_of(limits: Limits, workers: int) -> Limits:
    """Each worker's part of the limits that all of them have together."""
    return replace(
        limits,
        max_requests=max(1, limits.max_requests // workers),
        max_waiting=limits.max_waiting // workers,
        max_held=max(1, limits.max_held // workers),
    )


def bound(host: str, port: int, workers: int) -> list[list[socket.socket]]:
    """For each worker a listening socket at each address of `host`, all at one port. Raises OSError."""
    made: list[list[socket.socket]] = [[] for _ in range(workers)]
    wanted = port
    try:
        for family, (name, _, *scope) in _addresses(host):
            if _here(family, (name, port, *scope)):
                for each in made:
                    each.append(_bound(family, (name, port, *scope)))
                    port = each[-1].getsockname()[1]
        if not made[0]:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        for listening in itertools.chain(*made):
            listening.listen(_BACKLOG)
    except OSError as error:
        for listening in itertools.chain(*made):
            listening.close()
        raise OSError(error.errno, f"cannot serve on {host}:{wanted}: {error.strerror}") from None
    return made


_SocketAddress = tuple[Any, ...]


def _addresses(host: str) -> list[tuple[socket.AddressFamily, _SocketAddress]]:
    """Those of this name; an empty one means all interfaces, as in one process."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _here(family: socket.AddressFamily, address: _SocketAddress) -> bool:
    """Whether this machine has the address: `localhost` may name one of IPv6 where that is off.

    Raises OSError if another program listens there. One of the same user that shares its port, too, would be
    given half of the connections.
    """
    try:
        with _socket(family) as probe:
            probe.bind(address)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        return False
    return True


def _bound(family: socket.AddressFamily, address: _SocketAddress) -> socket.socket:
    made = _socket(family)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


def _socket(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        # Else `::` takes the addresses of IPv4, which have a socket of their own, too.
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made


# They are for the process that starts the workers, which says when to stop.
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


@dataclass(frozen=True)
class Seat:
    """What a worker's process is given.

    Attributes:
        number: from 1 on.
        listening: where it takes connections; a socket for each address.
        end: its end of the channel to the process that has started it.
    """

    number: int
    listening: Sequence[socket.socket]
    end: socket.socket


@dataclass(eq=False)
class _Worker:
    """One worker, through all the processes that it has been.

    Attributes:
        channel: None while there is no process.
        unanswered: how often in a row its process has not said that it is alive; None until it serves.
        measured: what its process has counted, as it said last.
    """

    number: int
    listening: Sequence[socket.socket]
    serves: asyncio.Event = field(default_factory=asyncio.Event)
    channel: Channel | None = None
    process: SpawnProcess | None = None
    unanswered: int | None = None
    measured: list[Family] = field(default_factory=list)

    def send(self, message: Message) -> None:
        if self.channel is not None:
            self.channel.send(message)


class Membership:
    """What the workers share: who the instances are, and who is drained.

    Args:
        tell: sends all workers a message.
    """

    def __init__(self, proxy: Proxy, tell: Callable[[Message], None]) -> None:
        self.proxy = proxy
        self._tell = tell
        self._pings: set[Ping] = set()
        """Of those that the workers have heard of."""

    def take(self, ping: Ping, source: PingSource) -> None:
        """One ping from a discovery socket, which the workers get if it counts."""
        registry, before = self.proxy.registry, len(self.proxy.instances())
        self.proxy.take(ping, source)
        left = ping.leaving and len(self.proxy.instances()) < before
        if left or registry.of(ping) is not None:
            self._tell(Pinged(ping))

    async def look(self) -> None:
        """Tells the workers who is gone without a goodbye, and how many were refused; until cancelled."""
        while True:
            now = {each.ping for each in self._pinging()}
            for ping in self._pings - now:
                self._tell(Lost(ping))
            self._pings = now
            self._tell(Claims(self.proxy.registry.claims_refused))
            await asyncio.sleep(_LOOK_SECONDS)

    def _pinging(self) -> list[Instance]:
        return [each for each in self.proxy.instances() if not isinstance(each.source, ListedSource)]

    def all(self) -> list[Message]:
        """For a worker that begins."""
        registry, now = self.proxy.registry, self.proxy.clock()
        drained = [Drained(each.ping) for each in self.proxy.instances() if each.drained]
        routable = len(registry.routable("P", now)) + len(registry.routable("D", now))
        return [*drained, *(Pinged(each.latest) for each in self._pinging()), Begin(routable)]

    def drain(self, address: str, drained: bool) -> None:
        """An operator's word, to any worker."""
        for each in at(self.proxy, address):
            self.proxy.registry.drain(each, drained)
            self._tell(Drained(each.ping, drained))


class Supervisor:
    """Starts the workers, keeps them running, and hands on what they say to each other.

    Args:
        listening: the sockets of each.
        begin: what a process does: takes `arguments`, and a Seat.
    """

    def __init__(
        self, listening: Sequence[Sequence[socket.socket]], begin: Callable[..., None], *arguments: Any
    ) -> None:
        self.workers = [_Worker(number, each) for number, each in enumerate(listening, 1)]
        self.membership: Membership | None = None
        self._begin = begin
        self._arguments = arguments
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeping: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()

    def tell(self, message: Message) -> None:
        """Sends all workers a message."""
        for each in self.workers:
            each.send(message)

    async def start(self, stop: asyncio.Event) -> None:
        """Until all workers serve, or are to `stop`. Raises WorkerFailed."""
        self._keeping = [asyncio.create_task(self._keep(each)) for each in self.workers]
        self._tasks.add(asyncio.create_task(self._watch()))
        waits = [asyncio.create_task(each) for each in (self._until_all_serve(), stop.wait())]
        try:
            await asyncio.wait([*waits, *self._keeping], return_when=asyncio.FIRST_COMPLETED)
            for each in self._keeping:
                if each.done() and not stop.is_set():
                    each.result()
        finally:
            await end(waits)

    async def _until_all_serve(self) -> None:
        for each in self.workers:
            await each.serves.wait()

    async def _keep(self, worker: _Worker) -> None:
        """Starts a worker again and again. Raises WorkerFailed if it has never served."""
        pause = _FIRST_PAUSE
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                why = await self._live(worker)
            except Exception as error:  # such as no memory, or no descriptors, for now
                why = f"could not be started ({error!r})"
            if self._stopping.is_set():
                return
            if not worker.serves.is_set():
                raise WorkerFailed(f"worker {worker.number} {why} before it served")
            pause = _FIRST_PAUSE if time.monotonic() - began > _LIVED_SECONDS else pause
            logger.error(
                "worker %d %s: the requests that it had are lost, and another is started", worker.number, why
            )
            await self._rest(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _watch(self) -> None:
        """Kills workers that are frozen: what connects to them would wait for ever. Silence is measured by
        questions, not by the clock, since this process may have stood still, too."""
        while not self._stopping.is_set():
            await self._rest(_ALIVE_SECONDS)
            for worker in self.workers:
                if worker.unanswered is not None and worker.process is not None:
                    self._look_after(worker, worker.unanswered, worker.process)

    def _look_after(self, worker: _Worker, unanswered: int, process: SpawnProcess) -> None:
        if unanswered < _MOST_UNANSWERED:
            worker.unanswered = unanswered + 1
            worker.send(Alive())
        else:
            silence = _ALIVE_SECONDS * _MOST_UNANSWERED
            logger.error("worker %d has answered nothing for %g s: it is killed", worker.number, silence)
            worker.unanswered = None
            process.kill()

    async def _rest(self, seconds: float) -> None:
        """For so long, or until all is to stop."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _live(self, worker: _Worker) -> str:
        """One process of a worker, from its start to its end; how it ended, in words."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                worker.process = process = self._started(worker, theirs)
            worker.channel = channel = await Channel.over(ours)
        except BaseException:
            ours.close()
            raise
        for message in self.membership.all() if self.membership else []:
            channel.send(message)
        if self._stopping.is_set():
            channel.send(Stop())
        try:
            async for message in channel.messages():
                self._hear(worker, message)
        finally:
            worker.channel = worker.unanswered = None
            worker.measured = []
            channel.close()
        await asyncio.to_thread(process.join, _END_SECONDS)
        code = process.exitcode
        if code is None:
            process.kill()
            return "hung up and was killed"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def _started(self, worker: _Worker, end: socket.socket) -> SpawnProcess:
        process = multiprocessing.get_context("spawn").Process(
            target=self._begin,
            args=(*self._arguments, Seat(worker.number, worker.listening, end)),
            name=f"worker {worker.number}",
            daemon=True,
        )
        with _signals_held_back():
            process.start()
        return process

    def _hear(self, worker: _Worker, message: Message) -> None:
        match message:
            case Serving():
                worker.serves.set()
                worker.unanswered = 0
                logger.info("worker %d serves", worker.number)
            case Alive():
                worker.unanswered = 0
            case Question():
                task = asyncio.create_task(self._ask_all(worker, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Said(number, said) if number in self._asked and not self._asked[number].done():
                self._asked[number].set_result(said)

    async def _ask_all(self, asker: _Worker, ask: Question) -> None:
        """Who says nothing in time is missing: it may be frozen, or still starting. One without a process has
        nothing to say."""
        if self.membership is not None and ask.what in ("drain", "resume"):
            self.membership.drain(ask.address, ask.what == "drain")
        numbers = []
        asked: dict[_Worker, asyncio.Future[Any]] = {}
        for worker in [asker, *(each for each in self.workers if each is not asker and each.channel)]:
            number = next(self._numbers)
            numbers.append(number)
            asked[worker] = self._asked[number] = asyncio.get_running_loop().create_future()
            worker.send(Question(number, ask.what, ask.address))
        await asyncio.wait(asked.values(), timeout=ANSWER_SECONDS)
        for number in numbers:
            del self._asked[number]
        said = [each.result() for each in asked.values() if each.done()]
        missing = len(asked) - len(said)
        if ask.what == "metrics":
            said += self._measured(asked)
        asker.send(Said(ask.number, said, missing))

    def _measured(self, asked: Mapping[_Worker, asyncio.Future[Any]]) -> list[Any]:
        """Of those that are late, what has only grown since: without it the sums would fall, which Prometheus
        takes for a new start."""
        for worker, answer in asked.items():
            if answer.done():
                worker.measured = growing(answer.result())
        return [each.measured for each, answer in asked.items() if each.measured and not answer.done()]

    async def stop(self, seconds: float, hurry: asyncio.Event) -> None:
        """Has all workers end what they do, within `seconds`, or at once when there is a `hurry`."""
        self._stopping.set()
        for worker in self.workers:
            for each in worker.listening:
                each.close()
        self.tell(Stop())
        ending = asyncio.create_task(self._until_all_ended())
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait([ending, hurrying], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self.tell(Stop(hurry=True))
        await asyncio.wait([ending], timeout=_END_SECONDS)
        await end([ending, hurrying])
        for worker in self.workers:
            if worker.process is not None and worker.process.is_alive():
                worker.process.kill()
        await end([*self._keeping, *self._tasks])

    async def _until_all_ended(self) -> None:
        await asyncio.gather(*self._keeping, return_exceptions=True)


@asynccontextmanager
async def sharing(
    supervisor: Supervisor,
    discovery: str,
    plain_discovery: str | None,
    members: Members | None,
    listed: Sequence[ListedInstance],
    limits: Limits,
) -> AsyncIterator[list[Listener]]:
    """The membership that the workers share, and the sockets on which it listens. Raises OSError."""
    async with AsyncExitStack() as cleanup:
        session = await cleanup.enter_async_context(Client())
        registry = Registry(lease=limits.lease)
        proxy = Proxy(session, registry, "concurrent", limits)
        supervisor.membership = membership = Membership(proxy, supervisor.tell)
        there = ListedInstances(listed, session, registry, proxy.take, members, proxy.clock)
        listeners = [Listener(discovery, membership.take, members)]
        cleanup.callback(listeners[0].close)
        if plain_discovery is not None:
            listeners.append(Listener(plain_discovery, membership.take))
            cleanup.callback(listeners[1].close)
        forever = [proxy.prober.run(), there.run(), membership.look(), *(each.run() for each in listeners)]
        tasks = [asyncio.create_task(each) for each in forever]
        cleanup.push_async_callback(end, tasks)
        yield listeners
