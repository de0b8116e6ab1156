"""The body of a client's request: its arrival, what the proxy reads of it, and what P and D get in its place.

A body may have any size and content, so its values do not become Python objects: the decoder checks the
syntax and returns each field as a view of the client's bytes. Only the few small fields that matter to the
proxy are decoded, and the bodies for P and D are made of the same views. A body is read whole before its
request gets a place, and held as long as it may still be sent to an instance.
"""

import asyncio
import codecs
import hashlib
import itertools
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Raw

from .body_checks import WITH_TOKEN_IDS, check_values
from .http import AGAIN, PAIRED, ProxyError
from .limits import Limits, RequestCounters

T = TypeVar("T")
Fields = dict[str, Any]
Views = dict[str, Raw]
"""The fields of a JSON object, each a view of its bytes."""
Piece = bytes | bytearray | memoryview | Raw

# They carry addresses, or ids that the proxy chooses, so a client may not set them.
_NOT_THE_CLIENTS = frozenset({"kv_transfer_params", "ec_transfer_params", "request_id"})
# vLLM merges these into the same place as kv_transfer_params.
_XARGS = "vllm_xargs"
# P's answer is thrown away, so P is not asked for these.
_NOT_FOR_PREFILL = frozenset(
    {"stream_options", "best_of", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids"}
)
# With a `thinking` budget vLLM demands that an answer may have more tokens than the budget, but not where
# these parameters say that the instance only prefills. The prompt stays the same.
_THINKING, _ONLY_PREFILLS = "thinking", {"do_remote_decode": True}
# The same at /v1/responses, where P does not store its answer either.
_NOT_FOR_PREFILL_OF_RESPONSES = frozenset({"include", "top_logprobs", "background", "stream_options"})

_SMALL = 64
"""Bytes of the longest value that is decoded; numbers, true, false and null are shorter."""
_SMALL_BODY, _SMALL_PIECE = 1 << 16, 1 << 12
_LONGEST_NAME = 1024
"""Bytes of the longest name of a model, in JSON."""

_MOST_TOKENS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
}
_WITH_TOKEN_IDS = b',"return_token_ids":true}'
# Texts that vLLM's request classes read as true or false.
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_WHOLE = re.compile(r"\s*[+-]?[0-9]+(_[0-9]+)*(\.0+)?\s*")
_ABSENT = Raw(b"null")

_views = msgspec.json.Decoder(Views)
ANYTHING: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_name = msgspec.json.Decoder(str)
_entries = msgspec.json.Decoder(list[Raw])


class _Tool(msgspec.Struct):
    type: str


class _FirstTwo(msgspec.Struct, array_like=True):
    first: Raw = Raw()
    second: Raw = Raw()


_tools: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[_Tool] | None)
_first_two = msgspec.json.Decoder(_FirstTwo)


class Content:
    """A body to send. Its pieces may be views of a client's bytes, and are dropped when these are let go."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        self.pieces = pieces
        self.size = sum(map(len, pieces))

    def __bytes__(self) -> bytes:
        return b"".join(self.pieces)


class Body:
    """A client's request, without what a client may not choose.

    Args:
        raw: its bytes; `fields`: the JSON object in them.
        released: called when `let_go` drops the bytes, perhaps more than once.

    Attributes:
        model: the model that the request names; None if it names none, or what cannot be a name.
        wants_pair: whether P can help. It cannot with beam search, which makes requests of its own; with
            tools that vLLM calls, as their results become part of a longer prompt; and where the answer is
            about the prompt's own tokens, whose logits only the prefill yields.
        acts: whether vLLM may call tools itself, so that the request must not be sent twice.
        one_prompt: whether D's first token proves that the KV of all prompts has come.
        previous: the id of the stored response to go on with, as the client knows it; "" if none.
        previous_name: the same, as D knows it.
        stored: whether a later request may go on with this response.
        fields: all fields of the request; empty once its bytes are let go.
    """

    def __init__(
        self, raw: bytes | bytearray, fields: Views, path: str, released: Callable[[], None] = lambda: None
    ) -> None:
        self.path = path
        self._size = len(raw)
        self.fields = _without_the_forbidden(fields)
        self._raw: bytes | bytearray | None = raw if self.fields is fields else None
        self.model = _model(fields)
        responds = path == "/v1/responses"
        if responds and _switch(_small(fields, "background")):
            why = "this proxy does not serve `GET /v1/responses/{id}`, so no client could fetch the answer"
            advice = "Leave it out, and stream the answer if it takes long."
            raise ProxyError(400, f"`background` is not supported: {why}. {advice}")
        self.previous = _text_of(fields.get("previous_response_id", _ABSENT)) if responds else ""
        self.previous_name = self.previous
        self.stored = responds and _switch(_small(fields, "store") if "store" in fields else True) is True
        tools = decoded(_tools, fields.get("tools", _ABSENT), [_Tool("unknown")]) if responds else ()
        self.acts = any(tool.type != "function" for tool in tools or ())
        self.wants_pair = path in PAIRED and self._computes_no_more_than_its_prompt()
        self.one_prompt = all(_one_prompt(fields.get(name)) for name in ("prompt", "prompt_embeds"))
        self.prompt = Prompt(fields)
        self.streams = path in PAIRED and _switch(_small(fields, "stream")) is True
        self._released = released
        self._ids: Raw | None = None
        self._made: list[Content] | None = []
        """The bodies that may still be sent; None once the bytes are let go."""

    def messages(self, most: int) -> int:
        """How many messages it has, or items of its input; 0 if these can be no more than `most`."""
        entries = self.fields.get("input" if self.path == "/v1/responses" else "messages")
        if entries is None or len(entries) <= 2 * most or bytes(memoryview(entries)[:1]) != b"[":
            return 0
        return len(_entries.decode(entries))

    @property
    def asked(self) -> int:
        """Tokens of its answer at most; 0 if it does not say."""
        names = _MOST_TOKENS.get(self.path, ("max_tokens",))
        most = next((said for name in names if (said := _small(self.fields, name)) is not None), 0)
        return max(0, most) if isinstance(most, int) else 0

    def _computes_no_more_than_its_prompt(self) -> bool:
        fields = self.fields
        if self.path == "/v1/responses":
            return not (self.previous or self.acts)  # what came before is at D only
        off = all(_switch(_small(fields, name)) is False for name in ("use_beam_search", "echo"))
        return off and _small(fields, "prompt_logprobs") is None

    def for_prefill(self, request_id: str) -> Content:
        """P's body: the same prompt, and one token that is thrown away."""
        if self.path == "/v1/messages":
            more = {"kv_transfer_params": _ONLY_PREFILLS} if _THINKING in self.fields else {}
            return self._changed({"max_tokens": 1, "stream": False} | more)
        if self.path == "/v1/responses":
            one = {"max_output_tokens": 1, "stream": False, "store": False}
            return self._changed(one | self._id(request_id), _NOT_FOR_PREFILL_OF_RESPONSES)
        changes: Fields = {"max_tokens": 1, "n": 1, "stream": False}
        return self._changed(changes | self._of_one_token(), _NOT_FOR_PREFILL)

    def for_first_token(self, kv_transfer_params: Fields | None, seed: int | None) -> Content:
        """P's body where P's token is the answer's first; `kv_transfer_params` is for P."""
        changes: Fields = {"max_tokens": 1, "return_token_ids": True}
        changes |= _given(kv_transfer_params=kv_transfer_params, seed=seed)
        return self._changed(changes | self._of_one_token())

    def _of_one_token(self) -> Fields:
        changes: Fields = {}
        if "max_completion_tokens" in self.fields:
            changes["max_completion_tokens"] = 1
        if _number(_small(self.fields, "min_tokens")) > 1:
            changes["min_tokens"] = 1
        return changes

    def for_decode(
        self,
        request_id: str,
        kv_transfer_params: Fields | None = None,
        *,
        token_ids: bool = False,
        seed: int | None = None,
    ) -> Content:
        """D's body: the client's own bytes, or its fields and what P has returned for D. `token_ids`: D shall
        return the tokens' ids, too; `seed`: the proxy's, where P and D have to draw the same token."""
        more = self._id(request_id)
        if self.previous != self.previous_name:
            more["previous_response_id"] = self.previous_name
        more |= _given(seed=seed, kv_transfer_params=kv_transfer_params)
        if token_ids:
            if not more and self._raw is not None and "return_token_ids" not in self.fields:
                return self._with_fields(memoryview(self._raw)[: self._raw.rindex(b"}")], _WITH_TOKEN_IDS)
            more["return_token_ids"] = True
        if more or self._raw is None:
            return self._changed(more)
        return self._with_fields(self._raw)

    def become_chat(self) -> None:
        """Makes it a chat whose prompt is the token ids in `prompt`; vLLM takes them in place of messages."""
        self.path, self._raw, self._ids = "/v1/chat/completions", None, self.fields.pop("prompt")
        self.fields["messages"] = Raw(b'[{"role":"user","content":""}]')

    def go_on_from(self, name: str) -> None:
        """Sets the id by which D knows the response that this request goes on with."""
        self.previous_name = name

    def let_go(self) -> None:
        """Drops the bytes, once no instance will be sent this request any more. Idempotent."""
        self._raw, self._ids, self.fields = None, None, {}
        self.prompt.let_go()
        # Tracebacks of failed tries may keep these bodies until Python's garbage collector runs.
        for content in self._made or ():
            content.pieces = ()
        self._made = None
        self._released()

    def _id(self, request_id: str) -> Fields:
        """The field with the request id for /v1/responses, which ignores the header."""
        return {"request_id": response_id(request_id)} if self.path == "/v1/responses" else {}

    def _changed(self, changes: Fields, left_out: Iterable[str] = ()) -> Content:
        """The client's fields, without some, and with others or other values."""
        kept = {name: value for name, value in self.fields.items() if name not in left_out}
        if self._ids is not None:
            params = changes.get("kv_transfer_params") or {}
            changes = changes | {"kv_transfer_params": params | {"prompt_token_ids": self._ids}}
        made = _object(kept | {name: msgspec.json.encode(value) for name, value in changes.items()})
        return self._with_fields(*made)

    def _with_fields(self, *pieces: Piece) -> Content:
        assert self._made is not None, "a body that was let go cannot be sent"
        # Small pieces are joined here, once, as each piece is sent by itself, at each try.
        runs = itertools.groupby(pieces, lambda piece: self._size > _SMALL_BODY and len(piece) > _SMALL_PIECE)
        made = Content(tuple(piece for large, run in runs for piece in (run if large else [b"".join(run)])))
        self._made.append(made)
        return made


def parse(
    raw: bytes | bytearray, path: str = "/v1/completions", released: Callable[[], None] = lambda: None
) -> Body:
    """The client's request. `raw` must not change any more. Raises ProxyError if it is no JSON object, has
    too long a name for a model, or asks for an answer in the background."""
    marked = raw.startswith(codecs.BOM_UTF8)
    try:
        fields = _views.decode(memoryview(raw)[len(codecs.BOM_UTF8) :] if marked else raw)
        return Body(raw, fields, path, released)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        cut = r" Perhaps a text was cut within a character: `\ud...` is half of one."
        half = cut if b"\\ud" in raw.lower() else ""
        why = f"The request body is not a JSON object in UTF-8: {error}.{half}"
        raise ProxyError(400, why) from None


def _given(**fields: Any) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


def _object(fields: Mapping[str, bytes | Raw]) -> list[Piece]:
    """The pieces of this object's JSON."""
    pieces: list[Piece] = []
    for name, value in fields.items():
        pieces += (b"," if pieces else b"{", msgspec.json.encode(name), b":", value)
    return [*pieces, b"}" if pieces else b"{}"]


def _without_the_forbidden(fields: Views) -> Views:
    """The fields without those that a client may not set; the same object if it has none of these."""
    kept, extra = _allowed(fields), fields.get(_XARGS)
    if extra is None or bytes(memoryview(extra)[:1]) != b"{":
        return kept
    given = _views.decode(extra)
    allowed = _allowed(given)
    return kept if allowed is given else kept | {_XARGS: Raw(b"".join(_object(allowed)))}


def _allowed(fields: Views) -> Views:
    if _NOT_THE_CLIENTS.isdisjoint(fields):
        return fields
    return {name: value for name, value in fields.items() if name not in _NOT_THE_CLIENTS}


def decoded(decoder: msgspec.json.Decoder[T], data: bytes | Raw, otherwise: T) -> T:
    """What the decoder reads in the data; `otherwise` if they are wrong for it."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return otherwise


def _small(fields: Views, name: str) -> Any:
    """A field's value; None if it is absent; its bytes if they are too long, or no JSON."""
    raw = fields.get(name)
    return raw if raw is None or len(raw) > _SMALL else decoded(ANYTHING, raw, raw)


def _number(value: Any) -> float:
    """The number that vLLM reads, which takes some texts for whole numbers; NaN for anything else."""
    number = isinstance(value, int | float) or (isinstance(value, str) and _WHOLE.fullmatch(value))
    return float(value) if number else math.nan


def _switch(value: Any) -> bool | None:
    """What vLLM reads, which takes some texts, 0, 1 and null for true or false; None for anything else."""
    text = str(value).lower() if isinstance(value, str | bool) else None
    if value is None or text in _FALSE or (text is None and value == 0):
        return False
    return True if text in _TRUE or (text is None and value == 1) else None


def plain(fields: Views, switches: Iterable[str], numbers: Iterable[str]) -> Views:
    """In JSON's spelling, those fields that vLLM takes for true, false or a number in another spelling."""
    found: Fields = {name: _switch(_small(fields, name)) for name in switches if name in fields}
    for name in numbers:
        if isinstance(value := _small(fields, name), str | float) and (read := _number(value)).is_integer():
            found[name] = int(read)
    found = {name: value for name, value in found.items() if value is not None}
    made = {name: Raw(msgspec.json.encode(value)) for name, value in found.items()}
    return {name: view for name, view in made.items() if view != fields[name] and fields[name] != _ABSENT}


def _model(fields: Views) -> str | None:
    raw = fields.get("model", _ABSENT)
    if len(raw) > _LONGEST_NAME:
        why = f"`model` in the request body is longer than {_LONGEST_NAME} bytes, which no model's name is."
        raise ProxyError(400, why)
    return _text_of(raw) or None


def _text_of(raw: Raw) -> str:
    """A field's value if it is a text and not too long for a name; else ""."""
    return decoded(_name, raw, "") if len(raw) <= _LONGEST_NAME else ""


def response_id(request_id: str) -> str:
    """The id of the response that /v1/responses makes for this request."""
    return f"resp_{request_id}"


def _one_prompt(prompt: Raw | None) -> bool:
    """Whether this is one text, one list of token ids, or a list with at most one of these."""
    if prompt is None:
        return True
    beginning = bytes(memoryview(prompt)[:_LOOK_BYTES]).translate(None, b" \t\r\n")
    if not beginning.startswith(b"[") or beginning[1:2].isdigit():
        return True
    return len(_first_two.decode(prompt).second) == 0


# The prompt of a body, for routing.

BYTES_PER_TOKEN = 4
"""Of a prompt's JSON: about as in English text. Being wrong by half misleads the proxy only for a while."""

DATA_BYTES_PER_TOKEN = 256
"""Of a picture or other data in base64. A vision model makes one token of 28 x 28 pixels (Qwen2-VL) or of
some more; at two or three bits a pixel, as in a JPEG, these are 260 to 390 bytes of base64."""

PIECE_TOKENS = 64
"""Tokens of one piece of a prompt: a few of vLLM's blocks."""

MAX_PIECES = 512
"""Of one prompt, from its beginning; what two prompts have in common beyond these changes no choice."""

_LINK_BYTES = 8
_PIECE_BYTES = PIECE_TOKENS * BYTES_PER_TOKEN
_MAX_BYTES = MAX_PIECES * _PIECE_BYTES
_PIECE_OF_DATA = PIECE_TOKENS * DATA_BYTES_PER_TOKEN
# To find data in a text it is sampled: at most _MAX_LOOKS times, and at most once in _LOOK_EVERY bytes.
_MAX_LOOKS, _LOOK_EVERY = 512, 2048
# So many bytes in a row, all of base64's alphabet, are taken for data, since text has spaces.
_LOOK_BYTES = 48
_BASE64 = (string.ascii_letters + string.digits + "+/-_=").encode()
# Token ids are counted in so many bytes; beyond these their number is extrapolated.
_COUNTED_BYTES = 1 << 20
_ID_BYTES = 8
"""The most that a token id in JSON is expected to take, for pieces of prompts."""
_IDS_OF_A_PIECE = re.compile(rb"((?:[^,]++,){%d}[^,]++),?" % (PIECE_TOKENS - 1))

Chain = tuple[bytes, ...]
"""A hash for each whole piece of a prompt; equal ones mean that the prompts are equal up to there."""

_LEADING = ("tools", "system", "instructions", "prompt", "messages", "input")
"""The fields of a request that make its prompt, as chat templates order them."""
_SALTS = ("model", "cache_salt")
_LONGEST_SALT = 1024


class _PromptField(NamedTuple):
    """A field of a prompt: a `view` of its JSON without outer quotes or brackets; `ids`: it has token ids."""

    view: memoryview
    ids: bool

    @classmethod
    def of(cls, value: Raw) -> "_PromptField":
        view = memoryview(value)
        beginning = bytes(view[:_LOOK_BYTES])
        if beginning == b"null":
            return cls(view[:0], ids=False)
        ids = beginning.startswith(b"[") and beginning.lstrip(b"[ \t\r\n")[:1].isdigit()
        return cls(view[1:-1] if beginning[:1] in b'"[' else view, ids)

    @property
    def tokens(self) -> int:
        view = self.view
        if self.ids:
            counted = bytes(view[:_COUNTED_BYTES])
            return (counted.count(b",") + 1) * len(view) // len(counted)
        step = max(_LOOK_EVERY, len(view) // _MAX_LOOKS)
        looks = range(step, len(view), step)
        found = sum(_is_data(bytes(view[at : at + _LOOK_BYTES])) for at in looks)
        data = len(view) * found // len(looks) if looks else 0
        return data // DATA_BYTES_PER_TOKEN + -(-(len(view) - data) // BYTES_PER_TOKEN)

    def append_to(self, text: bytearray) -> None:
        """Appends its beginning. Of data such as a picture, only the beginning of each piece is appended."""
        at = 0
        while at < len(self.view) and len(text) < _MAX_BYTES:
            piece = bytes(self.view[at : at + _PIECE_BYTES])
            text += piece
            at += len(piece)
            if _is_data(piece[:_LOOK_BYTES]):
                rest = bytes(self.view[at : at + _PIECE_OF_DATA - _PIECE_BYTES])
                end = rest.find(b'"')
                at += len(rest) if end < 0 else end


def _is_data(look: bytes) -> bool:
    """Whether these bytes look like base64, such as a picture's."""
    mixed = look != look.lower() and look != look.upper()
    return mixed and len(look) == _LOOK_BYTES and not look.translate(None, _BASE64)


class Prompt:
    """What is known of a request's prompt without a tokenizer and without reading all of it, by the length
    and the bytes of its JSON. `tokens`: how many, counted if it is token ids, else estimated."""

    def __init__(self, fields: Mapping[str, Raw]) -> None:
        self._parts = [_PromptField.of(fields[name]) for name in _LEADING if name in fields]
        self._salt = b"\0".join(bytes(memoryview(fields.get(name, b""))[:_LONGEST_SALT]) for name in _SALTS)
        self.tokens = sum(part.tokens for part in self._parts)

    def bound(self, context: int) -> None:
        """Lowers `tokens` to the models' context: no instance takes a longer prompt."""
        self.tokens = min(self.tokens, context)

    @cached_property
    def chain(self) -> Chain:
        """A link for each of its first pieces, MAX_PIECES at most."""
        link, links = self._salt, []
        for piece in self._pieces():
            link = hashlib.blake2b(link + piece, digest_size=_LINK_BYTES).digest()
            links.append(link)
        return tuple(links)

    def let_go(self) -> None:
        """Drops the request's bytes. If `chain` was not read before, it is empty afterwards."""
        self._parts = []

    def _pieces(self) -> Iterator[bytes]:
        """The first whole pieces; of several lists of token ids, the first list's."""
        if len(self._parts) == 1 and self._parts[0].ids:
            view = self._parts[0].view[: MAX_PIECES * PIECE_TOKENS * _ID_BYTES]
            beginning = bytes(view).lstrip(b"[ \t\r\n").partition(b"]")[0]
            for piece in itertools.islice(_IDS_OF_A_PIECE.finditer(beginning), MAX_PIECES):
                yield piece[1]
            return
        text = bytearray()
        for part in self._parts:
            if text:
                text += b"\0"
            part.append_to(text)
        for start in range(0, min(len(text), _MAX_BYTES) - _PIECE_BYTES + 1, _PIECE_BYTES):
            yield bytes(text[start : start + _PIECE_BYTES])


# The arrival of a body.

_LARGE_HEAD = 1 << 16
"""Bytes of a request's headers; larger ones count against --max-held-mib as bodies do."""


@dataclass
class BodyBudget:
    """The bytes of all bodies that are `held`: from their arrival until they are let go."""

    limits: Limits
    counters: RequestCounters
    held: int = 0


@dataclass
class BodyReader:
    """Reads one request's body, within the bounds for one body and for all."""

    _intake: BodyBudget
    _size: int = 0

    async def read(self, request: web.Request) -> bytearray:
        """The whole body. Raises ProxyError, or HTTPRequestEntityTooLarge."""
        limits, content = self._intake.limits, request.content
        body = bytearray()
        _check_size(request, request.content_length or 0)
        if (head := sum(len(name) + len(value) for name, value in request.raw_headers)) > _LARGE_HEAD:
            self._hold(head)
        try:
            if content.is_eof():  # it came with its head: no need for a timer
                self._add(request, body, content.read_nowait())
            else:
                async with asyncio.timeout(limits.body_seconds):
                    while chunk := await content.readany():
                        self._add(request, body, chunk)
        except web.RequestPayloadError as error:
            # aiohttp would try to read the rest, which it cannot either.
            content.feed_eof()
            why = " ".join(str(error).split())
            raise ProxyError(400, f"The request's body cannot be read: {why}.", last=True) from None
        except TimeoutError:
            why = f"The request's body did not come within {limits.body_seconds:g} seconds (--body-seconds)."
            raise ProxyError(408, why, last=True) from None
        if len(body) > limits.max_values:  # each value takes a byte
            await check_values(body, limits.max_values, token_ids=request.path in WITH_TOKEN_IDS)
        return body

    def close(self) -> None:
        """Its bytes are no longer held. Idempotent."""
        self._intake.held -= self._size
        self._size = 0

    def _add(self, request: web.Request, body: bytearray, chunk: bytes) -> None:
        _check_size(request, len(body) + len(chunk))
        self._hold(len(chunk))
        body += chunk

    def _hold(self, size: int) -> None:
        """Counts so many more bytes as held. Raises ProxyError if there is no room."""
        intake = self._intake
        if intake.held + size > intake.limits.max_held:
            intake.counters.refused_full += 1
            why = "The requests that this proxy holds leave no memory for this one (--max-held-mib)"
            raise ProxyError(503, f"{why}; {AGAIN}")
        intake.held += size
        self._size += size


def _check_size(request: web.Request, size: int) -> None:
    """Raises HTTPRequestEntityTooLarge."""
    if size > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=size)
