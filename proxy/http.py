"""Headers and bodies of requests and answers, and which parts of them the proxy passes on. No IO."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from .prefixes import Prompt
from .registry import Instance

# Headers.

REQUEST_ID = "X-Request-Id"
# Under which the client's own id reaches the instances, for their logs.
CLIENT_ID = "X-Client-Request-Id"
REPLICA = "X-data-parallel-rank"

_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# The proxy writes each body anew, and it alone chooses what names an instance or a transfer.
_NOT_TO_INSTANCE = {
    "host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect",
    REQUEST_ID.lower(), REPLICA.lower(),
}  # fmt: skip
# A client may send none of these, and an instance should not; aiohttp writes no such header.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
_NOT_TO_CLIENT = {"content-length", "content-encoding", REQUEST_ID.lower()}

Headers = CIMultiDict[str]


def to_instance(client: CIMultiDictProxy[str], instance: Instance, request_id: str) -> Headers:
    """The client's end-to-end headers, with the id that this proxy has chosen."""
    headers = _end_to_end(client, _NOT_TO_INSTANCE)
    headers[REQUEST_ID] = request_id
    # Anthropic's clients show their key so, and vLLM looks for it in the other header only.
    if (key := headers.get("X-Api-Key")) and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {key}"
    if theirs := client.get(REQUEST_ID):
        headers.setdefault(CLIENT_ID, theirs)
    headers["Content-Type"] = "application/json"
    # Ids are rewritten in the answer, so it must come as it is.
    headers["Accept-Encoding"] = "identity"
    if instance.ping.dp_size > 1:
        headers[REPLICA] = str(instance.ping.dp_rank)
    return headers


def to_client(instance: CIMultiDictProxy[str]) -> Headers:
    """The instance's end-to-end headers; addresses in their values are the caller's to remove."""
    headers = _end_to_end(instance, _NOT_TO_CLIENT)
    return CIMultiDict((name, value) for name, value in headers.items() if not _CONTROL.search(value))


def _end_to_end(headers: CIMultiDictProxy[str], others: set[str]) -> Headers:
    named = {name.strip().lower() for value in headers.getall("Connection", []) for name in value.split(",")}
    dropped = _HOP_BY_HOP | others | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


# The client's body, and what P and D get in its place.

Fields = dict[str, Any]

# Where P computes the prompt, and where one instance does all there is.
PAIRED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"})
SINGLE = frozenset({"/v1/embeddings", "/tokenize", "/detokenize", "/v1/messages/count_tokens"})
# The streams in which each event has a name, errors too.
NAMED_EVENTS = frozenset({"/v1/messages", "/v1/responses"})

# They carry addresses, or ids in our place; a client has no business to choose either.
_NOT_THE_CLIENTS = ("kv_transfer_params", "ec_transfer_params", "request_id")
# P's answer is thrown away, so P is not asked for these.
_NOT_FOR_PREFILL = (
    "stream_options",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
)
# The same at /v1/responses: nor is P's answer kept there.
_NOT_FOR_PREFILL_OF_RESPONSES = ("include", "top_logprobs", "background", "stream_options")
_OFF = (None, False, 0)

_decoder = msgspec.json.Decoder(Fields)


class BadBody(ValueError):
    """The client's body is not a JSON object."""


@dataclass(frozen=True)
class Body:
    """A client's request, without what it may not choose.

    Attributes:
        fields: the JSON object.
        raw: its bytes; the client's own wherever nothing had to be taken out.
        path: where it was sent.
    """

    fields: Fields
    raw: bytes
    path: str = "/v1/completions"

    @property
    def model(self) -> str | None:
        """The model it names; None if it names none, or nothing that could be a name."""
        name = self.fields.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def wants_pair(self) -> bool:
        """Whether P can help. Not with beam search, which makes requests of its own, nor with tools that
        vLLM itself calls, since what they say becomes part of a longer prompt, nor where the answer is about
        the prompt's own tokens, whose logits only the prefill itself yields."""
        fields = self.fields
        if self.path not in PAIRED:
            return False
        if self.path == "/v1/responses":
            tools = fields.get("tools") or []
            return isinstance(tools, list) and all(
                isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
            )
        local = fields.get("use_beam_search") in _OFF and fields.get("echo") in _OFF
        return local and fields.get("prompt_logprobs") is None

    @property
    def one_prompt(self) -> bool:
        """Whether one token of the answer proves that the KV of all prompts has been used."""
        prompts = self.fields.get("prompt")
        return not (isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int))

    @property
    def prompt(self) -> Prompt:
        """What routing may know of its prompt."""
        return Prompt(self.fields)

    def for_prefill(self, request_id: str) -> bytes:
        """P's body: the same prompt, and one token that nobody reads."""
        if self.path == "/v1/messages":
            return msgspec.json.encode(self.fields | {"max_tokens": 1, "stream": False})
        if self.path == "/v1/responses":
            one = {"max_output_tokens": 1, "stream": False, "store": False}
            fields = {k: v for k, v in self.fields.items() if k not in _NOT_FOR_PREFILL_OF_RESPONSES}
            return msgspec.json.encode(fields | one | self._id(request_id))
        fields = {name: value for name, value in self.fields.items() if name not in _NOT_FOR_PREFILL}
        fields |= {"max_tokens": 1, "n": 1, "stream": False}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        minimum = fields.get("min_tokens")
        if isinstance(minimum, int | float) and minimum > 1:
            fields["min_tokens"] = 1
        return msgspec.json.encode(fields)

    def for_decode(self, request_id: str, kv_transfer_params: Fields | None = None) -> bytes:
        """D's body: the client's own, with what P has returned for D, if it has."""
        more = self._id(request_id)
        if kv_transfer_params is not None:
            more["kv_transfer_params"] = kv_transfer_params
        return msgspec.json.encode(self.fields | more) if more else self.raw

    def _id(self, request_id: str) -> Fields:
        """For /v1/responses, which reads the id here and not in a header."""
        return {"request_id": f"resp_{request_id}"} if self.path == "/v1/responses" else {}


def parse(raw: bytes, path: str = "/v1/completions") -> Body:
    """The client's request. Raises BadBody, with a sentence, if it is not a JSON object."""
    try:
        fields = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise BadBody(f"The request body is not a JSON object: {error}.") from None
    taken = _without_the_forbidden(fields)
    return Body(taken, raw if taken == fields else msgspec.json.encode(taken), path)


def _without_the_forbidden(fields: Fields) -> Fields:
    kept = {name: value for name, value in fields.items() if name not in _NOT_THE_CLIENTS}
    # vLLM merges these into the same place as kv_transfer_params.
    extra = kept.get("vllm_xargs")
    if isinstance(extra, dict):
        kept["vllm_xargs"] = {name: value for name, value in extra.items() if name not in _NOT_THE_CLIENTS}
    return kept


# What instances answer.

# A vLLM that is told to stop (SIGTERM) ends what it works on with status 200, the tokens that it has, and
# this finish reason. An aborted request has it too, but then its client has left. These are the bytes that
# vLLM writes: inside a string of the same JSON, such as the model's text, the quotes are escaped.
GIVEN_UP = b'"finish_reason":"abort"'
# What an error says of such an instance.
STOPPED = "was stopped before its answer was complete"


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


class GivenUpFilter:
    """Finds out, from the bytes of one answer, whether its instance has given it up but passes it off as
    complete. The bytes may be cut anywhere.

    Attributes:
        given_up: the instance has given it up.
    """

    def __init__(self) -> None:
        self.given_up = False
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """The next bytes, without the event that gives up and what follows it."""
        text = self._tail + chunk
        self._tail = text[1 - len(GIVEN_UP) :]
        self.given_up = GIVEN_UP in text
        if not self.given_up:
            return chunk
        before, end, _ = chunk.partition(GIVEN_UP)[0].rpartition(b"\n\n")
        return before + end if GIVEN_UP in chunk else b""


# The first event of a stream: vLLM has sent the head of its answer, a success, before it knows whether it can
# generate anything.


def first_event_came(head: bytes) -> bool:
    """Whether there is a whole event that says more than whose turn it is to speak."""
    return _first_event(head) is not None


def first_event_failed(head: bytes) -> bool:
    """Whether that event is an error, and the server's own."""
    event = _first_event(head)
    error = event.get("error") if isinstance(event, dict) else None
    if not isinstance(error, dict):
        return False
    code = error.get("code")
    return not (isinstance(code, int) and 400 <= code < 500)


def first_event_message(head: bytes) -> str:
    """The message of the error that it is; "" if it has none."""
    event = _first_event(head)
    error = event.get("error") if isinstance(event, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def _first_event(head: bytes) -> Any:
    """The first event that says something, decoded; None while there is none."""
    *lines, _ = head.split(b"\n")
    for line in lines:
        if line.startswith(b"data:"):
            event = _decoded(line.removeprefix(b"data:"))
            if not _announces(event):
                return event
    return None


def _decoded(data: bytes) -> Any:
    """What is no JSON, such as [DONE], or is empty, stands for itself."""
    try:
        return msgspec.json.decode(data) or data
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return data


# What /v1/responses and /v1/messages send before anything is generated, or together with it.
_ANNOUNCEMENTS = frozenset(
    {
        "response.created",
        "response.queued",
        "response.in_progress",
        "message_start",
        "content_block_start",
        "ping",
    }
)


def _announces(event: Any) -> bool:
    """Whether all that it has is the role of the speaker, as a chat's first event, or it only opens the
    answer."""
    if isinstance(event, dict) and event.get("type") in _ANNOUNCEMENTS:
        return True
    choices = event.get("choices") if isinstance(event, dict) else None
    return isinstance(choices, list) and bool(choices) and all(_says_nothing(each) for each in choices)


def _says_nothing(choice: Any) -> bool:
    delta = choice.get("delta") if isinstance(choice, dict) else None
    if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason") is not None:
        return False
    return not any(value for name, value in delta.items() if name != "role")
