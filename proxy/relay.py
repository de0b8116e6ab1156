"""Passes an instance's answer on to the client as it comes, without the instances' ids and addresses."""

import asyncio
import logging
import math
import re
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from time import monotonic

import aiohttp
import msgspec
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict, CIMultiDictProxy

from .blame import CallEnd
from .continuation import Continuation, Diverged, RepeatedAnswer
from .http import CLIENT_ID, NAMED_EVENTS, REPLICA, REQUEST_ID, Headers, error_event
from .membership.instance import ROLE_NAMES, Instance, Role
from .metrics import RECORD, StreamTimer
from .prompt_usage import COUNTS, with_ps_counts
from .routing import Choice
from .transcript import DONE, Transcript
from .upstream import ABORTED, EVENT_END, EVENT_STREAM, LONGEST_EVENT, SIGNS, STOPPED, Reply, first_given_up

logger = logging.getLogger(__name__)

_CRLF_END = b"\r\n\r\n"
_LONGEST_READ = 16 << 20
"""Bytes of the longest event that is held whole, where a prompt's token ids may have to be taken out."""
STALL_SECONDS = 60.0
"""A client that reads none of the bytes sent to it for so long is disconnected."""


def hang_up(request: web.Request) -> None:
    """Closes the client's connection at once; what it has not read yet is lost."""
    if request.transport is not None:
        request.transport.abort()


class ClientGone(Exception):
    """The client's connection broke while we wrote to it."""


@dataclass(eq=False)
class Relay:
    """One successful answer on its way to the client; `run` it once. If it breaks off, the record says so.

    Attributes:
        head: the part of the answer's body that has been read already.
        most_silence: the most seconds from one piece of the answer to the next.
        transcript: what the client has of a stream, for other instances to go on with; None if none could.
        continuation: how this instance goes on with the stream; None if it has begun it.
        diverged: this instance, asked for the whole answer, began with another token than the client has;
            the client got nothing of that.
        prefilled: P's answer, whose count of cached tokens the client gets; None if no P has helped.
        former: the relay that sent the beginning of this answer; None if this one does.
        role: whether the answer comes from P or from D.
        resumable: the answer ended too early, and another instance can go on: the client has got no error,
            and the response is still open.
        broken: how the instance itself ended the answer too early; None if it did not.
    """

    request: web.Request
    answer: aiohttp.ClientResponse
    head: bytes
    scrubber: "Scrubber"
    pace: StreamTimer | None = None
    most_silence: float = math.inf
    transcript: Transcript | None = None
    continuation: Continuation | RepeatedAnswer | None = None
    prefilled: asyncio.Future[bytes | None] | None = None
    former: "InitVar[Relay | None]" = None
    role: Role = "D"
    complete: bool = field(init=False, default=False)
    resumable: bool = field(init=False, default=False)
    broken: CallEnd | None = field(init=False, default=None)
    diverged: bool = field(init=False, default=False)

    def __post_init__(self, former: "Relay | None") -> None:
        longest = LONGEST_EVENT if self.transcript is None else _LONGEST_READ
        self._filter = AnswerFilter(self.request.path, self.scrubber, self.pace is not None, longest)
        self._stream = self.continuation or self.transcript
        self._counts = COUNTS.get(self.request.path, b"\0")
        if former is not None:  # whose P computed the client's prompt
            self.prefilled = former.prefilled
        self._sent: bytes = b"" if former is None else former._sent
        """The last bytes that were sent to the client."""
        if former is None:
            headers = self.scrubber.headers(to_client(self.answer.headers))
            self.response = web.StreamResponse(status=self.answer.status, headers=headers)
            if self.request.version < HttpVersion11:
                self.response.force_close()  # only that shows the end; aiohttp would keep the connection
        else:
            self.response = former.response
        self._writing = False
        self._since = monotonic()
        """Since when, by `monotonic`, the client takes no piece (`_writing`), or the instance sends none."""
        self._timer: asyncio.TimerHandle | None = None
        self._end: CallEnd | None = CallEnd.BROKEN
        """How the instance ended the answer, if it ends too early; next, the error for the client."""
        self._sender = f"The {ROLE_NAMES[self.role]} instance"
        self._why, self._status = f"{self._sender} died in the middle of its answer.", 502
        self._error = b""
        """The instance's own error, as an event; b"" if it sent none."""

    def interrupt(self, why: str, status: int = 502, end: CallEnd | None = None) -> None:
        """Breaks the answer off with this error. `end`: how the instance ended it; None: not its fault."""
        self._end, self._why, self._status = end, why, status
        self.answer.close()

    def move(self) -> bool:
        """Lets another instance go on, if one can. False if this one has sent all, or has to go on itself."""
        sent_all = self.answer.content.is_eof()
        moves = self.transcript is not None and self.transcript.movable and not sent_all
        if moves:
            why = "The decode instance was drained, and no other could go on with the answer."
            self.interrupt(why, end=CallEnd.STOPPED)
        return moves

    async def run(self) -> web.StreamResponse:
        """Relays the answer to its end, or until either side breaks."""
        self._watch()
        try:
            if self.pace is None and self.answer.content.at_eof():
                body = self._filter.rewritten(self.head)
                if self.prefilled is not None and self._counts in body:
                    body = await with_ps_counts(body, self.request.path, self.prefilled, streamed=False)
                headers = self.response.headers
                self.response = web.Response(status=self.answer.status, headers=headers, body=body)
                await self.finish(b"")
            elif await self._relay_stream():
                await self.finish(self._filter.flush())
            elif self.broken is not None and self.transcript is not None and self.transcript.can_go_on:
                self.resumable = True
            elif not self.diverged:
                await self.give_up()
        except ClientGone:
            pass  # `_send` has recorded it
        finally:
            if self._timer is not None:
                self._timer.cancel()
        return self.response

    def _watch(self) -> None:
        """Ends an answer when the instance has sent nothing for too long, and hangs up on a client that has
        read nothing for too long: it would keep its place, and D's answer, for ever."""
        waited = monotonic() - self._since
        client, instance = (waited, 0.0) if self._writing else (0.0, waited)
        if instance >= self.most_silence:
            why = f"{self._sender} has sent nothing for {self.most_silence:g} s."
            self.most_silence = math.inf
            self.interrupt(why, 504, CallEnd.LATE)
        if client >= STALL_SECONDS:
            whose = f"request {self.scrubber.unique}: its client"
            logger.info(f"{whose} has read nothing for {STALL_SECONDS:g} s, so its connection is closed")
            hang_up(self.request)
            return
        # One timer at a time for the whole answer: one for each piece would cost more than the piece.
        left = min(STALL_SECONDS - client, self.most_silence - instance)
        self._timer = asyncio.get_running_loop().call_later(left, self._watch)

    async def _relay_stream(self) -> bool:
        """Whether the answer came to its end. Raises ClientGone."""
        chunk, pace, stream, transcript = self.head, self.pace, self._stream, self.transcript
        passed_on, content = self._filter, self.answer.content
        prefilled, counts = self.prefilled, self._counts
        try:
            while chunk:
                data = passed_on.feed(chunk)
                if prefilled is not None and counts in data:
                    data = await with_ps_counts(data, self.request.path, prefilled, streamed=pace is not None)
                since = self._since
                await self._send(data if stream is None else stream.feed(data))
                if chunk.startswith(b":") and b"data:" not in chunk:
                    self._since = since  # a comment, which vLLM's server sends while its engine is silent
                if passed_on.given_up:
                    self._end, self._why = CallEnd.ABORTED, f"{self._sender} {STOPPED}."
                    return self._broke_off(None)
                if transcript is not None and transcript.failed:
                    self._end, self._error = CallEnd.ERROR, transcript.failed
                    return self._broke_off(None)
                chunk = await content.readany()
                if pace is not None and chunk:
                    pace.chunk_arrived(chunk)
        except (Diverged, msgspec.MsgspecError) as error:
            if isinstance(stream, RepeatedAnswer):
                self.diverged = True
                return False
            self.interrupt("The decode instance was lost, and the one after it generates other tokens.")
            return self._broke_off(error)
        except (aiohttp.ClientError, OSError) as error:
            return self._sent.endswith(DONE + EVENT_END) or self._broke_off(error)
        return True

    def _broke_off(self, error: Exception | None) -> bool:
        choice, cause = self.scrubber.choice, "" if error is None else f" ({error!r})"
        sender = choice.prefill if self.role == "P" else choice.decode
        logger.warning(f"request {self.scrubber.unique}: an answer of {sender} broke off: {self._why}{cause}")
        self.broken = self._end
        return False

    async def begin(self, events: bytes, prompt: bytes = b"") -> None:
        """In place of `run`, sends the first events of a stream, with which another instance goes on unless
        `finish` follows. `prompt`: as in `Transcript.begin`. Raises ClientGone."""
        assert self.transcript is not None
        await self._send(self.transcript.begin(self._filter.rewritten(events), prompt))
        self.resumable = True

    async def finish(self, data: bytes) -> None:
        """Sends the rest of the answer and ends it. Raises ClientGone."""
        await self._send(data, last=True)
        self.complete, self.resumable = True, False

    async def _send(self, data: bytes, *, last: bool = False) -> None:
        """Sends the next bytes; after the `last` ones it ends the response here, where `_watch` still sees a
        client that does not read. Raises ClientGone."""
        self._since, self._writing = monotonic(), True
        try:
            if not self.response.prepared:
                await self.response.prepare(self.request)
            if data:
                await self.response.write(data)
                self._sent = data
            if last:
                await self.response.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            logger.debug("a client left in the middle of its answer")
            self.request[RECORD].end("left")
            raise ClientGone from error
        finally:
            self._since, self._writing = monotonic(), False

    async def give_up(self, why: str = "", status: int = 0) -> None:
        """Ends a stream with an error event, and any other body visibly unfinished. Raises ClientGone."""
        if why:
            self._why, self._status, self._error = why, status, b""
        self.request[RECORD].end("broken")
        if self.answer.content_type != EVENT_STREAM:
            hang_up(self.request)
            return
        between_events = self._sent.endswith((EVENT_END, _CRLF_END))
        error = self._error or error_event(self._status, self._why, named=self.request.path in NAMED_EVENTS)
        await self._send((b"" if between_events else EVENT_END) + error, last=True)


# The headers of requests and answers.

_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
# Headers by which vLLM's caller controls it (all that vLLM 0.32 reads in `entrypoints/`). That caller is the
# proxy: it alone chooses replica and transfer, and an instance's load does not concern clients. A client's
# priority is in its body, which vLLM reads, too. Two others are passed on: Authorization, and X-Session-ID,
# which only names a session in vLLM's cache events.
_CONTROLS = {REQUEST_ID.lower(), REPLICA.lower(), "x-vllm-priority", "endpoint-load-metrics-format"}
# The proxy writes each body anew.
_NOT_TO_INSTANCE = _CONTROLS | {
    "host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect",
}  # fmt: skip


def to_instance(client: CIMultiDictProxy[str], instance: Instance, request_id: str) -> Headers:
    """The client's end-to-end headers, with the id that this proxy has chosen."""
    headers = end_to_end(client, _NOT_TO_INSTANCE)
    headers[REQUEST_ID] = request_id
    # Anthropic's clients send their key in X-Api-Key; vLLM reads Authorization only.
    if (key := headers.get("X-Api-Key")) and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {key}"
    if theirs := client.get(REQUEST_ID):
        headers.setdefault(CLIENT_ID, theirs)
    # Kept as it is: vLLM takes JSON only, and browsers need permission to send that from other origins.
    headers["Content-Type"] = client.get("Content-Type", "")
    # Ids are rewritten in the answer, so it must not be compressed.
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
    """Takes what names instances out of an answer. The client sees `unique` in place of `request_id`, and the
    second of `previous`, an earlier response's two ids, in place of the first."""

    choice: Choice
    request_id: str
    unique: str
    previous: tuple[str, str] = "", ""

    def text(self, text: str) -> str:
        """A header or an error, with the ids and the addresses replaced."""
        for name, instead in self._names:
            text = text.replace(name, instead)
        return text

    @cached_property
    def ids(self) -> list[tuple[str, str]]:
        """The ids to be replaced, and by what."""
        return [(self.request_id, self.unique), *([self.previous] if self.previous[0] else [])]

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        names = list(self.ids)
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


def _end_of_events(text: bytes) -> int:
    """Where the last whole event ends; 0 if there is none. vLLM writes no carriage returns, others may."""
    for end in (EVENT_END, _CRLF_END):
        if (found := text.rfind(end)) >= 0:
            return found + len(end)
    return 0


class AnswerFilter:
    """One answer's bytes as the client may get them: with the client's id, and only up to where the instance
    gave the answer up. The bytes may come cut anywhere.

    A stream goes on by whole events. A JSON body, or an event that is too long to be held until it is whole,
    goes on but for its last bytes, which may begin an id.
    """

    def __init__(self, path: str, scrubber: Scrubber, streamed: bool, longest: int = LONGEST_EVENT) -> None:
        self.given_up = False
        self._streamed, self._longest_event = streamed, longest
        self._sign = SIGNS.get(path)
        self._ids = [(old.encode(), new.encode()) for old, new in scrubber.ids]
        self._longest = max(len(ABORTED), *(len(old) for old, _ in self._ids))
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes that may go on; none from the event on that gives the answer up."""
        if self.given_up:
            return b""
        text = self._rest + chunk
        end = _end_of_events(text) if self._streamed else 0
        if not self._streamed or len(text) - end > self._longest_event:
            whole = max(text.rfind(old) + len(old) if old in text else 0 for old, _ in self._ids)
            end = len(text) - min(len(text) - whole, self._longest - 1)
        if self._sign is not None and self._sign in text:
            part = text[:end] if self._streamed else text
            at = first_given_up(part, self._sign, streamed=self._streamed)
            if at >= 0:
                self.given_up, self._rest = True, b""
                return self.rewritten(text[:at])
        self._rest = text[end:]
        return self.rewritten(text[:end])

    def flush(self) -> bytes:
        """At the end of the answer: what was held back."""
        rest, self._rest = self._rest, b""
        return self.rewritten(rest)

    def rewritten(self, data: bytes) -> bytes:
        """With the ids replaced; nothing else in a successful body is, as it is the model's text."""
        for old, new in self._ids:
            data = data.replace(old, new)
        return data
