"""What becomes of the other leg, and of the client, when a leg fails."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from proxy_behaviours import (
    Behaviour,
    Seen,
    after,
    answer_error,
    die,
    dies,
    dies_in_the_body,
    never,
    never_a_token,
    stream_of,
    streams,
    with_a_p,
)
from proxy_fakes import Deployment, all_do, asked, called, deployed, error_of

from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.limits import Limits
from support.waiting import eventually

OFF = Limits(alone_share=0)
"""No D does P's part."""


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


@pytest.mark.parametrize("behaviour", [never, never_a_token])
async def test_a_d_that_freezes_is_a_502(behaviour: Behaviour) -> None:
    async with deployed("concurrent", 1, 1, life=1.5, lease=3.0) as deployment:
        deployment.d.behaviour = behaviour
        asked = await deployment.under_way(deployment.d)
        deployment.freeze(deployment.d)
        instance = deployment.known(deployment.d)
        response = await asked
        assert response.status == 502
        assert deployment.proxy.clock() - instance.last_seen >= 3.0, "not before its lease is over"
        assert (await error_of(response))["message"].startswith("The decode instance")


async def test_a_silent_d_whose_port_refuses_is_gone_at_once() -> None:
    async with deployed("concurrent", 1, 1, life=1.5) as deployment:
        deployment.d.behaviour = never
        asked = await deployment.under_way(deployment.d)
        deployment.no_more_pings(deployment.d)
        deployment.d.refuse()
        response = await asked
        assert response.status == 502
        assert (await error_of(response))["message"] == "The decode instance is gone."


async def test_an_error_without_end_is_a_502(either: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.upstream._MAX_WHOLE_BYTES", 100_000)
    for size, status in ((10_000, 500), (200_000, 502)):
        either.d.behaviour = answer_error(500, "x" * size)
        response = await either.post()
        assert response.status == status
    assert "answered with too many bytes" in (await error_of(response))["message"]


async def test_a_d_that_is_gone_is_a_502_and_not_chosen_until_it_answers(either: Deployment) -> None:
    await either.d.stop()
    assert "could not be reached" in await either.refusal(502)
    assert either.routable("D") == []
    assert (await either.post()).status == 503
    await either.d.start()
    await either.ready(prefill=1, decode=1)
    assert (await either.post()).status == 200


@pytest.mark.parametrize("cut", [b"", b'data: {"id": "cmpl-'])
async def test_a_d_that_dies_in_its_stream_leaves_an_error_event(dispatch: Dispatch, cut: bytes) -> None:
    """After the first byte nothing is tried again."""
    relayed = asyncio.Event()
    async with deployed(dispatch, prefill=2, decode=2) as deployment:
        all_do(deployment.decodes, stream_of("first", cut, relayed, die))
        response = await deployment.begin()
        relayed.set()
        *_, last, nothing = (await response.content.read()).split(b"\n\n")
        assert nothing == b""
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == 502
        assert error["message"] == "The decode instance died in the middle of its answer."
        assert asked(deployment.decodes) == asked(deployment.prefills) == [0, 1]


async def test_what_was_held_back_when_d_dies_reaches_the_client(either: Deployment) -> None:
    """The last bytes might have been the beginning of the request's id."""

    def beginning(_: web.Request, seen: Seen) -> bytes:
        name = seen.request_id.encode()
        return b"data: " + name + b" " + name[:8]

    relayed = asyncio.Event()
    either.d.behaviour = stream_of("first", beginning, relayed, die)
    response = await either.begin()
    relayed.set()
    held, last, nothing = (await response.content.read()).split(b"\n\n")
    known, name = response.headers["X-Request-Id"].encode(), either.d.requests[0].request_id.encode()
    assert held == b"data: " + known + b" " + name[:8] and nothing == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 502


async def test_a_d_that_dies_in_a_long_json_leaves_it_unfinished(either: Deployment) -> None:
    """So long that its start has gone to the client."""
    begun = asyncio.Event()
    headers = {"Content-Type": "application/json", "Content-Length": str(8 << 20)}
    either.d.behaviour = stream_of(b" " * (2 << 20), begun, die, headers=headers)
    response = await either.post()
    assert response.status == 200
    begun.set()
    with pytest.raises(aiohttp.ClientError):
        await response.read()


# P fails.


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("ds_part", [never, never_a_token])
@pytest.mark.parametrize("failure", [answer_error(500), dies, dies_in_the_body, answer_error(307)])
async def test_ps_failure_cancels_d_which_is_asked_without_it_or_it_is_a_502(
    failure: Behaviour, ds_part: Behaviour, alone: bool
) -> None:
    async with deployed("concurrent", 1, 1, limits=Limits() if alone else OFF) as deployment:
        deployment.d.behaviour = with_a_p(ds_part)
        deployment.p.behaviour = after(lambda: called(deployment.d), failure)
        response = await deployment.post({"prompt": "x", "stream": ds_part is never_a_token})
        if alone:
            assert response.status == 200 and (await response.json())["choices"] == [{"text": "hello"}]
        else:
            assert response.status == 502
            error = await error_of(response)
            assert error["message"].startswith("The prefill instance")
            assert error["type"] == "bad_gateway_error"
            assert shows_no_address(deployment, await response.text())
        await eventually(lambda: deployment.d.requests[0].aborted)
        assert ["_addr_" in seen.request_id for seen in deployment.d.requests] == [True, False][: 1 + alone]
        assert (deployment.proxy.counters.decode_alone, deployment.proxy.counters.retried) == (alone, 0)
        assert deployment.known(deployment.d).breaker.closed


async def test_of_several_prompts_the_others_still_need_p(concurrent: Deployment) -> None:
    for _ in range(5):
        p_fails = asyncio.Event()
        concurrent.d.behaviour = streams(asyncio.Event())
        concurrent.p.behaviour = after(p_fails, dies)
        response = await concurrent.begin(prompt=["x", "y"])
        p_fails.set()
        error = json.loads((await response.content.read()).removeprefix(b"data: "))["error"]
        assert error["message"].startswith("The prefill instance failed")
        await eventually(lambda: concurrent.d.requests[-1].aborted)
    p, d = concurrent.known(concurrent.p), concurrent.known(concurrent.d)
    assert (p.breaker.closed, d.breaker.closed) == (False, True), "it is P that fails"
