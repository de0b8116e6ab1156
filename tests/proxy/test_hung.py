"""An engine that hangs behind a living HTTP server, or that vLLM's /pause has paused; and deadlines."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace
from proxy_behaviours import (
    DONE,
    Behaviour,
    Seen,
    after,
    answer_json,
    chosen,
    event,
    event_stream,
    never,
    never_a_token,
    stream_of,
    streams,
)
from proxy_fakes import (
    Deployment,
    FakeInstance,
    all_do,
    asked,
    deployed,
    fail,
    join,
    outcomes,
    ping,
    take_turns,
)
from test_decode_alone import paired

from p2pkv.control.discovery import DISCOVERY_VERSION, goodbye
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.membership.instance import VOUCHING_VERSION
from p2pkv_proxy.membership.registry import Registry
from support.waiting import eventually

LEASE: dict[str, Any] = {"life": 0.5, "lease": 1.0}
STREAM = {"prompt": "x", "stream": True}


async def one_hangs(
    deployment: Deployment, instances: list[FakeInstance], hangs: Behaviour = never, body: Any = None
) -> tuple[asyncio.Task[aiohttp.ClientResponse], FakeInstance]:
    """A request that has come to one of these instances, which never begins it; another one would answer."""
    take_turns(instances, hangs, answer_json)
    asking = asyncio.create_task(deployment.post(body))
    await eventually(lambda: any(each.requests for each in instances), "the request")
    return asking, the_asked(instances)


def the_asked(instances: list[FakeInstance]) -> FakeInstance:
    (found,) = [each for each in instances if each.requests]
    return found


@pytest.mark.parametrize(
    ("hangs", "version"),
    [(never, 1), (never_a_token, 1), (never, DISCOVERY_VERSION)],
    ids=["", "stream", "vouches"],
)
async def test_of_a_d_that_hangs_another_one_answers(
    dispatch: Dispatch, hangs: Behaviour, version: int
) -> None:
    """Whether its pings vouch for its engine or are of an older version."""
    async with deployed(dispatch, prefill=1, **LEASE) as deployment:
        for _ in range(2):
            await deployment.newcomer("D", version=version)
        body = STREAM if hangs is never_a_token else None
        asking, hung = await one_hangs(deployment, deployment.decodes, hangs, body)
        instance = deployment.known(hung)
        fall_silent(deployment, hung)
        assert (await asking).status == 200
        assert deployment.proxy.clock() - instance.last_seen >= 1.0, "not before its lease is over"
        assert [each.aborted for each in hung.requests] == [True]
        assert asked(deployment.decodes) == [1, 1] and deployment.proxy.counters.retried == 1
        assert hung.healths > 1, "its HTTP server has answered all the while"
        await deployment.serves(3)
        assert len(hung.requests) == 1
        hung.behaviour = answer_json
        deployment.pingers[hung.http_address]._current = lambda: hung.ping
        await eventually(lambda: hung.http_address in deployment.routable("D"), "its return")


async def test_however_many_hang_there_the_budget_of_retries_keeps_none() -> None:
    async with deployed("concurrent", prefill=1, decode=2, **LEASE) as deployment:
        hung, _ = deployment.decodes
        hung.behaviour = never
        asking = [asyncio.create_task(deployment.post()) for _ in range(32)]
        await eventually(lambda: sum(len(each.requests) for each in deployment.decodes) == 32)
        assert len(hung.requests) > 12, "more than the budget has for so few requests"
        deployment.no_more_pings(hung)
        assert {(await each).status for each in asking} == {200}
        assert deployment.proxy.counters.retries_refused == 0


async def test_what_has_begun_or_has_nowhere_to_go_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert VOUCHING_VERSION == 4  # when a silence began to mean that the engine hangs
    async with deployed("concurrent", prefill=1, **LEASE) as deployment:
        await deployment.newcomer("D", version=3)
        release = asyncio.Event()
        deployment.d.behaviour = streams(release)
        begun = await deployment.begin()
        deployment.d.behaviour = after(release, answer_json)
        waiting = asyncio.create_task(deployment.post())
        await eventually(lambda: len(deployment.d.requests) == 2)
        deployment.no_more_pings(deployment.d)
        await eventually(lambda: "its engine may hang" in caplog.text)
        # Another D comes: what has begun stays all the same.
        await deployment.add("D")
        assert (await waiting).status == 200
        assert [each.aborted for each in deployment.decodes[0].requests] == [False, True]
        release.set()
        assert b"second" in await begun.read()
        assert caplog.text.count("its engine may hang") == 1


@pytest.mark.parametrize("others", [0, 1])
async def test_sequential_a_hung_p_leaves_the_request_to_others(others: int) -> None:
    async with deployed("sequential", prefill=1 + others, decode=1, **LEASE) as deployment:
        asking, hung = await one_hangs(deployment, deployment.prefills)
        deployment.no_more_pings(hung)
        assert (await asking).status == 200
        assert paired(deployment.d) == [bool(others)]


@pytest.mark.parametrize("frozen", [False, True])
async def test_concurrent_a_p_that_hangs_or_freezes_is_ds_affair(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D has a lease of its own, and may be computing the prompt already."""
    monkeypatch.setattr("p2pkv_proxy.attempt._GRACE_SECONDS", 0.1)
    async with deployed("concurrent", prefill=2, decode=1, **LEASE) as deployment:
        release = asyncio.Event()
        deployment.d.behaviour = after(release, answer_json)
        asking, hung = await one_hangs(deployment, deployment.prefills)
        instance = deployment.known(hung)
        if frozen:
            deployment.freeze(hung)
            await eventually(lambda: instance not in deployment.everyone() and hung.requests[0].aborted)
        else:
            deployment.no_more_pings(hung)
            await eventually(lambda: deployment.registry.overdue(instance, deployment.proxy.clock()))
            probed = hung.healths
            await eventually(lambda: hung.healths > probed + 1)
        assert not asking.done() and not deployment.d.requests[0].aborted
        release.set()
        assert (await asking).status == 200
        assert paired(deployment.d) == [True]


@pytest.mark.parametrize("hangs", [never_a_token, never], ids=["", "without a head"])
async def test_no_token_in_time_is_a_504_or_another_d_s_answer(dispatch: Dispatch, hangs: Behaviour) -> None:
    async with deployed(dispatch, prefill=1, decode=2, first_token_seconds=0.3) as deployment:
        take_turns(deployment.decodes, hangs, answer_json)
        assert (await deployment.post(STREAM)).status == 200
        assert asked(deployment.decodes) == [1, 1] and deployment.proxy.counters.retried == 1
        all_do(deployment.decodes, hangs)
        assert await deployment.refusal(504, STREAM) == "The decode instance has sent no token in time."


async def test_sequential_p_has_the_same_deadline_and_d_is_not_charged() -> None:
    async with deployed("sequential", prefill=2, decode=1, first_token_seconds=0.3) as deployment:
        asking, hung = await one_hangs(deployment, deployment.prefills, body=STREAM)
        assert (await asking).status == 200
        assert outcomes(deployment.known(hung)) == [False]
        assert outcomes(deployment.known(deployment.d)) == [True]


async def test_while_p_has_not_answered_a_late_first_token_is_ps_failure() -> None:
    async with deployed("concurrent", prefill=2, decode=1, first_token_seconds=0.3) as deployment:

        def d(seen: Seen) -> Behaviour:
            slow = any(seen.request_id == each.request_id for each in the_first.requests)
            return never_a_token if slow else answer_json

        deployment.d.behaviour = never_a_token
        asking, the_first = await one_hangs(deployment, deployment.prefills, body=STREAM)
        deployment.d.behaviour = chosen(d)
        assert (await asking).status == 200
        p, d_known = deployment.known(the_first), deployment.known(deployment.d)
        assert outcomes(p) == [False]
        assert all(outcomes(d_known))


async def test_the_deadline_for_the_first_token_is_for_streams() -> None:
    """Of another answer nothing comes until all of it is there."""
    async with deployed("concurrent", 1, 1, first_token_seconds=0.2) as deployment:
        release = asyncio.Event()
        deployment.d.behaviour = after(release, answer_json)
        asking = await deployment.under_way(deployment.d)
        (active,) = deployment.proxy.active._open
        deadline, loop = active.attempt._began + 0.4, asyncio.get_running_loop()
        await eventually(lambda: loop.time() > deadline)
        release.set()
        assert (await asking).status == 200


async def test_a_stream_without_more_events_ends_with_an_error() -> None:
    async with deployed("concurrent", 1, 1, event_seconds=0.3) as deployment:
        deployment.d.behaviour = streams(asyncio.Event())
        response = await deployment.post(STREAM)
        first, last, nothing = (await response.read()).split(b"\n\n")
        assert b"first" in first and nothing == b""
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert (error["code"], error["message"]) == (504, "The decode instance has sent nothing for 0.3 s.")
        assert outcomes(deployment.known(deployment.d)) == [True, False]
        await eventually(lambda: deployment.d.requests[0].aborted)


async def test_a_client_that_reads_slowly_is_not_ds_silence() -> None:
    """While nothing can be passed on, nothing is read of D either."""
    async with deployed("concurrent", 1, 1, event_seconds=0.3) as deployment:
        deployment.d.behaviour = stream_of(*["x" * 100_000] * 200)
        response = await deployment.post(STREAM)
        (active,) = deployment.proxy.active._open
        relay = active.attempt.relay
        await eventually(lambda: relay._writing and time.monotonic() - relay._since > 0.8)
        text = await response.read()
        assert text.count(b"data: ") == 200 and b'"error"' not in text


def pause(deployment: Deployment, instance: FakeInstance, paused: bool = True) -> None:
    """As vLLM's /pause or /resume."""
    pinger = deployment.pingers[instance.http_address]
    pinger._current = lambda: replace(instance.ping, paused=paused)
    pinger.ping_soon()


def fall_silent(deployment: Deployment, instance: FakeInstance) -> None:
    deployment.pingers[instance.http_address]._current = lambda: None


@pytest.mark.parametrize("role", ["P", "D"])
async def test_a_paused_instance_gets_nothing_until_it_is_resumed(concurrent: Deployment, role: Any) -> None:
    other = await concurrent.newcomer(role, version=DISCOVERY_VERSION)
    pause(concurrent, other)
    await eventually(lambda: other.http_address not in concurrent.routable(role), "the pause")
    await concurrent.serves(4)
    assert not other.requests
    listed = (await concurrent.get("/instances"))[1]["instances"]
    states = {each["address"]: each["state"] for each in listed}
    assert states.pop(other.http_address) == "engine_paused" and set(states.values()) == {"ready"}
    assert (await concurrent.get("/health"))[1]["gauges"]["engines_paused"] == 1
    pause(concurrent, other, False)
    await eventually(lambda: other.http_address in concurrent.routable(role), "the resumption")
    await concurrent.serves(6)
    assert other.requests


async def test_what_a_paused_instance_has_goes_on_when_it_is_resumed(concurrent: Deployment) -> None:
    """Others hear that it is paused if there is no other D."""
    resumed = asyncio.Event()
    concurrent.d.behaviour = after(resumed, answer_json)
    asked = await concurrent.under_way(concurrent.d)
    pause(concurrent, concurrent.d)
    await eventually(lambda: not concurrent.routable("D"))
    assert "1 paused by vLLM's /pause" in await concurrent.refusal(503)
    pause(concurrent, concurrent.d, False)
    resumed.set()
    assert (await asked).status == 200


def test_a_pause_is_no_restart_and_a_goodbye_in_it_counts() -> None:
    """What it has aborted is forgotten when it ends."""
    registry, first = Registry(), ping("D")
    instance = join(registry, first)
    paused = replace(first, paused=True)
    fail(instance, 0.5)
    assert registry.observe(paused, 1.0) is None and instance.paused and not instance.breaker.closed
    assert registry.of(paused) is registry.of(first) is instance
    assert registry.routable("D", 1.0) == []
    assert registry.observe(first, 2.0) is None and not instance.paused
    assert instance.breaker.closed and instance.breaker.opened == 0
    assert registry.routable("D", 2.0) == [instance]
    for _ in range(4):
        assert not instance.breaker.failed(3.0)
    registry.observe(first, 3.0)
    assert instance.breaker.failed(3.0), "a ping like the one before forgets nothing"
    registry.observe(paused, 4.0)
    registry.observe(goodbye(first), 5.0)
    assert registry.known("D") == [] and instance.left == 5.0
    registers_paused = registry.observe(replace(ping("P"), paused=True), 0.0)
    assert registers_paused is not None and registers_paused.paused and not registers_paused.ping.paused


def stream(stop: asyncio.Event, goes_on: asyncio.Event) -> Any:
    """A token, and more of them while `goes_on`; the end at `stop`."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        while not stop.is_set():
            if goes_on.is_set():
                await response.write(event(seen, "token"))
            await asyncio.sleep(0.05)
        await response.write(DONE)
        return response

    return behaviour


@pytest.mark.parametrize("then", ["hangs", "goes on", "pings again and is slow"])
async def test_a_stream_outlives_lost_pings_but_not_a_hung_engine(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr("p2pkv_proxy.upstream._HUNG_SECONDS", 0.5)
    async with deployed("concurrent", prefill=1, **LEASE) as deployment:
        for _ in range(2):
            await deployment.newcomer("D", version=DISCOVERY_VERSION)
        stop, goes_on = asyncio.Event(), asyncio.Event()
        goes_on.set()
        all_do(deployment.decodes, stream(stop, goes_on))
        response = await deployment.post(stream=True)
        await response.content.readany()
        d = the_asked(deployment.decodes)
        fall_silent(deployment, d)
        if then == "hangs":
            goes_on.clear()
        else:
            await eventually(lambda: len(deployment.registry.known("D")) == 1, "the end of its lease")
            if then != "goes on":
                deployment.pingers[d.http_address]._current = lambda: d.ping
                await eventually(lambda: d.http_address in deployment.routable("D"))
                goes_on.clear()
                probed = d.healths
                await eventually(lambda: d.healths > probed + 3)
                goes_on.set()
            began = time.monotonic()
            while time.monotonic() - began < 1.0:
                assert await response.content.readany()
            stop.set()
        assert ("error" in await response.text()) is (then == "hangs")
