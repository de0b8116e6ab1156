"""What an answer's usage says of cached tokens is what P's prefix cache had, and not what D got from P."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from aiohttp import web
from proxy_behaviours import Behaviour, Seen, event_stream
from proxy_fakes import Deployment
from test_endpoints import body_of

from p2pkv_proxy.http import PAIRED
from p2pkv_proxy.prompt_usage import with_ps_counts

PROMPT, ANSWER = 200, 7
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
    details = None if cached is None else {"cached_tokens": cached, "multimodal_tokens": {"image": 5}}
    return {"prompt_tokens": PROMPT, "completion_tokens": ANSWER, "prompt_tokens_details": details}


def answers_with(counts: dict[str, Any]) -> Behaviour:
    """An answer that repeats what looks like a usage, and is none."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        text = json.dumps(usage(request.path, 1))
        repeated = {"usage": {"input_tokens_details": {"cached_tokens": 1}, "cache_read_input_tokens": 1}}
        answer = {"object": "response", "tools": [repeated], "choices": [{"text": text}], "usage": counts}
        answer |= {"type": "message", "stop_reason": "x"} if request.path == "/v1/messages" else {}
        if not seen.body.get("stream"):
            return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
        response = await event_stream(request)
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
    ps, ds = usage(path, 64), usage(path, PROMPT - 1)
    either.p.behaviour, either.d.behaviour = answers_with(ps), answers_with(ds)
    answer = await ask(either, path, stream)
    assert answer["usage"] == ps
    assert answer["tools"] == [
        {"usage": {"input_tokens_details": {"cached_tokens": 1}, "cache_read_input_tokens": 1}}
    ]


@each_path
@pytest.mark.parametrize("stream", [False, True])
async def test_without_the_option_nothing_is_added(either: Deployment, path: str, stream: bool) -> None:
    for on_p, on_d in ((None, 64), (64, None), (None, None)):
        either.p.behaviour = answers_with(usage(path, on_p))
        either.d.behaviour = answers_with(ds := usage(path, on_d))
        got = (await ask(either, path, stream))["usage"]
        assert got == (usage(path, on_p) if path == "/v1/responses" else ds)


@each_path
async def test_what_d_has_done_alone_d_counts(concurrent: Deployment, path: str) -> None:
    await concurrent.goodbye(concurrent.p)
    concurrent.d.behaviour = answers_with(usage(path, 32))
    assert (await ask(concurrent, path, True))["usage"] == usage(path, 32)


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
