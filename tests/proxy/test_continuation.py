"""A streamed answer that loses its instance goes on at another one as if nothing had happened.

A stand-in generates; the answer is cut anywhere, twice, and compared with the same answer without a cut."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from proxy_behaviours import (
    DONE,
    Behaviour,
    Seen,
    Step,
    a_moment,
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
from proxy_fakes import Deployment, FakeInstance, all_do, asked, attempt_of, deployed, filter_of, take_turns
from streaming_engine import DEFAULT_TOKENS, FIRST_HALF, SECOND_HALF, Answer, Engine, Model, RustEngine

from p2pkv_proxy import continuation
from p2pkv_proxy.access import Access
from p2pkv_proxy.attempt import Dispatch
from p2pkv_proxy.bodies import parse
from p2pkv_proxy.continuation import Continuation, Diverged, ending
from p2pkv_proxy.limits import Limits
from p2pkv_proxy.membership.instance import Instance
from p2pkv_proxy.relay import Relay
from p2pkv_proxy.transcript import Transcript, TranscriptMemory, fields_of
from p2pkv_proxy.upstream import LONGEST_EVENT
from support.waiting import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 512


def transcript_of(path: str, body: dict[str, Any], held: TranscriptMemory | None = None) -> Transcript | None:
    return Transcript.of(parse(json.dumps(body).encode(), path), held or TranscriptMemory(1 << 20, 1 << 16))


def test_fields_may_have_each_of_vllms_spellings() -> None:
    """What the client asked for is not lost because it is spelled otherwise."""
    spelled = {"stream": "yes", "return_token_ids": 1, "max_tokens": "16", "min_tokens": "3", "echo": "off"}
    transcript = transcript_of(COMPLETIONS, {"prompt": "x", "n": 1.0, **spelled})
    assert transcript is not None and transcript.wanted.shows_ids
    assert transcript.wanted.most_tokens(0) == 16 and transcript.wanted.fields["min_tokens"] == 3
    for refused in ("1e1", "1.", "\u0661", "x"):
        transcript = transcript_of(COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": refused})
        assert transcript is not None and transcript.wanted.fields["max_tokens"] == refused
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "logprobs": "false"}
    transcript = transcript_of(CHAT, chat)
    assert transcript is not None and not transcript.wanted.shows_tokens


def asked_of_d(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"return_token_ids": True}


def answer_of(engine: Engine, body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    return b"".join(engine.events(path, asked_of_d(body), "id-0"))


def pieces(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """As a connection may cut them; without sizes by events."""
    if not sizes:
        yield from (event + b"\n\n" for event in data.split(b"\n\n")[:-1])
        return
    at, number = 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        yield data[at : at + size]
        at, number = at + size, number + 1


def cut_answer(
    path: str, body: dict[str, Any], engines: list[Engine], cuts: list[int], sizes: list[int]
) -> bytes:
    """What the client gets if each engine but the last is lost after so many bytes."""
    transcript = transcript_of(path, body)
    stream: Transcript | Continuation = transcript
    asked, at_path, got = asked_of_d(body), path, b""
    for number, engine in enumerate(engines):
        data = b"".join(engine.events(at_path, asked, f"id-{number}"))
        last = number == len(engines) - 1
        # One event at least: before that, the request is tried again as a whole.
        begun = data.index(b'"token_ids":[')
        begun = data.index(b"\n\n", begun) + 2
        data = data if last else data[: max(begun, cuts[number])]
        relay = filter_of(at_path)
        for piece in pieces(data, sizes):
            got += stream.feed(relay.feed(piece))
        if transcript.done:
            break
        if transcript.finished:
            return got + ending(transcript)
        assert transcript.possible and not last
        former = stream if isinstance(stream, Continuation) else None
        stream = Continuation(transcript, CONTEXT, former)
        asked, at_path = json.loads(bytes(stream.body.for_decode("x"))), stream.body.path
    return got


def body_of(path: str, **more: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    return {"model": "tiny", "stream": True, "max_tokens": 30, **prompt, **more}


STOPS = st.sampled_from([None, "END", [" END", "ENDING"], ["ü\n", "😀"], "never"])
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "stop": STOPS,
        "include_stop_str_in_output": st.booleans(),
        "max_tokens": st.integers(2, 40),
        "return_token_ids": st.booleans(),
        "stream_options": st.sampled_from(
            [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, None]
        ),
        "min_tokens": st.integers(0, 3),
        "temperature": st.just(0),
        "return_tokens_as_token_ids": st.booleans(),
    },
)


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    more=BODIES,
    logprobs=st.none() | st.integers(-1, 3),
    salt=st.integers(0, 1000),
    chunks=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=3, max_size=3),
    cuts=st.tuples(st.integers(1, 6000), st.integers(1, 4000)),
    sizes=st.lists(st.integers(1, 700), max_size=5),
    parser=st.booleans(),
    newer=st.booleans(),
)
def test_a_cut_answer_is_the_whole_one(
    path: str,
    more: dict[str, Any],
    logprobs: int | None,
    salt: int,
    chunks: list[list[int]],
    cuts: tuple[int, int],
    sizes: list[int],
    parser: bool,
    newer: bool,
) -> None:
    if logprobs is not None:
        more |= {"logprobs": True, "top_logprobs": logprobs} if path == CHAT else {"logprobs": logprobs}
    body = body_of(path, **more)
    engines = [Engine(Model(salt), each, parser, newer) for each in chunks]
    data = cut_answer(path, body, engines, list(cuts), sizes)
    shown = more.get("return_token_ids") or logprobs is not None
    assert shown or b'"delta":{},"logprobs":null,"finish_reason":null' not in data
    got, wanted = Answer.of(data), Answer.of(b"".join(engines[0].events(path, body, "id-0")))
    assert same(got, wanted), "as without a proxy"


def lost_after(answer: bytes, events: int) -> int:
    at = 0
    for _ in range(events):
        at = answer.index(b"\n\n", at) + 2
    return at


@given(
    path=st.sampled_from([CHAT, COMPLETIONS]),
    more=BODIES,
    model=st.sampled_from(["tiny", 'a "model" @', "ü@choices"]),
    salt=st.integers(0, 1000),
    chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    newer=st.booleans(),
)
def test_events_that_are_not_decoded_become_what_decoded_ones_do(
    path: str, more: dict[str, Any], model: str, salt: int, chunks: list[int], newer: bool
) -> None:
    """Where one token's text is all that the client sees, only its bytes go on."""
    body = body_of(path, **more | {"model": model})
    data, got = answer_of(Engine(Model(salt)), body, path), []
    for plain in (None, False):
        transcript = transcript_of(path, body)
        transcript.feed(data[: lost_after(data, 3)])
        goes_on = Continuation(transcript, CONTEXT, None)
        transcript.plain &= plain is None
        asked = json.loads(bytes(goes_on.body.for_decode("x")))
        events = Engine(Model(salt), chunks, newer=newer).events(goes_on.body.path, asked, "id-1")
        shown = b"".join(goes_on.feed(event) for event in events).decode().split("\n\n")
        state = transcript.finished, transcript.counted, transcript.done
        made = [json.loads(each[6:]) for each in shown if each.startswith("data: {")]
        got.append((made, state, transcript.rewind(), transcript.all_ids))
    assert got[0] == got[1]


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_nearly_no_event_is_decoded(path: str, newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(continuation, "fields_of", lambda event: decoded.append(event) or fields_of(event))
    body, engine = body_of(path, max_tokens=60), Engine(Model(4, ends=False), newer=newer)
    transcript = transcript_of(path, body)
    data = answer_of(engine, body, path)
    transcript.feed(data[: lost_after(data, 2)])
    goes_on = Continuation(transcript, CONTEXT, None)
    decoded.clear()
    events = [*engine.events(path, json.loads(bytes(goes_on.body.for_decode("x"))), "id-1")]
    assert goes_on.feed(b"".join(events)) and len(events) > 58
    halves = sum(
        b'"token_ids":[%d]' % each in event for event in events for each in (FIRST_HALF, SECOND_HALF)
    )
    assert len(decoded) <= 1 + halves, "the last one, and those without whole text"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_that_does_not_say_that_it_goes_on_has_not_ended(path: str) -> None:
    body = body_of(path, temperature=0)
    data, whole = (answer_of(engine, body, path) for engine in (RustEngine(Model(4)), Engine(Model(4))))
    transcript = transcript_of(path, body)
    got = transcript.feed(data[: lost_after(data, 5)])
    assert not (transcript.finished or transcript.can_go_on)
    got += transcript.feed(data[lost_after(data, 5) :])
    assert transcript.done and Answer.of(got).text == Answer.of(whole).text


def test_half_a_character_is_generated_anew() -> None:
    engine = Engine(Model(salt=4, ends=False))
    body = body_of(COMPLETIONS, max_tokens=60)
    data = answer_of(engine, body)
    ids = Answer.of(data).ids
    half = ids.index(FIRST_HALF, 1) + 1
    transcript = transcript_of(COMPLETIONS, body)
    for event in pieces(data[: lost_after(data, half)], []):
        transcript.feed(event)
    asked = json.loads(bytes(Continuation(transcript, 0, None).body.for_decode("x")))
    assert asked["prompt"][-1] == ids[half - 2]
    assert asked["max_tokens"] == 60 - (half - 1)


def test_a_sampler_that_chooses_otherwise_goes_on_if_the_client_has_nothing_of_it() -> None:
    engines = [Engine(Model(salt, ends=False)) for salt in (4, 5)]
    body = body_of(COMPLETIONS, max_tokens=50, temperature=1)
    data = answer_of(engines[0], body)
    got = Answer.of(cut_answer(COMPLETIONS, body, engines, [lost_after(data, 20)], [100]))
    assert got.done and got.text.startswith(Answer.of(data[: lost_after(data, 19)]).text)
    assert got.text != Answer.of(data).text
    engines[0].sizes, body = [1, 2], body_of(COMPLETIONS, max_tokens=50, logprobs=0)
    with pytest.raises(Diverged):
        cut_answer(COMPLETIONS, body, engines, [lost_after(answer_of(engines[0], body), 6)], [100])


TEXT_PART, PICTURE = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"n": 2},
        {"echo": True},
        {"prompt": ["a", "b"]},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -1},
        {"bad_words": ["x"]},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a*"}},
        {"use_beam_search": True},
        {"stop": 7},
        {"spaces_between_special_tokens": "no"},
        {"tool_choice": None, "messages": [{"role": "user", "content": "hi"}]},
        {"logit_bias": {str(each): 1 for each in range(5000)}},
        {"a_field_of_tomorrow": 1},
        {"messages": [{"role": "user", "content": [TEXT_PART, PICTURE]}]},
        {"messages": [{"role": "user", "content": [{"image_url": "data:"}]}]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_cannot_be_exact_does_not_go_on(more: dict[str, Any]) -> None:
    path = CHAT if "messages" in more else COMPLETIONS
    parts = {"messages": [{"role": "user", "content": [TEXT_PART]}]} if path == CHAT else {}
    for possible in ({}, parts):
        assert transcript_of(path, body_of(path, **possible)) is not None
    assert transcript_of(path, body_of(path, **more)) is None


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"id":"x","choices":[{"index":0,"delta":{"reasoning":"so"},"logprobs":null,'
        b'"finish_reason":null,"token_ids":[5]}]}\n\n',
        b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"so"},"logprobs":null,'
        b'"finish_reason":null,"token_ids":null}]}\n\n',
    ],
    ids=["reasoning", "without-ids"],
)
def test_an_answer_with_parts_that_cannot_come_again_does_not_go_on(event: bytes) -> None:
    transcript = transcript_of(CHAT, body_of(CHAT))
    data = answer_of(Engine(), body_of(CHAT), CHAT)
    transcript.feed(data[: lost_after(data, 3)])
    assert transcript.possible
    passed = transcript.feed(event)
    assert not transcript.possible and b'"so"' in passed and b"[5]" not in passed


def test_what_a_transcript_holds_is_bounded_and_let_go() -> None:
    held = TranscriptMemory(most=12000, most_each=8192)
    body = body_of(COMPLETIONS, max_tokens=4000)
    data = answer_of(Engine(Model(4, ends=False)), body)
    one, other = (transcript_of(COMPLETIONS, body, held) for _ in range(2))
    one.feed(data[: lost_after(data, 20)])
    assert 0 < held.held <= 4200
    other.feed(data[: lost_after(data, 3990)])
    assert not other.possible and held.held <= 4200
    one.drop()
    one.drop()
    assert held.held == 0
    assert Answer.of(one.feed(data[lost_after(data, 20) :])).finish == [("length", None)]


# A stream outlives its decode instance: proxy, stand-ins for vLLM over real HTTP, and a client.


ENGINE = Engine(Model(salt=4, ends=False))
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi", "stream": True, "max_tokens": 24}
CHATTED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "max_tokens": 24,
    "stream_options": {"include_usage": True},
}

GREEDY = COMPLETION | {"temperature": 0}
UNBOUNDED = {name: value for name, value in CHATTED.items() if name != "max_tokens"}

LossReason = tuple[Step, ...]
"""The last steps of a stream."""
DIES: LossReason = (die,)
HANGS: LossReason = (forever,)
FAILS: LossReason = (b'data: {"error":{"message":"EngineCore died","type":"x","code":500}}\n\n', DONE)
"""As an API server whose engine core has died."""
GIVES_UP: LossReason = (
    b'data: {"id":"x","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"abort",'
    b'"token_ids":[]}]}\n\n',
    DONE,
)
"""As a vLLM that is stopped."""


def generates(engine: Engine = ENGINE, lost_after: int = 0, loss: LossReason = DIES) -> Behaviour:
    """Streams the engine's answer. `lost_after`: so many events, 0 for never, negative from the end."""

    def streamed(seen: Seen) -> Behaviour:
        events = engine.events(seen.path, seen.body, seen.request_id)
        steps = [step for event in events for step in (event, a_moment)]
        return stream_of(*([*steps[: 2 * lost_after], *loss] if lost_after else steps))

    return by_kind(chosen(streamed), answer_json)


def pausing(pause: Step) -> Behaviour:
    """Streams the engine's answer, with this step after its fifth event."""

    def streamed(seen: Seen) -> Behaviour:
        events = [*ENGINE.events(seen.path, seen.body, seen.request_id)]
        return stream_of(*events[:5], pause, *events[5:])

    return by_kind(chosen(streamed), answer_json)


def the_first_is_lost(instances: list[FakeInstance], lost_after: int = 9, loss: LossReason = DIES) -> None:
    """Of these the first that is asked loses its answer; the others do not."""
    take_turns(instances, generates(lost_after=lost_after, loss=loss), generates())


async def ask(deployment: Deployment, body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
    async with await deployment.post(body, path) as response:
        assert response.status == 200
        return Answer.of(await response.read())


def whole(body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
    return Answer.of(b"".join(ENGINE.events(path, body, "undisturbed")))


def same(got: Answer, wanted: Answer) -> bool:
    """But for the id and the time."""
    assert got.error is None and len(got.heads) == 1
    assert all(got.forms[ends] == wanted.forms[ends] for ends in got.forms.keys() & wanted.forms.keys())
    others = {"heads": None, "forms": None}
    return vars(got) | others == vars(wanted) | others


WITH_USAGE = COMPLETION | {"stream_options": {"include_usage": True}}
LOST: dict[str, tuple[str, dict[str, Any], int, list[Behaviour]]] = {
    **{
        name: (COMPLETIONS, COMPLETION, 1, [generates(lost_after=9, loss=loss)])
        for name, loss in {"dies": DIES, "fails": FAILS, "gives up": GIVES_UP, "hangs": HANGS}.items()
    },
    "a chat": (CHAT, CHATTED, 1, [generates(lost_after=9)]),
    "its names": (CHAT, CHATTED | {"logprobs": True, "top_logprobs": 3}, 1, [generates(lost_after=9)]),
    "two are lost": (COMPLETIONS, COMPLETION, 1, [generates(lost_after=5)] * 2),
    "without a P": (COMPLETIONS, COMPLETION, 0, [generates(lost_after=5)]),
    "no usage": (COMPLETIONS, WITH_USAGE, 1, [generates(lost_after=-2)]),
    "no end": (COMPLETIONS, WITH_USAGE, 1, [generates(lost_after=-1)]),
    "no end of the second": (COMPLETIONS, WITH_USAGE, 1, [generates(lost_after=each) for each in (9, -1)]),
}
"""The request, the number of P's, and what the D's do that are asked before the last one."""


@pytest.mark.parametrize("how", LOST)
async def test_a_stream_outlives_its_d(dispatch: Dispatch, how: str) -> None:
    """One that has its last token is ended by the proxy."""
    path, body, prefill, lost = LOST[how]
    async with deployed(dispatch, prefill, len(lost) + 1, event_seconds=0.5) as deployment:
        take_turns(deployment.decodes, *lost, generates())
        assert same(await ask(deployment, body, path), whole(body, path))
        assert asked(deployment.decodes) == [0 if how.startswith("no ") else 1, *[1] * len(lost)]
        if prefill and len(lost) == 1 and not how.startswith("no "):
            first, second = deployment.p.requests
            assert first.path == second.path == path
            given = second.body.get("kv_transfer_params", {}).get("prompt_token_ids")
            assert second.body["max_tokens"] == 1 and len(given or second.body["prompt"]) > 8
            assert deployment.proxy.counters.resumed == 1


@pytest.mark.parametrize("known", [[True, True], [True, False, False, True], [False, False]])
async def test_a_chat_without_a_bound_goes_on_where_the_models_context_is_known(known: list[bool]) -> None:
    wanted = whole(UNBOUNDED, CHAT)
    context = wanted.usage["prompt_tokens"] + DEFAULT_TOKENS
    async with deployed("concurrent", 1) as deployment:
        for each in known:
            await deployment.add("D", context=context if each else None)
        await deployment.ready(1, len(known))
        the_first_is_lost(deployment.decodes)
        got = await ask(deployment, UNBOUNDED, CHAT)
        assert same(got, wanted) if any(known) else got.error is not None
        assert deployment.proxy.counters.not_resumed == (not any(known))


@pytest.mark.parametrize(
    ("resumes", "path", "body", "goes_on"),
    [
        (0, COMPLETIONS, COMPLETION, False),
        (1, COMPLETIONS, COMPLETION, True),
        (1, CHAT, CHATTED, True),
        (1, CHAT, UNBOUNDED, False),
    ],
)
async def test_what_the_server_itself_counts_stays(
    resumes: int, path: str, body: dict[str, Any], goes_on: bool
) -> None:
    """Its penalties, or a bound of its own, would begin anew at another D."""
    async with deployed("concurrent", 1) as deployment:
        for _ in range(2):
            await deployment.add("D", context=512, resumes=resumes)
        await deployment.ready(1, 2)
        the_first_is_lost(deployment.decodes)
        assert ((await ask(deployment, body, path)).error is None) == goes_on
        assert deployment.proxy.counters.resumed == goes_on


async def test_ds_that_died_together_are_no_tries() -> None:
    """Their ports refuse: nothing is asked of them, and neither limit nor budget counts."""
    async with deployed("concurrent", 1, 5, resumes=1) as deployment:

        def loss(request: web.Request, seen: Seen) -> None:
            for each in [each for each in deployment.decodes if not each.requests][:-1]:
                each.kill()
            deployment.proxy.admission.budget.spend = never_again  # type: ignore[method-assign]
            die(request)

        def never_again(now: float, *, whatever: bool = False) -> bool:
            return whatever

        the_first_is_lost(deployment.decodes, loss=(loss,))
        assert same(await ask(deployment, COMPLETION), whole(COMPLETION))
        assert deployment.proxy.counters.resumed == 1


@pytest.mark.parametrize(
    ("decode", "limits", "loss", "said", "tries"),
    [
        (1, Limits(), DIES, "died", 0),
        (1, Limits(), FAILS, "EngineCore died", 0),
        (2, Limits(resumes=0), DIES, "died", 0),
        (2, Limits(resume_bytes=0), DIES, "died", 0),
        (4, Limits(resumes=2), DIES, "died", 2),
    ],
    ids=["no other D", "its own error", "no tries", "no memory", "tries used up"],
)
async def test_where_none_goes_on_it_is_an_error(
    decode: int, limits: Limits, loss: LossReason, said: str, tries: int
) -> None:
    async with deployed("concurrent", 1, decode, limits=limits) as deployment:
        all_do(deployment.decodes, generates(lost_after=4, loss=loss))
        got = await ask(deployment, COMPLETION)
        assert got.error["code"] == (500 if loss is FAILS else 502) and said in got.error["message"]
        assert whole(COMPLETION).text.startswith(got.text) and got.text and not got.ids
        sent = [seen.body for each in deployment.decodes for seen in each.requests]
        assert len(sent) == max(asked(deployment.decodes)) + tries == 1 + tries
        assert (COMPLETION in sent) == (limits.resumes == 0), "D gets the client's own bytes"
        counters = deployment.proxy.counters
        assert (counters.resume_tries, counters.resumed) == (tries, 0)
        assert counters.not_resumed == (decode == 1 or tries > 0)


async def test_a_stream_that_cannot_go_on_is_not_whole_without_its_end() -> None:
    async with deployed("concurrent", 1, 2) as deployment:
        all_do(deployment.decodes, generates(RustEngine(ENGINE.model), lost_after=4))
        assert "died" in (await ask(deployment, COMPLETION)).error["message"]


async def test_a_p_that_fails_as_a_stream_goes_on_is_not_held_against_its_d() -> None:
    async with deployed("sequential", 2, 2) as deployment:
        the_first_is_lost(deployment.decodes)
        take_turns(deployment.prefills, answer_json, answer_error(500), answer_json)
        assert same(await ask(deployment, COMPLETION), whole(COMPLETION))
        assert asked(deployment.decodes) == [1, 1] and asked(deployment.prefills) == [1, 2]


def dies_within_its_first_event(size: int, *before_it_dies: Step) -> Behaviour:
    """`size`: bytes of this event that come."""

    def streamed(seen: Seen) -> Behaviour:
        start, _, _ = next(ENGINE.events(seen.path, seen.body, seen.request_id)).partition(b"]")
        return stream_of(start + b",5" * (size // 2), *before_it_dies, die)

    return chosen(streamed)


async def test_a_d_that_dies_within_a_long_first_event_is_no_loss() -> None:
    """Such as that of a long prompt: nothing has gone to the client."""
    async with deployed("concurrent", 1, 2) as deployment:
        take_turns(deployment.decodes, dies_within_its_first_event(200_000, a_moment), generates())
        assert same(await ask(deployment, COMPLETION), whole(COMPLETION))


async def test_a_first_event_may_have_a_million_tokens() -> None:
    """Which the client has not asked for."""
    body = COMPLETION | {"prompt": [*range(1_000_000, 1_400_000)], "max_tokens": 3}
    async with deployed("concurrent", 1, 1, max_body=8 << 20) as deployment:
        all_do(deployment.decodes, generates())
        assert same(await ask(deployment, body), whole(body))


async def test_a_d_that_dies_within_an_endless_first_event_leaves_an_error() -> None:
    """The event is not held until it is whole, so the answer has begun; and nothing is known of it."""
    async with deployed("concurrent", 1, 2) as deployment:
        dies_within = dies_within_its_first_event(2 * LONGEST_EVENT, lambda *_: begun(deployment))
        all_do(deployment.decodes, dies_within)
        async with await deployment.post(COMPLETION) as response:
            *_, error = (await response.text()).strip().split("\n\n")
            assert "died" in error and '"code":502' in error


def relay_of(deployment: Deployment) -> Relay | None:
    attempt = attempt_of(deployment)
    return attempt and attempt.relay


async def begun(deployment: Deployment) -> None:
    await eventually(lambda: relay_of(deployment) is not None)


def drain(deployment: Deployment) -> Instance:
    """The D that has the only request, which moves away if it can."""
    (d,) = [each for each in deployment.everyone() if each.places]
    deployment.registry.drain(d, True)
    deployment.proxy.move_away([d])
    return d


@pytest.mark.parametrize("drained", [True, False], ids=["drained", "gone"])
async def test_a_d_that_has_sent_all_is_no_loss(drained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer waits in the proxy for a client that is slow."""
    reads, send = asyncio.Event(), Relay._send

    async def when_read(relay: Relay, data: bytes, *, last: bool = False) -> None:
        await reads.wait()
        await send(relay, data, last=last)

    def all_has_come() -> bool:
        relay = relay_of(deployment)
        return relay is not None and relay.answer.content.is_eof()

    monkeypatch.setattr(Relay, "_send", when_read)
    async with deployed("concurrent", 1, 2) as deployment:
        all_do(deployment.decodes, pausing(lambda *_: begun(deployment)))
        asking = asyncio.create_task(ask(deployment, GREEDY))
        await eventually(lambda: asked(deployment.decodes) == [0, 1])
        await eventually(all_has_come)
        d = drain(deployment)
        if not drained:
            d.lost("gone")
        reads.set()
        assert same(await asking, whole(COMPLETION))
        assert asked(deployment.decodes) == [0, 1]


@pytest.mark.parametrize("who", ["client", "proxy"])
async def test_who_leaves_meanwhile_is_not_served_on(who: str) -> None:
    async with deployed("concurrent", 1, 2) as deployment:
        take_turns(deployment.decodes, generates(lost_after=4), never_a_token)
        async with await deployment.post(COMPLETION) as response:
            await eventually(lambda: asked(deployment.decodes) == [1, 1])
            if who == "proxy":
                assert await deployment.proxy.stop(0.0, asyncio.Event()) == 1
                got = Answer.of(await response.read())
                assert got.error["code"] == 503 and "stop" in got.error["message"]
            response.close()
        await eventually(lambda: any(seen.aborted for each in deployment.decodes for seen in each.requests))


async def test_a_client_that_leaves_as_its_d_is_lost_is_not_served_on() -> None:
    async with deployed("concurrent", 1, 2) as deployment:
        response: asyncio.Future[aiohttp.ClientResponse] = asyncio.get_running_loop().create_future()

        async def both_leave(request: web.Request, seen: Seen) -> None:
            (await response).close()
            die(request)

        the_first_is_lost(deployment.decodes, loss=(both_leave,))
        response.set_result(await deployment.post(COMPLETION))
        await eventually(lambda: deployment.proxy.counters.admitted == 1)


async def test_all_streams_of_a_lost_d_go_on() -> None:
    """More than the budget of retries would allow."""
    async with deployed("concurrent", 1, 2) as deployment:
        lost = deployment.d
        lost.behaviour = generates(lost_after=6, loss=HANGS)
        deployment.decodes[1].behaviour = generates()
        asking = [asyncio.create_task(ask(deployment, COMPLETION)) for _ in range(40)]
        await eventually(lambda: asked(deployment.decodes) == [20, 20])
        gauges = deployment.proxy.gauges
        await eventually(lambda: 0 < gauges()["resume_bytes_largest"] < gauges()["resume_bytes"])
        lost.kill()
        for answer in await asyncio.gather(*asking):
            assert same(answer, whole(COMPLETION))
        assert deployment.proxy.counters.resumed == len(lost.requests) >= 20


@pytest.mark.parametrize("max_wait", [30.0, 0.2], ids=["in time", "too late"])
async def test_a_stream_waits_for_room_at_another_d_before_newcomers(max_wait: float) -> None:
    async with deployed("concurrent", 1, 2, max_requests=1, max_wait=max_wait) as deployment:
        lose, release, admission = asyncio.Event(), asyncio.Event(), deployment.proxy.admission
        lost = after(lose, generates(lost_after=5))
        take_turns(deployment.decodes, pausing(release), lost, generates())
        asking = []
        for number in (1, 2):
            asking.append(asyncio.create_task(ask(deployment, COMPLETION)))
            await eventually(lambda: sum(asked(deployment.decodes)) == number)  # noqa: B023
        if max_wait < 1:
            lose.set()
            assert "died" in (await asking.pop()).error["message"]
        else:
            asking.append(asyncio.create_task(ask(deployment, COMPLETION)))
            await eventually(lambda: admission.waiting == 1)
            lose.set()
            await eventually(lambda: admission.waiting == 2)
        release.set()
        assert all(same(answer, whole(COMPLETION)) for answer in await asyncio.gather(*asking))
        assert max_wait < 1 or asked(deployment.decodes) == [2, 2]
        assert (admission.waiting, admission.under_way) == (0, 0)


ADMIN = {"Authorization": "Bearer admin"}


async def test_a_drain_with_a_deadline_moves_what_runs_and_no_client_notices() -> None:
    endless = generates(lost_after=20, loss=HANGS)
    whole_json = asyncio.Event()
    async with deployed("concurrent", 1, 2, guard=Access(token="admin")) as deployment:
        leaving, other = deployment.decodes
        leaving.behaviour, other.behaviour = by_kind(endless, after(whole_json, answer_json)), generates()
        streams = [asyncio.create_task(ask(deployment, COMPLETION)) for _ in range(16)]
        await eventually(lambda: asked(deployment.decodes) == [8, 8])
        plain = asyncio.create_task(deployment.post({"model": "tiny", "prompt": "hi", "stream": False}))
        other_one = asyncio.create_task(deployment.post({"model": "tiny", "prompt": "hi", "stream": False}))
        await eventually(lambda: asked(deployment.decodes) == [9, 9])
        assert (await deployment.order(leaving, "drain?move_after=0.2", ADMIN)).status == 200
        for answer in await asyncio.gather(*streams):
            assert same(answer, whole(COMPLETION))
        for response in await asyncio.gather(plain, other_one):
            assert response.status == 200
            response.close()
        (left,) = [each for each in deployment.everyone() if each.drained]
        assert left.load == 0 and left.breaker.closed
        assert deployment.proxy.counters.breakers_opened == 0


@pytest.mark.parametrize(
    ("path", "body", "decode", "losses"),
    [(COMPLETIONS, COMPLETION, 1, 0), (COMPLETIONS, COMPLETION, 2, 1), (CHAT, UNBOUNDED, 2, 0)],
    ids=["no other D", "the other one has lost it", "context unknown"],
)
async def test_a_drain_with_a_deadline_leaves_what_no_other_can_take(
    path: str, body: dict[str, Any], decode: int, losses: int
) -> None:
    async with deployed("concurrent", 1, decode) as deployment:
        release = asyncio.Event()
        take_turns(deployment.decodes, *[generates(lost_after=3)] * losses, pausing(release))
        asking = asyncio.create_task(ask(deployment, body, path))
        await eventually(lambda: sum(asked(deployment.decodes)) == losses + 1)
        await begun(deployment)
        drain(deployment)
        release.set()
        assert same(await asking, whole(body, path))


@pytest.mark.parametrize(
    "first", [GREEDY, COMPLETION | {"presence_penalty": 0.5}], ids=["others can", "cannot"]
)
async def test_a_drain_with_a_deadline_moves_as_many_as_others_have_room_for(first: dict[str, Any]) -> None:
    """One here, of two: what cannot move takes no room from what can."""
    async with deployed("concurrent", 1, 2, max_requests=2) as deployment:
        release, active = asyncio.Event(), deployment.proxy.active
        all_do(deployment.decodes, pausing(release))
        asking = []
        for body in (first, first, GREEDY):
            asking.append(asyncio.create_task(ask(deployment, body)))
            await eventually(lambda: len([*active]) == len(asking))
            await eventually(lambda: all(each.attempt and each.attempt.relay for each in active))
        (d,) = [each for each in deployment.everyone() if each.places == 2]
        deployment.registry.drain(d, True)
        deployment.proxy.move_away([d])
        await eventually(lambda: sum(asked(deployment.decodes)) == 4)
        release.set()
        assert all(same(answer, whole(COMPLETION)) for answer in await asyncio.gather(*asking))


async def test_a_drain_fails_no_request_whose_room_elsewhere_is_taken_meanwhile(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deployed(dispatch, 1, 2, max_requests=1) as deployment:
        other = after(release := asyncio.Event(), generates())
        take_turns(deployment.decodes, never_a_token, other, generates())
        asking = [asyncio.create_task(ask(deployment, GREEDY))]
        await eventually(lambda: sum(asked(deployment.decodes)) == 1)
        monkeypatch.setattr("p2pkv_proxy.admission.pause", lambda _: 0.5)
        drain(deployment)
        asking.append(asyncio.create_task(ask(deployment, GREEDY)))
        for each in asking:
            assert same(await each, whole(COMPLETION))
            release.set()


@pytest.mark.parametrize("streams", [True, False], ids=["begun", "not begun"])
async def test_a_request_moves_as_often_as_its_d_is_drained(streams: bool) -> None:
    """To a D that is resumed, too. No move is a try, and none counts in the budget: the only try is left."""
    async with deployed("concurrent", 1, 2, retries=0, resumes=1) as deployment:
        deployment.proxy.admission.budget.spend = lambda now, *, whatever=False: whatever  # type: ignore
        held = generates(lost_after=5, loss=HANGS) if streams else never_a_token
        release = asyncio.Event()
        lost = generates(lost_after=2, loss=(release, die))
        take_turns(deployment.decodes, held, held, held, lost, generates())
        asking = asyncio.create_task(ask(deployment, GREEDY))
        for moves in range(1, 4):
            await eventually(lambda: sum(asked(deployment.decodes)) == moves)  # noqa: B023
            if streams:
                await begun(deployment)
            d = drain(deployment)
            await eventually(lambda: not d.load)  # noqa: B023
            deployment.registry.drain(d, False)
        release.set()
        assert same(await asking, whole(COMPLETION))
        assert asked(deployment.decodes) == [2, 3]
