"""Instances that come, go, restart, lie or are not ready, over real pings."""

from __future__ import annotations

import asyncio

import pytest
from proxy_behaviours import after, answer_error, answer_json, never, never_a_token, streams
from proxy_fakes import Deployment, FakeInstance, all_do, deployed, outcomes

from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Instance
from support.waiting import eventually


async def test_nobody_is_there(lonely: Deployment) -> None:
    response = await lonely.post()
    assert response.status == 503
    assert int(response.headers["Retry-After"]) in range(3, 7)
    error = (await response.json())["error"]
    assert error["message"] == "No decode instance is ready: none has registered. Try again in a few seconds."
    assert (await lonely.get("/v1/models"))[0] == 503
    status, report = await lonely.get("/health")
    assert status == 503
    assert report["missing"] == [
        f"No {role} instance is ready: none has registered." for role in ("prefill", "decode")
    ]


async def test_an_instance_that_pings_but_is_not_healthy_is_not_routable() -> None:
    async with deployed("concurrent", limits=Limits(alone_share=0)) as lonely:
        await lonely.add("D")
        p = await lonely.add("P", health=503)
        await lonely.ready(prefill=0, decode=1)
        await eventually(lambda: len(lonely.registry.known("P")) == 1)
        why = "No prefill instance is ready: of 1 registered, none has answered /health with 200 lately"
        assert why in await lonely.refusal(503)
        p.health = 200
        await lonely.ready(prefill=1, decode=1)
        assert (await lonely.post()).status == 200


async def leaves(deployment: Deployment, instance: FakeInstance) -> None:
    """As vLLM that is told to stop: it says goodbye, its port refuses, and what it has stays open."""
    instance.refuse()
    await deployment.goodbye(instance)


async def test_an_answer_that_comes_within_a_second_of_the_goodbye_is_taken(
    concurrent: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sends what it has computed although its port refuses."""
    monkeypatch.setattr("p2pkv_proxy.membership.prober._GOODBYE_SECONDS", 1000.0)
    monkeypatch.setattr("p2pkv_proxy.membership.prober._PERIOD_SECONDS", 0.01)
    release, refused = asyncio.Event(), 0
    health = concurrent.proxy.membership.prober._health

    async def counted(instance: Instance) -> bool:
        nonlocal refused
        try:
            return await health(instance)
        except OSError:
            refused += 1
            raise

    concurrent.d.behaviour = after(release, answer_json)
    asking = await concurrent.under_way(concurrent.d)
    monkeypatch.setattr(concurrent.proxy.membership.prober, "_health", counted)
    await leaves(concurrent, concurrent.d)
    await eventually(lambda: refused > 3)
    release.set()
    assert (await asking).status == 200


async def test_a_frozen_leaver_loses_its_requests_after_a_lease() -> None:
    async with deployed("concurrent", 1, 1, life=0.5, lease=1.0) as deployment:
        deployment.d.behaviour = never
        asking = await deployment.under_way(deployment.d)
        other = await deployment.newcomer("D")
        deployment.pingers[deployment.d.http_address].stop()
        deployment.d.frozen = True
        assert (await asking).status == 200 and len(other.requests) == 1


async def test_a_request_that_a_leaving_d_takes_goes_elsewhere_too(sequential: Deployment) -> None:
    """It was chosen before its goodbye, P has answered since, and its port was still open."""
    release = asyncio.Event()
    other = await sequential.add("D", health=503)
    sequential.p.behaviour = after(release, answer_json)
    sequential.d.behaviour = never
    asking = await sequential.under_way(sequential.p)
    other.health = 200
    await eventually(lambda: other.http_address in sequential.routable("D"))
    await sequential.goodbye(sequential.d)
    asked_before = sequential.d.healths
    await eventually(lambda: sequential.d.healths > asked_before + 1)
    release.set()
    await eventually(lambda: len(sequential.d.requests) == 1)
    sequential.d.refuse()
    assert (await asking).status == 200 and len(other.requests) == 1


async def test_what_becomes_of_a_request_whose_p_leaves_is_ds_to_say(concurrent: Deployment) -> None:
    """P has told D that it stops, and D computes the prompt."""
    release = asyncio.Event()
    concurrent.p.behaviour = never
    concurrent.d.behaviour = after(release, answer_json)
    asking = await concurrent.under_way(concurrent.p, concurrent.d)
    await leaves(concurrent, concurrent.p)
    await eventually(lambda: concurrent.p.requests[0].aborted)
    assert not concurrent.d.requests[0].aborted
    release.set()
    assert (await asking).status == 200 and len(concurrent.d.requests) == 1


async def test_a_d_that_fails_because_its_p_leaves_is_not_to_blame(concurrent: Deployment) -> None:
    """With the policy `fail` it says so before the proxy has given P up."""
    release = asyncio.Event()
    concurrent.p.behaviour = never
    concurrent.d.behaviour = after(release, answer_error(500, "Internal server error"))
    asking = await concurrent.under_way(concurrent.p, concurrent.d)
    other = await concurrent.newcomer("P")
    await concurrent.goodbye(concurrent.p)
    concurrent.d.behaviour = answer_json
    release.set()
    assert (await asking).status == 200, "one whose only D is to blame is not tried again"
    assert len(other.requests) == 1


async def test_an_answer_that_the_leaver_has_begun_goes_on(concurrent: Deployment) -> None:
    release = asyncio.Event()
    concurrent.d.behaviour = streams(release)
    response = await concurrent.begin()
    concurrent.d.behaviour = never_a_token
    asking = asyncio.create_task(concurrent.post())
    await eventually(lambda: len(concurrent.d.requests) == 2)
    await leaves(concurrent, concurrent.d)
    await eventually(lambda: concurrent.d.requests[1].aborted)  # so the leaver is known to have stopped
    release.set()
    assert b"second" in await response.read()
    asking.cancel()


async def test_a_leavers_requests_need_no_retries(concurrent: Deployment) -> None:
    """The budget of retries, ten of so few requests, is for outages."""
    concurrent.d.behaviour = never
    asking = [asyncio.create_task(concurrent.post()) for _ in range(14)]
    await eventually(lambda: len(concurrent.d.requests) == len(asking))
    other = await concurrent.newcomer("D")
    await leaves(concurrent, concurrent.d)
    assert {(await each).status for each in asking} == {200}
    assert len(other.requests) == len(asking)


async def test_a_d_that_dies_is_blamed_although_its_p_has_left() -> None:
    """For want of KV a D says that it fails; it does not close the connection."""
    async with deployed("concurrent", 2, 2) as deployment:
        all_do(deployment.instances, never)
        asking = asyncio.create_task(deployment.post())
        asked = deployment.instances
        await eventually(lambda: sum(len(each.requests) for each in asked) == 2)
        p, d = (each for each in asked if each.requests)
        for each in asked:
            if each not in (p, d):
                each.behaviour = answer_json
        await deployment.goodbye(p)
        dead = deployment.known(d)
        d.kill()
        assert (await asking).status == 200
        assert outcomes(dead) == [False]


async def test_a_leaver_that_nobody_needs_is_not_asked_again(concurrent: Deployment) -> None:
    """Where its address answers nothing any more, each round would wait for it."""
    leaver = await concurrent.newcomer("D")
    concurrent.pingers[leaver.http_address].stop()
    await concurrent.ready(prefill=1, decode=1)
    asked = leaver.healths
    newcomer = await concurrent.add("D", health=503)  # which is asked in each round
    await eventually(lambda: newcomer.healths >= 4)
    assert leaver.healths <= asked + 1
