"""Real servers whose engine core alone is stopped, paused by vLLM's /pause, or left without its HTTP server.

Every request ends, new ones go elsewhere, and what was stopped or paused is as before when it goes on.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_support import MODEL_NAME, SETTINGS, assert_same, at_rest, metric, paired_headers, tokens

from p2pkv.control.endpoint import inspect
from p2pkv.demo import answers, client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.pairing import Address

pytestmark = pytest.mark.long

LEASE, STALL = 5.0, 8.0
PROXYS_LEASE = 10.0
"""Its least: three lost pings and a little."""
REQUESTS = 12
LENGTH, TOKENS = 300, 48
# Whoever computes a prompt again, or decodes on, needs two cores to itself for this long.
WORK_SECONDS = 30.0
SETTLE_SECONDS = 10 * LEASE + 20.0
MODES = ("abort", "wait", "keep")


@dataclass
class Trio:
    """A P and two D's, and their proxy."""

    p: VllmServer
    d: VllmServer
    other: VllmServer
    proxy: ProxyServer

    @property
    def servers(self) -> tuple[VllmServer, ...]:
        return self.p, self.d, self.other

    def ask(self, prompt: list[int], max_tokens: int = TOKENS) -> tuple[Answer | Exception, float]:
        """The answer or the error, and when it came."""
        try:
            answer = answers.complete(self.proxy.base_url, MODEL_NAME, prompt, max_tokens=max_tokens)[0]
        except (client.RequestFailed, http.client.HTTPException, OSError) as error:
            return error, time.monotonic()
        return answer, time.monotonic()

    def states(self) -> dict[str, str]:
        """What the proxy thinks of each, by its HTTP address."""
        listed = json.loads(client.get(f"{self.proxy.base_url}/instances"))["instances"]
        return {each["address"]: each["state"] for each in listed}

    def state(self, server: VllmServer) -> str:
        return self.states().get(http_address(server), "gone")

    def chosen(self, server: VllmServer) -> int:
        """How many requests the proxy has given to it, with a partner."""
        pairs = json.loads(client.get(f"{self.proxy.base_url}/status"))["pairs"]
        mine = http_address(server)
        return sum(each["total"] for each in pairs if mine in (each["prefill"], each["decode"]))

    def ready(self) -> bool:
        return [self.state(each) for each in self.servers] == ["ready"] * 3

    def trusted(self) -> bool:
        """Whether all three are ready. The proxy tries an instance that has failed with one request."""
        if not self.ready():
            self.ask(tokens(LENGTH, "a trial"))
        return self.ready()

    def is_as_before(self, number: int | str) -> None:
        """All are served as at the start, by KV that moves, and nothing is held."""
        wait_until(self.trusted, "all three", 60.0)
        prompts = [tokens(LENGTH, f"as before {number} {each}") for each in range(6)]
        expected = self.expected(prompts)
        loaded = [metric(each, "p2pkv_transfers_loaded_total") for each in (self.d, self.other)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            got = [what for what, _ in pool.map(self.ask, prompts)]
        assert [each for each in got if isinstance(each, Exception)] == []
        assert_same(expected, [each for each in got if isinstance(each, Answer)])
        now = [metric(each, "p2pkv_transfers_loaded_total") for each in (self.d, self.other)]
        assert sum(now) - sum(loaded) == len(prompts)
        for each in self.servers:
            at_rest(each, seconds=SETTLE_SECONDS)

    def expected(self, prompts: list[list[int]]) -> list[Answer]:
        """What one D answers by itself."""
        ask = [answers.complete(self.other.base_url, MODEL_NAME, each, max_tokens=TOKENS) for each in prompts]
        return [each[0] for each in ask]


def http_address(server: VllmServer) -> str:
    return server.base_url.removeprefix("http://")


def core_of(server: VllmServer) -> psutil.Process:
    """The process of vLLM's engine core, which is neither the HTTP server's nor a worker's."""
    children = psutil.Process(server.pid).children(recursive=True)
    (core,) = (each for each in children if "EngineCore" in " ".join(each.cmdline()) + each.name())
    (worker,) = (each for each in children if "Worker" in " ".join(each.cmdline()) + each.name())
    assert worker.ppid() == core.pid and core.ppid() == server.pid
    return core


def engine(server: VllmServer) -> str:
    """What its rank says of its engine."""
    return str(inspect(Address.parse(server.zmq_address))["engine"])


def post(server: VllmServer, path: str, timeout: float = 120.0) -> float:
    """Seconds that it took to answer 200."""
    began = time.monotonic()
    request = urllib.request.Request(server.base_url + path, method="POST")
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        assert answer.status == 200
    return time.monotonic() - began


@pytest.fixture(scope="module")
def trio(fleet_keeper: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("engine-cores")
    proxy = ProxyServer(log_path=logs / "proxy.log", extra_args=["--lease-seconds", f"{PROXYS_LEASE:g}"])

    def server(role: str, name: str) -> VllmServer:
        return VllmServer(
            tiny_model,
            role=role,  # type: ignore[arg-type]
            proxy=proxy.discovery,
            # Without a prefix cache every prompt is computed by P, and moved as a whole, each time.
            extra_args=[*SETTINGS, "--no-enable-prefix-caching"],
            extra_config={"lease_seconds": LEASE, "stall_seconds": STALL, "chunk_bytes": 16384},
            load_failure_policy="recompute" if role == "D" else None,
            env={"VLLM_SERVER_DEV_MODE": "1"},
            log_path=logs / f"{name}.log",
            name=name,
        )

    with proxy, server("P", "P") as p, server("D", "D") as d, server("D", "D2") as other:
        made = Trio(p, d, other, proxy)
        for each in (*made.servers, proxy):
            each.wait_ready()
        yield made


def begin(trio: Trio, pool: ThreadPoolExecutor, prompts: list[list[int]]) -> list[Future[Any]]:
    return [pool.submit(trio.ask, prompt) for prompt in prompts]


def stop_core(server: VllmServer, moment: str, started: float) -> psutil.Process:
    """Stop its engine core: before any request comes, or while it works on some."""
    if moment == "at work":
        name = "vllm:prompt_tokens_total" if server.role == "P" else "vllm:generation_tokens_total"
        wait_until(lambda: metric(server, name) > started, "its work", 60.0)
    core = core_of(server)
    core.suspend()
    return core


@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", ["idle", "at work"])
@pytest.mark.parametrize("who", ["P", "D"])
def test_of_a_stopped_engine_core_all_requests_end_and_new_ones_go_elsewhere(
    trio: Trio, servers_on_failure: Callable[..., None], who: str, moment: str
) -> None:
    servers_on_failure(*trio.servers, trio.proxy)
    wait_until(trio.ready, "all three", 200.0)
    victim = trio.p if who == "P" else trio.d
    prompts = [tokens(LENGTH, f"stopped {who} {moment} {number}") for number in range(REQUESTS)]
    expected = trio.expected(prompts)
    name = "vllm:prompt_tokens_total" if who == "P" else "vllm:generation_tokens_total"
    before = metric(victim, name)
    with ThreadPoolExecutor(REQUESTS) as pool:
        if moment == "at work":
            asked = begin(trio, pool, prompts)
        core = stop_core(victim, moment, before)
        struck = time.monotonic()
        try:
            if moment == "idle":
                asked = begin(trio, pool, prompts)
            wait_until(lambda: trio.state(victim) in ("silent", "gone"), "the overdue ping", 20.0)
            given = trio.chosen(victim)
            late, _ = trio.ask(prompts[0])
            assert isinstance(late, Answer)
            assert_same(expected[:1], [late])
            assert trio.chosen(victim) == given, "a new request went to the stopped instance"
            ended = [each.result(200.0) for each in asked]
            failures = [what for what, _ in ended if isinstance(what, Exception)]
            bound = STALL + LEASE if who == "P" else 4.0 + PROXYS_LEASE + 5.0
            slowest = max(when for _, when in ended) - struck
            assert slowest < bound + WORK_SECONDS, f"the last request ended after {slowest:.0f} s"
            print(f"{who} {moment}: the last of {REQUESTS} after {slowest:.1f} s, {len(failures)} failed")
            assert failures == []
            assert_same(expected, [what for what, _ in ended if isinstance(what, Answer)])
            wait_until(lambda: engine(victim) != "runs", "its rank's word", STALL + LEASE)
            assert "no beat" in engine(victim)
            for each in trio.servers:
                if each is not victim:
                    at_rest(each, seconds=SETTLE_SECONDS)
        finally:
            core.resume()
    trio.is_as_before(f"stopped {who} {moment}")
    assert engine(victim) == "runs"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("who", ["P", "D"])
def test_a_pause_under_load_returns_and_all_requests_end_or_go_on_after_it(
    trio: Trio, servers_on_failure: Callable[..., None], who: str, mode: str
) -> None:
    servers_on_failure(*trio.servers, trio.proxy)
    wait_until(trio.ready, "all three", 200.0)
    victim = trio.p if who == "P" else trio.d
    prompts = [tokens(LENGTH, f"paused {who} {mode} {number}") for number in range(REQUESTS)]
    expected = trio.expected(prompts)
    name = "vllm:prompt_tokens_total" if who == "P" else "vllm:generation_tokens_total"
    before = metric(victim, name)
    with ThreadPoolExecutor(REQUESTS) as pool:
        asked = begin(trio, pool, prompts)
        wait_until(lambda: metric(victim, name) > before, "its work", 60.0)
        took = post(victim, f"/pause?mode={mode}")
        print(f"{who} {mode}: /pause returned after {took:.1f} s")
        assert took < STALL + LEASE + WORK_SECONDS
        wait_until(lambda: trio.state(victim) == "engine_paused", "the proxy's notice", 10.0)
        assert engine(victim).startswith(("paused", "its engine core has been paused"))
        given = trio.chosen(victim)
        during, _ = trio.ask(prompts[0])
        assert isinstance(during, Answer)
        assert_same(expected[:1], [during])
        assert trio.chosen(victim) == given, "a new request went to the paused instance"
        post(victim, "/resume")
        ended = [each.result(120.0)[0] for each in asked]
    assert [what for what in ended if isinstance(what, Exception)] == []
    assert_same(expected, [what for what in ended if isinstance(what, Answer)])
    trio.is_as_before(f"paused {who} {mode}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_a_pause_of_p_does_not_wait_for_a_d_that_is_paused(
    trio: Trio, servers_on_failure: Callable[..., None], mode: str
) -> None:
    """D's engine thread goes on asking for prompts that D's scheduler will not admit."""
    servers_on_failure(*trio.servers, trio.proxy)
    wait_until(trio.ready, "all three", 200.0)
    prompts = [tokens(LENGTH, f"both paused {mode} {number}") for number in range(4)]
    expected = trio.expected(prompts)
    headers = [paired_headers(trio.p, trio.d) for _ in prompts]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        on_d = [pool.submit(complete, trio.d, *each, TOKENS) for each in zip(prompts, headers, strict=True)]
        wait_until(lambda: held(trio.d, "requests") == len(prompts), "D's requests", 30.0)
        post(trio.d, "/pause?mode=keep")
        on_p = [pool.submit(complete, trio.p, *each, 1) for each in zip(prompts, headers, strict=True)]
        for each in on_p:
            each.result(60.0)
        waiting = held(trio.p, "prompts_held")
        assert waiting == len(prompts)
        took = post(trio.p, f"/pause?mode={mode}")
        print(f"{mode}: P held {waiting} prompts for a paused D, and /pause returned after {took:.1f} s")
        assert took < LEASE + 5.0
        post(trio.p, "/resume")
        post(trio.d, "/resume")
        got = [each.result(120.0) for each in on_d]
    assert_same(expected, got)
    trio.is_as_before(f"both paused {mode}")


def held(server: VllmServer, name: str) -> int:
    return int(inspect(Address.parse(server.zmq_address))[name])


def complete(server: VllmServer, prompt: list[int], headers: dict[str, str], max_tokens: int) -> Answer:
    return answers.complete(server.base_url, MODEL_NAME, prompt, max_tokens=max_tokens, headers=headers)[0]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", ["P", "D"])
def test_an_engine_whose_http_server_was_killed_is_announced_no_more_and_holds_nothing(
    trio: Trio, servers_on_failure: Callable[..., None], who: str
) -> None:
    servers_on_failure(*trio.servers, trio.proxy)
    wait_until(trio.ready, "all three", 200.0)
    victim = trio.p if who == "P" else trio.d
    core = core_of(victim)
    prompts = [tokens(LENGTH, f"orphan {who} {number}") for number in range(REQUESTS)]
    expected = trio.expected(prompts)
    name = "vllm:prompt_tokens_total" if who == "P" else "vllm:generation_tokens_total"
    before = metric(victim, name)
    try:
        with ThreadPoolExecutor(REQUESTS) as pool:
            asked = begin(trio, pool, prompts)
            wait_until(lambda: metric(victim, name) > before, "its work", 60.0)
            psutil.Process(victim.pid).kill()
            ended = [each.result(120.0)[0] for each in asked]
        assert [what for what in ended if isinstance(what, Exception)] == []
        assert_same(expected, [what for what in ended if isinstance(what, Answer)])
        wait_until(lambda: trio.state(victim) == "gone", "the end of its pings", 60.0)
        assert "HTTP server" in engine(victim)
        assert core.is_running() and core.status() != psutil.STATUS_ZOMBIE, "vLLM has ended it by itself"
        log = victim.log_path.read_text(errors="replace")
        assert "gives up what it holds" in log and "is not announced any more" in log
        for each in trio.servers:
            if each is not victim:
                at_rest(each, seconds=SETTLE_SECONDS)
    finally:
        victim.kill()
        victim.start()
        victim.wait_ready()
    trio.is_as_before(f"orphan {who}")
