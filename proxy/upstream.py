"""One request to one instance, which can be ended at any moment, and what its answer shows."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from multidict import CIMultiDictProxy

from .blame import CallEnd
from .bodies import ANYTHING, Content, Fields, decoded
from .http import Headers
from .membership.instance import Instance, LossReason
from .membership.prober import is_ours
from .metrics import EndOfCall, StreamTimer

logger = logging.getLogger(__name__)

# vLLM's server closes a connection that was idle for 5 s; one that it may be closing is not used again.
_KEEPALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
# The same, and the time to look its name up.
_REACH_SECONDS = 10.0
# The largest answer that is read whole: errors, lists of models, P's single tokens.
_MAX_WHOLE_BYTES = 64 << 20
# A connection that its server closes as it is used again ends at once. One that ends later had the request.
_REPEAT_SECONDS = 1.0
# How much is held back of an answer that is no stream until all has come, which is at once: so another
# instance can be asked if it does not come whole.
_MAX_HELD_BYTES = 1 << 20
# An answer that has begun, of an instance whose engine seems to hang, ends after so long without a byte.
_HUNG_SECONDS = 5.0
# While the proxy waits for an answer it sends nothing, and of an instance that has sent its goodbye it only
# learns whether its port refuses. If that instance's host went down then, it would wait for ever. So TCP
# probes the host after 10 s of silence, and gives up after 20; its kernel answers, however busy it is.
_KEEPALIVE_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 5}

EVENT_STREAM = "text/event-stream"
LONGEST_EVENT = 2 << 20
"""Bytes of a stream that are held until its first event with content is there, which may have a prompt's
tokens, and of any event until it is whole; at most."""


class Client:
    """A proxy's connections to instances: as many as there are requests, and no deadline on an answer.

    Connections are kept for the next request. An instance may close an idle one at the very moment in which
    it is used again. That is no failure of the instance: the request goes once more, over a new connection;
    `reconnected` counts these. The `get` of `pooled` tries once more by itself.
    """

    def __init__(self) -> None:
        self.pooled = _session(keepalive_timeout=_KEEPALIVE_SECONDS)
        self._fresh = _session(force_close=True)
        self.reconnected = 0

    async def aclose(self) -> None:
        await self.pooled.close()
        await self._fresh.close()

    async def post(
        self, url: str, body: Content, headers: Headers, may_repeat: Callable[[], bool] = lambda: True
    ) -> aiohttp.ClientResponse:
        """The answer's head; `may_repeat` is asked before a second time. Raises ClientError or OSError."""
        reused: list[bool] = []  # not empty if its connection was idle until now
        began = time.monotonic()
        try:
            return await self.pooled.post(
                url, data=_payload(body), headers=headers, allow_redirects=False, trace_request_ctx=reused
            )
        except (aiohttp.ClientError, OSError) as error:
            at_once = time.monotonic() - began <= _REPEAT_SECONDS
            if not (reused and at_once and _closed_unanswered(error) and may_repeat()):
                raise
            logger.info("%s closed an idle connection as it was used: the request goes over a new one", url)
        self.reconnected += 1
        return await self._fresh.post(url, data=_payload(body), headers=headers, allow_redirects=False)


# Up to this size a body is sent as one piece, together with the request's head.
_ONE_PIECE_BYTES = 1 << 16
_SENT_AT_ONCE = 1 << 17


class _Streamed(aiohttp.Payload):
    """A large body, sent piece by piece, at the pace of who reads it, and never copied as a whole."""

    _autoclose = True

    def __init__(self, body: Content) -> None:
        super().__init__(body, content_type="application/json")
        self._size = body.size

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value.pieces:
            view = memoryview(piece)
            for at in range(0, len(view), _SENT_AT_ONCE):
                await writer.write(view[at : at + _SENT_AT_ONCE])
                if at:
                    await asyncio.sleep(0)  # others get their turn, too, if this one reads very fast


def _payload(body: Content) -> bytes | _Streamed:
    return bytes(body) if body.size <= _ONE_PIECE_BYTES else _Streamed(body)


async def _reused(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.append(True)


class _InstanceConnection(ResponseHandler):
    """Also ends an answer of which aiohttp could not read a chunk: who reads it would wait for ever."""

    def connection_lost(self, exc: BaseException | None) -> None:
        answer = getattr(self, "_payload", None)  # aiohttp's own
        super().connection_lost(exc)
        if answer is not None and not answer.is_eof() and answer.exception() is None:
            answer.set_exception(aiohttp.ClientPayloadError("it has a chunk that cannot be read"))


def _session(**connections: Any) -> aiohttp.ClientSession:
    watch = aiohttp.TraceConfig()
    watch.on_connection_reuseconn.append(_reused)
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket, **connections)
    connector._factory = cast("Any", partial(_InstanceConnection, connector._loop))
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


def _socket(place: aiohttp.AddrInfoType) -> socket.socket:
    """One whose connection breaks when the other host is gone."""
    made = socket.socket(*place[:3])  # its family, kind and protocol
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_PROBES.items():
        made.setsockopt(socket.IPPROTO_TCP, name, value)
    return made


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def error_message(self) -> str:
        """The message of an error in OpenAI's form, or in FastAPI's; "" if there is none."""
        fields = _decoded(self.body)
        return _text(_get(fields, "error"), "message") or _text(fields, "detail")

    @property
    def kv_transfer_params(self) -> Fields | None:
        """What P's answer has for D; None if it has nothing, or is not JSON."""
        params = _get(_decoded(self.body), "kv_transfer_params")
        return params if isinstance(params, dict) else None


class CallFailed(Exception):
    """A call ended without a success. The message is for the client; the log has the details. `reply`: the
    instance's own answer, if it gave a whole one; `detail`: what it wrote of an error in place of a token."""

    def __init__(self, end: CallEnd, why: str, reply: Reply | None = None, detail: str = "") -> None:
        super().__init__(why)
        self.end, self.reply, self.detail = end, reply, detail


def shown(error: BaseException | None) -> str:
    """An error for the end of a log line, such as " (TimeoutError())"; "" for None. The repr of one of
    aiohttp's would have the request's headers, and the client's key among them."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f" ({type(error).__name__}({str(error)!r}))"
    return "" if error is None else f" ({error!r})"


_LOST: dict[LossReason, tuple[CallEnd, str]] = {
    "gone": (CallEnd.GONE, "is gone"),
    "silent": (CallEnd.SILENT, "has stopped answering"),
    "hung": (CallEnd.HUNG, "has stopped pinging"),
    "stopped": (CallEnd.STOPPED, "has stopped"),
    "moved": (CallEnd.STOPPED, "was drained"),
    "late": (CallEnd.LATE, "has sent no token in time"),
}

Begun = tuple[aiohttp.ClientResponse, bytes]
"""An answer that has begun, a success; and the start of its body, which holds the first token."""


@dataclass(eq=False)
class Call:
    """One POST to one instance. `close` aborts it, by closing the connection.

    Attributes:
        tokens: of the prompt, that the instance computes while this call is open; 0 if it is no P.
        may_repeat: asked before the request goes once more, over another connection.
        may_leave: whether the request has anywhere else to go; asked each second while only /health answers.
        why: why it has failed; "" if it has not.
        known: set once the instance has accepted or refused the request, or failed.
    """

    session: Client
    instance: Instance
    path: str
    headers: Headers
    ended: EndOfCall = lambda failed: None
    tokens: int = 0
    may_repeat: Callable[[], bool] = lambda: True
    may_leave: Callable[[], bool] = lambda: False
    end: CallEnd = CallEnd.PENDING
    why: str = "has not answered"
    known: asyncio.Event = field(default_factory=asyncio.Event)
    _pace: StreamTimer | None = None
    _received: int = -1
    _moved: float = 0.0
    _asking: asyncio.Task[Any] | None = None
    _response: aiohttp.ClientResponse | None = None
    _lost: LossReason | None = None
    _cleanup: ExitStack = field(default_factory=ExitStack)

    async def read_answer(self, body: Content, deadline: float | None = None) -> Reply:
        """The whole answer, by the `deadline`, by the loop's clock. Raises CallFailed, also if it is no
        success."""
        with self._in_time(deadline):
            reply = await read_whole(await self._open(body))
            if gave_up(self.path, reply.body):
                raise CallFailed(CallEnd.ABORTED, STOPPED)
        self.end, self.why = CallEnd.ANSWERED, ""
        return reply

    async def begin(self, body: Content, deadline: float | None = None) -> Begun:
        """The answer from its first token on, which has to be there by the `deadline`. Raises CallFailed."""
        try:
            with self._in_time(deadline):
                response = await self._open(body)
                self.end = CallEnd.ACCEPTED
                self.known.set()
                head = await self._first_event(response)
        finally:
            self.known.set()
        self.end, self.why = CallEnd.ANSWERED, ""
        return response, head

    async def read_rest(self, response: aiohttp.ClientResponse) -> bytes:
        """What its answer has behind the beginning. Raises CallFailed."""
        with self._in_time():
            return (await read_whole(response)).body

    @contextmanager
    def _in_time(self, deadline: float | None = None) -> Iterator[None]:
        """Loses the call at the deadline, if there is one; if it fails, notes why."""
        late = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self.lose, "late")
        try:
            yield
        except CallFailed as error:
            raise self._failed(error) from error.__cause__
        finally:
            if late is not None:
                late.cancel()

    async def _open(self, body: Content) -> aiohttp.ClientResponse:
        """Sends the request and waits for the answer's head. Raises CallFailed, also if it is no success."""
        self._cleanup.enter_context(self.instance.busy(self.lose, self.tokens))
        url = self.instance.url + self.path
        self._asking = asyncio.current_task()
        try:
            self._response = await self.session.post(url, body, self.headers, self.may_repeat)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._lost is None or task is None or task.uncancel():
                raise
            raise CallFailed(*_LOST[self._lost]) from None
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            if is_ours(error):
                raise CallFailed(
                    CallEnd.NO_SOCKET, "was not called: this proxy has no socket left"
                ) from error
            self.instance.unreachable()
            end = CallEnd.CLOSED if error.errno == errno.ECONNREFUSED else CallEnd.UNREACHABLE
            raise CallFailed(end, "could not be reached") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallFailed(CallEnd.BROKEN, "closed the connection before it answered") from error
        finally:
            self._asking = None
        if not 200 <= self._response.status < 300:
            reply = await read_whole(self._response)
            mistake = 400 <= reply.status < 500
            denied = reply.status in (401, 403)
            end = CallEnd.DENIED if denied else CallEnd.REFUSED if mistake else CallEnd.ERROR
            raise CallFailed(end, f"answered {reply.status}", reply)
        return self._response

    def lose(self, loss: LossReason) -> None:
        """The call fails. An instance that has stopped still sends the rest of what it has begun to answer.
        One that hangs may go on, as far as its pings show: then only what has not begun, and has somewhere
        else to go, is taken from it. An answer that has come to its end needs no instance any more."""
        if self._response is not None and self._response.content.is_eof():
            return
        begun = self.end is CallEnd.ANSWERED
        if begun and loss == "stopped":
            return
        if loss == "hung" and not self._stuck(begun):
            return
        self._lost = loss
        if self._response is not None:
            self._response.close()
        elif self._asking is not None:
            self._asking.cancel()
            self._asking = None  # a second one would pass for the client's end

    def streams(self, pace: StreamTimer) -> None:
        """Its answer is a stream, whose events show whether the instance hangs."""
        self._pace = pace

    def _stuck(self, begun: bool) -> bool:
        """Whether an instance that hangs keeps this call waiting for no good."""
        if not begun:
            return self.instance.vouches or self.may_leave()
        if not self.instance.vouches:
            return False
        # By what earlier calls have seen: whether more of the answer has come in the last seconds.
        assert self._response is not None
        received = self._response.content.total_bytes if self._pace is None else self._pace.events
        now = time.monotonic()
        if received != self._received:
            self._received, self._moved = received, now
        return now - self._moved >= _HUNG_SECONDS

    async def _first_event(self, response: aiohttp.ClientResponse) -> bytes:
        """The start of a successful answer, as far as it proves that generation has begun: in an event stream
        everything up to the first event with content, else all of it, or its first MiB. Raises CallFailed if
        there is none."""
        streamed = response.content_type == EVENT_STREAM
        most = LONGEST_EVENT if streamed else _MAX_HELD_BYTES
        head, event = b"", None
        try:
            while chunk := await response.content.readany():
                head += chunk
                if streamed and b"\n" in chunk:
                    event = first_content(split_prompt(head)[0])
                if event is not None or len(head) > most:
                    break
        except (aiohttp.ClientError, OSError) as error:
            what = "first token" if streamed else "answer was complete"
            raise CallFailed(CallEnd.BROKEN, f"died before its {what}") from error
        self._check_begin(response, split_prompt(head)[0], event)
        return head

    def _check_begin(self, response: aiohttp.ClientResponse, head: bytes, event: Any) -> None:
        """Raises CallFailed if the start of an answer shows that it is no success, a stream by its first
        `event` with content, if there is one."""
        streamed, ended = response.content_type == EVENT_STREAM, response.content.at_eof()
        if not head or (streamed and ended and event is None):
            raise CallFailed(CallEnd.BROKEN, "ended its answer without a token")
        if ended and not streamed:
            given_up = gave_up(self.path, head)
        else:
            part = head.rpartition(EVENT_END)[0] if streamed else head
            given_up = _ends(event) or first_given_up(part, SIGNS.get(self.path), streamed=streamed) >= 0
        if given_up:
            raise CallFailed(CallEnd.ABORTED, STOPPED)
        if is_servers_error(event):
            detail = _text(_get(event, "error"), "message")
            raise CallFailed(CallEnd.ERROR, "answered with an error before its first token", detail=detail)

    def _failed(self, error: CallFailed) -> CallFailed:
        """Notes why the call has failed: if it was given up, for that reason."""
        if self._lost is not None and error.reply is None:
            error = CallFailed(*_LOST[self._lost])
        self.end, self.why = error.end, str(error)
        return error

    def close(self, failed: str = "") -> None:
        """Ends the call; `failed`: why, for traces. After a whole answer the connection stays. Idempotent."""
        if self._response is not None:
            self._response.close()
        self._cleanup.close()
        self.ended(failed)
        self.may_repeat = self.may_leave = bool  # no more: those of an attempt would make it refer to itself


async def read_whole(response: aiohttp.ClientResponse) -> Reply:
    """The rest of an answer. Raises CallFailed."""
    body = bytearray()
    try:
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > _MAX_WHOLE_BYTES:
                raise CallFailed(CallEnd.BROKEN, "answered with too many bytes")
        return Reply(response.status, response.headers, bytes(body))
    except (aiohttp.ClientError, OSError) as error:
        raise CallFailed(CallEnd.BROKEN, "died in the middle of its answer") from error


PROMPT_IDS, NO_PROMPT_IDS = b'"prompt_token_ids":[', b'"prompt_token_ids":null'
"""Neither can begin within a JSON string, where quotes are escaped."""


def split_prompt(events: bytes) -> tuple[bytes, bytes]:
    """Events without the prompt's token ids, and these, with commas: b"" if they are not there whole."""
    before, _, rest = events.partition(PROMPT_IDS)
    ids, end, behind = rest.partition(b"]")
    return (before + NO_PROMPT_IDS + behind, ids) if end else (events, b"")


# The first event of a stream: vLLM sends the head of a success before it knows if it can generate anything.


def first_content(head: bytes) -> Any:
    """The first whole event with more than the role of the speaker, decoded; None while there is none."""
    *lines, _ = head.split(b"\n")
    for line in lines:
        if line.startswith(_DATA):
            event = _decoded(line.removeprefix(_DATA))
            if not _announces(event):
                return event
    return None


_MISTAKES = {"invalid_request_error", "not_found_error", "request_too_large", "rate_limit_error"}
"""What /v1/messages of vLLM 0.33 says in place of a status of 4xx."""


def is_servers_error(event: Any) -> bool:
    """Whether a stream's event is an error that is not the client's."""
    error = _get(event, "error")
    code = _get(error, "code")
    mistake = (isinstance(code, int) and 400 <= code < 500) or _text(error, "type") in _MISTAKES
    return isinstance(error, dict) and not mistake


def _ends(event: Any) -> bool:
    """Whether this is the end, or the usage before it, which is all of an answer given up without a token."""
    return _get(event, "choices") == [] or (isinstance(event, bytes) and event.strip() == b"[DONE]")


def _get(value: Any, name: str) -> Any:
    """A field of what may be no object."""
    return value.get(name) if isinstance(value, dict) else None


def _text(value: Any, name: str) -> str:
    found = _get(value, name)
    return found if isinstance(found, str) else ""


def _decoded(data: bytes) -> Any:
    """What is no JSON, such as [DONE], or is empty, stands for itself."""
    return decoded(ANYTHING, data, data) or data


# What /v1/responses and /v1/messages send before anything is generated, or together with it.
_ANNOUNCEMENTS = {
    "response.created", "response.queued", "response.in_progress", "message_start", "content_block_start",
    "ping",
}  # fmt: skip


def _announces(event: Any) -> bool:
    """Whether it only opens the answer, or has nothing but the role of the speaker, as a chat's first one."""
    choices = _get(event, "choices")
    roles = isinstance(choices, list) and bool(choices) and all(map(_is_role, choices))
    return roles or _text(event, "type") in _ANNOUNCEMENTS


def _is_role(choice: Any) -> bool:
    delta = _get(choice, "delta")
    if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")


# Answers that were given up. A vLLM that is stopped (SIGTERM) ends the requests that it works on with
# status 200 and the tokens that it has. An aborted request ends so, too, but then its client has left. What
# vLLM 0.32 writes then:
#
# /v1/completions, /v1/chat/completions: "abort" as the `finish_reason` of a choice, streamed or not.
# /v1/messages: a message, or in a stream its `message_delta`, without a `stop_reason`; every answer that is
#     complete has one.
# /v1/responses: status "cancelled" for models with a Harmony template. For other models only the count of
#     tokens shows it: an answer without any was given up. One that was given up later looks complete.
#
# An answer can repeat what its client has sent (metadata, a tool's input): so each is read from the JSON.

STOPPED = "was stopped before its answer was complete"
"""The words of an error about an instance that gave an answer up."""


class _AnswerPart(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    """What shows in a whole answer, or in an event, of any endpoint that it was given up."""

    type: str = ""
    object: str = ""
    status: str | None = None
    stop_reason: str | None = None
    choices: list[_AnswerPart] = []
    delta: _AnswerPart | None = None
    usage: _AnswerPart | None = None
    response: _Answer | None = None

    @property
    def given_up(self) -> bool:
        match self.type, self.object:
            case "message", _:
                return self.stop_reason is None
            case "message_delta", _:
                return self.delta is not None and self.delta.stop_reason is None
            case "response.completed" | "response.incomplete", _:
                return self.response is not None and self.response.given_up
            case _, "response":
                unbegun = self.usage is not None and self.usage.output_tokens == 0
                return unbegun or self.status == "cancelled"
        return any(choice.finish_reason == "abort" for choice in self.choices)


_answer, _NO_ANSWER = msgspec.json.Decoder(_Answer), _Answer()
_ABORT = b'"abort"'
ABORTED = b'"finish_reason":"abort"'
SIGNS: dict[str, bytes] = {
    "/v1/completions": _ABORT,
    "/v1/chat/completions": _ABORT,
    "/v1/messages": b'"message_delta"',
    "/v1/responses": b'"usage":{',
}
"""Bytes without which an event does not show that its answer was given up, so that others are not decoded."""
_DATA = b"data:"
EVENT_END = b"\n\n"


def gave_up(path: str, body: bytes) -> bool:
    """Whether the instance has given a whole answer up that is no stream."""
    sign = SIGNS.get(path)
    return sign is not None and (sign is not _ABORT or _ABORT in body) and _given_up(body)


def _given_up(data: bytes) -> bool:
    return decoded(_answer, data, _NO_ANSWER).given_up


def first_given_up(part: bytes, sign: bytes | None, *, streamed: bool) -> int:
    """Where in a part of an answer that begins which gives up; -1 if nothing does. Of a stream the part has
    whole events. Of a JSON this is exact where nothing that a client chose stands outside of a string."""
    if not streamed:
        return part.find(ABORTED) if sign is _ABORT else -1
    at = 0
    for event in part.split(EVENT_END):
        lines = event.split(b"\n") if sign is not None and sign in event else []
        if any(_given_up(line.removeprefix(_DATA)) for line in lines if line.startswith(_DATA)):
            return at
        at += len(event) + len(EVENT_END)
    return -1
