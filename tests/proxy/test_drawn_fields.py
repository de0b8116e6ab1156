"""What P and D get of any body is what vLLM's own request classes take, whatever fields it has.

Of each class all fields are drawn, with values by their types, alone and in pairs. Whenever vLLM takes D's
body it takes P's, both have the same prompt, and nothing that the client sent is lost on D.
"""

import dataclasses
import itertools
import json
import random
import types
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError

from p2pkv_proxy.bodies import Body, parse
from p2pkv_proxy.http import PAIRED, ProxyError

# Values for the fields by their types: as a client may send them, spelled as pydantic takes a type, and some
# that it refuses. A new field of a later vLLM has values by itself.

Fields = dict[str, Any]

_NUMBERS = (0, 1, 2, 100, -1)
_DEEPEST = 3
_MOST = 40
"""Values of one type."""

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
TEXT = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
# Of types with too many forms to draw, forms that clients send.
EXAMPLES: Mapping[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "hi"}],
        TEXT,
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
    ],
    "input": [
        "hi",
        [{"role": "user", "content": "hi"}],
        [{"type": "message", "role": "user", "content": []}],
    ],
    "prompt": ["hi", [1, 2, 3], ["a", "b"], [[1], [2]], "", []],
    "tools": [
        [{"type": "function", "function": FUNCTION}],
        [{"type": "function", **FUNCTION, "strict": True}],
        [{"name": "f", "input_schema": {"type": "object"}}],
        [],
    ],
    "tool_choice": [
        "none",
        "auto",
        "required",
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "name": "f"},
        {"type": "tool", "name": "f"},
        {"type": "any"},
    ],
    "response_format": [{"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}],
}


def fields_of(request: type[BaseModel]) -> dict[str, list[Any]]:
    made = {}
    for name, info in request.model_fields.items():
        values = [*EXAMPLES.get(name, ()), *_values(info.annotation, info.metadata)]
        made[info.alias or name] = _different([*values, None])
    return made


def _different(values: Iterable[Any]) -> list[Any]:
    """1, 1.0 and true are three values here."""
    return list({json.dumps(each): each for each in values}.values())[:_MOST]


def _values(annotation: Any, metadata: Iterable[Any] = (), depth: int = 0) -> list[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _SIMPLE:
        return _simple(annotation, metadata)
    if origin is Annotated:
        return _values(arguments[0], [*metadata, *arguments[1:]], depth)
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if each is not types.NoneType]
        several = [_values(each, metadata, depth) for each in kinds]
        rows = itertools.zip_longest(*several, fillvalue=_NONE)
        return [value for row in rows for value in row if value is not _NONE]
    if origin is Literal:
        return [*arguments, "no such value"]
    if depth > _DEEPEST:
        return []
    if origin is list or annotation is list:
        inner = _values(arguments[0], (), depth + 1) if arguments else [1]
        return [*([each] for each in inner[:8]), inner[:2], []]
    if origin is dict or annotation is dict:
        inner = _values(arguments[1], (), depth + 1) if arguments else [1]
        return [{"5": each} for each in inner[:8]] + [{}]
    if (members := _members(annotation)) is not None:
        return _objects(members, depth)
    return ["x", 1, {"a": [None]}]


_NONE = object()


_SIMPLE = (bool, int, float, str, bytes)


def _simple(kind: type, metadata: Iterable[Any]) -> list[Any]:
    if kind is bool:
        return [True, False, "true", "false", 1, 0, "Yes", "off", 1.0, "0", "x"]
    if kind in (int, float):
        rules = [rule for each in metadata for rule in _rules(each)]
        edges = [edge for each in rules for edge in dataclasses.asdict(each).values()]
        numbers = [*(edge + more for edge in edges for more in (0, 1, -1)), *_NUMBERS]
        if kind is float:
            numbers += [0.5, 0.01]
        spelled = [form for each in (1, 2, 100) for form in (str(each), float(each), f" {each}.0 ")]
        return [*numbers, *spelled, "0", "x", True]
    return ["x", "", "a longer text", "\u00e9\U0001f600", 5]


def _rules(annotation: Any) -> Iterable[Any]:
    if isinstance(annotation, FieldInfo):
        return annotation.metadata
    return [annotation] if isinstance(annotation, Ge | Gt | Le | Lt) else []


def _members(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """By name: the type of a member of an object, and whether the object needs it."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields
        return {
            info.alias or name: (Annotated[info.annotation, info], info.is_required())
            for name, info in fields.items()
        }
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        return {name: (hint, name in kind.__required_keys__) for name, hint in hints.items()}
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {each.name: (hints[each.name], False) for each in dataclasses.fields(kind) if each.init}
    return None


def _objects(members: Mapping[str, tuple[Any, bool]], depth: int) -> list[Any]:
    """With what they need; and with one member more, or another value of one."""
    drawn = {name: _values(annotation, (), depth + 1)[:6] for name, (annotation, _) in members.items()}
    needed = {name: drawn[name][0] for name, (_, required) in members.items() if required and drawn[name]}
    return [needed, *(needed | {name: value} for name, values in drawn.items() for value in values)]


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
    return json.loads(bytes(content))


def check(path: str, body: Fields) -> str:
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
    """Of every field, a later vLLM's too; some are refused with each value, as vLLM has no use for them."""
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
