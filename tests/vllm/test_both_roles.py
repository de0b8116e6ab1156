"""Real servers of kv_both: a pool of them behind the proxy, and one beside a fixed P or a fixed D."""

import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2pkv.demo import answers, client
from p2pkv.demo.answers import GREEDY, Answer
from p2pkv.demo.processes import free_ports, wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from support.servers.data_parallel import known
from support.servers.deployments import TOKEN, http_address, order, states
from support.servers.fleet import (
    FORKED,
    MODEL_NAME,
    ask_all,
    ask_pair,
    asking,
    assert_same,
    at_rest,
    joined,
    metric,
    probing_server,
    tokens,
)
from support.servers.probes import Compared

Start = Callable[..., Any]

TOKENS = 16
SHORT = {"lease_seconds": 4, "stall_seconds": 8, "chunk_bytes": 16384}
PAIR = ("--admin-token", TOKEN)
BY_COST = ("--placement", "auto", *PAIR)
"""Nearly all requests are served by one instance."""
APART = (*BY_COST, "--pause-weight", "100")
"""Most requests are served by a pair, also where prompts pause answers for milliseconds only."""


@pytest.fixture
def pool(launch: Callable[..., None], tiny_model: Path, tmp_path: Path) -> Start:
    """Starts servers of these roles, and for each of `options` a proxy that they ping."""

    def start(*roles: str, options: Sequence[Sequence[str]] = ((),)) -> Any:
        # All on one port, each at an address of its own.
        hosts, port = [f"127.0.0.{1 + number}" for number in range(len(options))], free_ports()
        proxies = [
            ProxyServer(
                discovery_port=port,
                extra_args=[*some, "--discovery", f"{host}:{port}"],
                log_path=tmp_path / f"proxy-{host}.log",
            )
            for host, some in zip(hosts, options, strict=True)
        ]
        servers = [
            probing_server(
                tiny_model,
                role,  # type: ignore[arg-type]
                tmp_path,
                name=name,
                plugins=FORKED,
                proxy=(",".join(hosts), port),
                extra_config=SHORT,
                load_failure_policy="recompute",
            )
            for name, role in zip("abc"[: len(roles)], roles, strict=True)
        ]
        launch(*servers, *proxies)
        for proxy in proxies:
            wait_for(proxy, *roles)
        return servers, *proxies

    return start


def wait_for(proxy: ProxyServer, *roles: str) -> None:
    known(proxy, *(sum(role in ("both", fixed) for role in roles) for fixed in "PD"))


def ask(url: str, prompt: answers.Prompt, streamed: bool = True, **more: Any) -> Answer:
    """A whole answer, or that of a stream, put together."""
    if not streamed:
        return answers.complete(url, MODEL_NAME, prompt, max_tokens=TOKENS, **more)[0]
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": TOKENS, "logprobs": 2, **GREEDY, **more}
    events = client.stream(f"{url}/v1/completions", body)
    return joined([answers.answer_of(choice) for event in events for choice in event["choices"]])


def alone(server: VllmServer, asked: Sequence[answers.Prompt]) -> list[Answer]:
    """What it answers without any other, and without what its prefix cache has of transfers."""
    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(partial(ask, server.base_url, cache_salt="alone"), asked))


def sent(server: VllmServer) -> float:
    return metric(server, "p2pkv_bytes_sent_total")


def prompts(count: int, name: str) -> list[answers.Prompt]:
    """Of several blocks, some of which begin alike."""
    draw = random.Random(name)
    begins = [tokens(100, f"{name} begin {n}") for n in range(max(3, count // 50))]
    return [
        [*draw.choice([[], *begins]), *tokens(draw.randrange(1, 150), f"{name} {n}")] for n in range(count)
    ]


def test_a_pool_of_two_pushes_both_ways_and_answers_as_one_server(pool: Start, tmp_path: Path) -> None:
    (a, b), proxy, *by_cost = pool("both", "both", options=[PAIR, BY_COST, APART])
    asked, named = prompts(20, "a pool of two"), [tokens(150, f"named {n}") for n in range(8)]
    compared = Compared(tmp_path)
    with ThreadPoolExecutor(8) as clients:
        turns = [(a, b) if n % 2 else (b, a) for n in range(len(named))]
        pushed = [clients.submit(ask_pair, *pair, prompt) for pair, prompt in zip(turns, named, strict=True)]
        got = ask_all(proxy.base_url, asked, at_once=6)
        got += [each.result(60) for each in pushed]
    for server in (a, b):
        at_rest(server)
        assert sent(server) > 0, f"{server.name} was never P"
    assert compared.spans(at_least=len(named))
    assert_same(alone(a, [*asked, *named]), got)
    placed_by_cost((a, b), by_cost, tmp_path, 60)


def placed_by_cost(
    pool: Sequence[VllmServer], proxies: Sequence[ProxyServer], probes: Path, requests: int
) -> None:
    """Through two proxies, so many requests have one server's answers; D's blocks are P's."""
    asked, compared = prompts(requests, "placed by cost"), Compared(probes)
    urls, streamed = (
        itertools.cycle(each) for each in ([each.base_url for each in proxies], [True, True, False])
    )
    with ThreadPoolExecutor(12) as clients:
        got = list(clients.map(ask, urls, asked, streamed))
    for server in pool:
        at_rest(server)
    pages = [json.loads(client.get(f"{each.base_url}/status"))["placement"]["ways"] for each in proxies]
    whole, pairs = (sum(page.get(way, 0) for page in pages) for way in ("whole", "pair"))
    assert min(whole, pairs) >= requests // 6, pages
    assert len(compared.spans(at_least=requests // 10)) <= pairs
    assert_same(alone(pool[0], asked), got)


@pytest.mark.long
def test_both_proxies_see_what_the_schedulers_have_to_do(pool: Start) -> None:
    """All requests come through the first one."""
    servers, *proxies = pool("both", "both", options=[BY_COST, BY_COST])
    asked = [tokens(300, f"queued {n}") for n in range(4000)]

    def ask_one(number: int) -> None:
        answers.complete(proxies[0].base_url, MODEL_NAME, asked[number], max_tokens=TOKENS)

    def reported(proxy: ProxyServer, server: VllmServer) -> dict[str, int]:
        listed = json.loads(client.get(f"{proxy.base_url}/instances"))["instances"]
        work = {each["address"]: each["reported"] for each in listed}[http_address(server)]
        gauge = next(
            float(line.split()[-1])
            for line in client.get(f"{proxy.base_url}/metrics").splitlines()
            if line.startswith(
                f'p2pkv_proxy_instance_reported_queued_tokens{{address="{http_address(server)}"'
            )
        )
        return work | {"gauge": gauge}

    def everyone(is_so: Callable[[dict[str, int]], bool]) -> bool:
        return all(is_so(reported(proxy, server)) for proxy in proxies for server in servers)

    wait_until(lambda: everyone(lambda work: work["gauge"] == work["running"] == 0), "idle engines", 30.0)
    busy: set[tuple[str, str]] = set()

    def all_were_busy() -> bool:
        for proxy, server in itertools.product(proxies, servers):
            work = reported(proxy, server)
            assert work["age"] < 2.0
            if work["gauge"] > 0 and work["running"] > 0:
                busy.add((proxy.base_url, server.base_url))
        return len(busy) == 4

    with asking(24, ask_one):
        wait_until(all_were_busy, "queued tokens of each engine at each proxy", 120.0)
    wait_until(lambda: everyone(lambda work: work["gauge"] == work["answers"] == 0), "idle engines", 30.0)


@pytest.mark.long
@pytest.mark.parametrize("roles", [("both", "D"), ("P", "both")], ids="-".join)
def test_beside_a_fixed_p_or_d(pool: Start, tmp_path: Path, roles: tuple[str, str]) -> None:
    (a, b), proxy = pool(*roles)
    asked = prompts(24, "-".join(roles))
    compared = Compared(tmp_path)
    got = ask_all(proxy.base_url, asked, at_once=6)
    for server in (a, b):
        at_rest(server)
    assert compared.spans(at_least=1), "some were pushed"
    assert sent(a) > 0 == sent(b)
    assert_same(alone(a, asked), got)


def under_load(proxy: ProxyServer, servers: Sequence[VllmServer], what: str) -> VllmServer:
    """Eight clients, some of them with streams; something happens to an instance that has work, which is
    returned. Each request is answered as by one server. So many are answered before that the budget of second
    tries, a fifth of the requests of 10 s, has room for all that the instance has under way."""
    asked, got = prompts(2000, what), dict[int, Answer]()

    def ask_one(number: int) -> None:
        got[number] = ask(proxy.base_url, asked[number], streamed=number % 3 > 0)

    with asking(8, ask_one) as one_has_failed:
        answered = lambda at_least: len(got) >= at_least or one_has_failed()  # noqa: E731
        wait_until(lambda: answered(100) and any(map(running, servers)), "work and 100 answers", 120.0)
        victim = max(servers, key=running)
        HAPPENINGS[what](proxy, victim)
        after = len(got) + 40
        wait_until(lambda: answered(after), f"40 answers after it was {what}", 120.0)
    reference = next(each for each in servers if each is not victim)
    ended = sorted(got)
    expected = alone(reference, [asked[number] for number in ended])
    assert_same(expected, [got[number] for number in ended])
    return victim


def running(server: VllmServer) -> float:
    return metric(server, "vllm:num_requests_running")


def drain(proxy: ProxyServer, victim: VllmServer) -> None:
    order(proxy, victim, "drain")
    wait_until(lambda: states(proxy, victim) == ["drained"], "no more work", 60.0)


def end(proxy: ProxyServer, victim: VllmServer) -> None:
    os.kill(victim.pid, signal.SIGTERM)
    wait_until(lambda: not victim.running(), "the end after SIGTERM", 60.0)


HAPPENINGS: dict[str, Callable[[ProxyServer, VllmServer], None]] = {
    "drained": drain,
    "frozen": lambda _, victim: victim.freeze(),
    "stopped": end,
    "killed": lambda _, victim: victim.kill(),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("size", "happen", "options"),
    [
        pytest.param(2, ["frozen", "killed"], PAIR, id="two in pairs"),
        pytest.param(2, ["drained", "frozen", "killed"], APART, id="two by cost, apart"),
        pytest.param(2, ["drained", "frozen", "stopped"], BY_COST, id="two by cost"),
        pytest.param(3, ["drained", "frozen", "killed"], BY_COST, id="three by cost"),
        pytest.param(3, ["frozen", "stopped", "killed"], APART, id="three by cost, apart"),
    ],
)
def test_what_happens_to_one_under_load_no_client_notices(
    pool: Start, size: int, happen: list[str], options: Sequence[str]
) -> None:
    """One after the other: what comes back takes part in what follows."""
    servers, proxy = pool(*["both"] * size, options=[options])
    for what in happen:
        victim = under_load(proxy, servers, what)
        if what == "drained":
            order(proxy, victim, "resume")
        elif what == "frozen":
            victim.thaw()
        else:
            servers.remove(victim)
        wait_for(proxy, *["both"] * len(servers))
        for server in servers:
            at_rest(server, seconds=40.0)
