"""How the processes of a proxy with several workers ask each other.

Each worker answers on a socket in a folder that only its user can enter: the supervisor, which sends it what
has pinged, and the other workers. Whichever worker is asked for a page, or to drain an instance, asks all of
them and adds up the answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from .exposition import Family, growing

logger = logging.getLogger(__name__)

# For a worker to answer.
ANSWER_SECONDS = 2.0

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

Parts = Mapping[str, Callable[[Any], Any]]
"""What a worker answers, each with what is asked about it."""


class NoAnswer(Exception):
    """A worker has not answered in time."""


async def ask(worker: Path, what: str, about: Any) -> Any:
    """The answer of the worker at this socket. Raises NoAnswer."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(worker)), timeout=timeout) as session,
            session.post(f"http://worker/{what}", data=_encode(about)) as answer,
        ):
            answer.raise_for_status()
            return _decode(await answer.read())
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
        raise NoAnswer(repr(error)) from error


@asynccontextmanager
async def answering(socket: Path, parts: Parts) -> AsyncIterator[None]:
    """Answers at this socket. Raises OSError if that is not possible."""

    async def answer(request: web.Request) -> web.Response:
        part = parts[request.match_info["what"]]
        return web.Response(body=_encode(part(_decode(await request.read()))))

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/{what}", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket)).start()
        yield
    finally:
        await runner.cleanup()


class Siblings:
    """All workers, or the only one. `parts`: what this one answers for itself; `others`: the sockets of the
    others, by their numbers."""

    def __init__(self, parts: Parts, others: Mapping[int, Path] | None = None) -> None:
        self._parts, self._others = parts, others or {}
        self._counted: dict[int, list[Family]] = {}
        """What each of them has counted, by its last answer."""

    async def ask(self, what: str, about: Any = None) -> tuple[list[Any], bool]:
        """The answers of all workers, the first of them this one's, and whether they are complete. One that
        does not answer in time is missing: frozen, or starting."""
        found = await asyncio.gather(*(self._ask(each, what, about) for each in self._others))
        answers = dict(zip(self._others, found, strict=True))
        there = {number: part for number, part in answers.items() if part is not None}
        parts = [self._parts[what](about), *there.values()]
        if what == "metrics":
            # What has only grown since: without it the sums would fall, which Prometheus takes for a restart.
            self._counted |= {number: growing(part) for number, part in there.items()}
            parts += [self._counted[each] for each in answers if each not in there and each in self._counted]
        return parts, len(there) == len(answers)

    async def _ask(self, number: int, what: str, about: Any) -> Any:
        try:
            return await ask(self._others[number], what, about)
        except NoAnswer as error:
            logger.warning("worker %d did not answer when asked for its %s: %s", number, what, error)
            return None
