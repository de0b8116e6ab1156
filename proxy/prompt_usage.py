"""Puts P's count of a prompt's cached tokens into D's answer.

To D's vLLM all that P has sent looks cached, all but one token of each prompt. P, which computed the prompt,
knows what its prefix cache had. Both report it at /v1/responses, and elsewhere with vLLM's option
--enable-prompt-tokens-details. Also here: how many tokens an answer has that is no stream.
"""

import asyncio
import re
from collections.abc import Callable, Mapping

import msgspec

from .bodies import decoded
from .http import PAIRED
from .upstream import EVENT_END

_WAIT_SECONDS = 0.5
"""How long the end of D's answer waits for P's answer, which P writes after D has got its KV."""

Counts = dict[str, msgspec.Raw]


class _Counted(msgspec.Struct):
    usage: Counts = {}


_answer = msgspec.json.Decoder(_Counted)
_counts = msgspec.json.Decoder(Counts)
_number = msgspec.json.Decoder(int)

# An object without braces in its strings. A text has no such match, as quotes in JSON strings are escaped.
_OBJECT = rb'(\{[^{}"]*(?:"[a-z_]*"[^{}"]*(?:\{[^{}]*\}[^{}"]*)?)*\})'
_DETAILS: Mapping[str, str] = {
    "/v1/completions": "prompt_tokens_details",
    "/v1/chat/completions": "prompt_tokens_details",
    "/v1/responses": "input_tokens_details",
}
# At /v1/messages the counts are in the usage itself, and cached tokens are not among the input tokens.
_NULL = msgspec.Raw(b"null")
_READ, _OF_THE_PROMPT = "cache_read_input_tokens", ("input_tokens", "cache_creation_input_tokens")

COUNTS = {path: f'"{_DETAILS.get(path, _READ)}":'.encode() for path in PAIRED}
"""By path, bytes in each part of an answer that counts cached tokens."""


async def with_ps_counts(
    data: bytes, path: str, prefilled: asyncio.Future[bytes | None], *, streamed: bool
) -> bytes:
    """D's whole answer, or whole events of it, with the counts in P's (`prefilled`; None: P has failed)."""
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            answer = await asyncio.shield(prefilled)
    except TimeoutError:
        return data
    ps = decoded(_answer, answer or b"", _Counted()).usage
    found = re.compile(f'"{_DETAILS.get(path, "usage")}":'.encode() + _OBJECT)
    parts = data.split(EVENT_END) if streamed else [data]
    return EVENT_END.join(_last_replaced(part, found, lambda ds: _counts_of(path, ps, ds)) for part in parts)


def answer_tokens(answer: bytes) -> int:
    """How many tokens a whole answer has, by its usage; 0 if it does not say."""
    usage = decoded(_answer, answer, _Counted()).usage
    said = usage.get("completion_tokens") or usage.get("output_tokens")
    return 0 if said is None else decoded(_number, said, 0)


def last_usage(events: bytes) -> bytes | None:
    """The last event of a stream that has a usage; None if none has."""
    for event in reversed(events.split(EVENT_END)):
        if b'"usage":{' in event:
            return event[event.index(b"{") :]
    return None


def _last_replaced(data: bytes, found: re.Pattern[bytes], made: Callable[[bytes], bytes]) -> bytes:
    """Replaces the last such object, which is D's: before it the answer may repeat what a client sent."""
    *_, last = [None, *found.finditer(data)]
    return data if last is None else data[: last.start(1)] + made(last[1]) + data[last.end(1) :]


def _counts_of(path: str, ps: Counts, ds: bytes) -> bytes:
    counts = decoded(_counts, ds, {})
    if path in _DETAILS:
        # D's stream leaves out what is null; P's answer, which is perhaps no stream, does not.
        details = decoded(_counts, ps.get(_DETAILS[path], _NULL), {})
        said = {name: count for name, count in details.items() if name in counts or count != _NULL}
        return msgspec.json.encode(said) if said else ds
    if _READ not in counts or _READ not in ps:
        return ds
    names = _READ, *_OF_THE_PROMPT
    kept = {name: count for name, count in counts.items() if name not in names}
    return msgspec.json.encode(kept | {name: ps[name] for name in names if name in ps})
