"""Placement by predicted cost: what is learned, what is chosen from it, and what the pages show."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import proxy_behaviours
import proxy_fakes
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from proxy_behaviours import after
from proxy_fakes import deployed, join, ping, prompt_of
from test_continuation import COMPLETION, ask, generates, same, whole

from p2pkv.control.discovery import Workload
from p2pkv.pairing import find_pair
from p2pkv_proxy.admission import Admission
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.instance import Instance, WorkloadReport
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.placement import MAX_COMPARED, EngineCosts, LeastSquares, PlacedRequest, PlacementCosts
from p2pkv_proxy.policies import Routing, RoutingRequest
from p2pkv_proxy.routing import PrefillMode, Router
from support.waiting import eventually

AUTO = Routing(placement="auto")


def request(tokens: int) -> RoutingRequest:
    return RoutingRequest("m", prompt_of({"prompt": [*range(tokens)]}), "")


def fleet(*roles: Any, decode_alone: int = 0, routing: Routing = AUTO) -> tuple[Router, list[Instance]]:
    return proxy_fakes.fleet(*roles, registry=Registry(1e9), routing=routing, decode_alone=decode_alone)


@given(st.tuples(*[st.floats(0.001, 0.5)] * 3), st.integers(0, 1 << 32))
def test_least_squares_finds_the_weights_of_a_linear_cost(weights: tuple[float, ...], seed: int) -> None:
    learner, dice = LeastSquares([0.1, 0.1, 0.1]), random.Random(seed)
    for _ in range(300):
        features = 1.0, dice.uniform(0.1, 4.0), dice.uniform(0.0, 4.0)
        learner.learn(sum(w * f for w, f in zip(weights, features, strict=True)), *features)
    for features in ((1.0, 0.2, 0.0), (1.0, 4.0, 1.0), (1.0, 2.0, 4.0)):
        expected = sum(w * f for w, f in zip(weights, features, strict=True))
        assert learner.predict(*features) == pytest.approx(expected, rel=0.05, abs=0.005)


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 40.0), st.floats(0.0, 40.0)), max_size=400))
def test_no_observation_makes_a_prediction_negative_or_infinite(
    seen: list[tuple[float, float, float]],
) -> None:
    learner = LeastSquares([0.01, 0.05, 0.02])
    for seconds, one, other in seen:
        learner.learn(seconds, 1.0, one, other)
        assert 0.0 <= learner.predict(1.0, one, other) < 1e6


def test_an_instance_that_becomes_slower_is_learned_anew_and_one_stall_decides_nothing() -> None:
    learner = LeastSquares([0.1, 0.1])
    for factor in (1.0, 5.0):
        for at in range(150):
            learner.learn(factor * 0.1 * (at % 7), 1.0, at % 7)
        assert learner.predict(1.0, 3.0) == pytest.approx(factor * 0.3, rel=0.1)
    learner = LeastSquares([0.1])
    for seen in [0.1] * 50 + [60.0]:
        learner.learn(seen, 1.0)
    assert learner.predict(1.0) < 0.2


def test_the_queue_of_an_engine_passes_with_time() -> None:
    engine = EngineCosts()
    engine.prompt.weights = [0.0, 0.256, 0.0]
    long = engine.prompt_placed(1000, 0.0)
    short = engine.prompt_placed(500, 0.0)
    assert engine.queued_seconds(0.0) == pytest.approx(1.5)
    assert engine.queued_seconds(0.5) == pytest.approx(1.0)
    engine.prompt_computed(long, 1.0)
    assert engine.queued_seconds(1.0) == pytest.approx(0.5, rel=0.1)
    engine.prompt_left(short, 1.0)
    assert engine.queued_seconds(1.0) == 0.0


def test_an_engine_that_hangs_does_not_look_idle() -> None:
    router, (hung, well) = fleet("both", "both")
    for each in (hung, well):
        learned(router, each, 0.1, 0.02)
    router.costs.of(hung).prompt_placed(100, 0.0)
    router.costs.of(well).prompt_placed(2000, 9.9)
    assert router.costs.of(hung).queued_seconds(10.0) > 9.0
    choice = router.choose(request(200), 10.0)
    assert (choice.prefill or choice.decode) is well


def test_steps_are_learned_without_the_time_that_prompts_took() -> None:
    """Answers of 20 steps of 10 ms, each stopped for 0.3 s by a prompt."""
    engine = EngineCosts()
    for at in range(0, 100, 1):
        now = float(at)
        engine.count_answers(1, now)
        begun = engine.marks(now)
        engine.prompt_computed(engine.prompt_placed(100, now), now + 0.3)
        engine.answer_ended(20, begun, now + 0.5)
        engine.count_answers(-1, now + 0.5)
    assert engine.step.predict(1.0, 1 / 16, 0.6) == pytest.approx(0.025, rel=0.1)
    assert 0.0 < engine.prefill_share(100.0) < 0.4


def learned(router: Router, instance: Instance, prompt: float, step: float) -> EngineCosts:
    """This instance computes 256 tokens in `prompt` seconds, and decodes steps of `step` seconds."""
    engine = router.costs.of(instance)
    engine.prompt.weights, engine.step.weights = [0.0, prompt, 0.0], [step, 0.001, 0.05]
    engine.hand_over.weights = [0.02, 0.0]
    return engine


def test_one_that_is_new_is_taken_for_as_fast_as_those_that_are_known() -> None:
    """Much faster than the first weights say; else it would get nothing until these are busy."""
    router, pool = fleet("both", "both")
    engine = router.costs.of(pool[0])
    for _ in range(50):
        engine.prompt.learn(0.004, 1.0, 1.0, 0.0)
        engine.step.learn(0.007, 1.0, 0.0, 0.0)
    assert {router.choose(request(256), 0.0).decode for _ in pool} == {*pool}


def test_an_idle_pool_serves_a_request_whole() -> None:
    router, pool = fleet("both", "both")
    for each in pool:
        learned(router, each, 0.1, 0.02)
    choice = router.choose(request(64), 0.0)
    assert choice.single_instance and choice.prefill is None
    assert choice.prediction is not None and choice.prediction.way == "whole"
    assert choice.prediction.other is not None and choice.prediction.other > choice.prediction.cost


def test_a_long_prompt_is_kept_from_many_answers_by_the_weight_of_pauses() -> None:
    """The first decodes 16 answers. The second has prompts queued."""
    for weight, computed_at in ((0.0, 0), (4.0, 1)):
        router, pool = fleet("both", "both", routing=Routing(placement="auto", pause_weight=weight))
        busy, queued = (learned(router, each, 0.1, 0.02) for each in pool)
        busy.count_answers(16, 0.0)
        queued.prompt_placed(2000, 0.0)
        choice = router.choose(request(800), 0.0)
        assert (choice.prefill or choice.decode) is pool[computed_at]


DEARER: dict[str, Callable[[EngineCosts], None]] = {
    "hand-overs are slow": lambda engine: engine.hand_over.learn(5.0, 1.0, 1.0),
    "answers are decoded": lambda engine: engine.count_answers(4, 0.0),
    "prompts are computed": lambda engine: engine.prompt_placed(1000, 0.0),
}


@pytest.mark.parametrize("dearer", DEARER)
def test_an_answer_is_decoded_where_it_costs_least(dearer: str) -> None:
    router, (p, d, dear) = fleet("P", "D", "D")
    for each in (p, d, dear):
        learned(router, each, 0.1, 0.02)
    DEARER[dearer](router.costs.of(dear))
    choices = [router.choose(request(100), 0.0) for _ in range(3)]
    assert [(each.prefill, each.decode) for each in choices] == [(p, d)] * 3


@pytest.mark.parametrize("count", [2, 100])
def test_what_is_cached_costs_nothing_and_who_has_it_is_always_compared(count: int) -> None:
    router, pool = fleet(*["both"] * count, routing=Routing(placement="auto", prefill="prefix_aware"))
    for each in pool:
        learned(router, each, 0.2, 0.02)
    one = request(2000)
    first = router.choose(one, 0.0)
    for _ in range(50):
        again = router.choose(one, 0.0)
        assert again.decode is first.decode
        assert again.prefill_tokens < first.prefill_tokens == one.prompt.tokens


@pytest.mark.parametrize("alone", [0, 4])
def test_fixed_roles_stay(alone: int) -> None:
    """A D computes a prompt by itself only within its share."""
    router, (p, d) = fleet("P", "D", decode_alone=alone)
    learned(router, p, 10.0, 0.02)
    learned(router, d, 0.01, 0.02)
    choice = router.choose(request(64), 0.0)
    assert (choice.prefill, choice.decode, choice.prefill_skipped) == (
        (None, d, True) if alone else (p, d, False)
    )


def test_after_a_failed_prefill_another_place_is_chosen_by_cost() -> None:
    """A D computes no prompt then, although it may compute some."""
    router, (failed, p, d, both) = fleet("both", "P", "D", "both", decode_alone=4)
    for each, prompt in ((failed, 0.01), (p, 0.2), (d, 0.01), (both, 0.1)):
        learned(router, each, prompt, 0.02)
    after = {"mode": PrefillMode.NEEDED, "avoid": frozenset({failed})}
    choice = router.choose(request(256), 0.0, **after)
    assert choice.decode is both and choice.single_instance and choice.prediction is not None
    router.costs.of(both).prompt_placed(4000, 0.0)
    assert router.choose(request(256), 0.0, **after).prefill is p


@pytest.mark.parametrize("by_prefill", [True, False])
def test_a_hand_over_lasts_until_d_decodes_whoevers_token_comes_first(by_prefill: bool) -> None:
    """P computes for 0.1 s, D's first event comes 0.3 s later, and nine more with 0.02 s before each."""
    router, (p, d) = fleet("P", "D")
    for each in (p, d):
        learned(router, each, 0.1, 0.02)
    for number in range(200):
        began = 10.0 * number
        choice = router.choose(request(256), began)
        progress = router.track(choice, began)
        progress.computed(began + 0.1)
        if by_prefill:
            progress.first_token(began + 0.1)
        progress.decodes(began + 0.4)
        progress.ended(9, began + 0.4 + 9 * 0.02)
        progress.leave(began + 1.0)
    engine = router.costs.of(d)
    assert engine.hand_over.predict(1.0, 1.0) == pytest.approx(0.3, rel=0.1)
    assert engine.step.predict(1.0, 1 / 16, 0.0) == pytest.approx(0.02, rel=0.1)
    prediction, seen = router.costs.latest[-1]
    assert seen == pytest.approx(0.1 if by_prefill else 0.4)
    assert prediction.first_token == pytest.approx(seen, rel=0.1)
    hand_over = 0.3 if by_prefill else 2 * 0.3  # twice where the first token waits for it
    assert prediction.cost == pytest.approx(2 * 0.1 + hand_over + 9 * 0.02, abs=0.1)


def test_two_that_do_not_match_are_no_pair() -> None:
    costs = PlacementCosts()
    one, other = fleet("P", "D")[1]
    one.names, other.names = frozenset({"a model"}), frozenset({"another model"})
    assert costs.cheapest([one], [other], 0, 100, {}, 0.0) is None


def test_of_many_instances_few_are_compared() -> None:
    router, pool = fleet(*["both"] * 100)
    for _ in range(20):
        choice = router.choose(request(100), 0.0)
        assert choice.decode in pool
    assert len(router.costs._engines) <= 100
    assert 2 < len(set(router.costs.some(pool))) <= MAX_COMPARED


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2000), st.floats(0.0, 3.0)), max_size=80))
def test_nothing_is_left_of_requests_that_have_ended(events: list[tuple[int, int, float]]) -> None:
    """Whatever order the ends of their parts come in, and whichever of these are missing."""
    router, pool = fleet("both", "both", "P", "D", decode_alone=2)
    admission = Admission(router, Limits(), RequestCounters(), lambda: now)
    now, places = 0.0, []

    def progress_of(number: int) -> PlacedRequest:
        return places[number % len(places)].progress

    for kind, tokens, later in events:
        now += later
        if kind == 0 or not places:
            places.append(admission._new_place(request(tokens), PrefillMode.WANTED))
        elif kind == 1:
            progress_of(tokens).computed(now)
        elif kind == 2:
            progress_of(tokens).first_token(now)
        elif kind == 3:
            progress_of(tokens).decodes(now)
        elif kind == 4:
            progress_of(tokens).ended(tokens, now)
        else:
            admission._leave(places.pop(tokens % len(places)))
        for each in pool:
            engine = router.costs.of(each)
            assert engine.tokens >= 0 <= engine.answers and engine.queued_seconds(now) >= 0
    for place in places:
        admission._leave(place)
    for each in pool:
        engine = router.costs.of(each)
        assert (engine.answers, len(engine._queue), engine.tokens) == (0, 0, 0)


async def test_who_waits_to_go_on_elsewhere_counts_as_no_prompt_meanwhile() -> None:
    router, (p, *both) = fleet("P", "D", "D")
    router._registry.limit_places(1)
    admission = Admission(router, Limits(), RequestCounters(), lambda: 0.0)
    async with admission.place(request(500), paired=True) as place:
        elsewhere = PrefillMode.WANTED, frozenset({lost := place.choice.decode})
        (other,) = (each for each in both if each is not lost)
        other.count_place(1, decode_alone=False)
        assert not admission.move(place, *elsewhere)
        waits = asyncio.create_task(admission.move_in_time(place, *elsewhere))
        await eventually(lambda: admission.waiting == 1)
        assert router.costs.of(p).tokens == router.costs.of(lost).answers == 0
        other.count_place(-1, decode_alone=False)
        admission.advance()
        assert await waits and router.costs.of(p).tokens == 500


def report(registry: Registry, instance: Instance, now: float, **work: Any) -> None:
    work = {"age": 0.0} | work
    registry.observe(replace(instance.ping, workload=Workload(**work)), now, instance.source)


def two_proxies() -> list[tuple[Router, Registry, list[Instance]]]:
    """In front of four instances."""
    made = []
    for _ in range(2):
        registry = Registry(1e9)
        router, pool = proxy_fakes.fleet(*["both"] * 4, registry=registry, routing=AUTO)
        for each in pool:
            learned(router, each, 0.256, 0.02)
        made.append((router, registry, pool))
    return made


@pytest.mark.parametrize("reports", [True, False])
def test_two_proxies_place_as_one_does_where_instances_report_and_pile_up_where_they_do_not(
    reports: bool,
) -> None:
    """Each sends half of the prompts, one after the other. Nothing is computed meanwhile."""
    proxies, at, now = two_proxies(), Counter[int](), 0.0
    for number in range(8):
        router, _, pool = proxies[number // 4]  # the second begins when the first has sent all of its own
        choice = router.choose(request(1000), now)
        router.track(choice, now)
        at[pool.index(choice.prefill or choice.decode)] += 1
        now += 0.1
        if reports:
            for place in range(4):
                work = {"prompts": at[place], "tokens": 1000 * at[place], "answers": at[place]}
                for _, registry, instances in proxies:
                    report(registry, instances[place], now, **work)
            now += 0.1
    if reports:
        assert sorted(at.values()) == [2, 2, 2, 2]
    else:
        engines = [router.costs.of(pool[0]) for router, _, pool in proxies]
        assert [engine.tokens for engine in engines] == [1000, 1000], "neither knows of the other's"


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 2000), st.floats(0.0, 0.4), st.floats(0.0, 0.05)), max_size=30
    ),
    st.floats(0.0, 0.5),
)
def test_no_prompt_counts_twice_and_none_is_missing(
    prompts: list[tuple[bool, int, float, float]], age: float
) -> None:
    """Prompts of this proxy and of another one, some of which are on their way when the instance reports. At
    that time all that it has counts once; so do those that come later, and beside them only what was on its
    way for less than 50 ms may count twice."""
    engine, now, at = EngineCosts(), 0.0, 1.0
    engine.prompt.weights = [0.0, 256.0, 0.0]  # a second a token: nothing is computed meanwhile
    there = mine = between = 0
    for own, tokens, later, way in prompts:
        now += later / 4
        if own:
            engine.prompt_placed(tokens, now)
            arrived = now + way <= at
            between += tokens * (at - 0.05 < now and arrived)
            mine += tokens * (not arrived)
            there += tokens * arrived
        elif now <= at:
            there += tokens
    now = max(now, at + age)
    engine.follow(WorkloadReport(Workload(prompts=there > 0, tokens=there), at))
    counted = engine._waiting(at)[1]
    assert there + mine <= counted + 1e-6 and counted <= there + mine + between + 1e-6


def test_what_has_been_computed_since_a_report_counts_no_more_nor_an_old_report() -> None:
    engine = EngineCosts()
    engine.prompt.weights = [0.0, 0.256, 0.0]
    engine.follow(WorkloadReport(Workload(prompts=2, tokens=1000), 0.0))
    assert engine.queued_seconds(0.4) == pytest.approx(0.6)
    mine = engine.prompt_placed(500, 0.4)
    assert engine.queued_seconds(0.4) == pytest.approx(1.1)
    assert engine.queued_seconds(1.2) == pytest.approx(0.3)
    engine.prompt_computed(mine, 0.9, learn=False)  # so those before it are, too
    assert engine.queued_seconds(0.9) == 0.0

    engine = EngineCosts()
    engine.prompt.weights = [0.0, 25.6, 0.0]
    engine.follow(WorkloadReport(Workload(prompts=2, tokens=1000), 0.0))
    assert engine.queued_seconds(5.0) > 90.0 and engine.queued_seconds(7.0) == 0.0
    engine.follow(WorkloadReport(Workload(), 10.0))
    engine.prompt_placed(10, 10.0)
    assert engine.queued_seconds(20.0) >= 9.0, "it hangs"


def test_a_ping_of_the_version_before_changes_nothing() -> None:
    registry = Registry(1e9)
    one = join(registry, ping("both", 10))
    registry.observe(one.ping, 1.0)
    assert one.report is None and one.last_seen == 1.0
    report(registry, one, 2.0, tokens=5, age=0.5)
    registry.observe(one.ping, 3.0)
    assert one.report is not None and (one.report.work.tokens, one.report.at) == (5, 1.5)


@pytest.mark.parametrize(
    ("victim", "failure"),
    [
        *itertools.product(
            ["whole", "P", "D"],
            [proxy_behaviours.dies, proxy_behaviours.dies_before_a_token, proxy_behaviours.answer_error(500)],
        ),
        *itertools.product(["whole", "D"], [generates(lost_after=9)]),
    ],
)
async def test_a_request_goes_to_no_instance_that_has_failed_it(
    victim: str, failure: proxy_behaviours.Behaviour
) -> None:
    """By cost alone it would come back: the victim stays the cheapest one."""
    async with deployed("concurrent", routing=AUTO) as pool:
        fakes = [await pool.add("both") for _ in range(3)]  # type: ignore[arg-type]
        await pool.ready(3, 3)
        by_address = {each.ping.http_address: each for each in pool.registry.known("D")}
        p, d, other = (by_address[each.http_address] for each in fakes)
        costs = (0.01, 9.0), (9.0, 0.01), (90.0, 90.0)
        if victim == "whole":
            costs = (0.01, 0.01), *costs[1:]
        for each, (prompt, step) in zip((p, d, other), costs, strict=True):
            learned(pool.proxy.router, each, prompt, step)
        lost = fakes[victim == "D"]

        def as_vllm(seen: proxy_behaviours.Seen) -> proxy_behaviours.Behaviour:
            """It waits for the KV of the P that is lost."""
            pair = find_pair(seen.request_id)
            waits = pair is not None and str(pair.prefill) == lost.zmq_address
            return proxy_behaviours.never_a_token if waits else generates()

        for fake in fakes:
            fake.behaviour = failure if fake is lost else proxy_behaviours.chosen(as_vllm)
        assert same(await ask(pool, COMPLETION), whole(COMPLETION))
        assert len({each.request_id for each in lost.requests}) == 1
        ways = pool.proxy.router.costs.ways
        assert ways["whole" if victim == "whole" else "pair"] > 0 < ways.total() - 1
        await eventually(lambda: not any(pool.proxy.router.costs.of(each).answers for each in (p, d, other)))


async def test_the_pages_show_what_was_predicted_and_what_came() -> None:
    async with deployed("concurrent", routing=AUTO) as pool:
        for _ in range(2):
            await pool.add("both", behaviour=proxy_behaviours.streams_at_once)  # type: ignore[arg-type]
        await pool.ready(2, 2)
        await pool.serves(8, stream=True)
        page = (await pool.get("/status"))[1]["placement"]
        assert page["by"] == "auto" and sum(page["ways"].values()) == 8
        assert page["median_error"] >= 0.0 and len(page["latest"]) == 8
        assert all(each["first_token_seen"] > 0 < each["first_token"] for each in page["latest"])
        metrics = await pool.text("/metrics")
        counted = [
            line
            for line in metrics.splitlines()
            if line.startswith("p2pkv_proxy_first_token_prediction_error_count")
        ]
        assert sum(float(line.split()[-1]) for line in counted) == 8
        assert "instance_reported_queued_tokens{" not in metrics
        for each in pool.registry.known("P"):
            report(pool.registry, each, pool.proxy.clock(), running=1, tokens=700)
        metrics = await pool.text("/metrics")
        assert metrics.count('"} 700.0') == 2
        (shown, _) = (await pool.get("/instances"))[1]["instances"]
        assert shown["reported"]["tokens"] == 700
        for name in ("queued_prefill_seconds", "prefill_share", "reported_running", "reported_queued_tokens"):
            assert metrics.count(f"p2pkv_proxy_instance_{name}{{") == 2


async def test_a_prompt_leaves_the_queue_when_predicted_where_nothing_shows_that_it_is_computed() -> None:
    """Of an answer that is no stream; only a stream teaches anything."""
    async with deployed("concurrent", routing=AUTO) as pool:
        release = asyncio.Event()
        one = await pool.add("both")  # type: ignore[arg-type]
        one.behaviour = after(release, proxy_behaviours.answer_json)
        await pool.ready(1, 1)
        (instance,) = pool.registry.known("D")
        engine = pool.proxy.router.costs.of(instance)
        before = engine.prompt.weights = [1.0, 0.0, 0.0]
        asking = await pool.under_way(one)
        assert (engine.answers, len(engine._queue)) == (1, 1)
        await eventually(lambda: len(engine._queue) == 0)
        assert not asking.done() and engine.answers == 1
        release.set()
        assert (await asking).status == 200
        await eventually(lambda: engine.answers == 0)
        assert engine.prompt.weights == before
