"""What a vLLM gives up, told to stop, it calls a success; the client gets an error, or another's answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web
from proxy_behaviours import (
    Behaviour,
    Seen,
    answer_error,
    answer_json,
    completion,
    event,
    event_stream,
    given_up,
    stops,
    stops_before_a_token,
)
from proxy_fakes import Deployment, deployed, quiet, until

from proxy.admission import Limits
from proxy.attempt import Dispatch
from proxy.http import GIVEN_UP, GivenUpFilter

STREAM = {"prompt": "x", "stream": True}
MESSAGE = "The decode instance was stopped before its answer was complete."


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [False, True])
async def test_with_nobody_else_it_is_a_502(either: Deployment, streamed: bool) -> None:
    either.d.behaviour = stops_before_a_token if streamed else stops
    response = await either.post(STREAM if streamed else None)
    assert response.status == 502
    assert (await response.json())["error"]["message"] == MESSAGE
    await quiet(either)


def after_p(deployment: Deployment, behaviour: Behaviour) -> Behaviour:
    """D, as it hears from a P that gives up."""

    async def waits(request: web.Request, seen: Seen) -> web.StreamResponse:
        await until(lambda: any(seen.answered for each in deployment.prefills for seen in each.requests))
        return await behaviour(request, seen)

    return waits


@pytest.mark.asyncio
async def test_of_a_p_it_is_ds_affair(concurrent: Deployment) -> None:
    concurrent.p.behaviour, concurrent.d.behaviour = stops, after_p(concurrent, answer_json)
    response = await concurrent.post()
    assert response.status == 200 and (await response.json())["choices"] == [{"text": "hello"}]
    await quiet(concurrent)


@pytest.mark.asyncio
@pytest.mark.parametrize("alone", [True, False])
async def test_where_d_is_not_asked_yet_it_is_ps_failure(alone: bool) -> None:
    async with deployed("sequential", 1, 1, limits=Limits(alone_share=0.25 if alone else 0)) as sequential:
        sequential.p.behaviour = stops
        response = await sequential.post()
        assert len(sequential.d.requests) == alone
        assert response.status == (200 if alone else 502)
        if not alone:
            assert (await response.json())["error"]["message"] == (
                "The prefill instance failed: it was stopped before its answer was complete."
            )
        await quiet(sequential)


@pytest.mark.asyncio
@pytest.mark.parametrize("dispatch", ["concurrent", "sequential"])
async def test_another_p_is_asked_and_d_has_not_failed(dispatch: Dispatch) -> None:
    async with deployed(dispatch, prefill=2, decode=1) as deployment:

        async def ps(request: web.Request, seen: Seen) -> web.StreamResponse:
            return await (stops if asked() == 1 else answer_json)(request, seen)

        async def ds(request: web.Request, seen: Seen) -> web.StreamResponse:
            return await (answer_error(500) if asked() == 1 else answer_json)(request, seen)

        def asked() -> int:
            return sum(len(each.requests) for each in deployment.prefills)

        for each in deployment.prefills:
            each.behaviour = ps
        deployment.d.behaviour = after_p(deployment, ds)
        assert (await deployment.post()).status == 200
        assert sorted(len(each.requests) for each in deployment.prefills) == [1, 1]
        assert len(deployment.d.requests) == (2 if dispatch == "concurrent" else 1)
        await quiet(deployment)


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [None, 1, 30, 60])
async def test_in_the_stream_it_is_an_error_event(either: Deployment, cut: int | None) -> None:
    """The tokens that there were arrive, the end that is none does not."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        await response.write(event(seen, "first"))
        await until(relayed.is_set)
        end = event(seen, "second") + b"data: " + given_up(seen) + b"\n\ndata: [DONE]\n\n"
        for part in [end] if cut is None else [end[:-cut], end[-cut:]]:
            await response.write(part)
        await asyncio.Event().wait()
        return response

    relayed = asyncio.Event()
    either.d.behaviour = behaviour
    response = await either.post(STREAM)
    assert b"first" in await response.content.readuntil(b"\n\n")
    relayed.set()
    rest = await response.content.read()
    assert GIVEN_UP not in rest and b"[DONE]" not in rest
    second, *_, last, nothing = rest.split(b"\n\n")
    assert b"second" in second and nothing == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == MESSAGE
    await quiet(either)


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_model_may_write_about_it(either: Deployment, streamed: bool) -> None:
    text = GIVEN_UP.decode()

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        if not streamed:
            return web.json_response(completion(seen, text))
        response = await event_stream(request)
        await response.write(event(seen, text) + b"data: [DONE]\n\n")
        return response

    either.d.behaviour = behaviour
    body = await (await either.post(STREAM if streamed else None)).read()
    if streamed:
        body, done, _ = body.removeprefix(b"data: ").split(b"\n\n")
        assert done == b"data: [DONE]"
    assert json.loads(body)["choices"] == [{"text": text}]


EVENTS = b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\n'
END = b'data: {"text":"","finish_reason":"abort"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", range(len(EVENTS + END) + 1))
def test_it_is_seen_however_the_bytes_are_cut(cut: int) -> None:
    watch, passed, whole = GivenUpFilter(), b"", EVENTS + END
    for chunk in (whole[:cut], whole[cut:]):
        if not watch.given_up:
            passed += watch.feed(chunk)
    assert watch.given_up
    assert passed.startswith(EVENTS[:-1]), "an end of line may be lost, which the error event brings along"
    assert GIVEN_UP not in passed and END.startswith(passed[len(EVENTS) :])


def test_byte_by_byte() -> None:
    watch, whole = GivenUpFilter(), EVENTS + END
    ends = [
        end for end in range(1, len(whole) + 1) if not watch.given_up and watch.feed(whole[end - 1 : end])
    ]
    assert watch.given_up and whole[: ends[-1]] == (EVENTS + END).partition(GIVEN_UP)[0] + GIVEN_UP[:-1]


def test_what_does_not_give_up_passes_as_it_is() -> None:
    watch = GivenUpFilter()
    for chunk in (
        EVENTS,
        b'"finish_reason":"stop"',
        b'"finish_reason":',
        b'"length"',
        b'\\"finish_reason\\":\\"abort',
    ):
        assert watch.feed(chunk) == chunk
        assert not watch.given_up
