"""One request to one instance, which can be ended at any moment."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import aiohttp
from aiohttp import AddrInfoType
from aiohttp.http import HttpProcessingError, RawResponseMessage, StreamWriter
from multidict import CIMultiDictProxy
from yarl import URL

from .http import GIVEN_UP, STOPPED, Headers, first_event_came, first_event_failed, first_event_message
from .registry import Instance

logger = logging.getLogger(__name__)

# vLLM's server closes a connection that was idle for 5 s; one that it may be closing is not used again.
_KEEPALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
# The same, and the time to look its name up.
_REACH_SECONDS = 10.0
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=_REACH_SECONDS, sock_connect=_CONNECT_SECONDS)
# The largest answer that is read whole: errors, lists of models, P's single tokens.
_MAX_WHOLE_BYTES = 64 << 20
# How much of an event stream is held back until its first event that says something.
_MAX_WORDS_BYTES = 64 << 10
# An answer that is no stream comes at once when it is complete. Up to this size it is held back until all of
# it has arrived, so that another instance can be asked if it does not come whole.
_MAX_HELD_BYTES = 1 << 20
# Of so many URLs it is remembered where they lead.
_MAX_PLACES = 4096

# While the proxy waits for an answer it sends nothing, and it does not probe an instance that has said
# goodbye. If that instance's host went down then, it would wait for ever. So TCP probes the host after 10 s
# of silence, and gives up after 20. The host's kernel answers, however busy its processes are.
_KEEPALIVE_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 5}

EVENT_STREAM = "text/event-stream"


class Client:
    """A proxy's connections to instances: as many as there are requests, and no deadline on an answer.

    Connections are kept for the next request. An instance may close an idle one at the very moment in which
    it is used again. That is nobody's failure: the request goes once more, over a new connection.

    aiohttp makes and keeps the connections and reads what comes. Requests are written here: with a
    ClientSession, which can do much that no instance asks for, a call takes twice as much of the processor.

    Attributes:
        kept: what is asked by `get`, over the connections that are kept.
        reconnected: how many requests went once more.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, socket_factory=_socket
        )
        self._fresh = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket)
        self.kept = aiohttp.ClientSession(
            connector=connector,
            timeout=_TIMEOUT,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept"),
        )
        self._places = lru_cache(_MAX_PLACES)(self._place)
        self.reconnected = 0

    def _place(self, url: str) -> aiohttp.ClientRequest:
        """Where a connection leads to, as aiohttp's connectors want to be told."""
        return aiohttp.ClientRequest("POST", URL(url), loop=self._loop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kept.close()
        await self._fresh.close()

    def get(self, url: str, **options: Any) -> Any:
        """As aiohttp's own methods, which try once more by themselves."""
        return self.kept.get(url, **options)

    async def post(
        self, url: str, data: bytes, headers: Headers, again: Callable[[], None] = lambda: None
    ) -> Answer:
        """The head of the answer; `again` is called if the request goes once more. Raises aiohttp.ClientError
        or OSError."""
        place = self._places(url)
        headers["Host"] = place.headers["Host"]
        headers["Content-Length"] = str(len(data))
        head = f"POST {place.url.raw_path_qs} HTTP/1.1"
        connection = await _connected(self.kept.connector, place)
        # Its protocol gets a parser with its first request.
        idle = connection.protocol._parser is not None
        try:
            return await self._ask(connection, head, headers, data)
        except (aiohttp.ClientError, OSError) as error:
            if not (idle and _closed_unanswered(error)):
                raise
            logger.info("%s closed an idle connection as it was used: once more, over a new one", url)
        self.reconnected += 1
        again()
        return await self._ask(await _connected(self._fresh, place), head, headers, data)

    async def _ask(self, connection: Any, head: str, headers: Headers, data: bytes) -> Answer:
        """The head of the answer that comes over this connection, which is closed if none comes."""
        protocol = connection.protocol
        try:
            protocol.set_response_params(read_until_eof=True)
            writer = StreamWriter(protocol, self._loop)
            await writer.write_headers(head, headers)
            # Not to wait for the instance to read all of it: it may answer before that.
            await writer.write(data, drain=False)
            writer.set_eof()
            while True:
                message, content = await protocol.read()
                if message.code >= 200 or message.code == 101:
                    return Answer(connection, message, content)
        except HttpProcessingError as error:
            connection.close()
            raise aiohttp.ClientError(f"no HTTP: {error.message}") from error
        except BaseException:
            connection.close()
            raise

    @property
    def open(self) -> int:
        """Connections on which something is under way."""
        return sum(len(each._acquired) for each in (self.kept.connector, self._fresh) if each is not None)


class Answer:
    """An instance's answer to one request, from its head on. Its connection is kept for others once all of
    the body has come."""

    def __init__(self, connection: Any, message: RawResponseMessage, content: aiohttp.StreamReader) -> None:
        self.connection = connection
        self.status = message.code
        self.headers: CIMultiDictProxy[str] = message.headers
        self.content = content
        content.on_eof(connection.release)

    @property
    def content_type(self) -> str:
        """In lower case and without parameters; "" if there is none."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def close(self) -> None:
        """Aborts what has not come yet, by closing the connection; whoever waits for it gets an
        aiohttp.ClientError. Idempotent."""
        if not self.content.is_eof() and self.content.exception() is None:
            self.content.set_exception(aiohttp.ClientConnectionError("the answer was closed"))
        self.connection.close()


async def _connected(connector: aiohttp.BaseConnector | None, place: aiohttp.ClientRequest) -> Any:
    """A connection. Raises aiohttp.ClientError or OSError."""
    assert connector is not None
    try:
        return await connector.connect(place, [], _TIMEOUT)
    except TimeoutError as error:
        raise aiohttp.ConnectionTimeoutError(f"no connection to {place.url} in time") from error


def _closed_unanswered(error: Exception) -> bool:
    """Whether a connection ended before any byte of an answer."""
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return isinstance(error.message, str)  # else it holds the part of a head that has arrived
    if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
        return False
    return isinstance(error, ConnectionError | aiohttp.ClientOSError)


def _socket(place: AddrInfoType) -> socket.socket:
    """For a connection that breaks when the other host is gone."""
    family, kind, protocol, *_ = place
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_PROBES.items():
        made.setsockopt(socket.IPPROTO_TCP, name, value)
    return made


class CallFailed(Exception):
    """An instance gave no whole answer. The message is for the client; the log has the details."""


class Silent(CallFailed):
    """An instance has been silent for a lease. It may be frozen; nothing shows that it died."""


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class Errored(CallFailed):
    """An instance's event stream begins with an error. `said`: its own words."""

    def __init__(self, said: str) -> None:
        super().__init__("answered with an error before its first token")
        self.said = said


class InstanceRefused(Exception):
    """An instance answered, but not with success."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"it answered {reply.status}")
        self.reply = reply


class Call:
    """One POST to one instance. `close` aborts it, by closing the connection.

    Attributes:
        instance: who is asked.
        tokens: of the prompt, that it computes while this call is open; 0 if it is no P.
        again: called if the request goes once more, over another connection.
    """

    def __init__(
        self,
        session: Client,
        instance: Instance,
        path: str,
        again: Callable[[], None] = lambda: None,
        tokens: int = 0,
    ) -> None:
        self.instance = instance
        self.tokens = tokens
        self.again = again
        self._session = session
        self._url = instance.url + path
        self._asking: asyncio.Task[Any] | None = None
        self._response: Answer | None = None
        self._given_up: CallFailed | None = None
        self._cleanup = ExitStack()

    async def open(self, body: bytes, headers: Headers) -> Answer:
        """Sends the request and waits for the answer's head. Raises CallFailed."""
        self._cleanup.enter_context(self.instance.busy(self._give_up, self.tokens))
        self._asking = asyncio.current_task()
        try:
            self._response = await self._session.post(self._url, body, headers, self.again)
        except asyncio.CancelledError:
            # By us, unless somebody else has cancelled this task, too.
            if self._given_up is not None and self._asking is not None and not self._asking.uncancel():
                raise self._given_up from None
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            if not _is_ours(error):
                self.instance.healthy = False  # until its /health answers again
            raise CallFailed("could not be reached") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed("closed the connection before it answered") from error
        finally:
            self._asking = None
        return self._response

    def _give_up(self, known: bool) -> None:
        """The instance is dead: whoever waits for it gets CallFailed."""
        if self._given_up is not None:
            return
        self._given_up = CallFailed("is gone") if known else Silent("has stopped answering")
        if self._response is not None:
            self._response.close()
        elif self._asking is not None:
            self._asking.cancel()

    async def whole(self, body: bytes, headers: Headers) -> Reply:
        """The whole answer. Raises CallFailed, or InstanceRefused if it is no success."""
        response = await self.open(body, headers)
        try:
            reply = await read_whole(response)
        except CallFailed:
            if self._given_up is not None:
                raise self._given_up from None
            raise
        if not reply.ok:
            raise InstanceRefused(reply)
        return reply

    def close(self) -> None:
        """Ends the call. A connection whose answer was read to its end is kept for others. Idempotent."""
        if self._response is not None:
            self._response.close()
        self._cleanup.close()


def _is_ours(error: Exception) -> bool:
    """Whether a connection did not come about because this machine had no descriptors left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


async def read_whole(response: Answer | aiohttp.ClientResponse) -> Reply:
    """The rest of an answer. Raises CallFailed."""
    body = bytearray()
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _MAX_WHOLE_BYTES:
                raise CallFailed("answered with too many bytes")
        return Reply(response.status, response.headers, bytes(body))
    except (aiohttp.ClientError, OSError) as error:
        raise CallFailed("died in the middle of its answer") from error


async def first_words(response: Answer) -> bytes:
    """The start of a successful answer, as far as it proves that generation has begun: in an event stream
    everything up to the first event that says something, else all of it, or its first MiB. Raises CallFailed
    if there is none."""
    streamed = response.content_type == EVENT_STREAM
    most = _MAX_WORDS_BYTES if streamed else _MAX_HELD_BYTES
    head = b""
    try:
        while chunk := await response.content.readany():
            head += chunk
            if (streamed and first_event_came(head)) or len(head) > most:
                break
        else:
            if streamed or not head:
                raise CallFailed("ended its answer without a token")
    except (aiohttp.ClientError, OSError) as error:
        raise CallFailed(f"died before its {'first token' if streamed else 'answer was complete'}") from error
    if GIVEN_UP in head:
        raise CallFailed(STOPPED)
    if streamed and first_event_failed(head):
        raise Errored(first_event_message(head))
    return head
