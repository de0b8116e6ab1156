"""Places at instances: who is served, waits or is turned away, and which prompts a D computes alone."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from typing import Any

import pytest
from aiohttp import web
from proxy_behaviours import Seen, after, answer_json, answers, dies, never, with_a_p
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
    quiet,
)
from test_failures import OFF

from p2pkv_proxy.access import Tenants, TenantSettings
from p2pkv_proxy.admission import Admission, RequestPlace
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.http import ProxyError
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import Routing, RoutingRequest
from p2pkv_proxy.routing import Choice, PrefillMode
from support.waiting import eventually

NARROW = Limits(max_requests=1, max_waiting=3, max_wait=30.0, max_held=10_000, body_seconds=0.3)


@pytest.fixture
async def narrow() -> AsyncIterator[Deployment]:
    """One P, and one D that takes one request at a time; three may wait."""
    async with deployed("concurrent", 1, 1, limits=NARROW) as deployment:
        yield deployment


@contextmanager
def slow(instance: FakeInstance) -> Iterator[None]:
    release = asyncio.Event()
    instance.behaviour = after(release, answer_json)
    yield
    release.set()


async def with_one_waiting(deployment: Deployment) -> list[asyncio.Task[int]]:
    asked = [ask(deployment, "first")]
    await eventually(lambda: len(deployment.d.requests) == 1)
    asked.append(ask(deployment, "second"))
    await eventually(lambda: deployment.proxy.admission.waiting == 1)
    return asked


def ask(deployment: Deployment, prompt: str = "hi", model: str = "tiny") -> asyncio.Task[int]:
    async def status() -> int:
        async with await deployment.post({"model": model, "prompt": prompt}) as response:
            await response.read()
            return response.status

    return asyncio.create_task(status())


def prompts(instance: FakeInstance) -> list[str]:
    return [seen.body["prompt"] for seen in instance.requests]


async def test_beyond_the_queue_there_is_a_503_that_says_when_to_come_again(narrow: Deployment) -> None:
    with slow(narrow.d):
        asked = [ask(narrow) for _ in range(4)]
        await eventually(lambda: narrow.proxy.admission.waiting == 3)
        response = await narrow.post()
        assert response.status == 503
        assert int(response.headers["Retry-After"]) in range(3, 7)
        error = (await response.json())["error"]
        assert error["type"] == "service_unavailable_error"
        assert "and the queue is full (--max-waiting)" in error["message"]
    assert await asyncio.gather(*asked) == [200] * 4
    assert narrow.proxy.counters.refused_full == 1
    assert len(narrow.d.requests) == 4


async def test_who_waits_too_long_gets_a_503() -> None:
    async with deployed("concurrent", 1, 1, max_requests=1, max_wait=0.2) as deployment:
        with slow(deployment.d):
            first = ask(deployment)
            await eventually(lambda: len(deployment.d.requests) == 1)
            assert "within 0.2 seconds" in await deployment.refusal(503)
            assert deployment.proxy.counters.refused_late == 1
        assert await first == 200
        assert len(deployment.d.requests) == 1


async def test_a_client_that_leaves_in_the_queue_is_out_and_reaches_nobody(narrow: Deployment) -> None:
    with slow(narrow.d):
        first, leaves = await with_one_waiting(narrow)
        stays = ask(narrow, "stays")
        await eventually(lambda: narrow.proxy.admission.waiting == 2)
        leaves.cancel()
        await eventually(lambda: narrow.proxy.admission.waiting == 1)
        assert narrow.proxy.counters.left_waiting == 1
    assert await asyncio.gather(first, stays) == [200, 200]
    assert prompts(narrow.d) == ["first", "stays"]
    assert sorted(prompts(narrow.p)) == ["first", "stays"]


async def test_who_waits_goes_on_waiting_while_there_is_no_instance(narrow: Deployment) -> None:
    with slow(narrow.d):
        first, second = await with_one_waiting(narrow)
        narrow.pingers[narrow.d.http_address].stop()
        await narrow.ready(prefill=1, decode=0)
    assert await first == 200
    assert narrow.proxy.admission.waiting == 1
    newcomer = await narrow.add("D")
    assert await second == 200
    assert prompts(newcomer) == ["second"]


async def test_bodies_are_held_within_a_bound(narrow: Deployment) -> None:
    with slow(narrow.d):
        asked = [ask(narrow, "x" * 4000) for _ in range(2)]
        await eventually(lambda: narrow.proxy.admission.waiting == 1)
        assert 8000 < narrow.proxy.intake.held < 10_000
        assert "leave no memory for this one" in await narrow.refusal(503, {"prompt": "x" * 4000})
        assert narrow.proxy.counters.refused_full == 1
    assert await asyncio.gather(*asked) == [200, 200]
    await quiet(narrow)
    assert narrow.proxy.intake.held == 0


async def test_of_a_herd_everybody_gets_one_answer_and_d_never_more_than_it_takes() -> None:
    most = 0

    async def busy(request: web.Request, seen: Seen) -> web.StreamResponse:
        nonlocal most
        under_way = sum(not each.answered and not each.aborted for each in deployment.d.requests)
        most = max(most, under_way)
        await asyncio.sleep(0)
        return await answer_json(request, seen)

    async with deployed("concurrent", 1, 1, max_requests=4, max_waiting=50, max_wait=30.0) as deployment:
        deployment.d.behaviour = busy
        statuses = await asyncio.gather(*(ask(deployment) for _ in range(200)))
        assert set(statuses) <= {200, 503}
        assert statuses.count(200) == len(deployment.d.requests) == deployment.proxy.counters.admitted >= 54
        assert statuses.count(503) == deployment.proxy.counters.refused_full
        assert 1 <= most <= 4


async def test_a_body_as_deep_as_one_may_be_harms_nobody_else(narrow: Deployment) -> None:
    """Its tokens are counted where the stack is deeper than where it was read, and by another's turn."""

    def nested(depth: int) -> bytes:
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        return b'{"model": "tiny", "prompt": "x", "tools": [' + deep + b"]}"

    async def post(body: bytes) -> int:
        async with narrow.client.post(f"{narrow.url}/v1/completions", data=body) as response:
            await response.read()
            return response.status

    readable, refused = 1, 1_400  # which just fits what may be held
    while refused - readable > 1:
        middle = (readable + refused) // 2
        if await post(nested(middle)) == 400:
            refused = middle
        else:
            readable = middle
    before = len(narrow.d.requests)
    with slow(narrow.d):
        first = ask(narrow)
        await eventually(lambda: len(narrow.d.requests) == before + 1)
        deep = asyncio.create_task(post(nested(readable)))
        last = ask(narrow)
        await eventually(lambda: narrow.proxy.admission.waiting == 2)
    assert await first == await last == 200
    assert await deep in (200, 400, 500)
    await narrow.newcomer("D")


# Places at instances: none is lost, none is kept, and they are given out evenly and cheaply.


def small(**limits: Any) -> Admission:
    return Admission(fleet("D", room=1)[0], Limits(**limits), RequestCounters(), lambda: 0.0)


async def enter(admission: Admission, leave: asyncio.Event | None = None, model: str | None = None) -> None:
    async with admission.place(RoutingRequest(model), paired=False):
        if leave is not None:
            await leave.wait()


async def test_a_place_that_comes_as_the_wait_ends_is_not_lost() -> None:
    admission, leave = small(max_wait=0.05), asyncio.Event()
    holder = asyncio.create_task(enter(admission, leave))
    await eventually(lambda: admission.under_way == 1)
    late = asyncio.create_task(enter(admission))
    await eventually(lambda: admission.waiting == 1)
    leave.set()
    time.sleep(0.06)  # the holder leaves and the deadline passes in the same turn of the loop
    with pytest.raises(ProxyError):
        await late
    await holder
    assert (admission.waiting, admission.under_way) == (0, 0)
    await enter(admission)


async def test_a_place_that_comes_as_its_client_leaves_is_not_lost() -> None:
    admission = small()
    async with admission.place(RoutingRequest(), paired=False):
        leaver = asyncio.create_task(enter(admission))
        await eventually(lambda: admission.waiting == 1)
    # The place is the leaver's by now, which has not run since.
    assert (admission.waiting, admission.under_way) == (0, 1)
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert (admission.waiting, admission.under_way) == (0, 0)
    await enter(admission)


@pytest.mark.parametrize("closes", [False, True])
async def test_who_has_just_left_gets_no_place_and_spoils_no_end(closes: bool) -> None:
    admission = small()
    async with admission.place(RoutingRequest(), paired=False):
        leaver, stayer = (asyncio.create_task(enter(admission)) for _ in range(2))
        await eventually(lambda: admission.waiting == 2)
        leaver.cancel()  # in the turn of the loop in which the place comes
        if closes:
            admission.close(ProxyError(503, "the end"))
    with pytest.raises(ProxyError, match="the end") if closes else nullcontext():
        await stayer
    with pytest.raises(asyncio.CancelledError):
        await leaver
    assert (admission.waiting, admission.under_way) == (0, 0)


async def test_who_moves_makes_room_for_who_waits() -> None:
    router, (both, one) = fleet("D", "D", room=1)
    both.learn(frozenset({"a", "b"}))
    one.learn(frozenset({"b"}))
    one.take_turn(1)  # so that the other one is first
    admission = Admission(router, Limits(), RequestCounters(), lambda: 0.0)
    async with admission.place(RoutingRequest("b"), paired=False) as place:
        assert place.choice.decode is both
        waiter = asyncio.create_task(enter(admission, model="a"))
        await eventually(lambda: admission.waiting == 1)
        assert admission.move(place, PrefillMode.NONE, frozenset({both}))
        await waiter
        assert (both.places, one.places) == (0, 1)
    assert one.places == 0


async def test_who_wants_different_things_of_one_d_is_served_in_order_too() -> None:
    """And nothing is left of the names that were waited for."""
    admission, served = small(), list[int]()

    async def take(number: int, model: str | None) -> None:
        await enter(admission, model=model)
        served.append(number)

    async with admission.place(RoutingRequest(), paired=False):
        wanted = enumerate([None, "x", None, "y", "x", None, "z", "z"])
        asked = [asyncio.create_task(take(number, model)) for number, model in wanted]
        await eventually(lambda: admission.waiting == 8)
        for leaver in asked[6:]:
            leaver.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert served == [0, 1, 2, 3, 4, 5] and not admission._queues


@pytest.mark.parametrize("tenants", [None, Tenants({f"t{n}": TenantSettings() for n in range(200)})])
async def test_those_who_wait_for_one_model_cost_the_others_nothing(
    tenants: Tenants | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same request of each tenant makes a line of its own."""
    looks = 0
    router, _ = fleet(*((role, {"model": model}) for model in "ab" for role in "PD"), room=2)
    admission = Admission(router, Limits(max_waiting=200), RequestCounters(), lambda: 0.0)

    async def once(model: str, number: int) -> None:
        tenant = tenants.by_name[f"t{number}"] if tenants else None
        async with admission.place(RoutingRequest(model, tenant=tenant), paired=True):
            pass

    def looked(*arguments: Any, **more: Any) -> Any:
        nonlocal looks
        looks += 1
        return able(*arguments, **more)

    able = router._able
    async with (
        admission.place(RoutingRequest("a"), paired=True),
        admission.place(RoutingRequest("a"), paired=True),
    ):
        asked = [asyncio.create_task(once("a", number)) for number in range(200)]
        await eventually(lambda: admission.waiting == 200)
        monkeypatch.setattr(router, "_able", looked)
        await once("b", 0)
        monkeypatch.undo()
        assert looks < 20
        assert admission.waiting == 200
    await asyncio.gather(*asked)
    assert (admission.waiting, admission.under_way) == (0, 0)


async def test_a_herd_is_spread_although_nobody_has_got_his_first_request_yet() -> None:
    registry = Registry()
    router, (busier, idler, _) = fleet("P", "P", "D", registry=registry, room=10)
    admission = Admission(router, Limits(), RequestCounters(), lambda: 0.0)
    async with AsyncExitStack() as leave:
        leave.enter_context(busier.busy(lambda loss: None))
        for _ in range(10):
            (await leave.enter_async_context(admission.place(RoutingRequest(), paired=True))).sent()
        asked = [
            asyncio.create_task(leave.enter_async_context(admission.place(RoutingRequest(), paired=True)))
            for _ in range(9)
        ]
        await eventually(lambda: admission.waiting == 9)
        join(registry, ping("D", 99))
        admission.advance()
        chosen = [(await each).choice.prefill for each in asked]
        assert (chosen.count(busier), chosen.count(idler)) == (4, 5)
    assert (busier.expected, idler.expected) == (0, 0)


async def test_a_d_whose_requests_are_still_at_p_is_busy(sequential: Deployment) -> None:
    await sequential.newcomer("D")
    first, second = sequential.registry.known("D")
    with slow(sequential.p), first.busy(lambda loss: None):
        asked = [ask(sequential) for _ in range(9)]
        await eventually(lambda: len(sequential.p.requests) == 9)
        assert sorted((first.places, second.places)) == [4, 5]
    assert await asyncio.gather(*asked) == [200] * 9


# D alone: it computes the prompt of a request that no P can serve, and a short one, within its share.


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
            assert "as many prompts alone as --alone-share lets them" in (await error_of(response))["message"]
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
        assert admission.move(place, PrefillMode.UNAVAILABLE, frozenset({p, one}))
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
