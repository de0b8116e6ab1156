"""The other endpoints of the proxy, by the clients that people use: answers are those of a single server, and
where P helps, from KV that really moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from p2pkv.demo.client import get
from support.servers.fleet import BLOCK, MODEL_NAME, Fleet, Traffic, each_dispatch, kv_bytes, letters, tokens

pytestmark = pytest.mark.usefixtures("compared")

streamed_or_not = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
# Few enough that two roundings of one number never choose different words.
WORDS = 8


def story(seed: str) -> str:
    return letters(tokens(200, seed))


def by_openai(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def by_anthropic(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0)


def respond(base_url: str, prompt: str, streamed: bool) -> str:
    """The text of an answer of /v1/responses."""
    responses = by_openai(base_url).responses
    options = {"model": MODEL_NAME, "input": prompt, "max_output_tokens": WORDS, "temperature": 0.0}
    if not streamed:
        answer = responses.create(**options)
        assert answer.id.startswith("resp_") and "_addr_" not in answer.id
        return answer.output_text
    events = list(responses.create(**options, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    return text


def message(base_url: str, prompt: str, streamed: bool) -> str:
    """The text of an answer of /v1/messages."""
    messages = by_anthropic(base_url).messages
    options = {
        "model": MODEL_NAME,
        "max_tokens": WORDS,
        "extra_body": {"temperature": 0.0},  # no argument of this client's any more
        "messages": [{"role": "user", "content": prompt}],
    }
    if not streamed:
        answer = messages.create(**options)
        assert "_addr_" not in answer.id
        return "".join(block.text for block in answer.content if block.type == "text")
    with messages.stream(**options) as events:
        text = "".join(events.text_stream)
        assert events.get_final_message().usage.output_tokens == WORDS
        return text


# vLLM refuses n > 1 with temperature 0; top_k 1 is as greedy.
TWO: dict[str, Any] = {"n": 2, "temperature": 1.0, "extra_body": {"top_k": 1}}


def complete(base_url: str, prompt: str, streamed: bool) -> list[str]:
    """Two children of one completion."""
    completions = by_openai(base_url).completions
    options = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": WORDS, **TWO}
    if not streamed:
        answer = completions.create(**options)
        assert "_addr_" not in answer.id
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    texts = ["", ""]
    for event in completions.create(**options, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    return texts


def chat(base_url: str, prompt: str, streamed: bool) -> list[str]:
    """Two children of one chat; the usage counts both."""
    completions = by_openai(base_url).chat.completions
    messages = [{"role": "user", "content": prompt}]
    options = {"model": MODEL_NAME, "messages": messages, "max_tokens": WORDS, **TWO}
    if not streamed:
        answer = completions.create(**options)
        assert answer.usage.completion_tokens == 2 * WORDS
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    texts = ["", ""]
    events = list(completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert len(events) > 2 and events[-1].usage.completion_tokens == 2 * WORDS
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Lima", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def call_of_a_tool(base_url: str, prompt: str, streamed: bool) -> tuple[str, str]:
    """The name of the function that the model has been made to call, and the arguments."""
    options: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 160,
        "temperature": 0.0,
        # Unless it is strict, vLLM takes any JSON for the arguments.
        "tools": [
            {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    completions = by_openai(base_url).chat.completions
    if not streamed:
        (call,) = completions.create(**options).choices[0].message.tool_calls
        return call.function.name, call.function.arguments
    pieces = [
        call.function
        for event in completions.create(**options, stream=True)
        for choice in event.choices
        for call in choice.delta.tool_calls or []
    ]
    return "".join(each.name or "" for each in pieces), "".join(each.arguments or "" for each in pieces)


@each_dispatch
@streamed_or_not
@pytest.mark.parametrize("ask", [complete, chat, call_of_a_tool, respond, message])
def test_each_client(fleet: Fleet, dispatch: str, streamed: bool, ask: Callable[..., Any]) -> None:
    """The pair's answer is the single server's, from KV that moved."""
    prompt, traffic = story(f"{ask.__name__} {dispatch} {streamed}"), Traffic(fleet)
    pair = ask(fleet.proxy(dispatch).base_url, prompt, streamed)
    assert pair == ask(fleet.single.base_url, prompt, streamed) and pair and all(pair)
    assert traffic.scattered(at_least=kv_bytes(0, 2 * BLOCK)) > 0
    if ask is call_of_a_tool:
        name, arguments = pair
        assert name == "weather" and json.loads(arguments)["city"] in ("Lima", "Oslo")


@each_dispatch
@streamed_or_not
def test_responses_that_repeat_their_metadata_pause_no_instance(
    fleet: Fleet, dispatch: str, streamed: bool
) -> None:
    """It holds what vLLM writes at another endpoint when it gives an answer up."""
    proxy = fleet.proxy(dispatch).base_url
    before = health(proxy)
    for number in range(12):
        created = by_openai(proxy).responses.create(
            model=MODEL_NAME,
            input=story(f"metadata {dispatch} {streamed} {number}"),
            max_output_tokens=WORDS,
            metadata={"finish_reason": "abort"},
            stream=streamed,
        )
        answer = list(created)[-1].response if streamed else created
        assert answer.metadata == {"finish_reason": "abort"} and answer.usage.output_tokens == WORDS
    after = health(proxy)
    assert after["gauges"]["breakers_open"] == 0
    for name in ("breakers_opened", "retried", "decode_alone"):
        assert after["counters"][name] == before["counters"][name], name


def health(base_url: str) -> Any:
    return json.loads(get(f"{base_url}/health"))


@each_dispatch
def test_a_large_prompt_and_a_body_that_is_turned_away(fleet: Fleet, dispatch: str) -> None:
    """The first one is longer than this model's context, as vLLM itself says."""
    client = by_openai(fleet.proxy(dispatch).base_url)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL_NAME, prompt=[7] * 100_000, max_tokens=1)
    for body in ({"prompt": [[]] * 2_000_000}, {"messages": [{}] * 2_000_000}):
        with pytest.raises(openai.APIStatusError, match="more than 131072 values") as refused:
            client.post("/completions", body=body | {"model": MODEL_NAME}, cast_to=dict)
        assert refused.value.status_code == 413


@each_dispatch
def test_what_one_instance_does(fleet: Fleet, dispatch: str) -> None:
    prompt = story(f"tokens {dispatch}")
    answers = []
    for base_url in (fleet.proxy(dispatch).base_url, fleet.single.base_url):
        client = by_openai(base_url).with_options(max_retries=0)
        post = lambda path, body, client=client, base_url=base_url: client.post(  # noqa: E731
            f"{base_url}{path}", body=body, cast_to=dict
        )
        tokenized = post("/tokenize", {"model": MODEL_NAME, "prompt": prompt})
        text = post("/detokenize", {"model": MODEL_NAME, "tokens": tokenized["tokens"]})
        counted = by_anthropic(base_url).messages.count_tokens(
            model=MODEL_NAME, messages=[{"role": "user", "content": prompt}]
        )
        answers.append((tokenized["tokens"], text["prompt"], counted.input_tokens))
    assert answers[0] == answers[1]


@each_dispatch
def test_a_models_mistakes_are_told_as_the_clients_expect(fleet: Fleet, dispatch: str) -> None:
    base_url = fleet.proxy(dispatch).base_url
    with pytest.raises(openai.NotFoundError, match="nobody"):
        by_openai(base_url).responses.create(model="nobody", input="x")
    with pytest.raises(openai.NotFoundError):  # this model makes none, so vLLM has no such endpoint
        by_openai(base_url).embeddings.create(model=MODEL_NAME, input="x")
    with pytest.raises(anthropic.NotFoundError):
        by_anthropic(base_url).messages.create(
            model="nobody", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )
