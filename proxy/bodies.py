"""The body of a client's request: what the proxy reads of it, and what P and D get in its place. No IO.

A body may have any size and any content, so its values are not made into Python objects: the decoder checks
the syntax and returns each field as a view of the client's bytes. Only the few small fields that decide
something here are decoded. What P and D get is made of the same views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from .http import PAIRED
from .prefixes import Prompt

Fields = dict[str, Any]
Views = dict[str, Raw]
"""The fields of a JSON object, each a view of its bytes."""

# They carry addresses, or ids in the proxy's place, so a client may not set them.
_NOT_THE_CLIENTS = frozenset({"kv_transfer_params", "ec_transfer_params", "request_id"})
# vLLM merges these into the same place as kv_transfer_params.
_XARGS = "vllm_xargs"
# P's answer is thrown away, so P is not asked for these.
_NOT_FOR_PREFILL = frozenset(
    {"stream_options", "best_of", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids"}
)
# The same at /v1/responses: nor is P's answer kept there.
_NOT_FOR_PREFILL_OF_RESPONSES = frozenset({"include", "top_logprobs", "background", "stream_options"})

_SMALL = 64
"""Bytes of the longest value that is decoded: numbers, true, false and null are shorter."""

_SMALL_BODY = 1 << 16

_LONGEST_NAME = 1024
"""Bytes of the longest name of a model, in JSON."""

_OFF = (None, False, 0)
_ABSENT = Raw(b"null")

_views = msgspec.json.Decoder(Views)
_name = msgspec.json.Decoder(str)
_entries = msgspec.json.Decoder(list[Raw])


class _Tool(msgspec.Struct):
    type: str


class _FirstTwo(msgspec.Struct, array_like=True):
    first: Raw = Raw()
    second: Raw = Raw()


_tools = msgspec.json.Decoder(list[_Tool] | None)
_first_two = msgspec.json.Decoder(_FirstTwo)


class BadBody(ValueError):
    """The client's body is not a JSON object, or its model's name is too long to be one."""


class Content:
    """A body to send.

    Attributes:
        pieces: its bytes; some may be views of the client's. None are left once the client's are let go.
        size: of all pieces.
    """

    def __init__(self, pieces: tuple[bytes | bytearray | Raw, ...]) -> None:
        self.pieces = pieces
        self.size = sum(map(len, pieces))

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


class Body:
    """A client's request, without what it may not choose.

    Args:
        raw: its bytes.
        fields: the JSON object that they are.
        path: where it was sent.

    Attributes:
        model: the model it names; None if it names none, or nothing that could be a name.
        wants_pair: whether P can help. Not with beam search, which makes requests of its own, nor with tools
            that vLLM itself calls, since what they return becomes part of a longer prompt, nor where the
            answer is about the prompt's own tokens, whose logits only the prefill itself yields.
        one_prompt: whether one token of the answer proves that the KV of all prompts has been used.
        prompt: what routing may know of its prompt.
        released: called when `let_go` drops the bytes.
    """

    def __init__(self, raw: bytes | bytearray, fields: Views, path: str) -> None:
        self.path = path
        self._size = len(raw)
        self._held = True
        self._fields = _without_the_forbidden(fields)
        self._raw: bytes | bytearray | None = raw if self._fields is fields else None
        self.model = _model(fields)
        self.wants_pair = self._wants_pair()
        self.one_prompt = _one_prompt(fields.get("prompt"))
        self.prompt = Prompt(fields)
        self.released: Callable[[], None] = lambda: None
        self._made: list[Content] = []

    def messages(self, most: int) -> int:
        """How many messages it has, or items of its input; they are not counted if there cannot be more than
        `most`."""
        entries = self._fields.get("input" if self.path == "/v1/responses" else "messages")
        if entries is None or len(entries) <= 2 * most or bytes(memoryview(entries)[:1]) != b"[":
            return 0
        return len(_entries.decode(entries))

    def _wants_pair(self) -> bool:
        fields = self._fields
        if self.path not in PAIRED:
            return False
        if self.path == "/v1/responses":
            return _only_functions(fields.get("tools"))
        local = _small(fields, "use_beam_search") in _OFF and _small(fields, "echo") in _OFF
        return local and _small(fields, "prompt_logprobs") is None

    def for_prefill(self, request_id: str) -> Content:
        """P's body: the same prompt, and one token that is thrown away."""
        if self.path == "/v1/messages":
            return self._changed({"max_tokens": 1, "stream": False})
        if self.path == "/v1/responses":
            one = {"max_output_tokens": 1, "stream": False, "store": False}
            return self._changed(one | self._id(request_id), _NOT_FOR_PREFILL_OF_RESPONSES)
        changes: Fields = {"max_tokens": 1, "n": 1, "stream": False}
        if "max_completion_tokens" in self._fields:
            changes["max_completion_tokens"] = 1
        minimum = _small(self._fields, "min_tokens")
        if isinstance(minimum, int | float) and minimum > 1:
            changes["min_tokens"] = 1
        return self._changed(changes, _NOT_FOR_PREFILL)

    def for_decode(self, request_id: str, kv_transfer_params: Fields | None = None) -> Content:
        """D's body: the client's own bytes, or its fields and what P has returned for D."""
        more = self._id(request_id)
        if kv_transfer_params is not None:
            more["kv_transfer_params"] = kv_transfer_params
        if more or self._raw is None:
            return self._changed(more)
        return self._kept(Content((self._raw,)))

    def let_go(self) -> None:
        """Drops the bytes, once no instance will be sent this request any more. Idempotent."""
        self._raw, self._fields, self._held = None, {}, False
        self.prompt.let_go()
        # Tracebacks of tries that failed may keep these until Python's garbage collector comes by.
        for content in self._made:
            content.pieces = ()
        self._made.clear()
        released, self.released = self.released, lambda: None
        released()

    def _id(self, request_id: str) -> Fields:
        """For /v1/responses, which reads the id here and not in a header."""
        return {"request_id": f"resp_{request_id}"} if self.path == "/v1/responses" else {}

    def _changed(self, changes: Fields, left_out: Iterable[str] = ()) -> Content:
        """The client's fields, without some, and with others or other values."""
        assert self._held, "a body that was let go cannot be sent"
        kept = {name: value for name, value in self._fields.items() if name not in left_out}
        made = _object(kept | {name: msgspec.json.encode(value) for name, value in changes.items()})
        # A small one is joined here, once, for all that follows.
        return self._kept(made if self._size > _SMALL_BODY else Content((bytes(made),)))

    def _kept(self, made: Content) -> Content:
        self._made.append(made)
        return made


def parse(raw: bytes | bytearray, path: str = "/v1/completions") -> Body:
    """The client's request. `raw` must not change any more. Raises BadBody, with a sentence, if it is
    none."""
    try:
        return Body(raw, _views.decode(raw), path)
    except BadBody:
        raise
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise BadBody(f"The request body is not a JSON object: {error}.") from None


def _object(fields: Mapping[str, bytes | Raw]) -> Content:
    pieces: list[bytes | Raw] = []
    for name, value in fields.items():
        pieces += (b"," if pieces else b"{", msgspec.json.encode(name), b":", value)
    return Content((*pieces, b"}" if pieces else b"{}"))


def _without_the_forbidden(fields: Views) -> Views:
    """Without what a client may not set; the same object if there is nothing of it."""
    kept = fields
    if not _NOT_THE_CLIENTS.isdisjoint(fields):
        kept = {name: value for name, value in fields.items() if name not in _NOT_THE_CLIENTS}
    extra = fields.get(_XARGS)
    if extra is None or bytes(memoryview(extra)[:1]) != b"{":
        return kept
    allowed = _without_the_forbidden_extra(_views.decode(extra))
    return kept if allowed is None else kept | {_XARGS: allowed}


def _without_the_forbidden_extra(extra: Views) -> Raw | None:
    """None if there is nothing of it."""
    if _NOT_THE_CLIENTS.isdisjoint(extra):
        return None
    return Raw(bytes(_object({name: each for name, each in extra.items() if name not in _NOT_THE_CLIENTS})))


def _small(fields: Views, name: str) -> Any:
    """A field's value: None if it is absent, and its bytes if it can be none that matters here."""
    raw = fields.get(name)
    if raw is None or len(raw) > _SMALL:
        return raw
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError):
        return raw


def _model(fields: Views) -> str | None:
    raw = fields.get("model", _ABSENT)
    if len(raw) > _LONGEST_NAME:
        raise BadBody(f"`model` in the request body is longer than {_LONGEST_NAME} bytes, so it names none.")
    try:
        return _name.decode(raw) or None
    except (msgspec.MsgspecError, ValueError):
        return None


def _only_functions(tools: Raw | None) -> bool:
    """Whether vLLM calls none of these tools itself."""
    try:
        return tools is None or all(tool.type == "function" for tool in _tools.decode(tools) or ())
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False


def _one_prompt(prompt: Raw | None) -> bool:
    """A text, or token ids, or a list with at most one of these."""
    if prompt is None:
        return True
    beginning = bytes(memoryview(prompt)[:_SMALL]).translate(None, b" \t\r\n")
    if not beginning.startswith(b"[") or beginning[1:2].isdigit():
        return True
    return len(_first_two.decode(prompt).second) == 0
