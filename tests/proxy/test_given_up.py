"""What a vLLM gives up, told to stop, it calls a success; the client gets an error, or another's answer."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest
from aiohttp import web
from proxy_behaviours import (
    DONE,
    Behaviour,
    Seen,
    after,
    answers,
    event,
    forever,
    given_up,
    stops,
    stops_before_a_token,
    stream_of,
)
from proxy_fakes import Deployment, all_do, asked, deployed, filter_of, take_turns

from p2pkv.pairing import find_pair

ABORT = b'"finish_reason":"abort"'
MESSAGE = "The decode instance was stopped before its answer was complete."


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "behaviour",
    [
        stops,
        stops_before_a_token,
        stream_of(DONE),
        stream_of(b'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n', DONE),
        stream_of(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n', DONE),
    ],
    ids=["whole", "abort", "nothing", "usage", "role"],
)
async def test_with_nobody_else_it_is_a_502(either: Deployment, path: str, behaviour: Behaviour) -> None:
    """vLLM sends no choice for a request that it gives up before its first token."""
    either.d.behaviour = behaviour
    body = {"prompt": "x", "messages": [], "stream": behaviour is not stops}
    assert await either.refusal(502, body, path) == MESSAGE


def after_p(deployment: Deployment, behaviour: Behaviour) -> Behaviour:
    """D, as it hears from a P that gives up."""
    return after(
        lambda: any(seen.answered for each in deployment.prefills for seen in each.requests), behaviour
    )


async def test_where_d_is_not_asked_yet_it_is_ps_failure() -> None:
    async with deployed("sequential", 1, 1, alone_share=0) as sequential:
        sequential.p.behaviour = stops
        said = "The prefill instance failed: it was stopped before its answer was complete."
        assert await sequential.refusal(502) == said
        assert sequential.d.requests == []


async def test_in_the_stream_it_is_an_error_event(either: Deployment) -> None:
    """The tokens that there were arrive, the end that is none does not."""

    def end(_: web.Request, seen: Seen) -> bytes:
        return event(seen, "second") + b"data: " + given_up(seen) + b"\n\n" + DONE

    relayed = asyncio.Event()
    either.d.behaviour = stream_of("first", relayed, end, forever)
    response = await either.begin()
    relayed.set()
    rest = await response.content.read()
    assert ABORT not in rest and b"[DONE]" not in rest
    second, *_, last, nothing = rest.split(b"\n\n")
    assert b"second" in second and nothing == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == MESSAGE


# What vLLM writes when it gives up, and what only looks like it.

COMPLETIONS, CHAT, MESSAGES, RESPONSES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
)
ECHO = {"finish_reason": "abort", "status": "cancelled", "stop_reason": None, "type": "message_delta"}
"""What a client may have an answer repeat."""


def choice(reason: str | None, **more: Any) -> dict[str, Any]:
    return {"object": "x", "choices": [{"index": 0, "finish_reason": reason, **more}]}


def message(reason: str | None, **more: Any) -> dict[str, Any]:
    shown = {} if reason is None else {"stop_reason": reason}
    return {"id": "msg", "type": "message", "role": "assistant", "content": [], **shown, **more}


def answer(status: str, tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"object": "response", "status": status, "usage": {"output_tokens": tokens}, **more}


def delta(reason: str | None) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": {}}


def tool_use(**inputs: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t", "name": "f", "input": inputs}


GIVEN_UP: list[tuple[str, Any]] = [
    (COMPLETIONS, choice("abort", text="hel")),
    (COMPLETIONS, {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}),
    (CHAT, {"choices": [{"finish_reason": "stop", "stop_reason": 128009}, {"finish_reason": "abort"}]}),
    (CHAT, choice("abort", message={"content": "hel"})),
    (MESSAGES, message(None)),
    (RESPONSES, answer("cancelled")),
    (RESPONSES, answer("completed", tokens=0, output=[])),
    (RESPONSES, answer("incomplete", tokens=0, output=[])),
]
COMPLETE: list[tuple[str, Any]] = [
    (COMPLETIONS, choice("stop", text=ABORT.decode())),
    (COMPLETIONS, choice("length") | {"kv_transfer_params": ECHO}),
    (CHAT, choice("tool_calls", message={"tool_calls": [{"function": {"arguments": json.dumps(ECHO)}}]})),
    (CHAT, choice("stop", logprobs={"content": [{"token": "abort"}]})),
    (MESSAGES, message("tool_use") | {"content": [tool_use(**ECHO, choices=[ECHO])]}),
    (RESPONSES, answer("completed", metadata={"finish_reason": "abort"}, choices=[ECHO])),
    (RESPONSES, answer("incomplete", tools=[{"type": "function", "parameters": ECHO | answer("cancelled")}])),
    (RESPONSES, {"object": "response", "status": "queued", "usage": None}),
    (RESPONSES, [ECHO]),
    ("/v1/embeddings", choice("abort")),
    ("/tokenize", choice("abort") | answer("cancelled")),
]
COMPACT: dict[str, Any] = {"separators": (",", ":")}


GIVEN_UP_EVENTS: list[tuple[str, Any]] = [
    (COMPLETIONS, choice("abort", text="")),
    (CHAT, choice("abort", delta={})),
    (MESSAGES, delta(None)),
    (RESPONSES, {"type": "response.completed", "response": answer("cancelled")}),
    (RESPONSES, {"type": "response.completed", "response": answer("completed", tokens=0)}),
]
OTHER_EVENTS: list[tuple[str, Any]] = [
    (COMPLETIONS, choice(None, text=ABORT.decode())),
    (COMPLETIONS, {"text": "", "finish_reason": "abort"}),
    (CHAT, choice(None, delta={"tool_calls": [{"function": {"arguments": json.dumps(ECHO)}}]})),
    (MESSAGES, {"type": "message_start", "message": message(None)}),
    (MESSAGES, {"type": "content_block_start", "content_block": tool_use(**ECHO)}),
    (MESSAGES, delta("end_turn")),
    (RESPONSES, {"type": "response.created", "response": answer("in_progress", tokens=0, metadata=ECHO)}),
    (RESPONSES, {"type": "response.completed", "response": answer("completed", metadata=ECHO)}),
]


def as_events(path: str, *events: Any) -> bytes:
    named = path in (MESSAGES, RESPONSES)
    return b"".join(
        (f"event: {each['type']}\n" if named else "").encode()
        + b"data: "
        + json.dumps(each, **COMPACT).encode()
        + b"\n\n"
        for each in events
    )


def fed(path: str, chunks: Iterable[bytes], *, streamed: bool = True) -> tuple[bytes, bool]:
    watch = filter_of(path, streamed=streamed)
    passed = b"".join([watch.feed(chunk) for chunk in chunks])
    return passed + watch.flush(), watch.given_up


@pytest.mark.parametrize(("path", "event"), GIVEN_UP_EVENTS)
def test_the_event_that_gives_up_is_found_however_the_bytes_are_cut(path: str, event: Any) -> None:
    before = as_events(path, *(each for where, each in OTHER_EVENTS if where == path))
    end = as_events(path, event) + b"data: [DONE]\n\n"
    whole = before + end
    assert fed(path, [whole]) == (before, True)
    assert fed(path, [before, end]) == (before, True)
    cuts = [[whole[:cut], whole[cut:]] for cut in range(len(whole))]
    for chunks in (*cuts, [bytes([each]) for each in whole]):
        passed, given_up = fed(path, chunks)
        assert given_up
        assert passed.startswith(before), "what came before it arrives"
        assert whole.startswith(passed) and len(passed) < len(before + as_events(path, event))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES, "/v1/embeddings"])
def test_what_does_not_give_up_passes_as_it_is(path: str) -> None:
    events = as_events(path, *(each for where, each in OTHER_EVENTS if where == path)) + b"data: [DONE]\n\n"
    for length in (1, 7, 100, len(events)):
        chunks = [events[at : at + length] for at in range(0, len(events), length)]
        assert fed(path, chunks) == (events, False)


def test_an_event_waits_for_its_end() -> None:
    watch = filter_of(COMPLETIONS)
    assert watch.feed(b'data: {"choices":[') == b""
    assert watch.feed(b'{"text":"","logprobs":{"tokens":["abort"') == b""
    whole = b'data: {"choices":[{"text":"","logprobs":{"tokens":["abort"]}}]}\n\n'
    assert watch.feed(b']}}]}\n\ndata: {"cho') == whole
    assert watch.feed(b'["abort"') == watch.feed(b" and more") == b""
    assert watch.flush() == b'data: {"cho["abort" and more', "the stream ended there"


def test_an_event_without_end_is_not_kept() -> None:
    watch = filter_of(COMPLETIONS)
    sent = [b'data: {"x":["abort"'] + [b"y" * 100_000] * 50
    assert b"".join([watch.feed(chunk) for chunk in sent]) + watch.flush() == b"".join(sent)
    for chunk in sent:
        watch.feed(chunk)
        assert len(watch._rest) <= 2 << 20


def test_in_a_json_that_is_too_long_to_be_held_it_is_found_too() -> None:
    end = json.dumps(choice("abort"), **COMPACT).encode()
    for cut in range(len(end)):
        passed, given_up = fed(CHAT, [b"x" * 1000, end[:cut], end[cut:]], streamed=False)
        assert given_up and ABORT not in passed
    for path in (MESSAGES, RESPONSES, "/v1/embeddings"):
        assert fed(path, [end], streamed=False) == (end, False)


def written(path: str, body: Any, *, streamed: bool) -> bytes:
    return as_events(path, body) if streamed else json.dumps(body, **COMPACT).encode()


def says(path: str, body: Any, *, streamed: bool) -> Behaviour:
    raw = written(path, body, streamed=streamed)
    if streamed:
        return stream_of(raw)
    return answers(lambda _: web.Response(body=raw, content_type="application/json"))


def complete(path: str) -> Behaviour:
    """A P that has computed what it was asked."""
    return says(path, next(whole for where, whole in COMPLETE if where == path), streamed=False)


WHOLE = [(path, body, False) for path, body in COMPLETE]
EVENTS = [
    (path, body, True)
    for path, body in OTHER_EVENTS
    if body.get("type") not in ("message_start", "content_block_start", "response.created")
]


@pytest.mark.parametrize(("path", "body", "streamed"), WHOLE + EVENTS)
async def test_an_answer_that_repeats_its_request_pauses_no_instance(
    either: Deployment, path: str, body: Any, streamed: bool
) -> None:
    either.p.behaviour, either.d.behaviour = complete(path), says(path, body, streamed=streamed)
    for _ in range(6):
        response = await either.post({"model": "tiny", "input": "x", "stream": streamed}, path)
        assert response.status == 200
        assert await response.read() == written(path, body, streamed=streamed)
    assert all(each.breaker.closed for each in either.everyone())
    assert either.proxy.counters.retried == either.proxy.counters.breakers_opened == 0


@pytest.mark.parametrize(
    ("path", "body", "streamed"),
    [(*each, False) for each in GIVEN_UP] + [(*each, True) for each in GIVEN_UP_EVENTS],
)
async def test_what_d_gives_up_is_asked_of_another(path: str, body: Any, streamed: bool) -> None:
    good = next(each for where, each in (OTHER_EVENTS[::-1] if streamed else COMPLETE) if where == path)
    async with deployed("concurrent", 1, 2) as deployment:
        deployment.p.behaviour = complete(path)
        take_turns(deployment.decodes, *(says(path, each, streamed=streamed) for each in (body, good)))
        response = await deployment.post({"model": "tiny", "stream": streamed}, path)
        assert response.status == 200
        assert await response.read() == written(path, good, streamed=streamed)
        assert asked(deployment.decodes) == [1, 1]


@pytest.mark.parametrize(("path", "body"), GIVEN_UP)
async def test_what_p_gives_up_is_ps_failure(path: str, body: Any) -> None:
    """In the other spelling of JSON, with spaces."""
    async with deployed("sequential", 2, 1) as deployment:
        all_do(deployment.prefills, answers(lambda _: web.json_response(body)))
        deployment.d.behaviour = complete(path)
        assert (await deployment.post({"model": "tiny"}, path)).status == 200
        assert [len(each.requests) for each in deployment.prefills] == [1, 1], "the other P is asked, too"
        assert find_pair(deployment.d.requests[0].request_id) is None, "and then D alone"
