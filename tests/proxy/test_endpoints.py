"""The endpoints beside completions and chat: whom they reach, with which body, id and usage; models."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import msgspec
import proxy_behaviours
import pytest
from aiohttp import web
from proxy_fakes import (
    FAKE,
    Deployment,
    FakeInstance,
    all_do,
    deployed,
    error_of,
    filter_of,
    fleet,
    join,
    ping,
    quiet,
)

from p2pkv.pairing import find_pair
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.bodies import parse
from p2pkv_proxy.http import PAIRED, SINGLE, ProxyError
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.models import ModelLists, StoredResponses
from p2pkv_proxy.prompt_usage import with_ps_counts
from p2pkv_proxy.relay import AnswerFilter, Scrubber
from p2pkv_proxy.routing import Choice
from p2pkv_proxy.upstream import Reply
from support.waiting import eventually

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 5,
        "system": "be brief",
        "thinking": {"type": "disabled"},
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 5, "include": ["message.output_text.logprobs"]},
    "/v1/embeddings": {"input": ["hi", "ho"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
}
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


def named(name: str, **fields: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name} | fields)}\n\n".encode()


def body_of(path: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny"} | BODIES[path] | more


@pytest.mark.parametrize("path", sorted(PAIRED))
async def test_p_computes_one_token_and_d_answers(either: Deployment, path: str) -> None:
    answer = await either.post(body_of(path, stream=False), path, {"X-Request-Id": "mine"})
    assert answer.status == 200
    (p,), (d,) = either.p.requests, either.d.requests
    assert p.path == d.path == path
    assert p.request_id == d.request_id and find_pair(p.request_id) is not None
    assert p.body[LIMITS[path]] == 1 and d.body[LIMITS[path]] == 5
    assert not p.body["stream"]
    prompt = "input" if path == "/v1/responses" else "messages" if "messages" in p.body else "prompt"
    for name in (prompt, "system", "thinking"):
        assert p.body.get(name) == d.body.get(name) == BODIES[path].get(name), name
    text = await answer.text()
    assert "_addr_" not in text and answer.headers["X-Request-Id"] == "mine"


async def test_responses_carry_the_id_in_their_body(concurrent: Deployment) -> None:
    concurrent.d.behaviour = proxy_behaviours.answers(
        lambda seen: web.json_response({"id": seen.body["request_id"], "object": "response"})
    )
    answer = await concurrent.post(body_of("/v1/responses", request_id="evil"), "/v1/responses")
    (p,), (d,) = concurrent.p.requests, concurrent.d.requests
    assert p.body["request_id"] == d.body["request_id"] == f"resp_{p.request_id}"
    assert not p.body["store"] and "include" not in p.body
    assert "store" not in d.body and d.body["include"]
    name = (await answer.json())["id"]
    assert name.startswith("resp_") and len(name) == len("resp_") + 32


@pytest.mark.parametrize("path", sorted(SINGLE))
async def test_one_instance_does_it_all(concurrent: Deployment, path: str) -> None:
    answer = await concurrent.post(body_of(path), path)
    assert answer.status == 200
    assert concurrent.p.requests == []
    (d,) = concurrent.d.requests
    assert (d.path, d.body) == (path, body_of(path))
    assert find_pair(d.request_id) is None
    assert concurrent.proxy.counters.decode_alone == 0, (
        "it does not count in the share for prompts without a P"
    )


@pytest.mark.parametrize("path", sorted(PAIRED | SINGLE))
async def test_errors_have_openais_form(path: str) -> None:
    async with deployed("concurrent", alone_share=0.0, retries=0) as deployment:
        answer = await deployment.post(body_of(path), path)
        assert answer.status == 503 and (await error_of(answer))["type"] == "service_unavailable_error"
        await deployment.add("D", behaviour=proxy_behaviours.dies)
        await deployment.add("P")
        await deployment.ready(1, 1)
        answer = await deployment.post(body_of(path), path)
        assert answer.status == 502 and (await error_of(answer))["type"] == "bad_gateway_error"
        before = len(deployment.d.requests)
        answer = await deployment.client.post(deployment.url + path, data=b"[1]")
        assert answer.status == 400 and "not a JSON object" in (await error_of(answer))["message"]
        assert len(deployment.d.requests) == before, "nobody is asked"
        async with deployment.client.get(deployment.url + path) as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "POST")
            assert "does not take GET; it takes POST" in (await error_of(answer))["message"]
        deployment.d.behaviour = proxy_behaviours.answer_error(404, "no such model")
        assert "no such model" in await deployment.refusal(404, body_of(path), path)


OPENINGS = {
    "/v1/messages": named("message_start", message={"content": []}),
    "/v1/responses": named("response.created", response={}) + named("response.in_progress", response={}),
}
WORDS = {
    "/v1/messages": named("content_block_delta", delta={"type": "text_delta", "text": "hi"}),
    "/v1/responses": named("response.output_text.delta", delta="hi"),
}


@pytest.mark.parametrize(
    "failure", [proxy_behaviours.die, named("error", error={"type": "internal_error", "message": "no"})]
)
@pytest.mark.parametrize("path", sorted(OPENINGS))
async def test_what_opens_an_answer_is_no_first_token(path: str, failure: proxy_behaviours.Step) -> None:
    """A D that dies or fails after it is one that has not begun, and another one is asked."""
    async with deployed("concurrent", prefill=1, decode=2) as deployment:
        all_do(deployment.decodes, proxy_behaviours.stream_of(OPENINGS[path], failure))
        deployment.decodes[0].behaviour = proxy_behaviours.stream_of(OPENINGS[path] + WORDS[path])
        for _ in range(2):
            answer = await deployment.post(body_of(path, stream=True), path)
            assert answer.status == 200
            assert await answer.content.read() == OPENINGS[path] + WORDS[path]
        assert deployment.proxy.counters.retried >= 1


@pytest.mark.parametrize("path", sorted(OPENINGS))
async def test_an_error_in_a_stream_of_named_events_has_a_name(concurrent: Deployment, path: str) -> None:
    concurrent.d.behaviour = proxy_behaviours.stream_of(OPENINGS[path] + WORDS[path], proxy_behaviours.die)
    answer = await concurrent.post(body_of(path, stream=True), path)
    said = await answer.content.read()
    last = said.removeprefix(OPENINGS[path] + WORDS[path])
    name, data = last.decode().strip().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["code"]) == ("error", 502)


async def test_tools_that_vllm_calls_itself_leave_the_request_to_d(concurrent: Deployment) -> None:
    concurrent.p.behaviour = proxy_behaviours.never
    function = {"type": "function", "name": "f", "parameters": {}}
    for tools, paired in (
        ([function], True),
        ([{"type": "web_search_preview"}], False),
        ("x", False),
        ([1], False),
    ):
        body = body_of("/v1/responses", tools=tools)
        assert parse(json.dumps(body).encode(), "/v1/responses").wants_pair is paired
    body = body_of("/v1/responses", tools=[{"type": "code_interpreter"}])
    assert (await concurrent.post(body, "/v1/responses")).status == 200
    assert concurrent.p.requests == []
    assert concurrent.d.requests[0].body["request_id"] == f"resp_{concurrent.d.requests[0].request_id}"


async def test_tools_that_vllm_calls_itself_are_not_called_twice() -> None:
    """Unless the first D has not even been reached."""
    async with deployed("concurrent", decode=2) as deployment:
        (first, other), release = deployment.decodes, asyncio.Event()
        known = deployment.known(first)

        def ask() -> asyncio.Task[aiohttp.ClientResponse]:
            known.take_turn(-(1 << 31))
            body = body_of("/v1/responses", tools=[{"type": "mcp", "server_label": "shop"}])
            return asyncio.create_task(deployment.post(body, "/v1/responses"))

        for first.behaviour, status in (
            (proxy_behaviours.answer_error(500), 500),
            (proxy_behaviours.dies, 502),
            (proxy_behaviours.after(release, proxy_behaviours.answer_json), 200),
        ):
            release.clear()
            before, asking = len(first.requests), ask()
            await eventually(lambda: len(first.requests) > before)  # noqa: B023
            deployment.registry.drain(known, drained=True)
            deployment.proxy.move_away([known])
            await asyncio.sleep(0.01)
            release.set()
            assert (await asking).status == status
            deployment.registry.drain(known, drained=False)
        assert not other.requests
        first.kill()
        assert (await ask()).status == 200 and len(other.requests) == 1


# Responses that go on with one before, which a single D has.


PATH = "/v1/responses"


class Store:
    """What vLLM does with an instance's responses, by its ids."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    async def __call__(self, request: web.Request, seen: proxy_behaviours.Seen) -> web.StreamResponse:
        body = seen.body
        previous = body.get("previous_response_id")
        if previous is not None and previous not in self.made:
            why = {"message": f"Response with id '{previous}' not found.", "type": "X", "code": 404}
            return web.json_response({"error": why}, status=404)
        answer = {
            "id": body["request_id"],
            "object": "response",
            "status": "completed",
            "output": [*self.made.get(previous, []), body["input"]],
            "previous_response_id": previous,
        }
        if body.get("store", True):
            self.made[body["request_id"]] = answer["output"]
        if not body.get("stream"):
            return web.json_response(answer)
        response = await proxy_behaviours.event_stream(request)
        for name in ("response.created", "response.output_text.delta", "response.completed"):
            event = {"type": name, "response": answer, "delta": "x"}
            await response.write(f"event: {name}\ndata: {json.dumps(event)}\n\n".encode())
        return response


@asynccontextmanager
async def stores(dispatch: Dispatch, decode: int, **more: Any) -> AsyncIterator[Deployment]:
    async with deployed(dispatch, prefill=1, decode=decode, **more) as deployment:
        for each in deployment.decodes:
            each.behaviour = Store()
        yield deployment


async def respond(deployment: Deployment, text: str, previous: str | None = None, **more: Any) -> Any:
    body = {"model": "tiny", "input": text, "previous_response_id": previous, **more}
    answer = await deployment.post(body, PATH)
    said = await answer.text()
    assert answer.status == 200, said
    assert "_addr_" not in said
    if not more.get("stream"):
        return json.loads(said)
    shown = [json.loads(line[6:])["response"] for line in said.split("\n") if line.startswith("data: ")]
    assert len(shown) == 3 and shown[0] == shown[2]
    return shown[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_at_the_d_that_has_it(dispatch: Dispatch, stream: bool) -> None:
    async with stores(dispatch, decode=3) as deployment:
        said: dict[str, Any] = {}
        for turn in range(4):
            for who in "abc":
                before = said.get(who, {"id": None, "output": []})
                said[who] = answer = await respond(deployment, f"{who}{turn}", before["id"], stream=stream)
                assert answer["output"] == [f"{who}{each}" for each in range(turn + 1)]
                assert answer["previous_response_id"] == before["id"]
        assert len(deployment.p.requests) == 3, "of those that go on with one P does not know the prompt"
        assert deployment.proxy.counters.decode_alone == 0, "which costs no place of D's share for prompts"


async def test_it_is_said_why_one_cannot_go_on(dispatch: Dispatch) -> None:
    async with stores(dispatch, decode=2) as deployment:
        first = (await respond(deployment, "a"))["id"]
        body = {"model": "tiny", "input": "b"}
        why = await deployment.refusal(400, {**body, "previous_response_id": "resp_" + "0" * 32}, PATH)
        assert "not found" in why and "this proxy has not passed it on" in why
        (holder,) = (each for each in deployment.decodes if each.requests)
        known = deployment.known(holder)
        known.drained = True
        why = await deployment.refusal(503, {**body, "previous_response_id": first}, PATH)
        assert why.startswith("The decode instance that has the previous response is not ready.")
        del deployment.registry._instances[known.key]  # as if its pings had been lost for a while
        await deployment.ready(1, 2)
        await deployment.serves(1, {**body, "previous_response_id": first}, PATH)
        await deployment.goodbye(holder)
        why = await deployment.refusal(400, {**body, "previous_response_id": first}, PATH)
        assert first in why and "is gone" in why
        (other,) = (each for each in deployment.decodes if each is not holder)
        assert not other.requests, "it could only have said that it does not know it"


async def test_what_was_not_stored_is_not_looked_for(dispatch: Dispatch) -> None:
    """A vLLM that stores nothing says so by the client's id."""
    async with stores(dispatch, decode=1) as deployment:
        first = (await respond(deployment, "a"))["id"]
        unstored = (await respond(deployment, "a", store=False))["id"]
        body = {"model": "tiny", "input": "b", "previous_response_id": unstored}
        assert "not found" in await deployment.refusal(400, body, PATH)
        deployment.d.behaviour = Store()
        assert f"'{first}' not found" in await deployment.refusal(
            404, body | {"previous_response_id": first}, PATH
        )


@pytest.mark.parametrize("background", [True, "true", 1])
async def test_nothing_is_answered_in_the_background(dispatch: Dispatch, background: Any) -> None:
    """It could not be fetched."""
    async with stores(dispatch, decode=1) as deployment:
        body = {"model": "tiny", "input": "b"}
        why = await deployment.refusal(400, {**body, "background": background}, PATH)
        assert "`background` is not supported" in why
        assert not deployment.p.requests and not deployment.d.requests
        await deployment.serves(1, {**body, "background": False}, PATH)


def test_the_oldest_are_forgotten() -> None:
    registry = Registry()
    decode, stored = join(registry, ping("D")), StoredResponses(registry, most=2)
    for number in range(3):
        stored.note(f"resp_{number}", decode, f"resp_at_d_{number}")
    assert stored.find("resp_2") == (decode, "resp_at_d_2")
    with pytest.raises(ProxyError, match="'resp_0' not found"):
        stored.find("resp_0")


def cut(text: bytes, size: int) -> Iterator[bytes]:
    yield from (text[at : at + size] for at in range(0, len(text), size))


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_both_ids_are_replaced_wherever_the_answer_is_cut(size: int) -> None:
    ids = {"the new one's id, which is long": "new", "id of the previous": "before"}
    (old, new), previous = ids.items()
    scrubber = Scrubber(Choice(None, join(Registry(), ping("D"))), old, new, previous)
    text = "".join(f"{word} {old} {previous[0]}{old} {previous[0]}" for word in "abc")
    watch = AnswerFilter(PATH, scrubber, streamed=False)
    got = b"".join(watch.feed(piece) for piece in cut(text.encode(), size)) + watch.flush()
    assert got.decode() == text.replace(old, new).replace(*previous)
    assert filter_of(PATH).feed(b"x") == b""


# Usage: of cached tokens it says what P's prefix cache had, and not what D got from P.


PROMPT, ANSWER = 200, 7
REPEATED = {"usage": {"input_tokens_details": {"cached_tokens": 1}, "cache_read_input_tokens": 1}}
each_path = pytest.mark.parametrize("path", sorted(PAIRED))


def usage(path: str, cached: int | None) -> dict[str, Any]:
    """As vLLM writes it; None: without --enable-prompt-tokens-details."""
    if path == "/v1/messages":
        read = {} if cached is None else {"cache_creation_input_tokens": 3, "cache_read_input_tokens": cached}
        rest = PROMPT if cached is None else PROMPT - 3 - cached
        return {"input_tokens": rest, "output_tokens": ANSWER, **read}
    if path == "/v1/responses":
        details = {"cached_tokens": cached or 0, "cache_write_tokens": 3, "cached_tokens_per_turn": []}
        return {"input_tokens": PROMPT, "input_tokens_details": details, "output_tokens": ANSWER}
    counts = {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": {"image": 5}}
    details = None if cached is None else counts
    return {"prompt_tokens": PROMPT, "completion_tokens": ANSWER, "prompt_tokens_details": details}


def as_told(counts: Any, stream: bool) -> Any:
    """In a stream vLLM leaves out what is null."""
    if not stream or not isinstance(counts, dict):
        return counts
    return {name: as_told(count, stream) for name, count in counts.items() if count is not None}


def answers_with(counts: dict[str, Any]) -> proxy_behaviours.Behaviour:
    """An answer that repeats what looks like a usage, and is none."""

    async def behaviour(request: web.Request, seen: proxy_behaviours.Seen) -> web.StreamResponse:
        text = json.dumps(usage(request.path, 1))
        answer = {"object": "response", "tools": [REPEATED], "choices": [{"text": text}], "usage": counts}
        answer |= {"type": "message", "stop_reason": "x"} if request.path == "/v1/messages" else {}
        if not seen.body.get("stream"):
            return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
        response = await proxy_behaviours.event_stream(request)
        answer["usage"] = as_told(counts, True)
        if request.path == "/v1/responses":
            answer = {"type": "response.completed", "response": answer}
        for each in ({"choices": [{"text": text}]}, answer):
            await response.write(b"data: " + msgspec.json.encode(each) + b"\n\n")
        return response

    return behaviour


async def ask(deployment: Deployment, path: str, stream: bool) -> Any:
    answer = await deployment.post(body_of(path, stream=stream), path)
    said = await answer.text()
    assert answer.status == 200, said
    whole = json.loads(said.strip().rpartition("data: ")[2] if stream else said)
    return whole.get("response", whole)


@each_path
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_what_p_says(either: Deployment, path: str, stream: bool) -> None:
    """Without the option, on P or on D, nothing is added."""
    for on_p, on_d in ((64, PROMPT - 1), (None, 64), (64, None), (None, None)):
        ps, ds = usage(path, on_p), usage(path, on_d)
        either.p.behaviour, either.d.behaviour = answers_with(ps), answers_with(ds)
        answer = await ask(either, path, stream)
        is_ps = path == "/v1/responses" or None not in (on_p, on_d)
        assert answer["usage"] == as_told(ps if is_ps else ds, stream)
        assert answer["tools"] == [REPEATED]


@each_path
async def test_what_d_has_done_alone_d_counts(concurrent: Deployment, path: str) -> None:
    await concurrent.goodbye(concurrent.p)
    concurrent.d.behaviour = answers_with(usage(path, 32))
    assert (await ask(concurrent, path, True))["usage"] == as_told(usage(path, 32), True)


async def test_a_p_that_has_not_answered_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """D has all of the prompt in its own cache: then its counts are right."""
    path = "/v1/completions"
    prefilled: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    data = msgspec.json.encode({"usage": usage(path, 128)})
    monkeypatch.setattr("p2pkv_proxy.prompt_usage._WAIT_SECONDS", 0.01)
    assert await with_ps_counts(data, path, prefilled, streamed=False) == data
    monkeypatch.setattr("p2pkv_proxy.prompt_usage._WAIT_SECONDS", 1000.0)
    made = asyncio.create_task(with_ps_counts(data, path, prefilled, streamed=False))
    await asyncio.sleep(0)
    prefilled.set_result(b'{"usage":{"prompt_tokens_details":{"cached_tokens":8}}}')
    assert json.loads(await made)["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


@pytest.mark.parametrize("answer", [None, b"", b"x", b"[]", b'{"usage":null}', b'{"usage":{}}'])
async def test_a_p_that_says_nothing_of_it_changes_nothing(answer: bytes | None) -> None:
    prefilled: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    prefilled.set_result(answer)
    data = b'{"usage":{"cache_read_input_tokens":5}}'
    assert await with_ps_counts(data, "/v1/messages", prefilled, streamed=False) == data


# GET /v1/models while instances do not answer; models that are loaded and unloaded while they serve.


async def listed(deployment: Deployment, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    status, page = await deployment.get("/v1/models", headers)
    return status, [model["id"] for model in page["data"]] if status == 200 else page


async def two(deployment: Deployment, **options: Any) -> None:
    """Two D's, each with an adapter of its own, which have been listed once."""
    for number, name in enumerate(("one", "other"), start=1):
        await deployment.add("D", models=("tiny", name), **options)
        await deployment.ready(prefill=0, decode=number)  # in this order
    await deployment.add("P", models=("a P's own",))
    await deployment.ready(prefill=1, decode=2)
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr("p2pkv_proxy.models._OTHERS_SECONDS", 1000.0)
        assert await listed(deployment, options.get("key", "")) == (200, ["tiny", "other", "one"])


@pytest.mark.parametrize("frozen", [0, 1])
async def test_one_that_is_frozen_holds_up_nothing_and_its_models_are_known(
    lonely: Deployment, frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 1000.0)
    await two(lonely)
    lonely.decodes[frozen].frozen = True
    lonely.decodes[1 - frozen].models = ("tiny", "new")
    expected = ["tiny", "new", "one"] if frozen == 0 else ["tiny", "other", "new"]
    assert await listed(lonely) == (200, expected)


async def test_what_is_remembered_is_for_those_who_show_the_key(
    lonely: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 1000.0)
    await two(lonely, key="a key")
    assert (await listed(lonely))[0] == 401
    lonely.decodes[0].frozen = True
    assert (await listed(lonely, "another key"))[0] == 401
    assert await listed(lonely, "a key") == (200, ["tiny", "other", "one"])


async def test_a_list_that_only_a_client_s_key_opens_tells_the_context(lonely: Deployment) -> None:
    """Without that a chat without a bound does not go on elsewhere, and its first token is never P's."""
    known = lonely.known(await lonely.newcomer("D", key="a key", context=4096))
    await lonely.serves(1, headers={"Authorization": "Bearer a key"})
    await eventually(lambda: known.context == 4096)


async def test_if_none_answers_it_is_a_502(lonely: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    await two(lonely)
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 0.3)
    for each in lonely.decodes:
        each.frozen = True
    status, page = await listed(lonely)
    assert (status, page["error"]["message"]) == (502, "No decode instance listed its models.")


async def test_of_many_who_ask_at_once_some_wait(lonely: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a connection to every D: they could take all that the proxy may have."""
    await two(lonely)
    lonely.decodes[0].frozen, before = True, lonely.decodes[0].lists
    monkeypatch.setattr("p2pkv_proxy.models._OTHERS_SECONDS", 1000.0)
    asking = [asyncio.create_task(listed(lonely)) for _ in range(40)]
    await eventually(lambda: lonely.decodes[1].lists >= before + 16 and len(lonely.proxy.active) == 40)
    await asyncio.sleep(0.1)
    assert lonely.decodes[0].lists == before + 16
    for each in asking:
        each.cancel()


async def loads(deployment: Deployment, name: str, *instances: FakeInstance) -> None:
    """An adapter, at run time; a server that does not have it answers 404, as vLLM does."""
    for each in deployment.instances:
        each.behaviour = with_adapters
    for each in instances:
        each.models += (name,)


async def with_adapters(request: web.Request, seen: proxy_behaviours.Seen) -> web.StreamResponse:
    serves = request.app[FAKE].models
    known = seen.body["model"] in serves
    return await (
        proxy_behaviours.answer_json if known else proxy_behaviours.answer_error(404, "no such model")
    )(request, seen)


@pytest.fixture
async def unlike(dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Deployment]:
    """Two P's and two D's; one of each has an adapter from the start."""
    monkeypatch.setattr("p2pkv_proxy.models._LOOK_SECONDS", 0.05)
    async with deployed(dispatch) as deployment:
        for role in ("P", "D", "P", "D"):
            more = ("early",) if len(deployment.instances) > 1 else ()
            await deployment.add(role, models=("tiny", *more))
        await deployment.ready(2, 2)
        yield deployment


async def test_what_the_list_shows_is_served(unlike: Deployment) -> None:
    """An adapter that is loaded at run time, where instances list different names."""
    await loads(unlike, "late", unlike.prefills[0], unlike.decodes[0])
    assert "late" in (await listed(unlike))[1]
    await unlike.serves(4, model="late")
    assert len(unlike.prefills[0].requests) == len(unlike.decodes[0].requests) == 4
    assert not unlike.prefills[1].requests and not unlike.decodes[1].requests
    await unlike.serves(2, model="early")
    assert len(unlike.decodes[1].requests) == 2


async def test_an_adapter_that_is_unloaded_at_one_is_served_by_the_other(unlike: Deployment) -> None:
    await loads(unlike, "late", *unlike.instances)
    await unlike.serves(4, model="late")
    for each in (unlike.prefills[0], unlike.decodes[0]):
        each.models = ("tiny",)
    gone = unlike.known(unlike.decodes[0])
    while "late" in gone.names:
        async with await unlike.post(model="late") as answer:
            assert answer.status in (200, 404)
        await quiet(unlike)
    await unlike.serves(4, model="late")


async def test_a_p_that_has_an_adapter_no_more_is_not_asked_for_it_again(
    unlike: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others that have it would show up its refusals as failures."""
    monkeypatch.setattr("p2pkv_proxy.attempt._VERDICT_SECONDS", 0.01)
    await loads(unlike, "late", *unlike.instances)
    await unlike.serves(4, model="late")
    for each in unlike.prefills:
        each.models = ("tiny",)
    all_do(unlike.decodes, proxy_behaviours.with_a_p(proxy_behaviours.never, with_adapters))
    await unlike.serves(1, model="late")
    await eventually(lambda: not any("late" in unlike.known(each).names for each in unlike.prefills))


async def test_a_name_that_nobody_has_is_looked_for_once_for_all_who_ask(unlike: Deployment) -> None:
    await loads(unlike, "late")
    for _ in range(2):
        before = sum(each.lists for each in unlike.instances)
        whys = await asyncio.gather(*(unlike.refusal(404, model="nobody") for _ in range(20)))
        assert set(whys) == {"The model `nobody` does not exist; served here: early, tiny."}
        asked = sum(each.lists for each in unlike.instances) - before
        assert 4 <= asked <= 8, "four instances, at most twice"


async def test_the_lists_of_a_large_fleet_do_not_hold_the_proxy_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Url(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Url.compared += 1
            return str.__eq__(self, other)

    _, pool = fleet(*[("D", {"model": "m"})] * 100)
    for each in pool:
        each.url = Url(each.url)
    listed = {each: Reply(200, {}, b'{"data":[{"id":"m","max_model_len":9}]}') for each in pool}
    lists = ModelLists(None)
    monkeypatch.setattr(lists, "_replies_of", AsyncMock(return_value=listed))
    await lists._look(None, lambda: pool)
    assert {each.context for each in pool} == {9} and Url.compared < 300


async def test_who_asks_leaves_before_the_lists(unlike: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.models._LIST_SECONDS", 0.2)
    for each in unlike.instances:
        each.frozen = True
    asking = asyncio.create_task(unlike.post(model="late"))
    await eventually(lambda: len(unlike.proxy.active) == 1)
    asking.cancel()
    await eventually(lambda: len(unlike.proxy.active) == 0)
    for each in unlike.instances:
        each.frozen = False
