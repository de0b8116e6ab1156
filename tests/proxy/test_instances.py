"""Instances as an operator sees and drains them, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from proxy_behaviours import after, never, streams
from proxy_fakes import Deployment, FakeInstance, all_do, deployed, error_of, join, ping, quiet

from p2pkv_proxy.access import Access
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.registry import Registry
from support.waiting import eventually

TOKEN = "a token of the tests"
SHOWN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
async def guarded() -> AsyncIterator[Deployment]:
    """Two P and two D behind a proxy with an admin token."""
    async with deployed("concurrent", prefill=2, decode=2, guard=Access(TOKEN)) as deployment:
        yield deployment


async def drained(deployment: Deployment, instance: FakeInstance) -> None:
    assert (await deployment.order(instance, "drain", SHOWN)).status == 200


async def states(deployment: Deployment) -> dict[str, str]:
    status, page = await deployment.get("/instances")
    assert status == 200
    return {each["address"]: each["state"] for each in page["instances"]}


async def test_the_list_says_who_is_there_and_no_zmq_address(guarded: Deployment) -> None:
    status, listing = await guarded.get("/instances")
    assert status == 200
    p = next(each for each in listing["instances"] if each["address"] == guarded.p.http_address)
    assert (p["role"], p["state"], p["models"], p["running"], p["rank"]) == (
        "prefill",
        "ready",
        ["tiny"],
        0,
        0,
    )
    everyone = guarded.prefills + guarded.decodes
    assert {each["address"] for each in listing["instances"]} == {each.http_address for each in everyone}
    for path in ("/instances", "/status", "/metrics"):
        text = await guarded.text(path)
        assert everyone[0].http_address in text or path == "/metrics"
        assert not [each for each in everyone if each.zmq_address in text]


@pytest.mark.parametrize("role", ["P", "D"])
async def test_a_drained_instance_ends_what_it_has_and_gets_no_more(guarded: Deployment, role: str) -> None:
    release = asyncio.Event()
    all_do(guarded.decodes, streams(release))
    answers = [await guarded.begin() for _ in range(4)]
    leaver, stayer = guarded.prefills if role == "P" else guarded.decodes
    assert len(leaver.requests) == len(stayer.requests) == 2
    await drained(guarded, leaver)
    if role == "D":
        assert (await states(guarded))[leaver.http_address] == "draining"
    answers += [await guarded.post(stream=True) for _ in range(4)]
    assert (len(leaver.requests), len(stayer.requests)) == (2, 6)
    release.set()
    for answer in answers:
        assert b"second" in await answer.content.read()
    await quiet(guarded)
    assert (await states(guarded))[leaver.http_address] == "drained"
    assert not any(seen.aborted for seen in leaver.requests)

    assert (await guarded.order(leaver, "resume", SHOWN)).status == 200
    assert (await states(guarded))[leaver.http_address] == "ready"
    await guarded.serves(2)
    assert len(leaver.requests) == 3


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]], ids=["one", "two"])
async def test_a_p_counts_as_drained_when_d_has_its_kv_and_not_before(prompt: str | list[str]) -> None:
    """Of several prompts that is at the end of the stream."""
    async with deployed("concurrent", prefill=1, decode=1, guard=Access(TOKEN)) as deployment:
        first, rest = asyncio.Event(), asyncio.Event()
        deployment.d.behaviour = after(first, streams(rest))
        asking = asyncio.create_task(deployment.post(stream=True, prompt=prompt))
        await eventually(lambda: bool(deployment.p.requests) and deployment.p.requests[0].answered)
        (p,) = deployment.registry.known("P")
        await eventually(lambda: p.load == 0)
        await drained(deployment, deployment.p)
        assert (await states(deployment))[deployment.p.http_address] == "draining"
        first.set()
        answer = await asking
        await answer.content.readuntil(b"\n\n")
        has_all = "drained" if prompt == "x" else "draining"
        assert (await states(deployment))[deployment.p.http_address] == has_all
        rest.set()
        await answer.content.read()
        await quiet(deployment)
        assert (await states(deployment))[deployment.p.http_address] == "drained"


async def test_when_the_last_is_drained_requests_are_told_so_and_resume_lets_them_in() -> None:
    async with deployed("concurrent", prefill=1, decode=1, guard=Access(TOKEN)) as deployment:
        await drained(deployment, deployment.d)
        assert "of 1 registered, 1 drained" in await deployment.refusal(503)
        assert (await deployment.get("/ready"))[0] == 503
        await deployment.order(deployment.d, "resume", SHOWN)
        assert (await deployment.post()).status == 200


async def test_who_waits_for_a_place_gets_that_of_a_resumed_instance() -> None:
    limits = Limits(max_requests=1)
    async with deployed("concurrent", prefill=1, decode=2, limits=limits, guard=Access(TOKEN)) as deployment:
        first, second = deployment.decodes
        first.behaviour = never
        await drained(deployment, second)
        stuck = asyncio.create_task(deployment.post())
        await eventually(lambda: deployment.proxy.admission.under_way == 1)
        waiting = asyncio.create_task(deployment.post())
        await eventually(lambda: deployment.proxy.admission.waiting == 1)
        await deployment.order(second, "resume", SHOWN)
        assert (await waiting).status == 200
        stuck.cancel()


async def test_a_change_takes_the_token(guarded: Deployment, concurrent: Deployment) -> None:
    for shown in (None, "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer"):
        answer = await guarded.order(guarded.p, "drain", {"Authorization": shown} if shown else {})
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await error_of(answer))["type"] == "authentication_error"
    assert set((await states(guarded)).values()) == {"ready"}
    for headers in ({}, {"Authorization": "Bearer "}, SHOWN):  # of a proxy that has none
        answer = await concurrent.order(concurrent.p, "drain", headers)
        assert answer.status == 403
        assert "--admin-token" in (await error_of(answer))["message"]
    assert set((await states(concurrent)).values()) == {"ready"}


async def test_a_private_proxy_shows_instances_to_operators_only() -> None:
    guard = Access(TOKEN, private=True)
    async with deployed("concurrent", prefill=1, decode=1, guard=guard) as deployment:
        for path in ("/instances", "/status", "/metrics"):
            status, error = await deployment.get(path)
            assert status == 401 and "admin token" in error["error"]["message"]
            async with deployment.client.get(deployment.url + path, headers=SHOWN) as response:
                assert response.status == 200
        for path in ("/health", "/ready"):
            assert (await deployment.get(path))[0] == 200
        assert (await deployment.post()).status == 200


async def test_a_mistake_is_explained(guarded: Deployment) -> None:
    wrong = f"{guarded.d.http_address}/drain?move_after=soon"
    for order, status in (("127.0.0.1:1/drain", 404), ("nonsense/drain", 400), (wrong, 400)):
        answer = await guarded.client.post(f"{guarded.url}/instances/{order}", headers=SHOWN)
        assert answer.status == status
        said = (await error_of(answer))["message"]
    assert "move_after is 'soon'" in said and not any(each.drained for each in guarded.everyone())
    async with guarded.client.get(f"{guarded.url}/instances/127.0.0.1:1/drain") as answer:
        assert answer.status == 405
        await error_of(answer)


async def test_ready_says_whether_and_what_it_takes() -> None:
    for share, needs, alone in (
        (0.25, "a decode instance", 200),
        (0.0, "a prefill and a decode instance", 503),
    ):
        async with deployed("concurrent", limits=Limits(alone_share=share)) as deployment:
            status, answer = await deployment.get("/ready")
            assert (status, answer["ready"], answer["needs"]) == (503, False, needs)
            assert len(answer["missing"]) == 2
            await deployment.newcomer("D")
            assert (await deployment.get("/ready"))[0] == alone
            await deployment.newcomer("P")
            assert await deployment.get("/ready") == (
                200,
                {"ready": True, "needs": needs, "prefill": 1, "decode": 1, "missing": []},
            )


async def test_a_restart_ends_a_drain_and_a_lost_connection_does_not() -> None:
    registry = Registry(life=1.0)
    first = ping("D", incarnation="first")
    instance = join(registry, first)
    registry.drain(instance, True)
    assert registry.routable("D", 0.5) == []
    assert registry.expire(5.0) == [instance]
    assert join(registry, first, 6.0).drained
    restarted = join(registry, ping("D", incarnation="second"), 8.0)
    assert not restarted.drained
    assert registry.routable("D", 8.0) == [restarted]
    registry.drain(restarted, True)
    registry.drain(restarted, False)
    assert registry.routable("D", 8.0) == [restarted]


async def test_the_status_says_who_pushes_to_whom(guarded: Deployment) -> None:
    release = asyncio.Event()
    all_do(guarded.decodes, streams(release))
    answer = await guarded.begin()
    _, now = await guarded.get("/status")
    (pair,) = now["pairs"]
    p = next(each for each in guarded.prefills if each.requests)
    d = next(each for each in guarded.decodes if each.requests)
    assert pair == {"prefill": p.http_address, "decode": d.http_address, "total": 1, "running": 1}
    assert (now["status"], now["can_drain"], now["gauges"]["under_way"]) == ("ok", True, 1)
    assert now["first_token_seconds"]["p50"] > 0
    release.set()
    await answer.content.read()
    await quiet(guarded)
    _, now = await guarded.get("/status")
    assert now["pairs"][0]["running"] == 0
    assert now["outcomes"]["answered"] == 1
    assert now["stream_events"] == 2
    assert all(len(row) == len(now["history_fields"]) for row in now["history"])
