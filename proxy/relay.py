"""Passes the instances' answers on to the client as they come, without instances' ids and addresses."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from functools import cached_property

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from .blame import CallEnd
from .continuation import Continuation, Diverged
from .errors import error_event
from .http import CLIENT_ID, NAMED_EVENTS, REPLICA, REQUEST_ID, Headers
from .membership.instance import ROLE_NAMES, Instance
from .metrics import Pace
from .routing import Choice
from .transcript import Transcript
from .upstream import ABORT, ABORTED, EVENT_END, EVENT_STREAM, NO_SIGNS, SIGNS, STOPPED, Reply, first_given_up

logger = logging.getLogger(__name__)

_LONGEST_EVENT = 256 << 10
"""Bytes up to which an event is looked at; vLLM ends each with the write in which it begins."""
STALL_SECONDS = 60.0
"""Seconds without reading pending bytes after which a client is disconnected."""


class ClientGone(Exception):
    """The client's connection broke while we wrote to it."""


class Relay:
    """One successful answer on its way to the client; `run` it once.

    Args:
        head: the part of the answer's body that has been read already.
        path: the endpoint that answers.
        pace: measures a stream.
        most_silence: seconds from one piece of the answer to the next, at most; 0: no deadline.
        transcript: what the client has of a stream that others could go on with; None if none could.
        continuation: how this instance goes on with it; None if it is the first.
        former: what relayed what was sent before that.

    Attributes:
        response: to the client.
        complete: the client has got all of it.
        resumable: the instance ended it too early, and another one can go on. The client has got no error,
            and the response is still open.
        broken: how the instance ended it too early, by itself; None if it did not.
        why: what the error is that ends an answer too early.
        client_left: the client has not got all of it, because its connection broke.
    """

    def __init__(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        head: bytes,
        scrubber: Scrubber,
        path: str,
        pace: Pace | None = None,
        most_silence: float = 0.0,
        transcript: Transcript | None = None,
        continuation: Continuation | None = None,
        former: Relay | None = None,
    ) -> None:
        self._request = request
        self._answer = answer
        self._head = head
        self._pace = pace
        self._filter = GivenUpFilter(path, streamed=pace is not None)
        self._rewriter = scrubber.rewriter()
        self._transcript = transcript
        self._stream = continuation or transcript
        self._alike = transcript if continuation is None else None
        """What has a shorter way for events like those before."""
        self._request_id = scrubber.request_id.encode()
        self.response: web.StreamResponse
        if former is None:
            headers = scrubber.headers(to_client(answer.headers))
            self.response = web.StreamResponse(status=answer.status, headers=headers)
        else:
            self.response = former.response
        self._loop = asyncio.get_running_loop()
        self._writing: float | None = None
        """Since when a piece waits for the client to take it; None if none does."""
        self._most_silence = most_silence
        self._waiting_since = self._loop.time()
        """For the instance's next piece, unless one waits for the client."""
        self._timers: list[asyncio.TimerHandle] = []
        self._last_bytes: bytes = b"" if former is None else former._last_bytes
        self._status = 502
        self._end = CallEnd.BROKEN
        self._error = b""
        """The instance's own, as an event; b"" if it sent none."""
        self._interrupted = False
        self.why = "The decode instance died in the middle of its answer."
        self.complete = self.resumable = False
        self.broken: CallEnd | None = None
        self.client_left = False

    def interrupt(self, why: str, status: int = 502) -> None:
        """Breaks the answer off with an error, for a reason that lies elsewhere."""
        self._interrupted = True
        self._status, self.why = status, why
        self._answer.close()

    def move(self) -> None:
        """Ends the instance's part, so that another one goes on, if one can: the instance is to be free."""
        if self._transcript is not None and self._transcript.movable:
            self._end, self.why = (
                CallEnd.STOPPED,
                "The decode instance was drained, and no other could go on.",
            )
            self._answer.close()

    async def run(self) -> web.StreamResponse:
        """Relays the answer to its end, or until either side breaks."""
        self._watch_client()
        if self._most_silence:
            self._watch_instance()
        try:
            if self._pace is None and self._answer.content.at_eof():
                await self._send_whole()
                self.complete = True
                return self.response
            if await self._relay_stream():
                rest = self._rewriter.feed(self._filter.flush()) + self._rewriter.flush()
                await self._send(self._noted(rest) + self._flushed(), last=True)
                self.complete = True
            elif self.broken is not None and self._transcript is not None and self._transcript.possible:
                self.resumable = True
            else:
                await self._break_off()
        except ClientGone:
            logger.debug("a client left in the middle of its answer")
            self.client_left = True
        finally:
            for timer in self._timers:
                timer.cancel()
        return self.response

    def _watch_client(self) -> None:
        """Hangs up on a client that has taken nothing for long: it would keep its place, and D's answer, for
        ever."""
        now = self._loop.time()
        since = now if self._writing is None else self._writing
        if now - since < STALL_SECONDS:
            # One timer for the whole answer: one for each piece of it costs more than the piece.
            self._timers[:1] = [self._loop.call_at(since + STALL_SECONDS, self._watch_client)]
            return
        logger.info("a client has read nothing for %g s: its connection is closed", STALL_SECONDS)
        self._abort()

    def _watch_instance(self) -> None:
        """Ends an answer of which nothing has come for long."""
        now = self._loop.time()
        since = self._waiting_since if self._writing is None else now
        if now - since < self._most_silence:
            self._timers[1:] = [self._loop.call_at(since + self._most_silence, self._watch_instance)]
            return
        self._end, self._status = CallEnd.LATE, 504
        self.why = f"The decode instance has sent nothing for {self._most_silence:g} s."
        self._answer.close()

    async def _send_whole(self) -> None:
        """All of an answer that is here already, with its head, in one piece. Raises ClientGone."""
        body = self._rewriter.feed(self._head) + self._rewriter.flush()
        self.response = web.Response(status=self._answer.status, headers=self.response.headers, body=body)
        await self._send(b"")

    async def _relay_stream(self) -> bool:
        """Whether D's answer came to its end. Raises ClientGone."""
        try:
            await self._pass_on(self._head)
            while chunk := await self._answer.content.readany():
                if self._pace is not None:
                    self._pace.beat(chunk)
                await self._pass_on(chunk)
                if self._filter.given_up:
                    self._end, self.why = CallEnd.ABORTED, f"The decode instance {STOPPED}."
                    return self._broke_off(None)
                if self._transcript is not None and self._transcript.failed:
                    self._end, self._error = CallEnd.ERROR, self._transcript.failed
                    return self._broke_off(None)
                self._waiting_since = self._loop.time()
        except Diverged as error:
            self.interrupt("The decode instance was lost, and another one has begun to answer otherwise.")
            return self._broke_off(error)
        except (aiohttp.ClientError, OSError) as error:
            done = self._transcript is not None and self._transcript.done
            return done or self._broke_off(error)
        return True

    def _broke_off(self, error: Exception | None) -> bool:
        logger.warning("an answer broke off: %s (%r)", self.why, error)
        self.broken = None if self._interrupted else self._end
        return False

    async def _pass_on(self, chunk: bytes) -> None:
        data = None if self._alike is None else self._alike.feed_alike(chunk)
        if data is None:
            data = self._noted(self._rewriter.feed(self._filter.feed(chunk)))
            if self._alike is not None:
                self._alike.learn(chunk, data, self._request_id)
        await self._send(data)

    def _noted(self, data: bytes) -> bytes:
        """As the client gets it. Raises Diverged."""
        return data if self._stream is None else self._stream.feed(data)

    def _flushed(self) -> bytes:
        return b"" if self._transcript is None else self._transcript.flush()

    async def finish(self, data: bytes) -> None:
        """Ends a resumable answer with what is missing of it."""
        try:
            await self._send(data, last=True)
            self.complete = True
        except ClientGone:
            self.client_left = True

    async def give_up(self, why: str = "", status: int = 0) -> None:
        """Ends a resumable answer with an error: no other instance goes on with it."""
        if why:
            self.why, self._error = why, b""
        self._status = status or self._status
        try:
            await self._break_off()
        except ClientGone:
            self.client_left = True

    async def _send(self, data: bytes, *, last: bool = False) -> None:
        """The next bytes; with the `last` ones the answer ends here, where a client that does not read is
        watched for. Raises ClientGone."""
        self._writing = self._loop.time()
        try:
            if not self.response.prepared:
                await self.response.prepare(self._request)
            if isinstance(self.response, web.Response):
                await self.response.write_eof()
            elif data:
                await self.response.write(data)
            if last:
                await self.response.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            raise ClientGone from error
        finally:
            self._writing = None
        self._last_bytes = data[-4:] if len(data) >= 4 else (self._last_bytes + data)[-4:]

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()

    async def _break_off(self) -> None:
        """An event stream ends with an error event. Any other body is left visibly unfinished."""
        if self._answer.content_type != EVENT_STREAM:
            self._abort()
            return
        if self._transcript is None or not self._transcript.possible:
            await self._send(self._noted(self._rewriter.flush()) + self._flushed())
        between_events = self._last_bytes.endswith((b"\n\n", b"\r\n\r\n"))
        error = self._error or error_event(self._status, self.why, named=self._request.path in NAMED_EVENTS)
        await self._send((b"" if between_events else b"\n\n") + error, last=True)


# The headers of requests and answers.

_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
# Headers with which vLLM's caller controls it (all that vLLM 0.32 reads in `entrypoints/`). That caller is
# the proxy: it alone chooses what names a replica or a transfer, and the load of one instance is none of a
# client's concerns. A client's priority stands in its body, where vLLM reads it, too. Two others go through:
# Authorization, and X-Session-ID, which only names a session in vLLM's cache events.
_CONTROLS = {REQUEST_ID.lower(), REPLICA.lower(), "x-vllm-priority", "endpoint-load-metrics-format"}
# The proxy writes each body anew.
_NOT_TO_INSTANCE = _CONTROLS | {
    "host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect",
}  # fmt: skip


def to_instance(client: CIMultiDictProxy[str], instance: Instance, request_id: str) -> Headers:
    """The client's end-to-end headers, with the id that this proxy has chosen."""
    headers = end_to_end(client, _NOT_TO_INSTANCE)
    headers[REQUEST_ID] = request_id
    # Anthropic's clients show their key so, and vLLM looks for it in the other header only.
    if (key := headers.get("X-Api-Key")) and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {key}"
    if theirs := client.get(REQUEST_ID):
        headers.setdefault(CLIENT_ID, theirs)
    headers["Content-Type"] = "application/json"
    # Ids are rewritten in the answer, so it must come as it is.
    headers["Accept-Encoding"] = "identity"
    if instance.replica is not None:
        headers[REPLICA] = str(instance.replica)
    return headers


def end_to_end(headers: CIMultiDictProxy[str], others: set[str]) -> Headers:
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    dropped = _HOP_BY_HOP | others | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


# A client may send none of these, and an instance should not; aiohttp writes no such header.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
_NOT_TO_CLIENT = {"content-length", "content-encoding", REQUEST_ID.lower()}


def to_client(instance: CIMultiDictProxy[str]) -> Headers:
    """The instance's end-to-end headers; addresses in their values are the caller's to remove."""
    headers = end_to_end(instance, _NOT_TO_CLIENT)
    return CIMultiDict((name, value) for name, value in headers.items() if not _CONTROL.search(value))


# What names instances.


@dataclass(frozen=True)
class Scrubber:
    """Takes out of an answer what names instances.

    Attributes:
        request_id: the id that the instances know this request by.
        unique: what the client sees in its place.
    """

    choice: Choice
    request_id: str
    unique: str

    def rewriter(self) -> Rewriter:
        """For the body of a success, which is the model's: nothing but the id is replaced."""
        return Rewriter(self.request_id.encode(), self.unique.encode())

    def text(self, text: str) -> str:
        """For headers and errors: the id and the addresses are replaced."""
        for name, instead in self._names:
            text = text.replace(name, instead)
        return text

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        names = [(self.request_id, self.unique)]
        for each in self.choice.instances:
            role = f"({ROLE_NAMES[each.role]} instance)"
            names += [(address, role) for address in each.written_addresses]
        return names

    def headers(self, headers: Headers) -> Headers:
        """An instance's headers without its names, and with the id that the client may know."""
        scrubbed = type(headers)((name, self.text(value)) for name, value in headers.items())
        scrubbed[REQUEST_ID] = self.unique
        return scrubbed


def refusal(reply: Reply, scrubber: Scrubber) -> web.Response:
    """An instance's own error, with its status."""
    headers = scrubber.headers(to_client(reply.headers))
    body = scrubber.text(reply.body.decode("utf-8", "replace")).encode()
    return web.Response(status=reply.status, headers=headers, body=body)


class GivenUpFilter:
    """Finds out, from the bytes of one answer, whether its instance has given it up. The bytes may be cut
    anywhere.

    Args:
        path: the endpoint that answers.
        streamed: the answer is an event stream; else a JSON that is too long to be held until it is whole.

    Attributes:
        given_up: the instance has given it up.
    """

    def __init__(self, path: str, *, streamed: bool) -> None:
        self.given_up = False
        self._streamed = streamed
        self._sign: bytes | None
        _, self._sign = SIGNS.get(path, NO_SIGNS)
        self._rest = b""
        """The event whose end has not come yet, or the end of a long JSON."""
        self._passed = 0
        """How many of its bytes have been passed on."""

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes, without the event that gives up and what follows it. An event that may be that one
        is held back until it is complete."""
        if self.given_up:
            return b""
        sign = self._sign
        if sign is None:
            return chunk
        if not self._streamed:
            return self._feed_json(chunk) if sign is ABORT else chunk
        if not self._rest and sign not in chunk and chunk.endswith(EVENT_END):
            return chunk  # as nearly all are
        text, passed = self._rest + chunk, self._passed
        end = text.rfind(EVENT_END)
        whole = end + len(EVENT_END) if end >= 0 else 0
        stop = len(text)
        if sign in text:
            at = first_given_up(text[:whole], sign)
            if at is not None:
                self.given_up, self._rest = True, b""
                return text[passed:at]
            if sign in text[whole:] and stop - whole <= _LONGEST_EVENT:
                stop = max(whole, passed)
        self._rest = text[whole:] if len(text) - whole <= _LONGEST_EVENT else b""
        self._passed = stop - whole if self._rest else 0
        return text[passed:stop]

    def flush(self) -> bytes:
        """What was held back, at the end of the answer."""
        held = self._rest[self._passed :] if self._streamed else b""
        self._rest = b""
        return held

    def _feed_json(self, chunk: bytes) -> bytes:
        """Looks at bytes, which is exact where nothing that a client chose stands outside of a string."""
        text, passed = self._rest + chunk, len(self._rest)
        at = text.find(ABORTED)
        self.given_up = at >= 0
        self._rest = text[1 - len(ABORTED) :]
        return text[passed:at] if self.given_up else chunk


class Rewriter:
    """Replaces every `old` by `new`, as `bytes.replace` would over the whole stream.

    What may turn out to be the start of `old` is held back until the next bytes decide it; nothing
    else waits. Raises ValueError if `old` is empty.
    """

    def __init__(self, old: bytes, new: bytes) -> None:
        if not old:
            raise ValueError("there is nothing to replace: `old` is empty")
        self._old = old
        self._new = new
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that are certain now that `chunk` has come; may be empty."""
        if self._old == self._new:
            return chunk
        *whole, tail = (self._held + chunk).split(self._old)
        cut = self._undecided(tail)
        self._held = tail[cut:]
        return self._new.join([*whole, tail[:cut]])

    def flush(self) -> bytes:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _undecided(self, tail: bytes) -> int:
        """Where the longest suffix of `tail` that begins `old` starts; len(tail) if none does."""
        at = tail.find(self._old[:1], max(0, len(tail) - len(self._old) + 1))
        while at >= 0:
            if self._old.startswith(tail[at:]):
                return at
            at = tail.find(self._old[:1], at + 1)
        return len(tail)
