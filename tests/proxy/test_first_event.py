"""A stream that says who speaks, and then fails, has not begun: the request is tried elsewhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from proxy_behaviours import DONE, Behaviour, answer_json, stream_of
from proxy_fakes import Deployment, asked, deployed, take_turns

from p2pkv_proxy.upstream import first_content, is_servers_error

CHAT = "/v1/chat/completions"
STREAM = {"messages": [], "prompt": "x", "stream": True}


def data(message: Any) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def chunk(**choice: Any) -> bytes:
    return data({"id": "chatcmpl-x", "choices": [{"index": 0, "finish_reason": None, **choice}]})


ROLE = chunk(delta={"role": "assistant", "content": ""})
TOKEN = chunk(delta={"content": "hi"})
ABORT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'


def error(code: int, message: str = "Internal server error") -> bytes:
    return data({"error": {"message": message, "type": "X", "param": None, "code": code}})


def streams(*events: bytes) -> Behaviour:
    return stream_of(*(step for each in events for step in (each, lambda *_: asyncio.sleep(0.01))))


@pytest.mark.parametrize(
    "events",
    [(error(500), DONE), (ROLE, error(500), DONE), (ROLE, ABORT, DONE), (ROLE,), (ROLE[:20], ROLE[20:])],
)
async def test_another_d_is_asked(events: tuple[bytes, ...]) -> None:
    async with deployed("concurrent", prefill=1, decode=2) as deployment:
        take_turns(deployment.decodes, streams(*events), streams(ROLE, TOKEN, DONE))
        response = await deployment.post(STREAM, CHAT)
        assert (response.status, await response.read()) == (200, ROLE + TOKEN + DONE)
        assert asked(deployment.decodes) == [1, 1]


async def test_with_nobody_else_it_is_a_502(either: Deployment) -> None:
    either.d.behaviour = streams(ROLE, error(500), DONE)
    message = await either.refusal(502, STREAM, CHAT)
    assert message.startswith("The decode instance failed with an internal error; see its log.")
    either.d.behaviour = streams(ROLE, error(500, "no room for 10 blocks"), DONE)
    message = (await (await either.post(STREAM, CHAT)).json())["error"]["message"]
    assert message == (
        "The decode instance answered with an error before its first token: no room for 10 blocks"
    )


@pytest.mark.parametrize("events", [(error(400), DONE), (ROLE, TOKEN, error(500), DONE)])
async def test_anything_else_reaches_the_client_as_is(either: Deployment, events: tuple[bytes, ...]) -> None:
    either.d.behaviour = streams(*events)
    response = await either.post(STREAM, CHAT)
    assert (response.status, await response.read()) == (200, b"".join(events))
    either.d.behaviour = answer_json
    assert (await either.post()).status == 200


@pytest.mark.parametrize(
    "events",
    [
        TOKEN,
        ROLE + TOKEN,
        DONE,
        b"data: \xff\n",
        b"data: 7\r\n\r\n",
        b"data: null\n\n",
        data({"choices": []}),
        data({"choices": 7}),
        data({"choices": [7]}),
        data({"choices": [{"delta": {"role": "assistant"}}, {"delta": {"content": "hi"}}]}),
        chunk(delta=None),
        chunk(delta={"content": ""}),
        chunk(delta={"role": "assistant", "content": "x"}),
        chunk(delta={"role": "assistant", "tool_calls": [{}]}),
        chunk(delta={"role": "assistant"}, finish_reason="stop"),
        chunk(text=""),
        data({"error": "no"}),
    ],
)
def test_what_begins_an_answer(events: bytes) -> None:
    event = first_content(events)
    assert event is not None and not is_servers_error(event)


def test_what_does_not_yet_and_what_fails_instead() -> None:
    for events in (b"", b": waiting\n\n", ROLE, ROLE * 3, ROLE + TOKEN[:-2], TOKEN[:-2]):
        assert first_content(events) is None, events
    for events in (error(500), error(503), ROLE + error(500), b": x\n\n" + error(500)):
        assert is_servers_error(first_content(events)), events
