"""Instances that vLLM's /pause has paused, and those whose engine hangs behind a server that answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace
from proxy_behaviours import DONE, Seen, after, answer_json, event, event_stream
from proxy_fakes import Deployment, FakeInstance, all_do, asked, deployed, join, ping
from test_hung import one_hangs, the_asked

from p2pkv.control.discovery import DISCOVERY_VERSION, goodbye
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import VOUCHING_VERSION
from p2pkv_proxy.membership.registry import Registry
from support.waiting import eventually


def pause(deployment: Deployment, instance: FakeInstance, paused: bool = True) -> None:
    """As vLLM's /pause or /resume."""
    pinger = deployment.pingers[instance.http_address]
    pinger._current = lambda: replace(instance.ping, paused=paused)
    pinger.ping_soon()


def fall_silent(deployment: Deployment, instance: FakeInstance) -> None:
    deployment.pingers[instance.http_address]._current = lambda: None


# Paused ones.


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
    registry, first = Registry(), ping("D")
    instance = join(registry, first)
    paused = replace(first, paused=True)
    assert registry.observe(paused, 1.0) is None and instance.paused
    assert registry.of(paused) is registry.of(first) is instance
    assert registry.routable("D", 1.0) == []
    assert registry.observe(first, 2.0) is None and not instance.paused
    assert registry.routable("D", 2.0) == [instance]
    registry.observe(paused, 3.0)
    registry.observe(goodbye(first), 4.0)
    assert registry.known("D") == [] and instance.left == 4.0
    registers_paused = registry.observe(replace(ping("P"), paused=True), 0.0)
    assert registers_paused is not None and registers_paused.paused and not registers_paused.ping.paused


def test_what_a_pause_has_aborted_is_forgotten_when_it_ends() -> None:
    registry, first = Registry(), ping("P")
    instance = registry.observe(first, 0.0)
    assert instance is not None
    for _ in range(5):
        instance.breaker.failed(0.5)
    registry.observe(replace(first, paused=True), 1.0)
    assert not instance.breaker.closed
    registry.observe(first, 2.0)
    assert instance.breaker.closed and instance.breaker.opened == 0
    for _ in range(4):
        assert not instance.breaker.failed(3.0)
    registry.observe(first, 4.0)
    assert instance.breaker.failed(5.0), "a ping like the one before forgets nothing"


# Those whose engine hangs.

LIFE, PROXYS_LEASE = 1.5, 2.0


@pytest.fixture
async def hung() -> AsyncIterator[Deployment]:
    """A P and two D's that vouch for their engines; the first D's is about to hang."""
    limits = Limits(max_body=1 << 20)
    async with deployed("concurrent", 1, 0, life=LIFE, lease=PROXYS_LEASE, limits=limits) as deployment:
        for _ in range(2):
            await deployment.add("D", version=DISCOVERY_VERSION)
        await deployment.ready(1, 2)
        yield deployment


async def test_a_request_at_a_d_whose_engine_hangs_is_answered_by_another(hung: Deployment) -> None:
    request, stuck = await one_hangs(hung, hung.decodes)
    fall_silent(hung, stuck)
    assert (await request).status == 200
    assert asked(hung.decodes) == [1, 1]
    assert stuck.healths > 1, "its HTTP server has answered all the while"
    await hung.serves(3)
    assert len(stuck.requests) == 1
    stuck.behaviour = answer_json
    hung.pingers[stuck.http_address]._current = lambda: stuck.ping
    await eventually(lambda: stuck.http_address in hung.routable("D"), "its return")


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


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_stream_outlives_lost_pings_but_not_a_hung_engine(
    hung: Deployment, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr("p2pkv_proxy.upstream._HUNG_SECONDS", 1.5)
    stop, goes_on = asyncio.Event(), asyncio.Event()
    goes_on.set()
    all_do(hung.decodes, stream(stop, goes_on))
    response = await hung.post(stream=True)
    await response.content.readany()
    stuck = the_asked(hung.decodes)
    fall_silent(hung, stuck)
    if hangs:
        goes_on.clear()
    else:
        await eventually(lambda: len(hung.registry.known("D")) == 1, "the end of its lease")
        began = time.monotonic()
        while time.monotonic() - began < 3.0:
            assert await response.content.readany()
        stop.set()
    text = await response.text()
    assert ("error" in text) is hangs


async def test_of_an_older_p2pkv_a_silence_says_nothing_about_its_engine(hung: Deployment) -> None:
    assert VOUCHING_VERSION == 4  # when pings began to mean that
    old = await hung.newcomer("D", version=3)
    for each in hung.decodes:
        if each is not old:
            pause(hung, each)
    await eventually(lambda: hung.routable("D") == [old.http_address])
    answers = asyncio.Event()
    old.behaviour = after(answers, answer_json)
    request = await hung.under_way(old)
    fall_silent(hung, old)
    await eventually(lambda: len(hung.registry.known("D")) == 2, "the end of its lease")
    asked_again = old.healths
    await eventually(lambda: old.healths > asked_again + 1, "two looks at it")
    answers.set()
    assert (await request).status == 200
