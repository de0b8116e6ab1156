"""Who is to blame, whose breaker counts a failure, what is sent again; engines that hang or are paused."""

import asyncio
import errno
import itertools
import json
import os
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from msgspec.structs import replace
from proxy_behaviours import (
    DONE,
    KEEP_ALIVE,
    Behaviour,
    Seen,
    after,
    answer_error,
    answer_json,
    chosen,
    die,
    dies,
    event,
    event_stream,
    never,
    never_a_token,
    stops,
    stream_of,
    streams,
    streams_at_once,
    with_a_p,
)
from proxy_fakes import (
    Deployment,
    FakeInstance,
    all_do,
    asked,
    attempt_of,
    deployed,
    fail,
    fleet,
    join,
    outcomes,
    ping,
    quiet,
    take_turns,
)
from test_admission import paired
from test_failures import OFF, after_p

from p2pkv.control.discovery import DISCOVERY_VERSION, goodbye
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.blame import Blame, CallEnd, Charge, RetryKind, Verdict, assign_blame
from p2pkv_proxy.membership.instance import LIFE, VOUCHING_VERSION, Breaker, Role
from p2pkv_proxy.membership.registry import Registry
from p2pkv_proxy.policies import RoutingRequest
from p2pkv_proxy.routing import PrefillMode
from support.waiting import eventually

MISTAKE = answer_error(400)

P, D, PROXY, CLIENT, NONE = Blame.P, Blame.D, Blame.PROXY, Blame.CLIENT, Blame.NONE
NO, ELSEWHERE, ALONE, SAME, GOES_ON = (
    RetryKind.NO,
    RetryKind.ELSEWHERE,
    RetryKind.ALONE,
    RetryKind.SAME,
    RetryKind.GOES_ON,
)
NOW, IF_D, IF_P = Charge.NOW, Charge.IF_D_ACCEPTS, Charge.IF_P_ACCEPTS
E = CallEnd
DEAD = (E.ERROR, E.CLOSED, E.UNREACHABLE, E.BROKEN, E.GONE, E.LATE)
"""Ends that are an instance's own failure, whichever it is."""
MAY_LIVE = (E.ABORTED, E.SILENT, E.HUNG, E.STOPPED)
"""Ends of which D learns by itself, if they are P's."""
REFUSALS = (E.REFUSED, E.DENIED)
NOT_YET = (E.NOT_MADE, E.PENDING, E.ACCEPTED)
ENDED = (E.ANSWERED, *REFUSALS, *DEAD, *MAY_LIVE)
UNKNOWN = (E.NOT_MADE, E.PENDING, *DEAD, *MAY_LIVE)
"""Of D: whether it accepts the request."""

Row = tuple[Role, tuple[CallEnd, ...], tuple[CallEnd, ...], dict[str, bool], Verdict]

RULES: tuple[Row, ...] = (
    # P's call has ended, and D's answer has not begun.
    ("P", (E.ANSWERED,), NOT_YET + ENDED, {}, Verdict(NONE, GOES_ON)),
    ("P", (E.NO_SOCKET,), NOT_YET + ENDED, {}, Verdict(PROXY, NO)),
    ("P", REFUSALS, REFUSALS, {}, Verdict(CLIENT, NO)),
    ("P", (E.REFUSED,), (E.ACCEPTED,), {}, Verdict(P, ELSEWHERE, IF_P)),
    ("P", (E.DENIED,), (E.ACCEPTED,), {}, Verdict(P, ELSEWHERE, NOW)),
    ("P", (E.REFUSED,), UNKNOWN, {}, Verdict(P, ALONE, IF_P)),
    ("P", (E.DENIED,), UNKNOWN, {}, Verdict(P, ALONE, IF_D)),
    ("P", DEAD, NOT_YET + ENDED, {}, Verdict(P, ELSEWHERE, NOW)),
    ("P", MAY_LIVE, (E.NOT_MADE,), {}, Verdict(P, ELSEWHERE, NOW)),
    ("P", MAY_LIVE, (E.PENDING, E.ACCEPTED), {}, Verdict(P, GOES_ON, NOW)),
    # P's call has ended after D's first token.
    ("P", (*DEAD, *MAY_LIVE, E.DENIED), (E.ANSWERED,), {"begun": True}, Verdict(P, GOES_ON, NOW)),
    ("P", (E.REFUSED,), (E.ANSWERED,), {"begun": True}, Verdict(P, GOES_ON, IF_P)),
    ("P", (*DEAD, E.DENIED), (E.ANSWERED,), {"begun": True, "one_prompt": False}, Verdict(P, NO, NOW)),
    ("P", (E.REFUSED,), (E.ANSWERED,), {"begun": True, "one_prompt": False}, Verdict(P, NO, IF_P)),
    ("P", MAY_LIVE, (E.ANSWERED,), {"begun": True, "one_prompt": False}, Verdict(P, GOES_ON, NOW)),
    # D's call has ended before its first token.
    ("D", (E.ANSWERED,), NOT_YET + ENDED, {}, Verdict(NONE, NO)),
    ("D", (E.NO_SOCKET,), NOT_YET + ENDED, {}, Verdict(PROXY, NO)),
    ("D", REFUSALS, NOT_YET + ENDED, {}, Verdict(CLIENT, NO)),
    ("D", (E.ERROR,), (*NOT_YET, E.ANSWERED), {}, Verdict(D, ELSEWHERE, NOW)),
    ("D", (E.ERROR,), (*DEAD, *MAY_LIVE, E.DENIED), {}, Verdict(P, ELSEWHERE)),
    ("D", (E.ERROR, E.BROKEN), (E.REFUSED,), {}, Verdict(D, ELSEWHERE, IF_D)),
    ("D", (E.ERROR,), NOT_YET + ENDED, {"sent_twice": True}, Verdict(NONE, SAME)),
    ("D", (E.LATE,), (E.PENDING,), {}, Verdict(P, ELSEWHERE, NOW)),
    ("D", (E.LATE,), (E.NOT_MADE, *ENDED), {}, Verdict(D, ELSEWHERE, NOW)),
    ("D", (E.CLOSED, E.UNREACHABLE, E.GONE), NOT_YET + ENDED, {}, Verdict(D, ELSEWHERE, NOW)),
    ("D", (E.BROKEN,), (*NOT_YET, E.DENIED, *DEAD), {}, Verdict(D, ELSEWHERE, NOW)),
    ("D", MAY_LIVE, NOT_YET + ENDED, {}, Verdict(D, ELSEWHERE, NOW)),
    ("D", (E.BROKEN,), NOT_YET + DEAD, {"sent_twice": True}, Verdict(D, ELSEWHERE, NOW)),
    # D's call has ended after its first byte went to the client.
    ("D", DEAD + MAY_LIVE, NOT_YET + ENDED, {"begun": True}, Verdict(D, NO, NOW)),
)


@pytest.mark.parametrize("row", RULES, ids=range(len(RULES)))
def test_the_rules(row: Row) -> None:
    role, ends, others, more, verdict = row
    for end, other in itertools.product(ends, others):
        assert assign_blame(role, end, other, **more) == verdict, (role, end, other, more)


def test_every_end_of_a_call_has_a_rule_for_both_roles() -> None:
    for role in ("P", "D"):
        assert {end for row in RULES if row[0] == role for end in row[1]} == set(CallEnd) - set(NOT_YET)


@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("failure", [dies, stops, answer_error(500), answer_error(307), MISTAKE])
async def test_what_is_a_failure_and_whose_it_is(either: Deployment, role: str, failure: Behaviour) -> None:
    """Five in a row. What a D refuses is the client's mistake; what every P refuses a D has to do alone."""
    (p,), (d,) = either.registry.known("P"), either.registry.known("D")
    guilty, innocent = (p, d) if role == "P" else (d, p)
    (either.p if role == "P" else either.d).behaviour = failure
    if role == "P":
        either.d.behaviour = after_p(either, answer_json)
    for _ in range(5):
        assert guilty.breaker.closed
        assert ((await either.post()).status == 200) is (role == "P")
        await quiet(either)
    assert guilty.breaker.closed is (failure is MISTAKE)
    assert innocent.breaker.closed


async def test_ds_error_waits_for_the_news_of_ps_failure_and_is_ps() -> None:
    """D learnt first that P failed."""
    async with deployed("concurrent", 1, 1, limits=OFF) as deployment:

        def d_failed() -> bool:
            call = attempt_of(deployment)._decoding
            return call is not None and call.end is CallEnd.ERROR

        deployment.p.behaviour = after(d_failed, answer_error(500))
        deployment.d.behaviour = answer_error(500, "no KV")
        assert (await deployment.post()).status == 500
        assert [outcomes(deployment.known(each)) for each in (deployment.p, deployment.d)] == [[False], []]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A D that says nothing is not waited for for long."""
    monkeypatch.setattr("p2pkv_proxy.attempt._VERDICT_SECONDS", 0.1)


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_what_both_refuse_is_the_clients_mistake(dispatch: Dispatch, status: int) -> None:
    async with deployed(dispatch, prefill=2, decode=1) as deployment:
        all_do((*deployment.prefills, deployment.d), answer_error(status, "too long"))
        for _ in range(6):
            response = await deployment.post()
            assert response.status == status
            assert (await response.json())["error"]["message"].startswith("too long")
        assert sum(asked(deployment.prefills)) == sum(asked(deployment.decodes)) == 6, "no second P is asked"
        assert [outcomes(each) for each in deployment.everyone()] == [[]] * 3, "no breaker counts it"
        assert deployment.proxy.counters.retried == deployment.proxy.counters.retries_refused == 0


@pytest.mark.usefixtures("quick")
async def test_a_p_with_another_key_fails_no_request_and_gets_a_pause(dispatch: Dispatch) -> None:
    async with deployed(dispatch, prefill=2, decode=1) as deployment:
        bad, good = deployment.prefills
        bad.behaviour = answer_error(401)
        deployment.d.behaviour = d_that_needs(good, bad)
        await deployment.serves(16)
        assert not deployment.known(bad).breaker.closed and deployment.known(good).breaker.closed
        assert len(bad.requests) in (5, 6, 7), "after five failures it is left alone, but for its trials"
        assert all(outcomes(deployment.known(deployment.d)))


def d_that_needs(good: FakeInstance, bad: FakeInstance) -> Behaviour:
    """A D that waits for ever for KV of the bad P, and answers otherwise."""

    def has(instance: FakeInstance, seen: Seen) -> bool:
        return seen.request_id in {each.request_id for each in instance.requests}

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        if "_addr_" in seen.request_id:
            await eventually(lambda: has(good, seen) or has(bad, seen))
        return await (never if has(bad, seen) else answer_json)(request, seen)

    return behaviour


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_stream_that_d_has_accepted_goes_to_another_p_at_once(status: int) -> None:
    """The head of D's stream says so; D alone need not be asked. The other P proves the first one wrong."""
    async with deployed("concurrent", prefill=2, decode=1, limits=OFF) as deployment:
        take_turns(deployment.prefills, answer_error(status), answer_json)
        counters = deployment.proxy.counters
        deployment.d.behaviour = chosen(lambda _: streams_at_once if counters.retried else never_a_token)
        response = await deployment.post(stream=True)
        assert response.status == 200 and b"second" in await response.read()
        assert asked(deployment.prefills) == [1, 1]
        assert sorted(map(outcomes, deployment.registry.known("P"))) == [[False], [True]]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("stream", [False, True])
async def test_what_every_p_refuses_d_answers_and_no_p_is_blamed(dispatch: Dispatch, stream: bool) -> None:
    """Else one client could have all P's paused: vLLM does not allow one token with every parameter."""
    async with deployed(dispatch, prefill=2, decode=1) as deployment:
        all_do(deployment.prefills, answer_error(400, "thinking.budget_tokens must be less than max_tokens"))
        deployment.d.behaviour = with_a_p(never_a_token if stream else never)
        await deployment.serves(6, {"prompt": "x", "stream": stream})
        assert all(outcomes(each) == [] for each in deployment.registry.known("P"))
        assert sum(asked(deployment.prefills)) >= 6


@pytest.mark.parametrize(
    ("path", "failure"),
    [
        ("/v1/responses", stream_of(b'data: {"type":"response.created"}\n\n', die)),
        ("/v1/messages", stream_of(b'event: error\ndata: {"error":{"type":"internal_error"}}\n\n')),
    ],
)
@pytest.mark.parametrize("later", [0, 0.05])
async def test_a_mistake_that_d_tells_only_by_its_streams_end_pauses_no_d(
    dispatch: Dispatch, path: str, failure: Behaviour, later: float
) -> None:
    """So vLLM 0.32 does with a schema that it cannot compile; what is no stream, as P's, it refuses."""

    async def refuses(request: web.Request, seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(later)
        return await answer_error(400, "bad schema")(request, seen)

    async with deployed(dispatch, prefill=1, decode=2) as deployment:
        deployment.p.behaviour = refuses
        all_do(deployment.decodes, failure)
        for _ in range(6):
            message = await deployment.refusal(400, {"stream": True, "input": "x"}, path)
            assert message.startswith("bad schema")
            await quiet(deployment)
        assert all(outcomes(each) == [] for each in deployment.everyone())


async def test_a_stream_that_a_d_fails_and_another_answers_was_no_mistake() -> None:
    async with deployed("sequential", prefill=1, decode=2) as deployment:
        deployment.p.behaviour = answer_error(400, "no such adapter")
        take_turns(deployment.decodes, dies, streams_at_once)
        response = await deployment.post(stream=True)
        assert response.status == 200 and b"second" in await response.read()
        assert sorted(map(outcomes, deployment.registry.known("D"))) == [[False], [True]]


async def test_where_no_other_can_decide_ps_refusal_is_the_answer(either: Deployment) -> None:
    object.__setattr__(either.proxy.limits, "alone_share", 0.0)
    either.p.behaviour, either.d.behaviour = answer_error(404, "no such adapter"), never
    assert (await either.refusal(404)).startswith("no such adapter")
    assert all(outcomes(each) == [] for each in either.everyone())


@pytest.mark.parametrize("role", ["P", "D"])
async def test_a_client_s_mistake_is_no_trial(
    sequential: Deployment, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    (instance,) = sequential.registry.known(role)
    monkeypatch.setattr(instance.breaker, "_uniform", lambda low, high: 0.0)
    for _ in range(5):
        instance.breaker.failed(sequential.proxy.clock())
    sequential.p.behaviour = sequential.d.behaviour = MISTAKE
    assert (await sequential.post()).status == 400
    await quiet(sequential)
    assert not instance.breaker.closed
    sequential.p.behaviour = sequential.d.behaviour = answer_json
    assert (await sequential.post()).status == 200
    await quiet(sequential)
    assert instance.breaker.closed, "the next one is the trial"


async def test_who_has_said_goodbye_is_not_judged(concurrent: Deployment) -> None:
    concurrent.d.behaviour = never
    asking = [asyncio.create_task(concurrent.post()) for _ in range(6)]
    await eventually(lambda: len(concurrent.d.requests) == 6)
    (d,) = concurrent.registry.known("D")
    concurrent.pingers[concurrent.d.http_address].stop()
    await eventually(lambda: d.left is not None)
    concurrent.d.kill()
    assert {(await each).status for each in asking} == {502}
    assert (outcomes(d), concurrent.proxy.counters.breakers_opened) == ([], 0)


@pytest.mark.parametrize(("failure", "prompt"), [(stops, ["x", "y"]), (dies, "x")])
async def test_a_p_that_is_not_needed_any_more_breaks_no_stream(
    concurrent: Deployment, failure: Behaviour, prompt: Any
) -> None:
    """One that stops tells D itself, which may compute the rest of several prompts."""
    p_stops, release = asyncio.Event(), asyncio.Event()
    concurrent.d.behaviour = streams(release)
    concurrent.p.behaviour = after(p_stops, failure)
    response = await concurrent.begin(prompt=prompt)
    p_stops.set()
    p = concurrent.known(concurrent.p)
    await eventually(lambda: p.in_flight == 0)
    release.set()
    rest = await response.content.read()
    assert b"second" in rest and b"error" not in rest
    assert outcomes(p) == [False]


async def test_what_is_sent_twice_and_fails_is_sent_anew_only_once() -> None:
    """A D that closes the connection of each request's first copy, and fails the second one."""
    async with deployed("concurrent", 1, 1, retries=0, alone_share=0) as deployment:

        def closes_or_fails(seen: Seen) -> Behaviour:
            copies = [each for each in deployment.d.requests if each.request_id == seen.request_id]
            return dies if len(copies) == 1 else answer_error(500)

        all_there = asyncio.Event()
        deployment.d.behaviour = after(all_there, answer_json)
        first = [asyncio.create_task(deployment.post()) for _ in range(4)]
        await eventually(lambda: len(deployment.d.requests) == 4)
        all_there.set()
        for each in first:
            await (await each).read()
        await quiet(deployment)  # and four connections to D are idle now
        deployment.d.behaviour = chosen(closes_or_fails)
        assert (await deployment.post()).status == 500
        ids = [seen.request_id for seen in deployment.d.requests[4:]]
        assert ids == [ids[0], ids[0], ids[2], ids[2]] and ids[0] != ids[2]
        assert outcomes(deployment.known(deployment.d)) == [True] * 4 + [False]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
@pytest.mark.parametrize("role", ["P", "D"])
async def test_what_the_proxy_lacks_is_no_instance_s_failure(
    concurrent: Deployment, role: Role, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors, ports, memory for one connection more."""
    session = concurrent.proxy.session
    place = (concurrent.p if role == "P" else concurrent.d).http_address.rpartition(":")[2]
    makes = session.pooled.connector._socket_factory

    def make(address: Any) -> Any:
        if str(address[4][1]) == place:
            raise OSError(number, os.strerror(number))
        return makes(address)

    await session.pooled.connector.close()
    session.pooled._connector = aiohttp.TCPConnector(limit=0, socket_factory=make)
    if role == "P":
        concurrent.d.behaviour = never
    for _ in range(6):
        response = await concurrent.post()
        assert response.status == 503 and "Retry-After" in response.headers
        message = (await response.json())["error"]["message"]
        assert message.startswith("This proxy has no file descriptor, port or memory left")
    assert all(each.healthy and False not in outcomes(each) for each in concurrent.everyone())
    assert concurrent.proxy.counters.retried == concurrent.proxy.counters.decode_alone == 0
    concurrent.d.behaviour = answer_json
    session.pooled._connector = aiohttp.TCPConnector(limit=0)
    assert (await concurrent.post()).status == 200


# An instance that fails again and again gets a pause, one trial, and never so the last of its kind.


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


def test_half_of_the_last_hundred_open_it_and_none_of_long_ago_count() -> None:
    for successes, opens in ((1, True), (2, False)):
        breaker, bad = Breaker(), False
        for _ in range(20):
            for _ in range(successes):
                breaker.succeeded(0.0)
            bad = bad or breaker.failed(0.0)
        assert bad is opens
    breaker = Breaker()
    assert not any(breaker.failed(10.0 * number) for number in range(50))
    for _ in range(1000):
        breaker.succeeded(500.0)
    assert [breaker.failed(500.0) for _ in range(50)] == [False] * 49 + [True]


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


def test_once_closed_it_has_forgotten_why_it_was_open_and_after_a_long_time_how_often() -> None:
    breaker = opened()
    breaker.sent("trial", 1.0)
    breaker.failed(1.0, "trial")
    breaker.sent("trial", 3.0)
    assert breaker.succeeded(3.0, "trial") and breaker.opened == 2
    assert [breaker.failed(200.0) for _ in range(5)] == [False] * 4 + [True]
    assert breaker.opened == 1
    assert breaker.admits(201.0)


@pytest.mark.parametrize("role", ["P", "D"])
def test_the_last_one_that_serves_a_model_is_used_whatever_its_breaker_says(role: str) -> None:
    """And if all are open all are used."""
    router, pool = fleet(*((each, {"model": model}) for model in "ab" for each in "PD"))
    fail(pool["PD".index(role)])
    for _ in range(3):
        choice = router.choose(RoutingRequest("a"), 0.1)
        assert {choice.prefill.ping.model, choice.decode.ping.model} == {"a"}
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


# An engine that hangs behind a living HTTP server, or that vLLM's /pause has paused; and deadlines.


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
        deadline, loop = attempt_of(deployment)._began + 0.4, asyncio.get_running_loop()
        await eventually(lambda: loop.time() > deadline)
        release.set()
        assert (await asking).status == 200


async def keep_alive(request: web.Request, seen: Seen) -> bytes:
    await asyncio.sleep(0.05)
    return KEEP_ALIVE


@pytest.mark.parametrize("silent", [streams(asyncio.Event()), stream_of("first", *[keep_alive] * 100)])
async def test_a_stream_without_more_events_ends_with_an_error(silent: Behaviour) -> None:
    async with deployed("concurrent", 1, 1, event_seconds=0.3) as deployment:
        deployment.d.behaviour = silent
        response = await deployment.post(STREAM)
        first, *_, last, nothing = (await response.read()).split(b"\n\n")
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
        relay = attempt_of(deployment).relay
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
    """A token, and more of them while `goes_on`, else comments; the end at `stop`."""

    async def behaviour(request: web.Request, seen: Seen) -> web.StreamResponse:
        response = await event_stream(request)
        while not stop.is_set():
            await response.write(event(seen, "token") if goes_on.is_set() else KEEP_ALIVE)
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
