"""The endpoints beside completions and chat: which instances they reach, with which body and id."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from proxy_behaviours import Step, answer_error, answer_json, answers, die, dies, never, stream_of
from proxy_fakes import Deployment, all_do, deployed, error_of

from p2pkv.pairing import find_pair
from p2pkv_proxy.bodies import parse
from p2pkv_proxy.http import PAIRED, SINGLE
from p2pkv_proxy.limits import Limits

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
    concurrent.d.behaviour = answers(
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


async def test_another_instance_is_asked_if_the_first_fails() -> None:
    async with deployed("concurrent", decode=2) as deployment:
        all_do(deployment.decodes, dies)
        deployment.decodes[1].behaviour = answer_json
        await deployment.serves(2, body_of("/tokenize"), "/tokenize")
        bad, good = deployment.decodes
        assert len(good.requests) == 2 and bad.requests


@pytest.mark.parametrize("path", sorted(PAIRED | SINGLE))
async def test_errors_have_openais_form(path: str) -> None:
    async with deployed("concurrent", limits=Limits(alone_share=0.0, retries=0)) as deployment:
        answer = await deployment.post(body_of(path), path)
        assert answer.status == 503 and (await error_of(answer))["type"] == "service_unavailable_error"
        await deployment.add("D", behaviour=dies)
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
        deployment.d.behaviour = answer_error(404, "no such model")
        assert "no such model" in await deployment.refusal(404, body_of(path), path)


OPENINGS = {
    "/v1/messages": named("message_start", message={"content": []}),
    "/v1/responses": named("response.created", response={}) + named("response.in_progress", response={}),
}
WORDS = {
    "/v1/messages": named("content_block_delta", delta={"type": "text_delta", "text": "hi"}),
    "/v1/responses": named("response.output_text.delta", delta="hi"),
}


@pytest.mark.parametrize("failure", [die, named("error", error={"type": "internal_error", "message": "no"})])
@pytest.mark.parametrize("path", sorted(OPENINGS))
async def test_what_opens_an_answer_is_no_first_token(path: str, failure: Step) -> None:
    """A D that dies or fails after it is one that has not begun, and another one is asked."""
    async with deployed("concurrent", prefill=1, decode=2) as deployment:
        all_do(deployment.decodes, stream_of(OPENINGS[path], failure))
        deployment.decodes[0].behaviour = stream_of(OPENINGS[path] + WORDS[path])
        for _ in range(2):
            answer = await deployment.post(body_of(path, stream=True), path)
            assert answer.status == 200
            assert await answer.content.read() == OPENINGS[path] + WORDS[path]
        assert deployment.proxy.counters.retried >= 1


@pytest.mark.parametrize("path", sorted(OPENINGS))
async def test_an_error_in_a_stream_of_named_events_has_a_name(concurrent: Deployment, path: str) -> None:
    concurrent.d.behaviour = stream_of(OPENINGS[path] + WORDS[path], die)
    answer = await concurrent.post(body_of(path, stream=True), path)
    said = await answer.content.read()
    last = said.removeprefix(OPENINGS[path] + WORDS[path])
    name, data = last.decode().strip().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["code"]) == ("error", 502)


async def test_tools_that_vllm_calls_itself_leave_the_request_to_d(concurrent: Deployment) -> None:
    concurrent.p.behaviour = never
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


async def test_counts_are_by_endpoint(concurrent: Deployment) -> None:
    for path in sorted(PAIRED | SINGLE):
        assert (await concurrent.post(body_of(path), path)).status == 200
    text = await concurrent.text("/metrics")
    for path in PAIRED | SINGLE:
        assert f'p2pkv_proxy_requests_total{{endpoint="{path}",model="tiny",outcome="answered"}} 1.0' in text
