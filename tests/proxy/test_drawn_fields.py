"""What P and D get of any body is what vLLM's own request classes take, whatever fields it has.

Of each class all fields are drawn, with values by their types, alone and in pairs. Whenever vLLM takes D's
body it takes P's, both have the same prompt, and nothing that the client sent is lost on D.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm_fields import Fields, fields_of

from p2pkv_proxy.bodies import Body, parse
from p2pkv_proxy.http import PAIRED, ProxyError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")]

CONTEXT = 4096
MODEL = SimpleNamespace(max_model_len=CONTEXT)
REQUESTS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/responses": ResponsesRequest,
}
LEAST: dict[str, Fields] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4096},
    "/v1/responses": {"input": "hi"},
}
PAIRS = 2400
"""Bodies with two fields more than the least, of each endpoint."""
FORBIDDEN = {"kv_transfer_params", "ec_transfer_params", "request_id"}
MADE_UP = FORBIDDEN | {"_grammar_from_parser"}
"""What vLLM draws or the proxy sets."""
NOT_THE_PROMPT = {
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "stream"),
    *("stream_options", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "include"),
    *("background", "store"),
}
"""Fields that the proxy may change for P: vLLM makes the prompt without them, but for what `cut` compares."""
ALONE = {"echo", "use_beam_search", "prompt_logprobs", "tools", "previous_response_id"}
"""Fields for whose sake D may be left alone with a request."""


def pairs(path: str) -> Iterator[Fields]:
    """With the least, and two fields more."""
    drawn, dice = fields_of(REQUESTS[path]), random.Random(path)
    names = list(itertools.combinations(sorted(drawn), 2))
    for _ in range(PAIRS):
        yield {"model": "m"} | LEAST[path] | {name: dice.choice(drawn[name]) for name in dice.choice(names)}


def chat_of(request: Any) -> Any:
    """What vLLM makes of it before anything else."""
    if isinstance(request, AnthropicMessagesRequest):
        return AnthropicServingMessages.to_chat_completion_request(request)
    return request


def taken(path: str, body: Fields) -> Any:
    """vLLM's request. Raises whatever it refuses the body with."""
    request = chat_of(REQUESTS[path].model_validate(json.loads(json.dumps(body))))
    request.build_tok_params(MODEL)
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    wanted = [most for name in names if (most := getattr(request, name, None)) is not None]
    request.to_sampling_params(min([*wanted[:1], CONTEXT]), {})
    return request


def prompt_of(request: Any) -> Any:
    """All that its prompt's tokens are made of."""
    fields = {name: value for name, value in request if name not in MADE_UP | NOT_THE_PROMPT}
    made = without_forbidden(fields)  # vLLM itself puts kv_transfer_params into vllm_xargs
    if hasattr(request, "build_chat_params"):
        made["chat"] = request.build_chat_params(None, "auto")
    tokens = request.build_tok_params(MODEL)
    many = {f"{each.name}": getattr(tokens, each.name) for each in dataclasses.fields(tokens)}
    of_the_answer = ("max_output_tokens", "max_output_tokens_param")
    made["tokens"] = {name: value for name, value in many.items() if name not in of_the_answer}
    return made | {"cut": [cut(tokens, length) for length in (1, 100, CONTEXT - 1, 2 * CONTEXT)]}


def cut(tokens: Any, length: int) -> Any:
    """Which tokens of a prompt of so many remain. One token less than the context if the answer is to have
    any: P's prompt is that of an answer, and a prompt that fills the context has none."""
    try:
        found = tokens.apply_post_tokenization(None, {"prompt_token_ids": list(range(length))})
    except VLLMValidationError as refused:
        return type(refused)
    ids = found["prompt_token_ids"]
    return None if len(ids) >= CONTEXT - 1 else (ids[:1], len(ids))


def without_forbidden(body: Fields) -> Fields:
    """As the client may send it."""
    kept = {name: value for name, value in body.items() if name not in FORBIDDEN}
    extra = kept.get("vllm_xargs")
    if isinstance(extra, dict):
        kept["vllm_xargs"] = {name: value for name, value in extra.items() if name not in FORBIDDEN}
    return kept


def sent(content: Any) -> Fields:
    fields: Fields = json.loads(bytes(content))
    return fields


def check(path: str, body: Fields) -> str:
    """What vLLM does with it."""
    try:
        made: Body = parse(json.dumps(body).encode(), path)
    except ProxyError as refused:
        assert "background" in str(refused) and body["background"]
        return "background"
    d = sent(made.for_decode("id"))
    params = {"some": "params"}
    more = sent(made.for_decode("id", params, token_ids=True))
    assert more == d | {"kv_transfer_params": params, "return_token_ids": True}, body
    mine = {"request_id"} if path == "/v1/responses" else set()
    assert {name: value for name, value in d.items() if name not in mine} == without_forbidden(body), body
    try:
        ds = taken(path, d)
    except Exception:
        return "refused"
    if not made.wants_pair:
        assert ALONE & set(body), f"P could help with {body}"
        return "alone"
    p = sent(made.for_prefill("id"))
    try:
        ps = taken(path, p)
    except Exception as refused:
        pytest.fail(f"vLLM takes {d} of D, and refuses {p} of P: {refused}")
    assert prompt_of(ps) == prompt_of(ds), body
    assert not ps.stream
    return "taken"


def test_these_are_all_endpoints_with_a_p() -> None:
    assert set(REQUESTS) == PAIRED


@pytest.mark.parametrize("path", sorted(REQUESTS))
def test_vllm_takes_ps_body_whenever_it_takes_ds(path: str) -> None:
    """Every field is drawn, that of a later vLLM, too; some are refused with each value, as vLLM has no use
    for them."""
    least, kind = {"model": "m"} | LEAST[path], REQUESTS[path]
    drawn = fields_of(kind)
    assert {info.alias or name for name, info in kind.model_fields.items()} == set(drawn)
    results, useless = [check(path, least)], set[str]()
    for name, values in drawn.items():
        found = [check(path, least | {name: value}) for value in values if value is not None]
        if set(found) == {"refused"}:
            useless.add(name)
        results += [*found, check(path, least | {name: None})]
    assert len(useless) < 8, useless
    results += [check(path, body) for body in pairs(path)]
    shares = {result: results.count(result) / len(results) for result in set(results)}
    assert shares["taken"] > 0.3 and shares["refused"] > 0.1, f"these bodies say little: {shares}"
