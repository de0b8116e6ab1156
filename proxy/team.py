"""A worker's side of several that serve one port: what it hears from the process that started it, and what it
asks of all workers.

That process, see workers.py, listens for pings and hands on those that its registry has taken. Each worker
has a registry of its own that follows them, and asks the instances for their health itself. What one worker
is asked about all of them (pages, drains) goes to that process, which asks every worker and sends back what
each has said.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from p2pkv.control.discovery import Ping

from .registry import Registry

logger = logging.getLogger(__name__)

_MOST_UNREAD = 16 << 20
"""Most bytes buffered for a process that does not read. Further messages are dropped; later pings repeat what
they said."""
# For all workers to say what they are asked.
ANSWER_SECONDS = 2.0
# How long a new worker waits for the instances' health, and how often it looks.
_BEGIN_SECONDS, _LOOK_SECONDS = 3.0, 0.02


class Pinged(msgspec.Struct, tag=True, frozen=True):
    """A ping that has been taken."""

    ping: Ping


class Lost(msgspec.Struct, tag=True, frozen=True):
    """The instance of this ping is gone, as far as its connection tells."""

    ping: Ping


class Drained(msgspec.Struct, tag=True, frozen=True):
    """The instance of this ping is drained, or no more, also for a worker that has yet to learn of it."""

    ping: Ping
    drained: bool = True


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Ends the first list of instances. `routable`: how many of them the parent would send requests to."""

    routable: int


class Claims(msgspec.Struct, tag=True, frozen=True):
    """So many pings under the address of another live instance have been refused."""

    refused: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """As one signal to a proxy that is one process, or with `hurry` as the second one."""

    hurry: bool = False


class Serving(msgspec.Struct, tag=True, frozen=True):
    """From a worker: it takes requests."""


class Alive(msgspec.Struct, tag=True, frozen=True):
    """From the parent: whether the worker takes in what it is sent. From a worker: it does."""


class Question(msgspec.Struct, tag=True, frozen=True):
    """From a worker: all shall say this. From the parent: say this."""

    number: int
    what: str
    address: str = ""


class Said(msgspec.Struct, tag=True, frozen=True):
    """The answer, under the number of who asked: from a worker its own, from the parent those of all, but for
    so many that are `missing`."""

    number: int
    said: Any
    missing: int = 0


Message = Pinged | Lost | Drained | Begin | Claims | Stop | Serving | Alive | Question | Said
_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Message)


class Channel:
    """Messages between a worker and the process that started it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Over one end of a pair of sockets."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, message: Message) -> None:
        """To who reads it, some time; a message that nobody can get is dropped."""
        if not self._writer.is_closing() and self._unread() < _MOST_UNREAD:
            frame = _encode(message)
            self._writer.write(len(frame).to_bytes(4) + frame)

    def _unread(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    async def messages(self) -> AsyncIterator[Message]:
        """What the other end sends, until it is gone."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4))
                frame = await self._reader.readexactly(size)
                try:
                    message = _decoder.decode(frame)
                except msgspec.MsgspecError as error:
                    logger.error("a message between this proxy's processes was refused: %s", error)
                    continue
                yield message
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def close(self) -> None:
        self._writer.close()


@dataclass(eq=False)
class SharedSource:
    """Where a ping came from that the parent has taken. Who may have an address has been decided there, so
    here every ping is from the same source."""

    here: bool = True
    member: bool = False

    def stands(self) -> bool:
        return self.here

    def tell(self, frame: bytes) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedSource)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Link:
    """What connects a worker with the process that started it.

    Attributes:
        stop, hurry: to be set when that process says so, or is gone.
    """

    channel: Channel
    stop: asyncio.Event
    hurry: asyncio.Event


@dataclass(frozen=True)
class Heard:
    """What workers have said.

    Attributes:
        parts: of each that has answered; at least one.
        complete: all have.
    """

    parts: list[Any]
    complete: bool = True


class Team:
    """All workers, or the only one.

    Args:
        parts: what this worker has to say for itself, each with an address that may be "".
        link: None for the only one.
    """

    def __init__(self, parts: Mapping[str, Callable[[str], Any]], link: Link | None = None) -> None:
        self._parts = parts
        self._link = link
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Heard]] = {}
        self._routable: int | None = None
        """How many instances the parent had when this worker began; None before it has said so."""

    async def ready(self, registry: Registry, clock: Callable[[], float]) -> None:
        """Until this worker has the instances that the parent has. Else it would turn away what has connected
        while there was none in its place."""
        end = clock() + _BEGIN_SECONDS
        while clock() < end:
            there = len(registry.routable("P", clock())) + len(registry.routable("D", clock()))
            if self._routable is not None and there >= self._routable:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def ask(self, what: str, address: str = "") -> Heard:
        """What each worker says; only this one if the others cannot be asked."""
        if self._link is None:
            return Heard([self._parts[what](address)])
        number = next(self._numbers)
        said: asyncio.Future[Heard] = asyncio.get_running_loop().create_future()
        self._asked[number] = said
        self._link.channel.send(Question(number, what, address))
        try:
            async with asyncio.timeout(2 * ANSWER_SECONDS):
                heard = await said
        except TimeoutError:
            logger.warning("the other workers could not be asked for their %s", what)
            heard = Heard([], complete=False)
        finally:
            del self._asked[number]
        return heard if heard.parts else Heard([self._parts[what](address)], complete=False)

    async def follow(self, registry: Registry, clock: Callable[[], float], hurry: Callable[[], None]) -> None:
        """Does what the parent says, until that is gone; `hurry` is called when there is a new instance."""
        assert self._link is not None
        try:
            async for message in self._link.channel.messages():
                try:
                    if isinstance(message, Pinged):
                        if self._take(registry, message.ping, clock()):
                            hurry()
                    else:
                        self._hear(registry, self._link, message)
                except Exception:  # one message must not end the worker
                    logger.exception("a message of the process that started this worker failed, going on")
        finally:
            if not self._link.stop.is_set():
                logger.warning("the process that started this worker is gone: it stops, too")
                self._link.stop.set()

    def _hear(self, registry: Registry, link: Link, message: Message) -> None:
        match message:
            case Lost(ping):
                _source_of(registry, ping).here = False
            case Drained(ping, drained):
                registry.drained_before(ping, drained)
            case Begin(routable):
                self._routable = routable
            case Claims(refused):
                registry.claims_refused = refused
            case Stop(hurry=hurry):
                (link.hurry if hurry else link.stop).set()
            case Alive():
                link.channel.send(Alive())
            case Question(number, what, address):
                link.channel.send(Said(number, self._parts[what](address)))
            case Said(number, said, missing) if number in self._asked and not self._asked[number].done():
                self._asked[number].set_result(Heard(said, complete=not missing))

    def _take(self, registry: Registry, ping: Ping, now: float) -> bool:
        """Whether it is new."""
        new = registry.observe(ping, now, SharedSource()) is not None
        _source_of(registry, ping).here = True
        return new


def _source_of(registry: Registry, ping: Ping) -> SharedSource:
    """That of the instance with this ping; one that nobody has if it is listed, or is not there."""
    known = registry.of(ping)
    source = None if known is None else known.source
    return source if isinstance(source, SharedSource) else SharedSource()
