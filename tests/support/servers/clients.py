"""What people's clients ask, each as a function of the server's address. It returns what the client got,
without what differs between two servers by itself, such as ids and times."""

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel

from support.servers.fleet import MODEL_NAME, letters, tokens

# Few enough that two roundings of one number never choose different words.
WORDS = 8
NAMED = re.compile(r"_addr_|127\.0\.0\.1")
"""What names instances, and no client may see."""


def story(seed: str) -> str:
    return letters(tokens(200, seed))


def said(seed: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": story(seed)}]


def openai_at(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **{"max_retries": 0, **options})


def anthropic_at(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


GREEDY: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": WORDS, "temperature": 0.0}


# curl.


def curl(url: str, body: Mapping[str, Any], *options: str) -> tuple[str, str, str]:
    """The version of HTTP, the status and the body of an answer of /v1/completions."""
    asked = ["curl", "-sS", "-N", "--max-time", "60", "-w", r"\n%{http_version} %{http_code}", *options]
    asked += ["-H", "Content-Type: application/json", "--data-binary", "@-", f"{url}/v1/completions"]
    done = subprocess.run(asked, input=json.dumps(body).encode(), capture_output=True, check=True)
    text, _, last = done.stdout.decode().rpartition("\n")
    version, status = last.split()
    assert not NAMED.search(text)
    return version, status, text


CURLS: Mapping[str, tuple[str, ...]] = {
    "HTTP/1.0": ("--http1.0",),
    "HTTP/1.0, kept open": ("--http1.0", "-H", "Connection: keep-alive"),
    "chunked": ("-H", "Transfer-Encoding: chunked"),
    "100-continue": ("-H", "Expect: 100-continue", "--expect100-timeout", "30"),
    "compressed": ("--compressed",),
}


def text_of(answer: str, *, streamed: bool) -> str:
    if not streamed:
        return str(json.loads(answer)["choices"][0]["text"])
    *events, end = [line.removeprefix("data: ") for line in answer.split("\n") if line.startswith("data: ")]
    assert end == "[DONE]"
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


# Conversations and counts.


def conversation(url: str, seed: str, *, streamed: bool) -> list[str]:
    """Three responses, each of which goes on with the one before."""
    client, texts, previous = openai_at(url), [], None
    for turn in range(3):
        asked = {"model": MODEL_NAME, "input": story(f"{seed} {turn}"), "max_output_tokens": WORDS}
        answer = client.responses.create(
            **asked, temperature=0.0, previous_response_id=previous, stream=streamed
        )
        if streamed:
            answer = list(answer)[-1].response
        assert answer.previous_response_id == previous and not NAMED.search(answer.model_dump_json())
        texts.append(answer.output_text)
        previous = answer.id
    return texts


def counts(url: str, seed: str) -> dict[str, Any]:
    """What each endpoint counts of a fresh prompt's tokens, and of the same one again."""
    client = openai_at(url)

    def completion() -> Any:
        return client.completions.create(**GREEDY, prompt=story(f"{seed} completion")).usage

    def chat() -> Any:
        usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        return list(client.chat.completions.create(**GREEDY, messages=said(f"{seed} chat"), **usage))[
            -1
        ].usage

    def response() -> Any:
        asked = {"model": MODEL_NAME, "input": story(f"{seed} response"), "max_output_tokens": WORDS}
        return client.responses.create(**asked, temperature=0.0).usage

    def message() -> Any:
        asked = {"model": MODEL_NAME, "max_tokens": WORDS, "extra_body": {"temperature": 0.0}}
        return anthropic_at(url).messages.create(**asked, messages=said(f"{seed} message")).usage

    kinds = {each.__name__: each for each in (completion, chat, response, message)}
    return {f"{name} {time}": kept(kinds[name]()) for name in kinds for time in ("first", "again")}


def kept(value: BaseModel) -> Any:
    """Without what counts as absent."""
    return json.loads(value.model_dump_json(exclude_none=True))


# Tools, structured output, log-probabilities.


class Place(BaseModel):
    """Of bounded length: this model says anything."""

    city: Literal["Lima", "Oslo"]
    visited: bool


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Lima", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def structured_chat(url: str, seed: str) -> Any:
    made = openai_at(url).chat.completions.parse(
        model=MODEL_NAME,
        messages=said(seed),  # type: ignore[arg-type]
        max_tokens=200,
        temperature=0.0,
        response_format=Place,
    )
    assert isinstance(made.choices[0].message.parsed, Place)
    return made.choices[0].message.content


def logprobs(url: str, seed: str) -> Any:
    """Of a chat's tokens, rounded: two ways to compute one number."""
    made = openai_at(url).chat.completions.create(
        **GREEDY, messages=said(seed), logprobs=True, top_logprobs=3
    )
    content = made.choices[0].logprobs.content or []
    return [(each.token, round(each.logprob, 2), len(each.top_logprobs)) for each in content]


def tool_of_a_message(url: str, seed: str) -> Any:
    tool: Any = {"name": "weather", "input_schema": WEATHER, "strict": True}
    asked: dict[str, Any] = {
        "model": MODEL_NAME,
        "max_tokens": 160,
        "messages": said(seed),
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "weather"},
        "extra_body": {"temperature": 0.0},
    }
    with anthropic_at(url).messages.stream(**asked) as events:
        streamed = events.get_final_message()
    whole = anthropic_at(url).messages.create(**asked)
    found = [
        [(each.name, each.input) for each in made.content if each.type == "tool_use"]
        for made in (whole, streamed)
    ]
    assert found[0] == found[1]
    return found[0], whole.stop_reason


def refused(url: str, seed: str) -> list[str]:
    """What a client is told of its mistakes, and of which kind they are."""
    asked: Iterable[dict[str, Any]] = (
        {"max_tokens": WORDS, "messages": said(seed), "temperature": -1},
        {"max_tokens": 10**6, "messages": said(seed)},
        {"max_tokens": WORDS, "messages": said(seed), "tools": [], "model": MODEL_NAME},
        {"max_tokens": WORDS, "messages": said(seed), "min_tokens": 100},
    )
    told = []
    for each in asked:
        try:
            openai_at(url).chat.completions.create(
                model=MODEL_NAME,
                **{k: v for k, v in each.items() if k not in ("model", "min_tokens")},
                extra_body={k: v for k, v in each.items() if k == "min_tokens"},
            )
            told.append("answered")
        except openai.APIStatusError as error:
            told.append(f"{type(error).__name__}: {error.message}")
    return told


def thinking(url: str, seed: str) -> str:
    """A budget for it, which this server has no use for: it says so, and not that P's body is wrong."""
    try:
        anthropic_at(url).messages.create(
            model=MODEL_NAME,
            max_tokens=1100,
            messages=said(seed),
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
    except anthropic.APIStatusError as error:
        return f"{type(error).__name__}: {error.message}"
    return "answered"


def adaptive(url: str, seed: str) -> Any:
    made = anthropic_at(url).messages.create(
        model=MODEL_NAME,
        max_tokens=WORDS,
        messages=said(seed),
        extra_body={"temperature": 0.0, "thinking": {"type": "adaptive"}},
    )
    return [each.text for each in made.content if each.type == "text"], made.usage.output_tokens
