"""Real servers of kv_both: a pool of two behind the proxy, and one beside a fixed P or a fixed D."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from probes import Compared
from vllm_support import (
    FORKED,
    MODEL_NAME,
    ask_all,
    assert_same,
    at_rest,
    paired_headers,
    probing_server,
    tokens,
)

from p2pkv.demo import answers, client
from p2pkv.demo.processes import answers_ok, wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer

Start = Callable[..., tuple[VllmServer, VllmServer, ProxyServer]]

SHORT = {"lease_seconds": 4, "stall_seconds": 8, "chunk_bytes": 16384}


@pytest.fixture
def pool(launch: Callable[..., None], tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts two servers of these roles and a proxy over them."""

    def start(first: str = "both", second: str = "both") -> tuple[VllmServer, VllmServer, ProxyServer]:
        proxy = ProxyServer(log_path=tmp_path / "proxy.log")
        a, b = (
            probing_server(
                tiny_model,
                role,  # type: ignore[arg-type]
                tmp_path,
                name=name,
                plugins=FORKED,
                proxy=proxy.discovery,
                extra_config=SHORT,
                load_failure_policy="recompute",
                log_path=tmp_path / f"{name}.log",
            )
            for name, role in (("a", first), ("b", second))
        )
        launch(a, b, proxy)
        count = {"prefill": [first, second].count("both"), "decode": [first, second].count("both")}
        count["prefill"] += [first, second].count("P")
        count["decode"] += [first, second].count("D")
        health = f"{proxy.base_url}/health?prefill={count['prefill']}&decode={count['decode']}"
        wait_until(lambda: answers_ok(health), "both to register", 60.0)
        return a, b, proxy

    yield start


def alone(server: VllmServer, asked: Sequence[answers.Prompt]) -> list[answers.Answer]:
    """What it answers without any other, and without what its prefix cache has of transfers."""

    def ask(prompt: answers.Prompt) -> answers.Answer:
        return answers.complete(server.base_url, MODEL_NAME, prompt, max_tokens=16, cache_salt="alone")[0]

    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(ask, asked))


def sent(server: VllmServer) -> float:
    return client.metrics(server.base_url).get("p2pkv_bytes_sent_total", 0.0)


def prompts(count: int, name: str) -> list[answers.Prompt]:
    """Of several blocks, some of which begin alike."""
    draw = random.Random(name)
    begins = [tokens(100, f"{name} begin {n}") for n in range(3)]
    return [
        [*draw.choice([[], *begins]), *tokens(draw.randrange(1, 150), f"{name} {n}")] for n in range(count)
    ]


def push(p: VllmServer, d: VllmServer, prompt: answers.Prompt) -> answers.Answer:
    """What D answers to a request that names the two, asked at once."""
    headers = paired_headers(p, d)
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(answers.complete, p.base_url, MODEL_NAME, prompt, max_tokens=1, headers=headers)
        answer = answers.complete(d.base_url, MODEL_NAME, prompt, max_tokens=16, headers=headers)[0]
        asked.result(60)
    return answer


def test_a_pool_of_two_pushes_both_ways_and_answers_as_one_server(pool: Start, tmp_path: Path) -> None:
    a, b, proxy = pool()
    asked, named = prompts(20, "a pool of two"), [tokens(150, f"named {n}") for n in range(8)]
    compared = Compared(tmp_path)
    with ThreadPoolExecutor(8) as clients:
        turns = [(a, b) if n % 2 else (b, a) for n in range(len(named))]
        pushed = [clients.submit(push, *pair, prompt) for pair, prompt in zip(turns, named, strict=True)]
        got = ask_all(proxy.base_url, asked, at_once=6)
        got += [each.result(60) for each in pushed]
    for server in (a, b):
        at_rest(server)
        assert sent(server) > 0, f"{server.name} was never P"
    assert compared.spans(at_least=len(named))
    assert_same(alone(a, [*asked, *named]), got)


@pytest.mark.long
@pytest.mark.parametrize("roles", [("both", "D"), ("P", "both")], ids="-".join)
def test_beside_a_fixed_p_or_d(pool: Start, tmp_path: Path, roles: tuple[str, str]) -> None:
    a, b, proxy = pool(*roles)
    asked = prompts(24, "-".join(roles))
    compared = Compared(tmp_path)
    got = ask_all(proxy.base_url, asked, at_once=6)
    for server in (a, b):
        at_rest(server)
    assert compared.spans(at_least=1), "some were pushed"
    assert sent(a) > 0 == sent(b)
    assert_same(alone(a, asked), got)


@pytest.mark.long
def test_named_twice_and_named_not_at_all(pool: Start) -> None:
    a, b, _ = pool()
    prompt = tokens(150, "named twice")
    (expected,) = alone(b, [prompt])
    for headers in (paired_headers(a, a), {}):
        assert_same([expected], answers.complete(a.base_url, MODEL_NAME, prompt, headers=headers))
    assert sent(a) == sent(b) == 0


def under_load(a: VllmServer, proxy: ProxyServer, happen: Callable[[], None], name: str) -> None:
    """60 requests, six at a time; something happens to a server when ten are answered. Those that were under
    way may fail; the others have one server's answer, and none hangs."""
    asked = prompts(60, name)
    failed: list[str] = []

    def ask(prompt: answers.Prompt) -> answers.Answer | None:
        try:
            return answers.complete(proxy.base_url, MODEL_NAME, prompt, max_tokens=16)[0]
        except client.RequestFailed as error:
            failed.append(str(error))
            return None

    with ThreadPoolExecutor(6) as clients:
        asking: list[Future[answers.Answer | None]] = [clients.submit(ask, prompt) for prompt in asked]
        wait_until(lambda: sum(each.done() for each in asking) >= 10, "ten answers", 60.0)
        happen()
        got = [each.result(180) for each in asking]
    assert len(failed) <= 6, failed
    answered = [(prompt, answer) for prompt, answer in zip(asked, got, strict=True) if answer is not None]
    expected = alone(a, [prompt for prompt, _ in answered])
    assert_same(expected, [answer for _, answer in answered])


@pytest.mark.long
def test_one_of_two_is_killed_under_load(pool: Start) -> None:
    a, b, proxy = pool()
    under_load(a, proxy, b.kill, "killed")
    at_rest(a, seconds=30.0)


@pytest.mark.long
def test_one_of_two_is_frozen_under_load(pool: Start) -> None:
    a, b, proxy = pool()
    under_load(a, proxy, b.freeze, "frozen")
    at_rest(a, seconds=30.0)
    b.thaw()
