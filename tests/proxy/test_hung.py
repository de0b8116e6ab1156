"""An engine that hangs behind a living HTTP server: what it has not begun goes elsewhere; and deadlines."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from proxy_behaviours import (
    Behaviour,
    Seen,
    after,
    answer_json,
    chosen,
    never,
    never_a_token,
    stream_of,
    streams,
)
from proxy_fakes import Deployment, FakeInstance, all_do, asked, deployed, outcomes, take_turns
from test_decode_alone import paired

from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.limits import Limits
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


@pytest.mark.parametrize("hangs", [never, never_a_token])
async def test_of_a_d_that_hangs_another_one_answers(dispatch: Dispatch, hangs: Behaviour) -> None:
    async with deployed(dispatch, prefill=1, decode=2, **LEASE) as deployment:
        body = STREAM if hangs is never_a_token else None
        asking, hung = await one_hangs(deployment, deployment.decodes, hangs, body)
        instance = deployment.known(hung)
        deployment.no_more_pings(hung)
        response = await asking
        assert response.status == 200
        assert deployment.proxy.clock() - instance.last_seen >= 1.0, "not before its lease is over"
        assert [each.aborted for each in hung.requests] == [True]
        assert deployment.proxy.counters.retried == 1


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
    async with deployed("concurrent", prefill=1, decode=1, **LEASE) as deployment:
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


@pytest.mark.parametrize("frozen", [False, True])
async def test_a_lost_ping_or_two_move_nothing(frozen: bool) -> None:
    async with deployed("concurrent", prefill=1, decode=2, life=0.5, lease=30.0) as deployment:
        release = asyncio.Event()
        asking, hung = await one_hangs(deployment, deployment.decodes, after(release, answer_json))
        instance = deployment.known(hung)
        (deployment.freeze if frozen else deployment.no_more_pings)(hung)
        await eventually(lambda: instance.silent(deployment.proxy.clock()))
        probed = hung.healths
        await eventually(lambda: hung.healths > probed + 1)
        release.set()
        assert (await asking).status == 200
        assert deployment.proxy.counters.retried == 0


@pytest.mark.parametrize("others", [0, 1])
async def test_sequential_a_hung_p_leaves_the_request_to_others(others: int) -> None:
    async with deployed("sequential", prefill=1 + others, decode=1, **LEASE) as deployment:
        asking, hung = await one_hangs(deployment, deployment.prefills)
        deployment.no_more_pings(hung)
        assert (await asking).status == 200
        assert paired(deployment.d) == [bool(others)]


async def test_concurrent_a_p_that_hangs_is_ds_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    """D has a lease of its own, and may be computing the prompt already."""
    monkeypatch.setattr("p2pkv_proxy.attempt._GRACE_SECONDS", 0.1)
    async with deployed("concurrent", prefill=2, decode=1, **LEASE) as deployment:
        release = asyncio.Event()
        deployment.d.behaviour = after(release, answer_json)
        asking, hung = await one_hangs(deployment, deployment.prefills)
        instance = deployment.known(hung)
        deployment.no_more_pings(hung)
        await eventually(lambda: deployment.registry.overdue(instance, deployment.proxy.clock()))
        probed = hung.healths
        await eventually(lambda: hung.healths > probed + 1)
        assert len(deployment.d.requests) == 1
        release.set()
        assert (await asking).status == 200


# Deadlines.


async def test_no_token_in_time_is_a_504_or_another_d_s_answer() -> None:
    limits = Limits(first_token_seconds=0.3)
    async with deployed("concurrent", prefill=1, decode=2, limits=limits) as deployment:
        take_turns(deployment.decodes, never_a_token, answer_json)
        assert (await deployment.post(STREAM)).status == 200
        assert asked(deployment.decodes) == [1, 1] and deployment.proxy.counters.retried == 1
        all_do(deployment.decodes, never_a_token)
        assert await deployment.refusal(504, STREAM) == "The decode instance has sent no token in time."


async def test_while_p_has_not_answered_a_late_first_token_is_ps_failure() -> None:
    limits = Limits(first_token_seconds=0.3)
    async with deployed("concurrent", prefill=2, decode=1, limits=limits) as deployment:

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
    async with deployed("concurrent", 1, 1, limits=Limits(first_token_seconds=0.2)) as deployment:
        release = asyncio.Event()
        deployment.d.behaviour = after(release, answer_json)
        asking = await deployment.under_way(deployment.d)
        (active,) = deployment.proxy.active._open
        assert active.attempt is not None
        deadline, loop = active.attempt._began + 0.4, asyncio.get_running_loop()
        await eventually(lambda: loop.time() > deadline)
        release.set()
        assert (await asking).status == 200


async def test_a_stream_without_more_events_ends_with_an_error() -> None:
    async with deployed("concurrent", 1, 1, limits=Limits(event_seconds=0.3)) as deployment:
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
    async with deployed("concurrent", 1, 1, limits=Limits(event_seconds=0.3)) as deployment:
        deployment.d.behaviour = stream_of(*["x" * 100_000] * 200)
        response = await deployment.post(STREAM)
        (active,) = deployment.proxy.active._open
        assert active.attempt is not None
        relay = active.attempt.relay
        assert relay is not None
        await eventually(lambda: relay._writing and time.monotonic() - relay._since > 0.8)
        text = await response.read()
        assert text.count(b"data: ") == 200 and b'"error"' not in text
