"""One request to one instance, which can be ended at any moment."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import AddrInfoType
from multidict import CIMultiDictProxy

from .http import GIVEN_UP, STOPPED, Headers, first_event_came, first_event_failed, first_event_message
from .registry import Instance, Loss

logger = logging.getLogger(__name__)

# vLLM's server closes a connection that was idle for 5 s; one that it may be closing is not used again.
_KEEPALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
# The same, and the time to look its name up.
_REACH_SECONDS = 10.0
# The largest answer that is read whole: errors, lists of models, P's single tokens.
_MAX_WHOLE_BYTES = 64 << 20
# How much of an event stream is held back until its first event that says something.
_MAX_WORDS_BYTES = 64 << 10
# An answer that is no stream comes at once when it is complete. Up to this size it is held back until all of
# it has arrived, so that another instance can be asked if it does not come whole.
_MAX_HELD_BYTES = 1 << 20

# An answer that has begun, of an instance whose engine seems to hang, ends after so long without a byte.
_HUNG_SECONDS = 5.0

# While the proxy waits for an answer it sends nothing, and of an instance that has said goodbye it only
# learns whether its port refuses. If that instance's host went down then, it would wait for ever. So TCP
# probes the host after 10 s of silence, and gives up after 20. The host's kernel answers, however busy its
# processes are.
_KEEPALIVE_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 5}

EVENT_STREAM = "text/event-stream"


class Client:
    """A proxy's connections to instances: as many as there are requests, and no deadline on an answer.

    Connections are kept for the next request. An instance may close an idle one at the very moment in which
    it is used again. That is nobody's failure: the request goes once more, over a new connection.

    Attributes:
        kept: makes and keeps connections.
        reconnected: how many requests went once more.
    """

    def __init__(self) -> None:
        self.kept = _session(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS, socket_factory=_socket)
        )
        self._fresh = _session(aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket))
        self.reconnected = 0

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
    ) -> aiohttp.ClientResponse:
        """The head of the answer; `again` is called if the request goes once more. Raises aiohttp.ClientError
        or OSError."""
        was = _Was()
        try:
            return await self.kept.post(
                url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=was
            )
        except (aiohttp.ClientError, OSError) as error:
            if not (was.idle and _closed_unanswered(error)):
                raise
            logger.info("%s closed an idle connection as it was used: once more, over a new one", url)
        self.reconnected += 1
        again()
        return await self._fresh.post(url, data=data, headers=headers, allow_redirects=False)

    @property
    def open(self) -> int:
        """Connections on which something is under way."""
        return sum(len(each.connector._acquired) for each in (self.kept, self._fresh) if each.connector)


@dataclass
class _Was:
    """What one request learns of its connection: whether it was idle until now."""

    idle: bool = False


async def _reused(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
    if isinstance(context.trace_request_ctx, _Was):
        context.trace_request_ctx.idle = True


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    watch = aiohttp.TraceConfig()
    watch.on_connection_reuseconn.append(_reused)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, connect=_REACH_SECONDS, sock_connect=_CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept"),
        trace_configs=[watch],
    )


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


class Stopped(CallFailed):
    """An instance has said goodbye, and would not answer this any more."""


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
        begun: the answer has begun, by what the caller has read of it.
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
        self.begun = False
        self._received = -1
        self._moved = 0.0
        self._asking: asyncio.Task[aiohttp.ClientResponse] | None = None
        self._response: aiohttp.ClientResponse | None = None
        self._given_up: CallFailed | None = None
        self._cleanup = ExitStack()

    async def open(self, body: bytes, headers: Headers) -> aiohttp.ClientResponse:
        """Sends the request and waits for the answer's head. Raises CallFailed."""
        self._cleanup.enter_context(self.instance.busy(self._give_up, self.tokens))
        self._asking = asyncio.create_task(self._ask(body, headers))
        try:
            self._response = await self._asking
        except asyncio.CancelledError:
            if self._given_up is not None and not _cancelled():
                raise self._given_up from None
            raise
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            if not _is_ours(error):
                self.instance.healthy = False  # until its /health answers again
            raise CallFailed("could not be reached") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed("closed the connection before it answered") from error
        return self._response

    async def _ask(self, body: bytes, headers: Headers) -> aiohttp.ClientResponse:
        return await self._session.post(self._url, body, headers, self.again)

    def _give_up(self, loss: Loss) -> None:
        """The instance is lost: whoever waits for it gets CallFailed. One that has stopped still sends the
        rest of what it has begun to answer; so may one whose pings alone are lost."""
        if self.begun and (loss == "stopped" or (loss == "hung" and self._moves())):
            return
        self._given_up = {
            "gone": CallFailed("is gone"),
            "silent": Silent("has stopped answering"),
            "hung": Silent("has stopped answering"),
            "stopped": Stopped("has stopped"),
        }[loss]
        if self._response is not None:
            self._response.close()
        elif self._asking is not None:
            self._asking.cancel()

    def _moves(self) -> bool:
        """Whether more of the answer has come in the last seconds, by what earlier calls have seen."""
        assert self._response is not None
        received, now = self._response.content.total_bytes, time.monotonic()
        if received != self._received:
            self._received, self._moved = received, now
        return now - self._moved < _HUNG_SECONDS

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
        if self._response is None and self._asking is not None:
            # The answer may have come in the very moment in which nobody waited for it any more.
            self._asking.cancel()
            self._asking.add_done_callback(_close_answer)
        elif self._response is not None:
            self._response.close()
        self._cleanup.close()


def _cancelled() -> bool:
    """Whether this task itself was cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_ours(error: Exception) -> bool:
    """Whether a connection did not come about because this machine had no descriptors left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _close_answer(asking: asyncio.Task[aiohttp.ClientResponse]) -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result().close()


async def read_whole(response: aiohttp.ClientResponse) -> Reply:
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


async def first_words(response: aiohttp.ClientResponse) -> bytes:
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
