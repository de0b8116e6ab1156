"""A streamed answer that loses its instance goes on at another one as if nothing had happened.

A stand-in generates; the answer is cut anywhere, twice, and compared with the same answer without a cut."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_fakes import filter_of
from streaming_engine import FIRST_HALF, SECOND_HALF, Answer, Engine, Model, RustEngine

from p2pkv_proxy import continuation
from p2pkv_proxy.bodies import parse
from p2pkv_proxy.continuation import Continuation, Diverged, ending
from p2pkv_proxy.transcript import Transcript, TranscriptMemory, fields_of

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
) -> None:
    if logprobs is not None:
        more |= {"logprobs": True, "top_logprobs": logprobs} if path == CHAT else {"logprobs": logprobs}
    body = body_of(path, **more)
    engines = [Engine(Model(salt), each, parser) for each in chunks]
    data = cut_answer(path, body, engines, list(cuts), sizes)
    shown = more.get("return_token_ids") or logprobs is not None
    assert shown or b'"delta":{},"logprobs":null,"finish_reason":null' not in data
    got = Answer.of(data)
    assert got == Answer.of(b"".join(engines[0].events(path, body, "id-0"))), "as without a proxy"


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
)
def test_events_that_are_not_decoded_become_what_decoded_ones_do(
    path: str, more: dict[str, Any], model: str, salt: int, chunks: list[int]
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
        events = Engine(Model(salt), chunks).events(goes_on.body.path, asked, "id-1")
        shown = b"".join(goes_on.feed(event) for event in events).decode().split("\n\n")
        state = transcript.finished, transcript.counted, transcript.done
        made = [json.loads(each[6:]) for each in shown if each.startswith("data: {")]
        got.append((made, state, transcript.rewind(), transcript.all_ids))
    assert got[0] == got[1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_nearly_no_event_is_decoded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(continuation, "fields_of", lambda event: decoded.append(event) or fields_of(event))
    body, engine = body_of(path, max_tokens=60), Engine(Model(4, ends=False))
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
    assert transcript is not None
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
