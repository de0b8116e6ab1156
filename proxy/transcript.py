"""What the client has of a streamed answer, so that another decode instance can go on with it. No IO."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, Literal, NamedTuple

import msgspec

from .bodies import Body, Fields, plain
from .upstream import EVENT_END, NO_PROMPT_IDS, PROMPT_IDS, is_servers_error, split_prompt

_decoder = msgspec.json.Decoder(Fields)
_DATA = b"data:"

# Streams that another decode instance can go on with. D is asked for token ids beside the text
# (`return_token_ids`), which are taken out again if the client did not ask for them. If D is lost, another
# one gets the ids of prompt and answer as one prompt (continuation.py), up to a *resume point*: a number of
# tokens whose whole text the client has. vLLM keeps text of sent tokens back: the first bytes of a character,
# and what may begin a stop string (up to the length of the longest one). So an event with one token and some
# text is a resume point, as no part of a character is kept back then; with stop strings its text ends so
# many characters later than the event shows. Streams of vLLM's Rust server do not go on: it leaves out what
# is null, and reports the end in an event of its own.

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Fields of a request that its continuation repeats.
SAME = {
    "allowed_token_ids", "cache_salt", "chat_template_kwargs", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "min_p", "model", "priority", "reasoning_effort",
    "repetition_penalty", "return_tokens_as_token_ids", "seed", "session_id", "skip_special_tokens",
    "stop", "stop_token_ids", "stream_interval", "stream_options", "temperature", "top_k", "top_p",
    "user",
}  # fmt: skip
# Fields that count tokens, or have different names at the two endpoints.
_TRANSLATED = {
    "logprobs", "max_completion_tokens", "max_tokens", "min_tokens", "return_token_ids", "stream",
    "top_logprobs",
}  # fmt: skip
# Fields that make the prompt's tokens, or do not change the answer.
_OF_THE_PROMPT = {
    "add_generation_prompt", "add_special_tokens", "chat_template", "continue_final_message",
    "messages", "metadata", "prompt", "store", "truncate_prompt_tokens", "truncation_side",
}  # fmt: skip
# With these fields an answer can go on elsewhere only if they have one of these values.
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
    "spaces_between_special_tokens": (None, True),
    "suffix": (None, ""),
    "tool_choice": ("none",),
    "tools": (None, []),
    "use_beam_search": (None, False),
}
# Fields that are read here, and that vLLM takes in several spellings.
_SWITCHES = ("echo", "include_stop_str_in_output", "return_token_ids", "stream", "use_beam_search")
_BOUNDS = ("max_completion_tokens", "max_tokens")
_NUMBERS = (*_BOUNDS, "min_tokens", "n")
_KNOWN = SAME | _TRANSLATED | _OF_THE_PROMPT | _ONLY.keys()
_MAX_FIELD_BYTES = 16384
"""The most bytes of all fields that are kept, without the prompt."""
_DEFAULT_MAX_TOKENS = 16
"""vLLM's own for /v1/completions."""


class _ContentPart(msgspec.Struct):
    type: Literal["text"]  # vLLM also takes pictures without a type


class _ChatMessage(msgspec.Struct):
    content: str | list[_ContentPart | str] | None = None


_messages = msgspec.json.Decoder(list[_ChatMessage])
_stops = msgspec.json.Decoder(str | list[str] | None)


@dataclass
class Wanted:
    """What a client asked for, as far as a continuation needs it.

    Attributes:
        kept_back: characters that vLLM may keep back for stop strings.
        overlap: characters that were sent already, but may begin a stop string.
        shows_ids: whether the client gets token ids.
        shows_tokens: whether the client sees single tokens (ids or log-probabilities), not only text.
    """

    chat: bool
    stops: list[str]
    kept_back: int
    overlap: int
    shows_ids: bool
    shows_tokens: bool
    _raw: dict[str, bytes]

    @classmethod
    def of(cls, body: Body) -> Wanted | None:
        """None if no other instance could go on with the answer exactly, or if it is no stream."""
        views = body.fields
        if body.path not in (CHAT, COMPLETIONS) or not body.one_prompt or not _KNOWN.issuperset(views):
            return None
        switches = (*_SWITCHES, "logprobs") if body.path == CHAT else _SWITCHES
        views = views | plain(views, switches, _NUMBERS)
        raw = {name: bytes(value) for name, value in views.items() if name not in _OF_THE_PROMPT}
        if raw.get("stream") != b"true" or sum(map(len, raw.values())) > _MAX_FIELD_BYTES:
            return None
        chat = body.path == CHAT
        try:
            if any(msgspec.json.decode(raw[name]) not in _ONLY[name] for name in _ONLY.keys() & raw.keys()):
                return None
            # Pictures fail here: the prompt's ids alone do not give them.
            if chat and re.search(rb'"content"\s*:\s*\[', views["messages"]):
                _messages.decode(views["messages"])
            stops = _stops.decode(raw.get("stop", b"null")) or []
        except (msgspec.MsgspecError, RecursionError, KeyError, ValueError):
            return None
        stops = [stops] if isinstance(stops, str) else stops
        longest = max(map(len, stops), default=1) - 1
        included = raw.get("include_stop_str_in_output") == b"true"
        kept_back, overlap = (0, longest) if included else (longest, 0)
        shows_ids = raw.get("return_token_ids") == b"true"
        logprobs = raw.get("logprobs", b"null") not in ((b"null", b"false") if chat else (b"null",))
        return cls(chat, stops, kept_back, overlap, shows_ids, shows_ids or logprobs, raw)

    @cached_property
    def fields(self) -> Fields:
        """The fields without the prompt's. Raises ValueError if one is nested too deeply."""
        return {name: msgspec.json.decode(value) for name, value in self._raw.items()}

    @property
    def needs_context(self) -> bool:
        """Whether only the model's context bounds the answer."""
        return self.chat and all(self.fields.get(name) is None for name in _BOUNDS)

    @property
    def greedy(self) -> bool:
        return self.fields.get("temperature") == 0

    @property
    def least_tokens(self) -> int:
        """Tokens of the whole answer, at least. Raises as `most_tokens`."""
        return index(self.fields.get("min_tokens") or 0)

    def may_begin_stop(self, text: str) -> bool:
        """Whether the end of this text may begin a stop string."""
        begun = (stop[:length] for stop in self.stops for length in range(1, len(stop)))
        return any(map(text.endswith, begun))

    def most_tokens(self, context: int) -> int:
        """Tokens of the whole answer, at most; `context`: those that the prompt leaves of the context. Raises
        TypeError if the request's bound is no whole number, which vLLM refuses."""
        for name in _BOUNDS if self.chat else _BOUNDS[1:]:
            if self.fields.get(name) is not None:
                return index(self.fields[name])
        return context if self.chat else _DEFAULT_MAX_TOKENS


_IDS, _NO_IDS = b'"token_ids":[', b'"token_ids":null'
"""Neither can begin within a JSON string, where quotes are escaped."""
DATA_SPACE, DONE = b"data: ", b"data: [DONE]"
NOTHING = b'"delta":{}'
"""In the event of a token for which a tool parser has no text; vLLM sends it only where ids are asked for."""
_ONLY_USAGE = b'"choices":[]'
_ERROR = b'data: {"error"'
GOES_ON, ENDS = b'"finish_reason":null', b'"finish_reason":"'
_MEMORY_STEP = 4096


class _Text(msgspec.Struct):
    content: str | None = None


class TextChoice(msgspec.Struct):
    """The choice in one event of an answer."""

    text: str | None = None
    delta: _Text | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None

    @property
    def said(self) -> str | None:
        """Its text; None if it has anything else."""
        return self.text if self.delta is None else self.delta.content


class _TextEvent(msgspec.Struct):
    choices: list[TextChoice] = []


_text_event = msgspec.json.Decoder(_TextEvent)


@dataclass
class TranscriptMemory:
    """Bytes that all transcripts hold together; `most` of all, and `most_each` of one."""

    most: int
    most_each: int
    held: int = 0


class ResumePoint(NamedTuple):
    """A point in an answer from which another instance can go on.

    Attributes:
        bytes: length of the ids of the tokens up to here.
        chars: where their text ends, in characters of the counted text.
        offset: where their text ends, as `text_offset` of log-probabilities counts.
    """

    bytes: int
    chars: int
    offset: int


@dataclass(eq=False)
class Transcript:
    """What the client has of one streamed answer, over all instances that have sent parts of it.

    Attributes:
        possible: whether another instance could go on with it.
        stays: whether none could after all, as the ping of a D that sent a part of it says (`resumes`).
        head: the first event, without ids.
        failed: the event with the instance's own error, if one came in place of the rest; else b"".
        finished: whether the event with the `finish_reason` has been passed on.
        counted: whether the event with the usage of the whole answer has been passed on.
        prompt_tokens: of the request; 0 before the first event.
    """

    wanted: Wanted
    memory: TranscriptMemory
    possible: bool = True
    stays: bool = False
    head: bytes = b""
    failed: bytes = b""
    finished: bool = False
    counted: bool = False
    done: bool = False
    prompt_tokens: int = 0
    _prompt: bytes = b""
    _ids: bytearray = field(default_factory=bytearray)
    _chars: int = 0
    """Characters of text, without those of events whose text was not decoded."""
    _safe: int = 0
    """This and the next two are the resume point: its `bytes`, `chars` and `offset`."""
    _safe_chars: int = 0
    _safe_offset: int = 0
    _coming: deque[ResumePoint] = field(default_factory=deque)
    """Later resume points, whose text has not been sent to its end yet."""
    _counted: int = 0

    @classmethod
    def of(cls, body: Body, memory: TranscriptMemory) -> Transcript | None:
        """For the answer to this request; None if it is no stream that others could go on with."""
        wanted = Wanted.of(body)
        return None if wanted is None else cls(wanted, memory)

    def __post_init__(self) -> None:
        chat = self.wanted.chat
        self._text = b'"delta":{"content":"' if chat else b'"text":"'
        self.plain = not (self.wanted.shows_tokens or self.wanted.kept_back or self.wanted.overlap)
        """Whether an event with one token and some text need not be decoded."""

    @property
    def tokens(self) -> int:
        """How many tokens of the answer are held."""
        return self._ids.count(b",")

    @property
    def can_go_on(self) -> bool:
        """Whether another instance can go on with it now."""
        return self.possible and not self.stays and self.prompt_tokens > 0

    def comes_from(self, resumes: int) -> None:
        """A D whose ping has this `resumes` sends a part of it."""
        self.stays |= resumes <= self.wanted.needs_context

    @property
    def needs_context(self) -> bool:
        """Whether it has begun, and the proxy must know the model's context of the D that goes on with it."""
        return self.prompt_tokens > 0 and self.wanted.needs_context

    @property
    def movable(self) -> bool:
        """Whether another instance may take over from a healthy one: what it repeats will be the same."""
        beyond = len(self._ids) > self._safe or self._chars > self._safe_chars
        return self.can_go_on and not self.finished and (not beyond or self.wanted.greedy)

    def feed(self, data: bytes) -> bytes:
        """The instance's next events as the client gets them, up to an error of the instance's own."""
        if data.find(EVENT_END) == len(data) - len(EVENT_END):
            return self._passed(data)  # one, as nearly always
        return b"".join(self._passed(event) for event in self.events(data))

    def begin(self, events: bytes, prompt: bytes) -> bytes:
        """As `feed`, for first events without the token ids of the `prompt`; b"": the events have these."""
        self._prompt = prompt
        passed, shown = self.feed(events), prompt and self.wanted.shows_ids
        return passed.replace(NO_PROMPT_IDS, PROMPT_IDS + prompt + b"]", 1) if shown else passed

    def events(self, data: bytes) -> Iterator[bytes]:
        """The events one by one, up to an error of the instance's own."""
        *events, rest = data.split(EVENT_END)
        for event in events:
            yield event + EVENT_END
            if self.failed:
                return
        if rest:  # of an event that was too long to be held
            self.drop()
            yield rest

    @property
    def bytes_held(self) -> int:
        """How many bytes of `memory` this transcript takes."""
        return self._counted + len(self._prompt)

    def drop(self) -> None:
        """Frees what it holds: no other instance can go on with it any more. Idempotent."""
        self.possible = False
        self.memory.held -= self.bytes_held
        self._counted = 0
        self._ids, self._prompt = bytearray(), b""
        self._coming.clear()

    def _passed(self, event: bytes) -> bytes:
        at = event.find(_IDS)
        end = event.find(b"]", at)
        if min(at, end) < 0:
            return self.without_tokens(event)
        first = not self.head
        if first:
            self._begin(event)
        self.finished = ENDS in event
        if self.possible and not (self.finished or GOES_ON in event):
            self.drop()  # the answer may end with this event, and nothing in it says so
        elif self.possible:
            self._note(event, event[at + len(_IDS) : end])
        if self.wanted.shows_ids:
            return event
        if self.wanted.chat and not (self.finished or self.wanted.shows_tokens) and NOTHING in event:
            return b""
        event = event[:at] + _NO_IDS + event[end + 1 :]
        return split_prompt(event)[0] if first else event

    def _note(self, event: bytes, ids: bytes) -> None:
        start = event.find(self._text)
        if start < 0 and NOTHING not in event:
            self.drop()  # reasoning, or a call of a tool
            return
        some = start >= 0 and not event.startswith(b'"', start + len(self._text))
        if some and self.plain and ids.isdigit():
            # The text is not decoded: nearly every token of nearly every answer passes here.
            self.note_token(ids)
            return
        text, offset = text_of(event).said or "", 0
        if self.wanted.shows_tokens and not self.wanted.chat:
            offset = end_of_offsets(fields_of(event)["choices"][0])
        self._note_text(ids, text, offset)

    def note_token(self, ids: bytes) -> None:
        """Takes in an event with one token and some text, of a `plain` answer."""
        if self.possible:
            self._add(ids)
            self._safe, self._safe_chars = len(self._ids), self._chars

    def note_decoded(self, ids: Sequence[int], text: str, offset: int, finished: bool) -> None:
        """Takes in a decoded event; `offset`: where its text ends, as `text_offset` counts."""
        self.finished |= finished
        if self.possible:
            self._note_text(b",".join(b"%d" % each for each in ids), text, offset)

    def _note_text(self, ids: bytes, text: str, offset: int) -> None:
        if ids:
            self._add(ids)
        self._chars += len(text)
        if text and ids and b"," not in ids:
            end = self._chars + self.wanted.kept_back
            self._coming.append(ResumePoint(len(self._ids), end, offset))
        while self._coming and self._coming[0].chars <= self._chars - self.wanted.overlap:
            self._safe, self._safe_chars, self._safe_offset = self._coming.popleft()

    def _add(self, ids: bytes) -> None:
        self._ids += ids + b","
        if len(self._ids) > self._counted:
            self._count()

    def without_tokens(self, event: bytes) -> bytes:
        """Passes on an event without tokens: a chat's first, an error, the usage, or the end."""
        if event.startswith(DONE):
            self.done = True
        elif event.startswith(_ERROR):
            if self.possible and is_servers_error(fields_of(event)):
                self.failed = event
                return b""
        elif not self.head and (self._prompt or PROMPT_IDS in event):
            self._begin(event)
            return event if self.wanted.shows_ids else split_prompt(event)[0]
        elif not self.finished and event.startswith(_DATA):
            self.drop()
        self.counted |= _ONLY_USAGE in event
        return event

    def _begin(self, event: bytes) -> None:
        """Takes in the first event, which has the prompt's tokens."""
        self.head, ids = split_prompt(event)
        self._prompt = ids or self._prompt
        if not self._prompt:
            self.drop()
            return
        self.prompt_tokens = self._prompt.count(b",") + 1
        self.memory.held += len(self._prompt)
        self._count()

    def _count(self) -> None:
        """Counts more memory: the ids may take `_counted` bytes until this has to be called again."""
        step = max(_MEMORY_STEP, len(self._ids) - self._counted)
        self.memory.held += step
        self._counted += step
        if self.bytes_held > self.memory.most_each or self.memory.held > self.memory.most:
            self.drop()

    def has_room(self, prompt: int) -> bool:
        """Whether a prompt of so many bytes of ids may be held, too."""
        memory, nbytes = self.memory, prompt + _MEMORY_STEP
        return nbytes <= memory.most_each and memory.held + nbytes <= memory.most

    def settle(self) -> None:
        """Makes the current end the resume point: the caller knows that the text is whole there."""
        self._safe, self._safe_chars = len(self._ids), self._chars
        self._safe_offset = self._coming[-1].offset if self._coming else self._safe_offset
        self._coming.clear()

    def rewind(self) -> tuple[int, int, list[int], int]:
        """Goes back to the resume point, from which another instance goes on.

        Returns how many tokens the answer has up to there and the point's offset; and, of what the client has
        beyond it, the token ids and how many characters, without those that vLLM keeps back.
        """
        ids = [int(each) for each in bytes(self._ids[self._safe : -1]).split(b",") if each]
        chars = self._chars - self._safe_chars
        del self._ids[self._safe :]
        self._chars, self.failed = self._safe_chars, b""
        self._coming.clear()
        return self.tokens, self._safe_offset, ids, chars

    @property
    def all_ids(self) -> bytes:
        """The token ids of prompt and answer, separated by commas."""
        return b",".join(filter(None, (self._prompt, bytes(self._ids[:-1]))))


def fields_of(event: bytes) -> Fields:
    return _decoder.decode(event[len(DATA_SPACE) :])


def text_of(event: bytes) -> TextChoice:
    """The choice of an event that has one. Raises msgspec.MsgspecError."""
    return _text_event.decode(event[len(DATA_SPACE) :]).choices[0]


def end_of_offsets(choice: Fields) -> int:
    """Where the text of a completion's last token ends, by its `text_offset`; 0 without offsets."""
    found = choice.get("logprobs") or {}
    offsets, tokens = found.get("text_offset"), found.get("tokens")
    return offsets[-1] + len(tokens[-1]) if offsets and tokens else 0
