"""What instances answer: errors, what P returns for D, the first event of a stream, and answers that an
instance has given up. No IO."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from .bodies import Body, Fields

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


# Streams that another decode instance can go on with. D is asked for the token ids beside the text
# (`return_token_ids`), which are taken out again where the client did not ask for them. If D is lost, another
# one gets the prompt's ids and those of the answer as one prompt (continuation.py), from a *resume point*: a
# number of tokens whose text the client has, whole. vLLM keeps back text of the tokens that it has sent: the
# first bytes of a character, and what may be the beginning of a stop string (up to the length of the longest
# one). So an event is a resume point if it has one token and some text: then nothing of a character is kept
# back. With stop strings, its text ends so many characters later than the event shows.

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Fields of a request that the continuation repeats.
SAME = frozenset(
    {
        "allowed_token_ids", "cache_salt", "ignore_eos", "include_stop_str_in_output", "logit_bias",
        "min_p", "model", "priority", "repetition_penalty", "return_tokens_as_token_ids", "seed",
        "session_id", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids",
        "stream_interval", "stream_options", "temperature", "top_k", "top_p", "user",
    }
)  # fmt: skip
# Those that count tokens, or that the two endpoints name otherwise.
_TRANSLATED = frozenset(
    {
        "logprobs", "max_completion_tokens", "max_tokens", "min_tokens", "return_token_ids", "stream",
        "top_logprobs",
    }
)  # fmt: skip
# Those that make the prompt's tokens, or change nothing of the answer.
_OF_THE_PROMPT = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs",
        "continue_final_message", "messages", "metadata", "prompt", "reasoning_effort", "store",
        "truncate_prompt_tokens", "truncation_side",
    }
)  # fmt: skip
# Those with which an answer can go on elsewhere only if they have one of these values.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "bad_words": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "include_reasoning": (None, True),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "use_beam_search": (None, False),
}
_KNOWN = SAME | _TRANSLATED | _OF_THE_PROMPT | _ONLY.keys()
_MOST_FIELD_BYTES = 16384
"""Of all fields that are kept, besides the prompt."""
_DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions in vLLM."""


class _ContentPart(msgspec.Struct):
    type: str = "text"


class _ChatMessage(msgspec.Struct):
    content: str | list[_ContentPart | str] | None = None


_messages = msgspec.json.Decoder(list[_ChatMessage])
_stops = msgspec.json.Decoder(str | list[str] | None)


@dataclass
class Wanted:
    """What a client asked for, as far as a continuation needs it.

    Attributes:
        chat: at /v1/chat/completions.
        kept_back: characters that vLLM may keep back for stop strings.
        overlap: characters before these that a stop string may begin in, although they were sent.
        shows_ids: the client gets the token ids, too.
        shows_tokens: the client sees single tokens, and not only text.
    """

    chat: bool
    kept_back: int
    overlap: int
    shows_ids: bool
    shows_tokens: bool
    _raw: dict[str, bytes]

    @classmethod
    def of(cls, body: Body) -> Wanted | None:
        """None if another instance could not go on with the answer exactly, or there is no stream."""
        views = body.fields
        if body.path not in (CHAT, COMPLETIONS) or not body.one_prompt or not _KNOWN.issuperset(views):
            return None
        raw = {name: bytes(value) for name, value in views.items() if name not in _OF_THE_PROMPT}
        if raw.get("stream") != b"true" or sum(map(len, raw.values())) > _MOST_FIELD_BYTES:
            return None
        chat, longest = body.path == CHAT, 0
        try:
            if any(msgspec.json.decode(raw[name]) not in _ONLY[name] for name in _ONLY.keys() & raw.keys()):
                return None
            if chat and not _is_text(views["messages"]):
                return None
            if "stop" in raw:
                stops = _stops.decode(raw["stop"]) or []
                longest = max(map(len, [stops] if isinstance(stops, str) else stops), default=1) - 1
        except (msgspec.MsgspecError, RecursionError, KeyError, ValueError):
            return None
        included = raw.get("include_stop_str_in_output") == b"true"
        kept_back, overlap = (0, longest) if included else (longest, 0)
        shows_ids = raw.get("return_token_ids") == b"true"
        logprobs = raw.get("logprobs", b"null") not in ((b"null", b"false") if chat else (b"null",))
        return cls(chat, kept_back, overlap, shows_ids, shows_ids or logprobs, raw)

    @cached_property
    def fields(self) -> Fields:
        """Those that are not the prompt's. Raises ValueError if one is nested too deeply."""
        return {name: msgspec.json.decode(value) for name, value in self._raw.items()}

    @property
    def needs_context(self) -> bool:
        """Whether only the model's context bounds the answer."""
        return self.chat and self.most_tokens(0) == 0

    def most_tokens(self, context: int) -> int:
        """Tokens of the whole answer, at most; `context`: those of the model that the prompt leaves."""
        names = ("max_completion_tokens", "max_tokens") if self.chat else ("max_tokens",)
        for name in names:
            if self.fields.get(name) is not None:
                return int(self.fields[name])
        return context if self.chat else _DEFAULT_MAX_TOKENS


def _is_text(messages: Raw) -> bool:
    """Whether nothing but text is in these messages: no picture has its tokens in the prompt's ids alone."""
    if re.search(rb'"type"', messages) is None:
        return True
    contents = [each.content for each in _messages.decode(messages) if isinstance(each.content, list)]
    return all(isinstance(part, str) or part.type == "text" for parts in contents for part in parts)


_IDS, _PROMPT_IDS = b'"token_ids":[', b'"prompt_token_ids":['
_NO_IDS, _NO_PROMPT_IDS = b'"token_ids":null', b'"prompt_token_ids":null'
"""Neither can begin within a JSON string, where quotes are escaped."""
DATA_SPACE, DONE = b"data: ", b"data: [DONE]"
_ERROR = b'data: {"error"'
_GOES_ON = b'"finish_reason":null'
_MEMORY_STEP = 4096


class _Text(msgspec.Struct):
    content: str | None = None


class _TextChoice(msgspec.Struct):
    text: str = ""
    delta: _Text = msgspec.field(default_factory=_Text)


class _TextEvent(msgspec.Struct):
    choices: list[_TextChoice] = []


_text_event = msgspec.json.Decoder(_TextEvent)


@dataclass
class TranscriptMemory:
    """What all transcripts hold.

    Attributes:
        most: bytes, together.
        most_each: bytes of one.
        held: bytes now.
    """

    most: int
    most_each: int
    held: int = 0


class ResumePoint(NamedTuple):
    """From where an answer can go on.

    Attributes:
        bytes: of the ids of its tokens, up to here.
        chars: where their text ends, of the text that is counted.
        offset: where their text ends for `text_offset` of log-probabilities.
    """

    bytes: int
    chars: int
    offset: int


class Beyond(NamedTuple):
    """What has come of an answer after its resume point.

    Attributes:
        tokens: of the answer, up to the point.
        offset: see ResumePoint.
        ids: tokens.
        chars: characters of text, without those that are kept back.
    """

    tokens: int
    offset: int
    ids: list[int]
    chars: int


@dataclass(eq=False)
class Transcript:
    """What the client has of one streamed answer, over all instances that have sent parts of it.

    Attributes:
        wanted: by the client.
        possible: another instance could go on with it.
        head: the first event, without ids.
        failed: the event, an error of the instance's own, that has come in place of the rest.
        finished: the event with the `finish_reason` has been passed on.
        done: all has been passed on.
        prompt_tokens: of the request; 0 before the first event.
    """

    wanted: Wanted
    memory: TranscriptMemory
    possible: bool = True
    head: bytes = b""
    failed: bytes = b""
    finished: bool = False
    done: bool = False
    prompt_tokens: int = 0
    _rest: bytes = b""
    _prompt: bytes = b""
    _ids: bytearray = field(default_factory=bytearray)
    _chars: int = 0
    """Of text; from the resume point where that is the last text that came."""
    _safe: int = 0
    """The resume point, as ResumePoint has it, and the next two."""
    _safe_chars: int = 0
    _safe_offset: int = 0
    _coming: deque[ResumePoint] = field(default_factory=deque)
    """Points whose text has not been sent to its end."""
    _counted: int = 0
    _plain: bool = False
    """An event with one token and some text is all that need be known of it."""

    @classmethod
    def of(cls, body: Body, memory: TranscriptMemory) -> Transcript | None:
        """For the answer to this request; None if it is no stream, or none that others could go on with."""
        wanted = Wanted.of(body)
        return None if wanted is None else cls(wanted, memory)

    def __post_init__(self) -> None:
        chat = self.wanted.chat
        self._text, self._empty = (
            (b'"delta":{"content":"', b'"content":""') if chat else (b'"text":"', b'"text":""')
        )
        self._counts_chars = bool(self.wanted.kept_back or self.wanted.overlap)

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return self._ids.count(b",")

    @property
    def movable(self) -> bool:
        """Whether another instance would go on with it even if this one is well: nothing would come a second
        time, or it would come the same."""
        beyond = len(self._ids) > self._safe or self._chars > self._safe_chars
        same = self.wanted.fields.get("temperature") == 0
        return self.possible and self.prompt_tokens > 0 and not self.finished and (not beyond or same)

    def feed(self, chunk: bytes) -> bytes:
        """The instance's next bytes, as the client gets them: whole events only. After an error of the
        instance nothing more comes."""
        if self._rest or not 0 <= chunk.find(_EVENT_END) == len(chunk) - len(_EVENT_END):
            return b"".join(self._passed(event) for event in self.events(chunk))
        # One event, as nearly always. Each token of each answer comes by here.
        if self._plain and _GOES_ON in chunk and self._text in chunk and self._empty not in chunk:
            at = chunk.find(_IDS) + len(_IDS)
            end = chunk.find(b"]", at)
            ids = chunk[at:end]
            if ids and b"," not in ids and at > len(_IDS):
                self._ids += ids + b","
                self._safe, self._chars = len(self._ids), 0
                if self._safe > self._counted:
                    self._count()
                return chunk[: at - 1] + b"null" + chunk[end + 1 :]
        return self._passed(chunk)

    def events(self, chunk: bytes) -> Iterator[bytes]:
        """The events that are complete now, up to an error of the instance."""
        *events, self._rest = (self._rest + chunk).split(_EVENT_END)
        for event in events:
            yield event + _EVENT_END
            if self.failed:
                return
        if len(self._rest) > self.memory.most_each:
            self.drop()
            yield self.flush()

    def flush(self) -> bytes:
        """What is left at the end of a stream that is complete."""
        rest, self._rest = self._rest, b""
        return rest

    def drop(self) -> None:
        """No other instance can go on with it. What it holds is let go. Idempotent."""
        self.possible = self._plain = False
        self.memory.held -= self._counted + len(self._prompt)
        self._counted = 0
        self._ids, self._prompt = bytearray(), b""
        self._coming.clear()

    def _passed(self, event: bytes) -> bytes:
        """One event."""
        at = event.find(_IDS)
        if at < 0:
            return self.without_tokens(event)
        first = not self.head
        if first:
            self._begin(event)
        end = event.find(b"]", at)
        self.finished = _GOES_ON not in event
        if self._text not in event:
            self.drop()  # reasoning, or a call of a tool
        if self.possible:
            self._note(event, event[at + len(_IDS) : end])
        if self.wanted.shows_ids:
            return event
        event = event[:at] + _NO_IDS + event[end + 1 :]
        return _without_prompt(event) if first else event

    def _note(self, event: bytes, ids: bytes) -> None:
        """An event with tokens."""
        choice = _text_event.decode(event[len(DATA_SPACE) :]).choices[0]
        offset = 0
        if self.wanted.shows_tokens and not self.wanted.chat:
            offset = end_of_offsets(_decoder.decode(event[len(DATA_SPACE) :])["choices"][0])
        self._add(ids, choice.text or choice.delta.content or "", offset)

    def note_decoded(self, ids: Sequence[int], text: str, offset: int, finished: bool) -> None:
        """An event that is decoded; `offset`: where its text ends for `text_offset`."""
        self.finished |= finished
        if self.possible:
            self._add(b",".join(b"%d" % each for each in ids), text, offset)

    def _add(self, ids: bytes, text: str, offset: int) -> None:
        if ids:
            self._ids += ids + b","
            if len(self._ids) > self._counted:
                self._count()
        self._chars += len(text)
        if text and ids and b"," not in ids:
            end = self._chars + self.wanted.kept_back
            self._coming.append(ResumePoint(len(self._ids), end, offset))
        while self._coming and self._coming[0].chars <= self._chars - self.wanted.overlap:
            self._safe, self._safe_chars, self._safe_offset = self._coming.popleft()
        if not self._counts_chars and self._safe_chars == self._chars:
            self._chars = self._safe_chars = 0

    def without_tokens(self, event: bytes) -> bytes:
        """An event that has no tokens: a chat's first, an error, the usage, or the end."""
        if event.startswith(DONE):
            self.done = True
        elif event.startswith(_ERROR):
            if self.possible and is_servers_error(_decoder.decode(event[len(DATA_SPACE) :])):
                self.failed = event
                return b""
        elif not self.head and _PROMPT_IDS in event:
            self._begin(event)
            return event if self.wanted.shows_ids else _without_prompt(event)
        elif not self.finished and event.startswith(_DATA):
            if b'"delta":{}' in event and _GOES_ON in event and not self.wanted.shows_tokens:
                return b""  # which vLLM sends only because the ids were asked for
            self.drop()
        return event

    def _begin(self, event: bytes) -> None:
        """The first event, with the prompt's tokens."""
        self.head = _without_prompt(event)
        at = event.find(_PROMPT_IDS)
        if at < 0:
            self.drop()
            return
        self._plain = not (self.wanted.shows_tokens or self._counts_chars)
        self._prompt = event[at + len(_PROMPT_IDS) : event.find(b"]", at)]
        self.prompt_tokens = self._prompt.count(b",") + 1
        self.memory.held += len(self._prompt)
        self._count()

    def _count(self) -> None:
        """More is held: `_counted` is what the ids may take until this is called again."""
        step = max(_MEMORY_STEP, len(self._ids) - self._counted)
        self.memory.held += step
        self._counted += step
        if len(self._prompt) + self._counted > self.memory.most_each or self.memory.held > self.memory.most:
            self.drop()

    def rewind(self) -> Beyond:
        """Goes back to the resume point, where another instance goes on; all its events are decoded."""
        ids = [int(each) for each in bytes(self._ids[self._safe : -1]).split(b",") if each]
        chars = self._chars - self._safe_chars
        del self._ids[self._safe :]
        self._chars, self._rest, self.failed, self._plain = self._safe_chars, b"", b"", False
        self._coming.clear()
        return Beyond(self.tokens, self._safe_offset, ids, chars)

    @property
    def all_ids(self) -> bytes:
        """Of the prompt and the answer, with commas."""
        return b",".join(filter(None, (self._prompt, bytes(self._ids[:-1]))))


def _without_prompt(event: bytes) -> bytes:
    at = event.find(_PROMPT_IDS)
    return event if at < 0 else event[:at] + _NO_PROMPT_IDS + event[event.find(b"]", at) + 1 :]


def end_of_offsets(choice: Fields) -> int:
    """Where the text of a completion's last token ends, by its `text_offset`; 0 if it has none."""
    found = choice.get("logprobs") or {}
    offsets, tokens = found.get("text_offset"), found.get("tokens")
    return offsets[-1] + len(tokens[-1]) if offsets and tokens else 0
