"""The rest of a streamed answer, from another instance than the one that began it. No IO.

The next instance is asked for a completion of the prompt and the answer's tokens up to the resume point (see
transcript.py); of a chat, for a chat with these tokens, so that vLLM's parsers can take tool calls out. Its
events are rewritten as the first instance's. It generates again what the client already has beyond that
point, which is not sent twice; if it differs, as it may with sampling, the answer cannot go on.
"""

import re

import msgspec

from .bodies import Body, Fields, parse
from .transcript import COMPLETIONS, DATA_SPACE, DONE, SAME, TextChoice, Transcript, end_of_offsets, fields_of
from .upstream import EVENT_END

_PLAIN = re.compile(
    rb'data: \{"id":"[^"]*+","object":"[a-z._]*+","created":\d++,"model":"[^"\\]*+"(,"choices":\['
    rb'\{"index":0,(?:"text"|"delta":\{"content"):"(?:[^"\\]|\\.)++"\}?+,"logprobs":null,"finish_reason":null,'
    rb'(?:"stop_reason":null,"prompt_token_ids":null,)?+"token_ids":)\[(\d++)\]'
    rb'((?:,"weight_versions":null)?+\}\](?:,"kv_transfer_params":null)?+\}\n\n)'  # which vLLM 0.33 has
)
"""Matches nearly every event: one token with text, without a usage. Such events are not decoded."""


class Diverged(Exception):
    """The instance has generated other tokens than the client has."""


class Continuation:
    """Goes on with an answer at the next instance: the `body` for it, and the client's part of its answer.

    Args:
        context: tokens of the model's context; needed only if `wanted.needs_context`.
        former: the continuation before this one; None if the answer goes on for the first time.

    Attributes:
        before: tokens of the answer that are part of this instance's prompt.
    """

    def __init__(self, transcript: Transcript, context: int, former: "Continuation | None") -> None:
        before, offset, ids, chars = transcript.rewind()
        self._transcript = transcript
        self._wanted = transcript.wanted
        self._head = head_of(transcript)
        self._offset = offset
        self._ids: list[int] = ids + (former._ids if former else [])
        self._chars: int = chars + (former._chars if former else 0)
        self.before = before
        self.body = self._body(context)
        self._begin = written(self._head).removesuffix(b"}" + EVENT_END)
        """The beginning of each event."""

    def _body(self, context: int) -> Body:
        wanted, fields = self._wanted, self._wanted.fields
        asked = {name: value for name, value in fields.items() if name in SAME}
        left = wanted.most_tokens(context - self._transcript.prompt_tokens) - self.before
        asked |= {"max_tokens": left, "stream": True, "return_token_ids": True}
        asked["min_tokens"] = max(0, wanted.least_tokens - self.before)
        asked |= {name: fields[name] for name in ("logprobs", "top_logprobs") if name in fields}
        prompt = b'{"prompt":[' + self._transcript.all_ids + b"],"
        body = parse(prompt + msgspec.json.encode(asked)[1:], COMPLETIONS)
        if wanted.chat:
            body.become_chat()
        return body

    def feed(self, chunk: bytes) -> bytes:
        """As `Transcript.feed`. Raises Diverged."""
        return b"".join(self._passed(event) for event in self._transcript.events(chunk))

    def _passed(self, event: bytes) -> bytes:
        new = self._transcript.plain and not self._ids and not self._chars
        if new and (found := _PLAIN.fullmatch(event)):
            self._transcript.note_token(found[2])
            return self._begin + found[1] + b"null" + found[3]
        if not event.startswith(DATA_SPACE + b'{"id"'):
            return self._transcript.without_tokens(event)
        fields = fields_of(event) | self._head
        if fields.get("usage"):
            fields["usage"] = usage_of(self._transcript, fields["usage"], self.before)
        if not fields["choices"]:
            return self._transcript.without_tokens(written(fields))
        choices = [made for each in fields["choices"] if (made := self._choice(each)) is not None]
        return written(fields | {"choices": choices}) if choices else b""

    def _choice(self, choice: Fields) -> Fields | None:
        """The choice as the client gets it; None if the client already has all of it."""
        wanted = self._wanted
        ids, logprobs = choice.get("token_ids") or [], choice.get("logprobs")
        delta = choice.get("delta") or {"content": choice.get("text")}
        text, finish = delta.get("content") or "", choice.get("finish_reason")
        if any(value for name, value in delta.items() if name not in ("role", "content")):
            raise Diverged  # not plain text, as what went before
        again = self._ids[: len(ids)]
        if ids[: len(again)] != again:
            if self._chars or wanted.shows_tokens:
                raise Diverged
            again, self._ids = [], []
        self._transcript.note_decoded(ids, text, end_of_offsets(choice) + self._offset, finish is not None)
        self._ids = self._ids[len(again) :]
        shown, ids = text[self._chars :], ids[len(again) :]
        self._chars = max(0, self._chars - len(text))
        if not shown and finish is None and not (ids and wanted.shows_tokens):
            return None
        logprobs = _later(logprobs, len(again), self._offset)
        return self._shown(choice, shown, logprobs, ids if wanted.shows_ids else None)

    def _shown(self, choice: Fields, text: str, logprobs: Fields | None, ids: list[int] | None) -> Fields:
        """A choice in the form of the client's endpoint."""
        if not self._wanted.chat:
            return {**choice, "text": text, "logprobs": logprobs, "prompt_token_ids": None, "token_ids": ids}
        said = {"content": text} if text or choice.get("delta") else {}
        return {**choice, "delta": said, "logprobs": logprobs, "token_ids": ids}


class RepeatedAnswer:
    """An instance's whole answer without its `first` token, which the client has from another instance."""

    def __init__(self, transcript: Transcript, first: TextChoice) -> None:
        self._transcript = transcript
        self._ids, self._text = first.token_ids or [], first.said or ""
        """The ids and the text of the first token that have not come again yet."""
        self._head = b"", b""
        """`created` and `model` as this instance writes them, and as the client has them."""

    def feed(self, chunk: bytes) -> bytes:
        """As `Transcript.feed`. Raises Diverged."""
        if not self._ids and not self._text:
            return self._transcript.feed(chunk.replace(*self._head))
        return b"".join(self._passed(event) for event in self._transcript.events(chunk))

    def _passed(self, event: bytes) -> bytes:
        again, had = self._ids, self._text
        if not (again or had) or not event.startswith(DATA_SPACE + b'{"id"'):
            return self._transcript.feed(event.replace(*self._head))
        fields = fields_of(event)
        theirs, ours = (
            {name: each[name] for name in ("created", "model")}
            for each in (fields, head_of(self._transcript))
        )
        self._head = msgspec.json.encode(theirs)[1:-1], msgspec.json.encode(ours)[1:-1]
        fields |= ours
        [choice] = fields["choices"]
        part, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
        ids, text, finish = choice.get("token_ids") or [], part.get(name) or "", choice.get("finish_reason")
        if not ids and finish is None:
            return b""  # the beginning of a chat
        ended = finish is not None and len(text) < len(had)
        if ids[: len(again)] != again or text[: len(had)] != had[: len(text)] or ended:
            raise Diverged
        self._ids, self._text = [], had[len(text) :]
        part[name], choice["token_ids"] = text[len(had) :], ids[len(again) :]
        if not part[name] and not choice["token_ids"] and finish is None:
            return b""
        choice["logprobs"] = _later(choice.get("logprobs"), len(again), 0)
        if "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
        return self._transcript.feed(written(fields))


def ending(transcript: Transcript) -> bytes:
    """The events that end an answer whose last token has been sent."""
    options = transcript.wanted.fields.get("stream_options") or {}
    usage = b""
    if options.get("include_usage") and not transcript.counted:
        counted = usage_of(transcript, {}, transcript.tokens)
        usage = written({**head_of(transcript), "choices": [], "usage": counted})
    return usage + DONE + EVENT_END


def head_of(transcript: Transcript) -> Fields:
    """The fields that are the same in all events of an answer."""
    head = fields_of(transcript.head)
    return {name: head[name] for name in ("id", "object", "created", "model") if name in head}


def usage_of(transcript: Transcript, usage: Fields, before: int) -> Fields:
    """The usage of the whole answer; `before`: its tokens that this instance counts in its prompt."""
    prompt, answer = transcript.prompt_tokens, usage.get("completion_tokens", 0) + before
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
    return {**usage, **counts}


def written(fields: Fields) -> bytes:
    """An event with these fields."""
    return DATA_SPACE + msgspec.json.encode(fields) + EVENT_END


def _later(logprobs: Fields | None, skipped: int, offset: int) -> Fields | None:
    """Log-probabilities without the first `skipped` tokens', and with `offset` added to the text offsets."""
    if logprobs is None:
        return None
    made = {name: each[skipped:] if isinstance(each, list) else each for name, each in logprobs.items()}
    if "text_offset" in made:
        made["text_offset"] = [each + offset for each in made["text_offset"]]
    return made
