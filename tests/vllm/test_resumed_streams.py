"""Streams of real servers whose D is lost in mid answer: another one goes on, and no client notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo import answers, client
from p2pkv.demo.answers import GREEDY, Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from support.servers.deployments import (
    LOSSES,
    PROXYS,
    TOKEN,
    Deployment,
    deployed,
    instance,
    started_again,
)
from support.servers.fleet import MODEL_NAME, assert_same, joined, metric, tokens

pytestmark = [pytest.mark.long, pytest.mark.timeout(700)]

STREAMS = 12
TOKENS = 80
LOST_AFTER = 10 * STREAMS
"""Tokens of all streams together, at least, when D is lost."""
LONG, MOVE_AFTER = 2000, 5
"""Tokens of a stream that a drain moves, and after how many seconds it does."""
OPTIONS: dict[str, Any] = {
    "extra_config": {"lease_seconds": 5, "chunk_bytes": 16384},
    "load_failure_policy": None,
    "more_args": ("--enable-prefix-caching",),
}


@pytest.fixture(scope="module")
def started(
    fleet_keeper: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """A P and two D's."""
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("resumed")
    proxy = ProxyServer(log_path=logs / "proxy.log", extra_args=[*PROXYS, "--admin-token", TOKEN])
    p, *ds = (instance(proxy, tiny_model, logs, name[0], name=name, **OPTIONS) for name in ("P", "D1", "D2"))
    with deployed(Deployment(p, ds, proxy)) as made:
        yield made


LOSSES_OF_D = {**LOSSES, "frozen": VllmServer.freeze}


def completion(base_url: str, prompt: list[int], most: int = TOKENS, **more: Any) -> Answer:
    """A streamed one."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": most, "logprobs": 2, **GREEDY, **more}
    return checked(client.stream(f"{base_url}/v1/completions", body, timeout_seconds=300.0), most)


def chat(base_url: str, text: str, **more: Any) -> Answer:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
    body |= {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}, **GREEDY, **more}
    return checked(client.stream(f"{base_url}/v1/chat/completions", body), TOKENS)


def checked(events: Iterator[dict[str, Any]], most: int) -> Answer:
    """One answer of all events, whose usage and finish reason are right."""
    parts: list[Answer] = []
    finish: list[str] = []
    ids = set()
    for event in events:
        assert "error" not in event, event
        ids.add((event["id"], event["created"]))
        for choice in event["choices"]:
            if "delta" in choice:
                if choice["logprobs"] is None:
                    continue
                choice["message"] = {"content": choice["delta"].get("content")}
            parts.append(answers.answer_of(choice))
            if choice["finish_reason"]:
                finish.append(choice["finish_reason"])
        if event.get("usage"):
            assert event["usage"]["completion_tokens"] == sum(len(part.tokens) for part in parts)
    assert len(ids) == 1 and len(finish) == 1
    made = joined(parts)
    assert finish == ["length" if len(made.tokens) == most else "stop"]
    return made


def requests(name: str) -> list[Callable[[str], Answer]]:
    """Half of them completions, half chats; each gets the address of who answers."""

    def one(number: int) -> Callable[[str], Answer]:
        if number % 2:
            return lambda url: chat(url, f"Tell me about {name} and the number {number}.", ignore_eos=True)
        prompt = tokens(120, f"{name} {number}")
        return lambda url: completion(url, prompt, ignore_eos=number % 4 == 0)

    return [one(number) for number in range(STREAMS)]


def with_d_lost(
    trio: Deployment, asked: list[Callable[[str], Answer]], lose: Callable[[VllmServer], None], lost: int = 1
) -> list[Answer]:
    """The answers, with one D lost while it works on some of them, or so many, one after the other."""
    name = "vllm:generation_tokens_total"
    before = {each.name: metric(each, name) for each in trio.ds}

    def generated(server: VllmServer) -> float:
        return metric(server, name) - before[server.name]

    with ThreadPoolExecutor(STREAMS) as pool:
        got = [pool.submit(each, trio.proxy.base_url) for each in asked]
        for number, victim in enumerate(trio.ds[:lost], 1):
            enough = partial(lambda each, tokens: generated(each) >= tokens, victim, number * LOST_AFTER / 2)
            wait_until(enough, f"tokens of {victim.name}", 60.0)
            lose(victim)
        return [each.result() for each in got]


@pytest.mark.parametrize("loss", LOSSES_OF_D)
def test_streams_outlive_their_d(trio: Deployment, loss: str) -> None:
    asked = requests(loss)
    expected = [each(trio.ds[1].base_url) for each in asked]
    resumed = trio.counted("resumed_total")
    got = with_d_lost(trio, asked, LOSSES_OF_D[loss])
    assert_same(expected, got)
    assert trio.counted("resumed_total") > resumed and trio.counted("not_resumed_total") == 0
    trio.rests(trio.p, trio.ds[1])
    started_again(trio.ds[0])


def test_streams_outlive_two_ds_that_are_lost_one_after_the_other(
    trio: Deployment, tiny_model: Path, tmp_path: Path
) -> None:
    asked = requests("two are lost")
    with instance(trio.proxy, tiny_model, tmp_path, "D", name="D3", **OPTIONS) as third:
        third.wait_ready()
        three = replace(trio, ds=[*trio.ds, third])
        wait_until(three.trusted, "all four", 60.0)
        expected = [each(third.base_url) for each in asked]
        got = with_d_lost(three, asked, VllmServer.kill, lost=2)
        assert_same(expected, got)
        assert trio.counted("not_resumed_total") == 0
    for each in trio.ds:
        started_again(each)


def whole(base_url: str, number: int) -> Answer:
    """An answer that is no stream, of either endpoint."""
    body = {"model": MODEL_NAME, "max_tokens": TOKENS, "ignore_eos": True, **GREEDY}
    if number % 2:
        message = {"role": "user", "content": f"Say {number} times hello."}
        body |= {"messages": [message], "logprobs": True, "top_logprobs": 2}
        answer = client.post(f"{base_url}/v1/chat/completions", body)
    else:
        body |= {"prompt": tokens(120, f"whole {number}"), "logprobs": 2}
        answer = client.post(f"{base_url}/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == TOKENS
    return answers.answer_of(choice)


def test_whole_answers_outlive_their_d(trio: Deployment) -> None:
    asked = [partial(whole, number=number) for number in range(STREAMS)]
    expected = [each(trio.ds[1].base_url) for each in asked]
    retried = trio.counted("retries_total")
    assert_same(expected, with_d_lost(trio, [*asked], VllmServer.kill))
    assert trio.counted("retries_total") > retried
    started_again(trio.ds[0])


def test_a_drain_with_a_deadline_frees_a_d_while_its_streams_go_on(trio: Deployment) -> None:
    leaving, other = trio.ds
    prompts = [tokens(40, f"drain {number}") for number in range(16)]

    def answers_of(base_url: str) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda each: completion(base_url, each, LONG, ignore_eos=True), prompts))

    resumed = trio.counted("resumed_total")
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(answers_of, trio.proxy.base_url)
        wait_until(lambda: running(leaving) > 0 and running(other) > 0, "streams on both", 60.0)
        trio.order(leaving, f"drain?move_after={MOVE_AFTER}")
        wait_until(lambda: running(leaving) == 0, "a free D", MOVE_AFTER + 20.0)
        assert not got.done()
        moved = got.result()
    assert_same(answers_of(other.base_url), moved)
    assert trio.counted("resumed_total") > resumed and trio.counted("not_resumed_total") == 0
    trio.order(leaving, "resume")
    trio.rests()


def running(server: VllmServer) -> float:
    return metric(server, "vllm:num_requests_running")
