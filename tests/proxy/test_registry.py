"""Who exists and who is chosen, on a clock that only the test moves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from proxy_fakes import Line, fleet, join, ping

from p2pkv.control.discovery import PING_INTERVAL, goodbye
from p2pkv_proxy.membership.instance import LIFE, Instance, ListedSource, LossReason, Role, least_busy
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import NoInstance, PrefillMode, Router


def test_life_is_more_than_three_intervals_and_each_ping_renews_it() -> None:
    late = 3 * PING_INTERVAL + 0.5
    assert late < LIFE
    registry = Registry()
    instance = join(registry, ping(), 91.0)
    registry.observe(ping(), 100.0)
    registry.observe(ping(), 99.0)  # a late one does not shorten it
    assert registry.expire(100.0 + late) == []
    assert registry.routable("P", 100.0 + late) == [instance]
    later = join(registry, ping(port=2), 105.0)
    assert registry.routable("P", 100.0 + LIFE + 0.1) == [later]
    assert registry.expire(100.0 + LIFE + 0.1) == [instance]
    assert registry.known("P") == [later]


@pytest.mark.parametrize("change", [{"incarnation": "second"}, {"model": "other"}, {"tp_size": 2}])
def test_a_restart_under_the_same_address_is_a_newcomer(change: dict[str, Any]) -> None:
    registry = Registry()
    old = join(registry, ping(incarnation="first"), 0.0)
    new = registry.observe(ping(**({"incarnation": "first"} | change)), 1.0)
    assert new is not None
    assert new is not old
    assert registry.routable("P", 1.0) == []
    assert registry.known("P") == [new]


def test_a_goodbye_of_the_old_incarnation_leaves_the_new_one_and_a_strangers_registers_nobody() -> None:
    registry = Registry()
    assert registry.observe(goodbye(ping()), 0.0) is None and registry.known("P") == []
    join(registry, ping(incarnation="first"))
    new = join(registry, ping(incarnation="second"), 1.0)
    registry.observe(goodbye(ping(incarnation="first")), 2.0)
    assert registry.known("P") == [new]


def test_the_registry_is_bounded_and_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(capacity=2)
    for port in (1, 2):
        join(registry, ping(port=port))
    for second in range(100):
        assert registry.observe(ping(port=3 + second), float(second)) is None
    assert len(registry.known("P")) == 2
    assert registry.observe(ping(port=2, incarnation="again"), 100.0) is not None
    said = [each.getMessage() for each in caplog.records if "are known already" in each.getMessage()]
    assert len(said) == 2


def test_p_and_d_are_chosen_independently() -> None:
    router, _ = fleet(*"PPDD")
    choices = [router.choose(RoutingRequest(), 0.0) for _ in range(2)]
    router.choose(RoutingRequest(), 0.0, mode=PrefillMode.NONE)  # takes D's turn, not P's
    choices += [router.choose(RoutingRequest(), 0.0) for _ in range(2)]
    pairs = {(c.prefill.ping.http_address, c.decode.ping.http_address) for c in choices if c.prefill}
    assert len(pairs) == 4


def test_of_very_many_some_are_compared() -> None:
    """Nobody gets a request who has more to do than 128 that are drawn, and all get some."""
    registry, chosen = Registry(1e9), Counter[Instance]()
    pool = [join(registry, ping("D", 1000 + number)) for number in range(512)]
    for busy in pool[::2]:
        busy.count_place(1, decode_alone=False)
    for turn in range(600):
        least = least_busy(pool)
        chosen[least] += 1
        least.take_turn(turn + 1)
    assert set(chosen) == set(pool[1::2]) and max(chosen.values()) < 8


def test_one_that_is_dead_ends_what_it_has_and_gets_no_more() -> None:
    registry = Registry()
    instance = join(registry, ping("D"))
    ended: list[tuple[str, LossReason]] = []
    with instance.busy(lambda loss: ended.append(("over before", loss))):
        pass
    with instance.busy(lambda loss: ended.append(("under way", loss))):
        instance.lost("silent")
    assert ended == [("under way", "silent")]
    assert registry.routable("D", 0.0) == []


def test_only_those_with_requests_are_missed_before_their_life_ends() -> None:
    registry = Registry()
    idle, busy = join(registry, ping("D", 1)), join(registry, ping("D", 2))
    with busy.busy(lambda loss: None):
        assert registry.late(LIFE * 0.6) == []
        assert registry.late(LIFE * 0.7) == [busy]
    assert idle.healthy


def serving(*models: str) -> Router:
    """A P and a D for each model."""
    return fleet(*((role, {"model": model}) for model in models for role in "PD"))[0]


@pytest.mark.parametrize("models", ["abab", [None] * 4])
def test_the_requests_model_chooses_the_pool_and_without_one_the_two_still_match(models: Any) -> None:
    router = serving("a", "b")
    for model in models:
        choice = router.choose(RoutingRequest(model), 0.0)
        assert choice.prefill is not None
        assert choice.prefill.ping.model == choice.decode.ping.model
        assert model in (None, choice.decode.ping.model)


@pytest.mark.parametrize(("served", "asked"), [("a", "an-adapter"), ("", "whatever")])
def test_an_unknown_model_is_left_to_the_only_pool(served: str, asked: str) -> None:
    choice = serving(served).choose(RoutingRequest(asked), 0.0)
    assert choice.prefill is not None and choice.decode.ping.model == served


@pytest.mark.parametrize("alone", [0, 1])
def test_two_models_that_do_not_match_make_no_pair(alone: int) -> None:
    router, (_, d) = fleet(("P", {"model": "a"}), ("D", {"model": "b"}), decode_alone=alone)
    if alone:
        choice = router.choose(RoutingRequest("b"), 0.0)
        assert (choice.prefill, choice.decode) == (None, d)
    else:
        with pytest.raises(NoInstance, match="same model"):
            router.choose(RoutingRequest(), 0.0)


@pytest.mark.parametrize(
    ("incarnations", "stays"),
    [
        (("", "first"), True),
        (("first", ""), True),
        (("first", "", "first"), True),
        (("first", "second"), False),
        (("", "first", "second"), False),
        (("first", "", "second"), False),
    ],
)
def test_a_listed_instance_stays_drained(incarnations: tuple[str, ...], stays: bool) -> None:
    registry, source = Registry(), ListedSource()
    first, *later = (ping("D", incarnation=each) for each in incarnations)
    instance = registry.observe(first, 0.0, source)
    assert instance is not None
    registry.drain(instance, True)
    for each in later:
        registry.observe(each, 0.0, source)
    assert registry.known("D")[0].drained == stays


@pytest.mark.parametrize(("listed", "drained"), [("", True), ("first", True), ("another", False)])
def test_who_is_listed_with_each_role_and_pings_with_both_is_one(listed: str, drained: bool) -> None:
    registry, sources = Registry(), [ListedSource(), ListedSource()]
    roles: tuple[Role, ...] = "P", "D"
    for role, source in zip(roles, sources, strict=True):
        registry.drain(join(registry, ping(role, incarnation=listed), 0.0, source), True)
    other = join(registry, ping("D", 1), 0.0, ListedSource())
    both = join(registry, ping("both", incarnation="first"), 1.0, Line())  # type: ignore[arg-type]
    assert registry.known("P") == [both] and registry.known("D") == [other, both]
    assert all(source.pinged for source in sources)
    assert both.drained == drained, "a restart ends it"
