"""A short prompt goes straight to a D, over the way of D alone and within its share."""

from __future__ import annotations

import asyncio
import random

import pytest
from proxy_behaviours import dies, never, with_a_p
from proxy_fakes import Deployment, all_do, asked, deployed
from test_admission import ask, slow
from test_decode_alone import paired
from test_failures import OFF

from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.policies import Routing
from support.waiting import eventually

SKIP = Routing(skip_below=64)
SHORT, LONG = "x" * 63 * 4, "x" * 64 * 4


def random_text(length: int, seed: int = 1) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=length))


def counted(deployment: Deployment) -> tuple[int, int, int, int]:
    counters = deployment.proxy.counters
    return counters.prefill_skipped, counters.decode_alone, counters.refused_alone, counters.retried


@pytest.mark.parametrize("alone", [True, False])
async def test_a_short_prompt_needs_no_p_and_a_long_one_does(dispatch: Dispatch, alone: bool) -> None:
    """Where a D may do nothing alone nobody skips."""
    limits = Limits() if alone else OFF
    async with deployed(dispatch, 1, 1, limits=limits, routing=SKIP) as deployment:
        for prompt in (SHORT, LONG, SHORT):
            assert (await deployment.post({"model": "tiny", "prompt": prompt})).status == 200
        assert paired(deployment.d) == [not alone, True, not alone]
        assert len(deployment.p.requests) == (1 if alone else 3)
        assert counted(deployment) == (2 if alone else 0, 0, 0, 0)


async def test_beyond_the_share_short_prompts_get_a_p() -> None:
    limits = Limits(max_requests=8, alone_share=0.25)
    async with deployed("concurrent", 1, 1, limits=limits, routing=SKIP) as deployment:
        with slow(deployment.d):
            tasks = [ask(deployment, SHORT) for _ in range(5)]
            await eventually(lambda: len(deployment.d.requests) == 5)
            assert sorted(paired(deployment.d)) == [False] * 2 + [True] * 3
            assert deployment.proxy.gauges()["decode_alone"] == 2
        assert await asyncio.gather(*tasks) == [200] * 5
        assert counted(deployment) == (2, 0, 0, 0)


async def test_a_prompt_that_its_d_mostly_knows_is_a_short_one() -> None:
    routing = Routing(decode="prefix_aware", skip_below=64)
    async with deployed("concurrent", 1, 2, routing=routing) as deployment:
        conversation = random_text(2000)
        for said in ("", " and a question", " and a question" + random_text(400)):
            body = {"model": "tiny", "prompt": conversation + said}
            assert (await deployment.post(body)).status == 200
        (d,) = [each for each in deployment.decodes if each.requests]
        assert paired(d) == [True, False, True], "new to D; 64 tokens and no more are new; too many are"
        assert counted(deployment) == (1, 0, 0, 0)
        other = {"model": "tiny", "prompt": random_text(2000, seed=2)}
        assert (await deployment.post(other)).status == 200
        assert len(deployment.p.requests) == 3


async def test_without_a_p_a_long_prompt_is_missed_and_not_spared() -> None:
    routing = Routing(decode="prefix_aware", skip_below=64)
    async with deployed("concurrent", 0, 1, routing=routing) as deployment:
        for prompt in (LONG, SHORT):
            assert (await deployment.post({"model": "tiny", "prompt": prompt})).status == 200
        assert counted(deployment) == (1, 1, 0, 0)


async def test_when_its_d_dies_a_short_prompt_is_tried_at_another_d() -> None:
    async with deployed("concurrent", 1, 2, routing=SKIP) as deployment:
        all_do(deployment.decodes, dies)
        response = await deployment.post({"model": "tiny", "prompt": SHORT})
        assert response.status == 502
        assert asked(deployment.decodes) == [1, 1] and asked(deployment.prefills) == [0]
        assert not any(paired(deployment.decodes[0]) + paired(deployment.decodes[1]))
        assert counted(deployment) == (2, 0, 0, 1)


async def test_a_long_prompt_whose_p_fails_competes_with_short_ones_for_the_share() -> None:
    limits = Limits(max_requests=8, alone_share=0.125)
    async with deployed("concurrent", 1, 1, limits=limits, routing=SKIP) as deployment:
        with slow(deployment.d):
            short = ask(deployment, SHORT)
            await eventually(lambda: len(deployment.d.requests) == 1)
            answering, deployment.d.behaviour = deployment.d.behaviour, with_a_p(never)
            deployment.p.behaviour = dies
            assert (await deployment.post({"model": "tiny", "prompt": LONG})).status == 503
            deployment.d.behaviour = answering
        assert await short == 200
        assert counted(deployment) == (1, 0, 1, 0)
