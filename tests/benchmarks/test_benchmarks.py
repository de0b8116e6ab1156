"""The benchmarks: their clients and statistics, each script from its options to its page, simulations."""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import bench_pair
import bench_proxy
import bench_servers
import clients
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from bench_fleet import FAULTS, OTHERS, simulated
from environments import Unavailable
from pool_simulation import MIXES
from pool_simulation import simulated as pool_simulated

from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv_proxy.routing import POLICIES

# Statistics.


def test_percentiles_are_linear_between_neighbours() -> None:
    assert clients.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert clients.percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert clients.percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        clients.percentile([], 50)


@pytest.mark.parametrize(
    ("degrees", "tabled"), [(1, 12.706), (2, 4.303), (4, 2.776), (5, 2.571), (9, 2.262), (29, 2.045)]
)
def test_t_quantiles_are_those_of_the_tables(degrees: int, tabled: float) -> None:
    assert clients.t_quantile(degrees) == pytest.approx(tabled, abs=0.002)


def test_a_constant_ratio_has_no_spread_and_one_pair_no_interval() -> None:
    ratio, one = clients.paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]), clients.paired_ratio([3.0], [2.0])
    assert (ratio.mean, ratio.low, ratio.high, ratio.pairs) == pytest.approx((2.0, 2.0, 2.0, 3))
    assert one.mean == pytest.approx(1.5) and one.low is one.high is None and "one pair" in str(one)
    for pairs in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="as many pairs"):
            clients.paired_ratio(*pairs)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    covered = 0
    for _ in range(400):
        base = draw.lognormal(sigma=0.5, size=10)
        ratio = clients.paired_ratio(list(base * 1.2 * draw.lognormal(sigma=0.1, size=10)), list(base))
        covered += ratio.low <= 1.2 <= ratio.high
    assert 360 <= covered <= 396


# Clients.


def test_mixed_requests_are_the_same_for_the_same_seed() -> None:
    one, same, other = (clients.mixed(20, 1024, "m", 4, seed) for seed in (1, 1, 2))
    assert [each.prompt for each in one] == [each.prompt for each in same]
    assert [each.prompt for each in one] != [each.prompt for each in other]
    assert {len(each.prompt) for each in one} <= {64, 256, 1000}


def test_a_closed_loop_keeps_its_clients_busy_and_counts_what_failed() -> None:
    under_way, most = 0, 0

    async def ask(one: clients.Asking) -> clients.Taken:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(3):
            await asyncio.sleep(0)
        under_way -= 1
        if len(one.prompt) == 3:
            raise clients.Failed("the third does not end well")
        return clients.Taken(1.0, 2.0)

    requests = [clients.asking(length, 1024, "m", draw=random.Random(0)) for length in range(1, 9)]
    loaded = asyncio.run(clients.closed_loop(ask, requests, 4, 30.0))
    assert most == 4
    assert len(loaded.taken) == 7
    assert loaded.failed == ["the third does not end well"]


async def test_a_request_that_hangs_is_a_sentence() -> None:
    with pytest.raises(clients.Failed, match="not answered within 0 s"):
        await clients.within(0.01, asyncio.Event().wait())


@asynccontextmanager
async def server(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as made:
        yield str(made.make_url("")).rstrip("/")


async def _stream(request: web.Request, events: list[str]) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {event}\n\n".encode())
    return response


async def test_a_pair_is_asked_in_turn() -> None:
    bodies: list[dict[str, Any]] = []

    async def p(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({})

    async def d(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await _stream(request, ["{}", "{}", "[DONE]"])

    one = clients.Asking([5, 6], "m", 2, {"X-Request-Id": "r"})
    async with server(p) as to_p, server(d) as to_d, clients.Asker() as asker:
        taken = await asker.in_turn(to_p, to_d, one)
    assert bodies[0]["max_tokens"] == 1 and "stream" not in bodies[0]
    assert bodies[1]["max_tokens"] == 2 and bodies[1]["stream"]
    assert taken.first == pytest.approx(taken.p + taken.d)
    assert len(taken.gaps) == 1


@pytest.mark.parametrize(
    ("events", "sentence"), [(["[DONE]"], "without a token"), (['{"error": "no KV"}', "[DONE]"], "no KV")]
)
async def test_an_answer_without_tokens_or_with_an_error_has_failed(events: list[str], sentence: str) -> None:
    async def p(_request: web.Request) -> web.Response:
        return web.json_response({})

    async def d(request: web.Request) -> web.StreamResponse:
        return await _stream(request, events)

    async with server(p) as to_p, server(d) as to_d, clients.Asker() as asker:
        with pytest.raises(clients.Failed, match=sentence):
            await asker.at_once(to_p, to_d, clients.Asking([5], "m"))


# bench_pair.py, with servers that compute nothing in place of vLLM.


FAKE = str(Path(__file__).with_name("fake_vllm.py"))
FEW = [
    *("--lengths", "16", "32", "--rounds", "2", "--clients", "2", "--requests", "4"),
    *("--settle", "0.01", "--deadline", "20"),
]


class FakeServer(VllmServer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command = [sys.executable, FAKE, str(self.http_port)]


class FakeProxy(ProxyServer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.command = [sys.executable, FAKE, str(self.http_port)]


def test_each_system_has_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_servers, "VllmServer", FakeServer)
    monkeypatch.setattr(bench_pair, "ProxyServer", FakeProxy)
    monkeypatch.setattr(bench_pair, "ensure_model", lambda _model: tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_pair.py", "--out", str(tmp_path), *FEW])
    assert bench_pair.main() == 0
    found = json.loads((tmp_path / "pair.json").read_text())
    asked = [(row["system"], row["tokens"], row["round"]) for row in found["single"]]
    alone = ("plain", "at once", "P first", "proxy")
    assert sorted(asked) == sorted((name, n, k) for name in alone for n in (16, 32) for k in (1, 2))
    assert {row["system"]: len(row["first"]) for row in found["load"]} == dict.fromkeys(bench_pair.SYSTEMS, 4)
    rows = [line for line in (tmp_path / "pair.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * 4 + 1 + 5 and all(row.endswith("| 0 |") for row in rows[-5:])


def test_expected_is_the_first_token_and_a_step() -> None:
    plain = {"system": "plain", "tokens": 16, "gaps": [0.25, 0.5, 0.25]}
    records = [{**plain, "round": 1, "first": 2.0}, {**plain, "round": 2, "first": 3.0}]
    assert bench_pair.expected(records, 16) == {1: 2.25, 2: 3.25}


# bench_proxy.py, without vllm-router.


@pytest.mark.long
def test_from_the_options_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(folder: Path, *requirements: str, ours: bool = False) -> Path:
        raise Unavailable(f"no {requirements[0]} here")

    options = ["--rounds", "2", "--seconds", "0.3", "--chunks", "4", "--pace", "1", "--connections", "4"]
    options += ["--rate", "50", "--instances", "10", "--logs", str(tmp_path / "logs"), "--out", str(tmp_path)]
    monkeypatch.setattr(bench_proxy, "environment", none)
    monkeypatch.setattr(sys, "argv", ["bench_proxy.py", *options, "--note", "Only a test."])
    assert bench_proxy.main() == 0
    found = json.loads((tmp_path / "proxy.json").read_text())
    assert [*found["routers"]] == ["p2pkv-proxy", "p2pkv-proxy, 10 instances"]
    for figures in found["routers"].values():
        assert figures.keys() == bench_proxy.FIGURES.keys()
        assert all(len(values) == 2 for values in figures.values())
        # Of the other figures, a small or even a negative one may come out of so few requests.
        assert min(figures["requests"] + figures["cpu_request"]) > 0
    page = (tmp_path / "proxy.md").read_text()
    assert "Only a test." in page and "no vllm-router==0.1.17 here" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in rows[1:]] == [
        *("| p2pkv-proxy", "| p2pkv-proxy, 10 instances", "| vllm-router")
    ]
    assert len({line.count("|") for line in rows}) == 1
    assert bench_proxy.quantile([3.0, 1.0, 2.0], 0.99) == 3.0


# The simulated fleet, and the simulated pool.


SIZE = 20


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Of conversations: each turn begins with what was before."""
    dice, path = random.Random(5), tmp_path / "trace.jsonl"
    lines = []
    for talk in range(200):
        at, blocks = dice.uniform(0, 60_000), [talk * 100]
        for turn in range(dice.randrange(1, 6)):
            blocks = [*blocks, *(talk * 100 + 10 * turn + each for each in range(1, 6))]
            length = 512 * len(blocks) - dice.randrange(512)
            lines.append(
                {"timestamp": at, "input_length": length, "output_length": 50, "hash_ids": list(blocks)}
            )
            at += dice.uniform(1000, 20_000)
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def run(trace: Path, policy: str, fault: str | None = None) -> dict[str, Any]:
    args = argparse.Namespace(seconds=20.0, span=60.0, seed=1)
    found = simulated(trace, SIZE, policy, fault, args)
    del found["CPU, us a request"]
    return found


@pytest.mark.parametrize("policy", [*POLICIES, *OTHERS])
def test_every_request_is_answered(trace: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench_fleet.POLICIES", POLICIES | OTHERS)
    monkeypatch.setattr("p2pkv_proxy.routing.POLICIES", POLICIES | OTHERS)
    found = run(trace, policy)
    assert found["asked"] > 100 and found["not answered"] == 0 and found["why"] == {}
    assert 0 < found["first token, p50"] <= found["first token, p99"]


def test_a_policy_that_knows_prefixes_has_more_hits_and_runs_repeat(trace: Path) -> None:
    found = run(trace, "prefix_aware")
    assert found == run(trace, "prefix_aware")
    assert found["hits"] > 1.5 * run(trace, "round_robin")["hits"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_fault_leaves_is_answered(trace: Path, fault: str) -> None:
    assert run(trace, "least_loaded", fault)["not answered"] == 0


# The proxy's placement in front of modelled engines, in virtual time: what `auto` is for.


@cache
def figures(system: str, mix: str, weight: float = 0.1, noise: bool = False) -> dict[str, float]:
    return pool_simulated(system, mix, seconds=80.0, weight=weight, noise=noise)[0]


@pytest.mark.parametrize("mix", MIXES)
def test_a_pool_serves_as_many_requests_as_plain_servers_and_more_than_fixed_roles(mix: str) -> None:
    """As first tokens are predicted: with noise instead of predictions figures get worse."""
    auto, plain, fixed = (figures(system, mix) for system in ("auto", "plain", "fixed"))
    assert auto["rps"] >= 0.97 * plain["rps"] and auto["rps"] > 1.1 * fixed["rps"]
    assert auto["ttft50"] <= 1.25 * plain["ttft50"] and auto["ttft99"] <= 1.1 * plain["ttft99"]
    assert auto["error"] < 0.25
    noise = figures("auto", mix, noise=True)
    assert noise["rps"] < 0.99 * auto["rps"] and noise["ttft99"] > auto["ttft99"]


def test_a_large_weight_of_pauses_keeps_prompts_and_answers_apart() -> None:
    apart, plain = figures("auto", "mixed", weight=10.0), figures("plain", "mixed")
    assert apart["gap99"] < 0.5 * plain["gap99"]
    assert apart["rps"] >= 0.98 * figures("fixed", "mixed")["rps"]


def test_one_engine_of_short_steps_halves_pauses_at_the_throughput_of_plain_servers() -> None:
    """Placement by cost has it decode nearly all answers, and the other one compute half of the prompts."""
    plain, pool = (
        pool_simulated(system, "mixed", seconds=120.0, chunks=chunks, warm=40.0)[0]
        for system, chunks in (("plain", (256,)), ("auto", (256, 72)))
    )
    assert pool["rps"] >= 0.97 * plain["rps"]
    assert pool["gap99"] <= 0.5 * plain["gap99"]


def test_four_proxies_in_front_of_long_queues_place_better_where_engines_report() -> None:
    one, blind, seeing = (
        pool_simulated(
            "auto", "very long prompts", size=8, rate=4.5, seconds=120.0, warm=30.0, seed=3, **how
        )[0]
        for how in ({}, {"proxies": 4}, {"proxies": 4, "reports": True})
    )
    assert seeing["ttft99"] < 0.85 * blind["ttft99"] and seeing["ttft50"] < 0.9 * blind["ttft50"]
    assert seeing["error"] < 0.8 * blind["error"] and one["ttft99"] < seeing["ttft99"]


def test_runs_repeat() -> None:
    first, again = (pool_simulated("auto", "mixed", seconds=20.0)[0] for _ in range(2))
    assert first == again
