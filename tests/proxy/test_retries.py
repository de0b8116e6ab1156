"""A second try at another instance: before the first byte, within a budget, and never otherwise."""

from __future__ import annotations

import asyncio

import pytest
from proxy_behaviours import (
    Behaviour,
    Seen,
    after,
    answer_error,
    answer_json,
    chosen,
    dies,
    dies_before_a_token,
    dies_in_the_body,
    never,
    stops,
    stops_before_a_token,
)
from proxy_fakes import Deployment, all_do, asked, deployed, quiet, take_turns
from test_failures import OFF

from p2pkv_proxy.admission import RetryBudget, pause
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Role
from support.waiting import eventually


@pytest.mark.parametrize("failure", [dies, answer_error(500), answer_error(307)])
async def test_another_p_serves_what_the_first_failed(dispatch: Dispatch, failure: Behaviour) -> None:
    async with deployed(dispatch, prefill=2, decode=1) as deployment:
        take_turns(deployment.prefills, failure, answer_json)
        deployment.d.behaviour = never_first(deployment)
        response = await deployment.post()
        assert response.status == 200
        assert asked(deployment.prefills) == [1, 1]
        assert asked(deployment.decodes) == [2 if dispatch == "concurrent" else 1], "each try has its own id"
        assert deployment.proxy.counters.retried == 1


def never_first(deployment: Deployment) -> Behaviour:
    """A D that waits for KV, which the first P will not send."""
    return after(lambda: sum(asked(deployment.prefills)) == 2, answer_json)


@pytest.mark.parametrize(
    "failure", [dies, dies_before_a_token, stops, stops_before_a_token, answer_error(500), answer_error(503)]
)
async def test_another_d_serves_what_the_first_failed_before_its_first_token(
    dispatch: Dispatch, failure: Behaviour
) -> None:
    async with deployed(dispatch, prefill=1, decode=2) as deployment:
        take_turns(deployment.decodes, failure, answer_json)
        assert (await deployment.post()).status == 200
        assert asked(deployment.decodes) == [1, 1]


async def test_with_no_other_instance_there_is_no_second_try(concurrent: Deployment) -> None:
    concurrent.d.behaviour = answer_error(503, "busy")
    assert (await concurrent.refusal(503)).startswith("busy")
    assert len(concurrent.d.requests) == 1
    for _ in range(20):
        await concurrent.post()
    assert concurrent.proxy.counters.retries_refused == 0, "the budget is for those who have somewhere to go"


async def test_if_the_other_is_gone_after_the_pause_there_is_no_try(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployed("sequential", prefill=2, decode=1, limits=OFF) as deployment:

        def everybody_goes(tries: int) -> float:
            for instance in deployment.registry.known("P"):
                instance.healthy = False
            return 0.0

        monkeypatch.setattr("p2pkv_proxy.admission.pause", everybody_goes)
        all_do(deployment.prefills, dies)
        assert (await deployment.post()).status == 502
        assert asked(deployment.prefills) == [0, 1]
        assert deployment.proxy.counters.retried == 0


async def test_nobody_is_asked_twice_however_often_it_may_be_tried() -> None:
    limits = Limits(retries=9, alone_share=0)
    async with deployed("sequential", prefill=3, decode=1, limits=limits) as deployment:
        all_do(deployment.prefills, answer_error(500))
        assert (await deployment.post()).status == 502
        assert asked(deployment.prefills) == [1, 1, 1]


@pytest.mark.parametrize("role", ["P", "D"])
async def test_instances_whose_port_refuses_are_no_tries(dispatch: Dispatch, role: Role) -> None:
    """One fails the request, and four have died with it; --retries and the budget allow one try more."""
    async with deployed(dispatch, prefill=6, decode=6, limits=OFF) as deployment:
        some = deployment.prefills if role == "P" else deployment.decodes
        last = deployment.registry.known(role)[-1].ping.http_address
        # One for the second try, and one if the first one's connection had been idle.
        allowed = iter([True, True])
        deployment.proxy.admission.budget.spend = lambda now, **_: next(allowed, False)  # type: ignore

        def fails_first(seen: Seen) -> Behaviour:
            if sum(asked(some)) > 1:
                return answer_json
            for each in some:
                if not each.requests and each.http_address != last:
                    each.kill()
            return dies

        all_do(some, chosen(fails_first))
        if role == "P":
            all_do(deployment.decodes, never_first(deployment))
        assert (await deployment.post()).status == 200
        assert asked(some) == [0, 0, 0, 0, 1, 1]
        assert deployment.proxy.counters.retried == 5


@pytest.mark.parametrize("alone", [False, True])
async def test_an_outage_does_not_multiply_the_load(alone: bool) -> None:
    """Where a D may do it alone no request of it fails, although the budget of retries is spent."""
    async with deployed("sequential", 3, 1, limits=Limits() if alone else OFF) as deployment:
        failures = (answer_error(500), dies, dies_in_the_body)
        for each, failure in zip(deployment.prefills, failures, strict=True):
            each.behaviour = failure if alone else answer_error(500)
        statuses = [(await deployment.post()).status for _ in range(40)]
        assert statuses == [200 if alone else 502] * 40
        counters, tries = deployment.proxy.counters, sum(asked(deployment.prefills))
        assert len(deployment.d.requests) == counters.decode_alone == 40 * alone
        if alone:
            # All got their pause after five failures or a few more, and were left alone.
            assert counters.retried <= 10 and counters.refused_alone == 0 and tries < 30
            assert not any("_addr_" in seen.request_id for seen in deployment.d.requests)
        else:
            # Ten, and about one for each second that this takes.
            assert 10 <= counters.retried < 30 and tries == 40 + counters.retried
            assert counters.retried + counters.retries_refused == 40


async def test_a_client_that_leaves_between_two_tries_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.admission.pause", lambda tries: 1000.0)
    async with deployed("concurrent", prefill=2, decode=1) as deployment:
        all_do(deployment.prefills, dies)
        deployment.d.behaviour = never
        asking = asyncio.create_task(deployment.post())
        await eventually(
            lambda: deployment.proxy.admission.under_way == 1 and asked(deployment.prefills) == [0, 1]
        )
        await eventually(lambda: deployment.proxy.gauges()["calls"] == 0)
        asking.cancel()
        await quiet(deployment)
        assert asked(deployment.prefills) == [0, 1]


async def test_a_second_try_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pausing = asyncio.Event()

    def long(tries: int) -> float:
        pausing.set()
        return 1000.0

    monkeypatch.setattr("p2pkv_proxy.admission.pause", long)
    async with deployed("sequential", prefill=2, decode=1) as deployment:
        all_do(deployment.prefills, dies)
        asking = asyncio.create_task(deployment.post())
        await pausing.wait()
        assert await deployment.proxy.stop(0.01, asyncio.Event()) == 1
        response = await asking
        assert response.status == 503
        assert "had to stop" in (await response.json())["error"]["message"]
        assert deployment.proxy.counters.cut_off == 1


async def test_what_fails_while_the_proxy_stops_is_not_tried_again() -> None:
    fail = asyncio.Event()
    async with deployed("sequential", prefill=2, decode=1) as deployment:
        all_do(deployment.prefills, after(fail, answer_error(500)))
        asking = asyncio.create_task(deployment.post())
        await eventually(lambda: asked(deployment.prefills) == [0, 1])
        stopping = asyncio.create_task(deployment.proxy.stop(1000.0, asyncio.Event()))
        await eventually(lambda: deployment.proxy.active.stopping)
        fail.set()
        assert (await asking).status == 502
        assert await stopping == 0
        assert asked(deployment.prefills) == [0, 1]


def test_the_budget_is_a_share_of_what_was_asked_lately_and_a_little_always() -> None:
    budget = RetryBudget()
    assert [budget.spend(0.0) for _ in range(11)] == [True] * 10 + [False]
    assert not budget.spend(0.9)
    assert budget.spend(1.1)
    budget = RetryBudget()
    for tick in range(20_000):
        budget.request(tick * 0.005)
    allowed = [budget.spend(100.0) for _ in range(401)]
    assert allowed[:399] == [True] * 399 and not allowed[-1], "a fifth of 200 a second for 10 s"
    assert not budget.spend(100.1, whatever=False) and budget.spend(100.1, whatever=True)
    assert [budget.spend(1e6) for _ in range(11)] == [True] * 10 + [False], "all is forgotten"


def test_pauses_are_random_and_grow_to_a_bound() -> None:
    longest = [pause(tries, lambda low, high: high) for tries in range(1, 8)]
    assert longest == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert pause(3, lambda low, high: low) == 0.0
    assert len({pause(1) for _ in range(10)}) > 1
