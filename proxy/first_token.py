"""Whether the first token of an answer comes from P, and what P's answer must show for that.

P computes the first token in any case. Where the answer stays exact, the client gets it at once, and D goes
on behind prompt and token, like an instance that takes over a stream (continuation.py). Beside the rules for
such streams (transcript.py), `FirstTokens.against` alone decides where it does:

- Nothing may depend on which tokens belong to the answer: no penalties, no grammar, no seed.
- D's text must continue the token's. vLLM cannot go on behind a part of a character, and looks for stop
  strings only in what it has generated itself. A token that may be a part of either is not handed on.

D then generates the first token itself. If it drew another one, those that are handed on would come too
often. So for a sampled request P and D get the same seed, made here, and D draws P's token again. Behind a
token that was handed on D gets no seed, or it would draw with P's random number once more.

A greedy answer needs no seed. Where P and D are asked at once D's first token is equal, and left out; if it
differs, as the two may round differently, D is asked again for the rest. So D has the request before P's
token comes, and sends the second token sooner than if it were asked then (benchmarks/results/h200.md).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from p2pkv.first_token import FirstToken

from .bodies import Body
from .limits import RequestCounters
from .membership.instance import Instance
from .routing import Choice
from .transcript import COMPLETIONS, DATA_SPACE, GOES_ON, NOTHING, TextChoice, Transcript, text_of
from .upstream import EVENT_END, split_prompt

Why = Literal["request", "parser", "instances", "room", "context", "memory", "token", "failed", "late"]
REASONS: dict[Why, str] = {
    "request": "the request is no stream that could go on elsewhere, has a seed, or bounds its answer in a "
    "way that only D can judge",
    "parser": "P's answers have reasoning, or calls of tools, in place of text",
    "instances": "P or D does not support it",
    "room": "D has no room (prefetch_bytes) for KV before it is asked",
    "context": "the model's context is not known, or too short for all that the request asks for",
    "memory": "--resume-mib is used up",
    "token": "P's token is a part of a character, or may begin a stop string",
    "failed": "P has failed",
    "late": "D, asked at the same time, had its token before P",
}
"""Why a request's first token came from D, although a P took part."""

_PARSED = {"tools", "thinking"}
"""Fields of a request whose answer may have parts that are no text."""

_CALLS = rb'"tool_calls"\s*:\s*\['
"""After tool calls in a chat a model may write others, which vLLM takes out of the text, asked to or not."""

_WHOLE_BLOCKS = 128
"""The most tokens that a prompt takes of D's room beyond its own: where KV is packed, whole blocks travel."""

_FIRST, _CHOICE = DATA_SPACE + b'{"id"', b'"choices":[{'
_LENGTH = b'"finish_reason":"length"'
_LENGTH_OF_CHAT = _LENGTH + b',"stop_reason":null'
_OF_THE_END = re.compile(rb',"system_fingerprint":"[^"]*"(?=(?:,"kv_transfer_params":null)?\}\n\n\Z)')
_OF_A_CHATS_END = b',"weight_versions":null}]', b"}]"
"""As vLLM 0.33 writes it."""


@dataclass(frozen=True)
class PrefillToken:
    """P's answer: the `events` up to its one token; apart from them the token ids of the `prompt`, separated
    by commas, and how many they are (`prompt_tokens`)."""

    events: bytes
    choice: TextChoice
    prompt: bytes
    prompt_tokens: int

    @classmethod
    def of(cls, head: bytes) -> PrefillToken:
        """Reads an answer, up to its first event with content. Raises ValueError if that is not as vLLM's."""
        # vLLM may send comments before it (--sse-keep-alive-interval).
        head, prompt = split_prompt(head[max(0, head.find(_FIRST)) :])
        start = head.rfind(DATA_SPACE, 0, max(0, head.rfind(_CHOICE)))
        end = head.find(EVENT_END, start)
        if min(start, end) < 0 or not (prompt and head.startswith(_FIRST)):
            raise ValueError("no event with a token, or without the prompt's")
        choice = text_of(head[start:end])
        if len(choice.token_ids or ()) != 1 or choice.finish_reason is None:
            raise ValueError("an event without a token, with several, or without the reason of the end")
        return cls(head[: end + len(EVENT_END)], choice, prompt, prompt.count(b",") + 1)

    @property
    def ends(self) -> bool:
        """Whether the answer ends with this token because the model ended it, and not for its length."""
        return self.choice.finish_reason != "length"

    @property
    def going_on(self) -> bytes:
        """The events, rewritten as if the answer went on."""
        chat = self.choice.delta is not None
        events = self.events.replace(_LENGTH_OF_CHAT if chat else _LENGTH, GOES_ON)
        return _OF_THE_END.sub(b"", events.replace(*_OF_A_CHATS_END) if chat else events)


@dataclass
class FirstTokenPlan:
    """How one attempt gets its first token from P.

    Attributes:
        what: P is told. WHOLE: P's answer is relayed like D's. None: P is told nothing, as D is asked at the
            same time and repeats the token.
        most: tokens of the answer; 0 if only the model's context bounds it.
        seed: for P, and for D if it has to draw the same token; None: the request is not sampled.
        decode, room: D, and how many tokens of its room for early KV this takes until `leave`.
    """

    what: FirstToken | None
    most: int
    seed: int | None = None
    decode: Instance | None = None
    room: int = 0

    def leave(self) -> None:
        """D's room is free again: it has moved the KV to its blocks, or will not. Idempotent."""
        if self.decode is not None:
            self.decode.count_prefetch(-self.room)
            self.decode = None

    def keeps(self, token: PrefillToken) -> bool:
        """Whether P keeps blocks for a D although this token may be the whole answer: P's engine core ends
        after one token in any case and knows no stop strings. A D asked at once learns of the end itself."""
        return self.what is not None and (isinstance(token.choice.stop_reason, str) or not token.ends)

    def ends_with(self, token: PrefillToken, context: int) -> bool:
        """Whether this token ends the answer; `context`: the model's, in tokens."""
        return token.ends or self.most == 1 or token.prompt_tokens + 1 == context


@dataclass
class FirstTokens:
    """Decides for one proxy which answers begin with P's token, and counts the others.

    Attributes:
        on: whether P's tokens are handed on at all.
        at_once: whether P and D are asked at the same time.
    """

    on: bool
    counters: RequestCounters
    at_once: bool = False
    from_decode: Counter[Why] = field(default_factory=Counter)
    _parsed: set[str | None] = field(default_factory=set)
    """Models whose chats have shown parts that are no plain text."""

    def plan(self, body: Body, transcript: Transcript | None, choice: Choice) -> FirstTokenPlan | None:
        """For an attempt that begins an answer; None if its first token will be D's, which is counted."""
        if not self.on or choice.prefill is None:
            return None
        if self._is_ps(body, choice.prefill, choice.decode):
            return FirstTokenPlan(FirstToken.WHOLE, 1)
        why = self.against(body, transcript, choice.prefill, choice.decode)
        if transcript is not None and self._repeats(why, transcript, choice):
            return FirstTokenPlan(None, transcript.wanted.most_tokens(0))
        if transcript is None or why is not None:
            self.count_from_decode(why or "request")
            return None
        wanted = transcript.wanted
        seed = None if wanted.greedy else random.getrandbits(63)
        choice.decode.count_prefetch(room := body.prompt.tokens + _WHOLE_BLOCKS)
        return FirstTokenPlan(FirstToken.HANDED_ON, wanted.most_tokens(0), seed, choice.decode, room)

    def _is_ps(self, body: Body, prefill: Instance, decode: Instance) -> bool:
        """Whether the whole answer is one token, in any form, which P answers like D."""
        parses = prefill.ping.parses or decode.ping.parses or not _PARSED.isdisjoint(body.fields)
        parses &= body.path != COMPLETIONS
        one = body.asked == 1 and body.path != "/v1/responses"
        return bool(prefill.ping.first_token) and one and not parses

    def _repeats(self, why: Why | None, transcript: Transcript, choice: Choice) -> bool:
        """Whether D is asked at once for the whole answer, and begins with the same token."""
        able = choice.prefill is not None and choice.prefill.ping.first_token and choice.decode.context
        exact = why in (None, "instances", "room") and transcript.wanted.greedy
        return self.at_once and exact and bool(able)

    def against(
        self, body: Body, transcript: Transcript | None, prefill: Instance, decode: Instance
    ) -> Why | None:
        """Why D's first token has to be taken, as far as is known before P is asked; None if P's can be."""
        if transcript is None:
            return "request"
        wanted, fields = transcript.wanted, transcript.wanted.fields
        try:
            most, least = wanted.most_tokens(0), wanted.least_tokens
        except TypeError:
            return "request"
        unbounded = wanted.needs_context or (not wanted.chat and fields.get("max_tokens", 1) is None)
        drawn = fields.get("seed") is not None and not wanted.greedy
        # P's answer is bounded, and vLLM leaves room for that bound where it truncates a prompt.
        inexact = drawn or (unbounded and (not wanted.chat or "truncate_prompt_tokens" in body.fields))
        if inexact or not (unbounded or most >= max(1, least)):
            return "request"
        parses = prefill.ping.parses or decode.ping.parses or body.model in self._parsed
        if wanted.chat and (parses or re.search(_CALLS, body.fields["messages"])):
            return "parser"
        levels = prefill.ping.first_token, decode.ping.first_token
        if not all(levels) or (unbounded and decode.ping.first_token < 2):
            return "instances"
        same = prefill.ping.sampler == decode.ping.sampler != ""
        if not (same or wanted.greedy):
            return "instances"
        room = decode.prefetch_tokens + body.prompt.tokens + _WHOLE_BLOCKS
        if room > decode.ping.ahead_tokens:
            return "room"
        return None if decode.context else "context"

    def count_from_decode(self, why: Why) -> None:
        self.from_decode[why] += 1

    def of(
        self, head: bytes, plan: FirstTokenPlan, body: Body, transcript: Transcript, context: int
    ) -> PrefillToken | None:
        """The token for the client, from P's answer, which begins with `head`; None if the client gets D's,
        which is counted. `context`: of the model on D, in tokens."""
        try:
            token = PrefillToken.of(head)
            why = self.against_token(token, plan, body, transcript, context)
        except (msgspec.MsgspecError, ValueError):
            why = "failed"
        if why is not None:
            self.count_from_decode(why)
            return None
        self.counters.first_tokens += 1
        return token

    def against_token(
        self, token: PrefillToken, plan: FirstTokenPlan, body: Body, transcript: Transcript, context: int
    ) -> Why | None:
        """As `against`, for what P's answer shows."""
        if token.prompt_tokens + max(plan.most, transcript.wanted.least_tokens) > context:
            return "context"  # D may refuse it
        if plan.ends_with(token, context):
            return None
        if (text := token.choice.said) is None and NOTHING not in token.events:
            self._parsed.add(body.model)
            return "parser"
        if not text or transcript.wanted.may_begin_stop(text):
            return "token"
        return None if transcript.has_room(len(token.prompt)) else "memory"
