"""D alone: it computes the prompt of a request that no P can serve, and a short one, within its share."""

import asyncio
import random

import pytest
from aiohttp import web
from proxy_behaviours import after, answer_json, answers, dies, never, with_a_p
from proxy_fakes import (
    Deployment,
    FakeInstance,
    all_do,
    asked,
    deployed,
    error_of,
    fleet,
    join,
    outcomes,
    ping,
)
from test_admission import ask, slow
from test_failures import OFF

from p2pkv_proxy.admission import Admission, RequestPlace
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import Routing, RoutingRequest
from p2pkv_proxy.routing import Choice, PrefillMode
from support.waiting import eventually

INTERNAL = "Internal server error"
"""All that vLLM says of a load that has failed."""


def paired(instance: FakeInstance) -> list[bool]:
    """Of each request that reached this D: whether it names a P."""
    return ["_addr_" in seen.request_id for seen in instance.requests]


def counted(deployment: Deployment) -> tuple[int, int, int]:
    counters = deployment.proxy.counters
    return counters.decode_alone, counters.refused_alone, counters.retried


async def test_without_any_p_d_answers_and_health_says_so(dispatch: Dispatch) -> None:
    async with deployed(dispatch, decode=1) as deployment:
        assert (await deployment.post()).status == 200
        assert paired(deployment.d) == [False]
        status, report = await deployment.get("/health")
        assert (status, report["status"]) == (200, "degraded")
        assert report["missing"] == ["No prefill instance is ready: none has registered."]
        assert (report["counters"]["decode_alone"], report["gauges"]["decode_alone"]) == (1, 0)
        for query, status in (
            ("prefill=1&decode=1", 503),
            ("prefill=one", 400),
            ("decode=" + "9" * 5000, 400),
        ):
            assert (await deployment.get(f"/health?{query}"))[0] == status
        await deployment.newcomer("P")
        assert (await deployment.post()).status == 200
        assert paired(deployment.d) == [False, True]
        status, report = await deployment.get("/health?prefill=1&decode=1")
        assert (status, report["status"], report["missing"]) == (200, "ok", [])
        assert (report["prefill"], report["decode"]) == (1, 1)


async def test_beyond_the_share_requests_are_turned_away() -> None:
    async with deployed("concurrent", decode=1, max_requests=8, alone_share=0.25) as deployment:
        with slow(deployment.d):
            first = [ask(deployment) for _ in range(2)]
            await eventually(lambda: len(deployment.d.requests) == 2)
            assert deployment.proxy.gauges()["decode_alone"] == 2
            response = await deployment.post()
            assert response.status == 503
            assert int(response.headers["Retry-After"]) in range(3, 7)
            assert "as many prompts by themselves as they may" in (await error_of(response))["message"]
            # What never wanted a P is not counted among them.
            other = asyncio.create_task(deployment.post({"prompt": "x", "echo": True}))
            await eventually(lambda: len(deployment.d.requests) == 3)
        assert await asyncio.gather(*first) == [200, 200]
        assert (await other).status == 200
        assert counted(deployment) == (2, 1, 0)
        assert (await deployment.post()).status == 200


async def test_a_failed_p_leaves_a_share_of_requests_to_d() -> None:
    fail, release = asyncio.Event(), asyncio.Event()
    async with deployed("concurrent", 1, 1, max_requests=8, alone_share=0.25) as deployment:
        deployment.p.behaviour = after(fail, dies)
        deployment.d.behaviour = with_a_p(never, after(release, answer_json))
        tasks = [ask(deployment) for _ in range(8)]
        await eventually(lambda: len(deployment.d.requests) == len(deployment.p.requests) == 8)
        fail.set()
        await eventually(lambda: sum(task.done() for task in tasks) == 6)
        assert deployment.proxy.gauges()["decode_alone"] == 2
        release.set()
        assert sorted(await asyncio.gather(*tasks)) == [200] * 2 + [503] * 6
        assert counted(deployment) == (2, 6, 0)


async def test_the_place_that_a_request_has_is_enough_for_it() -> None:
    async with deployed("concurrent", 1, 1, max_requests=1) as deployment:
        deployment.p.behaviour, deployment.d.behaviour = dies, with_a_p(never)
        assert await asyncio.gather(*(ask(deployment) for _ in range(4))) == [200] * 4
        assert counted(deployment) == (4, 0, 0)


# P is silent: nobody knows whether it is dead.


@pytest.mark.parametrize("alone", [True, False])
async def test_if_d_fails_for_want_of_a_frozen_ps_kv_it_is_not_ds_failure(alone: bool) -> None:
    share = 0.25 if alone else 0
    async with deployed("concurrent", 1, 1, life=0.5, lease=30.0, alone_share=share) as deployment:
        ended = asyncio.Event()
        said = {"error": {"message": INTERNAL, "code": 500}}
        internal = answers(lambda _: web.json_response(said, status=500))
        deployment.p.behaviour = never
        deployment.d.behaviour = with_a_p(after(ended, internal))
        asking = await deployment.under_way(deployment.p, deployment.d)
        deployment.freeze(deployment.p)
        p = deployment.known(deployment.p)
        await eventually(lambda: p.silent(deployment.proxy.clock()))
        ended.set()
        response = await asking
        assert response.status == (200 if alone else 500)
        if not alone:
            message = (await error_of(response))["message"]
            assert message.startswith("The prefill instance has not answered and has not pinged for ")
            assert message.endswith("and the decode instance could not go on without it.")
        assert all(outcomes(deployment.known(deployment.d)))


async def test_a_silent_p_is_spared_while_d_may_do_it_alone_and_is_better_than_nobody() -> None:
    for limits in (Limits(), OFF):
        async with deployed("concurrent", 1, 1, life=0.5, limits=limits) as deployment:
            deployment.no_more_pings(deployment.p)
            p = deployment.known(deployment.p)
            await eventually(lambda p=p, deployment=deployment: p.silent(deployment.proxy.clock()))
            assert deployment.proxy.gauges()["silent"] >= 1
            assert (await deployment.post()).status == 200
            assert paired(deployment.d) == [limits is OFF]
            # Neither is it gone: its connection stands.
            assert deployment.registry.known("P") == [p]


def test_what_a_second_try_needs_of_p() -> None:
    """What has been left to a D alone stays so, as it is P's failure that the first try has met."""
    _, (p, d) = fleet("P", "D")
    for first in (PrefillMode.NONE, PrefillMode.WANTED, PrefillMode.SKIP_IF_SHORT):
        for choice, failed, mode in (
            (Choice(p, d), p, PrefillMode.NEEDED),
            (Choice(p, d), d, first),
            (Choice(None, d, prefill_skipped=True), d, first),
            (Choice(None, d, prefill_unavailable=True), d, PrefillMode.UNAVAILABLE),
        ):
            assert RequestPlace(RoutingRequest(), first, choice).mode_after(failed) is mode


async def test_the_place_that_is_left_for_a_d_alone_is_the_next_one_s() -> None:
    """At once: nothing else may happen for long."""
    registry, limits = Registry(), Limits(max_requests=1, alone_share=1.0)
    router, (p, one) = fleet("P", "D", registry=registry, room=1, decode_alone=limits.decode_alone)
    admission = Admission(router, limits, RequestCounters(), lambda: 0.0)
    async with admission.place(RoutingRequest(), paired=True) as place:
        assert place.choice.decode is one
        waiting = asyncio.create_task(admission._wait(RoutingRequest(), True))
        await eventually(lambda: admission.waiting == 1)
        other = join(registry, ping("D", 3))
        assert admission.move_to_decode_alone(place, frozenset({p, one}))
        assert place.choice.decode is other
        assert admission.waiting == 0 and (await waiting).choice.decode is one


# A short prompt goes straight to a D, within the same share.


SKIP = Routing(skip_below=64)
SHORT, LONG = "x" * 63 * 4, "x" * 64 * 4


def random_text(length: int, seed: int = 1) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=length))


def counted_skips(deployment: Deployment) -> tuple[int, int, int, int]:
    counters = deployment.proxy.counters
    return counters.prefill_skipped, counters.decode_alone, counters.refused_alone, counters.retried


@pytest.mark.parametrize(
    ("prefill", "limits", "by_p", "counters"),
    [
        (1, Limits(), [False, True, False], (2, 0, 0, 0)),
        (1, OFF, [True] * 3, (0, 0, 0, 0)),
        (0, Limits(), [False] * 3, (2, 1, 0, 0)),
    ],
    ids=["", "nothing alone", "no P"],
)
async def test_a_short_prompt_needs_no_p_and_a_long_one_does(
    dispatch: Dispatch, prefill: int, limits: Limits, by_p: list[bool], counters: tuple[int, ...]
) -> None:
    """Where a D may do nothing alone nobody skips. Without a P a long prompt is missed, and not spared."""
    async with deployed(dispatch, prefill, 1, limits=limits, routing=SKIP) as deployment:
        for prompt in (SHORT, LONG, SHORT):
            await deployment.serves(1, prompt=prompt)
        assert paired(deployment.d) == by_p
        assert sum(asked(deployment.prefills)) == sum(by_p)
        assert counted_skips(deployment) == counters


async def test_beyond_the_share_short_prompts_get_a_p() -> None:
    async with deployed("concurrent", 1, 1, max_requests=8, alone_share=0.25, routing=SKIP) as deployment:
        with slow(deployment.d):
            tasks = [ask(deployment, SHORT) for _ in range(5)]
            await eventually(lambda: len(deployment.d.requests) == 5)
            assert sorted(paired(deployment.d)) == [False] * 2 + [True] * 3
            assert deployment.proxy.gauges()["decode_alone"] == 2
        assert await asyncio.gather(*tasks) == [200] * 5
        assert counted_skips(deployment) == (2, 0, 0, 0)


async def test_a_prompt_that_its_d_mostly_knows_is_a_short_one() -> None:
    routing = Routing(decode="prefix_aware", skip_below=64)
    async with deployed("concurrent", 1, 2, routing=routing) as deployment:
        conversation = random_text(2000)
        for said in ("", " and a question", " and a question" + random_text(400)):
            body = {"model": "tiny", "prompt": conversation + said}
            assert (await deployment.post(body)).status == 200
        (d,) = [each for each in deployment.decodes if each.requests]
        assert paired(d) == [True, False, True], "new to D; 64 tokens and no more are new; too many are"
        assert counted_skips(deployment) == (1, 0, 0, 0)
        other = {"model": "tiny", "prompt": random_text(2000, seed=2)}
        assert (await deployment.post(other)).status == 200
        assert len(deployment.p.requests) == 3


async def test_when_its_d_dies_a_short_prompt_is_tried_at_another_d() -> None:
    async with deployed("concurrent", 1, 2, routing=SKIP) as deployment:
        all_do(deployment.decodes, dies)
        response = await deployment.post({"model": "tiny", "prompt": SHORT})
        assert response.status == 502
        assert asked(deployment.decodes) == [1, 1] and asked(deployment.prefills) == [0]
        assert not any(paired(deployment.decodes[0]) + paired(deployment.decodes[1]))
        assert counted_skips(deployment) == (2, 0, 0, 1)
