"""What becomes of the other leg, and of the client, when a leg fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from proxy_behaviours import (
    Behaviour,
    Seen,
    after,
    answer_error,
    answer_json,
    die,
    dies,
    dies_in_the_body,
    event,
    event_stream,
    never,
    never_a_token,
    streams,
    telling,
)
from proxy_fakes import Deployment, FakeInstance, called, deployed, error_of

from p2pkv_proxy.limits import Limits
from support.waiting import eventually


def shows_no_address(deployment: Deployment, text: str) -> bool:
    instances = [*deployment.prefills, *deployment.decodes]
    return not any(a in text for i in instances for a in (i.http_address, i.zmq_address, "_addr_"))


# D fails.


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_ds_error_reaches_the_client_and_cancels_p(concurrent: Deployment, status: int) -> None:
    concurrent.p.behaviour = never
    telltale = f"bad {concurrent.p.zmq_address} {concurrent.d.http_address}"
    concurrent.d.behaviour = answer_error(status, telltale)
    response = await concurrent.post()
    assert response.status == status
    assert (await error_of(response))["message"].startswith("bad (prefill instance) (decode instance)")
    assert shows_no_address(concurrent, await response.text())
    # If D was quick, P has not even seen the request.
    await eventually(lambda: all(seen.aborted for seen in concurrent.p.requests))


def freeze(deployment: Deployment, instance: FakeInstance) -> None:
    """From now on it neither pings nor answers /health; its connections stay open."""
    deployment.pingers[instance.http_address]._interval = 1000.0
    instance.frozen = True


@pytest.mark.parametrize("behaviour", [never, never_a_token])
async def test_a_d_that_freezes_is_a_502(behaviour: Behaviour) -> None:
    async with deployed("concurrent", 1, 1, life=1.5, lease=3.0) as deployment:
        deployment.d.behaviour = behaviour
        asked = asyncio.create_task(deployment.post())
        await eventually(lambda: called(deployment.d))
        freeze(deployment, deployment.d)
        (instance,) = deployment.registry.known("D")
        response = await asked
        assert response.status == 502
        assert deployment.proxy.clock() - instance.last_seen >= 3.0, "not before its lease is over"
        assert (await error_of(response))["message"].startswith("The decode instance")


async def test_a_d_that_freezes_and_wakes_within_its_lease_answers() -> None:
    async with deployed("concurrent", 1, 1, life=1.5) as deployment:
        ready = asyncio.Event()
        deployment.d.behaviour = after(ready, answer_json)
        asked = asyncio.create_task(deployment.post())
        await eventually(lambda: called(deployment.d))
        freeze(deployment, deployment.d)
        (instance,) = deployment.registry.known("D")
        await eventually(lambda: instance.silent(deployment.proxy.clock()))
        probed = deployment.d.healths
        await eventually(lambda: deployment.d.healths > probed + 1, "it is asked, and says nothing")
        again = asyncio.create_task(deployment.post())
        await eventually(lambda: len(deployment.d.requests) == 2, "there is nobody else")
        ready.set()
        assert {(await asked).status, (await again).status} == {200}


async def test_a_silent_d_whose_port_refuses_is_gone_at_once() -> None:
    async with deployed("concurrent", 1, 1, life=1.5) as deployment:
        deployment.d.behaviour = never
        asked = asyncio.create_task(deployment.post())
        await eventually(lambda: called(deployment.d))
        deployment.pingers[deployment.d.http_address]._interval = 1000.0
        assert deployment.d.runner is not None
        for site in list(deployment.d.runner.sites):
            await site.stop()
        response = await asked
        assert (response.status, (await error_of(response))["message"]) == (
            502,
            "The decode instance is gone.",
        )


@pytest.mark.parametrize("behaviour", [dies, answer_error(302, headers={"Location": "http://10.0.0.1:1/"})])
async def test_a_d_that_gives_no_answer_is_a_502(either: Deployment, behaviour: Behaviour) -> None:
    either.d.behaviour = behaviour
    response = await either.post()
    assert response.status == 502
    assert (await error_of(response))["message"].startswith("The decode instance")
    assert "Location" not in response.headers
    assert shows_no_address(either, await response.text())


async def test_an_error_without_end_is_a_502(either: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.upstream._MAX_WHOLE_BYTES", 100_000)
    for size, status in ((10_000, 500), (200_000, 502)):
        either.d.behaviour = answer_error(500, "x" * size)
        response = await either.post()
        assert response.status == status
    assert "answered with too many bytes" in (await error_of(response))["message"]


async def test_a_d_that_is_gone_is_a_502_and_not_chosen_again(either: Deployment) -> None:
    await either.d.stop()
    response = await either.post()
    assert response.status == 502
    assert "could not be reached" in (await error_of(response))["message"]
    assert either.routable("D") == []
    assert (await either.post()).status == 503


@pytest.mark.parametrize("cut", [None, 20])
async def test_a_d_that_dies_in_its_stream_leaves_an_error_event(either: Deployment, cut: int | None) -> None:
    async def breaks(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        await response.write(event(seen, "first"))
        if cut is not None:
            await response.write(event(seen, "second")[:cut])
        await eventually(relayed.is_set)
        die(request)
        return response

    relayed = asyncio.Event()
    either.d.behaviour = breaks
    response = await either.post({"prompt": "x", "stream": True})
    assert b"first" in await response.content.readuntil(b"\n\n")
    relayed.set()
    *_, last, nothing = (await response.content.read()).split(b"\n\n")
    assert nothing == b""
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == 502
    assert error["message"] == "The decode instance died in the middle of its answer."


async def test_what_was_held_back_when_d_dies_reaches_the_client(either: Deployment) -> None:
    """The last bytes might have been the beginning of the request's id."""

    async def breaks(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        await response.write(event(seen, "first") + b"data: " + seen.request_id[:8].encode())
        await eventually(relayed.is_set)
        die(request)
        return response

    relayed = asyncio.Event()
    either.d.behaviour = breaks
    response = await either.post({"prompt": "x", "stream": True})
    assert b"first" in await response.content.readuntil(b"\n\n")
    relayed.set()
    held, last, nothing = (await response.content.read()).split(b"\n\n")
    assert held == b"data: " + either.d.requests[0].request_id[:8].encode() and nothing == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 502


async def test_a_d_that_dies_in_its_json_is_a_502(either: Deployment) -> None:
    either.d.behaviour = dies_in_the_body
    response = await either.post()
    assert response.status == 502
    assert (await error_of(response))["message"] == "The decode instance died before its answer was complete."


async def test_a_d_that_dies_in_a_long_json_leaves_it_unfinished(either: Deployment) -> None:
    """So long that its start has gone to the client."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        headers = {"Content-Type": "application/json", "Content-Length": str(8 << 20)}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b" " * (2 << 20))
        await eventually(begun.is_set)
        die(request)
        return response

    begun = asyncio.Event()
    either.d.behaviour = behaviour
    response = await either.post()
    assert response.status == 200
    begun.set()
    with pytest.raises(aiohttp.ClientError):
        await response.read()


# P fails.


OFF = Limits(alone_share=0)


@pytest.fixture
async def no_alone() -> AsyncIterator[Deployment]:
    """One P, one D, and a D may not do P's part."""
    async with deployed("concurrent", 1, 1, limits=OFF) as deployment:
        yield deployment


@pytest.mark.parametrize("ds_part", [never, never_a_token])
@pytest.mark.parametrize("failure", [answer_error(500), dies, dies_in_the_body, answer_error(307)])
async def test_ps_failure_cancels_d_and_without_d_alone_becomes_a_502(
    no_alone: Deployment, failure: Behaviour, ds_part: Behaviour
) -> None:
    concurrent, d_called = no_alone, asyncio.Event()
    concurrent.d.behaviour = telling(d_called, ds_part)
    concurrent.p.behaviour = after(d_called, failure)
    response = await concurrent.post({"prompt": "x", "stream": ds_part is never_a_token})
    assert response.status == 502
    error = await error_of(response)
    assert error["message"].startswith("The prefill instance")
    assert error["type"] == "bad_gateway_error"
    assert shows_no_address(concurrent, await response.text())
    await eventually(lambda: concurrent.d.requests[0].aborted)
    (instance,) = concurrent.registry.known("D")
    await eventually(lambda: instance.in_flight == 0)


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_ps_4xx_that_d_agrees_with_is_the_clients(either: Deployment, status: int) -> None:
    either.p.behaviour = either.d.behaviour = answer_error(status, "too long")
    response = await either.post()
    assert response.status == status
    assert (await error_of(response))["message"].startswith("too long")
    assert shows_no_address(either, await response.text())


@pytest.mark.parametrize("failure", [answer_error(500), dies, dies_in_the_body])
async def test_sequential_never_calls_d_for_the_kv_of_a_failed_prefill(
    sequential: Deployment, failure: Behaviour
) -> None:
    sequential.p.behaviour = failure
    assert (await sequential.post()).status == 200
    (alone,) = sequential.d.requests
    assert "_addr_" not in alone.request_id


async def test_ps_failure_after_ds_first_token_does_not_matter(concurrent: Deployment) -> None:
    p_fails, release = asyncio.Event(), asyncio.Event()
    concurrent.d.behaviour = streams(release)
    concurrent.p.behaviour = after(p_fails, dies)
    response = await concurrent.post({"prompt": "x", "stream": True})
    assert b"first" in await response.content.readuntil(b"\n\n")
    p_fails.set()
    (instance,) = concurrent.registry.known("P")
    await eventually(lambda: instance.in_flight == 0)
    release.set()
    assert b"second" in await response.content.read()


async def test_of_several_prompts_the_others_still_need_p(concurrent: Deployment) -> None:
    for _ in range(5):
        p_fails = asyncio.Event()
        concurrent.d.behaviour = streams(asyncio.Event())
        concurrent.p.behaviour = after(p_fails, dies)
        response = await concurrent.post({"prompt": ["x", "y"], "stream": True})
        assert b"first" in await response.content.readuntil(b"\n\n")
        p_fails.set()
        error = json.loads((await response.content.read()).removeprefix(b"data: "))["error"]
        assert error["message"].startswith("The prefill instance failed")
        await eventually(lambda: concurrent.d.requests[-1].aborted)
    (p,), (d,) = concurrent.registry.known("P"), concurrent.registry.known("D")
    assert (p.breaker.closed, d.breaker.closed) == (False, True), "it is P that fails"
