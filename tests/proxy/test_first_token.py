"""The first token of a stream comes from P, and the client's answer is one server's all the same."""

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_behaviours import (
    DONE,
    KEEP_ALIVE,
    Behaviour,
    Seen,
    Step,
    after,
    answer_error,
    answer_json,
    by_kind,
    chosen,
    die,
    forever,
    never_a_token,
    stream_of,
)
from proxy_fakes import Deployment, asked, attempt_of, deployed, filter_of, fleet, outcomes, take_turns
from streaming_engine import (
    DEFAULT_TOKENS,
    END_OF_TEXT,
    FIRST_HALF,
    SECOND_HALF,
    Answer,
    Engine,
    Model,
    RustEngine,
)
from test_continuation import BODIES, CHAT, COMPLETIONS, ask, body_of, drain, pieces, same, transcript_of

from p2pkv.first_token import FirstToken
from p2pkv_proxy import first_token, relay
from p2pkv_proxy.access import OTHER, Tenants
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.bodies import parse
from p2pkv_proxy.continuation import Continuation, Diverged, RepeatedAnswer
from p2pkv_proxy.first_token import FirstTokenPlan, FirstTokens, PrefillToken
from p2pkv_proxy.limits import Limits, RequestCounters
from p2pkv_proxy.routing import Choice
from p2pkv_proxy.transcript import text_of
from support.waiting import eventually

CONTEXT = 600
GREEDY = body_of(COMPLETIONS, max_tokens=12, temperature=0)
PARAMS = "kv_transfer_params"


def salt_where(first: int | None, body: dict[str, Any], path: str = COMPLETIONS) -> Engine:
    """An engine whose first token of this request is `first`; None: one with text."""
    for salt in range(2000):
        engine = Engine(Model(salt))
        ids = answer(engine, body | {"return_token_ids": True}, path).ids
        if ids[0] == first if first is not None else ids[0] not in (FIRST_HALF, END_OF_TEXT):
            return engine
    raise AssertionError("no such engine")


def answer(engine: Engine, body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
    """One server's."""
    return Answer.of(b"".join(engine.events(path, body, "one-server")))


def handed_on(
    engine: Engine,
    path: str,
    body: dict[str, Any],
    sizes: list[int],
    rest: Engine,
    tokens: FirstTokens | None = None,
    plan: FirstTokenPlan | None = None,
) -> tuple[bytes | None, int]:
    """What the client gets, None if P's token is not handed on; and how many tokens D was asked for."""
    transcript = transcript_of(path, body)
    tokens = tokens or FirstTokens(True, RequestCounters())
    plan = plan or FirstTokenPlan(FirstToken.HANDED_ON, transcript.wanted.most_tokens(0), None)
    request = parse(json.dumps(body).encode(), path)
    head = b"".join(engine.events(path, json.loads(bytes(request.for_first_token({}, None))), "id-0"))
    token = tokens.of(head, plan, request, transcript, CONTEXT)
    if token is None:
        assert tokens.from_decode["token"] > 0
        return None, 0
    relay = filter_of(path)
    if plan.ends_with(token, CONTEXT):
        return transcript.feed(relay.feed(head)), 0
    got = transcript.begin(relay.feed(token.going_on), token.prompt)
    transcript.settle()
    if plan.what is None:
        goes_on: Continuation | RepeatedAnswer = RepeatedAnswer(transcript, token.choice)
        asked_of_d = json.loads(bytes(request.for_decode("x", token_ids=True)))
    else:
        goes_on = Continuation(transcript, CONTEXT, None)
        path = goes_on.body.path
        asked_of_d = json.loads(bytes(goes_on.body.for_decode("x")))
    relay = filter_of(path)
    events = b"".join(rest.events(path, asked_of_d, "id-1")).replace(b"id-1", b"id-0")
    for piece in pieces(events, sizes):
        got += goes_on.feed(relay.feed(piece))
    return got, asked_of_d["max_tokens"]


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    more=BODIES,
    most=st.integers(1, 30),
    logprobs=st.none() | st.integers(-1, 3),
    salt=st.integers(0, 10_000),
    at_once=st.booleans(),
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 700), max_size=5),
    newer=st.booleans(),
)
def test_ps_token_and_ds_rest_are_one_servers_answer(
    path: str,
    more: dict[str, Any],
    most: int,
    logprobs: int | None,
    salt: int,
    at_once: bool,
    chunks: list[int],
    sizes: list[int],
    newer: bool,
) -> None:
    """D is asked for the rest, or at once for all of it."""
    if logprobs is not None:
        more |= {"logprobs": True, "top_logprobs": logprobs} if path == CHAT else {"logprobs": logprobs}
    body = body_of(path, **more | {"max_tokens": most})
    engine = Engine(Model(salt), newer=newer)
    plan = FirstTokenPlan(None if at_once else FirstToken.HANDED_ON, most)
    got, rest = handed_on(engine, path, body, sizes, Engine(Model(salt), chunks, newer=newer), plan=plan)
    wanted = answer(engine, body, path)
    if got is None:
        first = answer(engine, body | {"return_token_ids": True, "max_tokens": 1, "stop": None}, path)
        stops = body.get("stop") or []
        begins = [stop[0] in first.text for stop in ([stops] if isinstance(stops, str) else stops)]
        assert first.ids == [FIRST_HALF] or any(begins)
    else:
        assert same(Answer.of(got), wanted)
        assert rest in (0, most if at_once else most - 1)


def test_another_token_with_the_same_text_is_not_ps() -> None:
    transcript, engine = transcript_of(COMPLETIONS, GREEDY), salt_where(None, GREEDY)
    first, *_ = engine.events(COMPLETIONS, GREEDY | {"return_token_ids": True}, "id-0")
    transcript.feed(first)
    had = text_of(first)
    with pytest.raises(Diverged):
        RepeatedAnswer(transcript, had).feed(first.replace(b'"token_ids":[', b'"token_ids":[7'))
    assert RepeatedAnswer(transcript, had).feed(first) == b""


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_without_nulls_is_ds_and_repeats_ps_token(path: str) -> None:
    """As vLLM's Rust server writes it, which tells of the end in an event of its own."""
    body = body_of(path, temperature=0)
    engine = salt_where(None, body, path)
    asked = body | {"return_token_ids": True}
    head = b"".join(RustEngine(engine.model).events(path, asked, "id-0"))
    with pytest.raises(ValueError, match="end"):
        PrefillToken.of(head[: head.index(b"\n\n", head.index(b'"token_ids":[')) + 2])
    transcript = transcript_of(path, body)
    for first in engine.events(path, asked, "id-0"):
        transcript.feed(first)
        if b'"token_ids":[' in first:
            break
    got = RepeatedAnswer(transcript, text_of(first)).feed(head)
    assert Answer.of(got).text == answer(engine, body, path).text[len(text_of(first).said or "") :]


AFTER = {
    0: (5, 2, 1, 2),
    FIRST_HALF: (0, 0, 0, 0),
    2: (1, 4, 3, 2),
    9: (6, 1, 1, 2),
    END_OF_TEXT: (0, 0, 0, 0),
}
"""How probable a sampled token is, in tenths, after this one; 0: after the prompt."""
DRAWN = (2, 9, FIRST_HALF, END_OF_TEXT)


@dataclass
class Sampler(Model):
    """One request's draws."""

    numbers: random.Random = field(default_factory=lambda: random.Random(1))

    def next(self, ids: Sequence[int]) -> int:
        weights = AFTER.get(ids[-1], AFTER[0])
        return self.numbers.choices(DRAWN, weights)[0] if any(weights) else SECOND_HALF


def test_pairs_of_sampled_tokens_have_one_servers_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,000 draws each pair comes as often as it is probable, but for five standard deviations."""
    monkeypatch.setattr(first_token, "random", random.Random(41))
    able = {"first_token": 2, "sampler": "V2", "ahead_tokens": 1 << 20}
    _, (p, d) = fleet(("P", able), ("D", able))
    d.context = CONTEXT
    tokens, choice, d_alone = FirstTokens(True, RequestCounters()), Choice(p, d), Engine(Sampler())
    body, draws = body_of(COMPLETIONS, max_tokens=2, temperature=1, return_token_ids=True), 2_000
    request, transcript = parse(json.dumps(body).encode()), transcript_of(COMPLETIONS, body)

    def drawn() -> tuple[int, ...]:
        plan = tokens.plan(request, transcript, choice)
        assert plan is not None and plan.seed is not None
        plan.leave()
        prefill, decode = (Engine(Sampler(numbers=random.Random(plan.seed))) for _ in "PD")
        got, _ = handed_on(prefill, COMPLETIONS, body, [], d_alone, tokens, plan)
        return tuple((answer(decode, body) if got is None else Answer.of(got)).ids)

    counted = Counter(drawn() for _ in range(draws))
    probable: dict[tuple[int, ...], float] = {}
    for one, first in zip(DRAWN, AFTER[0], strict=True):
        ended = {FIRST_HALF: (FIRST_HALF, SECOND_HALF), END_OF_TEXT: (END_OF_TEXT,)}.get(one)
        seconds = [((one, two), weight) for two, weight in zip(DRAWN, AFTER.get(one, ()), strict=False)]
        probable |= {pair: first * weight / 100 for pair, weight in ([(ended, 10)] if ended else seconds)}
    assert set(counted) == set(probable) and sum(probable.values()) == pytest.approx(1)
    for pair, share in probable.items():
        assert abs(counted[pair] - draws * share) < 5 * (draws * share * (1 - share)) ** 0.5, pair
    assert tokens.from_decode["token"] == counted[FIRST_HALF, SECOND_HALF]


def engine_of(engine: Engine, *before: Step) -> Behaviour:
    """`before`: what comes before its first event."""
    return by_kind(
        chosen(lambda seen: stream_of(*before, *engine.events(seen.path, seen.body, seen.request_id))),
        answer_json,
    )


def behind_p(deployment: Deployment, behaviour: Behaviour) -> Behaviour:
    """Of a D that was asked at once: it waits for P, and P's token comes to the proxy sooner than its own."""
    return after(lambda: deployment.proxy.counters.first_tokens > 0 or reasons(deployment) != {}, behaviour)


@asynccontextmanager
async def pair_of(
    engine: Engine,
    decode: int = 1,
    dispatch: Dispatch = "concurrent",
    p: dict[str, Any] | None = None,
    d: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[Deployment]:
    """A P, which has taken a while, and so many D's that can do it; `p`, `d`: what is otherwise of them."""
    async with deployed(dispatch, **more) as deployment:
        kept_alive = engine_of(engine, KEEP_ALIVE)
        await deployment.add("P", **{"first_token": 2, "behaviour": kept_alive} | (p or {}))
        behind = behind_p(deployment, engine_of(engine))
        can = {"first_token": 2, "ahead_tokens": 1 << 16, "context": CONTEXT, "behaviour": behind} | (d or {})
        for _ in range(decode):
            await deployment.add("D", **can)
        await deployment.ready(1, decode)
        await eventually(lambda: all(each.context for each in deployment.everyone() if each.role == "D"))
        yield deployment


def reasons(deployment: Deployment) -> dict[str, int]:
    counted = deployment.proxy.counted()
    names = {name: value for name, value in counted.items() if name.startswith("first_token_")}
    return dict(
        Counter({name.removeprefix("first_token_"): value for name, value in names.items()}) + Counter()
    )


USAGE = {"stream_options": {"include_usage": True}}


BEHIND_P = [("sequential", True), ("sequential", False), ("concurrent", False)]
"""Dispatch, and whether the request is greedy, with which D is asked for the rest."""


@pytest.mark.parametrize(("path", "names"), [(COMPLETIONS, False), (CHAT, False), (CHAT, True)])
@pytest.mark.parametrize(("dispatch", "greedy"), BEHIND_P)
async def test_d_is_asked_for_the_rest(path: str, names: bool, greedy: bool, dispatch: Dispatch) -> None:
    body = body_of(path, max_tokens=12, **USAGE) | ({"temperature": 0} if greedy else {})
    body |= {"logprobs": True, "top_logprobs": 3} if names else {}
    engine = salt_where(None, body, path)
    async with pair_of(engine, dispatch=dispatch) as deployment:
        assert same(await ask(deployment, body, path), answer(engine, body, path))
        (first,), (rest,) = deployment.p.requests, deployment.d.requests
        assert first.path == rest.path == path
        assert first.request_id == rest.request_id
        assert first.body[PARAMS] == {"first_token": "handed_on"}
        said = rest.body[PARAMS]
        given = said.pop("prompt_token_ids", rest.body.get("prompt"))
        assert said == {"first_token": "in_prompt"}
        assert (first.body["max_tokens"], rest.body["max_tokens"]) == (1, 11)
        assert ("seed" in first.body, "seed" in rest.body) == (not greedy, False)
        ids = answer(engine, body | {"return_token_ids": True}, path)
        assert given == [*(ids.prompt_ids or ()), ids.ids[0]]
        assert deployment.proxy.counters.first_tokens == 1 and not reasons(deployment)
        page = await deployment.text("/metrics")
        assert "p2pkv_proxy_first_tokens_from_prefill_total 1.0" in page
        latest = (await deployment.get("/status"))[1]["first_token_seconds"]
        assert latest["p50_from_prefill"] == latest["p50"] > 0 and latest["p50_from_decode"] is None
        assert f'seconds_count{{address="{deployment.p.http_address}",way="prefill"}} 1.0' in page


@pytest.mark.parametrize(
    ("path", "greedy", "room"),
    [(COMPLETIONS, False, 1 << 16), *itertools.product([COMPLETIONS, CHAT], [True], [0, 1 << 16])],
)
async def test_the_client_has_ps_token_before_d_has_answered(path: str, greedy: bool, room: int) -> None:
    """A D that is asked at once for all of a greedy answer, with room or without, repeats the token. A seed
    does not count there."""
    body = body_of(path, max_tokens=12, **USAGE) | ({"temperature": 0, "seed": 3} if greedy else {})
    engine, release = salt_where(None, body, path), asyncio.Event()
    async with pair_of(engine, d={"ahead_tokens": room}) as deployment:
        deployment.d.behaviour = engine_of(engine, release)
        async with await deployment.post(body, path) as response:
            first = b""
            while not Answer.of(first + DONE).text:
                first += await response.content.readuntil(b"\n\n")
            assert Answer.of(first).text == answer(engine, body | {"max_tokens": 1}, path).text
            assert greedy or (b'"finish_reason":null' in first and b'"token_ids":null' in first)
            await eventually(lambda: deployment.d.requests != [])
            release.set()
            assert same(Answer.of(first + await response.read()), answer(engine, body, path))
        (of_p,), (of_d,) = deployment.p.requests, deployment.d.requests
        assert of_p.request_id == of_d.request_id
        if greedy:
            assert PARAMS not in of_p.body and PARAMS not in of_d.body
            assert of_p.body | {"max_tokens": 12} == of_d.body == body | {"return_token_ids": True}
        assert deployment.proxy.counters.first_tokens == 1 and not reasons(deployment)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("why", ["one token", "end of text", "context"])
async def test_an_answer_that_ends_with_its_first_token_never_reaches_d(path: str, why: str) -> None:
    body = body_of(path, **USAGE)
    engine = salt_where(END_OF_TEXT if why == "end of text" else None, body, path)
    if why == "one token":
        body["max_tokens"] = 1
    if why == "context":
        prompt = [*range(100, 99 + CONTEXT)]
        body = body_of(COMPLETIONS, **USAGE) | {"prompt": prompt, "max_tokens": 1}
        path = COMPLETIONS
        engine = salt_where(None, body)
    async with pair_of(engine) as deployment:
        assert same(await ask(deployment, body, path), answer(engine, body, path))
        assert not deployment.d.requests and deployment.proxy.counters.first_tokens == 1
        (seen,) = deployment.p.requests
        assert seen.body[PARAMS] == {"first_token": "handed_on" if why == "end of text" else "whole"}


async def test_an_answer_that_ended_with_its_first_token_costs_its_tenant_no_more() -> None:
    body = body_of(COMPLETIONS, max_tokens=400)
    async with pair_of(salt_where(END_OF_TEXT, body), tenants=(tenants := Tenants({}))) as deployment:
        tenant = tenants.by_name[OTHER]
        usual = tenant.answer
        await ask(deployment, body)
        await eventually(lambda: tenant.under_way == 0)
        assert tenant.answer < usual and tenant.used["tiny"] < usual / 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("dispatch", "greedy"), [*BEHIND_P, ("concurrent", True)])
async def test_a_tenant_pays_for_each_token_once(path: str, greedy: bool, dispatch: Dispatch) -> None:
    body = body_of(path, max_tokens=12, **USAGE) | ({"temperature": 0} if greedy else {})
    engine = salt_where(None, body, path)
    async with pair_of(engine, dispatch=dispatch, tenants=(tenants := Tenants({}))) as deployment:
        tenant = tenants.by_name[OTHER]
        await ask(deployment, body, path)
        await eventually(lambda: tenant.under_way == 0)
        assert deployment.proxy.counters.first_tokens == 1
        events = [*engine.events(path, body, "one-server")]
        assert tenant.used["tiny"] == 1 + tenant.prompt_tokens + len(events)


async def test_p_lets_go_of_what_no_d_will_ask_for() -> None:
    """Its engine core does not learn that its token has a stop string."""
    body = body_of(COMPLETIONS, max_tokens=9, **USAGE)
    engine = salt_where(None, body)
    body["stop"] = answer(engine, body | {"max_tokens": 1}).text[-1]
    async with pair_of(engine) as deployment:
        assert same(await ask(deployment, body), answer(engine, body))
        await eventually(lambda: len(deployment.p.requests) == 2)
        first, release = deployment.p.requests
        assert release.request_id == first.request_id and not deployment.d.requests
        assert release.body[PARAMS] == {"first_token": "released"} and len(release.body["prompt"]) == 1


@pytest.mark.parametrize(("dispatch", "greedy"), [*BEHIND_P, ("concurrent", True)])
@pytest.mark.parametrize("why", ["half a character", "may begin a stop string"])
async def test_d_draws_the_token_that_is_not_handed_on(why: str, greedy: bool, dispatch: Dispatch) -> None:
    body = body_of(COMPLETIONS, max_tokens=9) | ({"temperature": 0} if greedy else {})
    engine = salt_where(FIRST_HALF if why.startswith("half") else None, body)
    if why.startswith("may"):
        body["stop"] = [answer(engine, body | {"max_tokens": 1}).text[-1] + "never"]
    async with pair_of(engine, dispatch=dispatch) as deployment:
        assert same(await ask(deployment, body), answer(engine, body))
        (first,), (whole,) = deployment.p.requests, deployment.d.requests
        assert PARAMS not in whole.body and whole.body["prompt"] == "hi" and whole.body["max_tokens"] == 9
        assert ("seed" in whole.body) != greedy and whole.body.get("seed") == first.body.get("seed")
        assert reasons(deployment) == {"token": 1} and not deployment.proxy.counters.first_tokens


AGAINST: dict[str, tuple[str, dict[str, Any], Limits]] = {
    "no stream": ("request", {"stream": False}, Limits()),
    "seed": ("request", {"seed": 3}, Limits()),
    "penalty": ("request", {"presence_penalty": 0.5}, Limits()),
    "several": ("request", {"n": 2}, Limits()),
    "unknown": ("request", {"of_another_vllm": 1}, Limits()),
    "grammar": ("request", {"response_format": {"type": "json_object"}}, Limits()),
    "no bound": ("request", {"max_tokens": None}, Limits()),
    "no tokens": ("request", {"max_tokens": 0}, Limits()),
    "more than the bound": ("request", {"min_tokens": 40}, Limits()),
    "no number": ("request", {"max_tokens": [3]}, Limits()),
    "no whole number": ("request", {"max_tokens": 2.5}, Limits()),
    "no whole number at least": ("request", {"min_tokens": 2.5}, Limits()),
    "too many": ("context", {"max_tokens": CONTEXT}, Limits()),
    "by option": ("", {}, Limits(first_token="decode")),
    "no stream goes on": ("", {}, Limits(resumes=0)),
    "no room for the prompt's ids": ("memory", {}, Limits(resume_bytes=1 << 10)),
}


@pytest.mark.parametrize("case", AGAINST)
async def test_where_it_is_not_exact_or_not_to_be_it_is_not_done(case: str) -> None:
    why, fields, limits = AGAINST[case]
    async with pair_of(Engine(Model(1)), limits=limits) as deployment:
        deployment.d.behaviour = answer_json
        await deployment.serves(1, body_of(COMPLETIONS, max_tokens=9) | fields)
        (seen,) = deployment.d.requests
        assert seen.body["prompt"] == "hi" and PARAMS not in seen.body
        assert reasons(deployment) == ({why: 1} if why else {}) and not deployment.proxy.counters.first_tokens
        page = await deployment.text("/metrics")
        assert not why or f'p2pkv_proxy_first_tokens_from_decode_total{{reason="{why}"}} 1.0' in page


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_tokens": 0}, "request"),
        ({"max_completion_tokens": 0}, "request"),
        ({"max_tokens": None, "min_tokens": CONTEXT}, "context"),
        ({"max_tokens": None, "truncate_prompt_tokens": -1}, "request"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "parser"),
    ],
    ids=str,
)
async def test_what_d_alone_can_judge_of_a_chat(fields: dict[str, Any], why: str, greedy: bool) -> None:
    """vLLM refuses all but the last, and would answer P's part of them."""
    body = body_of(CHAT) | fields | ({"temperature": 0} if greedy else {})
    engine = salt_where(None, body | {"max_tokens": 9}, CHAT)
    async with pair_of(engine) as deployment:
        deployment.d.behaviour = behind_p(deployment, answer_error(400))
        async with await deployment.post(body, CHAT) as response:
            assert response.status == 400
        assert reasons(deployment) == {why: 1} and len(deployment.d.requests) == 1


@pytest.mark.parametrize("greedy", [True, False])
async def test_the_first_event_of_a_long_prompt_comes_in_pieces(greedy: bool) -> None:
    body = body_of(COMPLETIONS, max_tokens=3) | ({"temperature": 0} if greedy else {})
    body["prompt"] = [*range(100_000, 120_000)]
    engine = salt_where(None, body)

    async with pair_of(engine, d={"context": 1 << 16}) as deployment:
        deployment.p.behaviour = in_pieces(engine, 30_000)
        deployment.d.behaviour = behind_p(deployment, in_pieces(engine, 30_000))
        assert same(await ask(deployment, body), answer(engine, body))
        assert deployment.proxy.counters.first_tokens == 1 and not reasons(deployment)


@pytest.mark.parametrize("longest", [300, 1 << 20])
async def test_an_event_of_d_may_be_long(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a client that reads slowly are, with many tokens. One that is too long ends the stream."""
    monkeypatch.setattr(relay, "LONGEST_EVENT", 300)
    monkeypatch.setattr(relay, "_LONGEST_READ", longest, raising=False)
    body = body_of(COMPLETIONS, max_tokens=9, logprobs=3)
    engine = salt_where(None, body)
    async with pair_of(engine) as deployment:
        deployment.d.behaviour = in_pieces(Engine(engine.model, (4,)), 301)
        got = await ask(deployment, body)
        assert (got.error is not None) if longest == 300 else same(got, answer(engine, body))


def in_pieces(engine: Engine, size: int) -> Behaviour:
    """Its events, cut anywhere."""

    def cut(seen: Seen) -> Behaviour:
        data = b"".join(engine.events(seen.path, seen.body, seen.request_id))
        return stream_of(*(step for each in pieces(data, [size]) for step in (each, a_pause)))

    return chosen(cut)


async def a_pause(*_: object) -> None:
    """So that what was sent before it is read by itself."""
    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("p", "d", "kind", "why"),
    [
        ({}, {}, "unbounded", ""),
        ({}, {"first_token": 1}, "", ""),
        ({}, {"first_token": 1}, "unbounded", "instances"),
        ({"first_token": 0}, {}, "", "instances"),
        ({}, {"first_token": 0}, "", "instances"),
        ({"parses": True}, {}, "", "parser"),
        ({}, {"parses": True}, "", "parser"),
        *itertools.product([{"sampler": ""}], [{"sampler": ""}], ["", "greedy"], [None]),
        *itertools.product([{"sampler": "V1"}], [{}], ["", "greedy"], [None]),
    ],
)
async def test_instances_say_whether_they_can(
    p: dict[str, Any], d: dict[str, Any], kind: str, why: str | None
) -> None:
    """A D whose model bounds answers by itself cannot be asked for the rest of one that has no bound. Those
    that draw otherwise share no sampled answer, with a seed that they may not take at all."""
    body = body_of(CHAT)
    if kind == "unbounded":
        del body["max_tokens"]
    if kind == "greedy":
        body["temperature"] = 0
    draws = why is not None
    why = why if draws else "" if kind == "greedy" else "instances"
    engine = salt_where(None, body, CHAT)
    prompt = answer(engine, body | {"return_token_ids": True}, CHAT).prompt_ids
    context = len(prompt or ()) + DEFAULT_TOKENS
    async with pair_of(engine, p=p, d={"context": context} | d) as deployment:
        assert same(await ask(deployment, body, CHAT), answer(engine, body, CHAT))
        assert deployment.proxy.counters.first_tokens == (not why)
        assert reasons(deployment) == ({why: 1} if why else {})
        assert draws or all("seed" not in each.body for each in deployment.p.requests)


async def test_a_d_whose_room_is_taken_is_asked_at_once() -> None:
    body = body_of(COMPLETIONS, max_tokens=9)
    engine, release = salt_where(None, body), asyncio.Event()
    async with pair_of(engine, d={"ahead_tokens": 200}) as deployment:
        deployment.d.behaviour = engine_of(engine, release)
        asking = [asyncio.create_task(ask(deployment, body)) for _ in range(3)]
        await eventually(lambda: len(deployment.d.requests) == 3)
        assert reasons(deployment) == {"room": 2} and deployment.proxy.counters.first_tokens == 1
        release.set()
        assert all(same(got, answer(engine, body)) for got in await asyncio.gather(*asking))
        assert same(await ask(deployment, body), answer(engine, body))
        assert deployment.proxy.counters.first_tokens == 2, "there is room again"


def differing() -> tuple[Engine, int, Engine]:
    """P's, its first token, and one of a D that draws another."""
    engine, body = salt_where(None, GREEDY), GREEDY | {"return_token_ids": True}
    token = answer(engine, body).ids[0]
    return engine, token, salt_where(next(each for each in (2, 3) if each != token), body)


def in_turn(deployment: Deployment, *behaviours: Behaviour) -> None:
    """Of all D's together; the first waits for P."""
    first, *later = behaviours
    take_turns(deployment.decodes, behind_p(deployment, first), *later)


async def test_a_d_that_draws_another_first_token_goes_on_behind_ps() -> None:
    engine, token, other = differing()
    async with pair_of(engine) as deployment:
        deployment.d.behaviour = behind_p(deployment, engine_of(other))
        got = await ask(deployment, GREEDY)
        whole, rest = deployment.d.requests
        assert rest.body["prompt"][-1] == token and rest.body["max_tokens"] == 11
        assert PARAMS not in rest.body and rest.request_id not in (whole.request_id, None)
        behind = Answer.of(b"".join(other.events(COMPLETIONS, rest.body, "one-server")))
        assert got.text == answer(engine, GREEDY | {"max_tokens": 1}).text + behind.text and got.error is None
        assert len(deployment.p.requests) == deployment.proxy.counters.first_tokens == 1


LOST_KV = b'data: {"error":{"message":"no KV","type":"x","code":500}}\n\n', DONE
LOST = {"dies": stream_of(die), "refuses": answer_error(500), "an error": stream_of(*LOST_KV)}


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("how", LOST)
async def test_a_d_that_is_lost_behind_a_token_that_it_drew_otherwise(how: str, others: int) -> None:
    engine, _, other = differing()
    async with pair_of(engine, 1 + others) as deployment:
        in_turn(deployment, engine_of(other), LOST[how], engine_of(engine))
        got = await ask(deployment, GREEDY)
        assert same(got, answer(engine, GREEDY)) if others else got.error is not None


async def test_the_rest_has_a_deadline_of_its_own() -> None:
    """The first token was there in time."""
    engine, _, other = differing()

    def long_ago(*_: object) -> None:
        attempt_of(deployment)._began -= 60.0

    async with pair_of(engine, first_token_seconds=60.0) as deployment:
        in_turn(deployment, engine_of(other, long_ago), engine_of(other, a_pause))
        assert (await ask(deployment, GREEDY)).error is None
        assert all(all(outcomes(each)) for each in deployment.everyone())


async def test_the_proxy_stops_while_d_goes_on_behind_ps_token() -> None:
    engine, _, other = differing()
    async with pair_of(engine) as deployment:
        in_turn(deployment, engine_of(other), never_a_token)
        async with await deployment.post(GREEDY) as response:
            await eventually(lambda: len(deployment.d.requests) == 2)
            await deployment.proxy.stop(0.0, asyncio.Event())
            assert b"had to stop" in await response.read()


async def test_a_first_token_comes_from_p_at_the_second_try() -> None:
    engine, first = salt_where(None, GREEDY), [never_a_token]
    async with pair_of(engine, 2) as deployment:
        deployment.p.behaviour = chosen(lambda _: first.pop() if first else engine_of(engine))
        take_turns(deployment.decodes, stream_of(die), behind_p(deployment, engine_of(engine)))
        assert same(await ask(deployment, GREEDY), answer(engine, GREEDY))
        assert deployment.proxy.counters.first_tokens == 1 and not reasons(deployment)


async def test_ps_count_of_cached_tokens_may_come_with_its_token(dispatch: Dispatch) -> None:
    body = GREEDY | USAGE
    engine = salt_where(None, body)

    def counted(cached: int) -> Behaviour:
        usage = b'"usage":{"prompt_tokens_details":{"cached_tokens":%d},' % cached
        return chosen(
            lambda seen: stream_of(
                b"".join(engine.events(seen.path, seen.body, seen.request_id)).replace(b'"usage":{', usage)
            )
        )

    async with pair_of(engine, dispatch=dispatch) as deployment:
        deployment.p.behaviour, deployment.d.behaviour = counted(7), behind_p(deployment, counted(99))
        async with await deployment.post(body) as response:
            assert b'"cached_tokens":7' in await response.read()


@pytest.mark.parametrize(("last", "how"), [(True, forever), (True, die), (False, die)])
async def test_a_p_that_hangs_or_dies_behind_its_token(
    last: bool, how: Any, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`last`: it is the only one."""
    monkeypatch.setattr("p2pkv_proxy.attempt._GRACE_SECONDS", 0.1)
    body = GREEDY | USAGE
    engine = salt_where(END_OF_TEXT if last else None, body)

    def ends(seen: Seen) -> Behaviour:
        first, rest, *_ = engine.events(seen.path, seen.body, seen.request_id)
        return stream_of(first + rest[:40] if last else first, how)

    async with pair_of(engine, dispatch=dispatch) as deployment:
        deployment.p.behaviour = chosen(ends)
        if last:
            deployment.d.behaviour = never_a_token
        assert same(await ask(deployment, body), answer(engine, body))
        assert deployment.proxy.counters.first_tokens == 1


async def test_a_first_token_that_is_late_is_a_504() -> None:
    async with pair_of(Engine(Model(1)), first_token_seconds=0.3, retries=0, alone_share=0.0) as deployment:
        deployment.p.behaviour = deployment.d.behaviour = never_a_token
        async with await deployment.post(GREEDY) as response:
            assert response.status == 504


async def test_a_d_that_is_there_before_p() -> None:
    engine, release = salt_where(None, GREEDY), asyncio.Event()
    async with pair_of(engine) as deployment:
        deployment.p.behaviour, deployment.d.behaviour = engine_of(engine, release), engine_of(engine)
        async with await deployment.post(GREEDY) as response:
            first = await response.content.readuntil(b"\n\n")
            release.set()
            assert same(Answer.of(first + await response.read()), answer(engine, GREEDY))
        assert reasons(deployment) == {"late": 1} and not deployment.proxy.counters.first_tokens


async def test_chats_with_a_parser_are_left_to_d() -> None:
    """Only the first one shows it, and is asked of D when P has answered."""
    body = body_of(CHAT, max_tokens=9)
    engine = salt_where(None, body, CHAT)

    def reasons_first(seen: Seen) -> Behaviour:
        events = list(engine.events(seen.path, seen.body, seen.request_id))
        return stream_of(*(each.replace(b'{"content":', b'{"reasoning":') for each in events))

    async with pair_of(engine) as deployment:
        deployment.p.behaviour = by_kind(chosen(reasons_first), answer_json)
        for _ in range(3):
            assert same(await ask(deployment, body, CHAT), answer(engine, body, CHAT))
        assert reasons(deployment) == {"parser": 3}
        assert [seen.body["stream"] for seen in deployment.p.requests] == [True, False, False]
        assert all(seen.path == CHAT for seen in deployment.d.requests)


async def test_a_token_without_text_says_nothing_of_other_chats() -> None:
    """Where the servers have a parser of tools, half a character comes as an event with nothing."""
    body = body_of(CHAT, max_tokens=9)
    engine = salt_where(FIRST_HALF, body, CHAT)
    engine.parser = True
    async with pair_of(engine) as deployment:
        for count in (1, 2):
            assert same(await ask(deployment, body, CHAT), answer(engine, body, CHAT))
            assert reasons(deployment) == {"token": count}


MESSAGES = "/v1/messages"
ONE_TOKEN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "whole": (COMPLETIONS, {"stream": False, "max_tokens": 1}, True),
    "whole chat": (CHAT, {"stream": False, "max_completion_tokens": 1, "max_tokens": 9}, True),
    "seed": (COMPLETIONS, {"max_tokens": 1, "seed": 3}, True),
    "grammar": (COMPLETIONS, {"stream": False, "max_tokens": 1, "response_format": {"type": "x"}}, True),
    "several": (COMPLETIONS, {"stream": False, "max_tokens": 1, "prompt": ["a", "b"], "n": 2}, True),
    "message": (MESSAGES, {"stream": False, "max_tokens": 1}, True),
    "streamed message": (MESSAGES, {"stream": True, "max_tokens": 1}, True),
    "thinking": (MESSAGES, {"stream": False, "max_tokens": 1, "thinking": {"type": "enabled"}}, False),
    "two": (COMPLETIONS, {"stream": False, "max_tokens": 2}, False),
    "nine": (CHAT, {"stream": False, "max_completion_tokens": "9", "max_tokens": 1}, False),
    "tools": (CHAT, {"stream": False, "max_tokens": 1, "tools": [{"type": "function"}]}, False),
}


@pytest.mark.parametrize("case", ONE_TOKEN)
async def test_any_answer_of_one_token_is_ps(case: str) -> None:
    path, fields, done = ONE_TOKEN[case]
    body = body_of(path) | fields
    async with pair_of(Engine(Model(1))) as deployment:
        async with await deployment.post(body, path) as response:
            assert response.status == 200
            await response.read()
        (seen,) = deployment.p.requests
        if done:
            assert seen.body == body | {PARAMS: {"first_token": "whole"}} and not deployment.d.requests
        else:
            assert "first_token" not in seen.body.get(PARAMS, ()) and len(deployment.d.requests) == 1
        assert deployment.proxy.counters.first_tokens == done


async def test_a_p_that_hangs_in_an_answer_of_one_token() -> None:
    body = body_of(COMPLETIONS, max_tokens=1)
    async with pair_of(Engine(Model(1)), event_seconds=0.3) as deployment:
        hangs = chosen(
            lambda seen: stream_of(next(Engine(Model(1)).events(seen.path, seen.body, "x")), forever)
        )
        deployment.p.behaviour = hangs
        error = (await ask(deployment, body)).error
        assert (error["code"], error["message"]) == (504, "The prefill instance has sent nothing for 0.3 s.")


@pytest.mark.parametrize("how", ["refuses", "dies", "an error", "no event"])
async def test_a_p_that_fails_before_its_token(how: str, dispatch: Dispatch) -> None:
    """Nothing has gone to the client, and a D takes the request alone; one of one token, too."""
    engine = salt_where(None, GREEDY)
    error = b'data: {"error":{"message":"EngineCore died","type":"x","code":500}}\n\n'
    failing: dict[str, Behaviour] = {
        "refuses": answer_error(500),
        "dies": stream_of(b": waiting\n\n", die),
        "an error": stream_of(error, DONE),
        "no event": stream_of(b'data: {"id":"x","choices":[{"index":0,"text":"a"}]}\n\n', DONE),
    }
    async with pair_of(engine, dispatch=dispatch) as deployment:
        deployment.p.behaviour = failing[how]
        for tries, body in enumerate(
            (GREEDY, GREEDY | {"max_tokens": 1})[: 1 if how == "no event" else 2], 1
        ):
            assert same(await ask(deployment, body), answer(engine, body))
            assert deployment.d.requests[-1].body["prompt"] == "hi"
            assert reasons(deployment) == {"failed": tries} and not deployment.proxy.counters.first_tokens
            assert how == "no event" or outcomes(deployment.known(deployment.p)) == [False] * tries


@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_a_d_that_fails_as_p_is_lost_behind_its_token(
    how: str, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks P's KV: it is not to blame, and computes all by itself."""
    monkeypatch.setattr("p2pkv_proxy.attempt._GRACE_SECONDS", 0.1)
    engine = salt_where(None, GREEDY)

    def first_only(seen: Seen) -> Behaviour:
        first = next(engine.events(seen.path, seen.body, seen.request_id))
        return stream_of(first, die if how == "dies" else forever)

    def late(*_: object) -> None:
        attempt_of(deployment)._decoding.lose("late")

    async with pair_of(engine, dispatch=dispatch) as deployment:
        deployment.p.behaviour = chosen(first_only)
        lacks_kv = stream_of(a_pause, *(LOST_KV if how == "dies" else (b": waiting\n\n", a_pause, late)))
        in_turn(deployment, lacks_kv, engine_of(engine))
        assert same(await ask(deployment, GREEDY), answer(engine, GREEDY))
        of = {each.role: outcomes(each) for each in deployment.everyone()}
        assert of == {"P": [True] if how == "dies" else [True, False], "D": [True]}
        assert len(deployment.p.requests) == 1


@pytest.mark.parametrize("how", [*LOST, "in the middle"])
async def test_a_d_that_is_lost_behind_ps_token(how: str, dispatch: Dispatch) -> None:
    """Another one goes on from there, as with any stream that has begun."""
    engine = salt_where(None, GREEDY)

    def loses(seen: Seen) -> Behaviour:
        return stream_of(*list(engine.events(seen.path, seen.body, seen.request_id))[:3], die)

    losing = LOST | {"in the middle": chosen(loses)}
    async with pair_of(engine, 2, dispatch=dispatch) as deployment:
        in_turn(deployment, losing[how], engine_of(engine))
        assert same(await ask(deployment, GREEDY), answer(engine, GREEDY))
        assert asked(deployment.decodes) == [1, 1]
        assert deployment.proxy.counters.resumed == 1 and deployment.proxy.counters.first_tokens == 1
        assert len(deployment.p.requests) == 2, "P computes it again for the other D"


async def test_a_client_that_leaves_behind_ps_token(dispatch: Dispatch) -> None:
    engine = salt_where(None, GREEDY)
    async with pair_of(engine, dispatch=dispatch) as deployment:
        deployment.d.behaviour = never_a_token
        response = await deployment.post(GREEDY)
        await eventually(lambda: deployment.d.requests != [])
        response.close()
        await eventually(lambda: deployment.d.requests[0].aborted)


async def test_a_drain_behind_ps_token_moves_what_d_has_not_begun(dispatch: Dispatch) -> None:
    engine = salt_where(None, GREEDY)
    async with pair_of(engine, 2, dispatch=dispatch) as deployment:
        take_turns(deployment.decodes, stream_of(b": waiting\n\n", forever), engine_of(engine))
        asking = asyncio.create_task(ask(deployment, GREEDY))
        await eventually(lambda: sum(asked(deployment.decodes)) == 1)
        assert deployment.proxy.active.needs(deployment.known(deployment.p)), "D has yet to take P's KV"
        drain(deployment)
        assert same(await asking, answer(engine, GREEDY))
