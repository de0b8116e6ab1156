"""What P and D get in place of the client's body, of any size and content."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from proxy_behaviours import answer_error, answer_json, stream_of
from proxy_fakes import Deployment, all_do, connect, deployed, error_of, quiet

from p2pkv_proxy import bodies
from p2pkv_proxy.bodies import Content, parse
from p2pkv_proxy.body_checks import MAX_ESCAPES, MAX_NUMBERS, check_values, values_in
from p2pkv_proxy.http import PAIRED, ProxyError
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.upstream import Reply, _Streamed
from support.waiting import eventually


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
    return json.loads(bytes(body(**fields).for_prefill("id")))


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
    *(("0", "0"), ("1", "1"), ("100", 1), (" 1_000 ", 1), ("2.0", 1), ("1e1", "1e1")),
)


@pytest.mark.parametrize(
    ("more", "sent"),
    [
        ({"max_tokens": 100, "min_tokens": 7, "logprobs": 5}, {"min_tokens": 1}),
        ({"max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2}, {"max_completion_tokens": 1}),
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
WITH_P: tuple[tuple[str, Any], ...] = (
    *(("echo", "No"), ("echo", 0.0), ("use_beam_search", "off"), ("model", "m")),
    *(("use_beam_search", False), ("echo", None), ("prompt_logprobs", None)),
)


def test_what_is_made_of_a_field() -> None:
    """With each of vLLM's spellings of true and false."""
    assert [body(stream=each).streams for each in (*STREAMS, *NO_STREAMS)] == [True] * 5 + [False] * 6
    assert not parse(b'{"stream": true}', "/v1/embeddings").streams
    assert not any(body(**{name: value}).wants_pair for name, value in ALONE), "P cannot help with these"
    assert all(body(**{name: value}).wants_pair for name, value in WITH_P)
    assert all(body(prompt=each).one_prompt for each in ("a", [1, 2], ["a"], []))
    assert not any(body(prompt=each).one_prompt for each in (["a", "b"], [[1], [2]]))
    assert body(prompt_embeds=["QQ=="]).one_prompt and not body(prompt_embeds=["QQ==", "Qg=="]).one_prompt


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


# Bodies of any size and content: they are read without becoming objects, bounded, shared and let go of.


MIB = 1 << 20
SMALL = 64 << 10
"""Bytes of what is made beside a body of any size."""


@contextmanager
def taking(most: int) -> Iterator[None]:
    """At no time more than so many bytes of new memory."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= most


def body_of(field: str, item: bytes, size: int) -> bytearray:
    """A list of so many bytes in one field."""
    items = b",".join([item] * (size // (len(item) + 1)))
    return bytearray(b'{"model":"m","stream":true,"%s":[' % field.encode() + items + b"]}")


ITEMS = {
    "lists": b"[]",
    "objects": b"{}",
    "texts": b'"x"',
    "token ids": b"12345",
    "one-digit ids": b"0",
    "lists of ids": b"[1,2,3]",
    "messages": b'{"role":"user","content":"hi"}',
    "tools": b'{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}',
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("field", ["prompt", "messages", "input", "tools", "system", "anything"])
@pytest.mark.parametrize("item", ITEMS)
def test_no_item_of_a_list_becomes_an_object(path: str, field: str, item: str) -> None:
    """But a tool of /v1/responses, whose kind decides who may answer, while it is looked at."""
    raw = body_of(field, ITEMS[item], 2 * MIB)
    read = parse(raw, path)  # what is made once in a process is not counted
    looked_at = path == "/v1/responses" and field == "tools" and item in ("tools", "messages", "objects")
    with taking(4 * MIB if looked_at else 2 * MIB):
        read = parse(raw, path)
        assert read.model == "m"
        assert read.prompt.tokens >= 0 and len(read.prompt.chain) <= 512
        sizes = read.for_prefill("id").size, read.for_decode("id", {"tx": 1}).size
    assert all(abs(size - len(raw)) < 300 for size in sizes)


def fields(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "ä€\n" * 30_000}], "top_k": 5, **more}


@pytest.mark.parametrize("path", sorted(PAIRED))
def test_what_instances_get_is_made_of_the_clients_own_bytes(path: str) -> None:
    client = fields(
        stream=True, kv_transfer_params={"remote_host": "evil"}, vllm_xargs={"request_id": 1, "a": 2}
    )
    raw = json.dumps(client).encode()
    read = parse(raw, path)
    with taking(SMALL):
        made = [read.for_prefill("id"), read.for_decode("id"), read.for_decode("id", {"tx": "1"})]
    for each in made:
        assert sum(len(piece) for piece in each.pieces if isinstance(piece, bytes)) < 1000
        sent = json.loads(bytes(each))
        assert sent["messages"] == client["messages"] and sent["top_k"] == 5
        assert sent["vllm_xargs"] == {"a": 2}
        assert b"evil" not in bytes(each) and each.size == len(bytes(each))
    assert json.loads(bytes(made[2]))["kv_transfer_params"] == {"tx": "1"}


@pytest.mark.parametrize(
    ("raw", "forbidden"),
    [
        (b'{"model":"m","model":"n","prompt":"x"}', b'"m"'),
        (
            b'{"kv_transfer_params":{"a":"evil"},"prompt":"x","kv\\u005ftransfer_params":{"a":"evil"}}',
            b"evil",
        ),
        (b'{"vllm_xargs":{"request_id":"evil"},"vllm_xargs":{"request_id":"evil"},"prompt":"x"}', b"evil"),
        (b'{ "prompt" : "x" , "ec_transfer_params" : "evil" }', b"evil"),
    ],
)
def test_of_a_field_that_comes_twice_the_last_one_counts_as_in_vllm(raw: bytes, forbidden: bytes) -> None:
    expected = json.loads(raw) | {"max_tokens": 1, "n": 1, "stream": False}
    for name in ("kv_transfer_params", "ec_transfer_params"):
        expected.pop(name, None)
    if "vllm_xargs" in expected:
        expected["vllm_xargs"] = {}
    read = parse(raw)
    assert json.loads(bytes(read.for_prefill("id"))) == expected
    assert forbidden not in bytes(read.for_prefill("id"))
    if b"evil" in raw:
        assert forbidden not in bytes(read.for_decode("id"))


def counted(value: Any) -> int:
    """By hand: what opens or separates values, and texts."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + len(value) + sum(map(counted, value.values()))
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(counted, value))
    return isinstance(value, str)


VALUES = json_values(
    st.text('a",{[\\ä', max_size=9), st.text('k"\\,', max_size=4), st.integers(-5, 10**6), leaves=30
)


@given(VALUES, st.sampled_from([2, 3, 7, 64, 1 << 18]), st.sampled_from([None, 2]))
def test_values_are_counted_however_they_are_read(value: Any, at_once: int, indent: int | None) -> None:
    raw = bytearray(json.dumps(value, indent=indent, ensure_ascii=False).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("p2pkv_proxy.body_checks._READ_AT_ONCE", at_once)
        *_, (values, numbers) = values_in(raw)
    assert values + numbers == counted(value)


@pytest.mark.parametrize(
    "raw", [b'{"a', b'"\\', b'"x\\\\', b"\\", b'[""""""', b"]]}}", b"\xff" * 50, b'"' * 999]
)
def test_what_is_no_json_is_counted_to_its_end(raw: bytes) -> None:
    *_, (values, _) = values_in(bytearray(raw))
    assert values <= len(raw)


async def refusal(
    body: bytearray, most: int = Limits().max_values, *, token_ids: bool = True
) -> tuple[str, int]:
    """The sentence; "" if the body is taken. And how many turns others got meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(others())
    try:
        await check_values(body, most, token_ids=token_ids)
    except ProxyError as error:
        assert error.status == 413
        return str(error), turns
    finally:
        other.cancel()
    return "", turns


@pytest.mark.parametrize(
    "item", [b"[]", b"{}", b'""', b"null", b"-1", b'{"role":"user","content":"hi"}', b"[1]"]
)
async def test_too_many_values_are_refused_after_a_look_at_their_beginning(item: bytes) -> None:
    sentence, turns = await refusal(body_of("messages", item, 32 * MIB))
    assert "more than 131072 values" in sentence and "--max-body-values" in sentence
    assert turns <= 600, "only the beginning is looked at"
    few = body_of("messages", item, 100_000)
    assert await refusal(few) == ("", 0)
    assert "more than 1000 values" in (await refusal(few, 1000))[0]


async def test_texts_pictures_and_token_ids_are_no_values_however_long_they_are() -> None:
    code = json.dumps(
        {"messages": [{"role": "user", "content": 'if (a[0]) { f({"x": [1, 2]}, "y"); }\n' * 50_000}]}
    )
    assert (await refusal(bytearray(code.encode())))[0] == ""
    assert (await refusal(body_of("prompt", b"12345", 4 * MIB)))[0] == ""
    picture = bytearray(
        b'{"messages":[{"content":[{"image_url":{"url":"data:;base64,' + b"QUJD" * (16 * MIB) + b'"}}]}]}'
    )
    sentence, turns = await refusal(picture)
    assert sentence == "" and turns >= len(picture) >> 20


async def test_numbers_and_escaped_characters_have_bounds_of_their_own() -> None:
    ids = body_of("prompt", b"0", 2 * MAX_NUMBERS + 100)
    assert f"has more than {MAX_NUMBERS} numbers, such as token ids" in (await refusal(ids))[0]
    escapes = bytearray(b'{"prompt":"' + b"\\n" * (MAX_ESCAPES + 1) + b'"}')
    assert f"has more than {MAX_ESCAPES} escaped characters" in (await refusal(escapes))[0]
    numbers, _ = await refusal(body_of("messages", b"1", 4 * MIB), token_ids=False)
    assert "more than 131072 values" in numbers, "vLLM expects no numbers there"
    escapes = bytearray(b'{"prompt":"' + b"," * MIB + b"\\n" * (MAX_ESCAPES + 1) + b'"}')
    assert "escaped characters" in (await refusal(escapes))[0], "its beginning does not hide them"


async def test_two_million_empty_messages_end_at_the_proxy() -> None:
    async with deployed("concurrent", 1, 1, limits=Limits()) as deployment:
        body = b'{"model":"tiny","messages":[' + b"{}," * 2_000_000 + b"{}]}"
        url = f"{deployment.url}/v1/chat/completions"
        async with deployment.client.post(url, data=body) as response:
            assert response.status == 413
            assert "more than 131072 values" in (await error_of(response))["message"]
        assert deployment.p.requests == deployment.d.requests == []
        await quiet(deployment)
        ids = {"model": "tiny", "prompt": [12345] * 300_000}
        assert (await deployment.post(ids)).status == 200
        assert (
            deployment.p.requests[0].body["prompt"]
            == deployment.d.requests[0].body["prompt"]
            == ids["prompt"]
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_messages_have_a_bound_of_their_own(path: str) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    messages = [{"role": "user", "content": "hi [1,2]"}] * 1000
    async with deployed("concurrent", 1, 1, max_messages=1000) as deployment:
        assert (await deployment.post({"model": "tiny", field: messages}, path)).status == 200
        for more in ([*messages, messages[0]], [{}] * 5000, [1] * 5000, ["x"] * 2000):
            assert "more than 1000 messages" in await deployment.refusal(
                413, {"model": "tiny", field: more}, path
            )
        assert (await deployment.post({"model": "tiny", "prompt": ["x"] * 2000})).status == 200
        assert (await deployment.post({"model": "tiny", field: "x" * 5000}, path)).status == 200
        assert len(deployment.d.requests) == 3


async def test_a_body_whose_head_says_that_it_is_too_large_is_not_waited_for() -> None:
    async with deployed("concurrent", 1, 1, max_body=1000) as deployment:
        reader, writer = await connect(deployment.url)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
        async with asyncio.timeout(10):
            assert b" 413 " in await reader.readuntil(b"\r\n")
        writer.transport.abort()


async def test_a_large_body_is_sent_in_pieces_and_can_be_sent_again() -> None:
    content = Content((b"{", bytearray(b"x" * MIB), b",", bytes(300_000), b"}"))
    payload = _Streamed(content)
    assert payload.size == content.size
    for _ in range(2):
        written: list[bytes] = []

        async def write(chunk: Any, written: list[bytes] = written) -> None:
            written.append(bytes(chunk))

        await payload.write(SimpleNamespace(write=write))  # type: ignore[arg-type]
        assert b"".join(written) == bytes(content)
        assert max(map(len, written)) <= 1 << 17


@pytest.mark.parametrize("path", sorted(PAIRED))
async def test_both_get_a_large_prompt_and_another_instance_gets_it_again(path: str) -> None:
    body = fields(model="tiny", prompt="x", input="x")
    async with deployed("concurrent", 2, 2, max_body=16 * MIB) as deployment:
        all_do(deployment.decodes, answer_error(500))
        deployment.decodes[0].behaviour = answer_json
        await deployment.serves(2, body, path)
        seen = [seen for each in deployment.instances for seen in each.requests]
        assert len(seen) >= 5, "one was asked in vain"
        assert all(each.body["messages"] == body["messages"] for each in seen)
        assert all(each.headers["Content-Length"] == str(len(each.raw)) for each in seen)
        assert not any("Transfer-Encoding" in each.headers for each in seen)
        assert all(each.headers.getall("Content-Type") == ["application/json"] for each in seen)


@contextmanager
def bodies_in_memory() -> Iterator[Any]:
    """A function that says how many bytes of bodies there are."""

    def found() -> int:
        shown = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, bodies.__file__)])
        return sum(each.size for each in shown.traces)

    tracemalloc.start(3)
    try:
        yield found
    finally:
        tracemalloc.stop()


async def test_a_body_is_let_go_when_the_answer_has_begun(either: Deployment) -> None:
    end = asyncio.Event()
    either.d.behaviour = stream_of("first", end)
    with bodies_in_memory() as found:
        responses = [await either.begin(prompt="x" * 500_000) for _ in range(4)]
        assert either.proxy.gauges()["under_way"] == 4
        assert either.proxy.intake.held == 0
        await eventually(lambda: found() < 100_000, "no body is left")
    end.set()
    for response in responses:
        await response.read()


@pytest.mark.parametrize("status", [400, 500])
async def test_no_body_stays_in_memory_when_its_request_fails(either: Deployment, status: int) -> None:
    """Without waiting for Python's garbage collector."""
    either.p.behaviour = either.d.behaviour = answer_error(status)
    gc.collect()
    gc.disable()
    try:
        with bodies_in_memory() as found:
            for _ in range(5):
                response = await either.post({"model": "tiny", "prompt": "x" * 700_000})
                assert response.status >= 400
            await quiet(either)
            await eventually(lambda: found() < 100_000, "no body is left")
    finally:
        gc.enable()


async def test_streams_that_have_begun_take_no_room_for_bodies() -> None:
    """Forty times half a megabyte, with room for two megabytes."""

    end = asyncio.Event()
    async with deployed("concurrent", 1, 1, max_held=2 * MIB) as deployment:
        deployment.d.behaviour = stream_of("first", end)
        responses = [await deployment.begin(prompt="x" * 500_000) for _ in range(40)]
        assert deployment.proxy.counters.refused_full == 0
        end.set()
        for response in responses:
            await response.read()
