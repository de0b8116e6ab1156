"""What P and D get in place of the client's body."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from p2pkv_proxy.bodies import parse
from p2pkv_proxy.http import ProxyError
from p2pkv_proxy.upstream import Reply


def json_values(
    texts: Any = None, names: Any = None, integers: Any = None, leaves: int = 20
) -> st.SearchStrategy[Any]:
    """JSON of any form; `names` are those of objects."""
    names = st.text(max_size=8) if names is None else names
    return st.recursive(
        st.none()
        | st.booleans()
        | (st.integers(-(2**60), 2**60) if integers is None else integers)
        | st.floats(allow_nan=False, allow_infinity=False)
        | (st.text(max_size=8) if texts is None else texts),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
        max_leaves=leaves,
    )


JSON = json_values()
NAMES = st.sampled_from([
    "model", "prompt", "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "stream",
    "stream_options", "logprobs", "echo", "use_beam_search", "prompt_logprobs", "kv_transfer_params",
    "ec_transfer_params", "request_id", "vllm_xargs",
])  # fmt: skip


def returned_params(raw: bytes) -> Any:
    return Reply(200, CIMultiDictProxy(CIMultiDict()), raw).kv_transfer_params


def body(**fields: Any) -> Any:
    return parse(json.dumps(fields).encode())


def for_prefill(**fields: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(bytes(body(**fields).for_prefill("id")))
    return result


KEPT = {
    "model": "m",
    "prompt": [1, 2, 3],
    "temperature": 0.5,
    "cache_salt": "s",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


MIN_TOKENS = (
    *((0, 0), (1, 1), (2, 1), (5.0, 1), (None, None), ("x", "x")),
    *(("0", "0"), ("1", "1"), ("100", 1), (" 1_000 ", 1), ("2.0", 1)),
)


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({"max_tokens": 100, "min_tokens": 7, "logprobs": 5}, {"min_tokens": 1}),
        (
            {"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2},
            {"max_completion_tokens": 1},
        ),
    ],
    ids=["completion", "chat"],
)
def test_p_makes_one_token_that_nobody_reads(more: dict[str, Any], sent: dict[str, Any]) -> None:
    client = {"n": 3, "best_of": 4, "stream": True, "stream_options": {}, "return_token_ids": True, **more}
    one = {"max_tokens": 1, "n": 1, "stream": False}
    assert for_prefill(**KEPT, **client) == KEPT | one | sent


def test_min_tokens_is_at_most_one_and_nonsense_stays() -> None:
    for spelled, sent in MIN_TOKENS:
        assert for_prefill(min_tokens=spelled)["min_tokens"] == sent, spelled


def test_a_budget_for_thinking_does_not_count_on_p() -> None:
    """vLLM wants `max_tokens` to be more than it, but of who only prefills."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    client = {"model": "m", "messages": [], "max_tokens": 4096, "stream": True}
    with_it, without = (
        json.loads(bytes(parse(json.dumps(fields).encode(), "/v1/messages").for_prefill("id")))
        for fields in (client | {"thinking": thinking}, client)
    )
    p = client | {"max_tokens": 1, "stream": False}
    assert with_it == p | {"thinking": thinking, "kv_transfer_params": {"do_remote_decode": True}}
    assert without == p


def test_d_gets_the_clients_own_bytes() -> None:
    raw = b'{ "model":"m",  "seed": 18446744073709551615, "prompt":"\\u00e4", "temperature": 1.0 }'
    assert bytes(parse(raw).for_decode("id")) == raw


STREAMS = (True, "true", "Yes", 1, 1.0)
NO_STREAMS = (False, "no", 0, None, "x", 2)
ALONE: tuple[tuple[str, Any], ...] = (
    *(("use_beam_search", True), ("echo", True), ("echo", "true"), ("echo", "2")),
    *(("prompt_logprobs", 0), ("prompt_logprobs", 3)),
)
PAIRED: tuple[tuple[str, Any], ...] = (
    *(("echo", "No"), ("echo", 0.0), ("use_beam_search", "off"), ("model", "m")),
    *(("use_beam_search", False), ("echo", None), ("prompt_logprobs", None)),
)


def test_what_is_made_of_a_field() -> None:
    """With each of vLLM's spellings of true and false."""
    assert [body(stream=each).streams for each in (*STREAMS, *NO_STREAMS)] == [True] * 5 + [False] * 6
    assert not any(body(**{name: value}).wants_pair for name, value in ALONE), "P cannot help with these"
    assert all(body(**{name: value}).wants_pair for name, value in PAIRED)
    assert all(body(prompt=each).one_prompt for each in ("a", [1, 2], ["a"], []))
    assert not any(body(prompt=each).one_prompt for each in (["a", "b"], [[1], [2]]))


TAKEN = b'{"prompt": "\xc3\xa4 \\ud83d\\ude00", "stream": true, "n": 1}'


@pytest.mark.parametrize("raw", [TAKEN, b"\xef\xbb\xbf" + TAKEN], ids=["plain", "a byte order mark"])
def test_json_is_taken_with_a_byte_order_mark(raw: bytes) -> None:
    made = parse(raw)
    assert made.streams and repr(json.loads(bytes(made.for_decode("id")))) == repr(json.loads(raw))
    prefill = json.loads(bytes(made.for_prefill("id")))
    assert prefill["prompt"] == "\u00e4 \U0001f600" and prefill["max_tokens"] == 1


NO_OBJECTS = (b"", b"{", b"[]", b"3", b'"x"', b"null", b"{}x", b'{"a":nan}', b"[" * 9999, b"\xef\xbb\xbf[]")


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        *((each, "not a JSON object") for each in NO_OBJECTS),
        (b'{"prompt": "a\\ud83d"}', "cut within a character"),
        (b'{"messages": [{"content": "\\udc00\\ud83d"}]}', "cut within a character"),
        (b"\xff", r"in UTF-8: .* \(byte 0\)"),
        (TAKEN.decode().encode("utf-16"), "in UTF-8"),
    ],
)
def test_what_is_no_object_is_refused_and_the_cause_is_named(raw: bytes, why: str) -> None:
    with pytest.raises(ProxyError, match=why) as refused:
        parse(raw)
    assert refused.value.status == 400


@given(st.dictionaries(NAMES, JSON, max_size=8))
def test_whatever_the_client_sends(fields: dict[str, Any]) -> None:
    made = body(**fields)
    prefill = json.loads(bytes(made.for_prefill("id")))
    assert (prefill["max_tokens"], prefill["n"], prefill["stream"]) == (1, 1, False)
    assert prefill.get("max_completion_tokens", 1) == 1
    decode = json.loads(bytes(made.for_decode("id")))
    for sent in (prefill, decode):
        assert not {"kv_transfer_params", "ec_transfer_params", "request_id"} & set(sent)
    assert set(fields) - set(decode) <= {"kv_transfer_params", "ec_transfer_params", "request_id"}
    assert isinstance(made.wants_pair, bool)
    assert isinstance(made.one_prompt, bool)


@settings(max_examples=50)
@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_ps_answer_may_be_anything(raw: bytes) -> None:
    params = returned_params(raw)
    assert params is None or isinstance(params, dict)
    assert returned_params(b'{"id": "x", "kv_transfer_params": {"a": 1}}') == {"a": 1}
    assert returned_params(b'{"kv_transfer_params": null}') is None
