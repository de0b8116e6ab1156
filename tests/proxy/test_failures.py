"""What becomes of the other leg and of the client when a leg fails or is given up; and of a second try."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from proxy_behaviours import (
    DONE,
    Behaviour,
    Seen,
    Step,
    after,
    answer_error,
    answer_json,
    answers,
    chosen,
    die,
    dies,
    dies_before_a_token,
    dies_in_the_body,
    event,
    forever,
    given_up,
    never,
    never_a_token,
    stops,
    stops_before_a_token,
    stream_of,
    streams,
    with_a_p,
)
from proxy_fakes import Deployment, all_do, asked, called, deployed, error_of, filter_of, quiet, take_turns

from p2pkv.pairing import find_pair
from p2pkv_proxy.admission import RetryBudget, pause
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Role
from support.waiting import eventually

OFF = Limits(alone_share=0)
"""No D does P's part."""


def shows_no_address(deployment: Deployment, text: str) -> bool:
    instances = [*deployment.prefills, *deployment.decodes]
    return not any(a in text for i in instances for a in (i.http_address, i.zmq_address, "_addr_"))


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
async def test_ds_error_reaches_the_client_and_cancels_p(concurrent: Deployment, status: int) -> None:
    concurrent.p.behaviour = never
    telltale = f"bad {concurrent.p.zmq_address} {concurrent.d.http_address}"
    concurrent.d.behaviour = answer_error(status, telltale)
    response = await concurrent.post()
    assert response.status == status
    assert (await error_of(response))["message"].startswith("bad (prefill instance) (decode instance)")
    assert shows_no_address(concurrent, await response.text())
    # If D was quick, P has not even seen the request.
    await eventually(lambda: all(seen.aborted for seen in concurrent.p.requests))


@pytest.mark.parametrize("how", ["freezes", "freezes in its stream", "refuses"])
async def test_a_d_that_is_gone_under_a_request_is_a_502(how: str) -> None:
    """One that freezes keeps it for its lease; one whose port refuses is gone at once."""
    lease = 30.0 if how == "refuses" else 1.0
    async with deployed("concurrent", 1, 1, life=0.5, lease=lease) as deployment:
        deployment.d.behaviour = never_a_token if how == "freezes in its stream" else never
        asked = await deployment.under_way(deployment.d)
        instance = deployment.known(deployment.d)
        if how == "refuses":
            deployment.no_more_pings(deployment.d)
            deployment.d.refuse()
        else:
            deployment.freeze(deployment.d)
        response = await asked
        assert response.status == 502
        message = (await error_of(response))["message"]
        assert message.startswith("The decode instance")
        if how == "refuses":
            assert message == "The decode instance is gone."
        else:
            assert deployment.proxy.clock() - instance.last_seen >= lease, "not before its lease is over"


async def test_an_error_without_end_is_a_502(either: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2pkv_proxy.upstream._MAX_WHOLE_BYTES", 100_000)
    for size, status in ((10_000, 500), (200_000, 502)):
        either.d.behaviour = answer_error(500, "x" * size)
        response = await either.post()
        assert response.status == status
    assert "answered with too many bytes" in (await error_of(response))["message"]


async def test_a_d_that_is_gone_is_a_502_and_not_chosen_until_it_answers(either: Deployment) -> None:
    await either.d.stop()
    assert "could not be reached" in await either.refusal(502)
    assert either.routable("D") == []
    assert (await either.post()).status == 503
    await either.d.start()
    await either.ready(prefill=1, decode=1)
    assert (await either.post()).status == 200


def beginning_of_the_id(_: web.Request, seen: Seen) -> bytes:
    name = seen.request_id.encode()
    return b"data: " + name + b" " + name[:8]


@pytest.mark.parametrize("cut", [b"", b'data: {"id": "cmpl-', beginning_of_the_id], ids=["", "json", "id"])
async def test_a_d_that_dies_in_its_stream_leaves_an_error_event(dispatch: Dispatch, cut: Step) -> None:
    """After the first byte nothing is tried again. An event that is not whole never reaches the client."""
    relayed = asyncio.Event()
    async with deployed(dispatch, prefill=2, decode=2) as deployment:
        all_do(deployment.decodes, stream_of("first", cut, relayed, die))
        response = await deployment.begin()
        relayed.set()
        last, nothing = (await response.content.read()).split(b"\n\n")
        assert nothing == b""
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == 502
        assert error["message"] == "The decode instance died in the middle of its answer."
        assert asked(deployment.decodes) == asked(deployment.prefills) == [0, 1]


async def test_a_d_that_dies_behind_the_end_of_its_stream_has_answered(either: Deployment) -> None:
    relayed = asyncio.Event()
    either.d.behaviour = stream_of("first", DONE, relayed, die)
    response = await either.begin(n=2)
    relayed.set()
    assert await response.content.read() == DONE


async def test_a_d_that_dies_in_a_long_json_leaves_it_unfinished(either: Deployment) -> None:
    """So long that its start has gone to the client."""
    begun = asyncio.Event()
    headers = {"Content-Type": "application/json", "Content-Length": str(8 << 20)}
    either.d.behaviour = stream_of(b" " * (2 << 20), begun, die, headers=headers)
    response = await either.post()
    assert response.status == 200
    begun.set()
    with pytest.raises(aiohttp.ClientError):
        await response.read()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("ds_part", [never, never_a_token])
@pytest.mark.parametrize("failure", [answer_error(500), dies, dies_in_the_body, answer_error(307)])
async def test_ps_failure_cancels_d_which_is_asked_without_it_or_it_is_a_502(
    failure: Behaviour, ds_part: Behaviour, alone: bool
) -> None:
    async with deployed("concurrent", 1, 1, limits=Limits() if alone else OFF) as deployment:
        deployment.d.behaviour = with_a_p(ds_part)
        deployment.p.behaviour = after(lambda: called(deployment.d), failure)
        response = await deployment.post({"prompt": "x", "stream": ds_part is never_a_token})
        if alone:
            assert response.status == 200 and (await response.json())["choices"] == [{"text": "hello"}]
        else:
            assert response.status == 502
            error = await error_of(response)
            assert error["message"].startswith("The prefill instance")
            assert error["type"] == "bad_gateway_error"
            assert shows_no_address(deployment, await response.text())
        await eventually(lambda: deployment.d.requests[0].aborted)
        assert ["_addr_" in seen.request_id for seen in deployment.d.requests] == [True, False][: 1 + alone]
        assert (deployment.proxy.counters.decode_alone, deployment.proxy.counters.retried) == (alone, 0)
        assert deployment.known(deployment.d).breaker.closed


async def test_of_several_prompts_the_others_still_need_p(concurrent: Deployment) -> None:
    for _ in range(5):
        p_fails = asyncio.Event()
        concurrent.d.behaviour = streams(asyncio.Event())
        concurrent.p.behaviour = after(p_fails, dies)
        response = await concurrent.begin(prompt=["x", "y"])
        p_fails.set()
        error = json.loads((await response.content.read()).removeprefix(b"data: "))["error"]
        assert error["message"].startswith("The prefill instance failed")
        await eventually(lambda: concurrent.d.requests[-1].aborted)
    p, d = concurrent.known(concurrent.p), concurrent.known(concurrent.d)
    assert (p.breaker.closed, d.breaker.closed) == (False, True), "it is P that fails"


# A second try at another instance: before the first byte, within a budget, and never otherwise.


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


@pytest.mark.parametrize("who", ["client", "proxy"])
async def test_between_two_tries_client_and_proxy_may_leave(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = asyncio.Event()

    def long(tries: int) -> float:
        pausing.set()
        return 1000.0

    monkeypatch.setattr("p2pkv_proxy.admission.pause", long)
    async with deployed("concurrent", prefill=2, decode=1) as deployment:
        all_do(deployment.prefills, dies)
        deployment.d.behaviour = never
        asking = asyncio.create_task(deployment.post())
        await pausing.wait()
        if who == "client":
            asking.cancel()
        else:
            assert await deployment.proxy.stop(0.01, asyncio.Event()) == 1
            response = await asking
            assert response.status == 503
            assert "had to stop" in (await response.json())["error"]["message"]
            assert deployment.proxy.counters.cut_off == 1
        await quiet(deployment)
        assert asked(deployment.prefills) == [0, 1]


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


# What a vLLM gives up, told to stop, it calls a success; the client gets an error, or another's answer.


ABORT = b'"finish_reason":"abort"'
MESSAGE = "The decode instance was stopped before its answer was complete."


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "behaviour",
    [
        stops,
        stops_before_a_token,
        stream_of(DONE),
        stream_of(b'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n', DONE),
        stream_of(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n', DONE),
    ],
    ids=["whole", "abort", "nothing", "usage", "role"],
)
async def test_with_nobody_else_it_is_a_502(either: Deployment, path: str, behaviour: Behaviour) -> None:
    """vLLM sends no choice for a request that it gives up before its first token."""
    either.d.behaviour = behaviour
    body = {"prompt": "x", "messages": [], "stream": behaviour is not stops}
    assert await either.refusal(502, body, path) == MESSAGE


def after_p(deployment: Deployment, behaviour: Behaviour) -> Behaviour:
    """D, as it hears from a P that gives up."""
    return after(
        lambda: any(seen.answered for each in deployment.prefills for seen in each.requests), behaviour
    )


async def test_where_d_is_not_asked_yet_it_is_ps_failure() -> None:
    async with deployed("sequential", 1, 1, alone_share=0) as sequential:
        sequential.p.behaviour = stops
        said = "The prefill instance failed: it was stopped before its answer was complete."
        assert await sequential.refusal(502) == said
        assert sequential.d.requests == []


async def test_in_the_stream_it_is_an_error_event(either: Deployment) -> None:
    """The tokens that there were arrive, the end that is none does not."""

    def end(_: web.Request, seen: Seen) -> bytes:
        return event(seen, "second") + b"data: " + given_up(seen) + b"\n\n" + DONE

    relayed = asyncio.Event()
    either.d.behaviour = stream_of("first", relayed, end, forever)
    response = await either.begin()
    relayed.set()
    rest = await response.content.read()
    assert ABORT not in rest and b"[DONE]" not in rest
    second, *_, last, nothing = rest.split(b"\n\n")
    assert b"second" in second and nothing == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == MESSAGE


# What vLLM writes when it gives up, and what only looks like it.

COMPLETIONS, CHAT, MESSAGES, RESPONSES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
)
ECHO = {"finish_reason": "abort", "status": "cancelled", "stop_reason": None, "type": "message_delta"}
"""What a client may have an answer repeat."""


def choice(reason: str | None, **more: Any) -> dict[str, Any]:
    return {"object": "x", "choices": [{"index": 0, "finish_reason": reason, **more}]}


def message(reason: str | None, **more: Any) -> dict[str, Any]:
    shown = {} if reason is None else {"stop_reason": reason}
    return {"id": "msg", "type": "message", "role": "assistant", "content": [], **shown, **more}


def answer(status: str, tokens: int = 3, **more: Any) -> dict[str, Any]:
    return {"object": "response", "status": status, "usage": {"output_tokens": tokens}, **more}


def delta(reason: str | None) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": {}}


def tool_use(**inputs: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t", "name": "f", "input": inputs}


GIVEN_UP: list[tuple[str, Any]] = [
    (COMPLETIONS, choice("abort", text="hel")),
    (COMPLETIONS, {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}),
    (CHAT, {"choices": [{"finish_reason": "stop", "stop_reason": 128009}, {"finish_reason": "abort"}]}),
    (CHAT, choice("abort", message={"content": "hel"})),
    (MESSAGES, message(None)),
    (RESPONSES, answer("cancelled")),
    (RESPONSES, answer("completed", tokens=0, output=[])),
    (RESPONSES, answer("incomplete", tokens=0, output=[])),
]
COMPLETE: list[tuple[str, Any]] = [
    (COMPLETIONS, choice("stop", text=ABORT.decode())),
    (COMPLETIONS, choice("length") | {"kv_transfer_params": ECHO}),
    (CHAT, choice("tool_calls", message={"tool_calls": [{"function": {"arguments": json.dumps(ECHO)}}]})),
    (CHAT, choice("stop", logprobs={"content": [{"token": "abort"}]})),
    (MESSAGES, message("tool_use") | {"content": [tool_use(**ECHO, choices=[ECHO])]}),
    (RESPONSES, answer("completed", metadata={"finish_reason": "abort"}, choices=[ECHO])),
    (RESPONSES, answer("incomplete", tools=[{"type": "function", "parameters": ECHO | answer("cancelled")}])),
    (RESPONSES, {"object": "response", "status": "queued", "usage": None}),
    (RESPONSES, [ECHO]),
    ("/v1/embeddings", choice("abort")),
    ("/tokenize", choice("abort") | answer("cancelled")),
]
COMPACT: dict[str, Any] = {"separators": (",", ":")}


GIVEN_UP_EVENTS: list[tuple[str, Any]] = [
    (COMPLETIONS, choice("abort", text="")),
    (CHAT, choice("abort", delta={})),
    (MESSAGES, delta(None)),
    (RESPONSES, {"type": "response.completed", "response": answer("cancelled")}),
    (RESPONSES, {"type": "response.completed", "response": answer("completed", tokens=0)}),
]
OTHER_EVENTS: list[tuple[str, Any]] = [
    (COMPLETIONS, choice(None, text=ABORT.decode())),
    (COMPLETIONS, {"text": "", "finish_reason": "abort"}),
    (CHAT, choice(None, delta={"tool_calls": [{"function": {"arguments": json.dumps(ECHO)}}]})),
    (MESSAGES, {"type": "message_start", "message": message(None)}),
    (MESSAGES, {"type": "content_block_start", "content_block": tool_use(**ECHO)}),
    (MESSAGES, delta("end_turn")),
    (RESPONSES, {"type": "response.created", "response": answer("in_progress", tokens=0, metadata=ECHO)}),
    (RESPONSES, {"type": "response.completed", "response": answer("completed", metadata=ECHO)}),
]


def as_events(path: str, *events: Any) -> bytes:
    named = path in (MESSAGES, RESPONSES)
    return b"".join(
        (f"event: {each['type']}\n" if named else "").encode()
        + b"data: "
        + json.dumps(each, **COMPACT).encode()
        + b"\n\n"
        for each in events
    )


def fed(path: str, chunks: Iterable[bytes], *, streamed: bool = True) -> tuple[bytes, bool]:
    watch = filter_of(path, streamed=streamed)
    passed = b"".join([watch.feed(chunk) for chunk in chunks])
    return passed + watch.flush(), watch.given_up


@pytest.mark.parametrize(("path", "event"), GIVEN_UP_EVENTS)
def test_the_event_that_gives_up_is_found_however_the_bytes_are_cut(path: str, event: Any) -> None:
    before = as_events(path, *(each for where, each in OTHER_EVENTS if where == path))
    end = as_events(path, event) + b"data: [DONE]\n\n"
    whole = before + end
    assert fed(path, [whole]) == (before, True)
    assert fed(path, [before, end]) == (before, True)
    cuts = [[whole[:cut], whole[cut:]] for cut in range(len(whole))]
    for chunks in (*cuts, [bytes([each]) for each in whole]):
        passed, given_up = fed(path, chunks)
        assert given_up
        assert passed.startswith(before), "what came before it arrives"
        assert whole.startswith(passed) and len(passed) < len(before + as_events(path, event))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES, "/v1/embeddings"])
def test_what_does_not_give_up_passes_as_it_is(path: str) -> None:
    events = as_events(path, *(each for where, each in OTHER_EVENTS if where == path)) + b"data: [DONE]\n\n"
    for length in (1, 7, 100, len(events)):
        chunks = [events[at : at + length] for at in range(0, len(events), length)]
        assert fed(path, chunks) == (events, False)


def test_an_event_waits_for_its_end() -> None:
    watch = filter_of(COMPLETIONS)
    assert watch.feed(b'data: {"choices":[') == b""
    assert watch.feed(b'{"text":"","logprobs":{"tokens":["abort"') == b""
    whole = b'data: {"choices":[{"text":"","logprobs":{"tokens":["abort"]}}]}\n\n'
    assert watch.feed(b']}}]}\n\ndata: {"cho') == whole
    assert watch.feed(b'["abort"') == watch.feed(b" and more") == b""
    assert watch.flush() == b'data: {"cho["abort" and more', "the stream ended there"


def test_an_event_without_end_is_not_kept() -> None:
    watch = filter_of(COMPLETIONS)
    sent = [b'data: {"x":["abort"'] + [b"y" * 100_000] * 50
    assert b"".join([watch.feed(chunk) for chunk in sent]) + watch.flush() == b"".join(sent)
    for chunk in sent:
        watch.feed(chunk)
        assert len(watch._rest) <= 2 << 20


def test_in_a_json_that_is_too_long_to_be_held_it_is_found_too() -> None:
    end = json.dumps(choice("abort"), **COMPACT).encode()
    for cut in range(len(end)):
        passed, given_up = fed(CHAT, [b"x" * 1000, end[:cut], end[cut:]], streamed=False)
        assert given_up and ABORT not in passed
    for path in (MESSAGES, RESPONSES, "/v1/embeddings"):
        assert fed(path, [end], streamed=False) == (end, False)


def written(path: str, body: Any, *, streamed: bool) -> bytes:
    return as_events(path, body) if streamed else json.dumps(body, **COMPACT).encode()


def says(path: str, body: Any, *, streamed: bool) -> Behaviour:
    raw = written(path, body, streamed=streamed)
    if streamed:
        return stream_of(raw)
    return answers(lambda _: web.Response(body=raw, content_type="application/json"))


def complete(path: str) -> Behaviour:
    """A P that has computed what it was asked."""
    return says(path, next(whole for where, whole in COMPLETE if where == path), streamed=False)


WHOLE = [(path, body, False) for path, body in COMPLETE]
EVENTS = [
    (path, body, True)
    for path, body in OTHER_EVENTS
    if body.get("type") not in ("message_start", "content_block_start", "response.created")
]


@pytest.mark.parametrize(("path", "body", "streamed"), WHOLE + EVENTS)
async def test_an_answer_that_repeats_its_request_pauses_no_instance(
    either: Deployment, path: str, body: Any, streamed: bool
) -> None:
    either.p.behaviour, either.d.behaviour = complete(path), says(path, body, streamed=streamed)
    for _ in range(6):
        response = await either.post({"model": "tiny", "input": "x", "stream": streamed}, path)
        assert response.status == 200
        assert await response.read() == written(path, body, streamed=streamed)
    assert all(each.breaker.closed for each in either.everyone())
    assert either.proxy.counters.retried == either.proxy.counters.breakers_opened == 0


@pytest.mark.parametrize(
    ("path", "body", "streamed"),
    [(*each, False) for each in GIVEN_UP] + [(*each, True) for each in GIVEN_UP_EVENTS],
)
async def test_what_d_gives_up_is_asked_of_another(path: str, body: Any, streamed: bool) -> None:
    good = next(each for where, each in (OTHER_EVENTS[::-1] if streamed else COMPLETE) if where == path)
    async with deployed("concurrent", 1, 2) as deployment:
        deployment.p.behaviour = complete(path)
        take_turns(deployment.decodes, *(says(path, each, streamed=streamed) for each in (body, good)))
        response = await deployment.post({"model": "tiny", "stream": streamed}, path)
        assert response.status == 200
        assert await response.read() == written(path, good, streamed=streamed)
        assert asked(deployment.decodes) == [1, 1]


@pytest.mark.parametrize(("path", "body"), GIVEN_UP)
async def test_what_p_gives_up_is_ps_failure(path: str, body: Any) -> None:
    """In the other spelling of JSON, with spaces."""
    async with deployed("sequential", 2, 1) as deployment:
        all_do(deployment.prefills, answers(lambda _: web.json_response(body)))
        deployment.d.behaviour = complete(path)
        assert (await deployment.post({"model": "tiny"}, path)).status == 200
        assert [len(each.requests) for each in deployment.prefills] == [1, 1], "the other P is asked, too"
        assert find_pair(deployment.d.requests[0].request_id) is None, "and then D alone"
