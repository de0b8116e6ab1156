"""One engine of a data-parallel server is killed, frozen or drained, with P of two engines and D of two.

Every request is answered, other servers go on, and what was frozen or drained comes back. The neighbour of a
frozen engine goes on with a dense model; with experts vLLM computes in lockstep, so it stops too.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from data_parallel_support import answered
from tiny_moe import TinyMoe
from vllm_support import (
    MODEL_NAME,
    SETTINGS,
    assert_same,
    at_rest,
    needs_cpu_build,
    plugin_environment,
    tokens,
)

from p2pkv.demo import answers, client
from p2pkv.demo.answers import Answer
from p2pkv.demo.processes import wait_until
from p2pkv.demo.servers import ProxyServer, VllmServer
from p2pkv.demo.tiny_model import ensure_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

LEASE, STALL = 5.0, 8.0
PROXYS_LEASE = 10.0
REQUESTS = 12
LENGTH, TOKENS = 300, 48
SETTLE_SECONDS = 10 * LEASE + 20.0
ENGINES = 2
TOKEN = "an-admins-token"


@dataclass
class Deployment:
    """P and D of two engines each, another D of one, and their proxy.

    Attributes:
        lockstep: whether the engines of one server compute in lockstep, as vLLM does with experts.
    """

    p: VllmServer
    d: VllmServer
    other: VllmServer
    proxy: ProxyServer
    lockstep: bool

    @property
    def servers(self) -> tuple[VllmServer, ...]:
        return self.p, self.d, self.other

    def ask(self, prompt: list[int]) -> Answer | Exception:
        try:
            return answers.complete(self.proxy.base_url, MODEL_NAME, prompt, max_tokens=TOKENS)[0]
        except (client.RequestFailed, http.client.HTTPException, OSError) as error:
            return error

    def expected(self, prompts: list[list[int]]) -> list[Answer]:
        """What one D answers by itself."""
        return [
            answers.complete(self.other.base_url, MODEL_NAME, each, max_tokens=TOKENS)[0] for each in prompts
        ]

    def states(self, server: VllmServer) -> list[str]:
        """The states of its engines on the proxy, by rank; without those that it has forgotten."""
        mine = server.base_url.removeprefix("http://")
        listed = json.loads(client.get(f"{self.proxy.base_url}/instances"))["instances"]
        return [
            each["state"]
            for each in sorted(listed, key=lambda each: each.get("rank") or 0)
            if each["address"] == mine
        ]

    def ready(self) -> bool:
        return [self.states(each) for each in self.servers] == [
            ["ready"] * ENGINES,
            ["ready"] * ENGINES,
            ["ready"],
        ]

    def trusted(self) -> bool:
        """Whether all engines are ready. The proxy tries one that has failed with one request."""
        if not self.ready():
            self.ask(tokens(LENGTH, "a trial"))
        return self.ready()

    def are_answered(
        self, prompts: list[list[int]], expected: list[Answer], during: Callable[[], None]
    ) -> None:
        """All at once, and `during` when they have begun."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [pool.submit(self.ask, prompt) for prompt in prompts]
            during()
            got = [each.result(200.0) for each in asked]
        assert [each for each in got if isinstance(each, Exception)] == []
        assert_same(expected, [each for each in got if isinstance(each, Answer)])

    def is_as_before(self, seed: str) -> None:
        """Every engine takes requests again, KV moves for all, and nothing is held."""
        wait_until(self.trusted, "all engines", 120.0)
        prompts = [tokens(LENGTH, f"as before {seed} {number}") for number in range(REQUESTS)]
        expected = self.expected(prompts)
        before, loaded = [answered(each.base_url) for each in (self.p, self.d)], self.loaded()
        self.are_answered(prompts, expected, lambda: None)
        assert self.loaded() - loaded == len(prompts)
        for server, then in zip((self.p, self.d), before, strict=True):
            grown = {
                engine: count - then.get(engine, 0.0) for engine, count in answered(server.base_url).items()
            }
            assert len(grown) == ENGINES and min(grown.values()) > 0, grown
        for each in self.servers:
            self.rests(each)

    def order(self, server: VllmServer, what: str) -> None:
        """Drain or resume all engines of this HTTP server."""
        url = f"{self.proxy.base_url}/instances/{server.base_url.removeprefix('http://')}/{what}"
        client.post(url, {}, headers={"Authorization": f"Bearer {TOKEN}"})

    def loaded(self) -> float:
        return sum(metric(each, "p2pkv_transfers_loaded_total") for each in (self.d, self.other))

    def rests(self, server: VllmServer) -> None:
        at_rest(server, 1 if server is self.other else ENGINES, seconds=SETTLE_SECONDS)


def metric(server: VllmServer, name: str) -> float:
    return client.metrics(server.base_url).get(name, 0.0)


def cores(server: VllmServer) -> list[psutil.Process]:
    """The processes of its engines, by rank."""
    named = {
        name: each
        for each in psutil.Process(server.pid).children(recursive=True)
        if "EngineCore_DP" in (name := " ".join(each.cmdline()) or each.name())
    }
    assert len(named) == ENGINES, named
    return [named[name] for name in sorted(named)]


def progress(server: VllmServer) -> str:
    """The counter of what it computes."""
    return "vllm:prompt_tokens_total" if server.role == "P" else "vllm:generation_tokens_total"


@pytest.fixture(scope="module", params=["dense", "experts"])
def deployment(
    request: pytest.FixtureRequest,
    fleet_keeper: Any,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Deployment]:
    fleet_keeper.stop()
    logs = tmp_path_factory.mktemp("data-parallel-faults")
    lockstep, model, env = request.param == "experts", tiny_model, dict[str, str]()
    if lockstep:
        needs_cpu_build()
        model, env = ensure_model(TinyMoe(), logs), plugin_environment("moe_dp")
    proxy = ProxyServer(
        prefill=ENGINES,
        log_path=logs / "proxy.log",
        extra_args=["--lease-seconds", f"{PROXYS_LEASE:g}", "--decode-policy", "round_robin"],
        env={"P2PKV_PROXY_ADMIN_TOKEN": TOKEN},
    )

    def server(role: str, name: str, engines: int = ENGINES) -> VllmServer:
        return VllmServer(
            model,
            role=role,  # type: ignore[arg-type]
            ranks=engines,
            proxy=proxy.discovery,
            # Without a prefix cache every prompt is computed by P, and moved as a whole, each time.
            extra_args=[
                *SETTINGS,
                *("--no-enable-prefix-caching", "--dtype", "float32", "--max-model-len", "1024"),
                *(("--data-parallel-size", str(engines)) if engines > 1 else ()),
            ],
            extra_config={"lease_seconds": LEASE, "stall_seconds": STALL, "chunk_bytes": 16384},
            env=env,
            load_failure_policy="recompute" if role == "D" else None,
            log_path=logs / f"{name}.log",
            name=name,
        )

    with proxy, server("P", "P") as p, server("D", "D") as d, server("D", "other", 1) as other:
        made = Deployment(p, d, other, proxy, lockstep)
        for each in (*made.servers, proxy):
            each.wait_ready()
        wait_until(made.ready, "all engines", 90.0)
        yield made


def prompts_of(seed: str) -> list[list[int]]:
    return [tokens(LENGTH, f"{seed} {number}") for number in range(REQUESTS)]


@pytest.mark.parametrize("rank", range(ENGINES))
@pytest.mark.parametrize("who", ["P", "D"])
def test_one_engine_is_frozen(
    deployment: Deployment, servers_on_failure: Callable[..., None], who: str, rank: int
) -> None:
    servers_on_failure(*deployment.servers, deployment.proxy)
    wait_until(deployment.trusted, "all engines", 200.0)
    victim, survivor = (deployment.p, deployment.d) if who == "P" else (deployment.d, deployment.p)
    prompts = prompts_of(f"frozen {who} {rank}")
    expected = deployment.expected(prompts)
    name, before = progress(victim), metric(victim, progress(victim))
    core = cores(victim)[rank]

    def freeze() -> None:
        wait_until(lambda: metric(victim, name) > before, "its work", 60.0)
        core.suspend()
        wait_until(
            lambda: deployment.states(victim).count("ready") < ENGINES, "an engine that is silent", 30.0
        )

    try:
        deployment.are_answered(prompts, expected, freeze)
        if deployment.lockstep:
            wait_until(lambda: "ready" not in deployment.states(victim), "a group that is silent", 30.0)
        then, more = answered(victim.base_url), prompts_of(f"without {who} {rank}")
        deployment.are_answered(more, deployment.expected(more), lambda: None)
        served = {
            engine for engine, count in answered(victim.base_url).items() if count > then.get(engine, 0.0)
        }
        assert served == (set() if deployment.lockstep else {str(1 - rank)})
        deployment.rests(survivor)
    finally:
        core.resume()
    deployment.is_as_before(f"frozen {who} {rank}")


@pytest.mark.parametrize("who", ["P", "D"])
def test_a_server_of_two_engines_is_drained_and_resumed(
    deployment: Deployment, servers_on_failure: Callable[..., None], who: str
) -> None:
    """A drain is the HTTP server's: of all its engines."""
    servers_on_failure(*deployment.servers, deployment.proxy)
    wait_until(deployment.trusted, "all engines", 200.0)
    victim = deployment.p if who == "P" else deployment.d
    prompts = prompts_of(f"drained {who}")
    expected = deployment.expected(prompts)
    name, before = progress(victim), metric(victim, progress(victim))

    def drain() -> None:
        wait_until(lambda: metric(victim, name) > before, "its work", 60.0)
        deployment.order(victim, "drain")

    deployment.are_answered(prompts, expected, drain)
    wait_until(lambda: deployment.states(victim) == ["drained"] * ENGINES, "both drained", 60.0)
    deployment.rests(victim)
    then, more = answered(victim.base_url), prompts_of(f"while {who} is drained")
    deployment.are_answered(more, deployment.expected(more), lambda: None)
    assert answered(victim.base_url) == then, "a drained engine got a request"
    deployment.order(victim, "resume")
    deployment.is_as_before(f"drained {who}")


@pytest.mark.parametrize("rank", range(ENGINES))
@pytest.mark.parametrize("who", ["P", "D"])
def test_one_engine_is_killed(
    deployment: Deployment, servers_on_failure: Callable[..., None], who: str, rank: int
) -> None:
    """vLLM ends the whole server then; others answer."""
    servers_on_failure(*deployment.servers, deployment.proxy)
    wait_until(deployment.trusted, "all engines", 200.0)
    victim, survivor = (deployment.p, deployment.d) if who == "P" else (deployment.d, deployment.p)
    prompts = prompts_of(f"killed {who} {rank}")
    expected = deployment.expected(prompts)
    name, before = progress(victim), metric(victim, progress(victim))

    def kill() -> None:
        wait_until(lambda: metric(victim, name) > before, "its work", 60.0)
        cores(victim)[rank].kill()

    try:
        deployment.are_answered(prompts, expected, kill)
        wait_until(lambda: not victim.running(), "the end of the whole server", 60.0)
        more = prompts_of(f"after the end of {who} {rank}")
        deployment.are_answered(more, deployment.expected(more), lambda: None)
        for each in (survivor, deployment.other):
            deployment.rests(each)
    finally:
        victim.kill()
        victim.start()
        victim.wait_ready()
    deployment.is_as_before(f"killed {who} {rank}")
