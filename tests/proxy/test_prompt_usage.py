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
from p2pkv_proxy.prompt_usage import PromptUsage

PROMPT, ANSWER = 200, 7
each_path = pytest.mark.parametrize("path", sorted(PAIRED))


def usage(path: str, cached: int | None) -> dict[str, Any]:
    """As vLLM writes it; None: without --enable-prompt-tokens-details."""
    if path == "/v1/messages":
        read = {} if cached is None else {"cache_creation_input_tokens": 3, "cache_read_input_tokens": cached}
        return {
            "input_tokens": PROMPT - 3 - (cached or 0) if read else PROMPT,
            "output_tokens": ANSWER,
            **read,
        }
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
        last = (
            {"type": "response.completed", "response": answer} if request.path == "/v1/responses" else answer
        )
        for each in ({"choices": [{"text": text}]}, last):
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
    counts = PromptUsage(path)
    data = json.dumps({"usage": usage(path, 128)}).encode().replace(b": ", b":")
    assert counts.concerns(data) and not counts.concerns(b'{"usage":null}')
    monkeypatch.setattr("p2pkv_proxy.prompt_usage._WAIT_SECONDS", 0.01)
    assert await counts.in_place_of_ds(data, streamed=False) == data
    monkeypatch.setattr("p2pkv_proxy.prompt_usage._WAIT_SECONDS", 1000.0)
    made = asyncio.create_task(counts.in_place_of_ds(data, streamed=False))
    await asyncio.sleep(0)
    counts.know(b'{"usage":{"prompt_tokens_details":{"cached_tokens":8}}}')
    assert json.loads(await made)["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


@pytest.mark.parametrize("answer", [None, b"", b"x", b"[]", b'{"usage":null}', b'{"usage":{}}'])
async def test_a_p_that_says_nothing_of_it_changes_nothing(answer: bytes | None) -> None:
    counts = PromptUsage("/v1/messages")
    counts.know(answer)
    data = b'{"usage":{"cache_read_input_tokens":5}}'
    assert await counts.in_place_of_ds(data, streamed=False) == data
