"""How many of a prompt's tokens were in a cache: what P says of it, in D's answer.

For D all that P has sent counts as cached, in vLLM all but one token of each prompt. P, which computed the
prompt, knows what its prefix cache really had. Both say it at /v1/responses, elsewhere with vLLM's option
--enable-prompt-tokens-details.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
from msgspec import Raw

from .upstream import EVENT_END

_WAIT_SECONDS = 0.5
"""At the end of D's answer, for P's: D got P's KV before P's own answer was written."""

Counts = dict[str, Raw]


class _Answer(msgspec.Struct):
    usage: Counts = {}


_answer = msgspec.json.Decoder(_Answer)
_counts = msgspec.json.Decoder(Counts)

# An object without strings that hold braces. Within a JSON string quotes are escaped, so none is in a text.
_OBJECT = rb'(\{[^{}"]*(?:"[a-z_]*"[^{}"]*(?:\{[^{}]*\}[^{}"]*)?)*\})'
_DETAILS: Mapping[str, str] = {
    "/v1/completions": "prompt_tokens_details",
    "/v1/chat/completions": "prompt_tokens_details",
    "/v1/responses": "input_tokens_details",
}
# At /v1/messages they stand in the usage itself, and what was cached is not counted among the others.
_READ, _OF_THE_PROMPT = "cache_read_input_tokens", ("input_tokens", "cache_creation_input_tokens")


class PromptUsage:
    """Of one request. `path`: of its endpoint; it is `known` once P has answered, or failed."""

    def __init__(self, path: str) -> None:
        self._details = _DETAILS.get(path)
        name = self._details or "usage"
        self._sign = f'"{self._details or _READ}":'.encode()
        self._object = re.compile(f'"{name}":'.encode() + _OBJECT)
        self._ps: Counts = {}
        self._known = asyncio.Event()

    def know(self, answer: bytes | None) -> None:
        """P has answered with this, or failed. Idempotent."""
        with suppress(msgspec.MsgspecError, RecursionError, ValueError):  # then D's counts stay
            self._ps = self._ps or (_answer.decode(answer).usage if answer else {})
        self._known.set()

    def concerns(self, data: bytes) -> bool:
        """Whether this part of D's answer counts what was cached."""
        return self._sign in data

    async def in_place_of_ds(self, data: bytes, *, streamed: bool) -> bytes:
        """D's whole answer, or whole events of it, that it `concerns`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SECONDS):
                await self._known.wait()
        if not self._ps:
            return data
        parts = data.split(EVENT_END) if streamed else [data]
        return EVENT_END.join(self._last(part, self._ps_counts) for part in parts)

    def _last(self, data: bytes, made: Callable[[bytes], bytes]) -> bytes:
        """The last such object is D's: before it the answer may repeat what a client has sent."""
        *_, last = [None, *self._object.finditer(data)]
        return data if last is None else data[: last.start(1)] + made(last[1]) + data[last.end(1) :]

    def _ps_counts(self, ds: bytes) -> bytes:
        if self._details is not None:
            details = self._ps.get(self._details)
            return bytes(details) if details is not None and bytes(details) != b"null" else ds
        counts = _counts.decode(ds)
        if _READ not in counts or _READ not in self._ps:
            return ds
        kept = {name: count for name, count in counts.items() if name not in (_READ, *_OF_THE_PROMPT)}
        mine = {name: self._ps[name] for name in (_READ, *_OF_THE_PROMPT) if name in self._ps}
        return msgspec.json.encode(kept | mine)
