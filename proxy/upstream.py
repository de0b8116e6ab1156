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

# vLLM's server closes a connection that was idle for 5 s; connections close to that are not used again.
_KEEPALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
# _CONNECT_SECONDS, and the time to look the host's name up.
_REACH_SECONDS = 10.0
# The largest answer that is read whole: errors, lists of models, P's single tokens.
_MAX_WHOLE_BYTES = 64 << 20
# An idle connection that its server closed ends at once when used; one that ends later had the request.
_REPEAT_SECONDS = 1.0
# An answer that is no stream is held back up to this size until it is whole, as it mostly is at once: so
# another instance can be asked if it does not come whole.
_MAX_HELD_BYTES = 1 << 20
# If an instance's engine seems to hang, an answer that has begun ends after so long without a byte.
_HUNG_SECONDS = 5.0
# While the proxy waits for an answer it sends nothing, and after an instance's goodbye it only asks whether
# the port refuses. If the host went down then, it would wait for ever. So TCP probes the host after 10 s of
# silence and gives up after 20; the host's kernel answers, however busy the host is.
_KEEPALIVE_PROBES = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 5}

EVENT_STREAM = "text/event-stream"
LONGEST_EVENT = 2 << 20
"""The most bytes of a stream that are held until its first event with content has come, which may have a
prompt's tokens; and of any event until it is whole."""


class Client:
    """A proxy's connections to instances: as many as there are requests, and no deadline on an answer.

    Connections are kept for the next request. An instance may close an idle one just as it is used again.
    That is no failure of the instance: the request is sent again over a new connection; `reconnected` counts
    these. The `get` of `pooled` tries again by itself.
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
        """The answer's head; `may_repeat` is asked before a second try. Raises ClientError or OSError."""
        reused: list[bool] = []  # not empty if the connection was idle until now
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


# Bodies of up to this size are sent as one piece, together with the request's head.
_ONE_PIECE_BYTES = 1 << 16
_SENT_AT_ONCE = 1 << 17


class _Streamed(aiohttp.Payload):
    """A large body, sent piece by piece, as fast as the instance reads it, and never copied as a whole."""

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
                    await asyncio.sleep(0)  # other requests get their turn, even if this one is read fast


def _payload(body: Content) -> bytes | _Streamed:
    return bytes(body) if body.size <= _ONE_PIECE_BYTES else _Streamed(body)


async def _reused(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.append(True)


class _InstanceConnection(ResponseHandler):
    """Also ends an answer with a chunk that aiohttp cannot read: its reader would wait for ever."""

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
        return isinstance(error.message, str)  # else it is the part of a head that has come
    if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
        return False
    return isinstance(error, ConnectionError | aiohttp.ClientOSError)


def _socket(place: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose connection breaks when the other host is gone."""
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
    """A call ended without a success. The message is for the client, the cause for the log. `reply`: the
    instance's own answer, if it is whole; `detail`: the message of an error in place of a first token."""

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
"""A successful answer that has begun, and the start of its body, which has the first token."""


@dataclass(eq=False)
class Call:
    """One POST to one instance. `close` aborts it, by closing the connection.

    Attributes:
        tokens: of the prompt, which the instance computes while this call is open; 0 if it is no P.
        may_repeat: asked before the request is sent again, over another connection.
        may_leave: whether another instance could serve the request; asked while this one's engine may hang.
        why: why the call has failed, for "it ..."; "" if it has succeeded.
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
        """The whole answer, until the `deadline` by the loop's clock. Raises CallFailed, also for errors."""
        with self._in_time(deadline):
            reply = await read_whole(await self._open(body))
            if gave_up(self.path, reply.body):
                raise CallFailed(CallEnd.ABORTED, STOPPED)
        self.end, self.why = CallEnd.ANSWERED, ""
        return reply

    async def begin(self, body: Content, deadline: float | None = None) -> Begun:
        """The answer from its first token on, which has to come by the `deadline`. Raises CallFailed."""
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
        """The rest of an answer that has begun. Raises CallFailed."""
        with self._in_time():
            return (await read_whole(response)).body

    @contextmanager
    def _in_time(self, deadline: float | None = None) -> Iterator[None]:
        """Gives the call up at the deadline, if there is one; notes why it failed, if it did."""
        late = None if deadline is None else asyncio.get_running_loop().call_at(deadline, self.lose, "late")
        try:
            yield
        except CallFailed as error:
            raise self._failed(error) from error.__cause__
        finally:
            if late is not None:
                late.cancel()

    async def _open(self, body: Content) -> aiohttp.ClientResponse:
        """Sends the request and waits for the answer's head. Raises CallFailed, also for error answers."""
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
                raise CallFailed(CallEnd.NO_SOCKET, "was not called: no socket is left here") from error
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
        """Gives the call up, unless it may still succeed: a whole answer needs no instance any more, one that
        has stopped still sends the rest of what it has begun, and one that hangs may go on (`_stuck`)."""
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
            self._asking = None  # a second cancellation would look as if the client had left

    def streams(self, pace: StreamTimer) -> None:
        """Its answer is a stream, measured by `pace`: its events show whether the instance hangs."""
        self._pace = pace

    def _stuck(self, begun: bool) -> bool:
        """Whether this call has to leave an instance that hangs: if its pings vouch for its engine, once
        nothing comes any more; else if the answer has not begun and another instance could serve it."""
        if not begun:
            return self.instance.vouches or self.may_leave()
        if not self.instance.vouches:
            return False
        # Whether more of the answer has come since an earlier look, in the last seconds.
        assert self._response is not None
        received = self._response.content.total_bytes if self._pace is None else self._pace.events
        now = time.monotonic()
        if received != self._received:
            self._received, self._moved = received, now
        return now - self._moved >= _HUNG_SECONDS

    async def _first_event(self, response: aiohttp.ClientResponse) -> bytes:
        """The start of a successful answer, as far as it proves that generation has begun: a stream up to its
        first event with content; another answer whole, or its first MiB. Raises CallFailed if none comes."""
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
        """Raises CallFailed if an answer's start is no success; `event`: the first with content, if any."""
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
        """Notes why the call has failed; if the proxy gave it up, that is why."""
        if self._lost is not None and error.reply is None:
            error = CallFailed(*_LOST[self._lost])
        self.end, self.why = error.end, str(error)
        return error

    def close(self, failed: str = "") -> None:
        """Ends the call; `failed`: why, for traces. A connection stays after a whole answer. Idempotent."""
        if self._response is not None:
            self._response.close()
        self._cleanup.close()
        self.ended(failed)
        self.may_repeat = self.may_leave = bool  # those of an attempt would be a cycle of references


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
    """Events without the prompt's token ids, and the ids, separated by commas; b"" if they are not whole."""
    before, _, rest = events.partition(PROMPT_IDS)
    ids, end, behind = rest.partition(b"]")
    return (before + NO_PROMPT_IDS + behind, ids) if end else (events, b"")


# The first event of a stream. vLLM sends a head of success before it knows whether it can generate anything.


def first_content(head: bytes) -> Any:
    """The first whole event with more than the speaker's role, decoded; None while there is none."""
    *lines, _ = head.split(b"\n")
    for line in lines:
        if line.startswith(_DATA):
            event = _decoded(line.removeprefix(_DATA))
            if not _announces(event):
                return event
    return None


_MISTAKES = {"invalid_request_error", "not_found_error", "request_too_large", "rate_limit_error"}
"""Types of errors that /v1/messages of vLLM 0.33 sends in place of a 4xx status."""


def is_servers_error(event: Any) -> bool:
    """Whether a stream's event is an error that is not the client's."""
    error = _get(event, "error")
    code = _get(error, "code")
    mistake = (isinstance(code, int) and 400 <= code < 500) or _text(error, "type") in _MISTAKES
    return isinstance(error, dict) and not mistake


def _ends(event: Any) -> bool:
    """Whether this event is the end, or the usage before it: then the answer was given up without a token."""
    return _get(event, "choices") == [] or (isinstance(event, bytes) and event.strip() == b"[DONE]")


def _get(value: Any, name: str) -> Any:
    """A field of an object; None if it lacks it, or is no object."""
    return value.get(name) if isinstance(value, dict) else None


def _text(value: Any, name: str) -> str:
    found = _get(value, name)
    return found if isinstance(found, str) else ""


def _decoded(data: bytes) -> Any:
    """The JSON value; the data themselves if they are no JSON, such as [DONE], or decode to nothing."""
    return decoded(ANYTHING, data, data) or data


# Events of /v1/responses and /v1/messages that come before or with what is generated.
_ANNOUNCEMENTS = {
    "response.created", "response.queued", "response.in_progress", "message_start", "content_block_start",
    "ping",
}  # fmt: skip


def _announces(event: Any) -> bool:
    """Whether an event only opens the answer, or has only the speaker's role, as a chat's first one."""
    choices = _get(event, "choices")
    roles = isinstance(choices, list) and bool(choices) and all(map(_is_role, choices))
    return roles or _text(event, "type") in _ANNOUNCEMENTS


def _is_role(choice: Any) -> bool:
    delta = _get(choice, "delta")
    if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")


# Answers that were given up. A vLLM that is stopped (SIGTERM) ends its requests with status 200 and the
# tokens that it has. Aborted requests end so, too, but their clients have left. What vLLM 0.32 writes then:
#
# /v1/completions, /v1/chat/completions: "abort" as the `finish_reason` of a choice, streamed or not.
# /v1/messages: a message, or in a stream its `message_delta`, without a `stop_reason`; every answer that is
#     complete has one.
# /v1/responses: status "cancelled" for models with a Harmony template. For other models only the count of
#     tokens shows it: an answer without any was given up. One that was given up later looks complete.
#
# An answer may repeat what its client has sent (metadata, a tool's input), so the JSON is decoded.

STOPPED = "was stopped before its answer was complete"
"""What an error says of an instance that gave an answer up, after "it"."""


class _AnswerPart(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    output_tokens: int | None = None


class _Answer(msgspec.Struct):
    """The fields of a whole answer or an event, of any endpoint, that show whether it was given up."""

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
"""An event without these bytes does not show that its answer was given up, and is not decoded."""
_DATA = b"data:"
EVENT_END = b"\n\n"


def gave_up(path: str, body: bytes) -> bool:
    """Whether this whole answer, which is no stream, was given up by its instance."""
    sign = SIGNS.get(path)
    return sign is not None and (sign is not _ABORT or _ABORT in body) and _given_up(body)


def _given_up(data: bytes) -> bool:
    return decoded(_answer, data, _NO_ANSWER).given_up


def first_given_up(part: bytes, sign: bytes | None, *, streamed: bool) -> int:
    """Where the event or field that gives up begins in this part of an answer; -1 if none does. A stream's
    part has whole events. For JSON it is exact where all that a client chose stands in strings."""
    if not streamed:
        return part.find(ABORTED) if sign is _ABORT else -1
    at = 0
    for event in part.split(EVENT_END):
        lines = event.split(b"\n") if sign is not None and sign in event else []
        if any(_given_up(line.removeprefix(_DATA)) for line in lines if line.startswith(_DATA)):
            return at
        at += len(event) + len(EVENT_END)
    return -1
