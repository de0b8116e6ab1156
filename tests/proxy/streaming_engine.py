"""A stand-in for vLLM's streamed completions and chats: what it generates depends on all tokens before, as a
model's does, and its events have the form of vLLM 0.32's, or of 0.33's.

Some characters take two tokens, and the text of a token that may begin a stop string is kept back, as vLLM's
incremental detokenizer does it. Ids of a prompt are taken as they are; a text has an id for each character.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

WORDS = (" a", " be", " see", "d", "e", "fg", ".", " END", "EN", "D", " ü", "\n")
HALVES = (b"\xf0\x9f", b"\x98\x80")
FIRST_HALF, SECOND_HALF, END_OF_TEXT = 30, 31, 32
CALL, LINE = 9, 13
"""Where a call of a tool begins and ends."""
_PIECES = {2 + at: word.encode() for at, word in enumerate(WORDS)} | dict(
    zip((FIRST_HALF, SECOND_HALF), HALVES, strict=True)
)
_CHOSEN = (*range(2, 2 + len(WORDS)), FIRST_HALF)
DEFAULT_TOKENS = 40


@dataclass
class Model:
    """Chooses the next token, another one with another `salt`. `ends`: it may end an answer by itself."""

    salt: int = 0
    ends: bool = True

    def next(self, ids: Sequence[int]) -> int:
        if ids[-1] == FIRST_HALF:
            return SECOND_HALF
        chosen = zlib.crc32(repr((self.salt, list(ids))).encode())
        if self.ends and chosen % 61 == 0:
            return END_OF_TEXT
        return _CHOSEN[chosen % len(_CHOSEN)]


@dataclass
class Detokenizer:
    stops: list[str]
    included: bool
    text: str = ""
    sent: int = 0
    _bytes: bytes = b""

    def add(self, token: int) -> str | None:
        """Returns the stop string that is complete now."""
        self._bytes += _PIECES.get(token, b"")
        before = len(self.text)
        try:
            self.text += self._bytes.decode()
            self._bytes = b""
        except UnicodeDecodeError:
            return None
        for stop in self.stops:
            at = self.text.find(stop, max(0, before + 1 - len(stop)))
            if at >= 0:
                self.text = self.text[: at + len(stop) if self.included else at]
                return stop
        return None

    def delta(self, *, finished: bool) -> str:
        kept = 0 if finished or self.included else max(map(len, self.stops), default=1) - 1
        end = len(self.text) - kept
        if end <= self.sent:
            return ""
        delta, self.sent = self.text[self.sent : end], end
        return delta


@dataclass
class Engine:
    """Answers requests; each chunk has as many tokens as `sizes` says, over and over. A `parser` of tools
    takes calls out of a chat, and sends no chunk without text unasked; `newer`: as 0.33 writes events."""

    model: Model = field(default_factory=Model)
    sizes: Sequence[int] = (1,)
    parser: bool = False
    newer: bool = False

    def events(self, path: str, body: dict[str, Any], request_id: str) -> Iterator[bytes]:
        chat = path == "/v1/chat/completions"
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given or _prompt_ids(body["messages"] if chat else body["prompt"])
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1_700_000_000 + zlib.crc32(request_id.encode()) % 1000,
            "model": body.get("model", "tiny"),
        }
        shows, usage = bool(body.get("return_token_ids")), (body.get("stream_options") or {})
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            choices = [role | {"finish_reason": None}]
            yield _event(head | {"choices": choices, "prompt_token_ids": prompt if shows else None})
        count = offset = 0
        first = True
        for ids, text, finish, why in self._chunks(prompt, body, chat):
            count += len(ids)
            logprobs: dict[str, Any] | None = None
            if body.get("logprobs") if chat else body.get("logprobs") is not None:
                top = int(body.get("top_logprobs") or 0) if chat else int(body["logprobs"])
                as_ids = bool(body.get("return_tokens_as_token_ids"))
                logprobs, offset = _logprobs(ids, top, offset, chat=chat, as_ids=as_ids)
            said = {"delta": {"content": text}} if chat else {"text": text}
            if chat and self.parser and not text:
                said = {"delta": {}}
                if not (finish or shows or logprobs):
                    continue
            choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish}
            if finish or not chat:
                choice["stop_reason"] = why
            if not chat:
                choice["prompt_token_ids"] = prompt if shows and first else None
            first = False
            choice["token_ids"] = ids if shows else None
            if self.newer and (finish or not chat):
                choice["weight_versions"] = None
            made = head | {"choices": [choice]}
            if usage.get("continuous_usage_stats"):
                made["usage"] = _usage(len(prompt), count)
            if finish and not usage.get("include_usage"):
                made["system_fingerprint"] = "vllm-0.32.0-12345678"
            if self.newer:
                made["kv_transfer_params"] = None
            yield _event(made)
        if usage.get("include_usage"):
            yield _event(head | {"choices": [], "usage": _usage(len(prompt), count)})
        yield b"data: [DONE]\n\n"

    def _chunks(
        self, prompt: list[int], body: dict[str, Any], chat: bool
    ) -> Iterator[tuple[list[int], str, str | None, Any]]:
        """Tokens, text, why it has ended, and the stop string."""
        stops = body.get("stop") or []
        made = Detokenizer(
            [stops] if isinstance(stops, str) else stops, bool(body.get("include_stop_str_in_output"))
        )
        most = body.get("max_tokens", DEFAULT_TOKENS if chat else 16)
        ids, chunk, number, hidden = list(prompt), [], 0, False
        while True:
            token = self.model.next(ids)
            ids.append(token)
            chunk.append(token)
            count = len(ids) - len(prompt)
            hidden = chat and self.parser and (token == CALL or (hidden and token != LINE))
            stop = made.add(token) if token != END_OF_TEXT and not hidden else None
            finish = (
                "stop" if stop is not None or token == END_OF_TEXT else "length" if count >= most else None
            )
            if finish or len(chunk) >= self.sizes[number % len(self.sizes)]:
                yield chunk, made.delta(finished=finish is not None), finish, stop
                chunk, number = [], number + 1
            if finish:
                return


class RustEngine(Engine):
    """As vLLM's Rust server, which leaves out what is null: nothing says of an event that others follow."""

    def events(self, path: str, body: dict[str, Any], request_id: str) -> Iterator[bytes]:
        for event in super().events(path, body, request_id):
            yield event.replace(b'"finish_reason":null,', b"")


def _prompt_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        return list(prompt)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    return [1, *(100 + ord(each) for each in text)]


def _logprobs(
    ids: list[int], top: int, offset: int, *, chat: bool, as_ids: bool
) -> tuple[dict[str, Any], int]:
    """All alternatives have the same text, as parts of characters have none. There are 4 in all (-1)."""
    texts = [_PIECES.get(each, b"").decode("utf-8", "replace") for each in ids]
    tokens = [f"token_id:{each}" if as_ids else text for each, text in zip(ids, texts, strict=True)]
    rows, names, values, offsets = [], [], [-each / 64 for each in ids], []
    for token, text, value in zip(tokens, texts, values, strict=True):
        others = [(token + "~" * (at > 0), value - at) for at in range(max(1, top % 5))]
        listed = [_chat_token(*each, each[0]) for each in others[: top % 5]]
        rows.append(_chat_token(token, value, text) | {"top_logprobs": listed})
        names.append(dict(others))
        offsets.append(offset)
        offset += len(token)
    if chat:
        return {"content": rows}, 0
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": names}, offset


def _chat_token(token: str, value: float, text: str) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(text.encode())}


def _usage(prompt: int, answer: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


@dataclass
class Answer:
    """What a client makes of the events of a stream."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: list[Any] = field(default_factory=list)
    usage: dict[str, int] | None = None
    usage_events: int = 0
    prompt_ids: list[int] | None = None
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    done: bool = False
    error: Any = None
    forms: dict[bool, set[str]] = field(default_factory=dict, compare=False)
    """Names in events with choices: in those that go on, and in the one that ends it."""

    @classmethod
    def of(cls, data: bytes) -> "Answer":
        made = cls()
        for event in data.decode().split("\n\n"):
            if event == "data: [DONE]":
                made.done = True
            elif event and not event.startswith(":"):
                made._add(json.loads(event.removeprefix("data: ")))
        return made

    def _add(self, fields: dict[str, Any]) -> None:
        if "error" in fields:
            self.error = fields["error"]
            return
        self.heads.add(tuple(fields[name] for name in ("id", "object", "created", "model")))
        self.usage = fields.get("usage") or self.usage
        self.usage_events += not fields["choices"]
        self.prompt_ids = fields.get("prompt_token_ids") or self.prompt_ids
        for choice in fields["choices"]:
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.ids += choice.get("token_ids") or []
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            finish = choice.get("finish_reason")
            self.forms.setdefault(finish is not None, set()).update(fields, choice)
            logprobs = choice["logprobs"]
            if logprobs is not None:
                rows = (
                    logprobs["content"]
                    if "content" in logprobs
                    else list(zip(*logprobs.values(), strict=True))
                )
                self.logprobs += rows
            if finish is not None:
                self.finish.append((finish, choice.get("stop_reason")))
