"""An instance that fails again and again gets a pause, one trial, and never so the last of its kind."""

from __future__ import annotations

import pytest
from proxy_behaviours import answer_error, answer_json
from proxy_fakes import deployed, fail, fleet, join, ping

from p2pkv_proxy.membership.instance import LIFE, Breaker, Instance
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import Choice, PrefillMode


def opened(now: float = 0.0) -> Breaker:
    """A breaker whose pauses are as long as they get, opened at `now`."""
    breaker = Breaker(lambda low, high: high)
    assert [breaker.failed(now) for _ in range(5)] == [False] * 4 + [True]
    return breaker


def test_each_trial_that_fails_makes_the_pause_longer_up_to_a_bound() -> None:
    drawn = list[tuple[float, float]]()
    breaker, now, pauses = Breaker(lambda *bounds: drawn.append(bounds) or bounds[1]), 0.0, []
    assert [breaker.failed(now) for _ in range(5)] == [False] * 4 + [True]
    for _ in range(8):
        begun, now = now, next(now + step * 0.5 for step in range(100) if breaker.admits(now + step * 0.5))
        pauses.append(now - begun)
        breaker.sent("trial", now)
        assert breaker.failed(now, "trial")
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert drawn[0] == (0.5, 1.0), "they are jittered"


def test_failures_among_as_many_successes_open_it_and_among_more_do_not() -> None:
    for successes, opens in ((1, True), (2, False)):
        breaker, bad = Breaker(), False
        for _ in range(20):
            for _ in range(successes):
                breaker.succeeded(0.0)
            bad = bad or breaker.failed(0.0)
        assert bad is opens


def test_only_the_last_hundred_count_and_none_of_long_ago() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(10.0 * number) for number in range(50))
    for _ in range(1000):
        breaker.succeeded(500.0)
    assert [breaker.failed(500.0) for _ in range(50)] == [False] * 49 + [True]


def test_once_closed_it_has_forgotten_why_it_was_open() -> None:
    breaker = opened()
    breaker.sent("trial", 1.0)
    assert breaker.succeeded(1.0, "trial")
    assert [breaker.failed(1.0) for _ in range(5)] == [False] * 4 + [True]


def test_a_trial_that_ends_without_an_outcome_or_lasts_long_makes_room_for_another() -> None:
    breaker = opened()
    breaker.sent("leaves", 1.0)
    breaker.given_up("somebody else")
    assert not breaker.admits(1.0)
    breaker.given_up("leaves")
    assert breaker.admits(1.0)
    breaker.sent("hangs", 1.0)
    assert not breaker.admits(30.0)
    assert breaker.admits(31.0)


def test_while_there_is_a_trial_what_becomes_of_others_decides_nothing() -> None:
    breaker = opened()
    breaker.sent("trial", 1.0)
    for owner in (None, "asked before the pause"):
        assert not breaker.succeeded(1.1, owner)
        assert not breaker.failed(1.1, owner)
    assert not breaker.closed and not breaker.admits(1.1)
    assert breaker.succeeded(1.2, "trial")


@pytest.mark.parametrize("success", [True, False])
def test_a_trials_late_outcome_counts_until_there_is_another(success: bool) -> None:
    """P may end after its request, or be found at fault when D has accepted what P refused."""
    breaker, late = opened(), opened()
    for each in (breaker, late):
        each.sent("trial", 1.0)
        each.given_up("trial")
    late.sent("next", 1.1)
    for each, counts in ((breaker, True), (late, False)):
        assert (each.succeeded if success else each.failed)(1.2, "trial") is counts
    assert (breaker.closed, late.closed) == (success, False)
    assert breaker.admits(1.3) is success


def test_what_is_asked_in_the_pause_for_want_of_another_is_no_trial() -> None:
    breaker = opened()
    breaker.sent("the last of its kind", 0.5)
    assert not breaker.failed(0.6, "the last of its kind")
    assert not breaker.succeeded(0.7, "the last of its kind")
    assert not breaker.closed and breaker.admits(1.0)


def test_after_a_long_time_without_failures_the_first_pause_is_short_again() -> None:
    breaker = opened()
    breaker.sent("trial", 1.0)
    breaker.failed(1.0, "trial")
    breaker.sent("trial", 3.0)
    breaker.succeeded(3.0, "trial")
    assert breaker.opened == 2
    for _ in range(5):
        breaker.failed(200.0)
    assert breaker.opened == 1
    assert breaker.admits(201.0)


def prefiller(choice: Choice) -> Instance:
    assert choice.prefill is not None
    return choice.prefill


@pytest.mark.parametrize("role", ["P", "D"])
def test_the_last_one_that_serves_a_model_is_used_whatever_its_breaker_says(role: str) -> None:
    router, pool = fleet(*((each, {"model": model}) for model in "ab" for each in "PD"))
    fail(pool["PD".index(role)])
    for _ in range(3):
        choice = router.choose(RoutingRequest("a"), 0.1)
        assert {prefiller(choice).ping.model, choice.decode.ping.model} == {"a"}


def test_if_all_are_open_all_are_used() -> None:
    router, both = fleet("D", "D")
    for instance in both:
        fail(instance)
    assert {router.choose(RoutingRequest(), 0.1, mode=PrefillMode.NONE).decode for _ in range(4)} == set(both)


def test_a_crash_does_not_clean_the_record_and_a_goodbye_and_time_do() -> None:
    registry = Registry()
    fail(join(registry, ping(incarnation="first")))
    again = join(registry, ping(incarnation="second"), 1.0)
    assert not again.breaker.closed
    registry.expire(LIFE + 2)
    assert not join(registry, ping(incarnation="third"), LIFE + 3).breaker.closed
    registry.observe(ping(incarnation="third", leaving=True), LIFE + 4)
    after_goodbye = join(registry, ping(incarnation="third and a half"), LIFE + 5)
    assert after_goodbye.breaker.closed
    fail(after_goodbye, LIFE + 5)
    registry.expire(200.0)
    assert registry.known("P") == [] and registry._breakers == {}
    assert join(registry, ping(incarnation="fourth"), 200.0).breaker.closed


async def test_a_p_that_fails_is_spared_tried_once_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployed("sequential", prefill=2, decode=1) as deployment:
        bad, good = deployment.prefills
        bad.behaviour = answer_error(500)
        now = deployment.proxy.clock()
        instance = deployment.known(bad)
        monkeypatch.setattr(deployment.proxy, "clock", lambda: now)
        monkeypatch.setattr(deployment.registry, "alive", lambda instance, at: True)
        monkeypatch.setattr(deployment.proxy.admission, "_clock", lambda: now)
        instance.breaker._uniform = lambda low, high: high
        # The clients notice nothing: the other P takes what this one fails.
        await deployment.serves(20)
        assert len(bad.requests) == 5
        assert deployment.proxy.counters.breakers_opened == 1
        assert deployment.proxy.gauges()["breakers_open"] == 1
        now += 1.0
        await deployment.serves(4)
        assert len(bad.requests) == 6
        bad.behaviour = answer_json
        now += 2.0
        before = len(good.requests)
        await deployment.serves(4)
        assert (len(bad.requests), len(good.requests)) == (6 + 2, before + 2)
        assert deployment.proxy.gauges()["breakers_open"] == 0
