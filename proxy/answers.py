"""What instances answer: errors, what P returns for D, the first event of a stream, and answers that an
instance has given up. No IO."""

from __future__ import annotations

from typing import Any

import msgspec

from .bodies import Fields

_decoder = msgspec.json.Decoder(Fields)


def is_servers_error(event: Any) -> bool:
    """Whether a stream's event is an error that is not the client's."""
    error = event.get("error") if isinstance(event, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(error, dict) and not (isinstance(code, int) and 400 <= code < 500)


def message_of(raw: bytes) -> str:
    """The message of an error in OpenAI's form, or in FastAPI's; "" if there is none."""
    try:
        fields = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return ""
    error = fields.get("error")
    message = error.get("message") if isinstance(error, dict) else fields.get("detail")
    return message if isinstance(message, str) else ""


def returned_params(raw: bytes) -> Fields | None:
    """The kv_transfer_params in P's answer, for D; None if it has none, or is not JSON."""
    try:
        params = _decoder.decode(raw).get("kv_transfer_params")
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return params if isinstance(params, dict) else None


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
# An answer can repeat what its client has sent (metadata, tools, a tool's input). So each of these is read
# from the JSON, in its place.

STOPPED = "was stopped before its answer was complete"
"""The words of an error about an instance that gave an answer up."""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    output_tokens: int | None = None


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


class _Completion(msgspec.Struct):
    """An answer of /v1/completions or /v1/chat/completions, and each event of its stream."""

    choices: list[_Choice] = []

    @property
    def given_up(self) -> bool:
        return any(choice.finish_reason == "abort" for choice in self.choices)


class _Message(msgspec.Struct):
    """An answer of /v1/messages."""

    type: str = ""
    stop_reason: str | None = None

    @property
    def given_up(self) -> bool:
        return self.type == "message" and self.stop_reason is None


class _MessageEvent(msgspec.Struct):
    type: str = ""
    delta: _Delta | None = None

    @property
    def given_up(self) -> bool:
        return self.type == "message_delta" and self.delta is not None and self.delta.stop_reason is None


class _Response(msgspec.Struct):
    """An answer of /v1/responses."""

    object: str = ""
    status: str | None = None
    usage: _Usage | None = None

    @property
    def given_up(self) -> bool:
        if self.object != "response":
            return False
        return self.status == "cancelled" or (self.usage is not None and self.usage.output_tokens == 0)


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    response: _Response | None = None

    @property
    def given_up(self) -> bool:
        return self.type == "response.completed" and self.response is not None and self.response.given_up


_Shape = type[_Completion] | type[_Message] | type[_MessageEvent] | type[_Response] | type[_ResponseEvent]

_ABORT = b'"abort"'
_ABORTED = b'"finish_reason":"abort"'
# By path: bytes without which nothing was given up, so that other answers are not decoded; and the shape.
_WHOLE: dict[str, tuple[bytes, _Shape]] = {
    "/v1/completions": (_ABORT, _Completion),
    "/v1/chat/completions": (_ABORT, _Completion),
    "/v1/messages": (b"", _Message),
    "/v1/responses": (b"", _Response),
}
_EVENT: dict[str, tuple[bytes, _Shape]] = {
    "/v1/completions": (_ABORT, _Completion),
    "/v1/chat/completions": (_ABORT, _Completion),
    "/v1/messages": (b'"message_delta"', _MessageEvent),
    "/v1/responses": (b'"response.completed"', _ResponseEvent),
}
_NONE: tuple[bytes, None] = (b"", None)
_DATA = b"data:"
_EVENT_END = b"\n\n"
_LONGEST_EVENT = 256 << 10
"""Bytes up to which an event is looked at; vLLM ends each with the write in which it begins."""


def gave_up(path: str, body: bytes) -> bool:
    """Whether the instance has given a whole answer up that is no stream."""
    sign, shape = _WHOLE.get(path, _NONE)
    return shape is not None and sign in body and _given_up(body, shape)


def gave_up_early(path: str, head: bytes, *, streamed: bool) -> bool:
    """Whether the start of an answer, which goes on, shows that."""
    watch = GivenUpFilter(path, streamed=streamed)
    watch.feed(head)
    return watch.given_up


def _given_up(data: bytes, shape: _Shape) -> bool:
    try:
        return bool(msgspec.json.decode(data, type=shape).given_up)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False


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
        self._sign: bytes
        self._shape: _Shape | None
        self._sign, self._shape = _EVENT.get(path, _NONE)
        self._rest = b""
        """The event whose end has not come yet, or the end of a long JSON."""
        self._passed = 0
        """How many of its bytes have been passed on."""

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes, without the event that gives up and what follows it. An event that may be that one
        is held back until it is complete."""
        if self.given_up:
            return b""
        if self._shape is None:
            return chunk
        if not self._streamed:
            return self._feed_json(chunk) if self._shape is _Completion else chunk
        if not self._rest and self._sign not in chunk and chunk.endswith(_EVENT_END):
            return chunk  # as nearly all are
        text, passed = self._rest + chunk, self._passed
        end = text.rfind(_EVENT_END)
        whole = end + len(_EVENT_END) if end >= 0 else 0
        stop = len(text)
        if self._sign in text:
            at = self._first_given_up(text[:whole])
            if at is not None:
                self.given_up, self._rest = True, b""
                return text[passed:at]
            if self._sign in text[whole:] and stop - whole <= _LONGEST_EVENT:
                stop = max(whole, passed)
        self._rest = text[whole:] if len(text) - whole <= _LONGEST_EVENT else b""
        self._passed = stop - whole if self._rest else 0
        return text[passed:stop]

    def flush(self) -> bytes:
        """What was held back, at the end of the answer."""
        held = self._rest[self._passed :] if self._streamed else b""
        self._rest = b""
        return held

    def _first_given_up(self, events: bytes) -> int | None:
        """Where the first event begins that gives up, in events that are complete; None if none does."""
        assert self._shape is not None
        at = 0
        for event in events.split(_EVENT_END):
            lines = event.split(b"\n") if self._sign in event else []
            if any(_given_up(line[len(_DATA) :], self._shape) for line in lines if line.startswith(_DATA)):
                return at
            at += len(event) + len(_EVENT_END)
        return None

    def _feed_json(self, chunk: bytes) -> bytes:
        """Looks at bytes, which is exact where nothing that a client chose stands outside of a string."""
        text, passed = self._rest + chunk, len(self._rest)
        at = text.find(_ABORTED)
        self.given_up = at >= 0
        self._rest = text[1 - len(_ABORTED) :]
        return text[passed:at] if self.given_up else chunk
