"""The proxy's endpoints, by the clients that people use (curl, the SDKs of OpenAI and Anthropic): what they
get is a single server's, and where P helps, from KV that really moved. More are in test_other_clients.py."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from support.servers.clients import (
    CURLS,
    WEATHER,
    WORDS,
    adaptive,
    anthropic_at,
    conversation,
    counts,
    curl,
    logprobs,
    openai_at,
    refused,
    story,
    structured_chat,
    text_of,
    thinking,
    tool_of_a_message,
)
from support.servers.fleet import BLOCK, MODEL_NAME, Fleet, Traffic, first_dispatch, kv_bytes

pytestmark = pytest.mark.usefixtures("compared")

streamed_or_not = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def respond(base_url: str, prompt: str, streamed: bool) -> str:
    responses = openai_at(base_url).responses
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
    messages = anthropic_at(base_url).messages
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
    completions = openai_at(base_url).completions
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
    completions = openai_at(base_url).chat.completions
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
    completions = openai_at(base_url).chat.completions
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


@first_dispatch
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


@first_dispatch
def test_what_one_instance_does(fleet: Fleet, dispatch: str) -> None:
    prompt = story(f"tokens {dispatch}")
    answers = []
    for base_url in (fleet.proxy(dispatch).base_url, fleet.single.base_url):
        client = openai_at(base_url)
        post = lambda path, body, client=client, base_url=base_url: client.post(  # noqa: E731
            f"{base_url}{path}", body=body, cast_to=dict
        )
        tokenized = post("/tokenize", {"model": MODEL_NAME, "prompt": prompt})
        text = post("/detokenize", {"model": MODEL_NAME, "tokens": tokenized["tokens"]})
        counted = anthropic_at(base_url).messages.count_tokens(
            model=MODEL_NAME, messages=[{"role": "user", "content": prompt}]
        )
        answers.append((tokenized["tokens"], text["prompt"], counted.input_tokens))
    assert answers[0] == answers[1]


@first_dispatch
def test_a_models_mistakes_are_told_as_the_clients_expect(fleet: Fleet, dispatch: str) -> None:
    base_url = fleet.proxy(dispatch).base_url
    with pytest.raises(openai.NotFoundError, match="nobody"):
        openai_at(base_url).responses.create(model="nobody", input="x")
    with pytest.raises(openai.NotFoundError):  # this model makes none, so vLLM has no such endpoint
        openai_at(base_url).embeddings.create(model=MODEL_NAME, input="x")
    with pytest.raises(anthropic.NotFoundError):
        anthropic_at(base_url).messages.create(
            model="nobody", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        )


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@first_dispatch
@pytest.mark.parametrize("way", CURLS)
def test_curl(fleet: Fleet, dispatch: str, way: str) -> None:
    for streamed in (False, True):
        prompt, traffic = story(f"curl {way} {dispatch} {streamed}"), Traffic(fleet)
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": streamed}
        version, status, pair = curl(fleet.proxy(dispatch).base_url, body, *CURLS[way])
        assert (version, status) == ("1.1", "200") or way.startswith("HTTP/1.0")
        assert status == "200"
        _, _, single = curl(fleet.single.base_url, body, *CURLS[way])
        assert text_of(pair, streamed=streamed) == text_of(single, streamed=streamed) != ""
        assert traffic.scattered(at_least=kv_bytes(0, 2 * BLOCK)) > 0


@first_dispatch
@streamed_or_not
def test_a_conversation_by_ids(fleet: Fleet, dispatch: str, streamed: bool) -> None:
    """With `previous_response_id`: only the D that has a response can go on with it."""
    seed = f"conversation {dispatch} {streamed}"
    pair = conversation(fleet.proxy(dispatch).base_url, seed, streamed=streamed)
    assert pair == conversation(fleet.single.base_url, seed, streamed=streamed) and all(pair)


@first_dispatch
def test_what_is_counted(fleet: Fleet, dispatch: str) -> None:
    """Nothing of a fresh prompt is cached, whatever came from P; of a repeated one as on one server."""
    pair = counts(fleet.proxy(dispatch).base_url, f"counts {dispatch}")
    single = counts(fleet.single.base_url, f"counts {dispatch}")
    assert pair == single
    assert single["chat first"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert single["message again"]["cache_read_input_tokens"] >= 2 * BLOCK


@first_dispatch
@pytest.mark.parametrize("ask", [structured_chat, logprobs, tool_of_a_message, refused, thinking, adaptive])
def test_the_sdks(fleet: Fleet, dispatch: str, ask: Callable[[str, str], Any]) -> None:
    seed = f"{ask.__name__} {dispatch}"
    pair, single = ask(fleet.proxy(dispatch).base_url, seed), ask(fleet.single.base_url, seed)
    assert pair == single and pair
