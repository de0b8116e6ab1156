"""Other people's routers in front of our P and D: answers are a single server's, from KV that really moved.

`vllm-router` comes from the Python Package Index into an environment of its own, which pytest's cache keeps.
Where it cannot be had, its tests are skipped and say why.
"""

from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo import answers, client
from support.servers.fleet import (
    CHUNK,
    MODEL_NAME,
    Fleet,
    Traffic,
    ask_all,
    assert_moved,
    assert_same,
    chat_all,
    letters,
    tokens,
)
from support.servers.routers import ROUTERS, router

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("compared")]

AT_ONCE = 8
REQUESTS = 24


def serves_as_one(fleet: Fleet, url: str, seed: str) -> None:
    """Completions, chat and a stream through `url`, 8 at once, are those of the single server."""
    lengths = [7 + 23 * index % 300 for index in range(REQUESTS)]
    prompts = [tokens(length, f"{seed} {index}") for index, length in enumerate(lengths)]
    traffic = Traffic(fleet)
    pair = ask_all(url, prompts, at_once=AT_ONCE)
    assert_moved(traffic, *((0, length - 1) for length in lengths))
    assert_same(ask_all(fleet.single.base_url, prompts, at_once=AT_ONCE), pair)

    stories, traffic = [letters(prompt) for prompt in prompts[:AT_ONCE]], Traffic(fleet)
    pair = chat_all(url, stories, at_once=AT_ONCE)
    assert_same(chat_all(fleet.single.base_url, stories, at_once=AT_ONCE), pair)
    assert traffic.scattered(at_least=1)

    prompt = tokens(CHUNK + 11, f"{seed} stream")
    (single,) = answers.complete(fleet.single.base_url, MODEL_NAME, prompt, max_tokens=32)
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 32, **answers.GREEDY}
    events = [event for event in client.stream(f"{url}/v1/completions", body) if event["choices"]]
    assert len(events) > 1, "the answer came in one piece"
    assert "".join(event["choices"][0]["text"] for event in events) == single.text


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_gets_a_single_servers_answers(
    fleet: Fleet, pytestconfig: pytest.Config, logs: Path, servers_on_failure: Any, name: str
) -> None:
    process = router(name, pytestconfig, logs, fleet.spare)
    servers_on_failure(process)
    with process:
        process.wait_ready(60.0)
        serves_as_one(fleet, process.base_url, f"router {name}")
