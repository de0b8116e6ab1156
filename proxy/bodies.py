"""What a client's request asks for, and the bodies that P and D get instead. No IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

Fields = dict[str, Any]

# They carry addresses, or ids in our place; a client has no business to choose either.
_NOT_THE_CLIENTS = ("kv_transfer_params", "ec_transfer_params", "request_id")
# P's answer is thrown away: nothing that only decorates an answer is asked for.
_NOT_FOR_PREFILL = (
    "stream_options",
    "best_of",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
)
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
    """

    fields: Fields
    raw: bytes

    @property
    def model(self) -> str | None:
        """The model it names; None if it names none, or nothing that could be a name."""
        name = self.fields.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def wants_pair(self) -> bool:
        """Whether P can help. Not with beam search, which makes requests of its own, nor where the
        answer is about the prompt's own tokens, whose logits only the prefill itself yields."""
        fields = self.fields
        local = fields.get("use_beam_search") in _OFF and fields.get("echo") in _OFF
        return local and fields.get("prompt_logprobs") is None

    @property
    def one_prompt(self) -> bool:
        """Whether one token of the answer proves that the KV of all prompts has been used."""
        prompts = self.fields.get("prompt")
        return not (isinstance(prompts, list) and len(prompts) > 1 and not isinstance(prompts[0], int))

    def for_prefill(self) -> bytes:
        """P's body: the same prompt, and one token that nobody reads."""
        fields = {name: value for name, value in self.fields.items() if name not in _NOT_FOR_PREFILL}
        fields |= {"max_tokens": 1, "n": 1, "stream": False}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        minimum = fields.get("min_tokens")
        if isinstance(minimum, int | float) and minimum > 1:
            fields["min_tokens"] = 1
        return msgspec.json.encode(fields)

    def for_decode(self, kv_transfer_params: Fields | None = None) -> bytes:
        """D's body: the client's own, with what P has returned for D, if it has."""
        if kv_transfer_params is None:
            return self.raw
        return msgspec.json.encode(self.fields | {"kv_transfer_params": kv_transfer_params})


def parse(raw: bytes) -> Body:
    """The client's request. Raises BadBody, with a sentence, if it is not a JSON object."""
    try:
        fields = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise BadBody(f"The request body is not a JSON object: {error}.") from None
    taken = _without_the_forbidden(fields)
    return Body(fields, raw) if taken == fields else Body(taken, msgspec.json.encode(taken))


def _without_the_forbidden(fields: Fields) -> Fields:
    kept = {name: value for name, value in fields.items() if name not in _NOT_THE_CLIENTS}
    # vLLM merges these into the same place as kv_transfer_params.
    extra = kept.get("vllm_xargs")
    if isinstance(extra, dict):
        kept["vllm_xargs"] = {name: value for name, value in extra.items() if name not in _NOT_THE_CLIENTS}
    return kept


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
